"""Tokenizer files and GGUF vocabularies, against sentencepiece, tokenizers, transformers and gguf's SpecialVocab."""

import contextlib
import io
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFReader, GGUFWriter, TokenType
from gguf.vocab import SpecialVocab
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from linnet_export import tokenizer_files
from linnet_export.converters import pre_tokenizers as known
from linnet_export.converters import tokenizer
from linnet_export.errors import InputError, UnsupportedError

HARD = (
    "Hello world, it's 3.14159 or 12345!",
    "  two spaces,\ttabs\n\nand lines   \n  ",
    "don't WON'T They'Ll naïve Ünïcode",
    "emoji 😀 👩\u200d🚀 and 日本語のテキスト",
    "snake_case camelCase /path/to C:\\x ++==>> (a)[b]{c}",
    "<|user|>\nHi<|end|>\n<|assistant|>\n",
    " \u00a0\u3000 odd\r\nspaces \x0b end ",
)
LINES = [
    " ".join(words) for words in itertools.permutations(["linnet", "exports", "the", "tensors", "naïvely", "12"], 5)
]

# Added tokens as a tokenizer.json lists them, with a gap in their ids.
END = {"content": "<|end|>", "special": True, "rstrip": True, "normalized": False}
USER = {"content": "<|user|>", "special": False, "rstrip": True, "normalized": False}


def write(folder: Path, **files: Any) -> Path:
    """A directory of files: JSON, or text and bytes as they are; tokenizer_config is tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        suffix = {"merges": ".txt", "chat_template": ".jinja", "tokenizer": ".model"}.get(name, ".json")
        if name == "tokenizer" and isinstance(value, Mapping):
            suffix = ".json"
        if isinstance(value, bytes):
            (folder / f"{name}{suffix}").write_bytes(value)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            (folder / f"{name}{suffix}").write_text(text, encoding="utf-8")
    return folder


def train_spm(**options: Any) -> bytes:
    """A SentencePiece model with the settings of Llama's, unless told otherwise."""
    settings = {
        "model_type": "bpe",
        "vocab_size": 330,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        **options,
    }
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=model, **settings)
    return model.getvalue()


SPM = train_spm()
PIECES = sentencepiece.SentencePieceProcessor(model_proto=SPM)
TEXTS = [PIECES.IdToPiece(number) for number in range(PIECES.vocab_size())]


