"""Any source opens to a checked model, or to one error with everything that is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from linnet_export import checkpoint, phi3
from linnet_export.errors import InputError, UnsupportedError
from linnet_export.model import Model, open_model


@pytest.fixture
def card(tmp_path: Path) -> Path:
    return tiny.card(tmp_path / "card")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "hf")


def config_json(directory: Path, **values: Any) -> Path:
    """A config.json like the card's or checkpoint's own, with other values; None removes nothing: it is null."""
    (directory / "config.json").write_text(json.dumps({**tiny.CONFIG, **values}))
    return directory


def edit(path: Path, old: str, new: str) -> None:
    content = path.read_text()
    assert content.count(old) == 1
    path.write_text(content.replace(old, new))


def three_layers(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Makes a card three layers deep; its configuration and weights."""
    config = {**tiny.CONFIG, "num_hidden_layers": 3}
    tensors = tiny.weights(config)
    tiny.save(directory / "model.safetensors", tensors)
    edit(directory / "nest.toml", "Layers = 2", "Layers = 3")
    (directory / "bindings.json").write_text(json.dumps({tiny.linnet_path(name): name for name in tensors}))
    return config, tensors


def refused(directory: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        open_model(directory, **options)
    return caught.value.problems


def one(problems: tuple[str, ...], *facts: str) -> None:
    """There is one problem, and it states the facts."""
    assert len(problems) == 1, problems
    for fact in facts:
        assert fact in problems[0], (fact, problems[0])


def contents(model: Model) -> dict[str, bytes]:
    return {path: source.read(0, source.shape[0]).tobytes() for path, source in model.tensors.items()}


def test_a_card_and_a_checkpoint_of_one_model_open_alike(card: Path, hf: Path) -> None:
    mine, theirs = open_model(card), open_model(hf)
    assert mine.config == theirs.config
    assert list(mine.tensors) == list(theirs.tensors) == [tensor.path for tensor in phi3.tensors(mine.config)]
    assert contents(mine) == contents(theirs)
    assert mine.dtype is not None
    assert theirs.dtype is not None
    assert mine.dtype.name == theirs.dtype.name == "bf16"
    assert (mine.form, theirs.form) == ("Linnet card", "Hugging Face checkpoint")
    assert (mine.name, theirs.name) == ("tiny-phi", "hf")
    assert (mine.notes, theirs.notes) == ((), ())
    assert mine.provenance.title == "Tiny Phi"
    assert mine.provenance.license == "MIT"
    assert mine.provenance.tags == ("text-generation",)
    assert (theirs.bos, theirs.eos, theirs.pad) == (1, (2,), 2)


@pytest.mark.parametrize("naming", ["checkpoint", "path", "root"])
def test_weights_may_go_by_any_one_kind_of_names(tmp_path: Path, hf: Path, naming: str) -> None:
    assert contents(open_model(tiny.card(tmp_path / naming, naming=naming))) == contents(open_model(hf))


def test_mixed_names_are_refused(card: Path) -> None:
    mixed = {
        tiny.linnet_path(name) if "layers.1" in name else name: values
        for name, values in tiny.weights(tiny.CONFIG).items()
    }
    tiny.save(card / "model.safetensors", mixed)
    problems = refused(card)
    assert any("mixed names" in line for line in problems)
    assert any("missing 6 tensors" in line for line in problems)


# A card and the config.json beside its weights.


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"vocab_size": 91}, ["Vocab", "90", "91"]),
        ({"hidden_size": 128, "head_dim": None}, ["hidden size", "64", "128"]),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, ["heads (Heads)", "4", "2"]),
        ({"num_key_value_heads": 2}, ["key/value heads", "4", "2"]),
        ({"intermediate_size": 81}, ["inner size", "80", "81"]),
        ({"num_hidden_layers": 3}, ["layers", "2", "3"]),
        ({"rope_theta": 10000.25}, ["THETA", "10000.0", "10000.25"]),
        ({"rms_norm_eps": 1e-6}, ["epsilon", "1e-05", "1e-06"]),
        ({"sliding_window": 46}, ["WINDOW", "47", "46"]),
        ({"sliding_window": None}, ["WINDOW", "47", "none"]),
        ({"tie_word_embeddings": True}, ["tied", "no", "yes"]),
        ({"partial_rotary_factor": 0.5}, ["rotated dims", "16", "8"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
            ["rope scaling", "none", "longrope"],
        ),
    ],
)
def test_a_config_beside_the_weights_that_disagrees_is_an_error_with_both_values(
    card: Path, values: dict[str, Any], facts: list[str]
) -> None:
    problems = [line for line in refused(config_json(card, **values)) if "must agree" in line]
    assert problems
    assert any(all(fact in line for fact in facts) for line in problems), problems
    assert all("config.json" in line for line in problems)


