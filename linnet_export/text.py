"""Strict reading of small text files (JSON, TOML), and numbers written for people.

A file that a user hands over is never trusted: too large, not UTF-8, nested too deep, a key twice and values that
JSON does not have (NaN) are all one-line InputErrors that name the file.
"""

import json
import math
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from linnet_export.errors import InputError

# The largest text that a model brings along is a tokenizer.json: about 30 MB with 200 000 tokens.
MAX_TEXT_BYTES = 256 * 1024 * 1024


def present(path: Path) -> bool:
    """Whether a file is there. A link to nothing, a directory or a device in its place is an InputError.

    A snapshot in a hub's cache whose blob is missing is such a link: taking it for absent would change the model.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise InputError(f"{path} is a link to a file that is missing; download it again") from None
        return False
    except OSError as error:
        raise InputError(f"{shortened(path)} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is not a regular file; one is needed, or none")
    return True


def read_bytes(path: Path) -> bytes:
    """The bytes of a small file."""
    try:
        if not present(path):
            raise InputError(f"{path} does not exist")
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise InputError(f"{path} has {size} bytes; a file beside a model's weights has at most {MAX_TEXT_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None


def shortened(path: Path) -> str:
    """A path for a message, cut in the middle where it is too long to read."""
    written = str(path)
    return written if len(written) <= 200 else f"{written[:90]}...{written[-90:]}"


def parse_json(text: str | bytes, origin: str) -> Any:
    """The value of a JSON text; `origin` names it in errors."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")  # json.loads would also take UTF-16 and UTF-32
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_real, parse_int=_integer
        )
        if _SURROGATE.search(text):
            _refuse_lone_surrogates(value)
        return value
    except json.JSONDecodeError as error:
        raise InputError(
            f"{origin} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise InputError(f"{origin} is not valid JSON for a model: it is nested too deep") from None
    except UnicodeDecodeError:
        raise InputError(f"{origin} is not UTF-8 text") from None
    except ValueError as error:
        raise InputError(f"{origin} is not valid JSON: {error}") from None


def read_json(path: Path) -> Any:
    """The value that a JSON file holds."""
    return parse_json(read_text(path), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; anything else is an InputError."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {json_kind(value)}; a JSON object is needed")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(read_text(path))
    except ValueError as error:  # TOMLDecodeError, and what int() says about thousands of digits
        raise InputError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{path} is not valid TOML for a model: it is nested too deep") from None


def json_kind(value: object) -> str:
    """A value's JSON type, with its article."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def shown(value: object, limit: int = 60) -> str:
    """A value as JSON on one line, cut to about `limit` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def size(count: int) -> str:
    """A number of bytes for people: 7.64 GB (powers of 1000, as disks and hubs count)."""
    value, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def counted(count: int, noun: str) -> str:
    """1 tensor, 2 tensors."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# Half of a letter beyond U+FFFF. In pairs JSON makes a letter of them; a lone one is no text in any encoding.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse_lone_surrogates(value: Any) -> None:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"{shown(value.encode('ascii', 'backslashreplace').decode())} is not Unicode text"
                ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} stands twice in one object")
            seen.add(key)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _real(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20:  # past 64 bits; int() of a very long text would also cost quadratic time
        raise ValueError(f"the integer {digits[:20]}... is too large")
    return int(digits)
