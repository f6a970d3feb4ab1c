"""Every weight of an export against the source's, both read by the reference's own loader.

    checks = check_weights(Path("out/gguf/NAME-Q8_0.gguf"), Path("MODEL"))
    [check.message for check in checks if not check.passed]

A type that holds the source's type must hold its bits. Another may be off by as much as its rounding explains and no
more: each value has its own bound, and one that is a single step too far fails by name and index. A type without a
row in `ROUNDINGS` is refused. One pair of tensors is in memory at a time.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linnet_export import checkpoint, dtypes, gguf_file, phi3
from linnet_export.errors import InputError
from linnet_export.exported import Progress
from linnet_export.model import CONFIG
from linnet_export.verify.records import TensorCheck

if TYPE_CHECKING:
    from torch import Tensor

    from linnet_export.reference.load import Weights

# Values compared at once: the f64 temporaries stay in a core's cache. Ten times as fast as a million at once.
BLOCK_VALUES = 1 << 15

# The ratio of a value that is not a number where one is needed, or the reverse: JSON has no infinity.
INCOMPARABLE = 1e300


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a type rounds.

    `allowed` takes rows of the source in f64 and gives, for each value, where the nearest value of the type is
    looked for, and how far from there it can lie at most: a ratio of |stored - centre| to that of 1 passes.
    `formula` says the same in words. `holds` are the source types whose every value the type has.
    """

    formula: str
    holds: tuple[str, ...]
    allowed: Callable[["Tensor"], tuple["Tensor", "Tensor"]]


def _half_ulp(digits: int, smallest: int) -> Callable[["Tensor"], tuple["Tensor", "Tensor"]]:
    """Rounding to nearest in a type of `digits` significant bits whose normal numbers begin at 2^`smallest`.

    Between 2^e and 2^(e + 1) neighbours are 2^(e + 1 - digits) apart, below 2^smallest as far as there; a nearest
    value is at most half of that away (IEEE 754, round to nearest).
    """

    def allowed(rows: "Tensor") -> tuple["Tensor", "Tensor"]:
        import torch

        exponent = torch.frexp(rows).exponent - 1  # frexp's fraction lies in [1/2, 1)
        exponent = torch.where(rows == 0, smallest, exponent).clamp(min=smallest)
        return rows, torch.ldexp(torch.ones_like(rows), exponent - digits)

    return allowed


