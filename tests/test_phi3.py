"""The architecture's table of names and shapes, and the constraints of its sizes."""

import dataclasses
import math
from typing import Any

import pytest

import tiny
from linnet_export import phi3
from linnet_export.errors import Problems

CONFIG = phi3.Config(
    vocab=90,
    hidden=64,
    heads=4,
    kv_heads=4,
    inner=80,
    layers=2,
    context=128,
    eps=1e-5,
    window=47,
    rope=phi3.Rope(theta=10000.0, dims=16, original_context=128),
    tied=False,
)


def test_the_table_has_every_tensor_with_three_names_and_its_shape() -> None:
    grouped = dataclasses.replace(CONFIG, kv_heads=2)
    rows = {row.path: row for row in phi3.tensors(grouped)}
    assert {path: (row.hf, row.gguf, row.shape) for path, row in rows.items() if "1" in path or row.layer is None} == {
        "embedding.weight": ("model.embed_tokens.weight", "token_embd.weight", (90, 64)),
        "layers.1.attention_norm.weight": ("model.layers.1.input_layernorm.weight", "blk.1.attn_norm.weight", (64,)),
        "layers.1.attention.qkv.weight": (
            "model.layers.1.self_attn.qkv_proj.weight",
            "blk.1.attn_qkv.weight",
            (128, 64),
        ),
        "layers.1.attention.o_proj.weight": (
            "model.layers.1.self_attn.o_proj.weight",
            "blk.1.attn_output.weight",
            (64, 64),
        ),
        "layers.1.mlp_norm.weight": ("model.layers.1.post_attention_layernorm.weight", "blk.1.ffn_norm.weight", (64,)),
        "layers.1.mlp.gate_up.weight": ("model.layers.1.mlp.gate_up_proj.weight", "blk.1.ffn_up.weight", (160, 64)),
        "layers.1.mlp.down.weight": ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight", (64, 80)),
        "norm.weight": ("model.norm.weight", "output_norm.weight", (64,)),
        "lm_head.weight": ("lm_head.weight", "output.weight", (90, 64)),
    }
    assert len(rows) == 3 + 2 * 6
    assert {row.path for row in rows.values() if row.is_vector} == {path for path in rows if "norm" in path}


def test_the_table_agrees_with_the_one_written_for_the_tests() -> None:
    config = {**tiny.CONFIG, "num_key_value_heads": 2}
    ours = {row.hf: row.shape for row in phi3.tensors(dataclasses.replace(CONFIG, kv_heads=2))}
    assert ours == tiny.shapes(config)
    assert [row.path for row in phi3.tensors(CONFIG)] == [tiny.linnet_path(name) for name in tiny.shapes(tiny.CONFIG)]


def test_a_tied_model_has_no_head_of_its_own() -> None:
    tied = phi3.tensors(dataclasses.replace(CONFIG, tied=True))
    assert [row.path for row in phi3.tensors(CONFIG)] == [*(row.path for row in tied), phi3.HEAD]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.0.mlp.down.weight", 0),
        ("model.layers.31.self_attn.qkv_proj.weight", 31),
        ("layers.123.attention.qkv.weight", 123),
        ("layers.01.mlp.down.weight", None),
        ("layers.-1.mlp.down.weight", None),
        ("layers.².mlp.down.weight", None),
        ("layers..mlp.down.weight", None),
        ("layers.1.mlp.up.weight", None),
        ("model.layers.1.mlp.gate_up_proj.bias", None),
        ("root.layers.1.mlp.down.weight", None),
        ("norm.weight", None),
    ],
)
def test_the_layer_of_a_name(name: str, layer: int | None) -> None:
    assert phi3.layer_of(name) == layer


@pytest.mark.parametrize(
    ("context", "original", "factor", "expected"),
    [
        (131072, 4096, None, math.sqrt(17 / 12)),  # 1.190238, as published for 128k models
        (4096, 4096, None, 1.0),
        (2048, 4096, None, 1.0),
        (4096, 4096, 32.0, math.sqrt(17 / 12)),
        (131072, 4096, 0.5, 1.0),
        (8, 1, None, 1.0),
    ],
)
def test_the_derived_attention_factor(context: int, original: int, factor: float | None, expected: float) -> None:
    assert phi3.derived_attention_factor(context, original, factor) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"heads": 5, "kv_heads": 5}, ["64", "5 heads"]),
        ({"heads": 64}, ["64 / 64 = 1", "even"]),
        ({"kv_heads": 3}, ["4 heads", "3 key/value heads"]),
        ({"layers": 0}, ["layers is 0"]),
        ({"vocab": -1}, ["vocabulary size is -1"]),
        ({"window": 0}, ["window is 0"]),
        ({"eps": 0.0}, ["epsilon is 0.0"]),
        ({"eps": math.inf}, ["epsilon is inf"]),
        ({"rope": phi3.Rope(theta=0.0, dims=16, original_context=1)}, ["theta is 0.0"]),
        ({"rope": phi3.Rope(theta=1e4, dims=15, original_context=1)}, ["15 rotary dims"]),
        ({"rope": phi3.Rope(theta=1e4, dims=18, original_context=1)}, ["18 rotary dims", "head of 16"]),
        ({"rope": phi3.Rope(theta=1e4, dims=0, original_context=1)}, ["0 rotary dims"]),
    ],
)
def test_sizes_that_break_a_constraint_are_named(change: dict[str, Any], facts: list[str]) -> None:
    problems = Problems()
    phi3.check(dataclasses.replace(CONFIG, **change), problems)
    assert len(problems.lines) == 1
    for fact in facts:
        assert fact in problems.lines[0]


def test_sound_sizes_pass() -> None:
    problems = Problems()
    phi3.check(CONFIG, problems)
    phi3.check(dataclasses.replace(CONFIG, window=None, kv_heads=1), problems)
    problems.check()
