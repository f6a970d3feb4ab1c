"""Reads a model into the reference, whatever it is stored as, with the formats' own libraries.

    load("models/phi-3-mini-4k-instruct")                                 # a Linnet card
    load("checkpoints/Phi-4-mini-instruct", dtype="f32", layers=2)        # a Hugging Face checkpoint
    load("out/gguf/Phi-3-mini-4k-instruct-Q8_0.gguf", window=None)        # a GGUF file, dequantized

Everything here is written a second time, on purpose: the names, the reading of configurations and the decoding of
blocks come from this file, from safetensors and from gguf, and from nothing that the exporters use.
ValueError for what is malformed, contradictory or another architecture, FileNotFoundError for what is not there.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from linnet_export.reference.phi3 import Config, Factors, Phi3, longrope_attention_factor

M = TypeVar("M", bound=nn.Module)
Dtype = Literal["f32", "bf16", "f16"]
DTYPES: dict[Dtype, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# Linnet path, Hugging Face name, GGUF name (transformers' modeling_phi3, gguf's tables for PHI3).
EMBEDDING, HEAD = "embedding.weight", "lm_head.weight"
NAMES = (
    (EMBEDDING, "model.embed_tokens.weight", "token_embd.weight"),
    ("norm.weight", "model.norm.weight", "output_norm.weight"),
    (HEAD, "lm_head.weight", "output.weight"),
)
LAYER_NAMES = (
    ("attention_norm.weight", "input_layernorm.weight", "attn_norm.weight"),
    ("attention.qkv.weight", "self_attn.qkv_proj.weight", "attn_qkv.weight"),
    ("attention.o_proj.weight", "self_attn.o_proj.weight", "attn_output.weight"),
    ("mlp_norm.weight", "post_attention_layernorm.weight", "ffn_norm.weight"),
    ("mlp.gate_up.weight", "mlp.gate_up_proj.weight", "ffn_up.weight"),
    ("mlp.down.weight", "mlp.down_proj.weight", "ffn_down.weight"),
)

CARD_EPSILON = 1e-5  # the default of the RMS norm in Linnet's standard library; a card cannot state another
BLOCK_ELEMENTS = 1 << 22  # how much of a GGUF tensor is decoded at once: 16 MiB of f32
EVERY = slice(None)


class Read(Protocol):
    """Gives a tensor by its Linnet path, in a type: all of it, or only some of its rows, in the order asked for.

    What it read is no longer mapped when it returns, so a reader of one tensor at a time has no more in memory.
    """

    def __call__(self, path: str, dtype: torch.dtype, rows: slice | list[int] = EVERY, /) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """An opened model: its config, and its tensors by Linnet path, none of them read yet.

    `dtype` is the type that the matrices are stored in, f32 where they are quantized, the type that holds them all
    where they differ; or the type to compute in, once that is `settled`. `read(path, dtype)` gives one tensor.
    """

    origin: Path
    config: Config
    dtype: torch.dtype
    read: Read

    def settled(
        self,
        *,
        layers: int | None = None,
        dtype: Dtype | torch.dtype | None = None,
        factors: Factors | None = None,
        window: int | Literal["own"] | None = "own",
    ) -> "Weights":
        """The same tensors, under the config and the type that these arguments of `load` ask for."""
        config = replace(self.config, factors=factors)
        if window != "own":
            config = replace(config, window=window)
        if layers is not None:
            if not 1 <= layers <= config.layers:
                raise ValueError(f"{self.origin} has {config.layers} layers; layers={layers} is not among them")
            config = replace(config, layers=layers)
        kind = self.dtype if dtype is None else DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if kind is None or kind not in DTYPES.values():
            raise ValueError(f"dtype is {dtype}; the reference computes in {', '.join(DTYPES)}")
        return replace(self, config=config, dtype=kind)

    def fill(self, module: M, prefix: str = "") -> M:
        """A module made on the meta device, with the tensors of its parameters, whose paths begin with `prefix`."""
        tensors: dict[str, Tensor] = {}
        for name, expected in module.named_parameters():
            path = prefix + name
            tensors[name] = self.read(path, self.dtype)
            if tensors[name].shape != expected.shape:
                found, needed = list(tensors[name].shape), list(expected.shape)
                raise ValueError(f"{self.origin}: {path} is {found}, the config needs {needed}")
        module.load_state_dict(tensors, assign=True)
        return module.requires_grad_(False).eval()


def load(
    model: str | Path,
    *,
    weights: str | Path | None = None,
    layers: int | None = None,
    dtype: Dtype | torch.dtype | None = None,
    factors: Factors | None = None,
    window: int | Literal["own"] | None = "own",
) -> Phi3:
    """The reference with the weights of a card directory, a checkpoint directory or a .gguf file.

    `weights` is where a card's weights are, a directory or a .safetensors file, if they are not beside it. `layers`
    keeps the first so many. `dtype` None is the stored type, see `Weights`. `factors` pins longrope's set, and
    `window` replaces the model's own: None lifts it, as llama.cpp does for this architecture.
    Tensors are read one at a time; none requires a gradient.
    """
    opened = open_weights(model, weights=weights)
    opened = opened.settled(layers=layers, dtype=dtype, factors=factors, window=window)
    with torch.device("meta"):  # shapes without memory: the tensors that are read become the parameters
        built = Phi3(opened.config)
    return opened.fill(built)


def open_weights(model: str | Path, *, weights: str | Path | None = None) -> Weights:
    """A model's config, and its tensors to be read one at a time; arguments and errors as `load`."""
    path = Path(model)
    if (path / "nest.toml").is_file():
        return _card(path, None if weights is None else Path(weights))
    if weights is not None:
        raise ValueError(f"{path} is not a card directory (no nest.toml), and only a card's weights lie elsewhere")
    if (path / "config.json").is_file():
        return _checkpoint(path)
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    raise ValueError(f"{path} is none of: a directory with nest.toml, one with config.json, a .gguf file")


