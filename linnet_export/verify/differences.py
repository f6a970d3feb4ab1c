"""Differences in words: what was found, what is needed, and the first place where two things part.

Shared by the structure checks of both formats; every function gives a line, pairs of subject and line, or findings.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linnet_export import text
from linnet_export.errors import InputError
from linnet_export.verify.records import Finding

# Of one kind of problem as many are listed by name; the rest is counted.
LISTED = 8
# What is shown of two texts on either side of their first difference.
CONTEXT = 16

# Name -> shape and type. A needed type of None is not compared.
Tensors = Mapping[str, tuple[tuple[int, ...], str | None]]


def tensors(found: Tensors, needed: Tensors) -> Iterator[Finding]:
    """Whether the tensors, their shapes and types are those needed."""
    problems: list[tuple[str, str]] = []
    for name, (shape, kind) in needed.items():
        if name not in found:
            problems.append((name, f"the tensor is missing; {kind or 'one'} of {list(shape)} is needed"))
        elif found[name][0] != shape:
            problems.append((name, f"the shape is {list(found[name][0])}; {list(shape)} is needed"))
        elif kind is not None and found[name][1] != kind:
            problems.append((name, f"the type is {found[name][1]}; {kind} is needed"))
    problems += [
        (
            name,
            f"the model has no such tensor ({found[name][1]} of {list(found[name][0])}); it must not be there",
        )
        for name in found
        if name not in needed
    ]
    weights = sum(math.prod(shape) for shape, _ in found.values())
    kinds = ", ".join(dict.fromkeys(str(kind) for _, kind in found.values()))
    yield from group("tensors", f"{text.counted(len(found), 'tensor')}, {weights:,} weights, {kinds}", problems)


def read_json(path: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    """The object in a file, or None and what is wrong with it."""
    try:
        return text.read_json_object(path), []
    except InputError as error:
        return None, [Finding(path.name, False, f"{line}; the file is needed as exported") for line in error.problems]


def group(label: str, message: str, problems: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """One passed finding, or a failed one for each problem (subject and message); many are counted."""
    if not problems:
        yield Finding(label, True, message)
    yield from (Finding(subject, False, problem) for subject, problem in problems[:LISTED])
    if len(problems) > LISTED:
        yield Finding(
            label, False, f"{len(problems) - LISTED} more problems of this kind; the export must be made again"
        )


def summary(value: Any) -> str:
    """A value, or how much of one there is."""
    if isinstance(value, list | tuple):
        return f"{len(value):,} rows"
    if isinstance(value, str) and len(value) > 2 * CONTEXT:
        return f"{len(value):,} characters"
    return shown(stored(value))


def settings(values: Mapping[str, Any]) -> str:
    """Keys with their values on one line."""
    return ", ".join(f"{key} {shown(value)}" for key, value in values.items())


def stored(value: Any) -> Any:
    """A value as a GGUF file gives it back: numbers in f32, texts of arrays as bytes."""
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            return float(np.float32(value))
    return value


def shown(value: Any) -> str:
    """A value in words: an absent one is none, f32 numbers are as short as f32 needs."""
    if value is None:
        return "none"
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, float) and stored(value) == value:
        return str(np.float32(value))
    return text.shown(value)


def row_problem(what: str, found: Sequence[Any], needed: Sequence[Any]) -> str | None:
    """The first row in which two lists differ, and whether all are shifted by one."""
    found = [row.encode() if isinstance(row, str) else row for row in found]
    needed = [row.encode() if isinstance(row, str) else row for row in needed]
    if found == needed:
        return None
    differing = [i for i, pair in enumerate(zip(found, needed, strict=False)) if pair[0] != pair[1]]
    lengths = f"{len(found)} rows; {len(needed)} are needed" if len(found) != len(needed) else ""
    if not differing:
        return f"{what} has {lengths}"
    first = differing[0]
    line = f"{what}, row {first}, is {shown(found[first])}; {shown(needed[first])} is needed"
    # Padding at either end aside, every row stands one place late or early: an id is off by one.
    span = slice(first, differing[-1])
    if len(differing) > 1:
        if found[first + 1 : differing[-1] + 1] == needed[span]:
            line += " (from there on every row stands one too late)"
        elif found[span] == needed[first + 1 : differing[-1] + 1]:
            line += " (from there on every row stands one too early)"
        else:
            line += f" ({len(differing)} rows differ)"
    return f"{line}; it has {lengths}" if lengths else line


def text_problem(found: str, needed: str) -> str:
    """Where one text leaves another, and what stands there in both."""
    place = next((i for i, pair in enumerate(zip(found, needed, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"has {len(found)} characters; {len(needed)} are needed, and they begin alike"
    excerpt = slice(max(0, place - CONTEXT), place + CONTEXT)
    return f"differs from character {place} on: {shown(found[excerpt])}; {shown(needed[excerpt])} is needed"


def ids(tokens: Iterable[int]) -> str:
    """Token ids in words."""
    return ", ".join(map(str, tokens)) or "no token"
