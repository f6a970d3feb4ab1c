"""config.json in both rope schemas, and what is refused in it."""

import json
from typing import Any

import pytest

from linnet_export import hf_config, phi3
from linnet_export.errors import ExportError, InputError, UnsupportedError
from tiny import CONFIG, LONG, LONGROPE, SHORT, edited, long_config


def refused(config: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ExportError) as caught:
        hf_config.read(config, "m/config.json")
    assert all(line.startswith("m/config.json") for line in caught.value.problems)
    return caught.value.problems


def test_the_sizes_are_read_from_their_keys() -> None:
    config = hf_config.read(edited(num_key_value_heads=2), "config.json")
    assert config == phi3.Config(
        vocab=90,
        hidden=64,
        heads=4,
        kv_heads=2,
        inner=80,
        layers=2,
        context=128,
        eps=1e-5,
        window=47,
        rope=phi3.Rope(theta=10000.0, dims=16, original_context=128),
        tied=False,
    )
    assert (config.head_dim, config.qkv_rows) == (16, 128)


@pytest.mark.parametrize("config", [edited(num_key_value_heads=None), edited("num_key_value_heads")])
def test_key_value_heads_that_are_null_or_absent_equal_the_heads(config: dict[str, Any]) -> None:
    assert hf_config.read(config, "c").kv_heads == 4


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (edited("sliding_window"), None),
        (edited(sliding_window=None), None),
        (edited(sliding_window=0), None),
        (edited(sliding_window=2047), 2047),
        (edited(sliding_window=262144), 262144),
    ],
)
def test_a_window_of_null_zero_or_no_key_is_none(config: dict[str, Any], window: int | None) -> None:
    assert hf_config.read(config, "c").window == window


def test_absent_maximum_positions_are_what_the_caller_says_or_an_error() -> None:
    config = edited("max_position_embeddings", "original_max_position_embeddings")
    found = hf_config.read(config, "c", context=77)
    assert (found.context, found.rope.original_context) == (77, 77)
    assert any("lacks max_position_embeddings" in line for line in refused(config))
    assert hf_config.read(CONFIG, "c", context=77).context == 128


def test_both_rope_schemas_of_longrope_read_alike() -> None:
    old = hf_config.read(long_config(), "c")
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32,
        "short_factor": SHORT,
        "long_factor": LONG,
    }
    new = edited("rope_theta", "rope_scaling", "original_max_position_embeddings", rope_parameters=parameters)
    assert hf_config.read(new, "c") == old
    assert old.rope == phi3.Rope(
        theta=10000.0,
        dims=16,
        original_context=32,
        short=tuple(SHORT),
        long=tuple(LONG),
        attention_factor=phi3.derived_attention_factor(128, 32),
    )
    agreeing = {**new, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE, "rope_theta": 10000}
    assert hf_config.read(agreeing, "c") == old