def paths_of(config: Config) -> list[str]:
    """The Linnet path of every tensor of a model."""
    return list(_names(config, 0).values())


# A Hugging Face checkpoint.


def _checkpoint(directory: Path) -> Weights:
    """A checkpoint that ties its head but stores another one is untied: what is stored was trained."""
    config = _hf_config(_json(directory / "config.json"), directory / "config.json")
    held = _safetensors(_files_in(directory))

    def opened(tied: bool) -> Weights:
        settled = replace(config, tied=tied)
        named = {path: name for name, path in _names(settled, 1).items()}
        return _stored(settled, held, {"the names of transformers": named}, directory)

    if config.tied and {name for name, path in _names(replace(config, tied=False), 1).items() if path == HEAD} & set(
        held
    ):
        untied = opened(tied=False)
        if not torch.equal(untied.read(HEAD, untied.dtype), untied.read(EMBEDDING, untied.dtype)):
            return untied
    return opened(tied=config.tied)


def _hf_config(fields: Mapping[str, Any], origin: Path) -> Config:
    """config.json in either schema: transformers 4 (rope settings at the top and in rope_scaling) and 5
    (rope_parameters). A setting that stands in several places must be the same in all."""
    named = fields.get("model_type"), (fields.get("architectures") or [None])[0]
    if named not in (("phi3", "Phi3ForCausalLM"), ("phi3", None), (None, "Phi3ForCausalLM")):
        raise ValueError(f"{origin}: model_type {named[0]}, architecture {named[1]}; the reference is Phi3ForCausalLM")
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"{origin}: hidden_act is {fields['hidden_act']!r}; the reference has silu")
    groups = [fields, *(fields[key] for key in ("rope_parameters", "rope_scaling") if fields.get(key))]

    def rope(*keys: str) -> Any:
        found = [group[key] for group in groups for key in keys if group.get(key) is not None]
        if any(value != found[0] for value in found):
            raise ValueError(f"{origin}: {' / '.join(keys)} is stated differently: {found}")
        return found[0] if found else None

    values: dict[str, Any] = {
        key: fields.get(key)
        for key in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "num_hidden_layers",
            "rms_norm_eps",
        )
    }
    values["rope_theta"] = rope("rope_theta")
    if missing := [key for key, value in values.items() if value is None]:
        raise ValueError(f"{origin} has no {', '.join(missing)}")
    heads = values["num_attention_heads"]
    head_dim = values["hidden_size"] // max(heads, 1)
    if fields.get("head_dim") not in (None, head_dim):
        raise ValueError(f"{origin}: head_dim is {fields['head_dim']}, hidden_size / num_attention_heads is {head_dim}")

    kinds = {"longrope" if kind == "su" else kind for group in groups[1:] if (kind := _rope_type(group))}
    if len(kinds) > 1 or not kinds <= {"default", "longrope"}:
        raise ValueError(f"{origin}: rope type {' and '.join(sorted(kinds))}; the reference has default and longrope")
    partial = rope("partial_rotary_factor")
    config = Config(
        vocab=values["vocab_size"],
        hidden=values["hidden_size"],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        inner=values["intermediate_size"],
        layers=values["num_hidden_layers"],
        eps=values["rms_norm_eps"],
        window=fields.get("sliding_window") or None,  # 0 stands for none
        theta=values["rope_theta"],
        rotary_dims=int(head_dim * (1.0 if partial is None else partial)),
        tied=bool(fields.get("tie_word_embeddings", False)),
    )
    if "longrope" not in kinds:
        return config
    original, context = rope("original_max_position_embeddings"), fields.get("max_position_embeddings")
    short, long = rope("short_factor"), rope("long_factor")
    scale, factor = rope("attention_factor"), rope("factor")
    if original is None or short is None or long is None or (scale is None and factor is None and context is None):
        raise ValueError(
            f"{origin}: longrope needs short_factor, long_factor, original_max_position_embeddings, and one of "
            "attention_factor, factor and max_position_embeddings"
        )
    if scale is None:
        scale = longrope_attention_factor(original, context / original if factor is None else factor)
    return replace(
        config,
        original_context=original,
        short_factors=tuple(map(float, short)),
        long_factors=tuple(map(float, long)),
        attention_factor=scale,
    )


