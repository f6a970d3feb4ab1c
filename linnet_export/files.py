"""Outputs that appear whole or not at all.

    with files.new_file(Path("out/model.gguf"), force=False) as partial:
        ...                                   # write to `partial`, a temporary name in the same directory

It is renamed where the block ends; on any error the temporary file is gone and what was there before is untouched.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
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
    with _directory(path.parent):
        try:
            yield partial
            _flush(partial)
            if force:
                partial.replace(path)
            else:
                _rename_to_new(partial, path)
            _flush_directory(path.parent)
        except FileExistsError:
            raise OutputError(f"{path} exists: another run wrote it meanwhile; --force replaces it") from None
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path, *, force: bool, foreign: Callable[[Path], Sequence[str]]) -> Iterator[Path]:
    """Gives a temporary directory beside `path`; renames it to `path` when the block ends without an error.

    An existing directory that is not empty is refused unless forced, and then still refused if `foreign` names
    anything in it: --force replaces exports, not other people's files.
    """
    path = path.resolve()  # a link to a directory stays a link
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file; a directory is needed")
    there = path.is_dir() and any(path.iterdir())
    if there and not force:
        raise OutputError(f"{path} exists and is not empty; --force replaces what an earlier export wrote")
    if there and (names := foreign(path)):
        raise OutputError(
            f"{path} holds {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}, which no export wrote; "
            "--force replaces only what an earlier export wrote: move it away, or choose another directory"
        )
    partial = _beside(path)
    with _directory(path.parent):
        try:
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


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Makes a directory and its parents for a block; those it made are taken back if the block fails."""
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{path} cannot be made a directory: {error.strerror or error}") from None
        yield
    except BaseException:
        for directory in made:
            with contextlib.suppress(OSError):  # never made, or no longer empty
                directory.rmdir()
        raise


def _rename_to_new(partial: Path, path: Path) -> None:
    """Renames a file; FileExistsError if another process wrote the new name meanwhile."""
    try:
        os.link(partial, path)  # refuses to replace, where a rename would not
        partial.unlink()
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # A file system without links (FAT, some network ones): look, then rename.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        partial.rename(path)


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
