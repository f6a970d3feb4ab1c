"""The errors that a user can cause or meet.

    ExportError            anything below; the command line prints it and exits with 1
      InputError           the model is missing, malformed or contradicts itself
      UnsupportedError     the model is well-formed, but the target cannot represent it
      OutputError          the output exists, or cannot be written

Each problem is one line: what was found, what is needed and, where there is one, the remedy.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import NoReturn


class ExportError(Exception):
    """One or more problems, all found before anything was written."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class InputError(ExportError):
    """The model is missing, malformed or contradicts itself."""


class UnsupportedError(ExportError):
    """The model is well-formed, but the target cannot represent it."""


class OutputError(ExportError):
    """The output exists, or cannot be written."""


class Problems:
    """Collects problems, so that a user sees all of them at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Records one problem (the same line twice counts once)."""
        if line not in self.lines:
            self.lines.append(line)

    def take(self, error: ExportError) -> None:
        """Records the problems of an error that was caught."""
        for line in error.problems:
            self.add(line)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Records the problems of an InputError that the block raises, and goes on after the block."""
        try:
            yield
        except InputError as error:
            self.take(error)

    def fail(self, line: str | None = None) -> NoReturn:
        """Raises everything collected, with one more line if given."""
        if line is not None:
            self.add(line)
        raise InputError(self.lines)

    def check(self) -> None:
        """Raises InputError if anything was collected."""
        if self.lines:
            self.fail()
