"""Headers are checked against their files, indexes against their shards, names and shapes against the model."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save_file

import tiny
from linnet_export import checkpoint, hf_config, phi3
from linnet_export.checkpoint import FileTensor
from linnet_export.errors import InputError

CONFIG = hf_config.read(tiny.CONFIG, "tiny")
NAMES = {tensor.path: tensor.hf for tensor in phi3.tensors(CONFIG)}


def file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any header, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(start: object, stop: object, dtype: object = "F32", shape: object = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1] if shape is None else shape, "data_offsets": [start, stop]}


def refused(path: Path) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        checkpoint.header(path)
    return caught.value.problems


def test_a_header_says_what_the_library_that_wrote_the_file_says(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    tensors = {
        "a": torch.from_numpy(random.normal(size=(3, 5)).astype(np.float32)),
        "b": torch.from_numpy(random.normal(size=(7,)).astype(np.float32)).to(torch.bfloat16),
        "c": torch.zeros(0, 4, dtype=torch.float16),
        "d": torch.arange(6, dtype=torch.uint8).reshape(1, 6),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found = checkpoint.header(path)
    with safetensors.safe_open(path, "pt") as library:
        assert set(found) == set(library.keys())
        for name, tensor in found.items():
            part = library.get_slice(name)
            assert (list(tensor.shape), tensor.dtype) == (part.get_shape(), part.get_dtype())
            raw = library.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
            assert path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes] == raw
            assert tensor.extent() == (path, tensor.offset)
    assert found["a"].read(1, 3).tolist() == tensors["a"][1:3].tolist()
    assert found["b"].read(2, 5).tolist() == tensors["b"][2:5].view(torch.uint16).tolist()
    assert found["c"].read(0, 0).shape == (0, 4)


def test_an_empty_table_of_an_empty_file_is_read(tmp_path: Path) -> None:
    assert checkpoint.header(file(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}})) == {}


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_shorter_than_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    assert "shorter than any header" in refused(tmp_path / "x.safetensors")[0]


@pytest.mark.parametrize("length", [3, 2**31, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    problems = refused(file(tmp_path / "x.safetensors", {}, length=length))
    assert str(length) in problems[0]
    assert "download it again" in problems[0]


def test_a_header_longer_than_the_format_allows_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as sparse:
        sparse.write((200_000_000).to_bytes(8, "little"))
        sparse.truncate(300_000_000)
    assert "200000000" in refused(path)[0]


@pytest.mark.parametrize(
    ("header", "fact"),
    [
        (b"not JSON", "not valid JSON"),
        (b"[]", "a list"),
        (b"null", "null"),
        (b'{"a": {"dtype": "F32"', "not valid JSON"),
        (b'{"a": ' + json.dumps(entry(0, 4)).encode() + b', "a": ' + json.dumps(entry(0, 4)).encode() + b"}", "twice"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b"[" * 100_000, "deep"),
    ],
)
def test_a_header_that_is_not_one_json_object_is_refused(tmp_path: Path, header: bytes, fact: str) -> None:
    problems = refused(file(tmp_path / "x.safetensors", header))
    assert len(problems) == 1
    assert fact in problems[0]
    assert "x.safetensors" in problems[0]


@pytest.mark.parametrize(
    ("tensor", "facts"),
    [
        (5, ["an integer", "object"]),
        ({}, ["type null"]),
        (entry(0, 4, dtype="F4"), ["F4", "BF16"]),
        (entry(0, 4, dtype=["F32"]), ["F32", "known"]),
        (entry(0, 4, shape="1"), ["shape"]),
        (entry(0, 4, shape=[-1]), ["shape", "[-1]"]),
        (entry(0, 4, shape=[1.0]), ["shape"]),
        (entry(0, 4, shape=[True]), ["shape"]),
        (entry(0.0, 4), ["offsets"]),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4]}, ["offsets"]),
        ({"dtype": "F32", "shape": [1]}, ["offsets null"]),
        (entry(-4, 0), ["-4 to 0", "outside", "4 bytes"]),
        (entry(4, 0), ["4 to 0", "outside"]),
        (entry(4, 8), ["4 to 8", "outside", "4 bytes"]),
        (entry(0, 2**63), ["outside"]),
        (entry(0, 3), ["has 3 bytes", "[1] needs 4"]),
        (entry(0, 4, shape=[2]), ["has 4 bytes", "[2] needs 8"]),
        (entry(0, 4, dtype="BF16"), ["has 4 bytes", "BF16 [1] needs 2"]),
        (entry(0, 4, shape=[2**62, 2**62]), ["has 4 bytes", str(4 * 2**124)]),
    ],
)
def test_a_tensor_that_does_not_fit_its_file_is_refused(tmp_path: Path, tensor: object, facts: list[str]) -> None:
    problems = refused(file(tmp_path / "x.safetensors", {"the.tensor": tensor}, b"1234"))
    assert len(problems) == 1
    for fact in ["x.safetensors", "the.tensor", *facts]:
        assert fact in problems[0]


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({"a": entry(0, 4), "b": entry(0, 4)}, ["starts at byte"]),  # two in one place
        ({"a": entry(0, 8, shape=[2]), "b": entry(4, 8)}, ["starts at byte"]),  # overlapping
        ({"a": entry(4, 8)}, ["a starts at byte"]),  # a hole before
        ({"a": entry(0, 4)}, ["has", "describes"]),  # bytes behind that no tensor has
        ({}, ["has", "describes"]),
    ],
)
def test_overlaps_holes_and_trailing_bytes_are_refused(
    tmp_path: Path, tensors: Mapping[str, Any], facts: list[str]
) -> None:
    problems = refused(file(tmp_path / "x.safetensors", tensors, b"12345678"))
    assert len(problems) == 1
    for fact in facts:
        assert fact in problems[0]


def test_every_wrong_tensor_of_a_header_is_named_in_one_error(tmp_path: Path) -> None:
    tensors = {"a": entry(0, 3), "b": entry(-1, 3), "c": entry(0, 4, dtype="X"), "fine": entry(0, 4)}
    problems = refused(file(tmp_path / "x.safetensors", tensors, b"1234"))
    assert [line.split('"')[1] for line in problems] == ["a", "b", "c"]


def test_a_truncated_download_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "download it again" in refused(path)[0]


def test_a_file_that_shrinks_after_it_was_checked_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    tensor = checkpoint.header(path)["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"x\.safetensors ended"):
        tensor.read(0, 100)
    path.unlink()
    with pytest.raises(InputError, match=r"x\.safetensors cannot be read"):
        tensor.read(0, 100)


@pytest.mark.parametrize("suffix", checkpoint.PICKLES)
def test_pickle_files_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(b"\x80\x02")
    for place in (path, tmp_path):
        with pytest.raises(InputError, match=r"pickle.*SafeTensors") as caught:
            checkpoint.index(place)
        assert path.name in str(caught.value)


def test_the_files_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no weights in"):
        checkpoint.index(tmp_path)
    for name, tensor in (("b.safetensors", "b"), ("a.safetensors", "a"), ("adapter_model.safetensors", "lora")):
        save_file({tensor: torch.zeros(1)}, tmp_path / name)
    assert [path.name for path in checkpoint.files_of(tmp_path)[0]] == ["a.safetensors", "b.safetensors"]
    assert list(checkpoint.index(tmp_path)) == ["a", "b"]
    save_file({"whole": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert list(checkpoint.index(tmp_path)) == ["whole"]
    assert set(checkpoint.index(tmp_path, every=True)) == {"a", "b", "whole"}
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"b": "b.safetensors"}}))
    assert list(checkpoint.index(tmp_path)) == ["b"]
    assert list(checkpoint.index(tmp_path / checkpoint.INDEX)) == ["b"]
    assert list(checkpoint.index(tmp_path / "a.safetensors")) == ["a"]


def sharded(directory: Path, weight_map: object, **shards: list[str]) -> Path:
    for name, tensors in shards.items():
        save_file({tensor: torch.zeros(1) for tensor in tensors}, directory / f"{name}.safetensors")
    (directory / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize(
    ("weight_map", "facts"),
    [
        (None, ["weight_map"]),
        ([], ["weight_map"]),
        ({}, ["weight_map"]),
        ({"a": 5}, ["a", "5", "inside the directory"]),
        ({"a": "../one.safetensors"}, ["../one.safetensors", "inside the directory"]),
        ({"a": "/etc/passwd"}, ["/etc/passwd", "inside the directory"]),
        ({"a": "sub/one.safetensors"}, ["sub/one.safetensors", "inside the directory"]),
        ({"a": "..\\one.safetensors"}, ["inside the directory"]),
        ({"a": ".."}, ["inside the directory"]),
        ({"a": ""}, ["inside the directory"]),
        ({"a": "one.safetensors", "c": "gone.safetensors"}, ["gone.safetensors", "not there"]),
        ({"a": "pytorch_model.bin"}, ["pickle"]),
        ({"a": "one.safetensors", "c": "two.safetensors"}, ["two.safetensors lacks", "(c)"]),
        ({"a": "one.safetensors"}, ["one.safetensors holds", "extra", "does not place there"]),
        ({"a": "two.safetensors", "extra": "one.safetensors"}, ["two.safetensors lacks", "one.safetensors holds"]),
    ],
)  # fmt: skip
def test_an_index_that_disagrees_with_its_shards_is_refused(
    tmp_path: Path, weight_map: object, facts: list[str]
) -> None:
    directory = sharded(tmp_path, weight_map, one=["a", "extra"], two=["b"])
    with pytest.raises(InputError) as caught:
        checkpoint.index(directory)
    for fact in facts:
        assert any(fact in line for line in caught.value.problems), (fact, caught.value.problems)


def test_a_tensor_in_two_shards_is_refused_with_both_files(tmp_path: Path) -> None:
    directory = sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=["a"], two=["a", "b"])
    with pytest.raises(InputError, match=r"a stands in both one\.safetensors and two\.safetensors"):
        checkpoint.index(directory)


def test_damage_in_two_shards_comes_in_one_error(tmp_path: Path) -> None:
    directory = sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=["a"], two=["b"])
    (directory / "one.safetensors").write_bytes(b"")
    (directory / "two.safetensors").write_bytes(b"1234")
    with pytest.raises(InputError) as caught:
        checkpoint.index(directory)
    assert len(caught.value.problems) == 2


def model(config: phi3.Config = CONFIG, *, dtype: str = "BF16", names: int = 1) -> dict[str, FileTensor]:
    """Tensors of a model that lie nowhere; `names` 0 for Linnet paths, 1 for the checkpoint's."""
    found = {}
    for tensor in phi3.tensors(config):
        name = (tensor.path, tensor.hf)[names]
        found[name] = FileTensor(Path("m.safetensors"), name, dtype, tensor.shape, 0, 0)
    return found