def _rope_type(group: Mapping[str, Any]) -> str | None:
    kind: str | None = group.get("rope_type") or group.get("type")
    return kind


# A Linnet card.


def _card(directory: Path, weights: Path | None) -> Weights:
    manifest = directory / "nest.toml"
    try:
        nest = tomllib.loads(manifest.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{manifest}: {error}") from error
    generics = nest.get("generics", {})
    needed = ("Vocab", "H", "Heads", "Inner", "Layers")
    if missing := [name for name in needed if not isinstance(generics.get(name), int)]:
        raise ValueError(f"{manifest}: [generics] has no integer for {', '.join(missing)}")
    constants = _constants(directory / nest.get("source", {}).get("path", "src/lib.linnet"))
    if "THETA" not in constants:
        raise ValueError(f"{directory}: no source has `pub const THETA`, the rotary base")
    where = nest.get("weights", {})
    bound = where.get("bindings")
    bindings = _json(directory / bound) if bound else {}
    config = Config(
        vocab=generics["Vocab"],
        hidden=generics["H"],
        heads=generics["Heads"],
        kv_heads=generics.get("KvHeads", generics["Heads"]),
        inner=generics["Inner"],
        layers=generics["Layers"],
        eps=CARD_EPSILON,
        window=int(constants.get("WINDOW", 0)) or None,
        theta=constants["THETA"],
        rotary_dims=generics["H"] // max(generics["Heads"], 1),
        tied=bindings.get(HEAD, HEAD) == bindings.get(EMBEDDING, EMBEDDING),
    )
    paths = paths_of(config)
    schemes = {
        "the bound names": {path: bindings.get(path, path) for path in paths},
        "Linnet paths": {path: path for path in paths},
        "Linnet paths below root": {path: f"root.{path}" for path in paths},
    }
    return _stored(config, _safetensors(_card_files(directory, weights, where)), schemes, directory)


def _constants(source: Path) -> dict[str, float]:
    """THETA and WINDOW, from every .linnet file beside or below the card's source file."""
    constant = re.compile(r"^\s*pub\s+const\s+(THETA|WINDOW)\s*:\s*\w+\s*=\s*(\S+)\s*$", re.MULTILINE)
    found: dict[str, tuple[float, Path]] = {}
    for file in sorted(source.parent.rglob("*.linnet")):
        text = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
        for name, literal in constant.findall(text):
            value, (before, first) = float(literal), found.get(name, (float(literal), file))
            if value != before:
                raise ValueError(f"{name} is {before:g} in {first} and {value:g} in {file}")
            found[name] = value, file
    return {name: value for name, (value, _) in found.items()}


def _card_files(directory: Path, weights: Path | None, where: Mapping[str, Any]) -> list[Path]:
    """The card's files, where `weights` says or beside the card; else its repository's, from Hugging Face's cache."""
    if weights is not None and weights.is_file():
        return [weights]
    base = directory if weights is None else weights
    listed, repo, revision = where.get("files") or [], where.get("repo"), where.get("revision")
    if listed and all((base / name).is_file() for name in listed):
        return [base / name for name in listed]
    if weights is not None or not (repo or listed):
        return _files_in(base)
    if not repo:
        absent = [name for name in listed if not (base / name).is_file()]
        raise FileNotFoundError(f"{directory} has no {', '.join(absent)}, and the card names no repository")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"the weights of {directory} are neither beside it nor in Hugging Face's cache ({repo} at {revision})"
        ) from error
    return [snapshot / name for name in listed] or _files_in(snapshot)


