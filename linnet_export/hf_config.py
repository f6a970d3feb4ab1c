"""config.json of a Phi3ForCausalLM checkpoint, in either schema, to the architecture's `Config`.

transformers 4 wrote `rope_theta`, `partial_rotary_factor`, `original_max_position_embeddings` and `rope_scaling`
beside the sizes; transformers 5 writes `rope_parameters`. Both are read; where both speak they must agree.
Refused by name: other architectures, other rope scalings, biases, quantized checkpoints.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from linnet_export import phi3, text
from linnet_export.errors import InputError, Problems, UnsupportedError

# Same family name, different computation (transformers and the model cards of these checkpoints).
LOOK_ALIKES = (
    "Phi3SmallForCausalLM",
    "Phi3VForCausalLM",
    "PhiMoEForCausalLM",
    "PhimoeForCausalLM",
    "Phi4MMForCausalLM",
    "Phi4MultimodalForCausalLM",
    "Phi4FlashForCausalLM",
)

LONGROPE_TYPES = ("longrope", "su")  # su is the name that the first 128k checkpoints used
PLAIN_TYPES = ("default",)

# Values of these keys change nothing at inference, and are carried over to a re-exported config.json.
CARRIED = ("attention_dropout", "embd_pdrop", "initializer_range", "resid_pdrop", "use_cache")


def read(config: Mapping[str, Any], origin: str, *, context: int | None = None) -> phi3.Config:
    """The architecture that a config.json describes; `context` stands in for absent maximum positions.

    Raises InputError or UnsupportedError with every problem found; `origin` names the file in them.
    """
    _refuse_others(config, origin)
    reader = _Reader(config, origin)
    number = reader.integer

    vocab = number("vocab_size")
    hidden = number("hidden_size")
    heads = number("num_attention_heads")
    kv_heads = number("num_key_value_heads", optional=True)
    inner = number("intermediate_size")
    layers = number("num_hidden_layers")
    positions = number("max_position_embeddings", optional=context is not None)
    eps = reader.real("rms_norm_eps")
    window = number("sliding_window", optional=True)
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        reader.problems.add(f"{origin}: tie_word_embeddings is {text.shown(tied)}; true or false is needed")
    head_dim = number("head_dim", optional=True)
    if head_dim and hidden and heads and head_dim * heads != hidden:
        reader.problems.add(
            f"{origin}: head_dim is {head_dim}; hidden_size / num_attention_heads = {hidden} / {heads} is needed"
        )
    positions = context if positions is None else positions
    whole = hidden and heads and heads > 0 and hidden % heads == 0
    rope = _rope(reader, head_dim=hidden // heads if whole else None, context=positions)
    reader.problems.check()
    assert rope is not None  # what is missing was collected above
    assert positions is not None
    result = phi3.Config(
        vocab=vocab,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        inner=inner,
        layers=layers,
        context=positions,
        eps=eps,
        window=window or None,
        rope=rope,
        tied=tied,
    )
    problems = Problems()
    phi3.check(result, problems)
    if problems.lines:
        raise InputError([f"{origin}: {line}" for line in problems.lines])
    return result


class _Reader:
    """Values of a config with their types checked, problems collected."""

    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        self.config = config
        self.origin = origin
        self.problems = Problems()

    def integer(self, key: str, *, optional: bool = False) -> Any:
        value = self.config.get(key)
        if value is None:
            if not optional:
                self.problems.add(f"{self.origin} lacks {key}; an integer is needed")
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.problems.add(f"{self.origin}: {key} is {text.shown(value)}; an integer is needed")
            return None
        if not -(2**31) <= value < 2**31:  # every runtime keeps sizes in 32 bits
            self.problems.add(f"{self.origin}: {key} is {value}; a size below 2^31 is needed")
            return None
        return value

    def real(self, key: str) -> Any:
        return self.real_value(self.config.get(key), key)

    def real_value(self, value: object, key: str) -> Any:
        if value is None:
            self.problems.add(f"{self.origin} lacks {key}; a number is needed")
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.problems.add(f"{self.origin}: {key} is {text.shown(value)}; a number is needed")
            return None
        return float(value)


def _refuse_others(config: Mapping[str, Any], origin: str) -> None:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{origin}: architectures is {text.shown(names)}; a list of names is needed")
    if names and phi3.ARCHITECTURE not in names:
        why = "computes differently despite its name" if names[0] in LOOK_ALIKES else "is another architecture"
        raise UnsupportedError(f"{origin}: {names[0]} {why}; supported: {phi3.ARCHITECTURE}")
    kind = config.get("model_type")
    if kind != phi3.MODEL_TYPE and not (names and kind is None):
        raise UnsupportedError(
            f"{origin}: model_type is {text.shown(kind)}; supported: {phi3.MODEL_TYPE} ({phi3.ARCHITECTURE})"
        )
    problems = []
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        problems.append(f"{origin}: hidden_act is {text.shown(activation)}; the architecture has silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            problems.append(f"{origin}: {key} is set; the architecture has no biases")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        problems.append(
            f"{origin}: the checkpoint is quantized ({text.shown(method)}); merge it to 16 bits first "
            "(transformers: dequantize(), then save_pretrained)"
        )
    if problems:
        raise UnsupportedError(problems)


# One setting, and where each schema keeps it: (inside rope_parameters and rope_scaling, at the top level).
_SHARED = {
    "theta": ("rope_theta", "rope_theta"),
    "partial": ("partial_rotary_factor", "partial_rotary_factor"),
    "original": ("original_max_position_embeddings", "original_max_position_embeddings"),
}


def _rope(reader: _Reader, *, head_dim: int | None, context: int | None) -> phi3.Rope | None:
    """The rope settings of every place they may stand; None (and problems) where they are not whole.

    Without a sound `head_dim` or `context`, which are problems of their own, the rest is still looked at.
    """
    config, origin, problems = reader.config, reader.origin, reader.problems
    groups: dict[str, Mapping[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, dict):
            groups[key] = value
        elif value is not None:
            problems.add(f"{origin}: {key} is {text.json_kind(value)}; an object or null is needed")

    def agreed(what: str, inside: str, top: str | None = None) -> Any:
        """One setting from everywhere it may stand; places that differ are an error."""
        places = {f"{key}.{inside}": group[inside] for key, group in groups.items() if group.get(inside) is not None}
        if top is not None and config.get(top) is not None:
            places[top] = config[top]
        values = list(places.values())
        if any(value != values[0] for value in values[1:]):
            stated = " and ".join(f"{place} = {text.shown(value)}" for place, value in places.items())
            problems.add(f"{origin} contradicts itself on the {what}: {stated}; they must agree")
        return values[0] if values else None

    kinds: dict[str, object] = {}
    for key, group in groups.items():
        said = {f"{key}.{field}": group[field] for field in ("rope_type", "type") if group.get(field) is not None}
        # transformers 5 also accepts its new parameters under the old key: a theta alone is no scaling.
        plain = "default" if key == "rope_parameters" or "rope_theta" in group else None
        kinds |= said or {key: plain}
    named = {key: "longrope" if kind in LONGROPE_TYPES else kind for key, kind in kinds.items()}
    for key, kind in named.items():
        if kind not in ("longrope", *PLAIN_TYPES):
            problems.add(
                f"{origin}: {key} asks for {text.shown(kinds[key])}; the architecture has "
                f"{', '.join((*PLAIN_TYPES, *LONGROPE_TYPES))}"
            )
        elif kind != next(iter(named.values())):
            stated = " and ".join(f"{key} is {text.shown(kinds[key])}" for key in named)
            problems.add(f"{origin} contradicts itself on the rope type: {stated}; they must agree")

    theta = agreed("rotary base", *_SHARED["theta"])
    theta = reader.real_value(theta, "rope_theta")
    partial = agreed("rotated part of a head", *_SHARED["partial"])
    partial = 1.0 if partial is None else reader.real_value(partial, "partial_rotary_factor")
    if partial is not None and not 0 < partial <= 1:
        problems.add(f"{origin}: partial_rotary_factor is {partial}; a number above 0 and at most 1 is needed")
        partial = None
    dims = None if head_dim is None or partial is None else int(head_dim * partial)
    original = agreed("original context", *_SHARED["original"])
    is_long = "longrope" in named.values()
    if original is None:
        if is_long:
            problems.add(f"{origin} lacks original_max_position_embeddings, which longrope needs")
        original = context
    if original is not None and (
        isinstance(original, bool) or not isinstance(original, int | float) or original != int(original) or original < 1
    ):
        problems.add(
            f"{origin}: original_max_position_embeddings is {text.shown(original)}; a positive integer is needed"
        )
        original = None

    short = long = None
    attention, given = 1.0, False
    if is_long:
        short = _factors(reader, agreed("short factors", "short_factor"), "short_factor", dims)
        long = _factors(reader, agreed("long factors", "long_factor"), "long_factor", dims)
        attention, given = _attention_factor(reader, agreed, context, original)
    if theta is None or original is None or problems.lines:
        return None
    return phi3.Rope(
        theta=theta,
        dims=dims or 0,
        original_context=int(original),
        short=short,
        long=long,
        attention_factor=attention,
        attention_factor_given=given,
    )


def _factors(reader: _Reader, value: object, key: str, dims: int | None) -> tuple[float, ...] | None:
    origin, problems = reader.origin, reader.problems
    needed = f"a list of {'' if dims is None else f'{dims // 2} '}positive numbers is needed"
    if value is None:
        problems.add(f"{origin}: longrope without {key}; {needed}")
        return None
    if not isinstance(value, list) or not all(
        isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) and n > 0 for n in value
    ):
        problems.add(f"{origin}: {key} is {text.shown(value)}; {needed}")
        return None
    if dims is not None and len(value) != dims // 2:
        problems.add(f"{origin}: {key} has {len(value)} numbers; {dims} rotary dims need {dims // 2}")
        return None
    return tuple(float(n) for n in value)


def _attention_factor(
    reader: _Reader, agreed: Callable[[str, str], Any], context: int | None, original: int | None
) -> tuple[float, bool]:
    """longrope's attention factor, and whether the configuration states it.

    transformers reads attention_factor, else derives it (from `factor` where given); vLLM reads short_mscale and
    long_mscale, one for each set of factors. The architecture has one for both.
    """
    origin, problems = reader.origin, reader.problems
    stated = agreed("attention factor", "attention_factor")
    scales = {key: agreed(key, key) for key in ("short_mscale", "long_mscale")}
    values = {key: value for key, value in {"attention_factor": stated, **scales}.items() if value is not None}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            problems.add(f"{origin}: {key} is {text.shown(value)}; a positive number is needed")
            return 1.0, False
    if len(set(values.values())) > 1:
        stated_all = ", ".join(f"{key} {value}" for key, value in values.items())
        problems.add(f"{origin}: {stated_all} differ; the architecture has one attention factor")
        return 1.0, False
    if values:
        return float(next(iter(values.values()))), True
    factor = agreed("factor", "factor")
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0):
        problems.add(f"{origin}: factor is {text.shown(factor)}; a positive number is needed")
        return 1.0, False
    if context is None or context < 1 or original is None:
        return 1.0, False  # a problem of its own
    derived = phi3.derived_attention_factor(context, original, None if factor is None else float(factor))
    # A stretch that the context lengths do not say would be lost in a file that keeps only those.
    return derived, factor is not None and derived != phi3.derived_attention_factor(context, original)
