"""Small Phi-3 models with random weights, made and saved by transformers itself.

    model = save(Spec(kv_heads=3, window=8), directory)      # directory is then a Hugging Face checkpoint
    write_card(directory, spec)                              # or a Linnet card, without its weights
    write_gguf(file, spec, GGMLQuantizationType.Q8_0)        # or a GGUF file, by gguf's own writer

The same spec and seed give the same weights; specs that differ only in what has no shape share them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType
    from torch import Tensor
    from transformers import Phi3Config, Phi3ForCausalLM

# Small, as the embeddings of a trained model are: a mean square of 4e-4, against which an epsilon of 1e-5 counts.
WEIGHT_STD = 0.02
# Makes scores deviate by about 1, as in a trained model: with weights of 0.02 alone attention is nearly uniform, and
# errors in positions or in the order of query and key hardly show.
QUERY_KEY_GAIN = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Sizes, pairwise different (so are the 288 or, with 3 kv_heads, 192 rows of qkv, the 320 of gate_up and the 16
    dimensions of a head), so that nothing transposed or cut in the wrong place fits. Rows are multiples of 32, the
    smallest block of the quantized types. Factors make it longrope: as many as half the rotary dimensions."""

    vocab: int = 211
    hidden: int = 96
    heads: int = 6
    kv_heads: int = 6
    inner: int = 160
    layers: int = 2
    context: int = 64
    eps: float = 1e-5
    window: int | None = None
    theta: float = 10000.0
    partial_rotary: float = 1.0
    tied: bool = False
    original_context: int | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    attention_factor: float | None = None


def config_of(spec: Spec) -> "Phi3Config":
    """The spec as transformers' configuration, without special tokens."""
    from transformers import Phi3Config

    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": spec.theta,
        "partial_rotary_factor": spec.partial_rotary,
    }
    if spec.short_factors is not None and spec.long_factors is not None:
        rope |= {
            "rope_type": "longrope",
            "short_factor": list(spec.short_factors),
            "long_factor": list(spec.long_factors),
        }
        if spec.attention_factor is not None:
            rope["attention_factor"] = spec.attention_factor
    return Phi3Config(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        intermediate_size=spec.inner,
        num_hidden_layers=spec.layers,
        max_position_embeddings=spec.context,
        original_max_position_embeddings=spec.original_context or spec.context,
        rms_norm_eps=spec.eps,
        sliding_window=spec.window,
        tie_word_embeddings=spec.tied,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def model_of(spec: Spec, *, seed: int = 0) -> "Phi3ForCausalLM":
    """transformers' model in f32, with eager attention.

    Matrices are normal with deviation WEIGHT_STD (query and key rows QUERY_KEY_GAIN times that), norm weights uniform
    in 0.5 .. 1.5.
    """
    import torch
    from transformers import Phi3ForCausalLM

    model: Phi3ForCausalLM = Phi3ForCausalLM(config_of(spec))
    model.set_attn_implementation("eager")
    model.train(False).requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=draw)
            continue
        parameter.normal_(std=WEIGHT_STD, generator=draw)
        if name.endswith("qkv_proj.weight"):
            head_dim = spec.hidden // spec.heads
            parameter[: (spec.heads + spec.kv_heads) * head_dim] *= QUERY_KEY_GAIN
    return model


