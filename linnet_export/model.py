"""Opens any source and says what it is: a `Model`, with everything checked and no weight read.

    model = open_model(Path("phi-3-mini-4k-instruct"), bind={"Layers": 2})

A Linnet card brings its weights beside it, from `weights`, or from Hugging Face's own cache; a Hugging Face
checkpoint directory is its own. Every problem with names, shapes, types and configuration comes in one error.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from linnet_export import card as cards
from linnet_export import checkpoint, dtypes, hf_config, phi3, text, tokenizer_files
from linnet_export.errors import InputError, Problems
from linnet_export.plan import Source

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
MAX_NAME = 120  # letters; with a type, an ending and a temporary suffix it stays below a file name's 255 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a model came from, as far as it says so."""

    repo: str | None = None
    revision: str | None = None
    title: str | None = None
    license: str | None = None
    tags: tuple[str, ...] = ()
    links: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A source that was opened and found whole.

    `tensors` has every Linnet path of the architecture, in its order. `dtype` is the type of the matrices, None
    where they differ. `eos` is the union of what the configurations and the tokenizer say.
    """

    name: str
    form: str  # "Linnet card" or "Hugging Face checkpoint"
    directory: Path
    weights: Path
    config: phi3.Config
    tensors: Mapping[str, Source]
    dtype: dtypes.Dtype | None
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    tokenizer: tokenizer_files.TokenizerFiles | None
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    provenance: Provenance
    notes: tuple[str, ...]

    def with_name(self, name: str) -> "Model":
        return replace(self, name=name)


def open_model(
    model: str | Path,
    *,
    weights: str | Path | None = None,
    bindings: str | Path | None = None,
    bind: Mapping[str, int | str] | None = None,
    tokenizer: str | Path | None = None,
    name: str | None = None,
) -> Model:
    """The model in a card or checkpoint directory.

    `weights` is a directory, an index or a SafeTensors file; `bindings` another bindings.json; `bind` overrides
    generics (Layers alone for a checkpoint); `tokenizer` a directory, or "none" for a model without one.
    Raises InputError or UnsupportedError with every problem found.
    """
    try:
        return _open(Path(model), weights, bindings, bind or {}, tokenizer, name)
    except OSError as error:  # a name too long for the system, a directory that may not be entered
        where = text.shortened(Path(error.filename)) if isinstance(error.filename, str) else text.shortened(Path(model))
        raise InputError(f"{where} cannot be read: {error.strerror or error}") from None


def _open(
    directory: Path,
    weights: str | Path | None,
    bindings: str | Path | None,
    bind: Mapping[str, int | str],
    tokenizer: str | Path | None,
    name: str | None,
) -> Model:
    if directory.is_file():
        checkpoint.refuse_pickle(directory)
        raise InputError(
            f"{directory} is a file; the directory of a Linnet card or a Hugging Face checkpoint is needed"
        )
    if not directory.is_dir():
        raise InputError(
            f"{directory} does not exist; the directory of a Linnet card or a Hugging Face checkpoint is needed"
        )
    if name is not None:
        _check_name(name, "--name")
    if cards.is_card(directory):
        opened = _open_card(directory, weights, bindings, bind, tokenizer)
    elif text.present(directory / CONFIG):
        if bindings is not None:
            raise InputError(f"--bindings applies to a Linnet card; {directory} is a Hugging Face checkpoint")
        opened = _open_checkpoint(directory, weights, bind, tokenizer)
    else:
        raise InputError(
            f"{directory} holds neither {cards.NEST} (a Linnet card) nor {CONFIG} (a Hugging Face checkpoint)"
        )
    if name is None:
        _check_name(opened.name, f"the name of {directory}")
        return opened
    return opened.with_name(name)


def _check_name(name: str, origin: str) -> None:
    if not checkpoint.plain_name(name) or name.startswith("-") or not name.isprintable() or len(name) > MAX_NAME:
        raise InputError(
            f"{origin} is {text.shown(name)}; a name that can stand in a file name is needed: --name NAME gives one"
        )


def _open_card(
    directory: Path,
    weights: str | Path | None,
    bindings: str | Path | None,
    bind: Mapping[str, int | str],
    tokenizer: str | Path | None,
) -> Model:
    card = cards.read(directory, bind=bind, bindings=None if bindings is None else Path(bindings))
    found: Mapping[str, checkpoint.FileTensor]
    found, weights_directory = _card_weights(card, weights)
    config = card.config()
    problems = Problems()
    phi3.check(config, problems)
    problems.check()

    hf: Mapping[str, Any] = {}
    path = weights_directory / CONFIG
    if text.present(path):
        with problems.collect():
            hf = text.read_json_object(path)
            stated = hf_config.read(hf, str(path), context=card.context)
            _agree(stated, card, path, problems)
            rope = replace(config.rope, original_context=stated.rope.original_context)
            config = replace(config, context=stated.context, rope=rope)

    wanted = {t.path: card.tensor_name(t.path) for t in phi3.tensors(replace(config, layers=card.layers, tied=False))}
    tensors: Mapping[str, checkpoint.FileTensor] = {}
    notes: list[str] = []
    with problems.collect():
        tied, found, notes = _settle_head(config, wanted[phi3.EMBEDDING], found)
        if tied != config.tied:
            problems.add(
                f"{phi3.HEAD} differs from {phi3.EMBEDDING}, although the card binds both to {wanted[phi3.EMBEDDING]}; "
                "take it out of the weights, or bind it to its own name"
            )
        tensors, more = checkpoint.resolve(wanted, found, config)
        notes += more
    wanted_type = card.generics.get("T")
    other = [t for t in tensors.values() if wanted_type not in (None, dtypes.BY_SAFETENSORS[t.dtype].name)]
    if other:
        problems.add(
            f"T is {wanted_type}, but {text.counted(len(other), 'tensor')} (first {other[0].name}) "
            f"{'is' if len(other) == 1 else 'are'} {other[0].dtype}: T describes the weights "
            f"(--bind T={dtypes.BY_SAFETENSORS[other[0].dtype].name}); "
            "to convert them use --outtype (GGUF) or --dtype (Hugging Face)"
        )
    return _assemble(
        name=card.name,
        form="Linnet card",
        directory=directory,
        weights=weights_directory,
        config=config,
        tensors=tensors,
        hf=hf,
        tokenizer=tokenizer,
        tokenizer_places=(weights_directory, directory),
        provenance=Provenance(
            repo=card.repo,
            revision=card.revision,
            title=_string(card.model.get("title")),
            license=_string(card.model.get("license")),
            tags=_strings(card.model.get("tags")),
            links=card.links,
        ),
        notes=notes,
        problems=problems,
    )


def _card_weights(card: cards.Card, weights: str | Path | None) -> tuple[dict[str, checkpoint.FileTensor], Path]:
    """The tensors of a card's weights, and the directory that they (and perhaps a config.json) lie in."""
    if weights is not None:
        path = Path(weights)
        if not path.exists():
            raise InputError(f"--weights {path} does not exist; a directory or a SafeTensors file is needed")
        if path.is_dir() and card.files and all((path / file).is_file() for file in card.files):
            return checkpoint.read_index([path / file for file in card.files]), path
        return checkpoint.index(path), path if path.is_dir() else path.parent
    beside = [card.directory / file for file in card.files]
    if beside and all(path.is_file() for path in beside):
        for path in beside:
            checkpoint.refuse_pickle(path)
        return checkpoint.read_index(beside), card.directory
    if not card.files and card.repo is None:
        return checkpoint.index(card.directory, every=True), card.directory
    if card.repo is not None:
        cached = _cached_snapshot(card.repo, card.revision)
        if cached is not None:
            files = [cached / file for file in card.files]
            if files and all(path.is_file() for path in files):
                return checkpoint.read_index(files), cached
            if not files:
                return checkpoint.index(cached), cached
    missing = [path.name for path in beside if not path.is_file()]
    what = f"{', '.join(missing)} beside the card" if missing else "no weights beside the card"
    where = f" or {card.repo}@{card.revision or 'main'} in Hugging Face's cache" if card.repo else ""
    raise InputError(
        f"the weights of {card.name} were not found: looked for {what}{where}; "
        "download them, or name their place with --weights"
    )


