"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from linnet_export import text
from linnet_export.exported import Progress

# Piped output gets a line at most this often (seconds): enough to see that it lives, not enough to fill a log.
LINE_INTERVAL = 5.0


@contextlib.contextmanager
def shown(label: str) -> Iterator[Progress]:
    """Gives a function to report (done, total) bytes to, from any thread."""
    if sys.stderr.isatty():
        with _bar(label) as report:
            yield report
    else:
        yield _lines(label)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function to report (what is done, how much, of how much) to; 0 of 0 where that is not known."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
    else:
        yield _stage_lines()


def _stage_lines() -> Callable[[str, int, int], None]:
    last, before = 0.0, ""

    def report(what: str, done: int, total: int) -> None:
        nonlocal last, before
        now = time.monotonic()
        if what != before or (now - last >= LINE_INTERVAL and done < total):
            last, before = now, what
            print(f"{what}{f': {done * 100 // total} %' if done and total else ''}", file=sys.stderr, flush=True)

    return report


def _lines(label: str) -> Progress:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_INTERVAL and done < total:
            last = now
            print(f"{label}: {done * 100 // total} % of {text.size(total)}", file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
