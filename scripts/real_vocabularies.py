"""Writes the tokenizer of Phi-3-mini from llama.cpp's copy of its vocabulary, models/ggml-vocab-phi-3.gguf.

    from real_vocabularies import pairs, phi3_tokenizer
    phi3_tokenizer(vocab_gguf, out, form="model")     # tokenizer.model and its added tokens
    phi3_tokenizer(vocab_gguf, out, form="json")      # the same tokenizer as tokenizer.json
    for text, ids in pairs(vocab_gguf): ...           # what llama.cpp's authors recorded for it

The file has all 32064 rows of the embedding: 32000 pieces, eleven added tokens, the padding. Neither form carries the
padding, as the published tokenizer does not. Takes no names from linnet_export, which is tested with what it writes.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf

Form = Literal["model", "json"]

PIECES = 32000  # of the SentencePiece model; the added tokens follow
UNK, BOS, EOS = 0, 1, 2  # ids in that model: <unk>, <s>, </s>
SPACE = "▁"  # what SentencePiece writes for a space
SEPARATOR = "\n__ggml_vocab_test__\n"  # after each text of an .inp file

# The added tokens that do not swallow the white space after them; all others do (llama.cpp's loader says the same,
# in src/llama-vocab.cpp, where a model's name contains "phi-3").
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class _Rows:
    tokens: list[str]
    scores: list[float]
    types: list[int]
    template: str

    def added(self) -> dict[int, str]:
        """The tokens that are found in a text before anything else: <unk>, <s>, </s> and those after the pieces."""
        marked = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
        return {i: token for i, token in enumerate(self.tokens) if self.types[i] in marked}


def phi3_tokenizer(vocab_gguf: Path, out: Path, *, form: Form) -> None:
    """Writes the tokenizer's files into directory `out`, which is made if need be.

    "model": tokenizer.model, added_tokens.json and tokenizer_config.json; "json": tokenizer.json and
    tokenizer_config.json. transformers 5 reads either truly only where a config.json beside it says phi3 (else it
    takes the class in tokenizer_config.json by its word), and the first only with the package protobuf. Raises
    ValueError if the file is not that vocabulary.
    """
    rows = _read(vocab_gguf)
    out.mkdir(parents=True, exist_ok=True)
    if form == "model":
        (out / "tokenizer.model").write_bytes(_sentencepiece_model(rows))
        _write_json(out / "added_tokens.json", {token: i for i, token in rows.added().items() if i >= PIECES})
    else:
        (out / "tokenizer.json").write_text(_fast_tokenizer(rows), encoding="utf-8")
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": token not in _KEEP_SPACE,
                "single_word": False,
                "special": rows.types[i] == gguf.TokenType.CONTROL,
            }
            for i, token in rows.added().items()
        },
        "bos_token": "<s>",
        "chat_template": rows.template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        # The published file says false, which transformers 5 takes, for a tokenizer.model, as: no dummy prefix before a
        # text that starts with a space. SentencePiece and llama.cpp put one there, and so does tokenizer.json.
        "legacy": True,
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    }
    _write_json(out / "tokenizer_config.json", settings)


def pairs(vocab_gguf: Path) -> list[tuple[str, list[int]]]:
    """The texts beside the vocabulary (.inp) and their token ids (.out), without <s> and special tokens."""
    # bytes, then decode: reading as text would turn the carriage returns in the texts into line feeds
    texts = vocab_gguf.with_name(vocab_gguf.name + ".inp").read_bytes().decode().split(SEPARATOR)
    lines = vocab_gguf.with_name(vocab_gguf.name + ".out").read_bytes().decode().split("\n")
    if texts.pop() or lines.pop() or len(texts) != len(lines):
        raise ValueError(f"the .inp and .out files beside {vocab_gguf} do not pair up")
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=True)]


def _read(vocab_gguf: Path) -> _Rows:
    fields = gguf.GGUFReader(vocab_gguf).fields
    names = ("ggml.tokens", "ggml.scores", "ggml.token_type", "chat_template")
    missing = [name for name in names if f"tokenizer.{name}" not in fields]
    if missing:
        raise ValueError(f"{vocab_gguf} has no {', '.join(f'tokenizer.{name}' for name in missing)}")
    rows = _Rows(*(fields[f"tokenizer.{name}"].contents() for name in names))
    if rows.tokens[:3] != ["<unk>", "<s>", "</s>"] or rows.tokens[PIECES : PIECES + 1] != ["<|endoftext|>"]:
        raise ValueError(f"{vocab_gguf} is not the vocabulary of Phi-3-mini")
    return rows


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- tokenizer.json -------------------------------------------------------------------------------------------------


def _fast_tokenizer(rows: _Rows) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocab = {token: i for i, token in enumerate(rows.tokens[:PIECES])}
    model = models.BPE(vocab=vocab, merges=_merges(rows), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", BOS)]
    )
    for i, token in rows.added().items():
        special = rows.types[i] == gguf.TokenType.CONTROL
        added = AddedToken(token, rstrip=token not in _KEEP_SPACE, normalized=False, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer.to_str(pretty=True) + "\n"


def _merges(rows: _Rows) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, the third with the highest score first.

    Equal scores (ways to one piece, and the pieces of spaces only): the longer left part first, then by the piece's
    id and the left part's, as transformers' generate_merges orders them. Only normal pieces take part: <s> and the
    bytes are never the result of a merge.
    """
    normal = {token: i for i, token in enumerate(rows.tokens[:PIECES]) if rows.types[i] == gguf.TokenType.NORMAL}
    found = [
        (-rows.scores[i], -len(left), -len(right), i, normal[left], left, right)
        for token, i in normal.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in normal and (right := token[cut:]) in normal
    ]
    return [(left, right) for *_, left, right in sorted(found)]


