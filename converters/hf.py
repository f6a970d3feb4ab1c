"""Hugging Face checkpoints that transformers and vLLM load: config.json, shards, index, tokenizer files.

    plan = hf.plan(model)                     # decides everything, reads no weight
    hf.write(plan, Path("out/hf"))

The weights' bytes stay as they are unless a dtype is asked for. config.json speaks both schemas, the one of
transformers 4 (and vLLM) and the one of transformers 5.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from linnet_export import __version__, checkpoint, dtypes, files, hf_config, phi3, stream, text, tokenizer_files
from linnet_export import plan as plans
from linnet_export.errors import InputError, OutputError
from linnet_export.model import CONFIG, GENERATION_CONFIG, Model

README = "README.md"
MARK = "Exported by linnet-export"  # in every README.md that an export writes
RECORD = "verify.json"  # what `--verify` found, kept in the directory
DEFAULT_SHARD = "5GB"  # what transformers writes, and what hubs and mirrors like
KEEP = "auto"
DTYPE_NAMES = (*dtypes.BY_NAME, KEEP)


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    entries: tuple[plans.Entry, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checkpoint directory, decided."""

    model: Model
    dtype: dtypes.Dtype
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def entries(self) -> tuple[plans.Entry, ...]:
        return tuple(entry for shard in self.shards for entry in shard.entries)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def plan(model: Model, *, dtype: str = KEEP, max_shard_size: str | int = DEFAULT_SHARD) -> Plan:
    """Decides a checkpoint; `dtype` f32, f16 or bf16 converts every weight, auto keeps each as it is."""
    if dtype not in DTYPE_NAMES:
        raise InputError(f"--dtype {dtype}: no such type; known: {', '.join(DTYPE_NAMES)}")
    limit = parse_size(max_shard_size)
    entries = []
    for tensor in phi3.tensors(model.config):
        source = model.tensors[tensor.path]
        target = source.dtype if dtype == KEEP else dtypes.BY_NAME[dtype].safetensors
        size = dtypes.BY_SAFETENSORS[target].size
        row_bytes = size * (source.shape[1] if len(source.shape) > 1 else 1)
        entries.append(
            plans.Entry(
                tensor.hf, source.shape, target, row_bytes, plans.whole(source), plans.conversion(source.dtype, target)
            )
        )
    notes = list(model.notes)
    stated = dtypes.BY_NAME[dtype] if dtype != KEEP else model.dtype
    if stated is None:
        # Matrices of several types: the widest loses nothing when a runtime casts all to one.
        stated = max((dtypes.BY_SAFETENSORS[e.type] for e in entries if len(e.shape) > 1), key=lambda d: d.size)
        notes.append(f"the matrices have different types; config.json says {stated.torch}, the widest")
    if model.tokenizer is None:
        notes.append("no tokenizer: transformers and vLLM take token ids only")
    if model.config.rope.attention_factor_given:
        notes.append(
            "the explicit attention factor is read by transformers 5 and vLLM; transformers 4 refuses such a config"
        )
    return Plan(
        model=model,
        dtype=stated,
        shards=_shards(entries, limit),
        config=config_json(model, stated),
        generation_config=_generation_config(model),
        notes=tuple(notes),
    )


def write(
    plan: Plan,
    output: Path,
    *,
    force: bool = False,
    threads: int | None = None,
    progress: stream.Progress | None = None,
    allow_nonfinite: bool = False,
) -> None:
    """Writes the directory whole or not at all."""
    _refuse_source(plan.model, output)
    with files.new_directory(output, force=force, foreign=foreign) as partial:
        _write_json(partial / CONFIG, plan.config)
        _write_json(partial / GENERATION_CONFIG, plan.generation_config)
        (partial / README).write_text(_readme(plan), encoding="utf-8")
        if plan.model.tokenizer is not None:
            for file in plan.model.tokenizer.files:
                target = partial / file.relative_to(plan.model.tokenizer.directory)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(text.read_bytes(file))
        for shard in plan.shards:
            path = partial / shard.name
            head = _safetensors_header(shard.entries)
            path.write_bytes(head)
            offset = len(head)
            placements = []
            for entry in shard.entries:
                placements.append(stream.Placement(entry, offset))
                offset += entry.nbytes
            files.preallocate(path, offset)
            stream.write(path, placements, threads=threads, progress=progress, allow_nonfinite=allow_nonfinite)
        if len(plan.shards) > 1:
            weight_map = {entry.name: shard.name for shard in plan.shards for entry in shard.entries}
            index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(partial / checkpoint.INDEX, index)