def _cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The directory of a repository in Hugging Face's cache; nothing is downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise InputError(f"[weights] repo {text.shown(repo)} is not a repository name: {error}") from None


def _agree(stated: phi3.Config, card: cards.Card, path: Path, problems: Problems) -> None:
    """Adds a line for each disagreement between a card and the config.json beside its weights."""
    ours = replace(card.config(), layers=card.layers)
    pairs = [(label, getattr(ours, field), getattr(stated, field)) for field, label in _COMPARED.items()]
    pairs.append(("rotary base (THETA)", ours.rope.theta, stated.rope.theta))
    pairs.append(("rotated dims of a head", ours.rope.dims, stated.rope.dims))
    pairs.append(("rope scaling", "none", "longrope" if stated.rope.is_long else "none"))
    for label, mine, theirs in pairs:
        if mine != theirs:
            problems.add(f"{label}: {_word(mine)} in the card, {_word(theirs)} in {path}; they must agree")


_COMPARED = {
    "vocab": "vocabulary size (Vocab)",
    "hidden": "hidden size (H)",
    "heads": "heads (Heads)",
    "kv_heads": "key/value heads (KvHeads)",
    "inner": "inner size (Inner)",
    "layers": "layers (Layers)",
    "eps": "norm epsilon",
    "window": "attention window (WINDOW)",
    "tied": "head tied to the embedding",
}


