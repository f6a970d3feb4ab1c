"""A card's tables, generics, constants and bindings."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from linnet_export import card, phi3
from linnet_export.errors import InputError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.card(tmp_path / "tiny", tokenizer=False)


def edited(directory: Path, old: str, new: str) -> Path:
    path = directory / "nest.toml"
    content = path.read_text()
    assert content.count(old) == 1
    path.write_text(content.replace(old, new))
    return directory


def source(directory: Path, content: str, name: str = "extra.linnet") -> Path:
    path = directory / "src" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return directory


def refused(directory: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        card.read(directory, **options)
    return caught.value.problems


def test_a_card_states_its_model(directory: Path) -> None:
    assert card.is_card(directory)
    assert not card.is_card(directory / "src")
    found = card.read(directory)
    assert (found.name, found.theta, found.window, found.context, found.layers) == ("tiny-phi", 10000.0, 47, 128, 2)
    assert (found.files, found.repo, found.revision, found.tied) == (("model.safetensors",), None, None, False)
    assert found.links == {"huggingface": "https://huggingface.co/example/tiny-phi"}
    assert found.config() == phi3.Config(
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


def test_key_value_heads_are_a_generic_that_may_be_absent(directory: Path) -> None:
    edited(directory, "Heads = 4", "Heads = 4\nKvHeads = 2")
    assert card.read(directory).config().kv_heads == 2


def test_no_window_constant_means_no_window(tmp_path: Path) -> None:
    assert card.read(tiny.card(tmp_path, window=None)).window is None


def test_max_seq_sizes_a_cache_and_changes_nothing_that_is_declared(directory: Path) -> None:
    assert card.read(directory, bind={"MaxSeq": 64, "Batch": 8}).config() == card.read(directory).config()


def test_generics_are_overridden_by_bind(directory: Path) -> None:
    found = card.read(directory, bind={"Layers": 1, "T": "f32"})
    assert (found.config().layers, found.layers, found.generics["T"]) == (1, 2, "f32")


@pytest.mark.parametrize(
    ("bind", "facts"),
    [
        ({"Depth": 2}, ["Depth", "no such generic", "Layers"]),
        ({"Layers": 3}, ["Layers=3", "2 layers"]),
        ({"Layers": 0}, ["Layers is 0", "Layers > 0"]),
        ({"Layers": "two"}, ["Layers=two", "integer"]),
        ({"T": 5}, ["T=5", "type"]),
        ({"H": 63}, ["H is 63", "Heads 4", "H % Heads"]),
        ({"MaxSeq": 0}, ["MaxSeq is 0"]),
    ],
)
def test_a_bind_that_cannot_be_is_refused(directory: Path, bind: dict[str, int | str], facts: list[str]) -> None:
    problems = refused(directory, bind=bind)
    assert len(problems) == 1, problems
    for fact in facts:
        assert fact in problems[0]


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("Vocab = 90", "Vocab = 90\nExperts = 4", ["Experts", "no such generic", "KvHeads"]),
        ("Vocab = 90\n", "", ["lacks Vocab"]),
        ("Vocab = 90", "Vocab = 90.0", ["Vocab is 90.0", "integer"]),
        ("Vocab = 90", "Vocab = true", ["Vocab is true", "integer"]),
        ("Vocab = 90", 'Vocab = "90"', ['Vocab is "90"', "integer"]),
        ("Vocab = 90", "Vocab = [90]", ["Vocab is [90]"]),
        ('T = "bf16"', "T = 16", ["T is 16", "bf16"]),
        ('T = "bf16"', 'T = "f8"', ['"f8"', "f32, f16, bf16"]),
        ("Heads = 4", "Heads = 0", ["Heads is 0", "Heads > 0"]),
        ("Heads = 4", "Heads = -4", ["Heads is -4"]),
        ("Heads = 4", "Heads = 5", ["H is 64 and Heads 5", "H % Heads"]),
        ("Heads = 4", "Heads = 64", ["H / Heads is 1", "% 2"]),
        ("Heads = 4", "Heads = 4\nKvHeads = 3", ["Heads is 4 and KvHeads 3"]),
        ("MaxSeq = 128", "MaxSeq = 0", ["MaxSeq is 0"]),
        ('files = ["model.safetensors"]', 'files = "model.safetensors"', ["files", "list"]),
        ('files = ["model.safetensors"]', "files = [1]", ["files", "list"]),
        ('files = ["model.safetensors"]', 'files = ["../m.safetensors"]', ["../m.safetensors", "inside the card"]),
        ('files = ["model.safetensors"]', 'files = ["/m.safetensors"]', ["/m.safetensors", "inside the card"]),
        ('files = ["model.safetensors"]', 'files = [""]', ["inside the card"]),
        ('bindings = "bindings.json"', "bindings = 5", ["bindings is 5"]),
        ('bindings = "bindings.json"', 'bindings = "../b.json"', ["../b.json", "outside"]),
        ('bindings = "bindings.json"', 'bindings = "gone.json"', ["gone.json does not exist"]),
        ('bindings = "bindings.json"', 'bindings = "bindings.json"\nrepo = 5', ["repo", "5", "string"]),
        ('name = "tiny-phi"', "name = 5", ["name", "5", "string"]),
        ('path = "src/lib.linnet"', "path = 5", ["path is 5"]),
        ('path = "src/lib.linnet"', 'path = "../lib.linnet"', ["../lib.linnet", "outside"]),
        ('path = "src/lib.linnet"', 'path = "gone.linnet"', ["gone.linnet does not exist"]),
        ("[links]\nhuggingface = ", "links = ", ["[links]", "table"]),
    ],
)
def test_a_malformed_nest_toml_is_one_problem_with_what_was_found(
    directory: Path, old: str, new: str, facts: list[str]
) -> None:
    if new == "links = ":  # a key of the top level must stand before the tables
        path = directory / "nest.toml"
        path.write_text("links = 5\n" + path.read_text().replace("[links]\n", "[other]\n"))
    else:
        edited(directory, old, new)
    problems = refused(directory)
    assert len(problems) == 1, problems
    for fact in facts:
        assert fact in problems[0]


def test_other_tables_and_a_missing_links_table_are_no_concern(directory: Path) -> None:
    edited(directory, "[links]", "[anything]")
    assert card.read(directory).links == {}


def test_a_card_without_a_name_is_named_after_its_directory(directory: Path) -> None:
    edited(directory, 'name = "tiny-phi"\n', "")
    assert card.read(directory).name == "tiny"


@pytest.mark.parametrize(
    "line",
    [
        "// pub const THETA: f32 = 1.0",
        "/// pub const WINDOW: i32 = 1",
        "    //pub const WINDOW: i32 = 1",
        "let x = 3 // const WINDOW: i32 = 1",
        "pub const WINDOW_SIZE: i32 = 1",
        "pub const MY_THETA: f32 = 1.0",
        "let seen = positions > p - WINDOW",
        "pub const WINDOW: i32 = 47  // the same again",
        "const THETA: f32 = 1e4;",
        "const THETA: f32 = 10_000.0",
        "const THETA: f32 =\n    10000",
    ],
)
def test_comments_other_names_and_equal_definitions_change_nothing(directory: Path, line: str) -> None:
    found = card.read(source(directory, f"module tiny.extra\n{line}\n"))
    assert (found.theta, found.window) == (10000.0, 47)


@pytest.mark.parametrize(
    ("line", "values"),
    [("pub const THETA: f32 = 10000.5", ["10000.0", "10000.5"]), ("const WINDOW: i32 = 46", ["47", "46"])],
)
def test_a_constant_with_two_values_names_both_files_and_values(directory: Path, line: str, values: list[str]) -> None:
    problems = refused(source(directory, line, "deeper/other.linnet"))
    assert len(problems) == 1
    name = "rope.linnet" if "THETA" in line else "attention.linnet"
    for fact in (name, "other.linnet", *values, "must agree"):
        assert fact in problems[0]


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("pub const WINDOW: i32 = 2 * 32", ["WINDOW as 2 * 32", "number"]),
        ("pub const WINDOW = some(47)", ["WINDOW as some(47)", "number"]),
        ("pub const WINDOW: Option<i32> = none", ["WINDOW as none", "number"]),
        ("pub const WINDOW: i32 = -1", ["WINDOW as -1", "number"]),
        ("pub const WINDOW: i32 = 0", ["WINDOW is 0", "positive"]),
        ("pub const WINDOW: i32 = 46.5", ["WINDOW is 46.5", "whole"]),
        ("pub const WINDOW: i32 = 1e999", ["WINDOW as 1e999"]),
    ],
)
def test_a_window_that_is_not_understood_is_never_taken_for_none(directory: Path, line: str, facts: list[str]) -> None:
    (directory / "src/attention.linnet").write_text(line)
    problems = refused(directory)
    assert len(problems) == 1
    for fact in facts:
        assert fact in problems[0]


@pytest.mark.parametrize(
    ("theta", "fact"), [("0.0", "THETA is 0.0"), ("1e999", "THETA as 1e999"), ("crate.base", "THETA as crate.base")]
)
def test_a_theta_that_cannot_be_is_refused(tmp_path: Path, theta: str, fact: str) -> None:
    problems = refused(tiny.card(tmp_path, theta=theta))
    assert len(problems) == 1
    assert fact in problems[0]


def test_a_missing_theta_is_an_error_that_says_how_it_is_written(directory: Path) -> None:
    (directory / "src/rope.linnet").unlink()
    problems = refused(directory)
    assert len(problems) == 1
    assert "pub const THETA: f32 =" in problems[0]


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ('["embedding.weight"]', ["a list", "object"]),
        ('{"embedding.weight": 5}', ["embedding.weight", "an integer"]),
        ('{"embedding.weight": ["a", "b"]}', ["embedding.weight", "a list"]),
        ('{"embedding.weight": null}', ["embedding.weight", "null"]),
        ('{"embedding": "a"}', ['"embedding"', "does not have"]),
        ('{"layers.0.attention.q.weight": "a"}', ["layers.0.attention.q.weight", "does not have"]),
        ('{"norm.weight": "a", "norm.weight": "b"}', ["twice"]),
        ("{", ["not valid JSON"]),
    ],
)
def test_malformed_bindings_are_refused(directory: Path, content: str, facts: list[str]) -> None:
    (directory / "bindings.json").write_text(content)
    problems = refused(directory)
    assert len(problems) == 1
    for fact in ["bindings.json", *facts]:
        assert fact in problems[0]


def test_a_path_without_a_binding_goes_by_its_own_name(directory: Path) -> None:
    (directory / "bindings.json").write_text('{"norm.weight": "model.norm.weight"}')
    found = card.read(directory)
    assert found.tensor_name("norm.weight") == "model.norm.weight"
    assert found.tensor_name("lm_head.weight") == "lm_head.weight"
    edited(directory, 'bindings = "bindings.json"\n', "")
    assert card.read(directory).bindings == {}


def test_other_bindings_replace_the_card_s(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"norm.weight": "x"}))
    assert card.read(directory, bindings=other).bindings == {"norm.weight": "x"}
    assert "gone.json does not exist" in refused(directory, bindings=tmp_path / "gone.json")[0]


def test_a_head_bound_to_the_embedding_is_tied(directory: Path) -> None:
    path = directory / "bindings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lm_head.weight": "model.embed_tokens.weight"}))
    assert card.read(directory).config().tied


def test_every_problem_of_a_card_comes_in_one_error(directory: Path) -> None:
    edited(directory, "Vocab = 90", "Vocab = true\nOther = 1")
    edited(directory, "Heads = 4", "Heads = 5")
    edited(directory, 'files = ["model.safetensors"]', "files = 5")
    (directory / "src/rope.linnet").unlink()
    (directory / "bindings.json").write_text('{"norm.weight": 5}')
    problems = refused(directory, bind={"Layers": 3, "Nothing": 1})
    for fact in ("Vocab", "Other", "Heads 5", "files", "THETA", "norm.weight", "Layers=3", "Nothing"):
        assert sum(fact in line for line in problems) >= 1, (fact, problems)
    assert len(problems) == 8
