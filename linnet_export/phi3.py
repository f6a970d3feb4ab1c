"""The Phi-3 architecture: its sizes, and the one table of tensor names and shapes.

Every other module walks `tensors(config)`; names are written nowhere else (the reference has its own, on purpose).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from linnet_export.errors import Problems

ARCHITECTURE = "Phi3ForCausalLM"
MODEL_TYPE = "phi3"
GGUF_ARCHITECTURE = "phi3"
MAX_LAYERS = 512  # llama.cpp's own limit (LLAMA_MAX_LAYERS); the deepest published model has 40
MAX_SIZE = 2**31 - 1  # every runtime keeps sizes in 32 bits
EPSILON = 1e-5  # of the RMS norm, where a Linnet source says nothing: its standard library's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions.

    `dims` of each head rotate (the first ones). longrope divides the frequencies by `short` up to
    `original_context` positions and by `long` past it, one factor for each pair of dims, and multiplies cos and
    sin by `attention_factor`. `attention_factor_given` tells one that a configuration states from one derived
    from the context lengths.
    """

    theta: float
    dims: int
    original_context: int
    short: tuple[float, ...] | None = None
    long: tuple[float, ...] | None = None
    attention_factor: float = 1.0
    attention_factor_given: bool = False

    @property
    def is_long(self) -> bool:
        return self.short is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of one model. `window` counts the query itself; None attends to everything before it."""

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int
    context: int
    eps: float
    window: int | None
    rope: Rope
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused tensor: queries, then keys, then values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a model: its three names and its shape, `[out, in]` as stored."""

    path: str
    hf: str
    gguf: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def is_vector(self) -> bool:
        """Norm weights, which every GGUF file type keeps in f32."""
        return len(self.shape) == 1


# Linnet path, Hugging Face name, GGUF name, shape. `{i}` is the layer.
_Row = tuple[str, str, str, Callable[[Config], tuple[int, ...]]]

_BEFORE: tuple[_Row, ...] = (
    ("embedding.weight", "model.embed_tokens.weight", "token_embd.weight", lambda c: (c.vocab, c.hidden)),
)
_LAYER: tuple[_Row, ...] = (
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight",
     lambda c: (c.hidden,)),
    ("layers.{i}.attention.qkv.weight", "model.layers.{i}.self_attn.qkv_proj.weight", "blk.{i}.attn_qkv.weight",
     lambda c: (c.qkv_rows, c.hidden)),
    ("layers.{i}.attention.o_proj.weight", "model.layers.{i}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight",
     lambda c: (c.hidden, c.heads * c.head_dim)),
    ("layers.{i}.mlp_norm.weight", "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight",
     lambda c: (c.hidden,)),
    ("layers.{i}.mlp.gate_up.weight", "model.layers.{i}.mlp.gate_up_proj.weight", "blk.{i}.ffn_up.weight",
     lambda c: (2 * c.inner, c.hidden)),
    ("layers.{i}.mlp.down.weight", "model.layers.{i}.mlp.down_proj.weight", "blk.{i}.ffn_down.weight",
     lambda c: (c.hidden, c.inner)),
)  # fmt: skip
_AFTER: tuple[_Row, ...] = (
    ("norm.weight", "model.norm.weight", "output_norm.weight", lambda c: (c.hidden,)),
    ("lm_head.weight", "lm_head.weight", "output.weight", lambda c: (c.vocab, c.hidden)),
)

EMBEDDING = "embedding.weight"
HEAD = "lm_head.weight"

# Buffers that old checkpoints carry: derived from the configuration, so they are dropped (and listed).
LEFTOVERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def tensors(config: Config) -> tuple[Tensor, ...]:
    """Every tensor of a model, embedding first; a tied model has no head of its own."""
    rows: list[Tensor] = []
    for path, hf, gguf, shape in _BEFORE:
        rows.append(Tensor(path, hf, gguf, shape(config)))
    for i in range(config.layers):
        for path, hf, gguf, shape in _LAYER:
            rows.append(Tensor(path.format(i=i), hf.format(i=i), gguf.format(i=i), shape(config), i))
    for path, hf, gguf, shape in _AFTER:
        if not (config.tied and path == HEAD):
            rows.append(Tensor(path, hf, gguf, shape(config)))
    return tuple(rows)