def test_every_disagreement_comes_in_one_error(card: Path) -> None:
    problems = refused(config_json(card, vocab_size=91, rope_theta=5.0, sliding_window=None, tie_word_embeddings=True))
    assert len([line for line in problems if "must agree" in line]) == 4


def test_a_window_that_only_the_config_has_is_a_disagreement(tmp_path: Path) -> None:
    card = tiny.card(tmp_path, window=None)
    assert open_model(card).config.window is None
    one(refused(config_json(card)), "WINDOW", "none in the card", "47 in")
    assert open_model(config_json(card, sliding_window=None)).config.window is None


def test_the_context_is_the_config_s_where_it_states_one_and_max_seq_elsewhere(card: Path) -> None:
    assert open_model(card).config.context == 128
    assert open_model(card, bind={"MaxSeq": 32}).config == open_model(card).config
    found = open_model(config_json(card, max_position_embeddings=512, original_max_position_embeddings=256)).config
    assert (found.context, found.rope.original_context) == (512, 256)
    config = {k: v for k, v in tiny.CONFIG.items() if "position" not in k}
    (card / "config.json").write_text(json.dumps(config))
    found = open_model(card, bind={"MaxSeq": 32}).config
    assert (found.context, found.rope.original_context) == (128, 128)


def test_token_ids_come_from_the_config(card: Path) -> None:
    found = open_model(config_json(card, bos_token_id=3, eos_token_id=[4, 2], pad_token_id=5))
    assert (found.bos, found.pad) == (3, 5)
    assert set(found.eos) >= {2, 4}


