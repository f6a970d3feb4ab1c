"""What a runtime is asked and what it gives back; each one is a module of its own (`in_*.py`, `at_endpoint.py`).

    runtime = in_llama_cpp.LlamaCpp()
    if runtime.takes(export) and runtime.unavailable() is None:
        outcome = runtime.run(Task(export=export, ...))

A runtime only runs: what its figures mean, and which positions count, is decided in `logits`.
"""

import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from linnet_export import phi3
from linnet_export.verify.records import Prompt, VerificationError

Rows = npt.NDArray[np.float32]
Kind = Literal["logits", "log-probabilities", "top entries"]
Factors = Literal["short", "long"]

INSTALL = "pip install 'linnet-export[verify]'"
CONTEXT_STEP = 256  # llama.cpp rounds its context up to a multiple of this; the others get the same
OUTPUT_KEPT = 3000  # characters of a failed program's last words


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An export and what to run on it.

    `type` is the export's (f32, bf16, f16, q8_0 or another GGUF type). Greedy answers have up to `tokens` tokens and
    stop after one of `ends`. `config` is the source's. `context` is asked for by the user, None: what it takes.
    """

    export: Path
    type: str
    prompts: tuple[Prompt, ...]
    tokens: int
    ends: frozenset[int]
    config: phi3.Config
    context: int | None = None

    @property
    def length(self) -> int:
        """Positions that the longest prompt and its answer take."""
        return max(len(prompt.ids) for prompt in self.prompts) + self.tokens

    @property
    def rounded_context(self) -> int:
        """The context to ask for: what was asked for, else `length` rounded up."""
        return self.context or math.ceil(self.length / CONTEXT_STEP) * CONTEXT_STEP

    def factors_for(self, context: int) -> Factors | None:
        """longrope's set in a runtime that picks it by the size of its context; None without longrope."""
        rope = self.config.rope
        if not rope.is_long:
            return None
        return "long" if context > rope.original_context else "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a runtime gave. For prompt i, `values[i]` is `[len(positions[i]), vocab]`: logits, or log-probabilities
    with NaN where an entry was not given. `factors` is the longrope set that it used throughout, None if it has none
    or picks by the length of the sequence, as the reference does. `window` is false if it ignores the model's."""

    version: str
    settings: str
    kind: Kind
    positions: tuple[tuple[int, ...], ...]
    values: tuple[Rows, ...]
    greedy: tuple[tuple[int, ...], ...]
    factors: Factors | None = None
    window: bool = True
    limits: tuple[str, ...] = ()
    seconds: float = 0.0


class Runtime(Protocol):
    """A program that an export is made for."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str | None:
        """Why it cannot run here and the command that installs it; None if it can."""

    def takes(self, export: Path) -> bool:
        """Whether it reads exports of this form."""

    def run(self, task: Task) -> Outcome:
        """Loads the export and runs every prompt. VerificationError, with the end of its output, if it breaks."""


def is_gguf(export: Path) -> bool:
    return export.suffix == ".gguf" or export.is_file()


def is_checkpoint(export: Path) -> bool:
    return export.is_dir()


def torch_dtype(kind: str) -> str:
    """The name of the torch type to compute an export of a type in: its own; f32 for what torch has no type for."""
    return {"bf16": "bfloat16", "f16": "float16"}.get(kind, "float32")


def longrope_limit(task: Task, context: int) -> tuple[str, ...]:
    """The sentence for a runtime that picks longrope's factors by the size of its context."""
    factors = task.factors_for(context)
    if factors is None:
        return ()
    relation = "above" if factors == "long" else "at most"
    return (
        f"longrope: the {factors} factors from the first token on, for its context of {context} is {relation} the "
        f"original {task.config.rope.original_context}; the reference is pinned to the same set",
    )


def spread(positions: Sequence[int], count: int, edge: int | None) -> tuple[int, ...]:
    """`count` of a prompt's positions: the last, the two sides of the edge if it is among them, the rest even."""
    if len(positions) <= count:
        return tuple(positions)
    chosen = {positions[-1], *(p for p in positions if edge is not None and p in (edge - 1, edge))}
    rest = [p for p in positions if p not in chosen]
    free = max(0, count - len(chosen))
    chosen |= {rest[(2 * i + 1) * len(rest) // (2 * free)] for i in range(free)}
    return tuple(sorted(chosen))


def run_program(command: Sequence[str | Path], label: str, environment: Mapping[str, str]) -> None:
    """Runs a program to its end. VerificationError with the end of its output if it fails."""
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, **environment}, check=False,
            )  # fmt: skip
        except OSError as error:
            raise VerificationError(f"{label}: {command[0]} cannot be run: {error.strerror or error}") from None
        if done.returncode:
            output.seek(0)
            tail = output.read().decode("utf-8", "replace")[-OUTPUT_KEPT:].strip()
            raise VerificationError(f"{label} exited with {done.returncode}; the end of its output:\n{tail}")
