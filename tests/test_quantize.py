"""Blocks of ggml types, against the bytes of the gguf library."""

import warnings

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from linnet_export.converters import quantize
from linnet_export.errors import InputError

Q8_0 = quantize.TYPES["Q8_0"]


def library(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library divides by zero on the way to the right bytes
        return np.asarray(quants.quantize(rows, GGMLQuantizationType.Q8_0))


def halves() -> NDArray[np.float32]:
    """Blocks whose scale is a power of two, so that every other value lies exactly between two integers."""
    values = np.concatenate([[127.0], np.arange(-15.5, 15.5)]).astype(np.float32)
    return np.stack([values, -values, values / 64, values * 2.0**40 / 2.0**30])


RANDOM = np.random.default_rng(7)
ROWS = {
    "normal": RANDOM.normal(0, 0.02, (37, 96)).astype(np.float32),
    "outliers": (RANDOM.standard_cauchy((64, 32)) * 0.01).astype(np.float32),
    "bf16": (RANDOM.normal(0, 1, (64, 64)).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32),
    "zeros": np.zeros((3, 64), np.float32),
    "negative zeros": np.full((1, 32), -0.0, np.float32),
    "one value": np.eye(32, dtype=np.float32) * -3.3,
    "halves": halves(),
    "denormal scales": (RANDOM.normal(0, 1, (8, 32)) * 1e-6).astype(np.float32),
    "scales below f16": (RANDOM.normal(0, 1, (8, 32)) * 1e-12).astype(np.float32),
    "denormals": (RANDOM.normal(0, 1, (8, 32)) * 1e-40).astype(np.float32),
    "smallest": np.full((2, 32), 1e-45, np.float32),
    "largest inverses": (RANDOM.uniform(-1, 1, (64, 32)) * np.geomspace(1e-38, 1e-36, 64)[:, None]).astype("f"),
    "large": (RANDOM.uniform(-1, 1, (8, 64)) * 8e6).astype(np.float32),
}  # fmt: skip


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_q8_0_has_the_bytes_of_the_library(rows: NDArray[np.float32]) -> None:
    before = rows.tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what NumPy has to say would reach the user's terminal
        found = Q8_0.encode(rows)
    assert found.dtype == np.uint8
    assert found.shape == (len(rows), Q8_0.row_bytes(rows.shape[1]))
    assert found.tobytes() == library(rows).tobytes()
    assert rows.tobytes() == before


def test_q8_0_reads_back_within_half_a_step() -> None:
    rows = ROWS["normal"]
    back = quants.dequantize(Q8_0.encode(rows), GGMLQuantizationType.Q8_0)
    step = np.abs(rows.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    # Half a step of rounding, and the scale's own rounding to f16 (2^-11) of up to 127 steps.
    assert (np.abs(back - rows).reshape(-1, 32) <= step * (0.5 + 127 / 2048) * 1.001).all()


@pytest.mark.parametrize(
    ("value", "shown"), [(1e38, "1e+38"), (65520.0 * 127, "8.32104e+06"), (np.nan, "nan"), (-np.inf, "inf")]
)
def test_q8_0_refuses_a_block_whose_scale_no_f16_holds(value: float, shown: str) -> None:
    rows = np.zeros((4, 64), np.float32)
    rows[2, 40] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match="Q8_0") as caught:
            Q8_0.encode(rows)
    assert shown in str(caught.value)


def test_row_bytes_follow_the_block() -> None:
    for name, block in quantize.TYPES.items():
        values, size = {"Q8_0": (32, 34)}[name]
        assert (block.values, block.size, block.row_bytes(values * 3)) == (values, size, size * 3)
