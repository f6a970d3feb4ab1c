"""The files that make up a tokenizer, found in a directory; no tokenizer library is needed.

    tokenizer = find(Path("Phi-3-mini-4k-instruct"))
    tokenizer.kind, tokenizer.eos, tokenizer.chat_template

What it holds is decided by content: a class name in tokenizer_config.json decides nothing. Two kinds are read: `spm`
(SentencePiece BPE, from tokenizer.model or tokenizer.json) and `bpe` (byte-level BPE, from tokenizer.json or from
vocab.json with merges.txt). Unigram, WordPiece and other models are refused by name, and so are files that
contradict one another.

Special ids, `add_bos` and `add_eos` are resolved as llama.cpp's converter does (gguf-py, vocab.py, SpecialVocab).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linnet_export import text
from linnet_export.errors import InputError, Problems

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
VOCAB = "vocab.json"
MERGES = "merges.txt"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATE_JSON = "chat_template.json"

# Every file name that belongs to a tokenizer; ADDITIONAL_TEMPLATES is a folder of further *.jinja files.
FILES = (
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    VOCAB,
    MERGES,
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
)
ADDITIONAL_TEMPLATES = "additional_chat_templates"
DEFAULT_TEMPLATE = "default"

# The special tokens that a GGUF file names, in the order in which llama.cpp's converter looks for them.
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside the model's own pieces. `rstrip` and `lstrip` swallow the whitespace after and before it."""

    id: int
    content: str
    special: bool = False
    rstrip: bool = False
    lstrip: bool = False
    normalized: bool = True


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """What a tokenizer.model says about itself beside its pieces (sentencepiece_model.proto)."""

    pieces: int
    normalizer: str
    has_charsmap: bool
    dummy_prefix: bool
    trims_whitespace: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer of one directory.

    `special` has the id of each role in ROLES that the files name (and `eot`, where a template puts another end
    token in its place); `names` the texts they name, with or without an id. `adds` says for a role whether
    encoding adds its token; a role that is missing is not decided by the files. `named` holds the texts of every
    token that the configuration calls special. `rows` is one more than the largest id.
    """

    directory: Path
    files: tuple[Path, ...]
    kind: str
    config: Mapping[str, Any]
    added: tuple[AddedToken, ...]
    special: Mapping[str, int]
    names: Mapping[str, str]
    adds: Mapping[str, bool]
    named: frozenset[str]
    chat_templates: Mapping[str, str]
    rows: int = 0
    sentencepiece: SentencePiece | None = None
    notes: tuple[str, ...] = ()

    @property
    def bos(self) -> int | None:
        return self.special.get("bos")

    @property
    def eos(self) -> int | None:
        return self.special.get("eos")

    @property
    def unk(self) -> int | None:
        return self.special.get("unk")

    @property
    def pad(self) -> int | None:
        return self.special.get("pad")

    @property
    def add_bos(self) -> bool | None:
        return self.adds.get("bos")

    @property
    def add_eos(self) -> bool | None:
        return self.adds.get("eos")

    @property
    def chat_template(self) -> str | None:
        """The template used where none is asked for by name."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def path(self, name: str) -> Path | None:
        """The file of that name, if it is there."""
        path = self.directory / name
        return path if path in self.files else None


def find(directory: Path) -> TokenizerFiles | None:
    """The tokenizer in a directory, or None where no file holds a vocabulary.

    Raises InputError with every problem: malformed files, two texts for one id, a kind that is not supported.
    """
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; one with a tokenizer's files is needed")
    problems = Problems()
    files = {}
    for name in FILES:
        with problems.collect():
            if text.present(directory / name):
                files[name] = directory / name
    extra = sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    if not files.keys() & {TOKENIZER_JSON, TOKENIZER_MODEL, VOCAB, MERGES}:
        problems.check()
        return None
    for name, other in ((VOCAB, MERGES), (MERGES, VOCAB)):
        if name in files and not files.keys() & {other, TOKENIZER_JSON, TOKENIZER_MODEL}:
            problems.add(f"{files[name]} is there without {other}; a tokenizer needs both, or a {TOKENIZER_JSON}")
    objects = _objects(files, problems)
    tokenizer, config = objects.get(TOKENIZER_JSON), objects.get(TOKENIZER_CONFIG)
    sentencepiece = _sentencepiece(files, tokenizer, problems)
    kind = _kind(files, tokenizer, sentencepiece, problems)
    added = _added(kind, files, objects, problems)
    names, named = _names(files, objects, problems)
    adds = _processed(tokenizer, names, bool(config)) if tokenizer is not None else {}
    for role in ROLES:
        if isinstance(said := (config or {}).get(f"add_{role}_token"), bool):
            adds.setdefault(role, said)
    ids = {token.content: token.id for token in added}
    notes: list[str] = []
    templates = _templates(files, objects, extra, problems, notes)
    problems.check()
    return TokenizerFiles(
        directory=directory,
        files=tuple(sorted([*files.values(), *extra])),
        kind=kind,
        config=config or {},
        added=added,
        special={role: ids[names[role]] for role in (*ROLES, "eot") if names.get(role) in ids},
        names=names,
        adds=adds,
        named=named,
        chat_templates=templates,
        rows=_rows(files, tokenizer, sentencepiece, added),
        sentencepiece=sentencepiece,
        notes=tuple(notes),
    )


