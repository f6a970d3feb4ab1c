"""GGUF files for llama.cpp: the keys, the tensor plan, and the file.

    plan = gguf.plan(model, outtype="bf16")       # decides everything, reads no weight
    gguf.write(plan, Path("out/NAME-BF16.gguf"))

Fused tensors stay fused: query, key, value rows in attn_qkv; gate, up rows in ffn_up, as llama.cpp's phi3 graph
slices them. Norms are f32 in every file type. Refused: types that are unknown, and what `Model` refuses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet_export import files, phi3, stream, text
from linnet_export import plan as plans
from linnet_export.converters import quantize, tokenizer
from linnet_export.errors import InputError
from linnet_export.model import Model

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True, slots=True)
class FileType:
    """A file type by llama.cpp's names: its number in general.file_type, and the type of the matrices."""

    name: str
    number: int
    tensor: str


# llama.h, enum llama_ftype.
FILE_TYPES = {
    "f32": FileType("F32", 0, "F32"),
    "f16": FileType("F16", 1, "F16"),
    "bf16": FileType("BF16", 32, "BF16"),
    "q8_0": FileType("Q8_0", 7, "Q8_0"),
}
AUTO = "auto"
OUTTYPES = (*FILE_TYPES, AUTO)

# What llama-quantize and convert_hf_to_gguf.py fall back to where a block type does not divide a row.
FALLBACK = "F16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A GGUF file, decided: tensors in file order, keys by name with their values, and notes for the user."""

    name: str
    file_type: FileType
    entries: tuple[plans.Entry, ...]
    model: Model
    vocabulary: tokenizer.Vocabulary | None
    notes: tuple[str, ...]

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.file_type.name}.gguf"

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(entry.nbytes for entry in self.entries)

    def keys(self) -> dict[str, Any]:
        """Every key of the file with its value."""
        return {key: value.value for group in _writer(self, None).kv_data for key, value in group.items()}


def plan(model: Model, *, outtype: str = "f16", pre_tokenizer: str | None = None) -> Plan:
    """Decides a GGUF file of one of OUTTYPES; `auto` keeps the type of the source's matrices."""
    if outtype == AUTO:
        if model.dtype is None:
            raise InputError("--outtype auto: the matrices have different types; name one of " + ", ".join(FILE_TYPES))
        outtype = model.dtype.name
    if outtype not in FILE_TYPES:
        raise InputError(f"--outtype {outtype}: no such type; known: {', '.join(OUTTYPES)}")
    file_type = FILE_TYPES[outtype]
    notes = list(model.notes)
    rope = model.config.rope
    entries: list[plans.Entry] = []
    if rope.short is not None and rope.long is not None:
        for name, factors in (("rope_factors_long.weight", rope.long), ("rope_factors_short.weight", rope.short)):
            source = plans.Constant(name, np.array(factors, np.float32), "F32")
            entries.append(_entry(name, source, "F32"))
    fallen: list[str] = []
    for tensor in phi3.tensors(model.config):
        wanted = "F32" if tensor.is_vector else file_type.tensor
        block = quantize.TYPES.get(wanted)
        if block is not None and tensor.shape[-1] % block.values:
            fallen.append(tensor.gguf)
            wanted = FALLBACK
        entries.append(_entry(tensor.gguf, model.tensors[tensor.path], wanted))
    if fallen:
        notes.append(
            f"{text.counted(len(fallen), 'tensor')} in {FALLBACK} instead of {file_type.tensor}: "
            f"the rows are not a multiple of {quantize.TYPES[file_type.tensor].values} long ({fallen[0]})"
        )
    vocabulary = None
    if model.tokenizer is not None:
        vocabulary = tokenizer.vocabulary(
            model.tokenizer, vocab_size=model.config.vocab, config=model.hf_config, pre=pre_tokenizer
        )
        notes += vocabulary.notes
        notes += tokenizer.check_name(model.tokenizer, vocabulary, model.name)
        if unknown := sorted(set(model.eos) - tokenizer.ends_in_llama_cpp(vocabulary)):
            texts = ", ".join(vocabulary.tokens[token].decode("utf-8", "replace") for token in unknown)
            notes.append(
                f"llama.cpp does not stop at {texts} by itself: a GGUF names one end token, others need a stop string"
            )
    else:
        notes.append("no tokenizer: llama.cpp takes token ids only")
    return Plan(
        name=model.name,
        file_type=file_type,
        entries=tuple(entries),
        model=model,
        vocabulary=vocabulary,
        notes=tuple(notes),
    )