def config_json(model: Model, dtype: dtypes.Dtype) -> dict[str, Any]:
    """config.json, every setting in the place where each reader looks for it.

    longrope: transformers 4 accepts a `rope_scaling` of exactly type, short_factor and long_factor beside top-level
    settings; transformers 5 lets that object win whole over `rope_parameters`, so both say the same.
    """
    config, rope = model.config, model.config.rope
    partial = _partial_rotary_factor(rope.dims, config.head_dim)
    parameters: dict[str, Any] = {
        "rope_type": "longrope" if rope.is_long else "default",
        "rope_theta": rope.theta,
        "partial_rotary_factor": partial,
    }
    scaling: dict[str, Any] | None = None
    if rope.short is not None and rope.long is not None:
        scaling = {"type": "longrope", "short_factor": list(rope.short), "long_factor": list(rope.long)}
        if rope.attention_factor_given:
            scaling["attention_factor"] = rope.attention_factor
            scaling["short_mscale"] = scaling["long_mscale"] = rope.attention_factor
        parameters |= {key: value for key, value in scaling.items() if key != "type"}
        parameters["original_max_position_embeddings"] = rope.original_context
    eos: int | list[int] | None = list(model.eos) if len(model.eos) > 1 else (model.eos[0] if model.eos else None)
    carried = {key: model.hf_config[key] for key in hf_config.CARRIED if key in model.hf_config}
    return {
        "architectures": [phi3.ARCHITECTURE],
        "attention_bias": False,
        "bos_token_id": model.bos,
        "dtype": dtype.torch,
        "eos_token_id": eos,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.inner,
        "max_position_embeddings": config.context,
        "model_type": phi3.MODEL_TYPE,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "original_max_position_embeddings": rope.original_context,
        "pad_token_id": model.pad,
        "partial_rotary_factor": partial,
        "rms_norm_eps": config.eps,
        "rope_parameters": parameters,
        "rope_scaling": scaling,
        "rope_theta": rope.theta,
        "sliding_window": config.window,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype.torch,
        "use_cache": True,
        "vocab_size": config.vocab,
        **carried,
    }


def _partial_rotary_factor(dims: int, head_dim: int) -> float:
    """The rotating part of a head, such that readers, who take int(head_dim * factor), get `dims` again."""
    factor = dims / head_dim
    return factor if int(head_dim * factor) == dims else math.nextafter(factor, 1.0)


def foreign(directory: Path) -> list[str]:
    """The names in a directory that no export wrote: all, where its README.md does not say that one did."""
    names = sorted(path.name for path in directory.iterdir())
    readme = directory / README
    if readme.is_file() and MARK.encode() in readme.read_bytes():
        return [name for name in names if not _is_ours(name)]
    return names


def _is_ours(name: str) -> bool:
    return (
        name in (CONFIG, GENERATION_CONFIG, README, RECORD, checkpoint.INDEX, checkpoint.SINGLE)
        or name in tokenizer_files.FILES
        or name == tokenizer_files.ADDITIONAL_TEMPLATES
        or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None
    )


def parse_size(value: str | int) -> int:
    """Bytes of a size such as 5GB, 500MB (powers of 1000), 2GiB or a plain number."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?)(i?)B?\s*", str(value), re.IGNORECASE)
    if match is None:
        raise InputError(f"{value} is not a size; one such as 5GB, 500MB or 2GiB is needed")
    number, unit, binary = match.groups()
    count = int(Fraction(number) * (1024 if binary else 1000) ** "_KMGT".index(unit.upper() or "_"))
    if count < 1:
        raise InputError(f"a size of {value} holds nothing; one such as 5GB is needed")
    return count


def _shards(entries: Sequence[plans.Entry], limit: int) -> tuple[Shard, ...]:
    """Entries in order, a new shard wherever the next tensor would pass the limit."""
    groups: list[list[plans.Entry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    if len(groups) == 1:
        return (Shard(checkpoint.SINGLE, tuple(groups[0])),)
    return tuple(
        Shard(f"model-{i:05}-of-{len(groups):05}.safetensors", tuple(group)) for i, group in enumerate(groups, start=1)
    )


def _safetensors_header(entries: Sequence[plans.Entry]) -> bytes:
    """The length and JSON of a SafeTensors header, padded so that the data starts at a multiple of 8."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.type,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _generation_config(model: Model) -> dict[str, Any]:
    found = {key: value for key, value in model.generation_config.items() if key != "transformers_version"}
    found["bos_token_id"] = found.get("bos_token_id", model.bos)
    found["eos_token_id"] = list(model.eos) if len(model.eos) != 1 else model.eos[0]
    found["pad_token_id"] = found.get("pad_token_id", model.pad)
    return {key: value for key, value in found.items() if value not in (None, [])}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _refuse_source(model: Model, output: Path) -> None:
    places = [model.directory, model.weights, *([model.tokenizer.directory] if model.tokenizer else [])]
    for place in places:
        if Path(os.path.realpath(place)).is_relative_to(os.path.realpath(output)):
            raise OutputError(f"{output} holds the model that is exported; another output directory is needed")


def _readme(plan: Plan) -> str:
    model, source = plan.model, plan.model.provenance
    front = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if source.license:
        front["license"] = source.license.lower()
    if source.repo:
        front["base_model"] = source.repo
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {source.title or model.name}", ""]
    origin = (
        f"`{source.repo}`" + (f" at revision `{source.revision}`" if source.revision else "") if source.repo else ""
    )
    lines.append(
        f"{MARK} {__version__} from the {model.form} `{model.name}`"
        + (f", whose weights are those of {origin}." if origin else ".")
    )
    lines.append(
        f"{text.counted(len(plan.entries), 'tensor')}, {text.size(plan.nbytes)} in {plan.dtype.torch}; "
        + (
            "the bytes of every weight are the source's."
            if all(e.convert is None for e in plan.entries)
            else "converted from the source's types."
        )
    )
    lines += ["", "```", "vllm serve .", "```", ""]
    return "\n".join(lines)
