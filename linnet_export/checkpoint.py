"""SafeTensors checkpoints: which files there are, where each tensor lies in them, which names they go by.

    index = checkpoint.index(Path("model"))      # {name: FileTensor}, nothing but headers read

A header is never trusted: its length, its types, and every offset are checked against the file, and nothing is
allocated by a length that was not. Files that can run code when loaded (pickle: .bin, .pt, .ckpt) are refused.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linnet_export import dtypes, phi3, text
from linnet_export.errors import InputError, Problems

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# The format's own limit on a header (safetensors, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor that lies in a file as it is: a `plan.Source` that the kernel can copy."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self, start: int, stop: int) -> NDArray[np.generic]:
        """Rows `start` to `stop` along the first axis, in the type they are stored in (bf16: uint16 bits)."""
        storage = dtypes.BY_SAFETENSORS[self.dtype].storage
        row = self.row_bytes
        raw = bytearray((stop - start) * row)
        read_exactly(self.path, self.offset + start * row, raw)
        return np.frombuffer(raw, dtype=storage).reshape(stop - start, *self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0] if self.shape[0] else 0

    def extent(self) -> tuple[Path, int]:
        """The file, and where in it the first byte lies."""
        return self.path, self.offset


def read_exactly(path: Path, offset: int, buffer: bytearray) -> None:
    """Fills a buffer from a file; a file that ends too early is an InputError."""
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < len(view):
                count = os.preadv(file.fileno(), [view[done:]], offset + done)
                if count == 0:
                    raise InputError(f"{path} ended at byte {offset + done} while it was read: it changed or is damaged")
                done += count
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def header(path: Path) -> dict[str, FileTensor]:
    """The tensors of one SafeTensors file by name, every number checked against the file."""
    refuse_pickle(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise InputError(
                    f"{path} is not a whole SafeTensors file: {text.size(size)}, "
                    f"{'shorter than any header' if len(prefix) < 8 else f'a header of {length} bytes announced'}"
                    "; download it again"
                )
            raw = file.read(length)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    entries = text.parse_json(raw, f"the header of {path}")
    if not isinstance(entries, dict):
        raise InputError(f"the header of {path} holds {text.json_kind(entries)}; a JSON object is needed")
    entries.pop("__metadata__", None)

    problems = Problems()
    found: dict[str, FileTensor] = {}
    for name, entry in entries.items():
        tensor = _entry(path, name, entry, 8 + length, size, problems)
        if tensor is not None:
            found[name] = tensor
    # The format leaves no holes and no overlaps: what lies where is unambiguous, and nothing is hidden.
    if not problems.lines:
        end = 8 + length
        for tensor in sorted(found.values(), key=lambda t: (t.offset, t.nbytes)):
            if tensor.offset != end:
                problems.add(f"{path}: {tensor.name} starts at byte {tensor.offset}, but the tensors before it end at {end}")
                break
            end += tensor.nbytes
        else:
            if end != size:
                problems.add(f"{path} has {size} bytes, but its header describes {end}; download it again")
    problems.check()
    return found


def _entry(path: Path, name: str, entry: object, base: int, size: int, problems: Problems) -> FileTensor | None:
    where = f"{path}: {text.shown(name)}"
    if not isinstance(entry, dict):
        problems.add(f"{where} is described by {text.json_kind(entry)}; an object is needed")
        return None
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in dtypes.SAFETENSORS_SIZES:
        problems.add(f"{where} has the type {text.shown(dtype)}; known: {', '.join(dtypes.SAFETENSORS_SIZES)}")
        return None
    if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        problems.add(f"{where} has the shape {text.shown(shape)}; a list of sizes is needed")
        return None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)):
        problems.add(f"{where} has the offsets {text.shown(offsets)}; a first and a last byte are needed")
        return None
    start, stop = offsets
    nbytes = math.prod(shape) * dtypes.SAFETENSORS_SIZES[dtype]
    if not 0 <= start <= stop <= size - base:
        problems.add(f"{where} lies at bytes {start} to {stop}, outside the {size - base} bytes of data; download it again")
        return None
    if stop - start != nbytes:
        problems.add(f"{where} has {stop - start} bytes, but {dtype} {shape} needs {nbytes}")
        return None
    return FileTensor(path, name, dtype, tuple(shape), base + start, nbytes)


def files_of(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The weight files of a directory, and the index's map of names to files if there is an index.

    With an index only its files count; else model.safetensors; else every *.safetensors that is not an adapter.
    """
    if (directory / INDEX).exists():
        weight_map = _weight_map(directory / INDEX)
        return [directory / name for name in sorted(set(weight_map.values()))], weight_map
    if (directory / SINGLE).exists():
        return [directory / SINGLE], None
    found = sorted(p for p in directory.glob("*.safetensors") if not p.name.startswith("adapter"))
    if not found:
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise InputError(_pickle_line(directory / pickles[0]))
        raise InputError(f"no weights in {directory}: {SINGLE}, {INDEX} or *.safetensors is needed")
    return found, None