def layer_of(name: str) -> int | None:
    """The layer that a Linnet path or Hugging Face name of this architecture belongs to, whatever the depth."""
    for path, hf, _, _ in _LAYER:
        for template in (path, hf):
            prefix, suffix = template.split("{i}")
            if name.startswith(prefix) and name.endswith(suffix):
                middle = name[len(prefix) : len(name) - len(suffix)]
                if middle.isascii() and middle.isdigit() and len(middle) < 10 and str(int(middle)) == middle:
                    return int(middle)
    return None


def derived_attention_factor(context: int, original_context: int, factor: float | None = None) -> float:
    """longrope's scale of cos and sin: sqrt(1 + ln f / ln original), 1 where nothing is stretched.

    f is `factor` where a configuration gives one, else context / original (transformers, modeling_rope_utils).
    """
    stretch = context / original_context if factor is None else factor
    if stretch <= 1.0 or original_context <= 1:
        return 1.0
    return math.sqrt(1.0 + math.log(stretch) / math.log(original_context))


def check(config: Config, problems: Problems) -> None:
    """Adds a line for each constraint of the architecture that the sizes break."""
    for name in ("vocab", "hidden", "heads", "kv_heads", "inner", "layers", "context"):
        value = getattr(config, name)
        most = MAX_LAYERS if name == "layers" else MAX_SIZE
        if value < 1:
            problems.add(f"{_WORDS[name]} is {value}; it must be at least 1")
        elif value > most:
            problems.add(f"{_WORDS[name]} is {value}; it must be at most {most}")
    if problems.lines:
        return
    rope = config.rope
    if config.hidden % config.heads:
        problems.add(f"hidden size {config.hidden} is not a multiple of the {config.heads} heads")
    elif config.head_dim % 2:
        problems.add(
            f"the head size is {config.hidden} / {config.heads} = {config.head_dim}; rotary positions need an even one"
        )
    elif rope.dims < 2 or rope.dims % 2 or rope.dims > config.head_dim:
        problems.add(
            f"{rope.dims} rotary dims do not fit a head of {config.head_dim}: an even number up to it is needed"
        )
    if config.heads % config.kv_heads:
        problems.add(f"{config.heads} heads cannot share {config.kv_heads} key/value heads evenly")
    if config.window is not None and not 1 <= config.window <= MAX_SIZE:
        problems.add(f"the attention window is {config.window}; it must be from 1 to {MAX_SIZE}, or absent for none")
    if not 1 <= rope.original_context <= MAX_SIZE:
        problems.add(f"the original context length is {rope.original_context}; it must be from 1 to {MAX_SIZE}")
    numbers = [
        ("the norm's epsilon", config.eps),
        ("rope theta", rope.theta),
        ("attention factor", rope.attention_factor),
    ]
    numbers += [
        (f"longrope's {n}th factor", value) for n, value in enumerate((*(rope.short or ()), *(rope.long or ())))
    ]
    for name, value in numbers:
        # Files and runtimes keep them as f32, where a number outside its normal range becomes 0 or infinity.
        if not _F32_SMALLEST <= value <= _F32_LARGEST:
            problems.add(f"{name} is {value}; a positive number that f32 holds is needed")


_F32_SMALLEST, _F32_LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


_WORDS = {
    "vocab": "the vocabulary size",
    "hidden": "the hidden size",
    "heads": "the number of heads",
    "kv_heads": "the number of key/value heads",
    "inner": "the inner (feed-forward) size",
    "layers": "the number of layers",
    "context": "the context length",
}
