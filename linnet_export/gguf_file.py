"""A GGUF file's header, read without trusting it: keys with their types, and where each tensor lies.

    file = gguf_file.read(Path("out/NAME-BF16.gguf"))
    file.keys["phi3.rope.freq_base"].value, file.tensors["output.weight"].offset, file.layout_problems()

Every length is checked against the file before anything is read by it, so that a file that was cut or damaged is
refused in words. Refused: other formats, other versions, big-endian files, arrays of arrays.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from linnet_export import text
from linnet_export.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 3 only adds big-endian files; version 1 had other lengths
DEFAULT_ALIGNMENT = 32
ALIGNMENT = "general.alignment"
MOST_DIMS = 4  # GGML_MAX_DIMS

REMEDY = "the whole file is needed: export or copy it again"

# gguf.h, enum gguf_type: number -> name and NumPy type of a value.
NUMBERS = {
    0: ("UINT8", "<u1"), 1: ("INT8", "<i1"), 2: ("UINT16", "<u2"), 3: ("INT16", "<i2"), 4: ("UINT32", "<u4"),
    5: ("INT32", "<i4"), 6: ("FLOAT32", "<f4"), 7: ("BOOL", "?"), 10: ("UINT64", "<u8"), 11: ("INT64", "<i8"),
    12: ("FLOAT64", "<f8"),
}  # fmt: skip
STRING, ARRAY = 8, 9

# The fewest bytes that a key (an empty name, a type, one byte) and a tensor's description can take.
SMALLEST_KEY, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class Value:
    """A key's value and the type it is stored in, "UINT32" or "STRING[]"; strings in arrays are bytes."""

    type: str
    value: Any


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its type by ggml's name, its shape `[out, in]`, and where its bytes lie in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    path: Path
    size: int
    alignment: int
    data: int  # where tensor data begins
    keys: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @property
    def end(self) -> int:
        """The byte after the last tensor."""
        return max((tensor.offset + tensor.nbytes for tensor in self.tensors.values()), default=self.data)

    def value(self, key: str) -> Any:
        """A key's value, None where it is absent."""
        found = self.keys.get(key)
        return None if found is None else found.value

    def layout_problems(self) -> list[str]:
        """What is wrong with where the tensors lie: outside of the file, over one another, not aligned, apart."""
        problems: list[str] = []
        end = self.data
        for tensor in sorted(self.tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            where = f"{tensor.name} lies at bytes {tensor.offset} to {tensor.offset + tensor.nbytes}"
            if (tensor.offset - self.data) % self.alignment:
                problems.append(f"{where}; a multiple of {self.alignment} after byte {self.data} is needed")
            if tensor.offset < end:
                problems.append(
                    f"{where}, over the tensor before it, which ends at {end}; a place of its own is needed"
                )
            elif tensor.offset > aligned(end, self.alignment):
                problems.append(f"{where}, but what is before it ends at {end}; a file without holes is needed")
            end = max(end, tensor.offset + tensor.nbytes)
        if outside := [t.name for t in self.tensors.values() if t.offset + t.nbytes > self.size]:
            problems.append(
                f"the file has {self.size} bytes and its header describes {end}: it ends before "
                f"{text.counted(len(outside), 'tensor')} (first {outside[0]}) do; {REMEDY}"
            )
        elif self.size > aligned(end, self.alignment):
            problems.append(f"the file has {self.size} bytes and its header describes {end}; nothing may follow them")
        return problems


def aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def read(path: Path) -> GgufFile:
    """The header of a file; InputError says at which byte and in what it ended or stopped making sense."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _read(_Reader(path, file, size))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


class _Reader:
    """A file read in order; `part` names what is being read."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.place = 0
        self.part = "the magic number"

    def fail(self, what: str) -> InputError:
        return InputError(f"{self.path} is damaged at byte {self.place}, in {self.part}: {what}; {REMEDY}")

    def take(self, count: int) -> bytes:
        if count > self.size - self.place:
            raise InputError(
                f"{self.path} ends at byte {self.size}, within its header ({self.part}, which needs {count} bytes from "
                f"{self.place} on); {REMEDY}"
            )
        raw = self.file.read(count)
        if len(raw) != count:
            raise self.fail("the file became shorter while it was read")
        self.place += count
        return raw

    def integer(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def string(self) -> bytes:
        return self.take(self.integer("<Q"))

    def name(self) -> str:
        try:
            return self.string().decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a name that is not UTF-8") from None

    def count(self, smallest: int, noun: str) -> int:
        value = self.integer("<Q")
        if value * smallest > self.size:
            raise self.fail(f"{value} {noun} announced, more than {self.size} bytes can hold")
        return value


def _read(reader: _Reader) -> GgufFile:
    if reader.size < len(MAGIC) or reader.take(len(MAGIC)) != MAGIC:
        raise InputError(f"{reader.path} ({text.size(reader.size)}) does not begin as a GGUF file; {REMEDY}")
    reader.part = "the version"
    version = reader.integer("<I")
    if version not in VERSIONS:
        raise reader.fail(f"version {version}; {' or '.join(map(str, VERSIONS))}, little-endian, is needed")
    reader.part = "the counts of tensors and keys"
    tensor_count = reader.count(SMALLEST_TENSOR, "tensors")
    key_count = reader.count(SMALLEST_KEY, "keys")
    keys: dict[str, Value] = {}
    for i in range(key_count):
        reader.part = f"key {i + 1} of {key_count}"
        name = reader.name()
        reader.part = f"the value of {name}"
        if name in keys:
            raise reader.fail("the key stands there twice; once is needed")
        keys[name] = _value(reader, reader.integer("<I"))

    alignment = keys[ALIGNMENT].value if ALIGNMENT in keys else DEFAULT_ALIGNMENT
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise reader.fail(f"{ALIGNMENT} is {text.shown(alignment)}; a multiple of 8 is needed")
    described: list[TensorInfo] = []
    for i in range(tensor_count):
        reader.part = f"the description of tensor {i + 1} of {tensor_count}"
        described.append(_tensor(reader))
    data = aligned(reader.place, alignment)
    tensors = {t.name: TensorInfo(t.name, t.type, t.shape, data + t.offset, t.nbytes) for t in described}
    if len(tensors) != len(described):
        names = [tensor.name for tensor in described]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise reader.fail(f"{twice} is described twice; once is needed")
    return GgufFile(path=reader.path, size=reader.size, alignment=alignment, data=data, keys=keys, tensors=tensors)


def _value(reader: _Reader, kind: int) -> Value:
    if kind in NUMBERS:
        name, form = NUMBERS[kind]
        return Value(name, np.frombuffer(reader.take(np.dtype(form).itemsize), form)[0].item())
    if kind == STRING:
        return Value("STRING", reader.string().decode("utf-8", "replace"))
    if kind != ARRAY:
        raise reader.fail(f"a value of the type {kind}, which GGUF does not have")
    item = reader.integer("<I")
    if item in NUMBERS:
        name, form = NUMBERS[item]
        count = reader.count(np.dtype(form).itemsize, "values")
        return Value(f"{name}[]", np.frombuffer(reader.take(count * np.dtype(form).itemsize), form).tolist())
    if item == STRING:
        return Value("STRING[]", [reader.string() for _ in range(reader.count(8, "texts"))])
    raise reader.fail(f"an array of the type {item}; numbers or strings are needed")


def _tensor(reader: _Reader) -> TensorInfo:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = reader.name()
    reader.part = f"the description of {name}"
    dims = reader.integer("<I")
    if not 1 <= dims <= MOST_DIMS:
        raise reader.fail(f"{dims} dimensions; 1 to {MOST_DIMS} are needed")
    shape = tuple(reversed([reader.integer("<Q") for _ in range(dims)]))
    number = reader.integer("<I")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise reader.fail(f"the tensor type {number}, which the gguf library does not know") from None
    values, nbytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % values:
        raise reader.fail(f"rows of {shape[-1]} values in {kind.name}; a multiple of {values} is needed")
    return TensorInfo(name, kind.name, shape, reader.integer("<Q"), math.prod(shape) // values * nbytes)
