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

from linnet_export import text
from linnet_export.errors import OutputError

PARTIAL = ".partial-"


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raises OutputError if a file is there already, unless forced; a directory there is always refused."""
    try:
        if path.is_dir():
            raise OutputError(f"{path} is a directory; a file name is needed")
        if (path.exists() or path.is_symlink()) and not force:
            raise OutputError(f"{path} exists; --force replaces it")
    except OSError as error:
        raise _unwritable(path, error) from None


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
            raise _unwritable(path, error) from None
        finally:
            with contextlib.suppress(OSError):  # the error that is on its way says more
                partial.unlink()


@contextlib.contextmanager
def new_directory(path: Path, *, force: bool, foreign: Callable[[Path], Sequence[str]]) -> Iterator[Path]:
    """Gives a temporary directory beside `path`; renames it to `path` when the block ends without an error.

    An existing directory that is not empty is refused unless forced, and then still refused if `foreign` names
    anything in it: --force replaces exports, not other people's files.
    """
    path = Path(os.path.realpath(path))  # a link to a directory stays a link
    try:
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            raise OutputError(f"{path} is {'a file' if path.is_file() else 'no directory'}; a directory is needed")
        there = path.is_dir() and any(path.iterdir())
    except OSError as error:
        raise _unwritable(path, error) from None
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
            if path.is_dir():
                shutil.copymode(path, partial)
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
            raise _unwritable(path, error) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def preallocate(path: Path, size: int) -> None:
    """Makes a file `size` bytes long, with the blocks reserved where the file system can: a full disk shows here."""
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Makes a directory and its parents for a block; those it made are taken back if the block fails."""
    made: list[Path] = []
    try:
        try:
            made += [directory for directory in (path, *path.parents) if not directory.exists()]
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = text.shortened(path)
            raise OutputError(f"{where} cannot be made a directory: {error.strerror or error}") from None
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


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{text.shortened(path)} cannot be written: {error.strerror or error}")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    """Makes a rename last; where a file system or a directory's mode forbids that, the output is whole all the same."""
    with contextlib.suppress(OSError):
        _flush_descriptor(path)


def _flush_descriptor(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
