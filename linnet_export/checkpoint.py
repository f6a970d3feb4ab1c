"""SafeTensors checkpoints: which files there are, where each tensor lies in them, which names they go by.

    index = checkpoint.index(Path("model"))      # {name: FileTensor}, nothing but headers read

A header is never trusted: its length, its types, and every offset are checked against the file, and nothing is
allocated by a length that was not. Files that can run code when loaded (pickle: .bin, .pt, .ckpt) are refused.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linnet_export import dtypes, phi3, text
from linnet_export.errors import InputError, Problems

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# What Linnet's training may put before every path.
ROOT = "root."

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
                    raise InputError(
                        f"{path} ended at byte {offset + done} while it was read: it changed or is damaged"
                    )
                done += count
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def header(path: Path) -> dict[str, FileTensor]:
    """The tensors of one SafeTensors file by name, every number checked against the file."""
    refuse_pickle(path)
    try:
        if not text.present(path):
            raise InputError(f"{text.shortened(path)} does not exist")
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
                problems.add(
                    f"{path}: {tensor.name} starts at byte {tensor.offset}, but the tensors before it end at {end}"
                )
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
        problems.add(
            f"{where} lies at bytes {start} to {stop}, outside the {size - base} bytes of data; download it again"
        )
        return None
    if stop - start != nbytes:
        problems.add(f"{where} has {stop - start} bytes, but {dtype} {shape} needs {nbytes}")
        return None
    return FileTensor(path, name, dtype, tuple(shape), base + start, nbytes)


def files_of(directory: Path, *, every: bool = False) -> tuple[list[Path], dict[str, str] | None]:
    """The weight files of a directory, and the index's map of names to files if there is an index.

    With an index only its files count; else model.safetensors, unless `every` file does; else every *.safetensors
    that is not an adapter.
    """
    if text.present(directory / INDEX):
        weight_map = _weight_map(directory / INDEX)
        return [directory / name for name in sorted(set(weight_map.values()))], weight_map
    if text.present(directory / SINGLE) and not every:
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
    held: dict[str, set[str]] = {}
    for path in files:
        try:
            tensors = header(path)
        except InputError as error:
            problems.take(error)
            continue
        held[path.name] = set(tensors)
        for name, tensor in tensors.items():
            if name in found:
                problems.add(f"{name} stands in both {found[name].path.name} and {path.name}; one place is needed")
            found.setdefault(name, tensor)
    if weight_map is not None:
        for file, names in held.items():
            listed = {name for name, place in weight_map.items() if place == file}
            if absent := sorted(listed - names):
                problems.add(f"{file} lacks {_some(absent, 'tensor')} that {INDEX} places there")
            if unlisted := sorted(names - listed):
                problems.add(f"{file} holds {_some(unlisted, 'tensor')} that {INDEX} does not place there")
    problems.check()
    return found


def index(path: Path, *, every: bool = False) -> dict[str, FileTensor]:
    """The tensors of a SafeTensors file, of an index file, or of a directory with either."""
    if path.is_dir():
        files, weight_map = files_of(path, every=every)
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
    """Linnet path -> tensor for every path of `config`, in its order, and notes.

    `wanted` has the checkpoint's name of every path of the whole model, which may be deeper than `config`. Names
    are taken whole: the checkpoint's own, or Linnet paths, or Linnet paths below `root.`; never mixed. Shapes and
    types are checked, tensors that the whole model does not have are errors, except buffers derived from the
    configuration; those, and layers past the depth of `config`, are skipped and noted.
    """
    first: dict[str, str] = {}
    for path, name in wanted.items():
        first.setdefault(name, path)

    def by_path(prefix: str) -> dict[str, str]:
        # Two paths of one tensor (a tied head): a file that goes by paths may hold it once, under the first of them.
        return {path: prefix + (path if prefix + path in found else first[name]) for path, name in wanted.items()}

    schemes = {
        "checkpoint names": dict(wanted),
        "Linnet paths": by_path(""),
        f"Linnet paths below {ROOT}": by_path(ROOT),
    }
    scheme = max(schemes, key=lambda s: sum(name in found for name in schemes[s].values()))
    names = schemes[scheme]

    problems = Problems()
    shapes = {tensor.path: tensor.shape for tensor in phi3.tensors(config)}
    resolved: dict[str, FileTensor] = {}
    missing: list[str] = []
    wrong: dict[str, list[str]] = {}  # what is wrong, and the tensors it is wrong with: layers share a line
    for path, shape in shapes.items():
        name = names[path]
        if name not in found:
            missing.append(name)
            continue
        tensor = found[name]
        if tensor.shape != shape:
            hint = " (it looks transposed: [out, in] is needed)" if tensor.shape == shape[::-1] != shape else ""
            wrong.setdefault(f"the shape {list(tensor.shape)}; {list(shape)} is needed{hint}", []).append(name)
        if tensor.dtype not in dtypes.BY_SAFETENSORS:
            hint = ": a quantized checkpoint is merged to 16 bits first" if tensor.dtype[0] in "UI" else ""
            wrong.setdefault(f"the type {tensor.dtype}; BF16, F16 or F32 is needed{hint}", []).append(name)
        resolved[path] = tensor
    if missing:
        problems.add(f"missing {_some(missing, 'tensor')} of {len(shapes)} (looked for {scheme})")
    for what, which in wrong.items():
        problems.add(f"{which[0]} has {what}" if len(which) == 1 else f"{_some(which, 'tensor')} have {what}")

    used = set(names.values())
    left = [name for name in found if name not in used]
    leftovers = [name for name in left if name.endswith(phi3.LEFTOVERS)]
    unknown = [name for name in left if not name.endswith(phi3.LEFTOVERS)]
    for other, theirs in schemes.items():
        others = set(theirs.values())
        if mixed := [name for name in unknown if name in others]:
            problems.add(
                f"mixed names: {scheme}, but {_some(mixed, 'tensor')} by {other}; one kind is needed throughout"
            )
            unknown = [name for name in unknown if name not in others]
    if unknown:
        depth = 1 + max(layer for path in wanted if (layer := phi3.layer_of(path)) is not None)
        problems.add(f"{phi3.ARCHITECTURE} of {text.counted(depth, 'layer')} does not have {_some(unknown, 'tensor')}")

    notes: list[str] = []
    skipped = (phi3.layer_of(path) for path, name in names.items() if path not in shapes and name in found)
    if deeper := {layer for layer in skipped if layer is not None}:
        layers = f"layers {min(deeper)} to {max(deeper)}" if len(deeper) > 1 else f"layer {min(deeper)}"
        notes.append(f"left out {layers} of the checkpoint: the first {config.layers} were asked for")
    if leftovers:
        notes.append(f"dropped {_some(leftovers, 'buffer')}: derived from the configuration")
    problems.check()
    return resolved, notes


def _some(names: Sequence[str], noun: str, limit: int = 4) -> str:
    """A count and the first names: 6 tensors (a, b, c, d and 2 more)."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{text.counted(len(names), noun)} ({', '.join(names[:limit])}{more})"


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
        elif not _is_there(path.parent / file):
            problems.add(f"{path} names {file}, which is not there; download it")
    problems.check()
    return weight_map


def _is_there(path: Path) -> bool:
    try:
        return text.present(path)
    except InputError:
        return False


def _pickle_line(path: Path) -> str:
    return (
        f"{path} is a pickle file, which can run code when it is loaded, and is refused; "
        "load it where you trust it and save it as SafeTensors (transformers: save_pretrained)"
    )
