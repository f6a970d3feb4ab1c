"""A tokenizer's files to the vocabulary of a GGUF file, as llama.cpp reads it.

    vocabulary = tokenizer.vocabulary(files, vocab_size=32064, config=config)
    tokenizer.to_gguf(vocabulary, writer)

The rows are those of llama.cpp's converter (conversion/phi.py, conversion/base.py), made without transformers: from
tokenizer.model, from a tokenizer.json alone, or from vocab.json with merges.txt. Refused: a tokenizer with more
tokens than the embedding has rows, two rows with one text, a byte-level BPE whose pre-tokenizer llama.cpp does not
have, or one that normalizes its text.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from linnet_export import text
from linnet_export.converters import pre_tokenizers
from linnet_export.errors import InputError, Problems, UnsupportedError
from linnet_export.tokenizer_files import (
    DEFAULT_TEMPLATE,
    MERGES,
    ROLES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    VOCAB,
    AddedToken,
    TokenizerFiles,
    flat,
)

if TYPE_CHECKING:
    from gguf import GGUFWriter

# gguf.TokenType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Scores of rows that SentencePiece does not score: llama.cpp's converter writes these.
ADDED_SCORE = -1000.0
UNUSED_SCORE = -10000.0
# Pieces of spaces only in the vocabulary of Llama 2, which Phi-3 shares: merged last, in spite of their low ids.
SPACES = (259, 268, 308, 418, 462, 539, 632, 795, 965, 1669, 1678, 3986, 4706, 9651, 18884, 29871)
SPACES_SCORE = -1e9

# Of problems with single tokens, as many are listed: a vocabulary whose ids are shifted would list them all.
_LISTED = 5

# What llama.cpp takes for an id that a file does not name, by model (src/llama-vocab.cpp, load).
LLAMA_CPP_IDS = {"llama": {"bos": 1, "eos": 2, "unk": 0}, "gpt2": {"bos": 11, "eos": 11}}

RSTRIP_NOTE = (
    "added tokens of this tokenizer take the whitespace after them along; llama.cpp does so only for a model whose "
    'general.name contains phi-3 or phi3, and this one is "{name}": set it with --name'
)
KEPT_NOTE = "added tokens of this tokenizer take the whitespace after them along, llama.cpp keeps it: prompts need none"
# llama.cpp looks these up for a model of such a name and does not load it where one is missing.
PHI3_TOKENS = ("</s>", "<unk>", "<s>", "<|endoftext|>")

# Texts at which llama.cpp ends a generation, whatever the ids in the file say (src/llama-vocab.cpp, special_eog_ids).
_END_TEXTS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
END_TEXTS = frozenset(_END_TEXTS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer of a GGUF file: one row for each row of the embedding.

    `special` holds ids by role (bos, eos, unk, pad and others), `adds` whether encoding adds a role's token, both in
    the order in which they are written; a role that is missing is left to llama.cpp's default.
    """

    model: str
    pre: str
    tokens: tuple[bytes, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] | None = None
    merges: tuple[str, ...] | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    adds: Mapping[str, bool] = field(default_factory=dict)
    add_space_prefix: bool | None = None
    chat_template: str | None = None
    other_templates: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def bos(self) -> int | None:
        return self.special.get("bos")

    @property
    def eos(self) -> int | None:
        return self.special.get("eos")

    @property
    def unknown(self) -> int | None:
        return self.special.get("unk")

    @property
    def padding(self) -> int | None:
        return self.special.get("pad")

    @property
    def add_bos(self) -> bool | None:
        return self.adds.get("bos")

    @property
    def add_eos(self) -> bool | None:
        return self.adds.get("eos")


