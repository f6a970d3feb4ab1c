"""The weight checks: right rounding passes in every type, and one wrong bit is named with its place."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import damage
import tiny
from linnet_export import gguf, hf
from linnet_export.errors import InputError
from linnet_export.verify.records import TensorCheck
from linnet_export.verify.weights import INCOMPARABLE, ROUNDINGS, check_weights

CONFIG = tiny.edited(intermediate_size=96)  # a multiple of 32, so that every row can be Q8_0
GATE_UP = ("layers.1.mlp.gate_up.weight", "blk.1.ffn_up.weight", "model.layers.1.mlp.gate_up_proj.weight")


def random_source(path: Path, dtype: str = "F32") -> Path:
    """A checkpoint whose f32 values use all of their bits, and more than the range of f16's normal numbers."""
    source = tiny.checkpoint(path, CONFIG)
    random = np.random.default_rng(11)
    tensors = {
        name: (values + random.normal(0, 1e-3, values.shape) * 2.0 ** random.integers(-20, 1, values.shape)).astype(
            np.float32
        )
        for name, values in tiny.weights(CONFIG).items()
    }
    tiny.save(source / "model.safetensors", tensors, dtype)
    return source


def bad(checks: tuple[TensorCheck, ...]) -> list[TensorCheck]:
    return [check for check in checks if not check.passed]