# SafeTensors, for both.


def _files_in(directory: Path) -> list[Path]:
    """What the index lists, or else every .safetensors file."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"{index} names files outside its directory: {', '.join(outside)}")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no .safetensors file")
    return files


@dataclass(frozen=True, slots=True)
class _Held:
    file: Path
    dtype: str
    dims: int


def _safetensors(files: Iterable[Path]) -> dict[str, _Held]:
    """Where each tensor of the files is, by its name."""
    found: dict[str, _Held] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist")
        try:
            with safe_open(file, framework="pt") as handle:
                names = sorted(handle.keys())
                slices = [handle.get_slice(name) for name in names]
                held = [_Held(file, part.get_dtype(), len(part.get_shape())) for part in slices]
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}") from error
        if twice := [name for name in names if name in found]:
            raise ValueError(f"{twice[0]} is stored twice, the second time in {file}")
        found |= zip(names, held, strict=True)
    return found


def _stored(
    config: Config, held: Mapping[str, _Held], schemes: Mapping[str, Mapping[str, str]], origin: Path
) -> Weights:
    """The tensors under the first naming scheme that finds all of them: one for all, never mixed."""
    missing = {label: [name for name in named.values() if name not in held] for label, named in schemes.items()}
    label = min(missing, key=lambda scheme: len(missing[scheme]))
    if any(name.endswith((".lora_a", ".lora_b")) for name in held):
        raise ValueError(f"{origin}: the files hold adapters; the reference reads whole weights")
    if absent := missing[label]:
        some = ", ".join(absent[:3])
        raise ValueError(f"{origin}: {len(absent)} tensors are missing under {label}, among them {some}")
    named = schemes[label]
    types = {name: held[name].dtype for name in named.values()}
    if strange := {name: kind for name, kind in types.items() if kind not in SAFETENSORS_DTYPES}:
        name, kind = next(iter(strange.items()))
        raise ValueError(f"{origin}: {name} is stored as {kind}; the reference reads {', '.join(SAFETENSORS_DTYPES)}")
    matrices = [SAFETENSORS_DTYPES[kind] for name, kind in types.items() if held[name].dims > 1]

    def read(path: str, dtype: torch.dtype, rows: slice | list[int] = EVERY, /) -> Tensor:
        name = named[path]
        with safe_open(held[name].file, framework="pt") as handle:  # the file stays mapped while a handle is open
            mapped: Tensor = handle.get_tensor(name)
        return mapped[rows].to(dtype, copy=True)

    return Weights(origin=origin, config=config, dtype=reduce(torch.promote_types, matrices), read=read)


# A GGUF file.


def _gguf(path: Path) -> Weights:
    """A file of architecture phi3, or all the files of one that is split, of which `path` is any."""
    from gguf import GGMLQuantizationType, GGUFReader

    parts = _parts(path)
    try:
        readers = [GGUFReader(file) for file in parts]
    except (ValueError, KeyError, IndexError) as error:  # what the library raises for a damaged header
        raise ValueError(f"{path}: {error}") from error
    tensors = {
        tensor.name: _Blocks(
            file=file,
            offset=int(tensor.data_offset),
            kind=tensor.tensor_type,
            stored=tensor.data.shape,
            dtype=tensor.data.dtype,
            shape=tuple(int(size) for size in reversed(tensor.shape)),  # gguf's order: the row length first
        )
        for file, reader in zip(parts, readers, strict=True)
        for tensor in reader.tensors
    }

    def key(name: str) -> Any:
        field = readers[0].get_field(name)
        return None if field is None else field.contents()

    if key("general.architecture") != "phi3":
        raise ValueError(f"{path}: architecture {key('general.architecture')!r}; the reference is phi3")
    values: dict[str, Any] = {
        name: key(f"phi3.{name}")
        for name in (
            "embedding_length",
            "attention.head_count",
            "feed_forward_length",
            "block_count",
            "attention.layer_norm_rms_epsilon",
            "rope.freq_base",
            "rope.dimension_count",
        )
    }
    absent = [f"phi3.{name}" for name, value in values.items() if value is None]
    if absent or "token_embd.weight" not in tensors:
        raise ValueError(f"{path} has no {', '.join(absent) or 'token_embd.weight'}")
    factors = {name: tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long")}
    short, long = (None if t is None else tuple(t.read(torch.float32).tolist()) for t in factors.values())
    config = Config(
        vocab=tensors["token_embd.weight"].shape[0],
        hidden=values["embedding_length"],
        heads=values["attention.head_count"],
        kv_heads=key("phi3.attention.head_count_kv") or values["attention.head_count"],
        inner=values["feed_forward_length"],
        layers=values["block_count"],
        eps=values["attention.layer_norm_rms_epsilon"],
        window=key("phi3.attention.sliding_window") or None,
        theta=values["rope.freq_base"],
        rotary_dims=values["rope.dimension_count"],
        tied="output.weight" not in tensors,
        original_context=key("phi3.rope.scaling.original_context_length"),
        short_factors=short,
        long_factors=long,
        # llama.cpp reads a file without the key as 1.
        attention_factor=1.0 if (scale := key("phi3.rope.scaling.attn_factor")) is None or short is None else scale,
    )
    named = {path: name for name, path in _names(config, 2).items()}
    if missing := [name for name in named.values() if name not in tensors]:
        raise ValueError(f"{path}: {len(missing)} tensors are missing, among them {', '.join(missing[:3])}")
    kinds = {
        GGMLQuantizationType.F32: torch.float32,
        GGMLQuantizationType.F16: torch.float16,
        GGMLQuantizationType.BF16: torch.bfloat16,
    }
    matrices = [tensors[name] for name in named.values() if len(tensors[name].shape) > 1]

    def read(path: str, dtype: torch.dtype, rows: slice | list[int] = EVERY, /) -> Tensor:
        return tensors[named[path]].read(dtype, rows)

    dtype = reduce(torch.promote_types, (kinds.get(tensor.kind, torch.float32) for tensor in matrices))
    return Weights(origin=path, config=config, dtype=dtype, read=read)


def _parts(path: Path) -> list[Path]:
    """The files of NAME-00001-of-0000N.gguf, in order; a file that is not so named is alone."""
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if split is None:
        return [path]
    parts = [path.with_name(f"{split[1]}-{i + 1:05}-of-{split[2]}.gguf") for i in range(int(split[2]))]
    if missing := [part for part in parts if not part.is_file()]:
        raise FileNotFoundError(f"{missing[0]} does not exist, {path.name} is a part of the same model")
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Where a tensor of a GGUF file lies, of `shape` `[Out, In]`, and the blocks that it is stored in."""

    file: Path
    offset: int
    kind: Any
    stored: tuple[int, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, dtype: torch.dtype, rows: slice | list[int] = EVERY) -> Tensor:
        """The values: gguf's own decoding to f32, some rows at a time, then cast to `dtype`."""
        from gguf.quants import dequantize

        mapped = np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.stored)
        chosen = mapped[rows] if len(self.shape) > 1 else mapped[None]
        out = torch.empty((len(chosen), self.shape[-1]), dtype=dtype)
        step = max(1, BLOCK_ELEMENTS // self.shape[-1])
        for start in range(0, len(out), step):
            out[start : start + step] = torch.tensor(dequantize(chosen[start : start + step], self.kind))
        return out if len(self.shape) > 1 else out[0]


# Small helpers.


def _names(config: Config, column: Literal[0, 1, 2]) -> dict[str, str]:
    """The names of a column of the tables, each with its Linnet path."""
    prefix = ("layers", "model.layers", "blk")[column]
    names = {row[column]: row[0] for row in NAMES if not (config.tied and row[0] == HEAD)}
    for i in range(config.layers):
        names |= {f"{prefix}.{i}.{row[column]}": f"layers.{i}.{row[0]}" for row in LAYER_NAMES}
    return names


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no object")
    return value