def vocabulary(
    files: TokenizerFiles, *, vocab_size: int, config: Mapping[str, Any], pre: str | None = None
) -> Vocabulary:
    """The `vocab_size` rows of a tokenizer, its ids (with config.json's where its own files name none) and templates.

    `pre` is llama.cpp's name of the pre-tokenizer, where it is not to be recognised. Raises InputError, or
    UnsupportedError for what llama.cpp's tokenizers cannot do.
    """
    if pre is not None:
        if files.kind != "bpe":
            raise InputError(
                f"--pre-tokenizer {pre}: the tokenizer in {files.directory} is a SentencePiece one and has none; "
                "leave the option out"
            )
        pre_tokenizers.check(pre)
    made = _byte_level(files, vocab_size, pre) if files.kind == "bpe" else _sentencepiece(files, vocab_size)
    _check_texts(made.tokens)
    notes = [*files.notes, *made.notes]
    lstrip = [token.content for token in files.added if token.lstrip]
    if lstrip:
        notes.append(f"llama.cpp keeps the whitespace before {', '.join(lstrip[:4])}, which this tokenizer takes along")
    return replace(
        made,
        special=_special(files, made, config, notes),
        adds=_adds(files, made),
        chat_template=files.chat_template,
        other_templates={name: value for name, value in files.chat_templates.items() if name != DEFAULT_TEMPLATE},
        notes=tuple(notes),
    )


