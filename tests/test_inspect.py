"""What inspect says of a card, a checkpoint and a GGUF file."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from linnet_export import gguf, inspect
from linnet_export.errors import InputError, UnsupportedError
from tiny import edited, long_config


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "hf")


def weights(config: dict[str, Any]) -> int:
    return sum(values.size for values in tiny.weights(config).values())


def test_a_checkpoint_is_described(hf: Path) -> None:
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    info = inspect.read(hf)
    assert (info.form, info.name, info.architecture) == ("Hugging Face checkpoint", "hf", "Phi3ForCausalLM")
    assert (info.vocabulary, info.eos, info.chat_template) == (90, ((2, "<|end|>"),), "{{ messages }}")
    assert info.settings["window"] == 47
    assert info.settings["rotary dims"] == "16 of 16"
    assert info.weights == weights(tiny.CONFIG)
    assert info.nbytes == 2 * info.weights
    assert info.types == {"BF16": 15}
    assert {t.name: t.shape for t in info.tensors} == tiny.shapes(tiny.CONFIG)
    assert info.keys == {}


def test_a_card_is_described_by_linnet_paths(tmp_path: Path) -> None:
    info = inspect.read(tiny.card(tmp_path / "card", window=None))
    assert (info.form, info.name) == ("Linnet card", "tiny-phi")
    assert info.settings["window"] is None
    assert [t.name for t in info.tensors] == [tiny.linnet_path(name) for name in tiny.shapes(tiny.CONFIG)]


def test_longrope_settings_are_shown(tmp_path: Path) -> None:
    settings = inspect.read(tiny.checkpoint(tmp_path, long_config(attention_factor=1.5))).settings
    assert (settings["rope scaling"], settings["original context"], settings["attention factor"]) == (
        "longrope",
        32,
        1.5,
    )


def test_a_source_without_a_tokenizer_is_still_described(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "m", tokenizer=False)
    assert inspect.read(directory).tokenizer == "none"
    (directory / "config.json").write_text(json.dumps(edited(vocab_size=91)))
    with pytest.raises(InputError) as caught:
        inspect.read(directory)
    assert all("tokenizer" not in line for line in caught.value.problems)


@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
def test_a_gguf_file_is_described_by_its_own_keys(hf: Path, tmp_path: Path, outtype: str) -> None:
    done = gguf.export(hf, tmp_path / "out", outtype=outtype)
    info = inspect.read(done.files[0])
    assert (info.form, info.name, info.architecture) == ("GGUF file", "hf", "phi3")
    assert (info.tokenizer, info.vocabulary, info.eos) == ("gpt2", 90, ((2, "<|end|>"),))
    assert info.settings["attention.sliding_window"] == 47
    assert info.weights == weights(tiny.CONFIG)
    assert info.nbytes == done.nbytes
    assert info.types == {"f16": {"F16": 10, "F32": 5}, "q8_0": {"Q8_0": 8, "F32": 5, "F16": 2}}[outtype]
    shapes = {t.name: t.shape for t in info.tensors}
    assert shapes["blk.0.ffn_down.weight"] == (64, 80)
    assert "90 values" in str(info.keys["tokenizer.ggml.tokens"])
    assert info.keys["phi3.rope.freq_base"] == 10000.0


def test_the_data_of_each_form_are_json(hf: Path, tmp_path: Path) -> None:
    file = gguf.export(hf, tmp_path / "out").files[0]
    for path in (hf, tiny.card(tmp_path / "card"), file):
        info = inspect.read(path)
        data = json.loads(json.dumps(info.data()))
        assert data["weights"] == weights(tiny.CONFIG)
        assert data["nbytes"] == info.nbytes
        assert data["types"] == info.types
        assert len(data["tensors"]) == 15
        assert data["eos"] == [[2, "<|end|>"]]


@pytest.mark.parametrize("content", [b"", b"GGU", b"{}", b"\x80\x04pickle"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.gguf .* does not begin as a GGUF file"):
        inspect.read(path)


def test_a_damaged_gguf_file_is_refused_wherever_it_is_cut(hf: Path, tmp_path: Path) -> None:
    whole = gguf.export(hf, tmp_path / "x.gguf").files[0].read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (4, 8, 20, 24, 100, 1000, 3000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"cut\.gguf.* (ends|does not begin|damaged)") as caught:
            inspect.read(path)
        assert len(caught.value.problems) == 1


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        inspect.read(tmp_path / "gone")
    with pytest.raises(InputError, match="holds neither"):
        inspect.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(edited(architectures=["Phi3VForCausalLM"])))
    with pytest.raises(UnsupportedError, match="Phi3VForCausalLM"):
        inspect.read(tmp_path)