def read_index(files: Iterable[Path], weight_map: Mapping[str, str] | None = None) -> dict[str, FileTensor]:
    """The tensors of several files by name; a name twice, or files that disagree with the index, are errors."""
    problems = Problems()
    found: dict[str, FileTensor] = {}
    for path in files:
        try:
            tensors = header(path)
        except InputError as error:
            problems.take(error)
            continue
        for name, tensor in tensors.items():
            if name in found:
                problems.add(f"{name} stands in both {found[name].path.name} and {path.name}; one place is needed")
            found[name] = tensor
            if weight_map is not None and name not in weight_map:
                problems.add(f"{path.name} holds {name}, which {INDEX} does not list")
    if weight_map is not None and not problems.lines:
        for name, file in weight_map.items():
            if name not in found:
                problems.add(f"{INDEX} places {name} in {file}, which does not hold it")
            elif found[name].path.name != file:
                problems.add(f"{INDEX} places {name} in {file}, but it lies in {found[name].path.name}")
    problems.check()
    return found


def index(path: Path) -> dict[str, FileTensor]:
    """The tensors of a SafeTensors file, of an index file, or of a directory with either."""
    if path.is_dir():
        files, weight_map = files_of(path)
    elif path.name.endswith(".index.json"):
        weight_map = _weight_map(path)
        files = [path.parent / name for name in sorted(set(weight_map.values()))]
    else:
        refuse_pickle(path)
        files, weight_map = [path], None
    return read_index(files, weight_map)


def refuse_pickle(path: Path) -> None:
    """Raises for a file of a kind that can run code when it is loaded."""
    if path.suffix in PICKLES:
        raise InputError(_pickle_line(path))


def plain_name(name: str) -> bool:
    """Whether a name stays inside its directory on every system."""
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0") and not Path(name).is_absolute()


def resolve(
    wanted: Mapping[str, str], found: Mapping[str, FileTensor], config: phi3.Config
) -> tuple[dict[str, FileTensor], list[str]]:
    """Linnet path -> tensor for every path of `wanted` (Linnet path -> checkpoint name), and notes.

    Names are taken whole: the checkpoint's own, or Linnet paths, or Linnet paths below `root.`; never mixed.
    Shapes and types are checked, tensors nobody asked for are errors, except layers past the depth asked for and
    buffers derived from the configuration, which are skipped and noted.
    """
    schemes = {
        "checkpoint names": dict(wanted),
        "Linnet paths": {path: path for path in wanted},
        "Linnet paths below root.": {path: f"root.{path}" for path in wanted},
    }
    if phi3.HEAD in wanted and wanted[phi3.HEAD] == wanted.get(phi3.EMBEDDING):
        # One tensor under two paths: a file that goes by Linnet paths may hold it once.
        for scheme, prefix in (("Linnet paths", ""), ("Linnet paths below root.", "root.")):
            if prefix + phi3.HEAD not in found:
                schemes[scheme][phi3.HEAD] = prefix + phi3.EMBEDDING
    scheme = max(schemes, key=lambda s: sum(name in found for name in schemes[s].values()))
    names = schemes[scheme]

    problems = Problems()
    shapes = {tensor.path: tensor.shape for tensor in phi3.tensors(config)}
    resolved: dict[str, FileTensor] = {}
    missing: list[str] = []
    for path, name in names.items():
        if name not in found:
            missing.append(name)
            continue
        tensor = found[name]
        shape = shapes.get(path)
        if shape is None:
            continue  # the head of a tied model, bound to the embedding
        if tensor.shape != shape:
            hint = " (it looks transposed: [out, in] is needed)" if tensor.shape == shape[::-1] != shape else ""
            problems.add(f"{name} has the shape {list(tensor.shape)}; {list(shape)} is needed{hint}")
        if tensor.dtype not in dtypes.BY_SAFETENSORS:
            problems.add(
                f"{name} has the type {tensor.dtype}; BF16, F16 or F32 is needed"
                + (": a quantized checkpoint is merged to 16 bits first" if tensor.dtype[0] in "UI" else "")
            )
        resolved[path] = tensor
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        problems.add(f"{text.counted(len(missing), 'tensor')} of {len(names)} missing (looked for {scheme}): {shown}")

    notes: list[str] = []
    deeper: set[int] = set()
    leftovers: list[str] = []
    unknown: list[str] = []
    used = set(names.values())
    for name in found:
        if name in used:
            continue
        layer = phi3.layer_of(name.removeprefix("root."))
        if layer is not None and layer >= config.layers:
            deeper.add(layer)
        elif name.endswith(phi3.LEFTOVERS):
            leftovers.append(name)
        else:
            unknown.append(name)
    if deeper:
        notes.append(f"layers {min(deeper)} to {max(deeper)} of the checkpoint are left out: {config.layers} were asked for")
    if leftovers:
        notes.append(f"dropped {text.counted(len(leftovers), 'buffer')} derived from the configuration: {', '.join(leftovers[:3])}")
    if unknown:
        shown = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
        problems.add(f"{text.counted(len(unknown), 'tensor')} that {phi3.ARCHITECTURE} does not have: {shown}")
    problems.check()
    return resolved, notes


def _weight_map(path: Path) -> dict[str, str]:
    content = text.read_json_object(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path} has no weight_map: an object of tensor names and file names is needed")
    problems = Problems()
    for name, file in weight_map.items():
        if not isinstance(file, str) or not plain_name(file):
            problems.add(f"{path} places {name} in {text.shown(file)}; a file name inside the directory is needed")
        elif file.endswith(PICKLES):
            problems.add(_pickle_line(path.parent / file))
        elif not (path.parent / file).is_file():
            problems.add(f"{path} names {file}, which is not there; download it")
    problems.check()
    return weight_map


def _pickle_line(path: Path) -> str:
    return (
        f"{path} is a pickle file, which can run code when it is loaded, and is refused; "
        "load it where you trust it and save it as SafeTensors (transformers: save_pretrained)"
    )