def test_the_config_beside_the_weights_counts_wherever_they_are(card: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (card / "model.safetensors").rename(weights / "model.safetensors")
    one(refused(card), "model.safetensors", "--weights")
    for place in (weights, weights / "model.safetensors"):
        assert open_model(card, weights=place).weights == weights
    config_json(weights, rope_theta=5.0)
    for place in (weights, weights / "model.safetensors"):
        one(refused(card, weights=place), "THETA", "10000.0", "5.0")
    one(refused(card, weights=tmp_path / "gone"), "--weights", "gone")


# The card's own weights.


def test_without_files_and_repository_every_weight_file_beside_the_card_counts(card: Path) -> None:
    edit(card / "nest.toml", 'files = ["model.safetensors"]\n', "")
    whole = contents(open_model(card))
    tensors = tiny.weights(tiny.CONFIG)
    tiny.save(card / "model.safetensors", {k: v for k, v in tensors.items() if "layers.1." not in k})
    tiny.save(card / "rest.safetensors", {k: v for k, v in tensors.items() if "layers.1." in k})
    tiny.save(card / "adapters.safetensors", {"layers.0.mlp.down.lora_a": tensors["lm_head.weight"]})
    assert contents(open_model(card)) == whole


def test_weights_are_found_in_hugging_face_s_cache(card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    revision = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    expected = contents(open_model(card))
    edit(card / "nest.toml", "[weights]\n", '[weights]\nrepo = "example/tiny-phi"\nrevision = "' + revision + '"\n')
    whole = card / "model.safetensors"
    content = whole.read_bytes()
    whole.unlink()
    one(refused(card), "model.safetensors", f"example/tiny-phi@{revision}", "--weights")
    snapshot = tmp_path / "hub/models--example--tiny-phi/snapshots" / revision
    snapshot.mkdir(parents=True)
    one(refused(card), f"example/tiny-phi@{revision}", "--weights")
    (snapshot / "model.safetensors").write_bytes(content)
    config_json(snapshot)
    found = open_model(card)
    assert contents(found) == expected
    assert found.weights == snapshot
    assert (found.provenance.repo, found.provenance.revision) == ("example/tiny-phi", revision)
    edit(card / "nest.toml", 'files = ["model.safetensors"]\n', "")
    assert contents(open_model(card)) == expected
    as_checkpoint = open_model(snapshot, tokenizer=card)
    assert as_checkpoint.name == "tiny-phi"
    assert (as_checkpoint.provenance.repo, as_checkpoint.provenance.revision) == ("example/tiny-phi", revision)


def test_a_repository_that_is_no_name_is_refused(card: Path) -> None:
    edit(card / "nest.toml", "[weights]\n", '[weights]\nrepo = "../.."\n')
    (card / "model.safetensors").unlink()
    one(refused(card), "../..", "repository name")


def test_pickle_weights_of_a_card_are_refused(card: Path) -> None:
    edit(card / "nest.toml", "model.safetensors", "pytorch_model.bin")
    (card / "pytorch_model.bin").write_bytes(b"\x80")
    one(refused(card), "pytorch_model.bin", "pickle")
    one(refused(card, weights=card / "pytorch_model.bin"), "pickle")


# Depth and type.


@pytest.mark.parametrize("form", ["card", "hf"])
def test_the_first_layers_are_exported_with_a_note(card: Path, hf: Path, form: str) -> None:
    config, tensors = three_layers(card)
    tiny.checkpoint(hf, config)
    directory = {"card": card, "hf": hf}[form]
    whole, cut = open_model(directory), open_model(directory, bind={"Layers": 2})
    assert (whole.config.layers, whole.notes) == (3, ())
    assert cut.config.layers == 2
    assert len(cut.notes) == 1
    assert "layer 2" in cut.notes[0]
    expected = contents(cut)
    assert expected == {path: raw for path, raw in contents(whole).items() if "layers.2." not in path}
    # The deeper layers need not be there.
    tiny.save(directory / "model.safetensors", {k: v for k, v in tensors.items() if "layers.2." not in k})
    found = open_model(directory, bind={"Layers": 2})
    assert found.notes == ()
    assert contents(found) == expected
    one(refused(directory), "missing 6 tensors")


def test_deeper_layers_are_known_by_their_bindings_too(card: Path) -> None:
    _, tensors = three_layers(card)
    renamed = {name.replace("model.layers.", "h."): values for name, values in tensors.items()}
    tiny.save(card / "model.safetensors", renamed)
    bindings = {tiny.linnet_path(old): new for old, new in zip(tensors, renamed, strict=True)}
    (card / "bindings.json").write_text(json.dumps(bindings))
    assert "layer 2" in open_model(card, bind={"Layers": 2}).notes[0]


def test_the_depth_of_a_config_is_compared_with_the_card_s_own(card: Path) -> None:
    config, _ = three_layers(card)
    config_json(card, **config)
    assert open_model(card, bind={"Layers": 1}).config.layers == 1
    config_json(card)
    one(refused(card, bind={"Layers": 2}), "layers (Layers)", "3", "2")


def test_layers_that_nobody_stated_are_refused(hf: Path) -> None:
    tiny.save(hf / "model.safetensors", tiny.weights({**tiny.CONFIG, "num_hidden_layers": 3}))
    one(refused(hf), "2 layers", "6 tensors", "model.layers.2.")


@pytest.mark.parametrize(
    ("bind", "facts"),
    [
        ({"Layers": 3}, ["Layers=3", "2 layers"]),
        ({"Layers": 0}, ["Layers=0", "2 layers"]),
        ({"Layers": "x"}, ["Layers=x", "Layers=N"]),
        ({"T": "f32"}, ["T=f32", "Layers=N"]),
    ],
)
def test_a_checkpoint_takes_no_bind_but_its_first_layers(
    hf: Path, bind: dict[str, int | str], facts: list[str]
) -> None:
    one(refused(hf, bind=bind), *facts)


def test_a_type_that_the_weights_do_not_have_names_the_options_that_convert(card: Path) -> None:
    one(refused(card, bind={"T": "f32"}), "T is f32", "15 tensors", "BF16", "--outtype", "--dtype")
    one(refused(card, bind={"T": "f16"}), "T is f16", "--bind T=bf16")
    tiny.save(card / "model.safetensors", tiny.weights(tiny.CONFIG), "F32")
    one(refused(card), "T is bf16", "F32", "--bind T=f32")
    found = open_model(card, bind={"T": "f32"})
    assert found.dtype is not None
    assert found.dtype.name == "f32"
    edit(card / "nest.toml", 'T = "bf16"\n', "")
    assert open_model(card).dtype == found.dtype


@pytest.mark.parametrize("naming", ["checkpoint", "path", "root"])
@pytest.mark.parametrize("form", ["card", "hf"])
def test_a_stored_head_of_a_tied_model_is_dropped_if_equal(tmp_path: Path, form: str, naming: str) -> None:
    config = {**tiny.CONFIG, "tie_word_embeddings": True}
    directory = tied(tmp_path, form)
    expected = contents(open_model(directory))
    assert "lm_head.weight" not in expected
    tensors = tiny.weights(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tiny.save(directory / "model.safetensors", named(tensors, naming))
    found = open_model(directory)
    assert found.config.tied
    assert contents(found) == expected
    assert len(found.notes) == 1
    assert "lm_head.weight equals the embedding" in found.notes[0]


@pytest.mark.parametrize("naming", ["checkpoint", "path", "root"])
def test_a_stored_head_that_differs_unties_a_checkpoint(tmp_path: Path, naming: str) -> None:
    directory = tied(tmp_path, "hf")
    tensors = tiny.weights(tiny.CONFIG)
    tiny.save(directory / "model.safetensors", named(tensors, naming))
    found = open_model(directory)
    assert not found.config.tied
    assert set(contents(found)) == {tiny.linnet_path(name) for name in tensors}
    assert len(found.notes) == 1
    assert "differs" in found.notes[0]
    assert "untied" in found.notes[0]


def test_a_stored_head_that_differs_contradicts_a_card_that_binds_it_to_the_embedding(tmp_path: Path) -> None:
    directory = tied(tmp_path, "card")
    for naming in ("path", "root", "checkpoint"):
        tiny.save(directory / "model.safetensors", named(tiny.weights(tiny.CONFIG), naming))
        problems = refused(directory)
        assert any("lm_head.weight differs" in line and "bind" in line for line in problems), problems


def tied(tmp_path: Path, form: str) -> Path:
    config = {**tiny.CONFIG, "tie_word_embeddings": True}
    if form == "hf":
        return tiny.checkpoint(tmp_path / form, config)
    directory = tiny.card(tmp_path / form)
    path = directory / "bindings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lm_head.weight": "model.embed_tokens.weight"}))
    tiny.save(directory / "model.safetensors", tiny.weights(config))
    return directory