def test_theta_of_rope_parameters_alone_is_read() -> None:
    config = edited("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 250000})
    assert hf_config.read(config, "c").rope.theta == 250000.0
    under_the_old_key = edited("rope_theta", rope_scaling={"rope_theta": 250000.0})
    assert hf_config.read(under_the_old_key, "c").rope.theta == 250000.0


def test_su_is_longrope() -> None:
    assert hf_config.read(long_config(type="su"), "c") == hf_config.read(long_config(), "c")


def test_the_factors_count_the_rotary_dims() -> None:
    sizes = {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75}
    factors = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    assert hf_config.read(edited(**sizes, rope_scaling=factors), "c").rope.dims == 96
    problems = refused(edited(**sizes, rope_scaling={**factors, "long_factor": [2.0] * 64}))
    assert len(problems) == 1
    assert "long_factor has 64 numbers" in problems[0]
    assert "96 rotary dims need 48" in problems[0]


@pytest.mark.parametrize(
    ("settings", "factor", "given"),
    [
        ({}, phi3.derived_attention_factor(128, 32), False),
        ({"attention_factor": 1.25}, 1.25, True),
        ({"short_mscale": 1.25, "long_mscale": 1.25}, 1.25, True),
        ({"attention_factor": 1.25, "short_mscale": 1.25, "long_mscale": 1.25}, 1.25, True),
        ({"factor": 4.0}, phi3.derived_attention_factor(128, 32), False),  # the stretch that the contexts say
        ({"factor": 8.0}, phi3.derived_attention_factor(256, 32), True),  # one that they do not
        ({"factor": 0.5}, 1.0, True),
    ],
)
def test_an_attention_factor_is_used_where_it_is_stated_and_derived_elsewhere(
    settings: dict[str, float], factor: float, given: bool
) -> None:
    rope = hf_config.read(long_config(**settings), "c").rope
    assert rope.attention_factor == pytest.approx(factor, rel=1e-15)
    assert rope.attention_factor_given is given


@pytest.mark.parametrize("name", [*hf_config.LOOK_ALIKES, "LlamaForCausalLM"])
def test_another_architecture_is_refused_by_name_with_what_is_supported(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{name}.*supported: Phi3ForCausalLM"):
        hf_config.read(edited(architectures=[name]), "c")


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (edited("architectures", model_type="phi3small"), ["phi3small", "Phi3ForCausalLM"]),
        (edited("architectures", "model_type"), ["model_type is null", "Phi3ForCausalLM"]),
        (edited(model_type="phi3_v"), ["phi3_v"]),
        (edited(architectures="Phi3ForCausalLM"), ["architectures", "list of names"]),
        (edited(architectures=[5]), ["architectures", "list of names"]),
        (edited(hidden_act="gelu"), ["gelu", "silu"]),
        (edited(hidden_act=["silu"]), ["hidden_act"]),
        (edited(attention_bias=True), ["attention_bias"]),
        (edited(mlp_bias=True), ["mlp_bias"]),
        (edited(quantization_config={"quant_method": "bitsandbytes"}), ["bitsandbytes", "16 bits"]),
    ],
)
def test_what_the_architecture_does_not_have_is_refused(config: dict[str, Any], facts: list[str]) -> None:
    problems = refused(config)
    assert len(problems) == 1
    for fact in facts:
        assert fact in problems[0]