def spm_json(
    added: Sequence[dict[str, Any]] = (), scores: Mapping[str, float] | None = None, **changes: Any
) -> dict[str, Any]:
    """The same tokenizer as a tokenizer.json: merges by descending score, as transformers writes them."""
    by_text = scores or {text: PIECES.GetScore(number) for number, text in enumerate(TEXTS) if number > 258}
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in sorted(by_text, key=lambda piece: -by_text[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in by_text and piece[cut:] in by_text
    ]
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": {text: number for number, text in enumerate(TEXTS[:259] + (list(by_text)))},
        "merges": merges,
    }
    mark = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    specials = [
        {"id": number, "content": text, "special": True, "normalized": False}
        for number, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    return {
        "added_tokens": [
            {"single_word": False, "lstrip": False, "rstrip": False, **token} for token in (*specials, *added)
        ],
        "normalizer": {"type": "Sequence", "normalizers": mark},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
        **changes,
    }


def train_bpe(split: Any = None, **model: Any) -> Tokenizer:
    """A byte-level BPE tokenizer that splits as GPT-2's does, unless told otherwise."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    for name, value in model.items():
        setattr(made.model, name, value)
    return made


BPE = train_bpe()
SIZE = BPE.get_vocab_size()


def as_json(made: Tokenizer, **changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(made.to_str())
    return {**value, **changes}


def found(folder: Path) -> tokenizer_files.TokenizerFiles:
    files = tokenizer_files.find(folder)
    assert files is not None
    return files


def vocabulary(folder: Path, size: int, pre: str | None = None, **config: Any) -> tokenizer.Vocabulary:
    return tokenizer.vocabulary(found(folder), vocab_size=size, config=config, pre=pre)


def problems(folder: Path, size: int = 1000, pre: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        vocabulary(folder, size, pre)
    return str(caught.value)


# Finding the files.


def test_a_directory_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "</s>"}, config={}, generation_config={})
    assert tokenizer_files.find(tmp_path) is None


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a directory"):
        tokenizer_files.find(tmp_path / "nowhere")


def test_every_file_of_a_tokenizer_is_listed(tmp_path: Path) -> None:
    write(
        tmp_path, **{name.split(".")[0]: {} for name in ("special_tokens_map.json", "added_tokens.json", "vocab.json")}
    )
    write(tmp_path, tokenizer=SPM, merges="#version: 0.2\n", chat_template="{{ 1 }}", config={}, tokenizer_config={})
    write(tmp_path, tokenizer=spm_json())
    (tmp_path / "chat_template.json").write_text("{}")
    (tmp_path / tokenizer_files.ADDITIONAL_TEMPLATES).mkdir()
    (tmp_path / tokenizer_files.ADDITIONAL_TEMPLATES / "tools.jinja").write_text("{{ 2 }}")
    names = {str(path.relative_to(tmp_path)) for path in found(tmp_path).files}
    assert names == {*tokenizer_files.FILES, f"{tokenizer_files.ADDITIONAL_TEMPLATES}/tools.jinja"}
    assert list(found(tmp_path).files) == sorted(found(tmp_path).files)


@pytest.mark.parametrize("named", ["TokenizersBackend", "GPT2Tokenizer", "LlamaTokenizerFast", "MadeUp", None])
def test_content_decides_the_kind_and_no_class_name(tmp_path: Path, named: str | None) -> None:
    config = {"tokenizer_class": named}
    for kind, content in {"spm": spm_json(), "bpe": as_json(BPE)}.items():
        assert found(write(tmp_path / kind, tokenizer=content, tokenizer_config=config)).kind == kind
    assert found(write(tmp_path / "model", tokenizer=SPM, tokenizer_config=config)).kind == "spm"
    assert found(write(tmp_path / "slow", vocab={}, merges="", tokenizer_config=config)).kind == "bpe"


def test_a_byte_level_step_anywhere_makes_a_byte_level_tokenizer(tmp_path: Path) -> None:
    inner = [
        {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]},
        {"type": "Digits", "individual_digits": True},
    ]
    content = as_json(BPE, pre_tokenizer={"type": "Sequence", "pretokenizers": inner})
    assert found(write(tmp_path, tokenizer=content)).kind == "bpe"


def test_metaspace_makes_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    content = spm_json(
        normalizer=None, pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    )
    content["model"]["byte_fallback"] = False
    assert found(write(tmp_path, tokenizer=content)).kind == "spm"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0]]}}, "holds a Unigram model"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "holds a WordPiece model"),
        ({"model": {"vocab": {}}}, "holds a nameless model"),
        ({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Whitespace"}}, "whose pre-tokenizer is Whitespace"),
        ({}, "model is null"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    message = problems(write(tmp_path, tokenizer=content))
    assert words in message
    assert "needed" in message


def test_other_sentencepiece_models_are_refused_by_name(tmp_path: Path) -> None:
    unigram = train_spm(model_type="unigram", vocab_size=280)
    assert "holds a SentencePiece Unigram model" in problems(write(tmp_path, tokenizer=unigram))


def test_a_tokenizer_model_that_is_none_is_refused(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    assert "Git LFS pointer" in problems(write(tmp_path / "a", tokenizer=pointer))
    assert "not a SentencePiece model" in problems(write(tmp_path / "b", tokenizer=b"aGk= 0\n"))
    assert "not a SentencePiece model" in problems(write(tmp_path / "c", tokenizer=b""))


def test_damaged_models_are_errors_and_nothing_else(tmp_path: Path) -> None:
    source = random.Random(5)
    for number in range(60):
        raw = bytearray(SPM[: source.randrange(1, len(SPM))] if number % 2 else SPM)
        for _ in range(number % 7):
            raw[source.randrange(len(raw))] = source.randrange(256)
        with contextlib.suppress(InputError):
            vocabulary(write(tmp_path / str(number), tokenizer=bytes(raw)), 330)


def test_tiktoken_ranks_beside_a_tokenizer_json_do_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer=b"aGk= 0\n")
    assert found(write(folder, tokenizer=as_json(BPE))).kind == "bpe"


def test_two_kinds_in_one_directory_are_a_contradiction(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=SPM)
    message = problems(write(tmp_path, tokenizer=as_json(BPE)))
    assert "byte-level BPE" in message
    assert "tokenizer.model a SentencePiece one" in message


def test_half_a_vocabulary_names_the_other_half(tmp_path: Path) -> None:
    assert "without merges.txt" in problems(write(tmp_path / "a", vocab={"a": 0}))
    assert "without vocab.json" in problems(write(tmp_path / "b", merges="a b\n"))


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=spm_json(), tokenizer_config='{"a": 1, "a": 2}', added_tokens={"<|x|>": -1, "<|y|>": "2"})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    message = problems(tmp_path)
    assert len(message.splitlines()) == 4
    for words in ("stands twice", '"<|x|>" has the id -1', '"<|y|>" has the id "2"', "not UTF-8"):
        assert words in message


# Added tokens and special ids.


def test_added_tokens_merge_from_three_files(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"331": {**END, "special": False}, "340": USER}}
    write(tmp_path, tokenizer=SPM, tokenizer_config=config, added_tokens={"<|end|>": 331, "<|old|>": 335})
    assert [(t.id, t.content, t.special, t.rstrip) for t in found(tmp_path).added] == [
        (331, "<|end|>", False, True),
        (335, "<|old|>", False, False),
        (340, "<|user|>", False, True),
    ]
    write(tmp_path, tokenizer=spm_json([{"id": 331, **END}]))
    special = {token.content: token.special for token in found(tmp_path).added}
    assert special["<|end|>"] is True  # tokenizer.json has the last word for SentencePiece
    assert special["<unk>"] is True


def test_flags_of_byte_level_tokens_are_those_that_transformers_takes(tmp_path: Path) -> None:
    made = train_bpe()
    made.add_tokens([AddedToken("<x>", special=False, normalized=False), AddedToken("<y>", special=True)])
    decoder = {str(made.token_to_id("<x>")): {"content": "<x>", "special": True, "normalized": False}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": decoder}
    write(tmp_path, tokenizer=as_json(made), tokenizer_config=config)
    theirs = AutoTokenizer.from_pretrained(tmp_path).added_tokens_decoder
    assert {t.id: t.special for t in found(tmp_path).added} == {number: t.special for number, t in theirs.items()}


def test_two_texts_for_one_id_name_both_files(tmp_path: Path) -> None:
    write(
        tmp_path, tokenizer=SPM, tokenizer_config={"added_tokens_decoder": {"331": END}}, added_tokens={"<|fin|>": 331}
    )
    message = problems(tmp_path)
    assert message.startswith('token 331 is "<|fin|>" in ')
    assert "added_tokens.json" in message
    assert '"<|end|>" in ' in message
    assert "tokenizer_config.json" in message


def test_two_ids_for_one_text_are_refused(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=SPM, tokenizer_config={"added_tokens_decoder": {"331": END, "333": END}})
    assert '"<|end|>" has the ids 331 and 333' in problems(tmp_path)


def template(*parts: str, pair: Sequence[str] = ()) -> dict[str, Any]:
    """A post-processor: $A and $B are the texts."""

    def part(name: str) -> dict[str, Any]:
        kind = "Sequence" if name.startswith("$") else "SpecialToken"
        return {kind: {"id": name.removeprefix("$"), "type_id": 0}}

    return {
        "type": "TemplateProcessing",
        "single": [part(name) for name in parts],
        "pair": [part(name) for name in pair],
        "special_tokens": {},
    }


ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1], "trim_offsets": True}
NAMED = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "pad_token": "<|end|>"}


@pytest.mark.parametrize(
    ("config", "processor"),
    [
        (NAMED, None),
        ({**NAMED, "add_bos_token": True, "add_eos_token": False}, None),
        ({"eos_token": {"content": "<|end|>", "special": True}, "pad_token": None}, None),
        ({"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<|user|>"}, None),
        ({"eos_token": "not there"}, None),
        (NAMED, template("<s>", "$A", pair=("<s>", "$A", "<s>", "$B"))),
        (NAMED, template("<s>", "$A", "</s>", pair=("<s>", "$A", "</s>", "$B", "</s>"))),
        (NAMED, template("$A", pair=("$A", "$B"))),
        (NAMED, template("<s>", "$A", "<|end|>", pair=("<s>", "$A", "<|end|>", "<s>", "$B", "<|end|>"))),
        ({}, template("$A", "</s>", pair=("$A", "</s>", "$B", "</s>"))),
        ({"sep_token": "</s>", **NAMED}, template("<s>", "$A", pair=("<s>", "$A", "</s>", "</s>", "$B"))),
        ({"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>"}, ROBERTA),
        (None, template("<s>", "$A", "</s>", pair=())),
        (None, None),
    ],
)
@pytest.mark.parametrize("more", [{}, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "unk_token_id": 0}])
def test_special_tokens_resolve_as_in_llama_cpps_converter(
    tmp_path: Path, config: dict[str, Any] | None, processor: dict[str, Any] | None, more: dict[str, int]
) -> None:
    added = [{"id": 330, **END}, {"id": 331, **USER}]
    write(tmp_path, tokenizer=spm_json(added, post_processor=processor), config=more)
    if config is not None:
        write(tmp_path, tokenizer_config=config)
    theirs = SpecialVocab(tmp_path, n_vocab=340)
    ours = tokenizer.vocabulary(found(tmp_path), vocab_size=340, config=more)
    keyless = {"cls"}  # GGUF has no key for it
    assert [(k, v) for k, v in ours.special.items() if k not in keyless] == [
        (k, v) for k, v in theirs.special_token_ids.items() if k not in keyless
    ]
    stated = {k: v for k, v in ours.adds.items() if k in theirs.add_special_token or v}
    assert stated == {k: v for k, v in theirs.add_special_token.items() if k in ("bos", "eos", "sep")}


def test_config_json_outweighs_names_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    config = {"eos_token": "<|end|>", "added_tokens_decoder": {"330": END}}
    write(tmp_path, tokenizer=SPM, tokenizer_config=config, config={"eos_token_id": 7, "pad_token_id": 330})
    made = vocabulary(tmp_path, 331, eos_token_id=7, pad_token_id=330)
    assert made.special == SpecialVocab(tmp_path, n_vocab=331).special_token_ids == {"eos": 7, "pad": 330}
    assert found(tmp_path).eos == 330  # which eos_ids unites with the other


@pytest.mark.parametrize(
    ("more", "adds"), [({}, True), ({"cls_token": "</s>"}, False), ({"cls_token": "<|user|>"}, True)]
)
def test_a_first_token_of_another_role_counts_as_cls(tmp_path: Path, more: dict[str, str], adds: bool) -> None:
    # gguf-py of 2026; the release that is installed beside this test says False in the first case
    content = spm_json([{"id": 330, **USER}], post_processor=template("<|user|>", "$A"))
    write(tmp_path, tokenizer=content, tokenizer_config={**NAMED, **more})
    assert found(tmp_path).add_bos is adds


def test_the_post_processor_outweighs_the_configuration(tmp_path: Path) -> None:
    config = {**NAMED, "add_bos_token": False, "add_eos_token": True}
    write(tmp_path, tokenizer=spm_json(post_processor=template("<s>", "$A")), tokenizer_config=config)
    assert (found(tmp_path).add_bos, found(tmp_path).add_eos) == (True, True)
    write(tmp_path, tokenizer=as_json(BPE, post_processor={"type": "ByteLevel"}))
    assert (found(tmp_path).add_bos, found(tmp_path).add_eos) == (False, False)


def test_a_tokenizer_json_that_adds_no_bos_says_so_where_llama_cpp_would(tmp_path: Path) -> None:
    assert vocabulary(write(tmp_path / "a", tokenizer=spm_json()), 330).add_bos is False
    assert vocabulary(write(tmp_path / "b", tokenizer=SPM), 330).add_bos is None
    folder = write(tmp_path / "c", tokenizer=as_json(BPE))
    assert vocabulary(folder, 300).add_bos is None
    assert vocabulary(folder, 300, pre="llama-bpe").add_bos is False


def test_names_without_added_tokens_are_found_among_the_pieces(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer=SPM, tokenizer_config={"eos_token": TEXTS[300], "pad_token": TEXTS[301]})
    assert vocabulary(folder, 330).special == {"eos": 300, "pad": 301}
    assert vocabulary(folder, 330, eos_token_id=7).eos == 7


def test_the_old_map_of_special_tokens_counts_where_nothing_newer_does(tmp_path: Path) -> None:
    old = {"eos_token": {"content": "</s>", "lstrip": False}, "additional_special_tokens": ["<|user|>"]}
    write(tmp_path, tokenizer=spm_json(), special_tokens_map=old)
    assert found(tmp_path).eos == 2
    assert found(tmp_path).named == {"</s>", "<|user|>"}
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {}})
    assert found(tmp_path).eos is None


def test_an_id_outside_of_the_vocabulary_is_left_out_and_said(tmp_path: Path) -> None:
    made = vocabulary(write(tmp_path, tokenizer=SPM), 330, pad_token_id=32000, eos_token_id=[5, 6], bos_token_id=None)
    assert made.special == {"eos": 5}
    assert made.notes == ("config.json's pad_token_id 32000 is outside of the 330 rows and left out",)


def test_end_tokens_are_united_in_order(tmp_path: Path) -> None:
    files = found(write(tmp_path, tokenizer=spm_json([{"id": 340, **END}]), tokenizer_config={"eos_token": "<|end|>"}))
    eos = tokenizer_files.eos_ids
    assert eos(files, {"eos_token_id": 32000}, {"eos_token_id": [32000, 32001, 32007]}) == (32000, 32001, 32007, 340)
    assert eos(files, None, None) == (340,)
    assert eos(None, {"eos_token_id": None}, {}) == ()
    assert eos(files, {"eos_token_id": [340, 2, 340]}, None) == (340, 2)
    with pytest.raises(InputError) as caught:
        eos(None, {"eos_token_id": "2"}, {"eos_token_id": [True]})
    assert len(caught.value.problems) == 2
    assert 'config.json: eos_token_id is "2"' in caught.value.problems[0]


# Chat templates.


@pytest.mark.parametrize("place", ["string", "list", "file", "processor"])
def test_a_chat_template_is_found_in_every_place(tmp_path: Path, place: str) -> None:
    text = "{{ 'a' }}\n{{ messages }}"
    config: dict[str, Any] = {"tokenizer_class": "TokenizersBackend"}
    if place == "string":
        config["chat_template"] = text
    if place == "list":
        config["chat_template"] = [{"name": "default", "template": text}, {"name": "tool_use", "template": "{{ 2 }}"}]
    write(tmp_path, tokenizer=as_json(BPE), tokenizer_config=config)
    if place == "file":
        (tmp_path / "chat_template.jinja").write_bytes(text.replace("\n", "\r\n").encode())
    if place == "processor":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    files = found(tmp_path)
    assert files.chat_template == text
    assert files.notes == ()
    theirs = SpecialVocab(tmp_path).chat_template
    assert theirs == (text if place != "list" else config["chat_template"])
    if place in ("string", "file"):
        assert AutoTokenizer.from_pretrained(tmp_path).chat_template == text
    assert set(files.chat_templates) == ({"default", "tool_use"} if place == "list" else {"default"})


def test_a_processors_template_counts_where_nothing_else_does(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=as_json(BPE), tokenizer_config={"chat_template": "{{ 'config' }}"})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'processor' }}"}))
    assert found(tmp_path).chat_template == SpecialVocab(tmp_path).chat_template == "{{ 'config' }}"


def test_the_template_file_wins_as_in_transformers_and_the_note_says_so(tmp_path: Path) -> None:
    config = {"tokenizer_class": "TokenizersBackend", "chat_template": "{{ 'config' }}"}
    write(tmp_path, tokenizer=as_json(BPE), tokenizer_config=config, chat_template="{{ 'file' }}")
    (tmp_path / tokenizer_files.ADDITIONAL_TEMPLATES).mkdir()
    (tmp_path / tokenizer_files.ADDITIONAL_TEMPLATES / "rag.jinja").write_text("{{ 'rag' }}")
    theirs = AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert found(tmp_path).chat_templates == theirs == {"default": "{{ 'file' }}", "rag": "{{ 'rag' }}"}
    assert vocabulary(tmp_path, 300).notes == (
        "the chat template default is that of chat_template.jinja; tokenizer_config.json holds another one",
    )


@pytest.mark.parametrize("value", [7, ["x"], [{"name": "a"}], [{"name": "a", "template": ""}] * 2])
def test_a_malformed_template_list_is_refused(tmp_path: Path, value: object) -> None:
    assert "chat_template has" in problems(write(tmp_path, tokenizer=SPM, tokenizer_config={"chat_template": value}))


# SentencePiece vocabularies.


def rows(made: tokenizer.Vocabulary) -> list[tuple[bytes, float, int]]:
    assert made.scores is not None
    return list(zip(made.tokens, made.scores, made.types, strict=True))


def test_sentencepiece_rows_are_the_models_own(tmp_path: Path) -> None:
    made = vocabulary(write(tmp_path, tokenizer=SPM), 333)
    assert (made.model, made.pre, made.merges) == ("llama", "default", None)
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 71]
    expected = [(TEXTS[i].encode(), PIECES.GetScore(i), kinds[i]) for i in range(330)]
    padding = [(f"[PAD{i}]".encode(), -10000.0, TokenType.UNUSED) for i in range(330, 333)]
    assert rows(made) == expected + padding


@pytest.mark.parametrize("strings", [False, True])
def test_a_tokenizer_json_alone_gives_the_same_rows_as_the_model(tmp_path: Path, strings: bool) -> None:
    added = [{"id": 331, **END}, {"id": 340, **USER}]
    content = spm_json(added)
    if strings:
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    config = {"added_tokens_decoder": {str(t["id"]): t for t in content["added_tokens"]}}
    alone = vocabulary(write(tmp_path / "json", tokenizer=content), 345)
    model = vocabulary(write(tmp_path / "model", tokenizer=SPM, tokenizer_config=config), 345)
    both = vocabulary(write(tmp_path / "model", tokenizer=content), 345)
    assert rows(alone) == rows(model) == rows(both)
    assert str(alone.scores) == str(model.scores)  # the sign of zero too
    assert rows(alone)[331] == (b"<|end|>", -1000.0, TokenType.CONTROL)
    assert rows(alone)[340] == (b"<|user|>", -1000.0, TokenType.USER_DEFINED)
    assert rows(alone)[335] == (b"[PAD335]", -10000.0, TokenType.UNUSED)
    assert rows(alone)[0] == (b"<unk>", -1000.0, TokenType.CONTROL)
    assert alone.notes == both.notes == ()


def encode(made: tokenizer.Vocabulary, text: str) -> list[int]:
    """llama.cpp's tokenizer for SentencePiece: the best-scored pair merges first, the left one of equals."""
    assert made.scores is not None
    ids = {token.decode(): number for number, token in enumerate(made.tokens)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-made.scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        number
        for symbol in symbols
        for number in ([ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


@pytest.mark.parametrize("order", ["scores", "spaces last", "spaces in place", "shuffled"])
def test_scores_of_a_tokenizer_json_merge_in_the_order_of_its_merges(tmp_path: Path, order: str) -> None:
    by_text = {text: PIECES.GetScore(number) for number, text in enumerate(TEXTS) if number > 258}
    if order.startswith("spaces"):
        low = order == "spaces last"
        by_text = {"▁▁": -1e9 if low else 1.0, **by_text, "▁▁▁▁": -1e9 if low else -500.0}
        if low:
            by_text["▁"] = -1e9
    names = list(by_text)
    if order == "shuffled":
        random.Random(3).shuffle(names)
    content = spm_json(scores={name: by_text[name] for name in names})
    made = vocabulary(write(tmp_path, tokenizer=content), 340)
    fast = Tokenizer.from_str(json.dumps(content))
    for text in (*LINES[:20], *HARD, "linnet    exports  the\n12 tensors", "  "):
        assert encode(made, text) == fast.encode(text, add_special_tokens=False).ids, text
    assert made.notes == ()
    if order == "spaces last":
        spaces = [score for token, score, _ in rows(made) if token and not token.decode().strip("▁")]
        assert spaces == [-1e9, -1e9, -1e9]


def test_llamas_spaces_score_last_whatever_the_order_of_the_merges(tmp_path: Path) -> None:
    lengths = (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15, 1)
    texts = [f"w{number}" for number in range(259, 29872)]
    for number, length in zip(tokenizer.SPACES, lengths, strict=True):
        texts[number - 259] = "▁" * length
    content = spm_json(scores={text: 0.0 for text in texts})
    assert content["model"]["merges"][0] == ["▁", "▁"]
    made = vocabulary(write(tmp_path, tokenizer=content), 29872)
    assert made.scores is not None
    assert {number for number, score in enumerate(made.scores) if score == -1e9} == set(tokenizer.SPACES)
    assert made.scores[260] == -1.0
    assert made.scores[29870] == -(29870.0 - 259)


def test_a_model_and_a_json_that_disagree_name_the_token(tmp_path: Path) -> None:
    content = spm_json()
    vocab = content["model"]["vocab"]
    vocab[TEXTS[300]], vocab[TEXTS[301]] = 301, 300
    write(tmp_path, tokenizer=SPM)
    message = problems(write(tmp_path, tokenizer=content))
    assert message.count("they must agree") == 2
    assert f'token 300 is "{TEXTS[300]}" in ' in message


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"345": END}}
    message = problems(write(tmp_path / "a", tokenizer=SPM, tokenizer_config=config), 340)
    assert "ids for 346 tokens" in message
    assert "340 rows" in message
    assert f"ids for {SIZE} tokens, the embedding has {SIZE - 1} rows" in problems(
        write(tmp_path / "b", tokenizer=as_json(BPE)), SIZE - 1
    )


def test_two_rows_with_one_text_are_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"331": {"content": TEXTS[300]}}}
    message = problems(write(tmp_path, tokenizer=SPM, tokenizer_config=config), 340)
    assert f"tokens 300 and 331 are both {json.dumps(TEXTS[300], ensure_ascii=False)}" in message


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, False),
        ({"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "never"}}, False),
        ({"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "add_prefix_space": True}}, None),
    ],
)
def test_the_space_before_a_text_is_said_where_it_is_missing(tmp_path: Path, split: Any, expected: bool | None) -> None:
    assert vocabulary(write(tmp_path, tokenizer=spm_json(**split)), 330).add_space_prefix is expected


def test_what_a_sentencepiece_model_does_to_text_is_noted(tmp_path: Path) -> None:
    other = train_spm(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, add_dummy_prefix=False)
    made = vocabulary(write(tmp_path, tokenizer=other), 330)
    assert made.add_space_prefix is False
    assert [("nmt_nfkc" in note, "repeated spaces" in note) for note in made.notes] == [(True, False), (False, True)]


# Byte-level BPE vocabularies.


def with_added(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens([AddedToken("<|end|>", normalized=False, special=True)])
    made.add_tokens(
        [
            AddedToken("<|looks|>", normalized=False),
            AddedToken("<think>", normalized=False),
            AddedToken("Ġspaced", normalized=False),
            AddedToken("Ġkept", normalized=True),
            AddedToken("a▁b", normalized=False),
        ]
    )
    return made


def test_byte_level_rows_are_the_tokens_with_their_types(tmp_path: Path) -> None:
    made = with_added(train_bpe())
    folder = write(tmp_path, tokenizer=as_json(made), tokenizer_config={"eos_token": "<|eos|>"})
    ours = vocabulary(folder, SIZE + 8)
    assert (ours.model, ours.pre, ours.scores) == ("gpt2", "gpt-2", None)
    texts = [made.id_to_token(number) for number in range(SIZE + 6)]
    # llama.cpp takes added tokens as they print, and user-defined ones with plain spaces
    texts[SIZE + 3 :] = [" spaced", "Ġkept", "a b"]
    assert [token.decode() for token in ours.tokens] == [*texts, f"[PAD{SIZE + 6}]", f"[PAD{SIZE + 7}]"]
    control, user, unused = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED
    added = [control, control, user, user, user, user]
    assert list(ours.types) == [control, *[TokenType.NORMAL] * (SIZE - 1), *added, unused, unused]


def test_byte_level_texts_are_what_transformers_prints(tmp_path: Path) -> None:
    made = with_added(train_bpe())
    made.add_tokens([AddedToken(text, normalized=False) for text in ("é", "éé x", "☃é", "Ġ", "ĠĠĊ", "\u0120é")])
    folder = write(tmp_path, tokenizer=as_json(made), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    ours, theirs = vocabulary(folder, 320), AutoTokenizer.from_pretrained(folder)
    for number, token in theirs.added_tokens_decoder.items():
        printed = str(theirs.decode(theirs.encode(token.content, add_special_tokens=False)))
        # letters that are no UTF-8 as bytes print as question marks; such a token stays what it is in a text
        expected = token.content if token.normalized or "\ufffd" in printed else printed
        assert ours.tokens[number].decode().replace(" ", "▁") == expected.replace(" ", "▁"), token


def test_pieces_that_the_configuration_calls_special_are_control(tmp_path: Path) -> None:
    made = train_bpe()
    piece = made.id_to_token(280)
    content = as_json(made, added_tokens=[])
    config = {"eos_token": "<|eos|>", "additional_special_tokens": [{"content": piece}]}
    ours = vocabulary(write(tmp_path, tokenizer=content, tokenizer_config=config), 300)
    assert [number for number, kind in enumerate(ours.types) if kind == TokenType.CONTROL] == [0, 280]


@pytest.mark.parametrize("form", ["pairs", "strings", "files"])
def test_merges_are_read_in_every_form(tmp_path: Path, form: str) -> None:
    content = as_json(BPE)
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    if form == "files":
        write(tmp_path, vocab=content["model"]["vocab"], merges="\n".join(["#version: 0.2", *merges, ""]))
        write(tmp_path, tokenizer_config={"eos_token": "<|eos|>", "tokenizer_class": "GPT2Tokenizer"})
    else:
        content["model"]["merges"] = merges if form == "strings" else content["model"]["merges"]
        write(tmp_path, tokenizer=content)
    ours = vocabulary(tmp_path, SIZE)
    assert list(ours.merges or ()) == merges == SpecialVocab(tmp_path, load_merges=True).merges
    assert [token.decode() for token in ours.tokens] == [BPE.id_to_token(number) for number in range(SIZE)]
    assert ours.types[0] == TokenType.CONTROL
    assert ours.pre == "gpt-2"
    assert len(ours.notes) == (form == "files")


def test_a_space_within_a_merge_is_encoded_as_the_converter_does(tmp_path: Path) -> None:
    content = as_json(BPE)
    content["model"]["merges"] = [["a b", "c"], *content["model"]["merges"]]
    write(tmp_path, tokenizer=content)
    assert (vocabulary(tmp_path, 300).merges or ())[0] == "aĠb c"
    assert SpecialVocab(tmp_path, load_merges=True).merges[0] == "aĠb c"


@pytest.mark.parametrize("merge", ["ab", "a b c", ["a"], ["a", ""], [1, 2], None])
def test_a_malformed_merge_is_refused(tmp_path: Path, merge: object) -> None:
    content = as_json(BPE)
    content["model"]["merges"][5] = merge
    assert "a merge is " in problems(write(tmp_path, tokenizer=content))


def test_a_malformed_line_of_merges_is_named(tmp_path: Path) -> None:
    message = problems(write(tmp_path, vocab={"a": 0}, merges="#version: 0.2\na b\na b c\n"))
    assert "merges.txt, line 3" in message


@pytest.mark.parametrize(
    ("vocab", "words"),
    [
        ({"a": 0, "b": 0}, 'token 0 is both "a" and "b"'),
        ({"a": -1}, "an integer from 0 is needed"),
        ({"a": True}, "an integer from 0 is needed"),
        ({"a": 0, "<|eos|>": 5}, 'the token "<|eos|>" is 5 in vocab and 0 in the added tokens'),
        ({"a": 0}, 'token 0 is "a" in vocab and "<|eos|>" in the added tokens'),
        ({}, "an object of texts and ids is needed"),
        ([], "the vocab in "),
        ({"\ud800": 7}, "not Unicode text"),
    ],
)
def test_a_malformed_vocabulary_is_refused(tmp_path: Path, vocab: Any, words: str) -> None:
    content = as_json(BPE)
    content["model"]["vocab"] = vocab
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert words in problems(tmp_path)


def test_a_normalizer_that_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    made = train_bpe()
    made.normalizer = normalizers.NFC()
    assert "NFC" in vocabulary(write(tmp_path / "a", tokenizer=as_json(made)), 300).notes[0]
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    with pytest.raises(UnsupportedError, match="normalizes text with NFC, Lowercase"):
        vocabulary(write(tmp_path / "b", tokenizer=as_json(made)), 300)


def test_a_vocabulary_without_merges_is_refused(tmp_path: Path) -> None:
    content = as_json(BPE)
    content["model"]["merges"] = []
    with pytest.raises(UnsupportedError, match="no merges"):
        vocabulary(write(tmp_path, tokenizer=content), 300)


# Pre-tokenizers.

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(regex: str, *, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), behavior, invert=invert), BYTES])


SPLITS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "dbrx": split(LLAMA3),
    "gpt-4o": split(O200K),
    "qwen2": split(LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            GPT2,
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    "deepseek-coder": pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(regex), "isolated")
                for regex in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
            ),
            pre_tokenizers.Digits(individual_digits=True),
            BYTES,
        ]
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_pre_tokenizer_is_recognised_by_its_expressions(tmp_path: Path, name: str) -> None:
    made = vocabulary(write(tmp_path, tokenizer=as_json(train_bpe(SPLITS[name]))), 300)
    assert (made.pre, made.notes) == (name, ())


