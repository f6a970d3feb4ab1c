"""Outputs appear whole or not at all, and nothing that was there is lost."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import tiny
from linnet_export import files
from linnet_export.errors import InputError, OutputError


def tree(directory: Path) -> dict[str, str | None]:
    """Every path below a directory, with the text of files."""
    found = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): path.read_text() if path.is_file() else None for path in found}


def put(texts: dict[Path, str], error: BaseException | None = None) -> None:
    """Writes files, as the block of an export or another program does, and may fail then."""
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    if error is not None:
        raise error


def nothing_foreign(_: Path) -> Sequence[str]:
    return []


def test_a_file_appears_under_its_name_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "a/b/model.gguf"
    with files.new_file(target, force=False) as partial:
        partial.write_text("whole")
        assert partial.parent == target.parent
        assert not target.exists()
    assert tree(tmp_path) == {"a": None, "a/b": None, "a/b/model.gguf": "whole"}


def test_a_file_that_exists_is_refused_before_the_block_and_replaced_by_force(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_text("old")
    with pytest.raises(OutputError, match="--force"), files.new_file(target, force=False):
        pytest.fail("the block ran")
    assert tree(tmp_path) == {"model.gguf": "old"}
    with files.new_file(target, force=True) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert tree(tmp_path) == {"model.gguf": "new"}


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_where_a_file_belongs_is_refused(tmp_path: Path, force: bool) -> None:
    with pytest.raises(OutputError, match="is a directory"), files.new_file(tmp_path, force=force):
        pytest.fail("the block ran")


@pytest.mark.parametrize("error", [InputError("damaged"), RuntimeError("other"), KeyboardInterrupt()])
@pytest.mark.parametrize("force", [False, True])
def test_an_error_in_the_block_leaves_no_file_and_no_directory(
    tmp_path: Path, error: BaseException, force: bool
) -> None:
    with pytest.raises(type(error)), files.new_file(tmp_path / "a/b/model.gguf", force=force) as partial:
        put({partial: "half"}, error)
    assert tree(tmp_path) == {}


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_text("old")
    with pytest.raises(InputError), files.new_file(target, force=True) as partial:
        put({partial: "half"}, InputError("damaged"))
    assert tree(tmp_path) == {"model.gguf": "old"}


def test_directories_that_others_filled_meanwhile_stay(tmp_path: Path) -> None:
    with pytest.raises(InputError), files.new_file(tmp_path / "a/b/model.gguf", force=False):
        put({tmp_path / "a/other": "theirs"}, InputError("damaged"))
    assert tree(tmp_path) == {"a": None, "a/other": "theirs"}


def test_a_file_that_another_run_wrote_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    with pytest.raises(OutputError, match="meanwhile"), files.new_file(target, force=False) as partial:
        put({partial: "ours", target: "theirs"})
    assert tree(tmp_path) == {"model.gguf": "theirs"}


@pytest.mark.parametrize("name", ["model.gguf", "deeper/model.gguf"])
def test_a_parent_that_is_a_file_is_an_output_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("there")
    with pytest.raises(OutputError, match="file"), files.new_file(tmp_path / "file" / name, force=False):
        pytest.fail("the block ran")
    with (
        pytest.raises(OutputError, match="file"),
        files.new_directory(tmp_path / "file" / name, force=False, foreign=nothing_foreign),
    ):
        pytest.fail("the block ran")
    assert tree(tmp_path) == {"file": "there"}


def fill(path: Path) -> None:
    path.touch()
    files.preallocate(path, 1 << 62)  # more than any file system has


def test_a_full_disk_is_an_output_error_with_nothing_left(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"model\.gguf cannot be written"),
        files.new_file(tmp_path / "out/model.gguf", force=False) as partial,
    ):
        fill(partial)
    assert tree(tmp_path) == {}


def test_preallocation_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"head")
    files.preallocate(path, 100)
    assert path.read_bytes() == b"head" + bytes(96)


@pytest.mark.parametrize("made", [False, True])
def test_a_directory_appears_where_none_or_an_empty_one_is(tmp_path: Path, made: bool) -> None:
    target = tmp_path / "out/hf"
    if made:
        target.mkdir(parents=True)
    with files.new_directory(target, force=False, foreign=nothing_foreign) as partial:
        (partial / "config.json").write_text("{}")
        assert not (target / "config.json").exists()
    assert tree(tmp_path) == {"out": None, "out/hf": None, "out/hf/config.json": "{}"}


def test_a_directory_with_files_is_refused_and_replaced_whole_by_force(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    target.mkdir()
    (target / "old").write_text("old")
    with (
        pytest.raises(OutputError, match="--force"),
        files.new_directory(target, force=False, foreign=nothing_foreign),
    ):
        pytest.fail("the block ran")
    with files.new_directory(target, force=True, foreign=nothing_foreign) as partial:
        (partial / "new").write_text("new")
        assert tree(target) == {"old": "old"}
    assert tree(tmp_path) == {"hf": None, "hf/new": "new"}


def test_force_does_not_replace_what_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with (
        pytest.raises(OutputError, match=r"thesis\.tex.*no export wrote"),
        files.new_directory(tmp_path, force=True, foreign=lambda path: [p.name for p in path.iterdir()]),
    ):
        pytest.fail("the block ran")
    assert tree(tmp_path) == {"thesis.tex": "years"}


@pytest.mark.parametrize("there", [False, True])
def test_an_error_leaves_no_directory_and_the_old_one_untouched(tmp_path: Path, there: bool) -> None:
    target = tmp_path / "out/hf"
    if there:
        target.mkdir(parents=True)
        (target / "old").write_text("old")
    before = tree(tmp_path)
    with (
        pytest.raises(InputError),
        files.new_directory(target, force=True, foreign=nothing_foreign) as partial,
    ):
        put({partial / "half": "half"}, InputError("damaged"))
    assert tree(tmp_path) == before


def test_a_directory_that_another_run_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    with (
        pytest.raises(OutputError, match="cannot be written"),
        files.new_directory(target, force=False, foreign=nothing_foreign) as partial,
    ):
        put({partial / "ours": "ours", target / "theirs": "theirs"})
    assert tree(tmp_path) == {"hf": None, "hf/theirs": "theirs"}


def test_a_link_to_a_directory_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk/hf").mkdir(parents=True)
    (tmp_path / "disk/hf/old").write_text("old")
    (tmp_path / "hf").symlink_to(tmp_path / "disk/hf")
    with files.new_directory(tmp_path / "hf", force=True, foreign=nothing_foreign) as partial:
        (partial / "new").write_text("new")
    assert (tmp_path / "hf").is_symlink()
    assert tree(tmp_path / "disk") == {"hf": None, "hf/new": "new"}
    assert tiny.listing(tmp_path) == ["disk", "hf"]


def test_a_file_where_a_directory_belongs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("file")
    with (
        pytest.raises(OutputError, match="is a file"),
        files.new_directory(tmp_path / "hf", force=True, foreign=nothing_foreign),
    ):
        pytest.fail("the block ran")
