"""The floating-point types that weights are stored in, and their names in every format.

bfloat16 has no NumPy type: its values travel as the uint16 of their bits.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """One storage type; `storage` is the NumPy type of the raw little-endian values."""

    name: str
    safetensors: str
    gguf: str
    torch: str
    storage: str
    size: int


F32 = Dtype("f32", "F32", "F32", "float32", "<f4", 4)
F16 = Dtype("f16", "F16", "F16", "float16", "<f2", 2)
BF16 = Dtype("bf16", "BF16", "BF16", "bfloat16", "<u2", 2)

DTYPES = (F32, F16, BF16)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES}
BY_TORCH = {dtype.torch: dtype for dtype in DTYPES}

# Bytes per value of every type that a SafeTensors header may name (the format's specification); a type of
# fewer than 8 bits is not listed and is refused like an unknown one.
SAFETENSORS_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
