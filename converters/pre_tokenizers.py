"""How a byte-level BPE tokenizer splits text before it merges, and llama.cpp's name for it.

    name = pre_tokenizers.recognised(tokenizer_json, path, notes)      # "gpt-4o" for Phi-4-mini

llama.cpp has the regular expressions in its code and a GGUF file only names them, so a tokenizer is recognised by the
expressions in its tokenizer.json; its vocabulary and class do not count. Refused: expressions that are not in the
table. The table comes from src/llama-vocab.cpp (its expressions, and the originals that its comments quote) and from
vocabularies that come with that source.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linnet_export import text
from linnet_export.errors import InputError
from linnet_export.tokenizer_files import flat

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FALLING = "".join(rf"|\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))

# llama.cpp's name, whether it takes a word that is a token whole before merging (ignore_merges), the expressions.
PRE_TOKENIZERS: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("gpt-2", False, (GPT2,)),
    # also starcoder, refact, command-r and others, which split alike
    ("smollm", False, (r"\p{N}", GPT2)),
    ("llama-bpe", True, (_LLAMA3,)),
    # cl100k, which Phi-4 has: in the form of tokenizer.json, and in tiktoken's
    ("dbrx", False, (_LLAMA3,)),
    (
        "dbrx",
        False,
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
            r"\s+(?!\S)|\s+",
        ),
    ),
    # o200k, which Phi-4-mini has
    ("gpt-4o", False, (rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}",)),
    ("qwen2", False, (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)),
    (
        "qwen35",
        False,
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    ("tekken", True, (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHES}",)),
    ("falcon", False, ("Punctuation(Contiguous)", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("deepseek-coder", False, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    (
        "deepseek-v3",
        False,
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    (
        "jais-2",
        False,
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
            rf"{_FALLING}|\s{{1}}",
        ),
    ),
    (
        "seed-coder",
        False,
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|"
            r"\s+(?!\S)|\s+",
        ),
    ),
    (
        "bailingmoe",
        False,
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
            r"\s+(?!\S)|\s+",
        ),
    ),
    ("minicpm5", True, (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_REST}")),
)

# Every name that llama.cpp accepts (tokenizer_pre in src/llama-vocab.cpp).
_NAMES = """
a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx deepseek-coder
deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon falcon-h1 falcon3 gemma4
gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m granite-embed-multi-97m grok-2
hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano
joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0
minerva-7b minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe
seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie tekken tiny_aya trillion ufakzeka
viking whitespace youtu
"""
NAMES = frozenset(_NAMES.split())
# Those with which llama.cpp adds the bos token unless the file says otherwise.
_ADDING_BOS = "chameleon falcon-h1 falcon3 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral tekken"
ADDING_BOS = frozenset(_ADDING_BOS.split())


def check(name: str) -> None:
    """Raises InputError for a name that llama.cpp does not have."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, sorted(NAMES), n=3, cutoff=0.4)
        hint = f", such as {', '.join(near)}" if near else ""
        raise InputError(f"--pre-tokenizer {name}: llama.cpp has none of this name; one that it has is needed{hint}")


def recognised(tokenizer: Mapping[str, Any], path: Path, notes: list[str]) -> str:
    """llama.cpp's name of the pre-tokenizer of a tokenizer.json; `path` names it in errors."""
    steps = _steps(tokenizer.get("pre_tokenizer"))
    whole = tokenizer["model"].get("ignore_merges") is True
    names = {ignores: name for name, ignores, expressions in PRE_TOKENIZERS if expressions == steps}
    if not names:
        raise InputError(
            f"{path} splits text by {' then by '.join(steps) or 'no expression'}, and llama.cpp's name for that is not "
            "known; say it with --pre-tokenizer NAME, where llama.cpp has one that splits alike"
        )
    if whole not in names:
        name = names[not whole]
        does = "takes a word that is a token whole" if whole else "merges every word"
        notes.append(f"this tokenizer {does} (ignore_merges is {text.shown(whole)}); llama.cpp with {name} does not")
        return name
    return names[whole]


def _steps(pre_tokenizer: object) -> tuple[str, ...]:
    """The expressions that a pre-tokenizer splits by; a step that is none stands as its own description."""
    steps: list[str] = []
    for step in flat(pre_tokenizer, "pretokenizers"):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Split" and isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
            regex = pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n")
            way = f"{step.get('behavior')}{', inverted' if step.get('invert') else ''}"
            # To remove what does not match is to isolate the matches, where an expression matches every text.
            whole = way == "Removed, inverted" and regex.endswith((r"|\s+", r"|\s{1}"))
            steps.append(regex if way == "Isolated" or whole else f"{regex} ({way})")
        elif kind == "Digits":
            steps.append(r"\p{N}" if step.get("individual_digits") is True else r"\p{N}+")
        elif kind == "Punctuation":
            steps.append(f"Punctuation({step.get('behavior', 'Isolated')})")
        elif kind == "ByteLevel":
            if step.get("add_prefix_space", True) is not False:
                steps.append("ByteLevel(add_prefix_space)")  # llama.cpp puts no space before the text
            if step.get("use_regex", True) is not False:
                steps.append(GPT2)
        else:
            steps.append(text.shown(step, 400))
    return tuple(steps)
