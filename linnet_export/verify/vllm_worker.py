"""Runs vLLM jobs in vLLM's own interpreter, without this package: `python vllm_worker.py JOBS.json OUT.npz`.

JOBS.json is a list, one load of an engine each: {"model", "dtype", "context", "tokens", "ends": [ids], "cache_gib",
"prompts": [{"ids": [ids], "positions": [positions], "whole": bool}]}. A whole prompt gives its distributions in one
pass (prompt_logprobs); of another one each position is the last of a prefix, with the distribution of the one token
that follows. OUT.npz, for prompt I of job J: `J/I/values` [positions, vocab] (log-probabilities, f32; absent without
positions), `J/I/tokens` (greedy); `version`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; read on the CPU only


def main(jobs_file: str, out_file: str) -> None:
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]  # it holds no module of vLLM's
    jobs = json.loads(Path(jobs_file).read_text())
    os.environ.update(SETTINGS)
    os.environ.setdefault(CPU_CACHE, str(max(job["cache_gib"] for job in jobs)))

    import numpy as np
    import vllm

    arrays = {"version": np.array(vllm.__version__)}
    for number, job in enumerate(jobs):
        arrays |= {f"{number}/{key}": values for key, values in answers(vllm, job).items()}
    np.savez(out_file, allow_pickle=False, **arrays)


def answers(vllm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The arrays of one job; its engine is released at the end."""
    import numpy as np

    engine = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["context"],
        max_num_batched_tokens=job["context"],
        max_num_seqs=2,
        max_logprobs=-1,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def run(ids: list[int], *, tokens: int, every: bool, prompt: bool = False) -> Any:
        sampling = vllm.SamplingParams(
            temperature=0,
            max_tokens=tokens,
            stop_token_ids=job["ends"],
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if every else None,
            prompt_logprobs=-1 if prompt else None,
        )
        [output] = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        return output

    def row(entry: dict[int, Any]) -> Any:
        values = np.full(max(entry) + 1, np.nan, np.float32)
        values[list(entry)] = [item.logprob for item in entry.values()]
        return values

    arrays = {}
    for i, prompt in enumerate(job["prompts"]):
        ids, positions = prompt["ids"], prompt["positions"]
        if prompt["whole"]:
            output = run(ids, tokens=1, every=True, prompt=True)
            # The first token of a prompt has no distribution; each later entry is the one that predicted it.
            entries = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
            rows = [row(entries[position]) for position in positions]
            del output, entries
        else:
            rows = [
                row(run(ids[: position + 1], tokens=1, every=True).outputs[0].logprobs[0]) for position in positions
            ]
        if rows:
            arrays[f"{i}/values"] = np.stack(rows)
        answer = run(ids, tokens=job["tokens"], every=False)
        arrays[f"{i}/tokens"] = np.array(answer.outputs[0].token_ids, np.int64)
    return arrays


if __name__ == "__main__":
    main(*sys.argv[1:])
