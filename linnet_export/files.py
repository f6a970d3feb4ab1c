"""Outputs that appear whole or not at all.

    with files.new_file(Path("out/model.gguf"), force=False) as partial:
        ...                                   # write to `partial`, a temporary name in the same directory
    # renamed here; on any error the temporary file is gone and what was there before is untouched
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from linnet_export.errors import OutputError

PARTIAL = ".partial-"


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raises OutputError if a file is there already, unless forced; a directory there is always refused."""
    if path.is_dir():
        raise OutputError(f"{path} is a directory; a file name is needed")
    if path.exists() and not force:
        raise OutputError(f"{path} exists; --force replaces it")


@contextlib.contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Gives a temporary path beside `path`; renames it to `path` when the block ends without an error."""
    refuse_existing(path, force=force)
    partial = _beside(path)
    try:
        make_directory(path.parent)
        yield partial
        _flush(partial)
        if force:
            partial.replace(path)
        else:
            # A link refuses to replace what another process wrote meanwhile; a rename would not.
            os.link(partial, path)
            partial.unlink()
        _flush_directory(path.parent)
    except FileExistsError:
        raise OutputError(f"{path} exists: another run wrote it meanwhile; --force replaces it") from None
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path, *, force: bool, ours: Callable[[str], bool]) -> Iterator[Path]:
    """Gives a temporary directory beside `path`; renames it to `path` when the block ends without an error.

    An existing directory that is not empty is refused unless forced, and then still refused if it holds anything
    that `ours` does not recognise as part of an export: --force replaces exports, not other people's files.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file; a directory is needed")
    there = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    if there and not force:
        raise OutputError(f"{path} exists and is not empty; --force replaces it")
    foreign = [name for name in there if not ours(name)]
    if foreign:
        raise OutputError(
            f"{path} holds {', '.join(foreign[:3])}{' and more' if len(foreign) > 3 else ''}, which no export writes; "
            "--force replaces only a directory that an export wrote"
        )
    partial = _beside(path)
    try:
        make_directory(path.parent)
        partial.mkdir()
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                _flush(file)
        _flush_directory(partial)
        if there:
            old = _beside(path)
            path.rename(old)
            try:
                partial.rename(path)
            except OSError:
                old.rename(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            partial.rename(path)  # also onto an empty directory; refused if another run filled it meanwhile
        _flush_directory(path.parent)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def preallocate(path: Path, size: int) -> None:
    """Makes a file `size` bytes long, with the blocks reserved where the file system can: a full disk shows here."""
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def make_directory(path: Path) -> None:
    """Makes a directory and its parents; OutputError if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be made a directory: {error.strerror or error}") from None


def _beside(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(f".{path.name}{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
