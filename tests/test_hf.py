"""Hugging Face checkpoints, loaded by transformers and read by the safetensors library."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import tiny
from linnet_export import hf, phi3
from linnet_export.converters import hf as converter
from linnet_export.errors import ExportError, InputError, OutputError
from tiny import LONG, LONGROPE, SHORT, edited, long_config

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "source")


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint directory, through the library and the index."""
    files = sorted(directory.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == values.dtype and torch.equal(found[name], values) for name, values in expected.items()
    )


def config_of(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "config.json").read_text())
    assert isinstance(found, dict)
    return found


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("dtype", TORCH)
def test_the_weights_have_the_source_s_bytes(tmp_path: Path, dtype: str) -> None:
    source = tiny.checkpoint(tmp_path / "source", dtype=dtype)
    done = hf.export(source, tmp_path / "out")
    assert equal(tensors(tmp_path / "out"), tensors(source))
    config = config_of(tmp_path / "out")
    assert config["dtype"] == config["torch_dtype"] == str(TORCH[dtype]).removeprefix("torch.")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # without which older transformers load nothing
    assert (done.output, done.tensors) == (tmp_path / "out", 15)
    assert done.nbytes == sum(t.nbytes for t in tensors(source).values())
    assert {str(path.relative_to(tmp_path / "out")) for path in done.files} == set(content(tmp_path / "out"))


@pytest.mark.parametrize("stored", TORCH)
@pytest.mark.parametrize(("dtype", "target"), [("f32", "F32"), ("f16", "F16"), ("bf16", "BF16")])
def test_a_dtype_converts_every_weight_as_pytorch_does(tmp_path: Path, stored: str, dtype: str, target: str) -> None:
    source = tiny.checkpoint(tmp_path / "source", dtype=stored)
    values = {name: torch.randn(t.shape).to(t.dtype) for name, t in tensors(source).items()}
    save_file(values, source / "model.safetensors")
    hf.export(source, tmp_path / "out", dtype=dtype)
    expected = {name: t.float().to(TORCH[target]) for name, t in values.items()}
    assert equal(tensors(tmp_path / "out"), expected)
    config = config_of(tmp_path / "out")
    assert config["dtype"] == config["torch_dtype"] == str(TORCH[target]).removeprefix("torch.")


# Loading in transformers.

