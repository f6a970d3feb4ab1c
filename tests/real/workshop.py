"""Models and exports that the tests of the real programs share: each is made once, below one folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import runtimes
import tiny
import trained_model
from linnet_export import gguf, hf
from linnet_export.reference.load import load
from linnet_export.reference.phi3 import Phi3

# Head sizes that vLLM's CPU attention has, windows shorter than the longest prompt, everything else pairwise different.
RANDOM: Mapping[str, dict[str, Any]] = {
    "equal": {
        "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 160,
        "vocab_size": 224, "sliding_window": 9, "tie_word_embeddings": False,
    },
    "grouped": {
        "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 144,
        "vocab_size": 256, "sliding_window": 11, "tie_word_embeddings": True,
    },
}  # fmt: skip

# Shorter than, equal to and longer than either window.
LENGTHS = (5, 9, 11, 31)


def prompts_of(name: str) -> tuple[tuple[int, ...], ...]:
    random = np.random.default_rng(len(name))
    return tuple(tuple(int(n) for n in random.integers(3, RANDOM[name]["vocab_size"], length)) for length in LENGTHS)


# What the tests measured, for the summary at the end of a run and for docs/measurements.md.
FIGURES: list[str] = []

QUESTION = "Explain in two sentences why the sky is blue."
STEPS = 64


class Workshop:
    """Builds sources and exports on first use, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Path] = {}
        self._engines: dict[str, runtimes.Engine] = {}
        self._references: dict[tuple[str, str], Phi3] = {}

    def _once(self, key: str, make: Callable[[Path], object]) -> Path:
        if key not in self._made:
            path = self.folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)
            self._made[key] = path
        return self._made[key]

    def source(self, name: str) -> Path:
        """The source of a model: equal and grouped are random, card and checkpoint the trained one."""
        if name in RANDOM:
            config = {
                **tiny.CONFIG, **RANDOM[name], "max_position_embeddings": runtimes.CONTEXT,
                "original_max_position_embeddings": runtimes.CONTEXT, "torch_dtype": "float32", "pad_token_id": None,
            }  # fmt: skip
            return self._once(
                f"{name}/source", lambda path: tiny.checkpoint(path, config, dtype="F32", tokenizer=False)
            )
        form: trained_model.Form = "card" if name == "card" else "checkpoint"
        return self._once(f"{name}/source", lambda path: trained_model.build(path, form=form, dtype="f32"))

    def hf(self, name: str) -> Path:
        """Its Hugging Face export, in f32."""
        tokenizer = "none" if name in RANDOM else None
        return self._once(f"{name}/hf", lambda path: hf.export(self.source(name), path, tokenizer=tokenizer))

    def gguf(self, name: str, outtype: str) -> Path:
        """Its GGUF export."""
        tokenizer = "none" if name in RANDOM else None
        return self._once(
            f"{name}/{outtype}.gguf",
            lambda path: gguf.export(self.source(name), path, outtype=outtype, tokenizer=tokenizer),
        )

    def engine(self, name: str, outtype: str = "f32") -> runtimes.Engine:
        """Its GGUF in llama.cpp."""
        path = self.gguf(name, outtype)
        if str(path) not in self._engines:
            self._engines[str(path)] = runtimes.Engine.open(path)
        return self._engines[str(path)]

    def reference(self, name: str, dtype: str = "f32") -> Phi3:
        """The reference, loaded from the source."""
        if (name, dtype) not in self._references:
            self._references[name, dtype] = load(self.source(name), dtype=dtype)  # type: ignore[arg-type]
        return self._references[name, dtype]

    def chat(self, question: str, *, system: str | None = None) -> list[int]:
        """A question in the trained model's own template and tokenizer, as token ids."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.source("checkpoint"))
        messages = [{"role": "user", "content": question}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
