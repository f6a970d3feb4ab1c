"""Linnet cards: nest.toml, bindings.json and the constants of the sources, to one frozen `Card`.

    card = card.read(Path("phi-3-mini-4k-instruct"), bind={"Layers": 2})

A card says how a model is built and where its weights are; it holds none itself. Refused: generics that the
architecture does not have, bindings that are not names, constants that two modules define differently.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linnet_export import dtypes, phi3, text
from linnet_export.errors import InputError, Problems

NEST = "nest.toml"

# The generics of the Phi-3 root block. KvHeads may be absent (= Heads); Batch and MaxSeq size the caches.
REQUIRED_GENERICS = ("Vocab", "H", "Heads", "Inner", "Layers", "MaxSeq")
KNOWN_GENERICS = (*REQUIRED_GENERICS, "KvHeads", "Batch", "T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card states. `context` is nest.toml's own MaxSeq; an override sizes caches only."""

    directory: Path
    name: str
    model: Mapping[str, Any]
    links: Mapping[str, str]
    generics: Mapping[str, int | str]
    context: int
    layers: int
    theta: float
    window: int | None
    bindings: Mapping[str, str]
    repo: str | None
    revision: str | None
    files: tuple[str, ...]

    @property
    def tied(self) -> bool:
        """Whether head and embedding are bound to one tensor."""
        return self.tensor_name(phi3.HEAD) == self.tensor_name(phi3.EMBEDDING)

    def tensor_name(self, path: str) -> str:
        """The checkpoint's name of a Linnet path: its binding, else the path itself."""
        return self.bindings.get(path, path)

    def config(self) -> phi3.Config:
        """The architecture that the card's generics and constants describe."""
        number = {name: value for name, value in self.generics.items() if isinstance(value, int)}
        heads, hidden = number["Heads"], number["H"]
        return phi3.Config(
            vocab=number["Vocab"],
            hidden=hidden,
            heads=heads,
            kv_heads=number.get("KvHeads", heads),
            inner=number["Inner"],
            layers=number["Layers"],
            context=self.context,
            eps=phi3.EPSILON,
            window=self.window,
            rope=phi3.Rope(theta=self.theta, dims=hidden // heads if heads else 0, original_context=self.context),
            tied=self.tied,
        )


def is_card(directory: Path) -> bool:
    return text.present(directory / NEST)


def read(directory: Path, *, bind: Mapping[str, int | str] | None = None, bindings: Path | None = None) -> Card:
    """The card in a directory, with generics overridden by `bind` and bindings by another file; InputError."""
    problems = Problems()
    nest = text.read_toml(directory / NEST)
    model = _table(nest, "model", problems)
    links = {key: value for key, value in _table(nest, "links", problems).items() if isinstance(value, str)}
    source = _table(nest, "source", problems)
    weights = _table(nest, "weights", problems)

    stated = _generics(_table(nest, "generics", problems), problems)
    generics = dict(stated)
    for generic, value in (bind or {}).items():
        if generic not in KNOWN_GENERICS:
            problems.add(f"--bind {generic}: no such generic; known: {', '.join(KNOWN_GENERICS)}")
        elif isinstance(value, str) != (generic == "T"):
            needed = "a type such as bf16" if generic == "T" else "an integer"
            problems.add(f"--bind {generic}={value}: {needed} is needed")
        else:
            generics[generic] = value
    _constraints(generics, problems)

    constants = _constants(directory, source, problems)
    theta = constants.get("THETA")
    if theta is not None and theta <= 0:
        problems.add(f"THETA is {theta}; the rotary base must be positive")
    window = constants.get("WINDOW")
    if window is not None and (window != int(window) or window < 1):
        problems.add(f"WINDOW is {window}; a positive whole number is needed, or no such constant for no window")

    bound = _bindings(directory, weights, bindings, problems)
    files = _files(weights, problems)
    name = _string(model, "name", "[model]", problems)
    repo, revision = (_string(weights, key, "[weights]", problems) for key in ("repo", "revision"))
    layers, depth = stated.get("Layers"), generics.get("Layers")
    if isinstance(layers, int) and isinstance(depth, int) and depth > layers:
        problems.add(f"--bind Layers={depth}: the card has {layers} layers")
    problems.check()
    context = stated["MaxSeq"]
    assert theta is not None  # what is missing was collected above
    assert isinstance(layers, int)
    assert isinstance(context, int)
    return Card(
        directory=directory,
        name=name or Path(os.path.realpath(directory)).name,
        model=model,
        links=links,
        generics=generics,
        context=context,
        layers=layers,
        theta=float(theta),
        window=None if window is None else int(window),
        bindings=bound,
        repo=repo,
        revision=revision,
        files=files,
    )


def _table(nest: Mapping[str, Any], name: str, problems: Problems) -> dict[str, Any]:
    value = nest.get(name, {})
    if not isinstance(value, dict):
        problems.add(f"[{name}] in {NEST} is {text.json_kind(value)}; a table is needed")
        return {}
    return value


def _inside(path: Path, directory: Path) -> bool:
    """Whether a path stays inside a directory, links followed; one that no system can have does not."""
    try:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))
    except ValueError:  # a NUL in it
        return False


def _string(table: Mapping[str, Any], key: str, where: str, problems: Problems) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        problems.add(f"{where} {key} in {NEST} is {text.shown(value)}; a string is needed")
        return None
    return value or None