CONFIGS = {
    "plain": edited(),
    "grouped": edited(num_key_value_heads=2),
    "tied": edited(tie_word_embeddings=True),
    "no window": edited(sliding_window=None),
    "window of zero": edited(sliding_window=0),
    "partial": edited(partial_rotary_factor=0.5),
    "theta in rope_parameters": edited("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 250000}),
    "longrope": long_config(),
    "su": long_config(type="su"),
    "new longrope": edited(
        "rope_theta",
        "rope_scaling",
        "original_max_position_embeddings",
        rope_parameters={
            "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
        },
    ),
    "attention factor": long_config(attention_factor=1.375),
    "stretch": long_config(factor=8.0),
}  # fmt: skip


# What transformers 5 reads differently, or not at all, in a source: its twin in words that it understands.
TWINS = {
    "window of zero": CONFIGS["no window"],  # a window that sees nothing
    "su": CONFIGS["longrope"],
    "new longrope": CONFIGS["longrope"],  # an absent top-level original context counts as 4096 and wins
}


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_the_model_with_equal_weights_and_logits(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    source = tiny.checkpoint(tmp_path / "source", config)
    hf.export(source, tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = tensors(source)
    if config["tie_word_embeddings"]:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert equal(model.state_dict(), expected)
    assert model.config.sliding_window == (config["sliding_window"] or None)
    assert model.config.num_key_value_heads == config["num_key_value_heads"]
    assert model.config.tie_word_embeddings is config["tie_word_embeddings"]
    # Past the window and past the original context, so that both matter.
    tokens = torch.arange(60).reshape(1, 60) % 90
    (source / "config.json").write_text(json.dumps(TWINS.get(name, config)))
    twin = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for count in (20, 60):
            assert torch.equal(model.float()(tokens[:, :count]).logits, twin(tokens[:, :count]).logits)


def test_both_schemas_stand_in_the_config(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", long_config() | {"rope_theta": 250000.0})
    hf.export(source, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["rope_scaling"] == {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    assert config["rope_parameters"] == {
        "rope_type": "longrope",
        "rope_theta": 250000.0,
        "partial_rotary_factor": 1.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 32,
    }
    assert config["rope_theta"] == 250000.0
    assert config["partial_rotary_factor"] == 1.0
    assert config["original_max_position_embeddings"] == 32
    assert config["max_position_embeddings"] == 128


@pytest.mark.parametrize("settings", [{"attention_factor": 1.375}, {"short_mscale": 1.375, "long_mscale": 1.375}])
def test_an_explicit_attention_factor_is_written_for_every_reader_and_said(
    tmp_path: Path, settings: dict[str, float]
) -> None:
    source = tiny.checkpoint(tmp_path / "source", long_config(**settings))
    done = hf.export(source, tmp_path / "out")
    config = config_of(tmp_path / "out")
    for group in ("rope_scaling", "rope_parameters"):
        for key in ("attention_factor", "short_mscale", "long_mscale"):
            assert config[group][key] == 1.375
    assert any("transformers 4" in note for note in done.notes)
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["attention_factor"] == 1.375


def test_an_export_exports_again_to_the_same_bytes(tmp_path: Path) -> None:
    for name, config in CONFIGS.items():
        source = tiny.checkpoint(tmp_path / name / "m", config)
        hf.export(source, tmp_path / name / "first/m")
        hf.export(tmp_path / name / "first/m", tmp_path / name / "second")
        first, second = content(tmp_path / name / "first/m"), content(tmp_path / name / "second")
        first.pop("README.md"), second.pop("README.md")
        assert first == second, name


# Head sizes for which head_dim * (dims / head_dim) falls short of dims in floating point.
@pytest.mark.parametrize(("dims", "head_dim"), [(30, 44), (2, 98), (26, 46), (96, 128), (64, 64)])
def test_a_partial_rotary_factor_gives_the_same_dims_again(dims: int, head_dim: int) -> None:
    factor = converter._partial_rotary_factor(dims, head_dim)
    assert int(head_dim * factor) == dims
    assert factor == pytest.approx(dims / head_dim)


def test_the_config_has_token_ids_window_and_carried_settings(tmp_path: Path) -> None:
    values = {"bos_token_id": None, "pad_token_id": None, "attention_dropout": 0.25, "initializer_range": 0.5,
              "auto_map": {"AutoConfig": "evil.py"}, "transformers_version": "4.0.0"}  # fmt: skip
    source = tiny.checkpoint(tmp_path / "source", edited(**values), tokenizer=False)
    hf.export(source, tmp_path / "out", tokenizer="none")
    config = config_of(tmp_path / "out")
    for key in ("bos_token_id", "pad_token_id"):
        assert key in config
        assert config[key] is None
    assert config["eos_token_id"] == 2
    assert config["sliding_window"] == 47
    assert (config["attention_dropout"], config["initializer_range"]) == (0.25, 0.5)
    assert not {"auto_map", "transformers_version"} & set(config)
    assert config["architectures"] == ["Phi3ForCausalLM"]


def test_every_end_token_is_kept_in_both_configs(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source")
    generation = {"eos_token_id": [2, 7, 10], "temperature": 0.5, "transformers_version": "4.39.0"}
    (source / "generation_config.json").write_text(json.dumps(generation))
    hf.export(source, tmp_path / "out")
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert sorted(written["eos_token_id"]) == sorted(config_of(tmp_path / "out")["eos_token_id"]) == [2, 7, 10]
    assert written["temperature"] == 0.5
    assert (written["bos_token_id"], written["pad_token_id"]) == (1, 2)
    assert "transformers_version" not in written


def test_tokenizer_files_are_carried_over(source: Path, tmp_path: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    hf.export(source, tmp_path / "out")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", source))
    text = "abc cd <|end|>!"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]


def test_without_a_tokenizer_no_tokenizer_file_is_written(source: Path, tmp_path: Path) -> None:
    done = hf.export(source, tmp_path / "out", tokenizer="none")
    assert set(content(tmp_path / "out")) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert any("no tokenizer" in note for note in done.notes)


# Cards.


@pytest.mark.parametrize("naming", ["checkpoint", "path", "root"])
def test_a_card_and_its_checkpoint_twin_are_one_checkpoint(source: Path, tmp_path: Path, naming: str) -> None:
    card = tiny.card(tmp_path / "card", naming=naming)
    hf.export(card, tmp_path / "a")
    hf.export(source, tmp_path / "b")
    mine, theirs = content(tmp_path / "a"), content(tmp_path / "b")
    assert mine["model.safetensors"] == theirs["model.safetensors"]
    config = config_of(tmp_path / "a")
    assert (config["sliding_window"], config["rope_theta"]) == (47, 10000.0)
    assert config | {"pad_token_id": 2} == config_of(tmp_path / "b")
    (card / "config.json").write_bytes((source / "config.json").read_bytes())
    hf.export(card, tmp_path / "c")
    assert content(tmp_path / "c") | {"README.md": b""} == theirs | {"README.md": b""}


def test_a_card_without_a_window_is_written_without_one(tmp_path: Path) -> None:
    hf.export(tiny.card(tmp_path / "card", window=None), tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert "sliding_window" in config
    assert config["sliding_window"] is None


def test_max_seq_changes_nothing_that_is_written(tmp_path: Path) -> None:
    card = tiny.card(tmp_path / "card")
    hf.export(card, tmp_path / "a")
    hf.export(card, tmp_path / "b", bind={"MaxSeq": 32, "Batch": 8})
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_the_first_layers_load_as_a_model_of_that_depth(tmp_path: Path) -> None:
    config = edited(num_hidden_layers=3)
    source = tiny.checkpoint(tmp_path / "source", config)
    done = hf.export(source, tmp_path / "out", bind={"Layers": 2})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    kept = {name: values for name, values in tensors(source).items() if "layers.2." not in name}
    assert equal(model.state_dict(), kept)
    assert any("layer 2" in note for note in done.notes)


def test_the_readme_says_where_the_model_came_from(tmp_path: Path) -> None:
    hf.export(tiny.card(tmp_path / "card"), tmp_path / "a")
    readme = (tmp_path / "a/README.md").read_text()
    for fact in ("# Tiny Phi", "tiny-phi", 'license: "mit"', "the source's", "Linnet card"):
        assert fact in readme
    hf.export(tiny.checkpoint(tmp_path / "m"), tmp_path / "b", dtype="f32", name="Other")
    readme = (tmp_path / "b/README.md").read_text()
    for fact in ("# Other", "converted", "float32"):
        assert fact in readme


# Shards.


def nbytes(source: Path) -> list[int]:
    return [t.nbytes for t in tensors(source).values()]


def test_shards_end_where_the_next_tensor_would_pass_the_limit(source: Path, tmp_path: Path) -> None:
    planned = hf.plan(source)
    sizes = {entry.name: entry.nbytes for entry in planned.entries}
    # The embedding, a norm, and the fused projection of the first layer, to the byte.
    limit = sum(list(sizes.values())[:3])
    done = hf.export(source, tmp_path / "out", max_shard_size=limit)
    names = sorted(path.name for path in done.files if path.suffix == ".safetensors")
    count = len(names)
    assert names == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    held: list[list[str]] = []
    for name in names:
        with safe_open(tmp_path / "out" / name, "pt") as opened:
            held.append(sorted(opened.keys(), key=list(sizes).index))
    assert index["weight_map"] == {tensor: name for name, shard in zip(names, held, strict=True) for tensor in shard}
    assert [tensor for shard in held for tensor in shard] == list(sizes)
    assert len(held[0]) == 3
    for shard, following in pairwise(held):
        assert sum(sizes[name] for name in shard) <= limit
        assert sum(sizes[name] for name in shard) + sizes[following[0]] > limit
    assert equal(tensors(tmp_path / "out"), tensors(source))
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict(), tensors(source))
    # One byte less, and the third tensor moves to the second shard.
    with safe_open(
        next(p for p in hf.export(source, tmp_path / "less", max_shard_size=limit - 1).files if "00001-of" in p.name),
        "pt",
    ) as opened:
        assert len(opened.keys()) == 2


def test_a_model_that_just_fits_is_one_file_without_an_index(source: Path, tmp_path: Path) -> None:
    total = sum(nbytes(source))
    hf.export(source, tmp_path / "one", max_shard_size=total)
    assert "model.safetensors" in content(tmp_path / "one")
    assert "model.safetensors.index.json" not in content(tmp_path / "one")
    hf.export(source, tmp_path / "two", max_shard_size=str(total - 1))
    assert "model-00002-of-00002.safetensors" in content(tmp_path / "two")


def test_a_tensor_larger_than_the_limit_is_a_shard_of_its_own(source: Path, tmp_path: Path) -> None:
    hf.export(source, tmp_path / "out", max_shard_size=1)
    assert len(list((tmp_path / "out").glob("model-*-of-00015.safetensors"))) == 15
    assert equal(tensors(tmp_path / "out"), tensors(source))


def test_a_tied_head_is_written_once_in_shards_too(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", edited(tie_word_embeddings=True))
    hf.export(source, tmp_path / "out", max_shard_size="20KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert len(index["weight_map"]) == 14


def test_sharded_sources_are_read_and_the_order_stays(source: Path, tmp_path: Path) -> None:
    hf.export(source, tmp_path / "shards/m", max_shard_size="20KB")
    hf.export(tmp_path / "shards/m", tmp_path / "whole", name="source")
    hf.export(source, tmp_path / "twin")
    assert content(tmp_path / "whole") == content(tmp_path / "twin")


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 500 * 10**6),
        ("2GiB", 2 * 2**30),
        ("1.5 kb", 1500),
        ("4.35GB", 4_350_000_000),
        ("7", 7),
        (7, 7),
        ("1T", 10**12),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_are_read_exactly(size: str | int, count: int) -> None:
    assert converter.parse_size(size) == count


@pytest.mark.parametrize("size", ["", "GB", "-1GB", "5 G i B", "5PB", "0", "0.0001", "nan", "9" * 400, "5e9"])
def test_what_is_no_size_is_refused_with_an_example(size: str) -> None:
    with pytest.raises(InputError, match="5GB"):
        converter.parse_size(size)


# Outputs.


@pytest.mark.parametrize("options", [{}, {"dtype": "f32", "max_shard_size": "30KB"}])
def test_two_runs_write_the_same_bytes_with_any_number_of_threads(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("linnet_export.stream.BLOCK_BYTES", 1000)
    for i, threads in enumerate((1, 1, 8)):
        hf.export(source, tmp_path / str(i), threads=threads, **options)
    assert content(tmp_path / "0") == content(tmp_path / "1") == content(tmp_path / "2")


def test_an_existing_output_is_refused_and_an_export_replaced_whole_by_force(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hf.export(source, out, max_shard_size="20KB")
    before = content(out)
    with pytest.raises(OutputError, match="--force"):
        hf.export(source, out)
    assert content(out) == before
    hf.export(source, out, force=True)
    hf.export(source, tmp_path / "twin")
    assert content(out) == content(tmp_path / "twin")
    assert tiny.listing(tmp_path) == ["out", "source", "twin"]


def test_force_does_not_replace_what_no_export_wrote(source: Path, tmp_path: Path) -> None:
    theirs = tiny.checkpoint(tmp_path / "theirs", seed=1)  # has no name that an export would not write
    out = tmp_path / "out"
    hf.export(source, out)
    (out / "thesis.tex").write_text("years")
    for directory, fact in ((theirs, "config.json"), (out, "thesis.tex")):
        before = content(directory)
        with pytest.raises(OutputError, match=f"{fact}.*no export wrote"):
            hf.export(source, directory, force=True)
        assert content(directory) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="is a file"):
        hf.export(source, tmp_path / "file", force=True)


def test_the_source_is_never_the_output(source: Path, tmp_path: Path) -> None:
    hf.export(source, tmp_path / "deep/export")
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    tiny.byte_level_tokenizer(tokenizer, 90)
    before = content(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "deep/export")
    cases: list[tuple[Path, Path, dict[str, Any]]] = [
        (source, source, {}),
        (source, tmp_path, {}),
        (tmp_path / "deep/export", tmp_path / "deep/export", {}),
        (tmp_path / "deep/export", tmp_path / "link", {}),
        (tmp_path / "deep/export", tmp_path / "deep", {}),
        (source, weights, {"weights": weights}),
        (source, tokenizer, {"tokenizer": tokenizer}),
    ]
    for model, output, options in cases:
        with pytest.raises(OutputError, match="another output directory"):
            hf.export(model, output, force=True, **options)
    (tmp_path / "link").unlink()
    assert content(tmp_path) == before
    hf.export(source, source / "inside/export")  # beside the source's own files is another place


@pytest.mark.parametrize(
    ("value", "options", "facts"),
    [
        (np.nan, {}, ["lm_head.weight", "nan at [88, 5]", "--allow-nonfinite"]),
        (np.inf, {"dtype": "bf16"}, ["lm_head.weight", "inf at [88, 5]"]),
        (70000.0, {"dtype": "f16"}, ["lm_head.weight", "inf at [88, 5]", "F16"]),
        (np.nan, {"max_shard_size": "20KB"}, ["lm_head.weight", "nan"]),
    ],
)
def test_a_value_that_cannot_be_written_leaves_nothing_behind_and_the_old_export_alone(
    tmp_path: Path, value: float, options: dict[str, Any], facts: list[str]
) -> None:
    source = tiny.checkpoint(tmp_path / "source")
    old = tmp_path / "old"
    hf.export(source, old)
    before = content(old)
    tiny.damage(source, value)
    for output in (tmp_path / "new/out", old):
        with pytest.raises(InputError) as caught:
            hf.export(source, output, force=True, **options)
        for fact in facts:
            assert fact in str(caught.value)
    assert content(old) == before
    assert tiny.listing(tmp_path) == ["old", "source"]
    hf.export(source, tmp_path / "let", allow_nonfinite=True, **options)
    found = tensors(tmp_path / "let")["lm_head.weight"].float()
    assert not torch.isfinite(found[88, 5])
    assert torch.isfinite(found).sum() == found.numel() - 1


def test_an_unknown_dtype_is_refused_with_the_known_ones(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--dtype q8_0.*f32, f16, bf16, auto"):
        hf.export(source, tmp_path / "out", dtype="q8_0")
    assert not (tmp_path / "out").exists()


def test_matrices_of_several_types_are_kept_and_the_widest_is_declared(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source")
    values = tiny.weights(tiny.CONFIG)
    (source / "model.safetensors").unlink()
    tiny.save(source / "b.safetensors", {"lm_head.weight": values.pop("lm_head.weight")}, "F32")
    tiny.save(source / "a.safetensors", values)
    done = hf.export(source, tmp_path / "out")
    assert config_of(tmp_path / "out")["dtype"] == "float32"
    assert any("float32" in note for note in done.notes)
    assert equal(tensors(tmp_path / "out"), tensors(source))


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m: (m / "model.safetensors").write_bytes(b"short"),
        lambda m: (m / "config.json").write_text("{"),
        lambda m: (m / "tokenizer.json").unlink(),
        lambda m: (m / "generation_config.json").write_text("[]"),
    ],
)
def test_a_source_that_is_refused_leaves_no_output(
    source: Path, tmp_path: Path, break_it: Callable[[Path], object]
) -> None:
    break_it(source)
    with pytest.raises(ExportError):
        hf.export(source, tmp_path / "new/out")
    assert tiny.listing(tmp_path) == ["source"]


def test_the_plan_is_what_is_written(source: Path, tmp_path: Path) -> None:
    planned = hf.plan(source, max_shard_size="20KB")
    hf.export(source, tmp_path / "out", max_shard_size="20KB")
    assert planned.config == config_of(tmp_path / "out")
    assert [shard.name for shard in planned.shards] == sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert [entry.name for entry in planned.entries] == [tensor.hf for tensor in phi3.tensors(planned.model.config)]


def test_long_factors_of_the_wrong_kind_never_reach_an_output(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", edited(rope_scaling={**LONGROPE, "long_factor": SHORT[:3]}))
    with pytest.raises(InputError, match="long_factor has 3"):
        hf.export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