def _rows(
    files: Mapping[str, Path],
    tokenizer: Mapping[str, Any] | None,
    sentencepiece: SentencePiece | None,
    added: Sequence[AddedToken],
) -> int:
    """One more than the largest id that any of the files gives a token."""
    vocab: object = None
    if tokenizer is not None:
        model = tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
    elif sentencepiece is None and VOCAB in files:
        vocab = text.read_json(files[VOCAB])
    ids = vocab.values() if isinstance(vocab, Mapping) else range(len(vocab)) if isinstance(vocab, list) else ()
    count = max((*(n for n in ids if type(n) is int), *(token.id for token in added)), default=-1) + 1
    return max(count, sentencepiece.pieces if sentencepiece else 0)


def eos_ids(
    tokenizer: TokenizerFiles | None, config: Mapping[str, Any] | None, generation_config: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """Every token that ends a text: config.json's, generation_config.json's and the tokenizer's, in this order."""
    problems = Problems()
    found: list[int] = []
    for origin, value in (("config.json", config), ("generation_config.json", generation_config)):
        said = (value or {}).get("eos_token_id")
        ids = said if isinstance(said, list) else [] if said is None else [said]
        if all(type(token) is int for token in ids):
            found += ids
        else:
            problems.add(f"{origin}: eos_token_id is {text.shown(said)}; an integer, a list of them or null is needed")
    problems.check()
    if tokenizer is not None and tokenizer.eos is not None:
        found.append(tokenizer.eos)
    return tuple(dict.fromkeys(found))


def flat(part: object, key: str) -> tuple[Mapping[str, Any], ...]:
    """A tokenizer.json component as the list of its steps: `Sequence` is only a wrapper (its list is under `key`)."""
    if not isinstance(part, Mapping):
        return ()
    if part.get("type") != "Sequence":
        return (part,)
    steps = part.get(key)
    return tuple(step for child in steps for step in flat(child, key)) if isinstance(steps, list) else ()


def _objects(files: Mapping[str, Path], problems: Problems) -> dict[str, dict[str, Any]]:
    """The JSON files that are there and can be read, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name in (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, CHAT_TEMPLATE_JSON):
        if name in files:
            try:
                found[name] = text.read_json_object(files[name])
            except InputError as error:
                problems.take(error)
    return found


def _kind(
    files: Mapping[str, Path],
    tokenizer: Mapping[str, Any] | None,
    sentencepiece: SentencePiece | None,
    problems: Problems,
) -> str:
    if tokenizer is not None:
        kind = _kind_of_json(files[TOKENIZER_JSON], tokenizer, problems)
        if kind == "bpe" and sentencepiece is not None:
            problems.add(
                f"{files[TOKENIZER_JSON]} holds a byte-level BPE tokenizer, but {files[TOKENIZER_MODEL]} a "
                "SentencePiece one; remove the one that the model was not trained with"
            )
        return kind
    return "spm" if TOKENIZER_MODEL in files else "bpe"


def _kind_of_json(path: Path, tokenizer: Mapping[str, Any], problems: Problems) -> str:
    model = tokenizer.get("model")
    if not isinstance(model, Mapping):
        problems.add(f"{path}: model is {text.json_kind(model)}; an object with vocab and merges is needed")
        return "bpe"
    kind = model.get("type", "BPE" if "merges" in model else None)  # files of 2020 do not name their model's type
    needed = "a BPE model is needed, SentencePiece's (byte fallback, ▁ for spaces) or a byte-level one"
    if kind != "BPE":
        problems.add(f"{path} holds a {kind or 'nameless'} model; {needed}")
        return "bpe"
    splits = flat(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if any(step.get("type") == "ByteLevel" for step in splits):
        return "bpe"
    steps = (*splits, *flat(tokenizer.get("normalizer"), "normalizers"))
    marks = any(step.get("type") == "Metaspace" or "▁" in (step.get("content"), step.get("prepend")) for step in steps)
    if not (marks or model.get("byte_fallback") is True):
        types = ", ".join(str(step.get("type")) for step in splits) or "none"
        problems.add(f"{path} holds a BPE model whose pre-tokenizer is {types}; {needed}")
    return "spm"


def _sentencepiece(
    files: Mapping[str, Path], tokenizer: Mapping[str, Any] | None, problems: Problems
) -> SentencePiece | None:
    """Reads a tokenizer.model's own description; None where that file is another format beside a tokenizer.json."""
    path = files.get(TOKENIZER_MODEL)
    if path is None:
        return None
    try:
        raw = text.read_bytes(path)
    except OSError as error:
        problems.add(f"{path} cannot be read: {error.strerror or error}")
        return None
    try:
        pieces, trainer, normalizer = 0, b"", b""
        for number, value in _fields(raw):
            pieces += number == _PIECES
            trainer = value if number == _TRAINER and isinstance(value, bytes) else trainer
            normalizer = value if number == _NORMALIZER and isinstance(value, bytes) else normalizer
        settings, steps = dict(_fields(trainer)), dict(_fields(normalizer))
        if pieces == 0:
            raise ValueError
    except ValueError:
        # Tokenizers of another family (tiktoken's ranks) use this name too; then tokenizer.json says what they are.
        if tokenizer is None:
            pointer = raw.startswith(b"version https://git-lfs")
            found = "a Git LFS pointer, whose file was not fetched" if pointer else "not a SentencePiece model"
            problems.add(f"{path} is {found}; a SentencePiece model, or a {TOKENIZER_JSON}, is needed")
        return None
    kind = settings.get(3, 1)
    if kind != _BPE:
        name = _MODEL_TYPES.get(kind, str(kind)) if isinstance(kind, int) else str(kind)
        problems.add(f"{path} holds a SentencePiece {name} model; a BPE one is needed")
    name_bytes = steps.get(1, b"")
    return SentencePiece(
        pieces=pieces,
        normalizer=name_bytes.decode("utf-8", "replace") if isinstance(name_bytes, bytes) else "",
        has_charsmap=bool(steps.get(2)),
        dummy_prefix=bool(steps.get(3, 1)),
        trims_whitespace=bool(steps.get(4, 1)),
    )


# Field numbers of sentencepiece_model.proto: ModelProto, then TrainerSpec.model_type (3; Unigram is the default).
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_BPE = 2
_MODEL_TYPES = {1: "Unigram", 2: "BPE", 3: "word", 4: "character"}


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, in order; ValueError where the bytes are no message."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            if place >= len(raw) or shift > 63:
                raise ValueError
            byte = raw[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(raw):
        tag = varint()
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            yield number, varint()
            continue
        if wire not in _LENGTHS or number == 0:
            raise ValueError
        length = _LENGTHS[wire] or varint()
        if place + length > len(raw):
            raise ValueError
        yield number, raw[place : place + length]
        place += length


_LENGTHS = {1: 8, 2: 0, 5: 4}  # bytes by wire type; 2 carries its own length


def _added(
    kind: str, files: Mapping[str, Path], objects: Mapping[str, dict[str, Any]], problems: Problems
) -> tuple[AddedToken, ...]:
    """Added tokens by id. Where two files differ in a flag, the last one read wins.

    llama.cpp's converter reads tokenizer.json last for SentencePiece; for byte-level BPE it asks transformers, which
    puts tokenizer_config.json over tokenizer.json.
    """
    sources = {
        ADDED_TOKENS: _from_added_tokens,
        TOKENIZER_CONFIG: _from_decoder,
        TOKENIZER_JSON: _from_json,
    }
    order = (ADDED_TOKENS, TOKENIZER_CONFIG, TOKENIZER_JSON)
    if kind == "bpe":
        order = (ADDED_TOKENS, TOKENIZER_JSON, TOKENIZER_CONFIG)
    found: dict[int, AddedToken] = {}
    origins: dict[int, str] = {}
    for name in order:
        for token in sources[name](files.get(name), objects.get(name, {}), problems):
            if token.id in found and found[token.id].content != token.content:
                problems.add(
                    f"token {token.id} is {text.shown(found[token.id].content)} in {files[origins[token.id]]} "
                    f"and {text.shown(token.content)} in {files[name]}; they must agree"
                )
                continue
            found[token.id] = token
            origins[token.id] = name
    places: dict[str, int] = {}
    for token in found.values():
        first = places.setdefault(token.content, token.id)
        if first != token.id:
            problems.add(
                f"the added token {text.shown(token.content)} has the ids {first} and {token.id}; one is needed"
            )
    return tuple(found[number] for number in sorted(found))


def _from_added_tokens(path: Path | None, value: Mapping[str, Any], problems: Problems) -> Iterator[AddedToken]:
    for content, number in value.items():
        if type(number) is int and number >= 0:
            yield AddedToken(number, content)
        else:
            problems.add(f"{path}: {text.shown(content)} has the id {text.shown(number)}; an integer from 0 is needed")


def _from_decoder(path: Path | None, value: Mapping[str, Any], problems: Problems) -> Iterator[AddedToken]:
    decoder = value.get("added_tokens_decoder")
    if decoder is not None and not isinstance(decoder, Mapping):
        problems.add(f"{path}: added_tokens_decoder is {text.json_kind(decoder)}; an object is needed")
        return
    for number, entry in (decoder or {}).items():
        if not (number.isascii() and number.isdigit() and len(number) < 20):
            problems.add(f"{path}: added_tokens_decoder has the id {text.shown(number)}; an integer from 0 is needed")
        elif (token := _token(int(number), entry, f"{path}: added token {number}", problems)) is not None:
            yield token


def _from_json(path: Path | None, value: Mapping[str, Any], problems: Problems) -> Iterator[AddedToken]:
    entries = value.get("added_tokens")
    if entries is not None and not isinstance(entries, list):
        problems.add(f"{path}: added_tokens is {text.json_kind(entries)}; a list is needed")
        return
    for entry in entries or []:
        number = entry.get("id") if isinstance(entry, Mapping) else None
        if type(number) is not int or number < 0:
            problems.add(f"{path}: an added token is {text.shown(entry)}; an object with an id from 0 is needed")
        elif (token := _token(number, entry, f"{path}: added token {number}", problems)) is not None:
            yield token


def _token(number: int, entry: object, where: str, problems: Problems) -> AddedToken | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str) or not entry["content"]:
        problems.add(f"{where} is {text.shown(entry)}; an object with a text as content is needed")
        return None
    special = entry.get("special", False)
    flags = {name: entry.get(name, False) for name in ("rstrip", "lstrip")}
    flags |= {"special": special, "normalized": entry.get("normalized", not special)}
    for name, value in flags.items():
        if not isinstance(value, bool):
            problems.add(f"{where}: {name} is {text.shown(value)}; true or false is needed")
            return None
    return AddedToken(number, entry["content"], **flags)


def _names(
    files: Mapping[str, Path], objects: Mapping[str, dict[str, Any]], problems: Problems
) -> tuple[dict[str, str], frozenset[str]]:
    """The texts of the special tokens: by role, and all of them."""
    sources = [TOKENIZER_CONFIG]
    if "added_tokens_decoder" not in objects.get(TOKENIZER_CONFIG, {}):
        sources.append(SPECIAL_TOKENS_MAP)  # transformers reads the old file only then
    names: dict[str, str] = {}
    named: set[str] = set()
    for source in sources:
        for key, value in objects.get(source, {}).items():
            if key in ("additional_special_tokens", "extra_special_tokens"):
                entries = list(value.values()) if isinstance(value, Mapping) else value or []
            elif key.endswith("_token") and not isinstance(value, bool):
                entries = [value]
            else:
                continue
            for entry in entries if isinstance(entries, list) else [entries]:
                name = entry.get("content") if isinstance(entry, Mapping) else entry
                if isinstance(name, str) and name:
                    named.add(name)
                    names.setdefault(key.removesuffix("_token"), name)
                elif name not in (None, ""):
                    problems.add(
                        f"{files[source]}: {key} is {text.shown(entry)}; a text, or an object with a content, is needed"
                    )
    return {role: names[role] for role in ROLES if role in names}, frozenset(named)


def _processed(tokenizer: Mapping[str, Any], names: dict[str, str], configured: bool) -> dict[str, bool]:
    """Which special tokens the post-processor of a tokenizer.json adds; fills in the `names` that it tells.

    The rules are those of SpecialVocab. `configured` is whether there is a tokenizer_config.json: without one no
    name can be contradicted.
    """
    adds: dict[str, bool] = {}
    if configured:
        for role, other in (("bos", "cls"), ("eos", "sep")):
            if role not in names and other in names:
                names[role] = names[other]
    for step in flat(tokenizer.get("post_processor"), "processors"):
        kind = step.get("type")
        if kind == "ByteLevel":
            adds.setdefault("bos", False)
            adds.setdefault("eos", False)
        elif kind == "RobertaProcessing":
            adds |= {"bos": True, "eos": True, "sep": True}
            for role in ("cls", "sep"):
                pair = step.get(role)
                if configured and role not in names and isinstance(pair, list) and pair and isinstance(pair[0], str):
                    names[role] = pair[0]
        elif kind == "TemplateProcessing":
            _templated(step, names, configured, adds)
    return adds


def _templated(step: Mapping[str, Any], names: dict[str, str], configured: bool, adds: dict[str, bool]) -> None:
    single, pair = (_pieces(step.get(key)) for key in ("single", "pair"))
    first = last = None
    if len(single) > 1:
        if first := single[0].get("SpecialToken"):
            if configured and first not in (names.setdefault("bos", first), names.get("cls")):
                names.setdefault("cls", first)
            adds["bos"] = not configured or first in (names["bos"], names.get("cls"))
        if last := single[-1].get("SpecialToken"):
            if configured and names.get("eos") != last:
                if "eos" in names:
                    names["eot"] = names["eos"]  # the end of a turn stays known beside the end of the text
                names["eos"] = last
            adds["eos"] = True
    if not pair:
        return
    start = 1 if first and pair[0].get("SpecialToken") == first else 0
    stop = -1 if last and pair[-1].get("SpecialToken") == last else None
    inner = pair[start:stop]
    if not inner or inner[0].get("Sequence") != "A" or inner[-1].get("Sequence") != "B" or not inner[1:-1]:
        return
    separators = [part.get("SpecialToken") for part in inner[1:-1]]
    known = {names.get("sep"), names.get("eos")} - {None}
    adds["sep"] = (separators[0] in known and not last) or (len(separators) == 2 and separators[1] in known)
    if adds["sep"] and configured and "sep" not in names and "eos" in names:
        names["sep"] = names["eos"]


def _pieces(template: object) -> list[dict[str, str]]:
    """The parts of a TemplateProcessing template, each as {"SpecialToken": id} or {"Sequence": id}."""
    parts: list[dict[str, str]] = []
    for part in template if isinstance(template, list) else []:
        inner = part.items() if isinstance(part, Mapping) else ()
        ids = {key: value.get("id") for key, value in inner if isinstance(value, Mapping)}
        parts.append({key: value for key, value in ids.items() if isinstance(value, str)})
    return parts


def _templates(
    files: Mapping[str, Path],
    objects: Mapping[str, dict[str, Any]],
    extra: Sequence[Path],
    problems: Problems,
    notes: list[str],
) -> dict[str, str]:
    """Chat templates by name.

    Files win over tokenizer_config.json, as in transformers, since that is what the checkpoint itself does when it
    is used; llama.cpp's converter has it the other way round. chat_template.json counts where nothing else does.
    """
    found: dict[str, str] = {}
    for name in (CHAT_TEMPLATE_JSON, TOKENIZER_CONFIG):
        if name in objects:
            said = _template_values(files[name], objects[name].get("chat_template"), problems)
            found = said or found
    paths = {path.stem: path for path in extra}
    if CHAT_TEMPLATE in files:
        paths[DEFAULT_TEMPLATE] = files[CHAT_TEMPLATE]
    for name, path in paths.items():
        try:
            # Text files are read with one kind of line end, as transformers and llama.cpp's converter read them.
            template = text.read_text(path).replace("\r\n", "\n").replace("\r", "\n")
        except InputError as error:
            problems.take(error)
            continue
        if found.get(name, template) != template:
            notes.append(f"the chat template {name} is that of {path.name}; {TOKENIZER_CONFIG} holds another one")
        found[name] = template
    return found


def _template_values(path: Path, value: object, problems: Problems) -> dict[str, str]:
    """One template, or a list of {"name", "template"}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, Mapping) and all(isinstance(template, str) for template in value.values()):
        return dict(value)
    found: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not (isinstance(name, str) and name and isinstance(template, str)):
            problems.add(
                f"{path}: chat_template has {text.shown(entry)}; "
                "a text, or a list of objects with a name and a template, is needed"
            )
        elif name in found:
            problems.add(f"{path}: chat_template has two templates named {text.shown(name)}; names must differ")
        else:
            found[name] = template
    return found