def _generics(table: Mapping[str, Any], problems: Problems) -> dict[str, int | str]:
    generics: dict[str, int | str] = {}
    for name, value in table.items():
        if name not in KNOWN_GENERICS:
            problems.add(f"[generics] {name}: no such generic of Phi-3; known: {', '.join(KNOWN_GENERICS)}")
        elif isinstance(value, bool) or not isinstance(value, int | str) or isinstance(value, str) != (name == "T"):
            needed = 'a type such as "bf16"' if name == "T" else "an integer"
            problems.add(f"[generics] {name} is {text.shown(value)}; {needed} is needed")
        else:
            generics[name] = value
    missing = [name for name in REQUIRED_GENERICS if name not in table]
    if missing:
        problems.add(f"[generics] in {NEST} lacks {', '.join(missing)}")
    dtype = generics.get("T")
    if dtype is not None and dtype not in dtypes.BY_NAME:
        problems.add(f"[generics] T is {text.shown(dtype)}; known: {', '.join(dtypes.BY_NAME)}")
    return generics


def _constraints(generics: Mapping[str, int | str], problems: Problems) -> None:
    """The `where` clauses of the Phi-3 sources."""
    number = {name: value for name, value in generics.items() if isinstance(value, int)}
    for name, value in number.items():
        most = phi3.MAX_LAYERS if name == "Layers" else phi3.MAX_SIZE
        if value < 1:
            problems.add(f"{name} is {value}; the source needs {name} > 0")
        elif value > most:
            problems.add(f"{name} is {value}; at most {most} is needed")
    hidden, heads, kv_heads = (max(number.get(name, 0), 0) for name in ("H", "Heads", "KvHeads"))
    if heads and hidden % heads:
        problems.add(f"H is {hidden} and Heads {heads}; the source needs H % Heads == 0")
    elif heads and hidden // heads % 2:
        problems.add(f"H / Heads is {hidden // heads}; the source needs (H / Heads) % 2 == 0")
    if heads and kv_heads and heads % kv_heads:
        problems.add(f"Heads is {heads} and KvHeads {kv_heads}; Heads % KvHeads == 0 is needed")


# Any definition, of any type: one that is not understood must not count as absent.
_CONSTANT = re.compile(r"\bconst\s+(THETA|WINDOW)\b(?:\s*:[^=\n]*)?\s*=\s*([^\n;}]*)")
_NUMBER = re.compile(r"^[0-9][0-9_]*(\.[0-9_]+)?([eE][+-]?[0-9]+)?$")


def _constants(directory: Path, source: Mapping[str, Any], problems: Problems) -> dict[str, float]:
    """THETA and WINDOW as the card's sources define them; definitions that differ are an error naming both."""
    path = source.get("path", "src/lib.linnet")
    if not isinstance(path, str):
        problems.add(f"[source] path is {text.shown(path)}; a file name is needed")
        return {}
    library = directory / path
    if not _inside(library, directory):
        problems.add(f"[source] path is {text.shown(path)}, outside the card; a file inside it is needed")
        return {}
    if not library.is_file():
        problems.add(f"{library} does not exist: the card's [source] path names it")
        return {}
    found: dict[str, tuple[float, Path]] = {}
    before = len(problems.lines)
    for file in sorted(library.parent.rglob("*.linnet")):
        try:
            code = re.sub(r"//[^\n]*", "", text.read_text(file))
        except InputError as error:
            problems.take(error)
            continue
        for name, written in _CONSTANT.findall(code):
            literal = written.strip()
            value = float(literal.replace("_", "")) if _NUMBER.match(literal) else math.inf
            if not math.isfinite(value):
                problems.add(f"{file} defines {name} as {literal}; a number is needed")
                continue
            if name in found and found[name][0] != value:
                problems.add(f"{name} is {found[name][0]} in {found[name][1]} and {value} in {file}; they must agree")
            found.setdefault(name, (value, file))
    if "THETA" not in found and len(problems.lines) == before:
        problems.add(
            f"no source of {directory} defines THETA; `pub const THETA: f32 = ...` is needed for the rotary base"
        )
    return {name: value for name, (value, _) in found.items()}


def _bindings(directory: Path, weights: Mapping[str, Any], override: Path | None, problems: Problems) -> dict[str, str]:
    name = weights.get("bindings")
    if override is not None:
        path = override
    elif name is None:
        return {}
    elif not isinstance(name, str):
        problems.add(f"[weights] bindings is {text.shown(name)}; a file name is needed")
        return {}
    else:
        path = directory / name
        if not name or not _inside(path, directory):
            problems.add(f"[weights] bindings is {text.shown(name)}, outside the card; a file inside it is needed")
            return {}
    try:
        content = text.read_json_object(path)
    except InputError as error:
        problems.take(error)
        return {}
    bound: dict[str, str] = {}
    for key, value in content.items():
        if not isinstance(value, str):
            problems.add(f"{path} binds {key} to {text.json_kind(value)}; a tensor name is needed")
        elif phi3.layer_of(key) is None and key not in _TOP_PATHS:
            problems.add(f"{path} binds {text.shown(key)}, a path that Phi-3 does not have")
        else:
            bound[key] = value
    return bound


# The paths outside layers; a Linnet model always has a head, bound to the embedding when tied.
_TOP_PATHS = ("embedding.weight", "norm.weight", "lm_head.weight")


def _files(weights: Mapping[str, Any], problems: Problems) -> tuple[str, ...]:
    files = weights.get("files", [])
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        problems.add(f"[weights] files in {NEST} is {text.shown(files)}; a list of file names is needed")
        return ()
    for file in files:
        if not file or Path(file).is_absolute() or ".." in Path(file).parts:
            problems.add(f"[weights] files in {NEST} names {text.shown(file)}; a file inside the card is needed")
    return tuple(files)
