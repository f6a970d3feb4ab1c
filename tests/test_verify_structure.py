"""The structure checks: a good export passes, and every damage is found and named."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import damage
import tiny
from linnet_export import gguf, gguf_file, hf, phi3
from linnet_export.errors import InputError
from linnet_export.model import Model, open_model
from linnet_export.verify import structure_hf
from linnet_export.verify.records import Finding
from linnet_export.verify.structure import check_structure

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SHARD = 20_000  # bytes: several shards


@dataclasses.dataclass(frozen=True)
class Exports:
    """A source with a template and longrope, exported both ways."""

    source: Model
    gguf: Path
    hf: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    folder = tmp_path_factory.mktemp("made")
    source = tiny.checkpoint(folder / "m", tiny.long_config())
    damage.edit_json(source / "tokenizer_config.json", lambda config: config.update(chat_template=TEMPLATE))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    file = gguf.export(source, folder / "gguf", outtype="bf16").files[0]
    directory = hf.export(source, folder / "hf", max_shard_size=SHARD).output
    return Exports(open_model(source), file, directory)


@pytest.fixture
def file(made: Exports, tmp_path: Path) -> Path:
    return Path(shutil.copy(made.gguf, tmp_path))


@pytest.fixture
def directory(made: Exports, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.hf, tmp_path / "hf"))


def failed(export: Path, source: Model) -> list[Finding]:
    return [finding for finding in check_structure(export, source) if not finding.passed]


def only(findings: list[Finding], *words: str) -> None:
    """One finding failed, and it says these words."""
    assert len(findings) == 1, findings
    said = f"{findings[0].subject} {findings[0].message}"
    assert all(word in said for word in words), said


@pytest.mark.parametrize("outtype", ["f32", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("form", ["checkpoint", "card", "longrope", "tied"])
def test_a_good_gguf_file_passes(tmp_path: Path, outtype: str, form: str) -> None:
    source = _source(tmp_path / "m", form)
    export = gguf.export(source, tmp_path / "out", outtype=outtype).files[0]
    findings = check_structure(export, open_model(source))
    assert all(finding.passed for finding in findings), findings
    subjects = {finding.subject for finding in findings}
    assert {"rope base", "attention window", "norm epsilon", "tokens", "tensors", export.name} <= subjects
    assert ("rope_factors_long.weight" in subjects) == (form == "longrope")


@pytest.mark.parametrize("dtype", ["auto", "f32", "f16"])
@pytest.mark.parametrize("form", ["checkpoint", "card", "longrope", "tied"])
@pytest.mark.parametrize("limit", [SHARD, "5GB"])
def test_a_good_checkpoint_passes(tmp_path: Path, dtype: str, form: str, limit: str | int) -> None:
    source = _source(tmp_path / "m", form)
    export = hf.export(source, tmp_path / "out", dtype=dtype, max_shard_size=limit).output
    findings = check_structure(export, open_model(source))
    assert all(finding.passed for finding in findings), findings


def _source(path: Path, form: str) -> Path:
    if form == "card":
        return tiny.card(path)
    config = {"checkpoint": tiny.CONFIG, "longrope": tiny.long_config(), "tied": tiny.edited(tie_word_embeddings=True)}
    return tiny.checkpoint(path, config[form], dtype="F32" if form == "tied" else "BF16")


def test_an_export_without_a_tokenizer_passes_only_against_a_source_without_one(tmp_path: Path, made: Exports) -> None:
    source = made.source.directory
    file = gguf.export(source, tmp_path / "a", tokenizer="none").files[0]
    directory = hf.export(source, tmp_path / "b", tokenizer="none").output
    bare = open_model(source, tokenizer="none")
    assert failed(file, bare) == failed(directory, bare) == []
    assert "tokenizer.ggml.model" in {finding.subject for finding in failed(file, made.source)}
    assert "tokenizer.json" in {finding.subject for finding in failed(directory, made.source)}


def test_an_export_of_the_first_layers_is_checked_as_such(tmp_path: Path, made: Exports) -> None:
    source = made.source.directory
    exports = (
        gguf.export(source, tmp_path / "a", bind={"Layers": 1}).files[0],
        hf.export(source, tmp_path / "b", bind={"Layers": 1}).output,
    )
    for export in exports:
        assert all(finding.passed for finding in check_structure(export, made.source, layers=1))
        assert not all(finding.passed for finding in check_structure(export, made.source))
        with pytest.raises(InputError, match="layers is 3; 1 to 2"):
            check_structure(export, made.source, layers=3)


# GGUF: keys.


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("phi3.rope.freq_base", 1000.0, "rope base: phi3.rope.freq_base is 1000.0; 10000.0 is needed"),
        ("phi3.attention.sliding_window", 46, "attention window: phi3.attention.sliding_window is 46; 47 is needed"),
        ("phi3.attention.layer_norm_rms_epsilon", 1e-6, "norm epsilon: phi3.attention.layer_norm_rms_epsilon is 1e-06"),
        ("phi3.attention.head_count_kv", 2, "key/value heads: phi3.attention.head_count_kv is 2; 4 is needed"),
        ("phi3.rope.scaling.attn_factor", 1.0, "rope attention factor: phi3.rope.scaling.attn_factor is 1.0; 1.183216"),
        ("phi3.context_length", 4096, "context length: phi3.context_length is 4096; 128 is needed"),
        ("general.file_type", 1, "file type: general.file_type is 1; 32 is needed"),
        ("tokenizer.ggml.bos_token_id", 0, "special tokens: tokenizer.ggml.bos_token_id is 0; 1 is needed"),
    ],
)
def test_a_wrong_key_is_named_in_plain_words(file: Path, made: Exports, key: str, value: Any, words: str) -> None:
    damage.set_key(file, key, value)
    only(failed(file, made.source), words)


def test_a_wrong_eos_is_named_by_its_key_and_by_its_effect(file: Path, made: Exports) -> None:
    damage.set_key(file, "tokenizer.ggml.eos_token_id", 5)
    findings = {finding.subject: finding.message for finding in failed(file, made.source)}
    assert findings["tokenizer.ggml.eos_token_id"].endswith("tokenizer.ggml.eos_token_id is 5; 2 is needed")
    assert "llama.cpp ends at 2, 5" in findings["end tokens"]


def test_end_tokens_that_the_format_has_no_place_for_are_stated(made: Exports) -> None:
    (finding,) = (f for f in check_structure(made.gguf, made.source) if f.subject == "end tokens")
    assert finding.passed
    assert "no place for 7" in finding.message


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda k: k.pop("phi3.attention.sliding_window"), ("phi3.attention.sliding_window", "missing; 47")),
        (lambda k: k.update({"phi3.rope.scaling.type": "yarn"}), ("phi3.rope.scaling.type", "no key is needed")),
        (lambda k: k.update({"tokenizer.chat_template": TEMPLATE.replace("content", "role")}),
         ("chat template", "differs from character 29", "content", "role")),
        (lambda k: k["tokenizer.ggml.token_type"].__setitem__(1, 1), ("token types", "row 1, is 1; 3 is needed")),
        (lambda k: k["tokenizer.ggml.merges"].reverse(), ("merges", "row 0", "c d", "a b")),
        (lambda k: k["tokenizer.ggml.tokens"].pop(), ("tokens", "89 rows; 90 are needed")),
        (lambda k: k.update({"tokenizer.ggml.pre": "llama-bpe"}), ("tokenizer.ggml.pre", "llama-bpe", "gpt-2")),
    ],
)  # fmt: skip
def test_keys_and_rows_that_differ_are_named(
    file: Path, made: Exports, edit: Callable[[dict[str, Any]], None], words: tuple[str, ...]
) -> None:
    damage.rewritten(file, keys=edit)
    only(failed(file, made.source), *words)


def test_a_tokenizer_that_is_off_by_one_row_is_recognised(file: Path, made: Exports) -> None:
    def shift(keys: dict[str, Any]) -> None:
        tokens = keys["tokenizer.ggml.tokens"]
        keys["tokenizer.ggml.tokens"] = [*tokens[:5], "new", *tokens[5:-1]]

    damage.rewritten(file, keys=shift)
    only(failed(file, made.source), 'tokens, row 5, is "new"; "#" is needed', "one too late")


def test_a_key_of_another_type_is_found(file: Path, made: Exports) -> None:
    from gguf import GGUFReader, GGUFValueType

    field = GGUFReader(file, "r+").fields["phi3.block_count"]
    field.parts[2][0] = GGUFValueType.INT32.value
    only(failed(file, made.source), "phi3.block_count is stored as INT32; UINT32 is needed")


def test_another_name_is_no_failure(file: Path, made: Exports) -> None:
    damage.rewritten(file, keys=lambda keys: keys.update({"general.name": "another", "general.author": "someone"}))
    assert failed(file, made.source) == []


def test_a_file_of_a_type_that_is_not_exported_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "m")
    file = gguf.export(source, tmp_path / "out", outtype="f32").files[0]

    def convert(held: dict[str, Any]) -> None:
        from gguf import GGMLQuantizationType, quants

        for name, (data, _) in held.items():
            if data.ndim > 1 and data.shape[-1] % 32 == 0:
                held[name] = quants.quantize(data, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0
            elif data.ndim > 1:
                held[name] = data.astype(np.float64), GGMLQuantizationType.F64

    damage.rewritten(file, tensors=convert)
    findings = failed(file, open_model(source))
    assert any("the matrices are Q4_0, F64; one of F32, F16, BF16, Q8_0 is needed" in f.message for f in findings)


# GGUF: tensors and bytes.


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("blk.1.ffn_norm.weight"), ("blk.1.ffn_norm.weight", "missing; F32 of [64]")),
        (lambda t: t.update({"blk.2.ffn_norm.weight": t["blk.1.ffn_norm.weight"]}),
         ("blk.2.ffn_norm.weight", "no such tensor")),
        (lambda t: t.update({"output_norm.weight": (t["output_norm.weight"][0][:63], t["output_norm.weight"][1])}),
         ("output_norm.weight", "the shape is [63]; [64] is needed")),
        (lambda t: t["rope_factors_long.weight"][0].__setitem__(3, 9.5),
         ("rope_factors_long.weight", "row 3, is 9.5; 5.0")),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_extra_or_of_another_shape_are_named(
    file: Path, made: Exports, edit: Callable[[dict[str, Any]], None], words: tuple[str, ...]
) -> None:
    damage.rewritten(file, tensors=edit)
    only(failed(file, made.source), *words)


def test_a_file_that_was_cut_anywhere_is_a_failed_finding(file: Path, made: Exports) -> None:
    whole = file.read_bytes()
    data = gguf_file.read(file).data
    lengths = [0, 3, 4, 7, 8, 23, 24, 31, 100, 1000, data - 1, data, data + 1, len(whole) - 5000, len(whole) - 40]
    for length in (*lengths, *range(25, data, 97)):
        file.write_bytes(whole[:length])
        findings = failed(file, made.source)
        assert findings, length
        assert "needed" in findings[0].message, findings[0]
        assert findings[0].subject == file.name


def test_any_damaged_byte_of_the_header_is_a_finding_or_changes_nothing_that_is_compared(
    file: Path, made: Exports
) -> None:
    whole = bytearray(file.read_bytes())
    random = np.random.default_rng(3)
    for place in random.integers(0, gguf_file.read(file).data, 60):
        changed = bytearray(whole)
        changed[place] ^= int(random.integers(1, 256))
        file.write_bytes(changed)
        assert all(isinstance(finding, Finding) for finding in check_structure(file, made.source))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.__setitem__(slice(0, 4), b"GGML"), ("does not begin as a GGUF file",)),
        (lambda raw: raw.__setitem__(slice(4, 8), (9).to_bytes(4, "little")), ("version 9",)),
        (lambda raw: raw.__setitem__(slice(8, 16), (1 << 60).to_bytes(8, "little")), ("tensors announced",)),
        (lambda raw: raw.__setitem__(slice(16, 24), (1 << 60).to_bytes(8, "little")), ("keys announced",)),
        (lambda raw: raw.extend(bytes(64)), ("nothing may follow",)),
    ],
)
def test_damage_of_the_file_itself_is_said_in_words(
    file: Path, made: Exports, change: Callable[[bytearray], None], words: tuple[str, ...]
) -> None:
    raw = bytearray(file.read_bytes())
    change(raw)
    file.write_bytes(raw)
    only(failed(file, made.source), *words)


@pytest.mark.parametrize(("offset", "words"), [(0, "over the tensor before it"), (1, "a multiple of 32")])
def test_a_tensor_that_lies_elsewhere_is_found(file: Path, made: Exports, offset: int, words: str) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(file, "r+")
    tensor = next(t for t in reader.tensors if t.name == "output.weight")
    tensor.field.parts[-1][0] = offset
    del reader
    assert any("output.weight lies at bytes" in f.message and words in f.message for f in failed(file, made.source))


def test_what_is_no_export_is_refused(tmp_path: Path, made: Exports) -> None:
    with pytest.raises(InputError, match="does not exist; a"):
        check_structure(tmp_path / "nothing", made.source)
    with pytest.raises(InputError, match=r"has no config\.json"):
        check_structure(tmp_path, made.source)


# Hugging Face.


def config_edit(**values: Any) -> Callable[[Path], None]:
    return lambda directory: damage.edit_json(directory / "config.json", lambda config: config.update(values))


def rope_edit(**values: Any) -> Callable[[Path], None]:
    def edit(config: dict[str, Any]) -> None:
        for key, value in values.items():
            for group in (config, config["rope_parameters"], config["rope_scaling"]):
                if key in group:
                    group[key] = value

    return lambda directory: damage.edit_json(directory / "config.json", edit)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (rope_edit(rope_theta=1000.0), ("rope base", "1000.0 by rope_theta; 10000.0 is needed")),
        (config_edit(rope_theta=1000.0), ("config.json", "contradicts itself on the rotary base")),
        (config_edit(sliding_window=46), ("attention window", "46 by sliding_window; 47 is needed")),
        (config_edit(sliding_window=None), ("attention window", "none by sliding_window; 47 is needed")),
        (config_edit(rms_norm_eps=1e-6), ("norm epsilon", "1e-06 by rms_norm_eps; 1e-05 is needed")),
        (rope_edit(long_factor=tiny.SHORT), ("long factors", "[1.0, 1.125")),
        (config_edit(bos_token_id=3), ("bos_token_id", "3; 1 is needed")),
        (config_edit(torch_dtype="float16"), ("torch_dtype", '"float16"; "bfloat16" is needed')),
        (config_edit(rope_style="neox"), ("rope_style", "no such key is needed")),
        (lambda d: (d / "config.json").write_text("{"), ("config.json", "not valid JSON")),
    ],
)  # fmt: skip
def test_a_config_that_was_altered_is_named(
    directory: Path, made: Exports, edit: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    edit(directory)
    only(failed(directory, made.source), *words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"attention_bias": True}, "attention_bias is set; the architecture has no biases"),
        ({"quantization_config": {"quant_method": "awq"}}, "the checkpoint is quantized"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is another architecture"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is"),
    ],
)
def test_a_config_that_no_reader_accepts_is_named(
    directory: Path, made: Exports, values: dict[str, Any], words: str
) -> None:
    config_edit(**values)(directory)
    finding = failed(directory, made.source)[0]
    assert finding.subject == "config.json"
    assert words in finding.message


def test_a_wrong_eos_set_is_named_in_each_file_and_as_a_whole(directory: Path, made: Exports) -> None:
    for name in ("config.json", "generation_config.json"):
        damage.edit_json(directory / name, lambda content: content.update(eos_token_id=2))
    findings = failed(directory, made.source)
    assert [finding.subject for finding in findings] == ["eos_token_id", "eos_token_id", "end tokens"]
    assert "2, 7 is needed" in findings[-1].message


def test_every_field_of_the_configuration_is_compared() -> None:
    assert {f.name for f in dataclasses.fields(phi3.Config)} == structure_hf.CONFIG_FIELDS.keys() | {"rope"}
    # Whether the factor was given or derived is how it is written, not what it is.
    rope = structure_hf.ROPE_FIELDS.keys() | {"attention_factor_given"}
    assert {f.name for f in dataclasses.fields(phi3.Rope)} == rope


def test_a_shard_that_is_missing_cut_or_unknown_is_named(directory: Path, made: Exports) -> None:
    first, second, *_ = sorted(directory.glob("model-*.safetensors"))
    shutil.copy(first, directory / "model-00099.safetensors")
    only(failed(directory, made.source), "model-00099.safetensors", "does not name this file")
    (directory / "model-00099.safetensors").unlink()
    raw = second.read_bytes()
    second.write_bytes(raw[:-1])
    assert failed(directory, made.source)[0].message.startswith(f"{second}: ")
    for length in (0, 5, 8, 100):
        second.write_bytes(raw[:length])
        only(failed(directory, made.source), "weight files", second.name)
    second.unlink()
    only(failed(directory, made.source), "weight files", f"names {second.name}, which is not there")


def test_an_index_that_differs_from_the_files_is_named(directory: Path, made: Exports) -> None:
    index = directory / "model.safetensors.index.json"
    damage.edit_json(index, lambda content: content["metadata"].update(total_size=1))
    only(failed(directory, made.source), "total_size is 1; 150656 is needed")
    damage.edit_json(index, lambda content: content["weight_map"].pop("model.norm.weight"))
    assert any("model.norm.weight" in finding.message for finding in failed(directory, made.source))


def test_a_tensor_that_is_missing_or_extra_is_named(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "m")
    export = hf.export(source, tmp_path / "out").output
    tensors = tiny.weights(tiny.CONFIG)
    norm = tensors.pop("model.norm.weight")
    tiny.save(export / "model.safetensors", tensors)
    only(failed(export, open_model(source)), "model.norm.weight", "missing; BF16 of [64]")
    tensors |= {"model.norm.weight": norm, "model.norm.bias": norm}
    tiny.save(export / "model.safetensors", tensors)
    only(failed(export, open_model(source)), "model.norm.bias", "no such tensor")


def test_a_tokenizer_that_is_off_by_one_row_is_recognised_in_its_json(directory: Path, made: Exports) -> None:
    def shift(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        content["model"]["vocab"] = {
            token: i if i < 3 else 3 + (i - 2) % (len(vocab) - 3) for token, i in vocab.items()
        }

    damage.edit_json(directory / "tokenizer.json", shift)
    findings = failed(directory, made.source)
    assert findings[0].subject == "tokenizer.json"
    assert 'vocab, row 3, is "cd"; "!" is needed (from there on every row stands one too late)' in findings[0].message


def test_a_chat_template_that_was_altered_is_named(directory: Path, made: Exports) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("content", "role"))
    findings = failed(directory, made.source)
    assert [finding.subject for finding in findings] == ["chat_template.jinja", "chat template"]
    assert "differs from character 29" in findings[1].message


def test_tokenizer_files_that_are_missing_are_named(directory: Path, made: Exports) -> None:
    (directory / "tokenizer.json").unlink()
    assert failed(directory, made.source)[0].subject == "tokenizer.json"