def unresolved(found: Mapping[str, FileTensor], wanted: Mapping[str, str] = NAMES) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        checkpoint.resolve(wanted, found, CONFIG)
    return caught.value.problems


def renamed(tensors: Mapping[str, FileTensor], prefix: str) -> dict[str, FileTensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("found", [model(names=1), model(names=0), renamed(model(names=0), "root.")])
def test_names_of_one_kind_are_resolved(found: Mapping[str, FileTensor]) -> None:
    resolved, notes = checkpoint.resolve(NAMES, found, CONFIG)
    assert list(resolved) == list(NAMES)
    assert list(resolved.values()) == list(found.values())
    assert notes == []


def test_names_of_two_kinds_are_refused() -> None:
    half = {name: tensor for name, tensor in model(names=0).items() if name.startswith("layers.1")}
    found = {name: tensor for name, tensor in model().items() if "layers.1." not in name} | half
    problems = unresolved(found)
    assert len(problems) == 2
    assert "missing 6 tensors" in problems[0]
    assert "model.layers.1." in problems[0]
    assert "mixed names" in problems[1]
    assert "layers.1.attention_norm.weight" in problems[1]
    assert "Linnet paths" in problems[1]


def test_missing_tensors_are_counted_and_named() -> None:
    found = {name: tensor for name, tensor in model().items() if "mlp" not in name}
    problems = unresolved(found)
    assert len(problems) == 1
    assert "4 tensors" in problems[0]
    assert "of 15" in problems[0]
    assert "model.layers.0.mlp.gate_up_proj.weight" in problems[0]


def test_transposed_shapes_are_refused_with_a_hint() -> None:
    found = model()
    name = "model.layers.0.mlp.down_proj.weight"
    found[name] = dataclasses.replace(found[name], shape=(80, 64))
    problems = unresolved(found)
    assert len(problems) == 1
    for fact in (name, "[80, 64]", "[64, 80]", "transposed"):
        assert fact in problems[0]


def test_more_rows_than_the_vocabulary_are_refused_with_both_numbers() -> None:
    found = model()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = dataclasses.replace(found[name], shape=(96, 64))
    problems = unresolved(found)
    assert len(problems) == 1
    for fact in ("2 tensors", "model.embed_tokens.weight", "lm_head.weight", "[96, 64]", "[90, 64]"):
        assert fact in problems[0]


@pytest.mark.parametrize(
    ("dtype", "shape", "extra", "scales"),
    [("U8", (1, 2560), "weight.absmax", "SCB"), ("U32", (64, 10), "scales", "biases"), ("I8", (64, 80), "SCB", "x")],
)
def test_quantized_leftovers_are_refused_with_the_remedy(
    dtype: str, shape: tuple[int, ...], extra: str, scales: str
) -> None:
    found = model()
    name = "model.layers.0.mlp.down_proj.weight"
    found[name] = dataclasses.replace(found[name], dtype=dtype, shape=shape)
    for suffix in (extra, scales):
        found[name.replace("weight", suffix)] = found[name]
    problems = unresolved(found)
    assert any(f"type {dtype}" in line and "16 bits first" in line for line in problems)
    assert any(scales in line and "does not have 2 tensors" in line for line in problems)


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", "BOOL"])
def test_other_types_are_refused_with_the_known_ones(dtype: str) -> None:
    problems = unresolved(model(dtype=dtype))
    assert len(problems) == 1
    for fact in (dtype, "15 tensors", "BF16, F16 or F32"):
        assert fact in problems[0]


def test_unknown_tensors_are_refused_by_name_and_known_buffers_dropped() -> None:
    found = model()
    norm = found["model.norm.weight"]
    buffers = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)]
    _, notes = checkpoint.resolve(NAMES, found | dict.fromkeys(buffers, norm), CONFIG)
    assert len(notes) == 1
    assert buffers[0] in notes[0]
    assert "2 buffers" in notes[0]
    unknown = [f"model.layers.0.extra.{i}" for i in range(6)]
    problems = unresolved(found | dict.fromkeys([*unknown, *buffers], norm))
    assert len(problems) == 1
    assert "Phi3ForCausalLM" in problems[0]
    assert "6 tensors" in problems[0]
    assert unknown[0] in problems[0]


