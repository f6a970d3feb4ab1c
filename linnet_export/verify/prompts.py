"""The prompts of a verification, as token ids of the source's own tokenizer, and ids back to text.

    prompts = shipped(model, tokens=64)              # prompts.json: short, chat, code, numbers, Unicode, long
    prompts = read(Path("prompts.txt"), model, tokens=64)

A prompt file is UTF-8 text. A line that is only `---` ends a prompt; `--- chat` ends one, too, and says that the next
is a user's message for the chat template. Every runtime is given the ids made here, so none tokenizes for itself
(whether an export's tokenizer is the source's is a question of structure). A model without tokenizer gets seeded
random ids. Refused: a prompt that does not fit into the model's context with its answer.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from linnet_export import text as texts
from linnet_export.converters import ollama
from linnet_export.errors import ExportError, Problems
from linnet_export.model import Model
from linnet_export.tokenizer_files import MERGES, TOKENIZER_JSON, TOKENIZER_MODEL, VOCAB, AddedToken, TokenizerFiles
from linnet_export.verify.records import MOST_POSITIONS, Prompt, VerificationError

SHIPPED = "prompts.json"
SEPARATOR, CHAT_SEPARATOR = "---", "--- chat"

# The long prompt passes a window by PAST_WINDOW tokens if that is within reach of a small machine; else it has LONG.
REACHABLE_WINDOW = 4096
PAST_WINDOW = 64
LONG = 300

# Lengths of the random prompts of a model without tokenizer, by name; the long one follows the rule above.
RANDOM_LENGTHS = {"random 7": 7, "random 16": 16, "random 41": 41}
SEED = 20


@dataclass(frozen=True, slots=True)
class Codec:
    """A tokenizer as two functions. `encode(text, special)` adds bos or eos where the tokenizer does so, if `special`;
    `decode` keeps control tokens visible. `how` names the library."""

    encode: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int]], str]
    how: str

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """What each token adds to the text of those before it: "" where a character is not complete yet."""
        found: list[str] = []
        shown = ""
        for end in range(1, len(ids) + 1):
            whole = self.decode(ids[:end])
            ready = whole if end == len(ids) else whole.rstrip("\ufffd")
            found.append(ready[len(shown) :] if ready.startswith(shown) else "")
            shown += found[-1]
        return tuple(found)


def codec(model: Model) -> Codec:
    """The source's tokenizer, by `tokenizers` or `sentencepiece`; plain numbers where a model has none."""
    files = model.tokenizer
    if files is None:
        return Codec(lambda text, _: [int(part) for part in text.split()], _numbers, "no tokenizer")
    if (path := files.path(TOKENIZER_JSON)) is not None:
        return _of_tokenizers(path)
    if (path := files.path(TOKENIZER_MODEL)) is not None:
        return _of_sentencepiece(path, files)
    return _of_merges(files)


def shipped(model: Model, *, tokens: int) -> tuple[Prompt, ...]:
    """The prompts of this package; on a model of a very short context, their beginnings.

    `tokens` is the length of an answer, for which the context must have room.
    """
    room = _room(model, tokens)
    if model.tokenizer is None:
        lengths = {**RANDOM_LENGTHS, "random long": _long_length(model)}
        draw = random.Random(SEED)
        rows = {name: [draw.randrange(model.config.vocab) for _ in range(n)] for name, n in lengths.items()}
        return tuple(_prompt(model, name, _numbers(ids[:room]), False, ids[:room]) for name, ids in rows.items())
    tokenizer = codec(model)
    found = []
    for entry in json.loads(resources.files(__package__).joinpath(SHIPPED).read_text(encoding="utf-8")):
        if entry.get("repeat"):
            ids = _repeated(tokenizer, entry["text"], min(_long_length(model), room))
            found.append(_prompt(model, entry["name"], f"{entry['text']} (repeated)", False, ids))
        else:
            ids, chat = _encoded(tokenizer, model, entry["text"], bool(entry.get("chat")))
            found.append(_prompt(model, entry["name"], entry["text"], chat, ids[:room]))
    return tuple(prompt for prompt in found if prompt.ids)


def read(path: Path, model: Model, *, tokens: int) -> tuple[Prompt, ...]:
    """The prompts of a text file, named by their place in it. VerificationError for a file that cannot be used."""
    try:
        content = texts.read_text(path)
    except ExportError as error:
        raise VerificationError(error.problems) from None
    parsed = _split(content)
    if not parsed:
        raise VerificationError(f"{path} holds no prompt; text is needed, with a line {SEPARATOR} between prompts")
    tokenizer, room = codec(model), _room(model, tokens)
    problems, found = Problems(), []
    for number, (text, chat) in enumerate(parsed, start=1):
        name = f"prompt {number}"
        try:
            ids, templated = _encoded(tokenizer, model, text, chat)
        except ValueError:
            problems.add(f"{path}: {name} is not token ids, and the model has no tokenizer; numbers are needed")
            continue
        if chat and not templated:
            problems.add(f"{path}: {name} is a chat message, but the model has no chat template that can be rendered")
        elif not 1 <= len(ids) <= room:
            problems.add(
                f"{path}: {name} has {len(ids)} tokens; 1 to {room} are needed, for a context of "
                f"{model.config.context} with {tokens} tokens of answer (--tokens)"
            )
        elif not 0 <= min(ids) <= max(ids) < model.config.vocab:
            problems.add(f"{path}: {name} has the token {max(ids)}; the model has {model.config.vocab}")
        else:
            found.append(_prompt(model, name, text, chat, ids))
    if problems.lines:
        raise VerificationError(problems.lines)
    return tuple(found)