def save(
    spec: Spec, directory: Path, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "5GB"
) -> "Phi3ForCausalLM":
    """Saves the model as a Hugging Face checkpoint in torch's `dtype`, and returns it in that type."""
    import torch

    model = model_of(spec, seed=seed)
    for parameter in model.parameters():  # and not model.to(), which rounds the rotary frequencies as well
        parameter.data = parameter.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def tokens_of(spec: Spec, length: int, *, batch: int = 2, seed: int = 1) -> "Tensor":
    """Random tokens `[batch, length]`; a longer row begins like a shorter one only by chance."""
    import torch

    return torch.randint(spec.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


# The same models as cards and as GGUF files.


# Linnet path, Hugging Face name, GGUF name of what a model has once, and of what each layer has; all end in ".weight".
ONCE = (
    ("embedding", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("lm_head", "lm_head", "output"),
)
EACH = (
    ("attention_norm", "input_layernorm", "attn_norm"),
    ("attention.qkv", "self_attn.qkv_proj", "attn_qkv"),
    ("attention.o_proj", "self_attn.o_proj", "attn_output"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_up", "mlp.gate_up_proj", "ffn_up"),
    ("mlp.down", "mlp.down_proj", "ffn_down"),
)
NEST = """
[model]
name = "tiny"

[source]
path = "src/lib.linnet"

[generics]
Vocab = {spec.vocab}
H = {spec.hidden}
Heads = {spec.heads}
KvHeads = {spec.kv_heads}
Inner = {spec.inner}
Layers = {spec.layers}
Batch = 1
MaxSeq = {spec.context}
T = "f32"

[weights]
{weights}
bindings = "bindings.json"
"""


def names_of(spec: Spec) -> list[tuple[str, str, str]]:
    """The Linnet path, the Hugging Face name and the GGUF name of every tensor, the head's when tied as well."""
    names = list(ONCE)
    for i in range(spec.layers):
        names += [(f"layers.{i}.{path}", f"model.layers.{i}.{name}", f"blk.{i}.{ggml}") for path, name, ggml in EACH]
    return [(f"{path}.weight", f"{name}.weight", f"{ggml}.weight") for path, name, ggml in names]


def bindings_of(spec: Spec) -> dict[str, str]:
    return {path: name for path, name, _ in names_of(spec)}


def write_card(directory: Path, spec: Spec, weights: str = 'files = ["model.safetensors"]') -> Path:
    """A card without weights."""
    (directory / "src" / "deep").mkdir(parents=True)
    (directory / "nest.toml").write_text(NEST.format(spec=spec, weights=weights))
    (directory / "src" / "lib.linnet").write_text("// pub const THETA: f32 = 500.0\nmodule tiny\n")
    (directory / "src" / "rope.linnet").write_text(f"pub const THETA: f32 = {spec.theta} // the base\n")
    if spec.window is not None:
        (directory / "src" / "deep" / "attention.linnet").write_text(f"pub const WINDOW: i32 = {spec.window}\n")
    bindings = bindings_of(spec)
    if spec.tied:
        bindings["lm_head.weight"] = bindings["embedding.weight"]
    (directory / "bindings.json").write_text(json.dumps(bindings))
    return directory


def write_gguf(file: Path, spec: Spec, kind: "GGMLQuantizationType", *, split: int = 0) -> "dict[str, Tensor]":
    """The spec's model as llama.cpp's converter lays it out; returns the values that it holds, by checkpoint name."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    writer = GGUFWriter(file, "phi3", split_max_tensors=split)
    writer.add_context_length(spec.context)
    writer.add_rope_scaling_orig_ctx_len(spec.original_context or spec.context)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.inner)
    writer.add_block_count(spec.layers)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_rope_dimension_count(int(spec.hidden // spec.heads * spec.partial_rotary))
    writer.add_rope_freq_base(spec.theta)
    writer.add_sliding_window(spec.window or 0)
    if spec.short_factors and spec.long_factors and spec.attention_factor:
        writer.add_rope_scaling_attn_factors(spec.attention_factor)
        writer.add_tensor("rope_factors_long.weight", np.array(spec.long_factors, dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(spec.short_factors, dtype=np.float32))
    held, ggml_names = {}, {name: ggml for _, name, ggml in names_of(spec)}
    for name, tensor in model_of(spec).named_parameters():
        stored = GGMLQuantizationType.F32 if tensor.dim() == 1 else kind
        data = quantize(tensor.detach().numpy(), stored)
        writer.add_tensor(ggml_names[name], data, raw_dtype=stored)
        held[name] = torch.tensor(dequantize(data, stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