def to_gguf(vocabulary: Vocabulary, writer: "GGUFWriter") -> None:
    """Adds the tokenizer.* keys to a writer, in the order of llama.cpp's converter."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    ids = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "sep": writer.add_sep_token_id,
        "pad": writer.add_pad_token_id,
        "mask": writer.add_mask_token_id,
        "eot": writer.add_eot_token_id,
    }
    for role, number in vocabulary.special.items():
        if role in ids:  # llama.cpp has no key for cls
            ids[role](number)
    adds = {"bos": writer.add_add_bos_token, "eos": writer.add_add_eos_token, "sep": writer.add_add_sep_token}
    for role, value in vocabulary.adds.items():
        if role in adds:
            adds[role](value)
    names: list[str] = []
    for name, template in vocabulary.other_templates.items():
        key = re.sub("[^A-Za-z0-9]", "_", name)
        if key not in names:
            writer.add_string(f"tokenizer.chat_template.{key}", template)
            names.append(key)
    if names:
        writer.add_array("tokenizer.chat_templates", names)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
    if vocabulary.add_space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.add_space_prefix)


def strips_after_added(name: str) -> bool:
    """Whether llama.cpp strips whitespace after added tokens in a model of this general.name."""
    return "phi-3" in name.lower() or "phi3" in name.lower()


def check_name(files: TokenizerFiles, vocabulary: Vocabulary, name: str) -> tuple[str, ...]:
    """What the model's general.name changes in llama.cpp's tokenizer, as notes.

    Raises UnsupportedError for a name with which llama.cpp would not load the model.
    """
    missing = [token for token in PHI3_TOKENS if token.encode() not in vocabulary.tokens]
    if strips_after_added(name):
        if missing:
            raise UnsupportedError(
                f"llama.cpp does not load a model that is called {name} and has no token {', '.join(missing)}; "
                "choose a name without phi-3 and phi3 with --name"
            )
        return ()
    if not any(token.rstrip for token in files.added):
        return ()
    return (KEPT_NOTE if missing else RSTRIP_NOTE.format(name=name),)


def ends_in_llama_cpp(vocabulary: Vocabulary) -> frozenset[int]:
    """The ids at which llama.cpp ends a generation: the end tokens of the file, and those it knows by their text."""
    texts = {end.encode() for end in END_TEXTS}
    known = {number for number, token in enumerate(vocabulary.tokens) if token in texts}
    return frozenset(known | {vocabulary.special[role] for role in ("eos", "eot") if role in vocabulary.special})


@dataclass(slots=True)
class _Rows:
    """Rows as they are filled in: a row that nothing claims stays unused padding."""

    tokens: list[bytes]
    types: list[int]
    scores: list[float]

    @classmethod
    def padding(cls, count: int) -> "_Rows":
        tokens = [f"[PAD{number}]".encode() for number in range(count)]
        return cls(tokens, [UNUSED] * count, [UNUSED_SCORE] * count)

    def put(self, number: int, token: str, kind: int, score: float = 0.0) -> None:
        try:
            self.tokens[number] = token.encode()
        except UnicodeEncodeError:
            raise InputError(f"token {number} is {text.shown(token)}, which is not Unicode text") from None
        self.types[number], self.scores[number] = kind, score


def _check_size(files: TokenizerFiles, ids: Iterable[int], vocab_size: int) -> None:
    count = max((*ids, *(token.id for token in files.added)), default=-1) + 1
    if count > vocab_size:
        raise InputError(
            f"the tokenizer in {files.directory} has ids for {count} tokens, the embedding has {vocab_size} rows; "
            "at most as many are needed: name the model's own tokenizer with --tokenizer DIR"
        )


def _check_texts(tokens: Sequence[bytes]) -> None:
    """llama.cpp finds tokens by their text and stops at two rows with the same one."""
    first: dict[bytes, int] = {}
    problems = Problems()
    for number, token in enumerate(tokens):
        # An empty text is the exception: llama.cpp gives such a row a name of its own.
        if token and first.setdefault(token, number) != number and len(problems.lines) < _LISTED:
            shown = text.shown(token.decode("utf-8", "replace"))
            problems.add(f"tokens {first[token]} and {number} are both {shown}; llama.cpp needs different texts")
    problems.check()


def _special(files: TokenizerFiles, made: Vocabulary, config: Mapping[str, Any], notes: list[str]) -> dict[str, int]:
    """Ids by role, found as llama.cpp's converter finds them, and where it finds none.

    It looks the names up among the added tokens of tokenizer.json, then in config.json. What is left is looked up
    here among all rows, and written where it is not what llama.cpp takes anyway.
    """
    roles = (*ROLES, "eot")
    found = {role: files.special[role] for role in roles if role in files.special and files.path(TOKENIZER_JSON)}
    for role in roles:
        said = config.get(f"{role}_token_id")
        if isinstance(said, list) and said:
            said = said[0]
        if role in found or type(said) is not int:
            continue
        if 0 <= said < len(made.tokens):
            found[role] = said
        else:
            notes.append(f"config.json's {role}_token_id {said} is outside of the {len(made.tokens)} rows and left out")
    for role in ("bos", "eos", "unk", "pad"):
        name = files.names.get(role, "").encode()
        if role not in found and name and name in made.tokens:
            number = made.tokens.index(name)
            if number != LLAMA_CPP_IDS[made.model].get(role):
                found[role] = number
    return found


def _adds(files: TokenizerFiles, made: Vocabulary) -> dict[str, bool]:
    adds = dict(files.adds)
    # A tokenizer.json that names no bos adds none; llama.cpp would for these, unless told.
    if (
        "bos" not in adds
        and files.path(TOKENIZER_JSON)
        and (made.model == "llama" or made.pre in pre_tokenizers.ADDING_BOS)
    ):
        adds["bos"] = False
    return adds


# SentencePiece: the model "llama".


def _sentencepiece(files: TokenizerFiles, vocab_size: int) -> Vocabulary:
    notes: list[str] = []
    data = _json(files)
    added = {token.id: token for token in files.added}
    texts = _vocab(files, data["model"].get("vocab"), added) if data is not None else {}
    if files.sentencepiece is not None:
        pieces = _pieces_of_model(files)
        if data is not None:
            _check_agreement(files, {number: piece[0] for number, piece in pieces.items()}, texts, added)
    else:
        pieces = _scored(files, data["model"] if data is not None else {}, texts, added, notes)
    _check_size(files, pieces, vocab_size)
    rows = _Rows.padding(vocab_size)
    for number, (piece, kind, score) in pieces.items():
        rows.put(number, piece, kind, score)
    for token in added.values():
        rows.put(token.id, token.content, CONTROL if token.special else USER_DEFINED, ADDED_SCORE)
    prefix = _prefixes(files, data, notes)
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tuple(rows.tokens),
        types=tuple(rows.types),
        scores=tuple(rows.scores),
        # llama.cpp adds the space by default, and so do most models: the key is written only where it differs.
        add_space_prefix=None if prefix else False,
        notes=tuple(notes),
    )


_Piece = tuple[str, int, float]  # text, type, score


def _pieces_of_model(files: TokenizerFiles) -> dict[int, _Piece]:
    from sentencepiece import SentencePieceProcessor

    path = files.directory / TOKENIZER_MODEL
    processor = SentencePieceProcessor()
    found: dict[int, _Piece] = {}
    try:
        processor.LoadFromFile(str(path))
        for number in range(processor.vocab_size()):
            kind = NORMAL
            if processor.IsUnknown(number):
                kind = UNKNOWN
            elif processor.IsControl(number):
                kind = CONTROL
            elif processor.IsUnused(number):
                kind = UNUSED
            elif processor.IsByte(number):
                kind = BYTE
            found[number] = (processor.IdToPiece(number), kind, float(processor.GetScore(number)))
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a piece that is not UTF-8
        raise InputError(f"{path} cannot be read as a SentencePiece model: {error}") from None
    return found


def _scored(
    files: TokenizerFiles,
    model: Mapping[str, Any],
    texts: Mapping[int, str],
    added: Mapping[int, AddedToken],
    notes: list[str],
) -> dict[int, _Piece]:
    """The pieces of a tokenizer.json's model with the types and scores that SentencePiece gives them."""
    unknown = model.get("unk_token")
    controls = {name for role, name in files.names.items() if role != "unk"}
    kinds = dict.fromkeys(texts, NORMAL)
    for number, piece in texts.items():
        if model.get("byte_fallback") is True and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            kinds[number] = BYTE
        elif piece == unknown:
            kinds[number] = UNKNOWN
        elif piece in controls:
            kinds[number] = CONTROL
    normal = [number for number in sorted(texts) if kinds[number] == NORMAL and number not in added]
    products = [left + right for left, right in _merges(files, model.get("merges"))]
    scores = _scores(texts, normal, products, notes)
    return {number: (piece, kinds[number], scores.get(number, 0.0)) for number, piece in texts.items()}