def named(tensors: dict[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    prefix = {"checkpoint": None, "path": "", "root": "root."}[naming]
    if prefix is None:
        return tensors
    return {prefix + tiny.linnet_path(name): values for name, values in tensors.items()}


def test_a_bound_head_may_be_stored_once_under_any_kind_of_names(tmp_path: Path) -> None:
    directory = tied(tmp_path, "card")
    expected = contents(open_model(directory))
    for naming in ("path", "root"):
        tensors = tiny.weights({**tiny.CONFIG, "tie_word_embeddings": True})
        tiny.save(directory / "model.safetensors", named(tensors, naming))
        assert contents(open_model(directory)) == expected


# Tokenizer and token ids.


@pytest.mark.parametrize("make", [tiny.card, tiny.checkpoint])
def test_a_missing_tokenizer_names_the_option(tmp_path: Path, make: Callable[..., Path]) -> None:
    directory = make(tmp_path / "m", tokenizer=False)
    one(refused(directory), "no tokenizer", "--tokenizer DIR", "--tokenizer none")
    assert open_model(directory, tokenizer="none").tokenizer is None
    other = tmp_path / "tokenizer"
    other.mkdir()
    one(refused(directory, tokenizer=other), "no tokenizer", str(other))
    one(refused(directory, tokenizer=tmp_path / "gone"), "gone", "not a directory")
    tiny.byte_level_tokenizer(other, 90)
    found = open_model(directory, tokenizer=other)
    assert found.tokenizer is not None
    assert found.tokenizer.directory == other


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"bos_token_id": 90}, ["bos", "90", "90 rows"]),
        ({"eos_token_id": [2, 32000]}, ["eos", "32000", "90 rows"]),
        ({"pad_token_id": -2}, ["pad", "-2"]),
        ({"bos_token_id": "1"}, ["bos_token_id", '"1"']),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(hf: Path, values: dict[str, Any], facts: list[str]) -> None:
    one(refused(config_json(hf, **values)), *facts)


