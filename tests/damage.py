"""Damage done to exports on purpose, byte by byte, with the formats' own libraries and by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter
from safetensors import safe_open


def set_key(path: Path, key: str, value: Any) -> None:
    """Overwrites a number of a GGUF file in its place."""
    reader = GGUFReader(path, "r+")
    field = reader.fields[key]
    field.parts[field.data[0]][0] = value
    reader.data.flush()


def rewritten(
    path: Path,
    *,
    keys: Callable[[dict[str, Any]], None] = lambda _: None,
    tensors: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Writes a GGUF file again with other keys or tensors, each changed in a dictionary by name."""
    reader = GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    values = {name: field.contents() for name, field in fields.items()}
    held = {t.name: (t.data.copy(), t.tensor_type) for t in reader.tensors}
    keys(values)
    tensors(held)
    writer = GGUFWriter(path.with_suffix(".new"), values.pop("general.architecture"))
    for name, value in values.items():
        types = fields[name].types if name in fields else [GGUFValueType.get_type(value)]
        if types[0] is GGUFValueType.ARRAY:
            writer.add_key_value(name, value, GGUFValueType.ARRAY, types[-1])
        else:
            writer.add_key_value(name, value, types[0])
    for name, (data, kind) in held.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def place_of(export: Path, name: str) -> tuple[Path, int, int]:
    """The file that holds a tensor, where its first byte lies in it, and how many there are."""
    if export.is_file():
        tensor = next(tensor for tensor in GGUFReader(export).tensors if tensor.name == name)
        return export, int(tensor.data_offset), int(tensor.n_bytes)
    for path in sorted(export.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            if name not in file.keys():  # noqa: SIM118 - not a mapping
                continue
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        start, stop = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
        return path, 8 + length + start, stop - start
    raise AssertionError(f"no {name} in {export}")


def flip_bit(export: Path, name: str, byte: int, bit: int = 0) -> None:
    """Flips one bit of a tensor's bytes."""
    path, offset, _ = place_of(export, name)
    raw = bytearray(path.read_bytes())
    raw[offset + byte] ^= 1 << bit
    path.write_bytes(raw)


def swap_halves(export: Path, name: str) -> None:
    """Exchanges the first and the second half of a tensor's bytes: gate and up."""
    path, offset, nbytes = place_of(export, name)
    raw = bytearray(path.read_bytes())
    half = nbytes // 2
    first = bytes(raw[offset : offset + half])
    raw[offset : offset + half] = raw[offset + half : offset + nbytes]
    raw[offset + half : offset + nbytes] = first
    path.write_bytes(raw)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")
