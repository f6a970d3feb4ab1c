"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator

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
