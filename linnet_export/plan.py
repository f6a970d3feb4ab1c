"""What an output tensor is made of: sources, spans of their rows, and a conversion.

A plan is data: it is made without reading a weight, printed by --dry-run, and executed by `stream`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from linnet_export import dtypes
from linnet_export.errors import UnsupportedError

Rows = NDArray[Any]
Convert = Callable[[Rows], Rows]


class Source(Protocol):
    """A tensor that can be read in blocks of rows: a part of a file, or something computed on the way."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """The SafeTensors name of the type that `read` gives."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop`; bf16 values as the uint16 of their bits."""

    def extent(self) -> tuple[Path, int] | None:
        """The file and offset where the values lie as they are, or None."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `start` to `stop` of a source."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One output tensor: its rows are the spans' rows, end to end, each block passed through `convert`.

    `type` is the target's name in its format; `row_bytes` is the size of one output row. Without `convert` the
    bytes stay as they are.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    row_bytes: int
    spans: tuple[Span, ...]
    convert: Convert | None = None

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A small source that is held in memory: values that a configuration states."""

    name: str
    values: Rows
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, start: int, stop: int) -> Rows:
        return self.values[start:stop]

    def extent(self) -> None:
        return None


def whole(source: Source) -> tuple[Span, ...]:
    """All rows of one source."""
    return (Span(source, 0, source.shape[0]),)


def widen(rows: Rows, dtype: str) -> NDArray[np.float32]:
    """Values of a stored type as f32, exactly."""
    if dtype == "BF16":
        bits = rows.astype(np.uint32)
        np.left_shift(bits, 16, out=bits)
        return bits.view(np.float32)
    return rows.astype(np.float32, copy=False)


def narrow(values: NDArray[np.float32], dtype: str) -> Rows:
    """f32 values in a stored type, rounded to nearest, ties to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        # A NaN whose payload would carry into the exponent stays a (quiet) NaN.
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        if nan.any():
            rounded = np.where(nan, (bits >> 16) | 0x40, rounded)
        return rounded.astype(np.uint16)
    if dtype == "F16":
        with np.errstate(over="ignore"):  # overflow is found, and named, where the block is checked
            return values.astype(np.float16)
    return values


def conversion(source: str, target: str) -> Convert | None:
    """The function from one stored type to another; None where they are the same."""
    if source == target:
        return None
    if source not in dtypes.BY_SAFETENSORS or target not in dtypes.BY_SAFETENSORS:
        raise UnsupportedError(f"no conversion from {source} to {target}; known: {', '.join(dtypes.BY_SAFETENSORS)}")

    def convert(rows: Rows) -> Rows:
        return narrow(widen(rows, source), target)

    return convert


# The largest bit pattern of a finite value, sign removed, by stored type.
_LARGEST_FINITE = {
    "BF16": (np.uint16, 0x7F7F, 0x7FFF),
    "F16": (np.uint16, 0x7BFF, 0x7FFF),
    "F32": (np.uint32, 0x7F7FFFFF, 0x7FFFFFFF),
}


def first_nonfinite(rows: Rows, dtype: str) -> int | None:
    """The flat index of the first NaN or infinity in a block, or None."""
    unsigned, largest, mask = _LARGEST_FINITE[dtype]
    bits = rows.reshape(-1).view(unsigned) & unsigned(mask)
    if bits.size == 0 or bits.max() <= largest:
        return None
    return int(np.argmax(bits > largest))
