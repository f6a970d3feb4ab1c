"""JSON and TOML are read strictly, and numbers are written for people."""

from pathlib import Path

import pytest

from linnet_export import text
from linnet_export.errors import InputError, Problems


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("", "not valid JSON"),
        ("{", "line 1"),
        ('{"a": 1}\n{"b": 2}', "line 2, column 1"),
        ('{"a": 1, "b": 2, "a": 3}', '"a" stands twice'),
        ('{"outer": {"a": 1, "a": 1}}', '"a" stands twice'),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": -1e999}', "too large"),
        ('{"a": ' + "9" * 5000 + "}", "too large"),
        ("[" * 200_000, "nested too deep"),
        ('\ufeff{"a": 1}', "BOM"),
    ],
)
def test_malformed_json_is_one_line_that_names_the_file(content: str, fact: str) -> None:
    with pytest.raises(InputError) as caught:
        text.parse_json(content, "x/config.json")
    assert len(caught.value.problems) == 1
    line = caught.value.problems[0]
    assert line.startswith("x/config.json")
    assert fact in line
    assert "\n" not in line
    assert len(line) < 200


@pytest.mark.parametrize("raw", ['{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-32"), b'{"a": "\xff"}'])
def test_json_bytes_are_utf_8_only(raw: bytes) -> None:
    with pytest.raises(InputError, match="x"):
        text.parse_json(raw, "x")


def test_json_values_come_back_as_they_are() -> None:
    assert text.parse_json('{"a": [1, -2.5, null, true, "ü", 18446744073709551615]}', "x") == {
        "a": [1, -2.5, None, True, "ü", 18446744073709551615]
    }


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("[]", "a list"),
        ("1", "an integer"),
        ("1.5", "a number"),
        ('"a"', "a string"),
        ("null", "null"),
        ("true", "a boolean"),
    ],
)
def test_json_that_is_not_an_object_is_refused_by_its_kind(tmp_path: Path, content: str, kind: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InputError, match=f"{kind}.*object is needed"):
        text.read_json_object(path)


def test_a_missing_file_a_directory_and_binary_data_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"abc\xff\x00")
    for name, fact in (("missing", "does not exist"), (".", "not a regular file"), ("binary", "byte 3")):
        with pytest.raises(InputError, match=fact):
            text.read_text(tmp_path / name)


def test_a_text_beyond_the_limit_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_TEXT_BYTES", 10)
    path = tmp_path / "long.json"
    path.write_text(" " * 11)
    with pytest.raises(InputError, match=r"11 bytes.*10"):
        text.read_text(path)


@pytest.mark.parametrize("content", ["a = ", "a = 1\na = 2", "[t]\n[t]", "a = " + "9" * 5000, "a = " + "[" * 100_000])
def test_malformed_toml_is_an_input_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "nest.toml"
    path.write_text(content)
    with pytest.raises(InputError, match=r"nest\.toml is not valid TOML"):
        text.read_toml(path)


@pytest.mark.parametrize(
    ("count", "written"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1536, "1.54 KB"),
        (999_499, "999 KB"),
        (999_999, "1 MB"),
        (7_640_000_000, "7.64 GB"),
    ],
)
def test_sizes_count_in_powers_of_1000(count: int, written: str) -> None:
    assert text.size(count) == written


def test_long_values_are_cut_where_they_are_shown() -> None:
    assert text.shown(list(range(1000))).endswith("...")
    assert len(text.shown("x" * 1000)) == 60
    assert text.shown({"a": None}) == '{"a": null}'
    assert text.counted(1, "tensor") == "1 tensor"
    assert text.counted(2, "tensor") == "2 tensors"


def test_problems_are_collected_once_each_and_raised_together() -> None:
    problems = Problems()
    problems.check()
    problems.add("first")
    problems.add("first")
    with problems.collect():
        raise InputError(["second", "third"])
    with pytest.raises(InputError) as caught:
        problems.fail("fourth")
    assert caught.value.problems == ("first", "second", "third", "fourth")
    assert str(caught.value) == "first\nsecond\nthird\nfourth"
