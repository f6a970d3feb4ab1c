"""Conversions between stored types, against PyTorch's, and the parts of a plan."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from linnet_export import plan
from linnet_export.errors import UnsupportedError
from linnet_export.plan import Constant, Entry, Span

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def every(dtype: str) -> NDArray[np.generic]:
    """Every bit pattern of a 16-bit type; for f32 a pattern for each 16 high bits with low bits that tie and do not."""
    high = np.arange(65536, dtype=np.uint32)
    if dtype == "F32":
        low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000], np.uint32)
        return ((high[:, None] << 16) | low).reshape(-1, 5).view(np.float32)
    rows = high.astype(np.uint16).reshape(-1, 64)
    return rows.view(np.float16) if dtype == "F16" else rows


def as_torch(rows: NDArray[np.generic], dtype: str) -> torch.Tensor:
    raw = torch.from_numpy(rows.view(np.uint8).copy())
    return raw.view(TORCH[dtype])


def patterns(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The bits of a tensor, with every NaN made the same one: which NaN is no value's."""
    tensor = tensor.clone()
    tensor[torch.isnan(tensor)] = float("nan")
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


@pytest.mark.parametrize("target", TORCH)
@pytest.mark.parametrize("source", TORCH)
def test_a_conversion_gives_the_bits_of_pytorch(source: str, target: str) -> None:
    rows = every(source)
    convert = plan.conversion(source, target)
    expected = as_torch(rows, source).to(torch.float32).to(TORCH[target])
    if convert is None:
        assert source == target
        return
    found = convert(rows)
    assert found.shape == rows.shape
    assert np.array_equal(patterns(as_torch(np.ascontiguousarray(found), target)), patterns(expected))


@pytest.mark.parametrize("target", ["F16", "BF16"])
def test_a_nan_of_any_payload_stays_one(target: str) -> None:
    payloads = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0xFFFF8000], np.uint32)
    convert = plan.conversion("F32", target)
    assert convert is not None
    found = as_torch(convert(payloads.view(np.float32)), target)
    assert torch.isnan(found).all()


def test_rows_of_a_matrix_convert_without_changing_the_source() -> None:
    rows = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    before = rows.tobytes()
    narrowed = plan.narrow(rows[:, ::2], "BF16")
    expected = torch.from_numpy(rows[:, ::2].copy()).bfloat16()
    assert np.array_equal(narrowed, expected.view(torch.uint16).numpy())
    assert rows.tobytes() == before


@pytest.mark.parametrize(("source", "target"), [("F64", "F32"), ("BF16", "Q8_0"), ("U8", "BF16")])
def test_a_conversion_that_does_not_exist_is_refused_with_both_types(source: str, target: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{source} to {target}.*BF16"):
        plan.conversion(source, target)


@pytest.mark.parametrize("dtype", TORCH)
def test_the_first_value_that_is_not_finite_is_found_among_every_pattern(dtype: str) -> None:
    rows = every(dtype)
    finite = torch.isfinite(as_torch(rows, dtype))
    assert plan.first_nonfinite(rows, dtype) == int(torch.argmin(finite.reshape(-1).to(torch.int8)))
    fine = np.where(finite.numpy(), rows, np.zeros_like(rows))
    assert plan.first_nonfinite(fine, dtype) is None
    fine[-1, -1] = rows.reshape(-1)[np.flatnonzero(~finite.numpy().reshape(-1))[-1]]
    assert plan.first_nonfinite(fine, dtype) == fine.size - 1
    assert plan.first_nonfinite(rows[:0], dtype) is None


def test_an_entry_counts_its_rows_and_bytes() -> None:
    source = Constant("factors", np.arange(12, dtype=np.float32).reshape(6, 2), "F32")
    entry = Entry("x", (6, 2), "F32", 8, plan.whole(source))
    assert (entry.rows, entry.nbytes, entry.spans) == (6, 48, (Span(source, 0, 6),))
    assert source.shape == (6, 2)
    assert source.read(1, 3).tolist() == [[2.0, 3.0], [4.0, 5.0]]