def positions(length: int, edges: Iterable[int | None]) -> tuple[int, ...]:
    """Every position of a short prompt; of a longer one MOST_POSITIONS: first, last, those around edges, the rest even.

    An edge is the first position past something: a window, or the length up to which longrope's short factors serve.
    """
    if length <= MOST_POSITIONS:
        return tuple(range(length))
    chosen = {0, length - 1}
    chosen |= {p for edge in edges if edge is not None for p in range(edge - 2, edge + 2) if 0 <= p < length}
    spread = MOST_POSITIONS - len(chosen)
    rest = [p for p in range(length) if p not in chosen]
    chosen |= {rest[(2 * i + 1) * len(rest) // (2 * spread)] for i in range(spread)}
    return tuple(sorted(chosen))


def _room(model: Model, tokens: int) -> int:
    room = model.config.context - tokens
    if tokens < 1 or room < 1:
        raise VerificationError(
            f"--tokens {tokens}: 1 to {model.config.context - 1} are needed, for a context of {model.config.context}"
        )
    return room


def _long_length(model: Model) -> int:
    window = model.config.window
    return LONG if window is None or window > REACHABLE_WINDOW else max(LONG, window + PAST_WINDOW)


def _prompt(model: Model, name: str, text: str, chat: bool, ids: Sequence[int]) -> Prompt:
    rope = model.config.rope
    edges = (model.config.window, rope.original_context if rope.is_long else None)
    return Prompt(name, text, chat, tuple(ids), positions(len(ids), edges))


def _repeated(tokenizer: Codec, text: str, length: int) -> list[int]:
    ids = tokenizer.encode(text, True)
    copies = 1
    while 0 < len(ids) < length:
        copies = copies * length // len(ids) + 1
        ids = tokenizer.encode(text * copies, True)
    return ids[:length]


def _encoded(tokenizer: Codec, model: Model, text: str, chat: bool) -> tuple[list[int], bool]:
    """Ids, and whether they went through the chat template (a template writes its own control tokens)."""
    files = model.tokenizer
    if chat and files is not None and files.chat_template is not None:
        try:
            render = ollama.renderer(files.chat_template, files.names.get("bos", ""), files.names.get("eos", ""))
            return tokenizer.encode(render([{"role": "user", "content": text}]), False), True
        except ollama.Unrenderable:
            pass  # a template that writes today's date, say: the message alone is a prompt as good
    return tokenizer.encode(text, True), False


def _split(content: str) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    lines: list[str] = []
    chat = False
    for line in [*content.splitlines(), SEPARATOR]:
        if line.rstrip() in (SEPARATOR, CHAT_SEPARATOR):
            if text := "\n".join(lines).strip("\n"):
                found.append((text, chat))
            lines, chat = [], line.rstrip() == CHAT_SEPARATOR
        else:
            lines.append(line)
    return found


# Tokenizers.


def _numbers(ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in ids)


def _of_tokenizers(path: Path) -> Codec:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Codec(
        lambda text, special: list(tokenizer.encode(text, add_special_tokens=special).ids),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        "tokenizers on tokenizer.json",
    )


def _of_merges(files: TokenizerFiles) -> Codec:
    """Byte-level BPE from vocab.json and merges.txt, split as GPT-2 does: what such files mean when they are alone."""
    from tokenizers import AddedToken as Added
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(str(files.directory / VOCAB), str(files.directory / MERGES))
    tokenizer.add_special_tokens([Added(token.content, normalized=False) for token in files.added])
    return Codec(
        lambda text, special: list(tokenizer.encode(text, add_special_tokens=special).ids),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        "tokenizers on vocab.json and merges.txt",
    )


def _of_sentencepiece(path: Path, files: TokenizerFiles) -> Codec:
    """SentencePiece between the added tokens, which are found in the text first, the longest at each place."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(path))
    added = {token.content: token for token in files.added}
    longest_first = sorted(added, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first))) if added else None
    own = {token.id for token in files.added}

    def encode(text: str, special: bool) -> list[int]:
        ids = [files.special["bos"]] if special and files.add_bos and "bos" in files.special else []
        place = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() < place:
                continue
            token = added[match[0]]
            before, place = _stripped(text, place, match, token)
            ids += processor.encode(before) if before else []
            ids.append(token.id)
        return ids + (processor.encode(text[place:]) if text[place:] else [])

    def decode(ids: Sequence[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        texts_of = {token.id: token.content for token in files.added}
        for token in [*ids, None]:
            if token is None or token in own or token >= processor.get_piece_size():
                parts.append(processor.decode(run) if run else "")
                run = []
                parts.append("" if token is None else texts_of.get(token, f"[PAD{token}]"))
            else:
                run.append(token)
        return "".join(parts)

    return Codec(encode, decode, "sentencepiece on tokenizer.model, added tokens split out")


def _stripped(text: str, place: int, match: re.Match[str], token: AddedToken) -> tuple[str, int]:
    """The text before an added token and where the text after it begins, without the whitespace it swallows."""
    before, end = text[place : match.start()], match.end()
    if token.lstrip:
        before = before.rstrip()
    if token.rstrip:
        end += len(text[end:]) - len(text[end:].lstrip())
    return before, end