def _scores(
    texts: Mapping[int, str], normal: Sequence[int], products: Sequence[str], notes: list[str]
) -> dict[int, float]:
    """A score for each normal piece, so that llama.cpp merges in the order of the merges that make `products`.

    SentencePiece numbers its BPE pieces in the order in which they are merged: the score is minus the distance from
    the first piece. A vocabulary in another order gets the ranks of its merges.
    """
    ids = {texts[number]: number for number in normal}
    ranks: dict[int, int] = {}
    apart = 0
    for rank, product in enumerate(products):
        number = ids.get(product)
        if number is not None and ranks.setdefault(number, rank) != rank:
            apart += products[rank - 1] != product and set(product) != {"▁"}
    if apart:
        notes.append(f"{apart} merges make a piece a second time: llama.cpp, which ranks pieces, merges those earlier")
    spaces = [number for number in normal if set(texts[number]) == {"▁"}]
    worded = [number for number in ranks if number not in spaces]
    if worded != sorted(worded):
        last = float(len(products))
        return {number: -float(ranks[number]) if number in ranks else -last for number in normal}
    scores = {number: -float(number - normal[0]) for number in normal}
    spaced = [ranks[number] for number in spaces if number in ranks]
    if tuple(spaces) == SPACES or (spaced and worded and min(spaced) > max(ranks[number] for number in worded)):
        scores |= dict.fromkeys(spaces, SPACES_SCORE)
    return scores