def test_an_untied_model_without_a_head_is_refused() -> None:
    found = model()
    del found["lm_head.weight"]
    problems = unresolved(found)
    assert len(problems) == 1
    assert "lm_head.weight" in problems[0]
    assert "missing 1 tensor" in problems[0]


def test_layers_past_the_wanted_depth_are_known_skipped_and_said() -> None:
    whole = dataclasses.replace(CONFIG, layers=5)
    wanted = {tensor.path: tensor.hf for tensor in phi3.tensors(whole)}
    resolved, notes = checkpoint.resolve(wanted, model(whole), CONFIG)
    assert list(resolved) == list(NAMES)
    assert len(notes) == 1
    assert "layers 2 to 4" in notes[0]
    # A file that holds the wanted layers only is whole.
    assert checkpoint.resolve(wanted, model(), CONFIG)[1] == []


def test_layers_that_the_whole_model_does_not_have_are_unknown() -> None:
    found = model(dataclasses.replace(CONFIG, layers=3))
    problems = unresolved(found)
    assert len(problems) == 1
    assert "2 layers" in problems[0]
    assert "model.layers.2.input_layernorm.weight" in problems[0]


def test_a_head_bound_to_the_embedding_resolves_with_the_head_stored_or_not() -> None:
    tied = dataclasses.replace(CONFIG, tied=True)
    wanted = NAMES | {phi3.HEAD: NAMES[phi3.EMBEDDING]}
    for names in (0, 1):
        resolved, notes = checkpoint.resolve(wanted, model(tied, names=names), tied)
        assert phi3.HEAD not in resolved
        assert notes == []
    for prefix in ("", "root."):
        found = renamed(model(names=0), prefix)
        assert phi3.HEAD not in checkpoint.resolve(wanted, found, tied)[0]


def test_every_problem_of_a_checkpoint_comes_in_one_error() -> None:
    found = model()
    del found["model.norm.weight"]
    name = "model.layers.0.mlp.down_proj.weight"
    found[name] = dataclasses.replace(found[name], shape=(80, 64), dtype="I8")
    found["extra"] = found["lm_head.weight"]
    problems = unresolved(found)
    assert len(problems) == 4
    for fact in ("model.norm.weight", "[80, 64]", "I8", "extra"):
        assert any(fact in line for line in problems)


@pytest.mark.parametrize(
    ("name", "plain"),
    [("a.safetensors", True), ("..", False), (".", False), ("", False), ("a/b", False), ("a\\b", False), ("/a", False)],
)
def test_a_plain_name_stays_inside_its_directory(name: str, plain: bool) -> None:
    assert checkpoint.plain_name(name) is plain


def test_a_checkpoint_of_the_library_resolves_whole(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, tokenizer=False)
    resolved, notes = checkpoint.resolve(NAMES, checkpoint.index(tmp_path), CONFIG)
    assert notes == []
    for path, values in zip(NAMES, tiny.weights(tiny.CONFIG).values(), strict=True):
        tensor = resolved[path]
        assert tensor.read(0, tensor.shape[0]).tobytes() == (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