@pytest.mark.parametrize("source_type", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("outtype", ["f32", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("form", ["gguf", "hf"])
def test_a_good_export_passes_in_every_type(tmp_path: Path, source_type: str, outtype: str, form: str) -> None:
    source = random_source(tmp_path / "m", source_type)
    if form == "gguf":
        export = gguf.export(source, tmp_path / "out", outtype=outtype).files[0]
    elif outtype == "q8_0":
        export = hf.export(source, tmp_path / "out").output
    else:
        export = hf.export(source, tmp_path / "out", dtype=outtype, max_shard_size=20_000).output
    told: list[tuple[int, int]] = []
    checks = check_weights(export, source, progress=lambda done, total: told.append((done, total)))
    assert bad(checks) == []
    assert [check.name for check in checks] == [tiny.linnet_path(name) for name in tiny.weights(CONFIG)]
    assert all(0 <= check.worst_ratio <= 1 and math.isfinite(check.relative_error) for check in checks)
    assert told[-1][0] == told[-1][1]
    assert len(told) == len(checks)
    for check in checks:
        kept = check.type in ("F32", source_type)
        assert not kept or check.exact
        assert (check.relative_error == 0) == check.exact
        # The root mean square of a rounding is a few tenths of its bound.
        bound = {"F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 2.0**-6, "F32": 0.0}[check.type]
        assert check.exact or check.relative_error < bound


def test_cards_tied_heads_and_grouped_heads_pass(tmp_path: Path) -> None:
    sources = (
        tiny.card(tmp_path / "card", naming="root"),
        tiny.checkpoint(tmp_path / "tied", tiny.edited(tie_word_embeddings=True)),
        tiny.checkpoint(tmp_path / "grouped", tiny.edited(num_key_value_heads=2)),
    )
    for source in sources:
        for export in (gguf.export(source, tmp_path / f"{source.name}-gguf").files[0],
                       hf.export(source, tmp_path / f"{source.name}-hf").output):  # fmt: skip
            checks = check_weights(export, source)
            assert bad(checks) == []
            assert len(checks) == (14 if source.name == "tied" else 15)


def test_weights_beside_no_card_and_fewer_layers_are_found(tmp_path: Path) -> None:
    source = tiny.card(tmp_path / "card")
    (tmp_path / "w").mkdir()
    (source / "model.safetensors").rename(tmp_path / "w/model.safetensors")
    export = gguf.export(source, tmp_path / "out", weights=tmp_path / "w", bind={"Layers": 1}).files[0]
    assert bad(check_weights(export, source, weights=tmp_path / "w", layers=1)) == []
    assert any(
        "blk.1.ffn_up.weight is missing" in c.message for c in check_weights(export, source, weights=tmp_path / "w")
    )


def exported(tmp_path: Path, form: str, outtype: str) -> tuple[Path, Path, str]:
    """A source, an export, and the export's name of the damaged tensor."""
    source = random_source(tmp_path / "m", "BF16")
    if form == "gguf":
        return source, gguf.export(source, tmp_path / "out", outtype=outtype).files[0], GATE_UP[1]
    dtype = "auto" if outtype == "q8_0" else outtype
    return source, hf.export(source, tmp_path / "out", dtype=dtype, max_shard_size=20_000).output, GATE_UP[2]


@pytest.mark.parametrize("outtype", ["f32", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("form", ["gguf", "hf"])
def test_gate_and_up_swapped_in_one_layer_fail_by_name(tmp_path: Path, form: str, outtype: str) -> None:
    source, export, name = exported(tmp_path, form, outtype)
    damage.swap_halves(export, name)
    (check,) = bad(check_weights(export, source))
    assert check.name == GATE_UP[0]
    assert name in check.message
    assert "gate and up rows stand in each other's place" in check.message
    assert check.relative_error > 1  # two independent tensors differ by the root of two
    assert check.worst_ratio > 1


@pytest.mark.parametrize(
    ("form", "outtype", "size"),
    [
        ("gguf", "f32", 4),
        ("gguf", "bf16", 2),
        ("gguf", "f16", 2),
        ("hf", "bf16", 2),
        ("hf", "f32", 4),
        ("hf", "f16", 2),
    ],
)
def test_one_flipped_bit_is_named_with_its_index(tmp_path: Path, form: str, outtype: str, size: int) -> None:
    """The lowest bit of the float at [5, 3], the smallest change that there can be."""
    source, export, name = exported(tmp_path, form, outtype)
    damage.flip_bit(export, name, (5 * 64 + 3) * size)
    (check,) = bad(check_weights(export, source))
    assert (check.name, check.index, check.exact) == (GATE_UP[0], (5, 3), False)
    assert f"{name} [5, 3] is " in check.message
    assert check.worst_ratio >= 2  # one step is two halves


def test_one_flipped_bit_of_a_block_is_named_wherever_it_is(tmp_path: Path) -> None:
    """The lowest bit of an integer, and of a scale, whatever the value was rounded from."""
    source, export, name = exported(tmp_path, "gguf", "q8_0")
    whole = export.read_bytes()
    for column in range(0, 64, 5):
        block, place = divmod(column, 32)
        damage.flip_bit(export, name, 7 * 68 + block * 34 + 2 + place)
        (check,) = bad(check_weights(export, source))
        assert check.index == (7, column)
        assert check.worst_ratio > 1
        export.write_bytes(whole)
    damage.flip_bit(export, name, 7 * 68, bit=3)
    (check,) = bad(check_weights(export, source))
    assert check.index[0] == 7
    assert check.index[1] < 32


def test_a_flipped_sign_of_a_norm_and_of_a_zero_are_found(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "m", CONFIG)
    tensors = tiny.weights(CONFIG)
    tensors["model.norm.weight"][9] = 0.0
    tiny.save(source / "model.safetensors", tensors)
    export = gguf.export(source, tmp_path / "out", outtype="bf16").files[0]
    damage.flip_bit(export, "output_norm.weight", 9 * 4 + 3, bit=7)
    (check,) = bad(check_weights(export, source))
    assert (check.name, check.index) == ("norm.weight", (9,))
    damage.flip_bit(export, "output_norm.weight", 8 * 4 + 3, bit=7)
    (check,) = bad(check_weights(export, source))
    assert check.index == (8,)


def test_values_that_are_no_numbers_are_equal_only_to_themselves(tmp_path: Path) -> None:
    source = tiny.damage(tiny.checkpoint(tmp_path / "m"), math.nan)
    export = hf.export(source, tmp_path / "out", allow_nonfinite=True).output
    assert bad(check_weights(export, source)) == []
    tiny.damage(source, 0.5)
    (check,) = bad(check_weights(export, source))
    assert (check.name, check.index, check.worst_ratio) == ("lm_head.weight", (88, 5), INCOMPARABLE)
    assert "is nan; 0.5 is needed" in check.message


def test_another_head_missing_heads_and_transposed_tensors_are_named(tmp_path: Path) -> None:
    tied = tiny.checkpoint(tmp_path / "tied", tiny.edited(tie_word_embeddings=True))
    untied = tiny.checkpoint(tmp_path / "untied")
    files = [gguf.export(source, tmp_path / f"{source.name}-out").files[0] for source in (tied, untied)]
    assert "the source's head is its embedding" in bad(check_weights(files[1], tied))[0].message
    assert "output.weight is missing" in bad(check_weights(files[0], untied))[0].message
    other = tiny.checkpoint(tmp_path / "other", tiny.edited(vocab_size=89, num_hidden_layers=2))
    messages = [check.message for check in bad(check_weights(files[1], other))]
    assert any("token_embd.weight has the shape [90, 64]; the source's [89, 64] is needed" in line for line in messages)


def test_a_type_without_a_stated_rounding_is_refused(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, quants

    source = tiny.checkpoint(tmp_path / "m", CONFIG)
    export = gguf.export(source, tmp_path / "out", outtype="f32").files[0]
    q4_0 = GGMLQuantizationType.Q4_0

    def convert(held: dict[str, object]) -> None:
        held["output.weight"] = quants.quantize(tiny.weights(CONFIG)["lm_head.weight"], q4_0), q4_0

    damage.rewritten(export, tensors=convert)
    (check,) = bad(check_weights(export, source))
    assert check.message == "output.weight is Q4_0, whose rounding is not stated here; known: F32, F16, BF16, Q8_0"


def test_a_damaged_file_is_an_input_error(tmp_path: Path) -> None:
    source, export, _ = exported(tmp_path, "gguf", "bf16")
    raw = export.read_bytes()
    for length in (0, 20, 500, len(raw) - 64):
        export.write_bytes(raw[:length])
        with pytest.raises(InputError, match="export or copy it again"):
            check_weights(export, source)
    with pytest.raises(InputError, match=r"has no config\.json"):
        check_weights(tmp_path, source)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_the_bound_of_a_float_type_is_half_the_distance_to_its_neighbour(kind: str) -> None:
    """Against PyTorch's own nextafter: at the borders of binades, in subnormals, at zero."""
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    smallest = torch.finfo(dtype).smallest_normal
    values = torch.tensor([1.0, 1.5, 2.0, 1023.0, smallest, smallest / 4, 0.0, -3.0], dtype=dtype)
    _, half = ROUNDINGS[kind].allowed(values.double()[None])
    away = torch.nextafter(values, torch.copysign(torch.tensor(math.inf, dtype=dtype), values))
    assert torch.equal(2 * half[0], (away.double() - values.double()).abs())


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-8, 1e-30, 0.0])
def test_what_the_gguf_library_quantizes_is_within_the_bound_of_a_block(scale: float) -> None:
    """Scales down to where f16 has none: a block of zeros, of subnormal scales, of vanishing ones."""
    from gguf import GGMLQuantizationType, quants

    rows = (np.random.default_rng(5).standard_normal((200, 64)) * scale).astype(np.float32)
    kind = GGMLQuantizationType.Q8_0
    stored = quants.dequantize(quants.quantize(rows, kind), kind)
    centre, half = ROUNDINGS["Q8_0"].allowed(torch.from_numpy(rows).double())
    ratio = (torch.from_numpy(stored).double() - centre).abs() / half
    assert float(ratio.max()) <= 1
    assert scale < 1e-5 or float(ratio.max()) > 0.99  # the bound is reached: it is not loose
