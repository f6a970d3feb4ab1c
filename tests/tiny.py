"""Tiny cards and checkpoints, written without the code under test.

Sizes are pairwise different, so that nothing transposed, swapped or cut can fit.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}

CONFIG: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    **SIZES,
    "original_max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": 47,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}


# longrope for the 16 rotary dims of CONFIG.
SHORT = [1.0 + i / 8 for i in range(8)]
LONG = [2.0 + i for i in range(8)]
LONGROPE: dict[str, Any] = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def edited(*without: str, **values: Any) -> dict[str, Any]:
    """CONFIG without some keys and with other values."""
    return {**{key: value for key, value in CONFIG.items() if key not in without}, **values}


def long_config(**values: Any) -> dict[str, Any]:
    """CONFIG with longrope past 32 positions, in the old schema."""
    return edited(original_max_position_embeddings=32, rope_scaling={**LONGROPE, **values})


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape, written down here once more on purpose."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = hidden // heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}."
        found[base + "input_layernorm.weight"] = (hidden,)
        found[base + "self_attn.qkv_proj.weight"] = ((heads + 2 * kv_heads) * dim, hidden)
        found[base + "self_attn.o_proj.weight"] = (hidden, heads * dim)
        found[base + "post_attention_layernorm.weight"] = (hidden,)
        found[base + "mlp.gate_up_proj.weight"] = (2 * inner, hidden)
        found[base + "mlp.down_proj.weight"] = (hidden, inner)
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    return found


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded f32 values that bf16 holds exactly; norms around 1."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(config).items():
        values = random.normal(1.0 if len(shape) == 1 else 0.0, 0.02, shape).astype(np.float32)
        found[name] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return found


def save(path: Path, tensors: dict[str, np.ndarray], dtype: str = "BF16") -> None:
    """Writes f32 arrays as a SafeTensors file of one type, with the format's own library."""
    import torch
    from safetensors.torch import save_file

    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    save_file({name: torch.from_numpy(values).to(kind) for name, values in tensors.items()}, path)


def checkpoint(
    directory: Path, config: dict[str, Any] | None = None, *, dtype: str = "BF16", seed: int = 0, tokenizer: bool = True
) -> Path:
    """A Hugging Face checkpoint directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG if config is None else config
    (directory / "config.json").write_text(json.dumps(config))
    save(directory / "model.safetensors", weights(config, seed), dtype)
    if tokenizer:
        byte_level_tokenizer(directory, config["vocab_size"])
    return directory


def damage(directory: Path, value: float) -> Path:
    """Puts a value at [88, 5] of the head, which is written last, of a checkpoint made f32."""
    tensors = weights(CONFIG)
    tensors["lm_head.weight"][88, 5] = value
    save(directory / "model.safetensors", tensors, "F32")
    return directory


def byte_level_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of printable ASCII with three control tokens first and two merges."""
    special = ["<unk>", "<s>", "<|end|>"]
    off = ("single_word", "lstrip", "rstrip", "normalized")
    pieces = [chr(c) for c in range(33, 33 + vocab_size - len(special) - 4)] + ["Ġ", "ab", "cd"]
    vocab = {piece: i for i, piece in enumerate(special + pieces)}
    merges = [["a", "b"], ["c", "d"]] if all(c in vocab for c in "abcd") else []
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": True, **dict.fromkeys(off, False)}
            for i, token in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "tokenizer_class": "AnyName"})
    )


NEST = """[model]
name = "tiny-phi"
title = "Tiny Phi"
summary = "A model for tests."
license = "MIT"
family = "phi3"
tags = ["text-generation"]

[links]
huggingface = "https://huggingface.co/example/tiny-phi"

[source]
path = "src/lib.linnet"
root = "Model"
entry = "forward"

[generics]
Vocab = 90
H = 64
Heads = 4
Inner = 80
Layers = 2
Batch = 1
MaxSeq = 128
T = "bf16"

[check]
B = 1
S = 8

[weights]
files = ["model.safetensors"]
bindings = "bindings.json"
"""

HF_TO_PATH = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.qkv_proj.weight": "attention.qkv.weight",
    "self_attn.o_proj.weight": "attention.o_proj.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_up_proj.weight": "mlp.gate_up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}


def linnet_path(name: str) -> str:
    """The Linnet path of a Hugging Face name."""
    if name.startswith("model.layers."):
        _, _, i, rest = name.split(".", 3)
        return f"layers.{i}.{HF_TO_PATH[rest]}"
    return HF_TO_PATH[name]


def card(
    directory: Path, *, nest: str = NEST, theta: str = "10000.0", window: str | None = "47", naming: str = "checkpoint",
    seed: int = 0, dtype: str = "BF16", tokenizer: bool = True,
) -> Path:  # fmt: skip
    """A Linnet card with its weights beside it; `naming` is checkpoint, path or root."""
    (directory / "src").mkdir(parents=True, exist_ok=True)
    (directory / "nest.toml").write_text(nest)
    (directory / "linnet.toml").write_text('[package]\nname = "tiny"\nversion = "0.1.0"\nlanguage = "0.1"\n')
    (directory / "src/lib.linnet").write_text("module tiny\n")
    (directory / "src/rope.linnet").write_text(
        f"module tiny.rope\n\n// pub const THETA: f32 = 1.0\npub const THETA: f32 = {theta}\n"
    )
    attention = "module tiny.attention\n" + (f"pub const WINDOW: i32 = {window}\n" if window else "")
    (directory / "src/attention.linnet").write_text(attention)
    tensors = weights(CONFIG, seed)
    (directory / "bindings.json").write_text(json.dumps({linnet_path(name): name for name in tensors}))
    prefix = {"checkpoint": None, "path": "", "root": "root."}[naming]
    if prefix is not None:
        tensors = {prefix + linnet_path(name): values for name, values in tensors.items()}
    save(directory / "model.safetensors", tensors, dtype)
    if tokenizer:
        byte_level_tokenizer(directory, SIZES["vocab_size"])
    return directory


def listing(directory: Path) -> list[str]:
    """The names in a directory, hidden ones too, sorted."""
    return sorted(path.name for path in directory.iterdir())
