"""Prompts of a verification: whose ids they have, how a file of them is read, and which positions are asked."""

import itertools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import tiny
from linnet_export.model import Model, open_model
from linnet_export.verify import prompts
from linnet_export.verify.records import MOST_POSITIONS, VerificationError

TEMPLATE = (
    "{% for message in messages %}<|end|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def opened(directory: Path, *, template: str | None = TEMPLATE, tokenizer: bool = True, **values: object) -> Model:
    settings = {"max_position_embeddings": 512, "original_max_position_embeddings": 512, **values}
    tiny.checkpoint(directory, tiny.edited(**settings), tokenizer=tokenizer)
    if template is not None and tokenizer:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return open_model(directory, tokenizer=None if tokenizer else "none")


def test_the_shipped_prompts_have_the_ids_of_the_sources_tokenizer(tmp_path: Path) -> None:
    model = opened(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    found = {prompt.name: prompt for prompt in prompts.shipped(model, tokens=16)}
    assert list(found) == ["short", "chat", "code", "numbers", "unicode", "long"]
    for name in ("short", "code", "numbers", "unicode"):
        assert list(found[name].ids) == theirs(found[name].text)["input_ids"]
    messages = [{"role": "user", "content": found["chat"].text}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert found["chat"].chat
    assert list(found["chat"].ids) == expected
    assert 2 in expected  # <|end|> is one control token, not its letters


def test_the_long_prompt_passes_the_window(tmp_path: Path) -> None:
    for window, length in ((47, prompts.LONG), (400, 400 + prompts.PAST_WINDOW), (None, prompts.LONG)):
        model = opened(tmp_path / str(window), sliding_window=window)
        long = prompts.shipped(model, tokens=16)[-1]
        assert (long.name, len(long.ids)) == ("long", length)
    assert {46, 47, 399, 400} & set(prompts.positions(464, (400,))) >= {399, 400}


def test_every_prompt_leaves_room_for_its_answer(tmp_path: Path) -> None:
    model = opened(tmp_path / "model", max_position_embeddings=40, original_max_position_embeddings=40)
    assert max(len(prompt.ids) for prompt in prompts.shipped(model, tokens=16)) == 24
    with pytest.raises(VerificationError, match="--tokens 40: 1 to 39 are needed, for a context of 40"):
        prompts.shipped(model, tokens=40)


def test_a_model_without_template_is_given_the_message_alone(tmp_path: Path) -> None:
    chat = prompts.shipped(opened(tmp_path / "model", template=None), tokens=16)[1]
    assert (chat.name, chat.chat) == ("chat", False)
    dated = opened(tmp_path / "dated", template="{{ strftime_now('%d') }}" + TEMPLATE)
    assert prompts.shipped(dated, tokens=16)[1].ids == chat.ids  # what differs from day to day is no test


def test_a_model_without_tokenizer_gets_the_same_random_ids_each_time(tmp_path: Path) -> None:
    model = opened(tmp_path / "model", tokenizer=False)
    first, second = prompts.shipped(model, tokens=16), prompts.shipped(model, tokens=16)
    assert first == second
    assert [len(prompt.ids) for prompt in first] == [7, 16, 41, prompts.LONG]
    assert all(0 <= token < model.config.vocab for prompt in first for token in prompt.ids)
    assert prompts.codec(model).encode(first[0].text, True) == list(first[0].ids)


@pytest.mark.parametrize("length", [1, 2, 63, 64])
def test_a_short_prompt_is_compared_at_every_position(length: int) -> None:
    assert prompts.positions(length, (None,)) == tuple(range(length))


@pytest.mark.parametrize("length", [65, 66, 100, 300, 2111, 5000])
def test_of_a_long_prompt_its_ends_and_edges_and_an_even_rest_are_compared(length: int) -> None:
    edges = (48, 4096)
    found = prompts.positions(length, edges)
    assert len(found) == len(set(found)) == MOST_POSITIONS
    assert list(found) == sorted(found)
    wanted = {0, length - 1} | {p for edge in edges for p in range(edge - 2, edge + 2) if p < length}
    assert wanted <= set(found) <= set(range(length))
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert max(gaps) <= 2 * length / (MOST_POSITIONS - len(wanted)) + 1


def test_a_file_has_prompts_between_lines_of_dashes(tmp_path: Path) -> None:
    model = opened(tmp_path / "model")
    file = tmp_path / "prompts.txt"
    file.write_text("--- chat\nHi lad\n---\n\nline one\n\nline two\n---\n---\nlast --- one\n")
    found = prompts.read(file, model, tokens=16)
    assert [(prompt.name, prompt.text, prompt.chat) for prompt in found] == [
        ("prompt 1", "Hi lad", True),
        ("prompt 2", "line one\n\nline two", False),
        ("prompt 3", "last --- one", False),
    ]
    assert prompts.codec(model).decode(found[0].ids).endswith(": Hi lad<|end|>a:")


def test_a_file_that_cannot_be_used_is_refused_with_every_reason(tmp_path: Path) -> None:
    model = opened(tmp_path / "model", template=None)
    file = tmp_path / "prompts.txt"
    with pytest.raises(VerificationError, match="does not exist"):
        prompts.read(file, model, tokens=16)
    file.write_text("---\n\n---\n")
    with pytest.raises(VerificationError, match="holds no prompt; text is needed"):
        prompts.read(file, model, tokens=16)
    file.write_text("e" * 600 + "\n--- chat\nHi")
    with pytest.raises(VerificationError) as caught:
        prompts.read(file, model, tokens=16)
    assert [line.split(": ", 1)[1] for line in caught.value.problems] == [
        "prompt 1 has 600 tokens; 1 to 496 are needed, for a context of 512 with 16 tokens of answer (--tokens)",
        "prompt 2 is a chat message, but the model has no chat template that can be rendered",
    ]
    bare = opened(tmp_path / "bare", tokenizer=False)
    file.write_text("1 2 89\n---\n1 90\n---\nwords")
    with pytest.raises(VerificationError) as caught:
        prompts.read(file, bare, tokens=16)
    assert [line.split(": ", 1)[1] for line in caught.value.problems] == [
        "prompt 2 has the token 90; the model has 90",
        "prompt 3 is not token ids, and the model has no tokenizer; numbers are needed",
    ]


def test_pieces_are_what_each_token_adds(tmp_path: Path) -> None:
    codec = prompts.codec(opened(tmp_path / "model"))
    ids = codec.encode("ab <|end|> xy", True)
    assert "".join(codec.pieces(ids)) == codec.decode(ids)
    assert len(codec.pieces(ids)) == len(ids)


def test_a_character_of_several_tokens_stands_at_its_last() -> None:
    raw = "né🙂x".encode()
    codec = prompts.Codec(lambda _, __: list(raw), lambda ids: bytes(ids).decode("utf-8", "replace"), "bytes")
    assert codec.pieces(raw) == ("n", "", "é", "", "", "", "🙂", "x")


def test_a_tokenizer_model_alone_is_read_by_sentencepiece_between_its_added_tokens(tmp_path: Path) -> None:
    """Added tokens swallow the whitespace after them, as Phi-3's do, and the longest is found."""
    import sentencepiece

    text = tmp_path / "text"
    text.write_text("\n".join(f"the quick brown fox {n} jumps over a lazy dog" for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "tokenizer.model").rename(tmp_path / "model/tokenizer.model")
    added = {str(300 + i): {"content": f"<|{name}|>", "special": True, "rstrip": True, "lstrip": False,
                            "normalized": False, "single_word": False}
             for i, name in enumerate(("end", "user", "endless"))}  # fmt: skip
    (tmp_path / "model/tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "add_bos_token": True, "tokenizer_class": "LlamaTokenizer"})
    )
    opened(tmp_path / "model", tokenizer=False, vocab_size=303)
    codec = prompts.codec(open_model(tmp_path / "model"))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "model/tokenizer.model"))
    assert codec.encode("the fox", False) == theirs.encode("the fox")
    expected = [301, *theirs.encode("the fox"), 300, 302, *theirs.encode("dog 7")]
    assert codec.encode("<|user|>\n the fox<|end|>\n<|endless|> dog 7", False) == expected
    assert codec.decode(expected) == "<|user|>the fox<|end|><|endless|>dog 7"
