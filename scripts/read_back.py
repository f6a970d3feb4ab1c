"""Asks a source and its exports one question through the reference, and says how far they agree.

    python scripts/read_back.py SOURCE EXPORT [EXPORT ...] --question TEXT [--steps 64]

SOURCE brings the tokenizer and the chat template. Exits with 1 if an export that rounds nothing differs.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from linnet_export.reference.compare import compare
from linnet_export.reference.load import load
from linnet_export.reference.phi3 import Phi3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("exports", type=Path, nargs="+")
    parser.add_argument("--question", required=True)
    parser.add_argument("--steps", type=int, default=64, help="tokens of the answer")
    arguments = parser.parse_args()
    source: Path = arguments.source

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    prompt = (
        ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        .from_string(settings["chat_template"])
        .render(
            messages=[{"role": "user", "content": arguments.question}],
            add_generation_prompt=True,
            bos_token=settings.get("bos_token", ""),
            eos_token=settings.get("eos_token", ""),
        )
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    end: int | None = tokenizer.token_to_id(settings["eos_token"])

    expected_logits, expected = answer(load(source), ids, arguments.steps)
    print(f"Q: {arguments.question}")
    print(textwrap.fill(f"A: {tokenizer.decode(until(expected, end))}", 80, subsequent_indent="   "))
    failed = False
    for export in arguments.exports:
        model = load(export)
        logits, tokens = answer(model, ids, arguments.steps)
        figures = compare(expected_logits, logits)
        same = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b), len(tokens))
        print(f"\n{export}")
        print(
            f"  logits of {figures.positions} positions: largest difference {figures.max_abs:.3g}, "
            f"KL {figures.kl_mean:.2g} nats"
        )
        print(
            f"  same next token at {figures.argmax_agreement:.1%} of positions; "
            f"{same} of {len(tokens)} answer tokens equal"
        )
        if same < len(tokens):
            print(
                textwrap.fill(
                    f"A: {tokenizer.decode(until(tokens, end))}", 78, initial_indent="  ", subsequent_indent="     "
                )
            )
        failed |= export.is_dir() and same < len(tokens)
    return int(failed)


def answer(model: Phi3, ids: list[int], steps: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt's positions `[S, Vocab]`, and the greedy tokens that follow."""
    with torch.no_grad():
        tokens = torch.tensor([ids])
        cache = model.cache(batch=1, max_seq=len(ids) + steps)
        first = model.prefill(tokens, 0, cache).argmax(-1, keepdim=True)
        rest = model.generate(first, len(ids), steps - 1, cache)
        return model(tokens)[0], torch.cat([first, rest], dim=1)[0].tolist()


def until(tokens: list[int], end: int | None) -> list[int]:
    """The tokens before the end token."""
    return tokens[: tokens.index(end)] if end is not None and end in tokens else tokens


if __name__ == "__main__":
    sys.exit(main())
