"""Real vocabularies, which come with llama.cpp's source: the rows of its files, and the keys of its own converter."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from test_tokenizer import SPLITS, split
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

import real_vocabularies
from linnet_export import tokenizer_files
from linnet_export.converters import pre_tokenizers as known
from linnet_export.converters import tokenizer

# How the tokenizers of these files split text, and the name that the converter gives, where ours is another of the
# same expressions.
DIGITS = SPLITS["smollm"]
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
VOCABULARIES: dict[str, tuple[Any, str]] = {
    "gpt-2": (SPLITS["gpt-2"], "gpt-2"),
    "llama-bpe": (SPLITS["dbrx"], "llama-bpe"),
    "qwen2": (SPLITS["qwen2"], "qwen2"),
    "qwen35": (split(QWEN35), "qwen35"),
    "starcoder": (DIGITS, "smollm"),
    "refact": (DIGITS, "smollm"),
    "falcon": (SPLITS["falcon"], "falcon"),
    "deepseek-coder": (SPLITS["deepseek-coder"], "deepseek-coder"),
}
# Those whose ids its converter knows without the tokens that their own files would add around a text.
CONVERTED = ("gpt-2", "starcoder", "falcon")

# Runs set_vocab of the converter on a directory, with no model around it; prints keys, types and values.
PEER = """
import json, sys
from pathlib import Path
source, folder, rows, kind = sys.argv[1:]
sys.path[:0] = [source + "/gguf-py", source]
import gguf
from conversion.phi import Phi3MiniModel
model, writer = object.__new__(Phi3MiniModel), gguf.GGUFWriter(None, "phi3")
model.dir_model, model.hparams, model.gguf_writer = Path(folder), {"vocab_size": int(rows)}, writer
(model._set_vocab_gpt2 if kind == "bpe" else model.set_vocab)()
text = lambda v: v.decode() if isinstance(v, bytes) else list(map(text, v)) if isinstance(v, (list, tuple)) else v
keys = [(k, int(v.type), text(v.value)) for k, v in writer.kv_data[0].items() if k.startswith("tokenizer")]
print(json.dumps(keys))
"""

Keys = list[list[Any]]


def peer(source: Path, folder: Path, rows: int, kind: str) -> Keys:
    command = [sys.executable, "-c", PEER, str(source), str(folder), str(rows), kind]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    keys: Keys = json.loads(done.stdout.splitlines()[-1])
    return keys


def ours(folder: Path, rows: int) -> tuple[tokenizer.Vocabulary, Keys]:
    files = tokenizer_files.find(folder)
    assert files is not None
    config = folder / "config.json"
    made = tokenizer.vocabulary(
        files, vocab_size=rows, config=json.loads(config.read_text()) if config.is_file() else {}
    )
    writer = GGUFWriter(folder / "unused.gguf", "phi3")
    tokenizer.to_gguf(made, writer)
    keys = [[k, int(v.type), plain(v.value)] for k, v in writer.kv_data[0].items() if k.startswith("tokenizer")]
    return made, keys


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def equal(mine: Keys, theirs: Keys, but: Iterable[str] = ()) -> None:
    assert [key for key, _, _ in mine] == [key for key, _, _ in theirs]
    for (key, kind, value), (_, their_kind, their_value) in zip(mine, theirs, strict=True):
        assert kind == their_kind, key
        assert value == their_value or key in but, key


def rebuild(file: Path, folder: Path, splits: Any) -> tuple[Tokenizer, dict[str, list[Any]]]:
    """Writes a vocabulary file of llama.cpp as the tokenizer.json that it was made from; returns it and its rows."""
    fields = GGUFReader(file).fields
    rows = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")}
    tokens, types = rows["tokens"], rows["token_type"]
    padding = 5
    vocab = {token: number for number, token in enumerate(tokens) if types[number] != padding}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ", 1)) for merge in rows["merges"]]))
    made.model.ignore_merges = file.name == "ggml-vocab-llama-bpe.gguf"
    made.pre_tokenizer = splits
    made.decoder, made.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    for number, kind in enumerate(types):
        if kind in (3, 4):
            made.add_tokens([AddedToken(tokens[number], normalized=kind == 4, special=kind == 3)])
    made.save(str(folder / "tokenizer.json"))
    names = {}
    for role in ("bos", "eos"):
        if field := fields.get(f"tokenizer.ggml.{role}_token_id"):
            names[f"{role}_token"] = tokens[field.contents()]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(tokens)}), encoding="utf-8")
    return made, rows


@pytest.mark.parametrize("name", VOCABULARIES)
def test_byte_level_vocabularies_are_the_rows_of_llama_cpps_files(
    llama_cpp_source: Path, tmp_path: Path, name: str
) -> None:
    file = llama_cpp_source / f"models/ggml-vocab-{name}.gguf"
    fast, rows = rebuild(file, tmp_path, VOCABULARIES[name][0])
    tokens, types = rows["tokens"], rows["token_type"]
    count = len(tokens)
    made, keys = ours(tmp_path, count + 37)
    assert [token.decode() for token in made.tokens[:count]] == tokens
    # the files of 2024 are older than the converter's rule that such a look makes an added token a control token
    looks = [
        kind == 4 and re.fullmatch("<[|｜].*[|｜]>|<pad>", token) for token, kind in zip(tokens, types, strict=True)
    ]
    assert list(made.types[:count]) == [3 if look else kind for look, kind in zip(looks, types, strict=True)]
    assert list(made.merges or ()) == rows["merges"]
    assert made.pre == VOCABULARIES[name][1]
    # the same split as the name's own: llama.cpp finds these ids under the name in the file
    for text, ids in real_vocabularies.pairs(file):
        assert fast.encode(text, add_special_tokens=False).ids == ids, text
    if name in CONVERTED:
        equal(keys, peer(llama_cpp_source, tmp_path, count + 37, "bpe"), but=("tokenizer.ggml.pre",))


@pytest.mark.parametrize("form", ["model", "json", "both"])
def test_phi3s_vocabulary_has_the_same_rows_in_every_form(llama_cpp_source: Path, tmp_path: Path, form: str) -> None:
    file = llama_cpp_source / "models/ggml-vocab-phi-3.gguf"
    for part in ("json", "model") if form == "both" else (form,):
        real_vocabularies.phi3_tokenizer(file, tmp_path, form=part)
    ids = {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32064, **ids}), encoding="utf-8")
    made, keys = ours(tmp_path, 32064)
    fields = GGUFReader(file).fields
    assert [token.decode() for token in made.tokens] == fields["tokenizer.ggml.tokens"].contents()
    assert list(made.scores or ()) == fields["tokenizer.ggml.scores"].contents()
    # the file is older than the converter, which called padding unknown then
    types = [{5: 2}.get(kind, kind) for kind in made.types]
    assert types == fields["tokenizer.ggml.token_type"].contents()
    assert made.notes == ()
    if form != "json":
        equal(keys, peer(llama_cpp_source, tmp_path, 32064, "spm"))


def test_the_names_of_pre_tokenizers_are_those_in_llama_cpps_source(llama_cpp_source: Path) -> None:
    source = (llama_cpp_source / "src/llama-vocab.cpp").read_text(encoding="utf-8")
    assert set(re.findall(r'tokenizer_pre == "([^"]+)"', source)) == known.NAMES
    chosen: dict[str, str] = {}
    for names, body in re.findall(r'((?:tokenizer_pre == "[^"]+"[\s|]*)+)\) \{([^}]*)\}', source):
        chosen |= dict.fromkeys(re.findall('"([^"]+)"', names), body)
    assert {name for name, body in chosen.items() if "add_bos = true" in body} == known.ADDING_BOS
    for name, whole, _ in known.PRE_TOKENIZERS:
        assert ("ignore_merges = true" in chosen[name]) is whole, name


def test_the_expressions_of_pre_tokenizers_are_those_in_llama_cpps_source(llama_cpp_source: Path) -> None:
    source = (llama_cpp_source / "src/llama-vocab.cpp").read_text(encoding="utf-8")
    literals = {
        re.sub(r"\\(.)", lambda match: {"r": r"\r", "n": r"\n"}.get(match[1], match[1]), literal)
        for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', source)
    }
    cased = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    missing = {
        (name, expression)
        for name, _, expressions in known.PRE_TOKENIZERS
        for expression in expressions
        if not {
            expression,
            expression.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", f"(?:{cased})"),
            expression.removesuffix(r"|\s+"),  # what is left over is a word there
        }
        & literals
    }
    # falcon's first step has no expression in a tokenizer.json; tiktoken's form of cl100k is not quoted
    assert sorted(name for name, _ in missing) == ["dbrx", "falcon"]


def test_the_ends_that_llama_cpp_finds_by_text_are_those_in_its_source(llama_cpp_source: Path) -> None:
    source = (llama_cpp_source / "src/llama-vocab.cpp").read_text(encoding="utf-8")
    part = source[source.index("special_eog_ids.clear();") :]
    part = part[: part.index("sanity checks")]
    ends = set(re.findall(r'\|\| t\.first == "([^"]+)"', part)) - {"<|message|>", "<|start|>", "<|constrain|>"}
    assert ends <= tokenizer.END_TEXTS
    fills = source[source.index("// find FIM_PAD token") : source.index("// auto-detect unused tokens")]
    assert tokenizer.END_TEXTS - ends == set(re.findall(r'\|\| t\.first == "([^"]+)"', fills)) - ends