def _q8_0(rows: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Blocks of 32 with the scale s = max|x| / 127, kept as f16: s' (ggml-quants.c, quantize_row_q8_0_ref).

    The integer nearest to x / s is stored, so the value read back is within s' / 2 of x s' / s: off from x by at
    most s / 2 for the integer, and by the rounding of the scale times the integer. The integer is found with f32
    arithmetic: three roundings of 2^-24 of at most 127 steps move a tie by less than 2^-14 of half a step.
    """
    import torch

    blocks = rows.reshape(len(rows), -1, Q8_0_VALUES)
    scale = (blocks.abs().amax(-1, keepdim=True).float() / 127).double()
    kept = scale.half().double()
    centre = blocks * torch.where(scale > 0, kept / scale, 0)
    # A scale that f16 does not have any more is 0, and so is every value: any deviation is too much.
    step = torch.where(kept > 0, kept, SMALLEST_F16)
    half = (step / 2 * (1 + 2.0**-14)).expand_as(blocks)
    return centre.reshape(rows.shape), half.reshape(rows.shape)


Q8_0_VALUES = 32
SMALLEST_F16 = 2.0**-24

# Every type that an export may hold. Another block type is one more row: its formula, and a function that derives
# each block's scale from the source as the type's own definition does.
ROUNDINGS: Mapping[str, Rounding] = {
    "F32": Rounding(
        "half an ulp: at most 2^-24 |x|, or 2^-150 below 2^-126", ("F32", "F16", "BF16"), _half_ulp(24, -126)
    ),
    "F16": Rounding("half an ulp: at most 2^-11 |x|, or 2^-25 below 2^-14", ("F16",), _half_ulp(11, -14)),
    "BF16": Rounding("half an ulp: at most 2^-8 |x|, or 2^-134 below 2^-126", ("BF16",), _half_ulp(8, -126)),
    "Q8_0": Rounding(
        "|stored - x s' / s| <= s' / 2, where s = max|x| / 127 of the block of 32 and s' is s in f16", (), _q8_0
    ),
}


def check_weights(
    export: Path,
    source: Path,
    *,
    weights: Path | None = None,
    layers: int | None = None,
    progress: Progress | None = None,
) -> tuple[TensorCheck, ...]:
    """A check for each tensor of the export, in the architecture's order.

    `weights` is where a card's weights are, if not beside it; `layers` how many of the source's layers the export
    has, all where None. `progress` is told bytes of the export. A damaged tensor is a failed check; a file of which
    no tensor can be read (`check_structure` says why) raises InputError.
    """
    stored = _stored(export)
    ours, theirs = _opened(source, weights), _opened(export, None)
    depth = ours.config.layers if layers is None else layers
    specs = _specs(depth, tied=theirs.config.tied)
    missing = [spec for spec in _specs(depth, tied=ours.config.tied) if spec not in specs]
    column = "gguf" if export.is_file() else "hf"
    total, done = sum(nbytes for _, nbytes in stored.values()), 0
    checks: list[TensorCheck] = []
    for spec in specs:
        name = getattr(spec, column)
        kind, nbytes = stored.get(name, ("none", 0))
        if spec.path == phi3.HEAD and ours.config.tied:
            checks.append(_failed(spec.path, kind, f"{name}: the source's head is its embedding; none may be stored"))
        elif name not in stored:
            checks.append(_failed(spec.path, kind, f"{name} is missing; the source has it"))
        elif kind not in ROUNDINGS:
            known = ", ".join(ROUNDINGS)
            checks.append(
                _failed(spec.path, kind, f"{name} is {kind}, whose rounding is not stated here; known: {known}")
            )
        else:
            checks.append(_checked(spec, name, kind, ours, theirs))
        done += nbytes
        if progress is not None:
            progress(done, total)
    checks += [_failed(spec.path, "none", f"{getattr(spec, column)} is missing; the source has it") for spec in missing]
    return tuple(checks)


def _specs(layers: int, *, tied: bool) -> tuple[phi3.Tensor, ...]:
    """The names of a model of this depth; shapes are those that the loader finds."""
    rope = phi3.Rope(theta=1.0, dims=1, original_context=1)
    return phi3.tensors(phi3.Config(vocab=1, hidden=1, heads=1, kv_heads=1, inner=1, layers=layers, context=1, eps=1.0,
                                    window=None, rope=rope, tied=tied))  # fmt: skip


def _stored(export: Path) -> dict[str, tuple[str, int]]:
    """The type and size of every tensor by its name in the file, once the file is known to be whole."""
    if export.is_file():
        file = gguf_file.read(export)
        if problems := file.layout_problems():
            raise InputError([f"{export}: {problem}" for problem in problems])
        return {tensor.name: (tensor.type, tensor.nbytes) for tensor in file.tensors.values()}
    if not (export / CONFIG).is_file():
        raise InputError(f"{export} has no {CONFIG}; an exported checkpoint directory, or a .gguf file, is needed")
    return {name: (tensor.dtype, tensor.nbytes) for name, tensor in checkpoint.index(export).items()}


def _opened(model: Path, weights: Path | None) -> "Weights":
    try:
        from linnet_export.reference.load import open_weights
    except ImportError as error:
        raise InputError(f"weights are read with PyTorch ({error}): pip install 'linnet-export[verify]'") from None
    try:
        return open_weights(model, weights=weights)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InputError(f"the reference cannot read {model}: {error}") from None


def _checked(spec: phi3.Tensor, name: str, kind: str, ours: "Weights", theirs: "Weights") -> TensorCheck:
    """One pair, read in types that hold their values: f32 always does, a model's own does for its matrices."""
    import torch

    try:
        source = ours.read(spec.path, torch.float32 if spec.is_vector else ours.dtype)
    except KeyError:
        return _failed(spec.path, kind, f"{name}: the source has no {spec.path}; it may not be stored")
    # A block type decodes to f32; the other types are read as they are.
    float_type = {dtype.gguf: getattr(torch, dtype.torch) for dtype in dtypes.DTYPES}.get(kind, torch.float32)
    export = theirs.read(spec.path, float_type)
    if export.shape != source.shape:
        return _failed(
            spec.path, kind, f"{name} has the shape {list(export.shape)}; the source's {list(source.shape)} is needed"
        )
    found = _compared(source, export, ROUNDINGS[kind])
    holds = {getattr(torch, dtypes.BY_SAFETENSORS[held].torch) for held in ROUNDINGS[kind].holds}
    passed = found.exact or (source.dtype not in holds and found.ratio <= 1)
    return TensorCheck(
        name=spec.path,
        type=kind,
        exact=found.exact,
        passed=passed,
        relative_error=found.relative_error,
        worst_ratio=found.ratio,
        index=found.index,
        message="" if passed else _explained(spec, name, kind, source, export, found),
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    exact: bool
    differing: int
    relative_error: float
    ratio: float
    index: tuple[int, ...]


def _compared(source: "Tensor", export: "Tensor", rounding: Rounding) -> _Compared:
    """The figures of one tensor, in f64, block by block."""
    import torch

    differing, squares, sizes = 0, 0.0, 0.0
    worst, place = -1.0, 0
    for start, x, y in _blocks(source, export):
        # Bits, not values: -0 is not 0. A NaN is as good as another.
        other = ((x.view(torch.int32) != y.view(torch.int32)) & ~(x.isnan() & y.isnan())).reshape(-1)
        a, b = x.double(), y.double()
        sizes += float(torch.where(a.isfinite(), a, 0).square().sum())
        if not other.any():
            continue
        differing += int(other.sum())
        numbers = a.isfinite() & b.isfinite()
        squares += float(torch.where(numbers, b - a, 0).square().sum())
        centre, half = rounding.allowed(a)
        ratio = torch.where(numbers, (b - centre).abs() / half, INCOMPARABLE).reshape(-1)
        ratio = torch.where(other, ratio, -1.0)
        largest = int(ratio.argmax())
        if float(ratio[largest]) > worst:
            worst, place = float(ratio[largest]), start * math.prod(source.shape[1:]) + largest
    error = math.sqrt(squares / sizes) if sizes else (INCOMPARABLE if squares else 0.0)
    index: list[int] = []
    for length in reversed(source.shape):
        place, rest = divmod(place, length)
        index.insert(0, rest)
    return _Compared(differing == 0, differing, error, max(worst, 0.0), tuple(index))


def _blocks(source: "Tensor", export: "Tensor") -> Iterator[tuple[int, "Tensor", "Tensor"]]:
    """Pairs of blocks of whole rows in f32, each with its first row."""
    step = len(source) if source.dim() == 1 else max(1, BLOCK_VALUES // source.shape[-1])
    for start in range(0, len(source), step):
        x, y = (tensor[start : start + step].float().contiguous() for tensor in (source, export))
        yield (start, x[None], y[None]) if source.dim() == 1 else (start, x, y)


def _explained(spec: phi3.Tensor, name: str, kind: str, source: "Tensor", export: "Tensor", found: _Compared) -> str:
    where = f"{name} [{', '.join(map(str, found.index))}]"
    values = [float(tensor[found.index]) for tensor in (export, source)]
    line = f"{where} is {values[0]:.9g}; {values[1]:.9g} is needed"
    if kind != "F32" and found.ratio > 1 and source.dtype != export.dtype:
        line += f" within the rounding of {kind}, which it misses by a factor of {found.ratio:.3g}"
    line += f" ({found.differing:,} of {source.numel():,} values differ from the source's)"
    return line + _swapped(spec, kind, source, export)


def _swapped(spec: phi3.Tensor, kind: str, source: "Tensor", export: "Tensor") -> str:
    """Names the commonest damage of a fused tensor: two of its equal parts in each other's place."""
    import torch

    rows, columns = source.shape if source.dim() == 2 else (0, 0)
    if spec.path.endswith("mlp.gate_up.weight"):
        part, words = rows // 2, "gate and up"
    elif spec.path.endswith("attention.qkv.weight") and rows == 3 * columns:
        part, words = columns, "query and key"
    else:
        return ""
    moved = torch.cat([source[part : 2 * part], source[:part], source[2 * part :]])
    if _compared(moved, export, ROUNDINGS[kind]).ratio > 1:
        return ""
    return f": the {words} rows stand in each other's place"


def _failed(path: str, kind: str, message: str) -> TensorCheck:
    return TensorCheck(
        name=path, type=kind, exact=False, passed=False, relative_error=1.0, worst_ratio=INCOMPARABLE, index=(),
        message=message,
    )  # fmt: skip