def write(
    plan: Plan,
    path: Path,
    *,
    force: bool = False,
    threads: int | None = None,
    progress: stream.Progress | None = None,
    allow_nonfinite: bool = False,
) -> None:
    """Writes the file whole or not at all; InputError for values that are not finite, OutputError for the rest."""
    with files.new_file(path, force=force) as partial:
        write_partial(plan, partial, threads=threads, progress=progress, allow_nonfinite=allow_nonfinite)


def write_partial(
    plan: Plan,
    partial: Path,
    *,
    threads: int | None = None,
    progress: stream.Progress | None = None,
    allow_nonfinite: bool = False,
) -> None:
    """Writes the file under a name that the caller makes final."""
    writer = _writer(plan, partial)
    for entry in plan.entries:
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, _ggml_type(entry.type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    offset = _aligned(partial.stat().st_size)
    placements = []
    for entry in plan.entries:
        placements.append(stream.Placement(entry, offset))
        offset = _aligned(offset + entry.nbytes)
    files.preallocate(partial, offset)
    stream.write(partial, placements, threads=threads, progress=progress, allow_nonfinite=allow_nonfinite)


def _entry(name: str, source: plans.Source, target: str) -> plans.Entry:
    shape, length = source.shape, source.shape[-1] if len(source.shape) > 1 else 1
    block = quantize.TYPES.get(target)
    if block is None:
        return plans.Entry(
            name,
            shape,
            target,
            length * _FLOAT_SIZES[target],
            plans.whole(source),
            plans.conversion(source.dtype, target),
        )
    return plans.Entry(name, shape, target, block.row_bytes(length), plans.whole(source), _encoder(source.dtype, block))


def _encoder(dtype: str, block: quantize.BlockType) -> plans.Convert:
    def convert(rows: plans.Rows) -> plans.Rows:
        return block.encode(plans.widen(rows, dtype))

    return convert


_FLOAT_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT = 32  # GGUF's default; the file says nothing else


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _ggml_type(name: str) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[name]


def _writer(plan: Plan, path: Path | None) -> "GGUFWriter":
    """A writer that holds every key, in the order of llama.cpp's converter."""
    from gguf import GGML_QUANT_VERSION, GGUFType, GGUFWriter

    model, config, rope = plan.model, plan.model.config, plan.model.config.rope
    writer = GGUFWriter(path, phi3.GGUF_ARCHITECTURE)
    writer.add_type(GGUFType.MODEL)
    writer.add_name(plan.name)
    for key, value in _metadata(model).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.add_size_label(_size_label(plan))
    writer.add_context_length(config.context)
    writer.add_rope_scaling_orig_ctx_len(rope.original_context)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.inner)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_dimension_count(rope.dims)
    writer.add_rope_freq_base(rope.theta)
    writer.add_file_type(plan.file_type.number)
    writer.add_sliding_window(config.window or 0)
    if rope.is_long:
        writer.add_rope_scaling_attn_factors(rope.attention_factor)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    if plan.vocabulary is None:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(config.vocab)
    else:
        tokenizer.to_gguf(plan.vocabulary, writer)
    return writer


def _metadata(model: Model) -> Mapping[str, str | tuple[str, ...]]:
    """The general.* keys that say where a model came from, as far as the source does."""
    source = model.provenance
    found: dict[str, str | tuple[str, ...]] = {}
    if source.license:
        found["general.license"] = source.license.lower()
    if source.repo:
        found["general.source.huggingface.repository"] = source.repo
    if link := source.links.get("huggingface"):
        found["general.source.url"] = link
    if source.tags:
        found["general.tags"] = source.tags
    return found


def _size_label(plan: Plan) -> str:
    """Weights in a word, as file names carry them: 3.8B, 135M."""
    from gguf import size_label

    total = sum(math.prod(entry.shape) for entry in plan.entries)
    return str(size_label(total, total, 0, 0))