# ---- tokenizer.model ------------------------------------------------------------------------------------------------
#
# The file is a protocol buffer. The package `protobuf`, which SentencePiece's own module for it needs, is no
# dependency; field numbers are from sentencepiece_model.proto.

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # SentencePiece.Type
_BPE = 2  # TrainerSpec.ModelType

_Field = tuple[int, str | bytes | float | int]


def _sentencepiece_model(rows: _Rows) -> bytes:
    """The first 32000 rows as a ModelProto."""
    types = {gguf.TokenType.NORMAL: _NORMAL, gguf.TokenType.BYTE: _BYTE}
    pieces = []
    for i, token in enumerate(rows.tokens[:PIECES]):
        # the rows of the first three have the type and score of added tokens; in the model they are plain
        kind = _UNKNOWN if i == UNK else _CONTROL if i in (BOS, EOS) else types[gguf.TokenType(rows.types[i])]
        score = 0.0 if i in (UNK, BOS, EOS) else rows.scores[i]
        pieces.append(_message([(1, token), (2, score), (3, kind)]))
    no_pad = -1
    trainer: list[_Field] = [
        (3, _BPE),
        (4, PIECES),
        (35, True),
        (40, UNK),
        (41, BOS),
        (42, EOS),
        (43, no_pad),
    ]  # 35: byte fallback
    # the dummy prefix is added, white space is neither removed nor left unescaped
    normalizer: list[_Field] = [(1, "identity"), (2, b""), (3, True), (4, False), (5, True)]
    fields: list[_Field] = [(1, piece) for piece in pieces]
    return _message([*fields, (2, _message(trainer)), (3, _message(normalizer))])


def _message(fields: Iterable[_Field]) -> bytes:
    """A protocol buffer message: each field is its number and wire type, then its value."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, float):
            out += _varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, str | bytes):
            data = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | 2) + _varint(len(data)) + data
        else:
            out += _varint(number << 3) + _varint(value)
    return bytes(out)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; a negative number as 64 bits of two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
