"""What an export gives back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Told the bytes done so far and the bytes in all, from the thread that wrote them.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files that an export wrote. `nbytes` counts tensor data; `seconds` is wall time, opening included."""

    output: Path
    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    seconds: float
    notes: tuple[str, ...]


def counter(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    """A function that takes the bytes of one block and reports the sum."""
    if progress is None:
        return None
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return count
