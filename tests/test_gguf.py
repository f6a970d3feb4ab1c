"""GGUF files, read back with the gguf library and held against the source."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, LlamaFileType, quants
from numpy.typing import NDArray

import tiny
from linnet_export import gguf, phi3
from linnet_export.errors import ExportError, InputError, OutputError
from tiny import LONG, LONGROPE, SHORT, edited, long_config

# Hugging Face name -> GGUF name, here once more on purpose.
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
U32, F32, STRING = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, i, rest = name.split(".", 3)
        return f"blk.{i}.{NAMES[rest]}"
    return NAMES[name]


@dataclass(frozen=True)
class Read:
    """A GGUF file as the library reads it: key -> (type, value), tensor name -> (type, shape, bytes)."""

    keys: dict[str, tuple[GGUFValueType, Any]]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]


def read(path: Path) -> Read:
    reader = GGUFReader(path)
    keys = {name: (f.types[-1], f.contents()) for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {
        t.name: (t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data.tobytes()) for t in reader.tensors
    }
    return Read(keys, tensors)


def written(model: Path, output: Path, **options: Any) -> Path:
    """The file that an export into a new folder wrote."""
    done = gguf.export(model, output, **options)
    assert set(done.files) == set(output.iterdir())
    return done.files[0]


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "hf")


def stored(values: NDArray[np.float32], dtype: str) -> bytes:
    """Values in a tensor type, converted by PyTorch or the gguf library."""
    if dtype == "Q8_0":
        return quants.quantize(values, GGMLQuantizationType.Q8_0).tobytes()
    kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    return torch.from_numpy(values).to(kind).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("source", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    ("outtype", "matrices", "number"),
    [
        ("f32", "F32", LlamaFileType.ALL_F32),
        ("f16", "F16", LlamaFileType.MOSTLY_F16),
        ("bf16", "BF16", LlamaFileType.MOSTLY_BF16),
        ("q8_0", "Q8_0", LlamaFileType.MOSTLY_Q8_0),
    ],
)
def test_every_tensor_has_the_source_s_values_in_the_type_asked_for(
    tmp_path: Path, source: str, outtype: str, matrices: str, number: int
) -> None:
    config = edited(intermediate_size=96)  # a multiple of 32, so that every row can be Q8_0
    model = tiny.checkpoint(tmp_path / "m", config, dtype=source)
    path = written(model, tmp_path / "out", outtype=outtype)
    assert path.name == f"m-{matrices}.gguf"
    found = read(path)
    assert found.keys["general.file_type"] == (U32, number)
    held = {name: torch.from_numpy(v).to({"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[source])
            for name, v in tiny.weights(config).items()}  # fmt: skip
    expected = {}
    for name, tensor in held.items():
        dtype = "F32" if tensor.ndim == 1 else matrices
        expected[gguf_name(name)] = (dtype, tuple(tensor.shape), stored(tensor.float().numpy(), dtype))
    assert found.tensors == expected
    assert list(found.tensors) == list(expected)


def test_same_type_tensors_have_the_source_s_bytes(tmp_path: Path) -> None:
    model = tiny.checkpoint(tmp_path / "m")
    found = read(written(model, tmp_path / "out", outtype="auto"))
    for name, values in tiny.weights(tiny.CONFIG).items():
        if values.ndim > 1:
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            assert found.tensors[gguf_name(name)] == ("BF16", values.shape, raw)


def test_fused_rows_are_query_key_value_and_gate_up(tmp_path: Path) -> None:
    config = edited(num_key_value_heads=2)
    model = tiny.checkpoint(tmp_path / "m", config)
    tensors = tiny.weights(config)
    parts = {"q": 64, "k": 32, "v": 32}, {"gate": 80, "up": 80}
    marks = dict(zip(["q", "k", "v", "gate", "up"], range(1, 6), strict=True))
    for name, split in zip(("self_attn.qkv_proj", "mlp.gate_up_proj"), parts, strict=True):
        rows = np.concatenate([np.full((count, 64), marks[part], np.float32) for part, count in split.items()])
        tensors[f"model.layers.1.{name}.weight"] = rows
    tiny.save(model / "model.safetensors", tensors)
    found = read(written(model, tmp_path / "out", outtype="f32"))
    for name, split in zip(("blk.1.attn_qkv.weight", "blk.1.ffn_up.weight"), parts, strict=True):
        _, shape, raw = found.tensors[name]
        rows = np.frombuffer(raw, np.float32).reshape(shape)
        assert [(int(row[0]), len(set(row))) for row in rows] == [
            (marks[part], 1) for part, count in split.items() for _ in range(count)
        ]


def test_the_keys_say_what_the_config_says(tmp_path: Path) -> None:
    config = edited(
        num_key_value_heads=2, rope_theta=250000.0, rms_norm_eps=1e-6, partial_rotary_factor=0.5, sliding_window=33,
        max_position_embeddings=512, original_max_position_embeddings=256,
    )  # fmt: skip
    found = read(written(tiny.checkpoint(tmp_path / "m", config), tmp_path / "out"))
    ours = {key: value for key, value in found.keys.items() if key.startswith("phi3.")}
    assert ours == {
        "phi3.context_length": (U32, 512),
        "phi3.rope.scaling.original_context_length": (U32, 256),
        "phi3.embedding_length": (U32, 64),
        "phi3.feed_forward_length": (U32, 80),
        "phi3.block_count": (U32, 2),
        "phi3.attention.head_count": (U32, 4),
        "phi3.attention.head_count_kv": (U32, 2),
        "phi3.attention.layer_norm_rms_epsilon": (F32, float(np.float32(1e-6))),
        "phi3.rope.dimension_count": (U32, 8),
        "phi3.rope.freq_base": (F32, 250000.0),
        "phi3.attention.sliding_window": (U32, 33),
    }
    general = {key: value for key, value in found.keys.items() if key.startswith("general.")}
    assert general.pop("general.size_label")[0] == STRING
    assert general == {
        "general.architecture": (STRING, "phi3"),
        "general.type": (STRING, "model"),
        "general.name": (STRING, "m"),
        "general.file_type": (U32, 1),
        "general.quantization_version": (U32, 2),
    }


@pytest.mark.parametrize(("window", "key"), [(None, 0), (0, 0), (2047, 2047), (262144, 262144)])
def test_the_window_key_is_always_there(tmp_path: Path, window: int | None, key: int) -> None:
    model = tiny.checkpoint(tmp_path / "m", edited(sliding_window=window))
    assert read(written(model, tmp_path / "out")).keys["phi3.attention.sliding_window"] == (U32, key)


def test_a_card_s_keys_say_where_it_came_from(tmp_path: Path) -> None:
    found = read(written(tiny.card(tmp_path / "card"), tmp_path / "out"))
    assert found.keys["general.name"] == (STRING, "tiny-phi")
    assert found.keys["general.license"] == (STRING, "mit")
    assert found.keys["general.source.url"] == (STRING, "https://huggingface.co/example/tiny-phi")
    assert found.keys["general.tags"] == (STRING, ["text-generation"])


def test_longrope_has_factor_tensors_and_its_attention_factor(tmp_path: Path) -> None:
    found = read(written(tiny.checkpoint(tmp_path / "m", long_config()), tmp_path / "out", outtype="q8_0"))
    for name, factors in zip(FACTORS, (LONG, SHORT), strict=True):
        assert found.tensors[name] == ("F32", (8,), np.array(factors, np.float32).tobytes())
    factor = float(np.float32(phi3.derived_attention_factor(128, 32)))
    assert found.keys["phi3.rope.scaling.attn_factor"] == (F32, factor)
    assert found.keys["phi3.rope.scaling.original_context_length"] == (U32, 32)
    plain = read(written(tiny.checkpoint(tmp_path / "plain"), tmp_path / "out-plain"))
    assert not plain.tensors.keys() & set(FACTORS)
    assert "phi3.rope.scaling.attn_factor" not in plain.keys


def test_an_explicit_attention_factor_is_written_as_it_is(tmp_path: Path) -> None:
    found = read(written(tiny.checkpoint(tmp_path / "m", long_config(attention_factor=1.375)), tmp_path / "out"))
    assert found.keys["phi3.rope.scaling.attn_factor"] == (F32, 1.375)


def test_twins_in_the_old_schema_the_new_one_and_with_su_are_one_file(tmp_path: Path) -> None:
    parameters = {**LONGROPE, "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    del parameters["type"]
    configs = [
        long_config(),
        long_config(type="su"),
        edited("rope_theta", "rope_scaling", "original_max_position_embeddings", rope_parameters=parameters),
    ]
    found = set()
    for i, config in enumerate(configs):
        model = tiny.checkpoint(tmp_path / str(i), config)
        found.add(written(model, tmp_path / f"out{i}", name="twin").read_bytes())
    assert len(found) == 1


def test_a_tied_model_has_no_output_tensor(tmp_path: Path) -> None:
    model = tiny.checkpoint(tmp_path / "m", edited(tie_word_embeddings=True))
    assert "output.weight" not in read(written(model, tmp_path / "out")).tensors


def test_a_tied_checkpoint_with_another_head_is_written_untied(tmp_path: Path) -> None:
    model = tiny.checkpoint(tmp_path / "m", edited(tie_word_embeddings=True))
    tensors = tiny.weights(tiny.CONFIG)
    tiny.save(model / "model.safetensors", tensors)
    found = read(written(model, tmp_path / "out", outtype="f32"))
    assert found.tensors["output.weight"][2] == tensors["lm_head.weight"].tobytes()


def test_without_a_tokenizer_the_model_is_none_with_the_vocabulary_s_size(tmp_path: Path) -> None:
    model = tiny.checkpoint(tmp_path / "m", tokenizer=False)
    done = gguf.export(model, tmp_path / "out", tokenizer="none")
    keys = read(done.files[0]).keys
    assert {k: v for k, v in keys.items() if k.startswith("tokenizer.")} == {"tokenizer.ggml.model": (STRING, "none")}
    assert keys["phi3.vocab_size"] == (U32, 90)
    assert any("no tokenizer" in note for note in done.notes)


def test_with_a_tokenizer_every_row_of_the_embedding_has_a_token(hf: Path, tmp_path: Path) -> None:
    keys = read(written(hf, tmp_path / "out")).keys
    assert keys["tokenizer.ggml.model"] == (STRING, "gpt2")
    tokens = keys["tokenizer.ggml.tokens"][1]
    assert len(tokens) == len(keys["tokenizer.ggml.token_type"][1]) == 90
    assert tokens[:4] == ["<unk>", "<s>", "<|end|>", "!"]
    assert keys["tokenizer.ggml.eos_token_id"] == (U32, 2)


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = tiny.checkpoint(tmp_path / "m")
    tiny.byte_level_tokenizer(model, 95)
    with pytest.raises(ExportError) as caught:
        gguf.export(model, tmp_path / "out")
    assert any("9" in line and "90" in line for line in caught.value.problems), caught.value.problems
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
def test_tensors_lie_end_to_end_at_multiples_of_32(tmp_path: Path, outtype: str) -> None:
    model = tiny.checkpoint(
        tmp_path / "m", edited(vocab_size=91, original_max_position_embeddings=32, rope_scaling=LONGROPE)
    )
    path = written(model, tmp_path / "out", outtype=outtype)
    reader = GGUFReader(path)
    assert reader.alignment == 32
    end = reader.tensors[0].data_offset
    for tensor in reader.tensors:
        assert tensor.data_offset % 32 == 0
        assert tensor.data_offset == end
        end = -(-(tensor.data_offset + int(tensor.n_bytes)) // 32) * 32
    assert path.stat().st_size == end


def test_rows_that_no_block_divides_fall_back_to_f16_and_say_so(hf: Path, tmp_path: Path) -> None:
    done = gguf.export(hf, tmp_path / "out", outtype="q8_0")
    found = read(done.files[0])
    down = {name: tensor for name, tensor in found.tensors.items() if "ffn_down" in name}
    assert {kind for kind, _, _ in down.values()} == {"F16"}
    others = {name: kind for name, (kind, shape, _) in found.tensors.items() if len(shape) > 1 and name not in down}
    assert set(others.values()) == {"Q8_0"}
    weights = tiny.weights(tiny.CONFIG)
    assert down["blk.1.ffn_down.weight"][2] == stored(weights["model.layers.1.mlp.down_proj.weight"], "F16")
    notes = [note for note in done.notes if "Q8_0" in note]
    assert len(notes) == 1
    for fact in ("2 tensors", "F16", "32", "blk.0.ffn_down.weight"):
        assert fact in notes[0]


@pytest.mark.parametrize("naming", ["checkpoint", "path", "root"])
@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
def test_a_card_and_its_checkpoint_twin_have_the_same_tensors(
    hf: Path, tmp_path: Path, naming: str, outtype: str
) -> None:
    directory = tiny.card(tmp_path / "card", naming=naming)
    card = read(written(directory, tmp_path / "a", outtype=outtype))
    twin = read(written(hf, tmp_path / "b", outtype=outtype))
    assert card.tensors == twin.tensors
    assert list(card.tensors) == list(twin.tensors)
    # A config.json beside the weights adds what a card does not say: the padding token.
    (directory / "config.json").write_bytes((hf / "config.json").read_bytes())
    whole = read(written(directory, tmp_path / "c", outtype=outtype))
    assert whole.tensors == twin.tensors
    padding = "tokenizer.ggml.padding_token_id"
    mine, both, theirs = (
        {key: value for key, value in found.keys.items() if not key.startswith("general.")}
        for found in (card, whole, twin)
    )
    assert mine | {padding: (U32, 2)} == both == theirs


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
def test_two_runs_write_the_same_bytes_with_any_number_of_threads(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outtype: str
) -> None:
    monkeypatch.setattr("linnet_export.stream.BLOCK_BYTES", 1000)
    runs = [gguf.export(hf, tmp_path / str(i), outtype=outtype, threads=n).files for i, n in enumerate((1, 1, 8))]
    assert len({tuple(path.read_bytes() for path in files) for files in runs}) == 1
    assert len(runs[0]) == 2


def test_the_plan_has_the_keys_and_tensors_of_the_file(hf: Path, tmp_path: Path) -> None:
    planned = gguf.plan(hf, outtype="q8_0")
    path = written(hf, tmp_path / "out", outtype="q8_0")
    found = read(path)
    assert list(planned.keys()) == list(found.keys)
    assert [(e.name, e.type, e.shape, e.nbytes) for e in planned.entries] == [
        (name, kind, shape, len(raw)) for name, (kind, shape, raw) in found.tensors.items()
    ]
    assert planned.nbytes == sum(len(raw) for _, _, raw in found.tensors.values())
    assert planned.file_name == path.name


def test_what_was_written_is_reported(hf: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    done = gguf.export(hf, tmp_path / "out", name="my-small-model", progress=lambda *args: reports.append(args))
    assert done.files == (tmp_path / "out/my-small-model-F16.gguf", tmp_path / "out/Modelfile")
    assert (done.output, done.tensors) == (tmp_path / "out", 15)
    assert reports[-1] == (done.nbytes, done.nbytes)
    assert read(done.files[0]).keys["general.name"] == (STRING, "my-small-model")
    assert "my-small-model-F16.gguf" in done.files[1].read_text()


def test_an_output_that_ends_in_gguf_is_just_that_file(hf: Path, tmp_path: Path) -> None:
    done = gguf.export(hf, tmp_path / "deep/x.gguf", outtype="f32")
    assert done.files == (tmp_path / "deep/x.gguf",)
    assert tiny.listing(tmp_path / "deep") == ["x.gguf"]
    assert read(tmp_path / "deep/x.gguf").keys["general.file_type"] == (U32, 0)


@pytest.mark.parametrize(
    ("outtype", "facts"), [("q4", ["q4", "f32, f16, bf16, q8_0, auto"]), ("BF16", ["BF16"]), ("", ["known"])]
)
def test_an_unknown_type_is_refused_with_the_known_ones(
    hf: Path, tmp_path: Path, outtype: str, facts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        gguf.export(hf, tmp_path / "out", outtype=outtype)
    for fact in ["--outtype", *facts]:
        assert fact in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_auto_needs_matrices_of_one_type(tmp_path: Path) -> None:
    model = tiny.checkpoint(tmp_path / "m")
    tensors = tiny.weights(tiny.CONFIG)
    head = tensors.pop("lm_head.weight")
    (model / "model.safetensors").unlink()
    tiny.save(model / "a.safetensors", tensors)
    tiny.save(model / "b.safetensors", {"lm_head.weight": head}, "F32")
    with pytest.raises(InputError, match=r"--outtype auto.*different types"):
        gguf.export(model, tmp_path / "out", outtype="auto")
    found = read(written(model, tmp_path / "out", outtype="f32"))
    assert found.tensors["output.weight"][2] == head.tobytes()


# Outputs.


def test_only_the_two_files_of_an_export_count_as_existing(hf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "hf-Q8_0.gguf").write_text("another type")
    (out / "notes.txt").write_text("mine")
    gguf.export(hf, out)
    for gone in ("hf-F16.gguf", "Modelfile"):
        (out / gone).unlink()
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(OutputError, match="--force"):
            gguf.export(hf, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        gguf.export(hf, out, force=True)
    assert tiny.listing(out) == ["Modelfile", "hf-F16.gguf", "hf-Q8_0.gguf", "notes.txt"]
    assert (out / "hf-Q8_0.gguf").read_text() == "another type"
    assert (out / "notes.txt").read_text() == "mine"


def test_an_output_that_is_a_file_is_refused(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output, fact in ((tmp_path / "file", "is a file"), (tmp_path / "file/x.gguf", "file")):
        with pytest.raises(OutputError, match=fact):
            gguf.export(hf, output, force=True)
    (tmp_path / "d.gguf").mkdir()
    with pytest.raises(OutputError, match="is a directory"):
        gguf.export(hf, tmp_path / "d.gguf", force=True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("value", "outtype", "facts"),
    [
        (np.nan, "f32", ["lm_head.weight", "nan at [88, 5]", "--allow-nonfinite"]),
        (np.nan, "q8_0", ["lm_head.weight", "nan at [88, 5]"]),
        (-np.inf, "f16", ["lm_head.weight", "-inf at [88, 5]"]),
        (70000.0, "f16", ["lm_head.weight", "inf at [88, 5]", "F16"]),
        (1e7, "q8_0", ["lm_head.weight", "1e+07", "Q8_0"]),
    ],
)
def test_a_value_that_cannot_be_written_leaves_nothing_behind_and_the_old_files_alone(
    hf: Path, tmp_path: Path, value: float, outtype: str, facts: list[str]
) -> None:
    damaged = tiny.damage(tiny.checkpoint(tmp_path / "damaged"), value)
    for output in (tmp_path / "new/out", tmp_path / "new/x.gguf"):
        with pytest.raises(InputError) as caught:
            gguf.export(damaged, output, outtype=outtype)
        assert len(caught.value.problems) == 1
        for fact in facts:
            assert fact in caught.value.problems[0]
        assert not (tmp_path / "new").exists()
    out = tmp_path / "out"
    gguf.export(hf, out, outtype=outtype, name="old")
    (out / "Modelfile").write_text("edited")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(InputError):
        gguf.export(damaged, out, outtype=outtype, name="old", force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("value", "outtype", "fits"),
    [
        (np.nan, "f32", np.isnan),
        (np.nan, "bf16", np.isnan),
        (-np.inf, "f16", np.isneginf),
        (70000.0, "f16", np.isposinf),
    ],
)
def test_values_that_are_not_finite_pass_where_they_are_allowed(
    tmp_path: Path, value: float, outtype: str, fits: Callable[[Any], Any]
) -> None:
    model = tiny.damage(tiny.checkpoint(tmp_path / "m"), value)
    path = gguf.export(model, tmp_path / "out", outtype=outtype, allow_nonfinite=True).files[0]
    kind, shape, raw = read(path).tensors["output.weight"]
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    values = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape).float().numpy()
    assert fits(values[88, 5])
    assert np.isfinite(np.delete(values.reshape(-1), 88 * 64 + 5)).all()


def test_what_q8_0_has_no_value_for_is_refused_even_where_allowed(tmp_path: Path) -> None:
    model = tiny.damage(tiny.checkpoint(tmp_path / "m"), np.nan)
    with pytest.raises(InputError, match=r"lm_head\.weight.*nan.*Q8_0"):
        gguf.export(model, tmp_path / "out", outtype="q8_0", allow_nonfinite=True)
    assert not (tmp_path / "out").exists()


def test_the_source_is_not_changed_even_where_the_output_lies_in_it(hf: Path) -> None:
    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    gguf.export(hf, hf)
    after = {path.name: path.read_bytes() for path in hf.iterdir()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"hf-F16.gguf", "Modelfile"}