def test_whole_words_first_decides_between_two_names(tmp_path: Path) -> None:
    def pre(folder: str, splits: Any) -> tokenizer.Vocabulary:
        content = as_json(train_bpe(splits))
        content["model"]["ignore_merges"] = True
        return vocabulary(write(tmp_path / folder, tokenizer=content), 300)

    assert pre("a", split(LLAMA3)).pre == "llama-bpe"
    other = pre("b", split(O200K))
    assert other.pre == "gpt-4o"
    assert "ignore_merges is true" in other.notes[0]


@pytest.mark.parametrize(
    ("written", "other"),
    [
        (split(LLAMA3), split(CL100K)),
        (split(LLAMA3), split(LLAMA3, behavior="removed", invert=True)),
        (split(O200K), split(O200K, behavior="removed", invert=True)),
    ],
)
def test_two_ways_to_write_one_pre_tokenizer_split_alike_and_have_one_name(
    tmp_path: Path, written: Any, other: Any
) -> None:
    for text in (*HARD, "'S'sssss'lLx \r\n \n\n  a\n", "1234567 ++\n\n\n--  "):
        assert written.pre_tokenize_str(text) == other.pre_tokenize_str(text)
    names = [
        vocabulary(write(tmp_path / str(i), tokenizer=as_json(train_bpe(s))), 300).pre
        for i, s in enumerate((written, other))
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    "splits",
    [
        split(LLAMA3.replace("{1,3}", "{1,4}")),
        split(LLAMA3, behavior="merged_with_previous"),
        split(r"\p{N}{1,3}", behavior="removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), GPT2]),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), GPT2]),
        BYTES,
    ],
)
def test_an_unknown_pre_tokenizer_is_refused_and_can_be_named(tmp_path: Path, splits: Any) -> None:
    folder = write(tmp_path, tokenizer=as_json(train_bpe(splits)))
    message = problems(folder, 300)
    assert "--pre-tokenizer NAME" in message
    regex = (
        as_json(train_bpe(splits))["pre_tokenizer"].get("pretokenizers", [{}])[0].get("pattern", {}).get("Regex", "")
    )
    assert regex in message
    assert vocabulary(folder, 300, pre="starcoder").pre == "starcoder"


def test_a_name_that_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tokenizer=as_json(BPE))
    assert "such as qwen2" in problems(folder, 300, pre="qwen-2")
    assert "a SentencePiece one" in problems(write(tmp_path / "b", tokenizer=SPM), 330, pre="gpt-2")