def _check_agreement(
    files: TokenizerFiles, own: Mapping[int, str], other: Mapping[int, str], added: Mapping[int, AddedToken]
) -> None:
    problems = Problems()
    for number in sorted((own.keys() | other.keys()) - added.keys()):
        if own.get(number) != other.get(number) and len(problems.lines) < _LISTED:
            pair = [text.shown(pieces[number]) if number in pieces else "missing" for pieces in (own, other)]
            problems.add(
                f"token {number} is {pair[0]} in {files.directory / TOKENIZER_MODEL} "
                f"and {pair[1]} in {files.directory / TOKENIZER_JSON}; they must agree"
            )
    problems.check()


def _prefixes(files: TokenizerFiles, data: Mapping[str, Any] | None, notes: list[str]) -> bool:
    """Whether encoding puts a space before the text; notes what else is done to a text, and not by llama.cpp."""
    if data is None:
        spec = files.sentencepiece
        if spec is None:
            return True
        if spec.has_charsmap:
            notes.append(f"this tokenizer normalizes text first ({spec.normalizer}); llama.cpp does not")
        if spec.trims_whitespace:
            notes.append("this tokenizer drops repeated spaces; llama.cpp keeps them")
        return spec.dummy_prefix
    prefix = False
    for step in flat(data.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Prepend":
            prefix = prefix or step.get("prepend") == "▁"
        elif kind != "Replace" or step.get("content") != "▁":
            notes.append(f"this tokenizer normalizes text first ({kind}); llama.cpp does not")
    for step in flat(data.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            prefix = prefix or scheme != "never"
            if scheme == "first":
                notes.append("this tokenizer puts a space before the text alone; llama.cpp also after special tokens")
    return prefix


# Byte-level BPE: the model "gpt2".


def _byte_level(files: TokenizerFiles, vocab_size: int, pre: str | None) -> Vocabulary:
    data = _json(files)
    notes: list[str] = []
    added = {token.id: token for token in files.added}
    if data is not None:
        model, decodes = data["model"], _has(data.get("decoder"), "ByteLevel")
        texts = _vocab(files, model.get("vocab"), added)
        merges = _merges(files, model.get("merges"))
        _check_normalizer(files, data, notes)
        pre = pre or pre_tokenizers.recognised(data, files.directory / TOKENIZER_JSON, notes)
    else:
        texts = _vocab(files, text.read_json(files.directory / VOCAB), added)
        merges, decodes = _merges_of_text(files), True
        pre = pre or _assumed(files, notes)
    if not merges:
        raise UnsupportedError(f"the tokenizer in {files.directory} has no merges; llama.cpp needs them")
    # A piece that the configuration calls special is an added token too: transformers makes it one on loading.
    for number, piece in texts.items():
        if piece in files.named and number not in added:
            added[number] = AddedToken(number, piece, special=True, normalized=False)
    _check_size(files, (*texts, *added), vocab_size)
    rows = _Rows.padding(vocab_size)
    for number, piece in texts.items():
        rows.put(number, piece, NORMAL)
    for token in added.values():
        content = token.content if token.normalized or not decodes else _decoded(token.content)
        control = token.special or _looks_special(content)
        rows.put(token.id, content if control else content.replace("▁", " "), CONTROL if control else USER_DEFINED)
    return Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=tuple(rows.tokens),
        types=tuple(rows.types),
        # A space within a part would read as the border of the parts: it becomes the letter of byte-level alphabets.
        merges=tuple(" ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges),
        notes=tuple(notes),
    )


def _looks_special(token: str) -> bool:
    """Whether llama.cpp's converter takes an added token for a control token by its look."""
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        token.startswith(first) and token.endswith(last)
        for first, last in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    )


def _alphabet() -> dict[str, int]:
    """Byte-level BPE's letters: a printable byte is its own, the others follow from U+0100 (GPT-2's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _decoded(token: str) -> str:
    """An added token as decoding prints it: where every letter stands for a byte, as the text of those bytes."""
    try:
        return bytes(_ALPHABET[letter] for letter in token).decode()
    except (KeyError, UnicodeDecodeError):
        return token


def _check_normalizer(files: TokenizerFiles, data: Mapping[str, Any], notes: list[str]) -> None:
    kinds = [str(step.get("type")) for step in flat(data.get("normalizer"), "normalizers")]
    if set(kinds) - {"NFC"}:
        raise UnsupportedError(
            f"{files.directory / TOKENIZER_JSON} normalizes text with {', '.join(kinds)}; llama.cpp does not, and "
            "would find other tokens: write a model without a tokenizer (--tokenizer none)"
        )
    if kinds:
        notes.append("this tokenizer composes Unicode text first (NFC); llama.cpp takes it as it is")


def _assumed(files: TokenizerFiles, notes: list[str]) -> str:
    """The pre-tokenizer of vocab.json and merges.txt: the format is GPT-2's, and so is its expression.

    Other families store their vocabularies in these files and their expressions in code: they have to be named.
    """
    named = files.config.get("tokenizer_class")
    if named not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise InputError(
            f"{files.directory / VOCAB} and {MERGES} do not say how text is split, and {named} is not GPT-2's "
            f"tokenizer; a {TOKENIZER_JSON} is needed, or llama.cpp's name for the way with --pre-tokenizer NAME"
        )
    notes.append(f"{VOCAB} and {MERGES} do not say how text is split: as by GPT-2 (else --pre-tokenizer NAME)")
    return "gpt-2"


# Reading the files that both kinds share.


def _json(files: TokenizerFiles) -> dict[str, Any] | None:
    path = files.path(TOKENIZER_JSON)
    return text.read_json_object(path) if path is not None else None


def _has(part: object, kind: str) -> bool:
    return any(step.get("type") == kind for step in flat(part, "decoders"))


def _vocab(files: TokenizerFiles, vocab: object, added: Mapping[int, AddedToken]) -> dict[int, str]:
    """Texts by id; they must agree with the added tokens."""
    if not isinstance(vocab, Mapping) or not vocab:
        raise InputError(
            f"the vocab in {files.directory} is {text.json_kind(vocab)}; an object of texts and ids is needed"
        )
    problems = Problems()
    found: dict[int, str] = {}
    ids = {token.content: token.id for token in added.values()}
    for token, number in vocab.items():
        if type(number) is not int or number < 0:
            problems.add(f"the token {text.shown(token)} has the id {text.shown(number)}; an integer from 0 is needed")
        elif found.setdefault(number, token) != token:
            problems.add(f"token {number} is both {text.shown(found[number])} and {text.shown(token)}; one is needed")
        elif ids.get(token, number) != number:
            problems.add(f"the token {text.shown(token)} is {number} in vocab and {ids[token]} in the added tokens")
        elif files.kind == "bpe" and number in added and added[number].content != token:
            other = text.shown(added[number].content)
            problems.add(f"token {number} is {text.shown(token)} in vocab and {other} in the added tokens")
        if len(problems.lines) == _LISTED:
            break
    problems.check()
    return found


def _merges(files: TokenizerFiles, merges: object) -> list[tuple[str, str]]:
    """The merges of a tokenizer.json, whichever way it writes them: "a b" or ["a", "b"]."""
    if merges is None:
        return []
    pairs: list[tuple[str, str]] = []
    for entry in merges if isinstance(merges, list) else [merges]:
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if not (isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) and part for part in parts)):
            raise InputError(
                f"{files.directory / TOKENIZER_JSON}: a merge is {text.shown(entry)}; two texts are needed, "
                "in a list or with one space between them"
            )
        pairs.append((parts[0], parts[1]))
    return pairs


def _merges_of_text(files: TokenizerFiles) -> list[tuple[str, str]]:
    path = files.directory / MERGES
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(text.read_text(path).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split()
        if len(parts) != 2:
            raise InputError(f"{path}, line {number}: {text.shown(line)} is not a merge; two texts are needed")
        pairs.append((parts[0], parts[1]))
    return pairs
