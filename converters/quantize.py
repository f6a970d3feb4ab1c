"""ggml's block types: f32 rows in, blocks of bytes out.

    blocks = TYPES["Q8_0"].encode(rows)     # [rows, values] f32 -> [rows, bytes] uint8

The bytes equal ggml's own reference quantizers (ggml-quants.c), value for value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linnet_export.errors import InputError


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type that packs `values` neighbouring values of a row into `size` bytes."""

    name: str
    values: int
    size: int
    encode: Callable[[NDArray[np.float32]], NDArray[np.uint8]]

    def row_bytes(self, length: int) -> int:
        """Bytes of a row; its length must be a multiple of `values`."""
        return length // self.values * self.size


def _q8_0(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """32 values: an f16 scale (the largest magnitude / 127), then 32 int8 (quantize_row_q8_0_ref)."""
    blocks = rows.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
        half = scale.astype(np.float16)
    fits = np.isfinite(half)
    if not fits.all():
        worst = np.abs(blocks[np.argmin(fits)]).max()
        raise InputError(f"a block of magnitude {worst:g} does not fit Q8_0, whose f16 scale ends at {65504 * 127}")
    # A block of zeros, or of values so small that no f32 has the inverse of their scale (nor any f16 the scale).
    inverse[np.isinf(inverse)] = 0
    # roundf: halves away from zero. NumPy rounds halves to even, so it is spelled out, exactly: x - trunc(x) has no
    # rounding error, where adding 0.5 would.
    scaled = blocks * inverse
    whole = np.trunc(scaled)
    whole += np.trunc(np.float32(2) * (scaled - whole))
    out = np.empty((len(blocks), 34), np.uint8)
    out[:, :2] = half.view(np.uint8).reshape(-1, 2)
    out[:, 2:] = whole.astype(np.int8).view(np.uint8)
    return out.reshape(len(rows), -1)


TYPES = {"Q8_0": BlockType("Q8_0", 32, 34, _q8_0)}