def test_files_without_expressions_are_gpt2s_unless_their_class_says_otherwise(tmp_path: Path) -> None:
    content = as_json(BPE)["model"]
    merges = "\n".join(" ".join(pair) for pair in content["merges"])
    folder = write(tmp_path, vocab=content["vocab"], merges=merges)
    assert vocabulary(folder, 300).pre == "gpt-2"
    write(folder, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"})
    assert "Qwen2Tokenizer is not GPT-2's tokenizer" in problems(folder, 300)
    assert vocabulary(folder, 300, pre="qwen2").pre == "qwen2"


def test_the_table_of_pre_tokenizers_is_sound() -> None:
    rows = [(expressions, whole) for _, whole, expressions in known.PRE_TOKENIZERS]
    assert len(set(rows)) == len(rows)
    assert {name for name, _, _ in known.PRE_TOKENIZERS} <= known.NAMES
    assert known.ADDING_BOS <= known.NAMES
    for _, _, expressions in known.PRE_TOKENIZERS:
        for expression in expressions:
            if not expression.startswith("Punctuation"):
                Regex(expression)


# Writing.


def test_keys_are_written_in_the_converters_order_and_types(tmp_path: Path) -> None:
    config = {**NAMED, "add_bos_token": True, "add_eos_token": False}
    config["chat_template"] = [
        {"name": name, "template": f"{{{{ '{name}' }}}}"} for name in ("tool_use", "default", "r-g")
    ]
    write(tmp_path, tokenizer=spm_json([{"id": 330, **END}]), tokenizer_config=config)
    made = vocabulary(tmp_path, 340)
    writer = GGUFWriter(tmp_path / "ours.gguf", "phi3")
    tokenizer.to_gguf(made, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    theirs = GGUFWriter(tmp_path / "theirs.gguf", "phi3")
    theirs.add_tokenizer_model("llama")
    theirs.add_tokenizer_pre("default")
    theirs.add_token_list(made.tokens)
    theirs.add_token_scores(made.scores or ())
    theirs.add_token_types(made.types)
    SpecialVocab(tmp_path, n_vocab=340).add_to_gguf(theirs, quiet=True)
    (ours,), (expected,) = writer.kv_data, theirs.kv_data
    names = "tokenizer.chat_templates"  # the library's order is that of a set
    assert sorted(ours[names].value) == sorted(expected[names].value)
    assert [(k, v.type, v.value) for k, v in ours.items() if k != names] == [
        (k, v.type, v.value) for k, v in expected.items() if k != names
    ]
    fields = GGUFReader(tmp_path / "ours.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[330] == "<|end|>"
    assert fields["tokenizer.chat_template"].contents() == "{{ 'default' }}"
    assert fields["tokenizer.chat_template.r_g"].contents() == "{{ 'r-g' }}"
    assert fields[names].contents() == ["tool_use", "r_g"]


def test_byte_level_merges_stand_before_the_ids(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=as_json(BPE), tokenizer_config={"eos_token": "<|eos|>"})
    writer = GGUFWriter(tmp_path / "ours.gguf", "phi3")
    tokenizer.to_gguf(vocabulary(tmp_path, 300), writer)
    keys = [key.removeprefix("tokenizer.ggml.") for key in writer.kv_data[0] if key.startswith("tokenizer")]
    assert keys == ["model", "pre", "tokens", "token_type", "merges", "eos_token_id"]


@pytest.mark.parametrize(
    ("name", "strips"),
    [
        ("Phi-3-mini-4k-instruct", True),
        ("my-PHI3-tune", True),
        ("Phi 3 Mini 4k Instruct", False),
        ("Phi-4-mini", False),
        ("", False),
    ],
)
def test_llama_cpp_strips_after_added_tokens_by_the_models_name(tmp_path: Path, name: str, strips: bool) -> None:
    def notes(folder: str, **content: Any) -> tuple[str, ...]:
        files = found(write(tmp_path / folder, **content))
        return tokenizer.check_name(files, tokenizer.vocabulary(files, vocab_size=340, config={}), name)

    assert tokenizer.strips_after_added(name) is strips
    whole = [{"id": 330, "content": "<|endoftext|>"}, {"id": 331, **END}]
    assert notes("a", tokenizer=spm_json(whole)) == (() if strips else (tokenizer.RSTRIP_NOTE.format(name=name),))
    assert notes("b", tokenizer=spm_json(whole[:1])) == ()
    if strips:  # with such a name llama.cpp looks four tokens up and does not load a model without them
        with pytest.raises(UnsupportedError, match=r"has no token </s>, <unk>, <s>, <\|endoftext\|>;"):
            notes("c", tokenizer=as_json(BPE))
    else:
        made = train_bpe()
        made.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
        assert notes("c", tokenizer=as_json(made)) == (tokenizer.KEPT_NOTE,)


def test_the_ends_that_llama_cpp_knows_are_those_of_the_file_and_those_it_finds_by_text(tmp_path: Path) -> None:
    added = [{"id": 330, **END}, {"id": 331, **USER}, {"id": 332, "content": "<|stop|>"}]
    files = write(tmp_path, tokenizer=spm_json(added), tokenizer_config={"eos_token": "<|stop|>"})
    assert tokenizer.ends_in_llama_cpp(vocabulary(files, 340)) == {2, 330, 332}


def test_no_tokenizer_library_is_imported_before_it_is_needed() -> None:
    code = """
import sys
from linnet_export import tokenizer_files
from linnet_export.converters import ollama, tokenizer
heavy = {"torch", "transformers", "tokenizers", "sentencepiece", "jinja2", "gguf"} & set(sys.modules)
print(*sorted(heavy))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""