def test_end_tokens_are_the_union_of_every_place(hf: Path) -> None:
    config_json(hf, eos_token_id=3)
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4, 5], "temperature": 0.5}))
    found = open_model(hf)
    assert sorted(found.eos) == [2, 3, 4, 5]  # 2 is the tokenizer's
    assert found.generation_config["temperature"] == 0.5


# What is no model, and names.


def test_what_holds_no_model_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    one(refused(tmp_path / "empty"), "nest.toml", "config.json")
    one(refused(tmp_path / "gone"), "gone does not exist", "directory")
    (tmp_path / "x.safetensors").write_bytes(b"")
    one(refused(tmp_path / "x.safetensors"), "is a file", "directory")
    (tmp_path / "x.bin").write_bytes(b"")
    one(refused(tmp_path / "x.bin"), "pickle")


def test_bindings_are_for_cards(hf: Path, card: Path) -> None:
    one(refused(hf, bindings=card / "bindings.json"), "--bindings", "Linnet card")
    assert open_model(card, bindings=card / "bindings.json").name == "tiny-phi"


@pytest.mark.parametrize("name", ["a/b", "..", "", "-x", "a\nFROM b", "a\\b"])
def test_a_name_that_is_no_file_name_is_refused_wherever_it_comes_from(card: Path, name: str) -> None:
    one(refused(card, name=name), "--name")
    edit(card / "nest.toml", 'name = "tiny-phi"', f"name = {json.dumps(name)}")
    if name:
        one(refused(card), "--name", json.dumps(name))
    assert open_model(card, name="fine").name == "fine"


def test_another_architecture_is_refused_by_its_kind(hf: Path) -> None:
    config_json(hf, architectures=["PhiMoEForCausalLM"])
    with pytest.raises(UnsupportedError, match=r"PhiMoEForCausalLM.*supported: Phi3ForCausalLM"):
        open_model(hf)


def test_odd_tags_of_a_card_are_no_concern(card: Path) -> None:
    edit(card / "nest.toml", 'tags = ["text-generation"]', "tags = 5")
    edit(card / "nest.toml", 'license = "MIT"', "license = true")
    assert (open_model(card).provenance.tags, open_model(card).provenance.license) == ((), None)


def test_every_problem_of_a_checkpoint_comes_in_one_error(tmp_path: Path) -> None:
    hf = tiny.checkpoint(tmp_path, tokenizer=False)
    config_json(hf, rms_norm_eps="x", rope_theta=None)
    (hf / "model.safetensors").write_bytes(b"123")
    problems = refused(hf)
    for fact in ("rms_norm_eps", "rope_theta", "model.safetensors", "no tokenizer"):
        assert sum(fact in line for line in problems) == 1, (fact, problems)
    config_json(hf, pad_token_id=1000)
    tensors = tiny.weights(tiny.CONFIG)
    tensors["extra"] = tensors.pop("lm_head.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:63].copy()
    tiny.save(hf / "model.safetensors", tensors)
    problems = refused(hf)
    for fact in ("missing 1 tensor", "(extra)", "[63]", "no tokenizer", "pad token id is 1000"):
        assert sum(fact in line for line in problems) == 1, (fact, problems)


def test_every_problem_of_a_card_s_weights_comes_in_one_error(tmp_path: Path) -> None:
    card = config_json(tiny.card(tmp_path, tokenizer=False), rope_theta=5.0, bos_token_id=100)
    tensors = tiny.weights(tiny.CONFIG)
    del tensors["lm_head.weight"]
    tiny.save(card / "model.safetensors", tensors)
    problems = refused(card)
    for fact in ("THETA", "missing 1 tensor", "no tokenizer", "bos token id is 100"):
        assert sum(fact in line for line in problems) == 1, (fact, problems)


def test_nothing_but_headers_is_read_to_open_an_untied_model(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "read_exactly", lambda *_: pytest.fail("weights were read"))
    assert open_model(hf).config.layers == 2