def _word(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _open_checkpoint(
    directory: Path, weights: str | Path | None, bind: Mapping[str, int | str], tokenizer: str | Path | None
) -> Model:
    problems = Problems()
    path = directory / CONFIG
    hf: Mapping[str, Any] = {}
    config: phi3.Config | None = None
    with problems.collect():
        hf = text.read_json_object(path)
        config = hf_config.read(hf, str(path))
    depth = None if config is None else config.layers
    for name, value in bind.items():
        if name != "Layers" or not isinstance(value, int):
            problems.add(f"--bind {name}={value}: only Layers=N applies to a Hugging Face checkpoint")
        elif config is not None and depth is not None and not 1 <= value <= depth:
            problems.add(f"--bind Layers={value}: the checkpoint has {depth} layers")
        elif config is not None:
            config = replace(config, layers=value)

    place = directory if weights is None else Path(weights)
    found: Mapping[str, checkpoint.FileTensor] = {}
    with problems.collect():
        if not place.exists():
            raise InputError(f"--weights {place} does not exist; a directory or a SafeTensors file is needed")
        found = checkpoint.index(place)
    if config is None or depth is None or not found:
        with problems.collect():
            _find_tokenizer(tokenizer, (directory,))
        problems.fail()
    tensors: Mapping[str, checkpoint.FileTensor] = {}
    notes: list[str] = []
    with problems.collect():
        names = {tensor.path: tensor.hf for tensor in phi3.tensors(replace(config, layers=depth, tied=False))}
        tied, found, notes = _settle_head(config, names[phi3.EMBEDDING], found)
        config = replace(config, tied=tied)
        wanted = {path: name for path, name in names.items() if not (tied and path == phi3.HEAD)}
        tensors, more = checkpoint.resolve(wanted, found, config)
        notes += more
    repo, revision = _repository_of(directory)
    return _assemble(
        name=(repo or Path(os.path.realpath(directory)).name).rsplit("/", 1)[-1],
        form="Hugging Face checkpoint",
        directory=directory,
        weights=place if place.is_dir() else place.parent,
        config=config,
        tensors=tensors,
        hf=hf,
        tokenizer=tokenizer,
        tokenizer_places=(directory,),
        provenance=Provenance(repo=repo, revision=revision, links={}),
        notes=notes,
        problems=problems,
    )


# The head goes by its Linnet path in a checkpoint, too.
_HEADS = (phi3.HEAD, checkpoint.ROOT + phi3.HEAD)
_EMBEDDINGS = (phi3.EMBEDDING, checkpoint.ROOT + phi3.EMBEDDING)


def _settle_head(
    config: phi3.Config, embedding: str, found: Mapping[str, checkpoint.FileTensor]
) -> tuple[bool, Mapping[str, checkpoint.FileTensor], list[str]]:
    """Whether the head is tied, the tensors without a head that repeats the embedding, and notes.

    A tied model may still store a head: one that equals the embedding is dropped, one that differs unties it.
    """
    head = next((name for name in _HEADS if name in found), None)
    stored = next((name for name in (embedding, *_EMBEDDINGS) if name in found), None)
    if not config.tied or head is None or stored is None or head == stored:
        return config.tied, found, []
    if _same_bytes(found[head], found[stored]):
        rest = {name: tensor for name, tensor in found.items() if name != head}
        return True, rest, [f"{head} equals the embedding it is tied to: written once"]
    return False, found, [f"{head} differs from the embedding it should be tied to: both are written, untied"]


def _same_bytes(a: checkpoint.FileTensor, b: checkpoint.FileTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = 1 << 22
    for start in range(0, a.nbytes, step):
        first, second = bytearray(min(step, a.nbytes - start)), bytearray(min(step, a.nbytes - start))
        checkpoint.read_exactly(a.path, a.offset + start, first)
        checkpoint.read_exactly(b.path, b.offset + start, second)
        if first != second:
            return False
    return True


def _repository_of(directory: Path) -> tuple[str | None, str | None]:
    """The repository and revision of a snapshot in Hugging Face's cache (models--ORG--NAME/snapshots/REVISION)."""
    path = directory.absolute()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1), path.name
    return None, None


def _assemble(
    *,
    name: str,
    form: str,
    directory: Path,
    weights: Path,
    config: phi3.Config,
    tensors: Mapping[str, Source],
    hf: Mapping[str, Any],
    tokenizer: str | Path | None,
    tokenizer_places: Sequence[Path],
    provenance: Provenance,
    notes: Sequence[str],
    problems: Problems,
) -> Model:
    """The parts that every form shares: tokenizer, token ids, type; raises what `problems` has by then."""
    files: tokenizer_files.TokenizerFiles | None = None
    generation: Mapping[str, Any] = {}
    eos: tuple[int, ...] = ()
    bos = pad = None
    with problems.collect():
        files = _find_tokenizer(tokenizer, tokenizer_places)
    with problems.collect():
        for place in dict.fromkeys((weights, *((files.directory,) if files else ()), *tokenizer_places)):
            if text.present(place / GENERATION_CONFIG):
                generation = text.read_json_object(place / GENERATION_CONFIG)
                break
    with problems.collect():
        eos = tokenizer_files.eos_ids(files, hf, generation)
    with problems.collect():
        bos, pad = (_token_id(hf, key) for key in ("bos_token_id", "pad_token_id"))
    if pad == -1:  # how some trainers write that there is none
        pad, hf = None, {**hf, "pad_token_id": None}
        notes = [*notes, "config.json's pad_token_id -1 means none and is written as null"]
    for key in ("bos_token_id", "pad_token_id"):
        with problems.collect():
            _token_id(generation, key, GENERATION_CONFIG)
    for kind, ids in (("bos", (bos,)), ("eos", eos), ("pad", (pad,))):
        for token in ids:
            if token is not None and not 0 <= token < config.vocab:
                problems.add(f"the {kind} token id is {token}; the vocabulary has {config.vocab} rows, from 0")
    if files is not None and files.rows > config.vocab:
        problems.add(
            f"the tokenizer in {files.directory} has ids for {files.rows} tokens, the embedding has {config.vocab} "
            "rows; at most as many are needed: name the model's own tokenizer with --tokenizer DIR"
        )
    problems.check()
    matrices = {t.dtype for t in tensors.values() if len(t.shape) > 1}
    return Model(
        name=name,
        form=form,
        directory=directory,
        weights=weights,
        config=config,
        tensors=tensors,
        dtype=dtypes.BY_SAFETENSORS[matrices.pop()] if len(matrices) == 1 else None,
        bos=files.bos if bos is None and files else bos,
        eos=eos,
        pad=files.pad if pad is None and files and "pad_token_id" not in hf else pad,
        tokenizer=files,
        hf_config=hf,
        generation_config=generation,
        provenance=provenance,
        notes=tuple(notes),
    )


def _find_tokenizer(tokenizer: str | Path | None, places: Sequence[Path]) -> tokenizer_files.TokenizerFiles | None:
    if tokenizer is not None and str(tokenizer) == "none":
        return None
    looked = [Path(tokenizer)] if tokenizer is not None else list(dict.fromkeys(places))
    for place in looked:
        if not place.is_dir():
            raise InputError(
                f"--tokenizer {place} is not a directory; a directory with tokenizer files, or none, is needed"
            )
        found = tokenizer_files.find(place)
        if found is not None:
            return found
    raise InputError(
        f"no tokenizer in {' or '.join(str(place) for place in looked)}: tokenizer.json or tokenizer.model is needed; "
        "name its directory with --tokenizer DIR, or write a model without one with --tokenizer none"
    )


def _token_id(config: Mapping[str, Any], key: str, origin: str = CONFIG) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"{origin}: {key} is {text.shown(value)}; an integer or null is needed")
    return value


def _string(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _strings(value: object) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