@pytest.mark.parametrize("config", [edited("architectures"), edited("model_type"), edited(architectures=[])])
def test_the_architecture_may_be_named_by_one_key(config: dict[str, Any]) -> None:
    assert hf_config.read(config, "c").layers == 2


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (edited("vocab_size"), ["lacks vocab_size", "integer"]),
        (edited(hidden_size="64"), ["hidden_size", '"64"', "integer"]),
        (edited(hidden_size=64.5), ["hidden_size", "64.5"]),
        (edited(hidden_size=True), ["hidden_size", "true"]),
        (edited(intermediate_size=2**31), ["intermediate_size", str(2**31)]),
        (edited(intermediate_size=1e30), ["intermediate_size", "2^31"]),
        (edited(num_hidden_layers=0), ["layers is 0"]),
        (edited(num_attention_heads=0), ["heads is 0"]),
        (edited(num_attention_heads=-4), ["heads is -4"]),
        (edited(num_attention_heads=5, num_key_value_heads=5), ["64", "5 heads"]),
        (edited(num_key_value_heads=3), ["4 heads", "3 key/value heads"]),
        (edited(head_dim=8), ["head_dim is 8", "64 / 4"]),
        (edited(sliding_window=-1), ["window is -1"]),
        (edited(sliding_window="none"), ["sliding_window", '"none"']),
        (edited("rms_norm_eps"), ["lacks rms_norm_eps"]),
        (edited(rms_norm_eps="1e-5"), ["rms_norm_eps", "number"]),
        (edited(rms_norm_eps=0), ["epsilon is 0.0"]),
        (edited(tie_word_embeddings="yes"), ["tie_word_embeddings", "true or false"]),
        (edited("rope_theta"), ["lacks rope_theta"]),
        (edited(rope_theta=-1.0), ["theta is -1.0"]),
        (edited(rope_theta=[1]), ["rope_theta"]),
        (edited(original_max_position_embeddings=2.5), ["original_max_position_embeddings is 2.5"]),
        (edited(original_max_position_embeddings=-3), ["original_max_position_embeddings is -3"]),
        (edited(original_max_position_embeddings="x"), ["original_max_position_embeddings"]),
        (edited(partial_rotary_factor=1.5), ["partial_rotary_factor is 1.5"]),
        (edited(partial_rotary_factor=1e308), ["partial_rotary_factor"]),
        (edited(partial_rotary_factor=0), ["partial_rotary_factor"]),
        (edited(partial_rotary_factor=0.2), ["3 rotary dims", "16"]),
        (edited(rope_scaling=[]), ["rope_scaling is a list"]),
        (edited(rope_parameters=3), ["rope_parameters is an integer"]),
        (edited(rope_scaling={"type": "linear", "factor": 2.0}), ["linear", "longrope"]),
        (edited(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ["dynamic", "longrope"]),
        (edited(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0}), ["yarn", "longrope"]),
        (edited(rope_scaling={"type": ["longrope"]}), ['["longrope"]']),
        (edited(rope_scaling={}), ["rope_scaling", "null"]),
        (long_config(short_factor=None), ["without short_factor", "8 positive numbers"]),
        (long_config(long_factor="x"), ["long_factor", '"x"']),
        (long_config(long_factor=[1.0] * 7 + [-1.0]), ["long_factor", "positive"]),
        (long_config(long_factor=[1.0] * 7 + [True]), ["long_factor", "positive"]),
        (long_config(short_factor=[1.0] * 9), ["short_factor has 9", "16 rotary dims need 8"]),
        (long_config(attention_factor=0), ["attention_factor is 0"]),
        (long_config(factor="x"), ["factor is", "positive"]),
        (long_config(short_mscale=1.1, long_mscale=1.2), ["1.1", "1.2", "one attention factor"]),
        (edited("original_max_position_embeddings", rope_scaling=LONGROPE), ["lacks original_max_position_embeddings"]),
    ],
)  # fmt: skip
def test_a_malformed_setting_is_one_problem_with_what_was_found(config: dict[str, Any], facts: list[str]) -> None:
    problems = refused(config)
    assert len(problems) == 1, problems
    for fact in facts:
        assert fact in problems[0]


# Where both schemas speak they must agree.
@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (edited(rope_parameters={"rope_type": "default", "rope_theta": 250000.0}), ["10000.0", "250000.0"]),
        (edited(rope_parameters={"partial_rotary_factor": 0.5}, partial_rotary_factor=1.0), ["0.5", "1.0"]),
        (
            edited(
                "rope_scaling",
                rope_parameters={**LONGROPE, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
                original_max_position_embeddings=4096,
            ),
            ["original_max_position_embeddings = 32", "original_max_position_embeddings = 4096"],
        ),
        (long_config() | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, ["longrope", "default"]),
        (long_config() | {"rope_parameters": {**LONGROPE, "rope_theta": 1e4, "long_factor": SHORT}}, ["long_factor"]),
        (long_config(rope_type="default"), ["rope_scaling.rope_type", "rope_scaling.type"]),
    ],
)  # fmt: skip
def test_schemas_that_contradict_each_other_are_refused_with_both_values(
    config: dict[str, Any], facts: list[str]
) -> None:
    problems = refused(config)
    assert len(problems) == 1, problems
    assert "must agree" in problems[0]
    for fact in facts:
        assert fact in problems[0]


def test_every_problem_of_a_config_comes_in_one_error() -> None:
    config = edited(
        "vocab_size",
        rms_norm_eps="x",
        rope_theta=None,
        original_max_position_embeddings=-1,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 3},
    )
    problems = refused(config)
    for key in ("vocab_size", "rms_norm_eps", "rope_theta", "original_max", "short_factor", "long_factor"):
        assert sum(key in line for line in problems) == 1, (key, problems)
    assert len(problems) == 6


def test_reading_does_not_change_the_config() -> None:
    config = long_config(attention_factor=1.5)
    before = json.dumps(config)
    hf_config.read(config, "c")
    assert json.dumps(config) == before
    assert issubclass(UnsupportedError, ExportError)
    assert issubclass(InputError, ExportError)
