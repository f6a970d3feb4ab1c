"""Runs vLLM jobs in vLLM's own interpreter: `python vllm_jobs.py JOBS.json OUT.npz`.

JOBS.json is a list of jobs, one engine load each: {"name", "model", "dtype", "prompts": [[ids]], "generate": n,
"logprobs": bool}. OUT.npz gets, for job NAME and prompt I, `NAME/I/logprobs` [S - 1, vocab] (the distribution
after each position but the last, in f32), `NAME/I/last` [vocab] (after the last) and `NAME/I/tokens` [n] (greedy).
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def main(jobs_file: str, out_file: str) -> None:
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    arrays: dict[str, np.ndarray] = {}
    jobs = json.loads(Path(jobs_file).read_text())
    for job in jobs:
        engine = LLM(
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
        every = -1 if job["logprobs"] else None
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max(1, job["generate"]),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=every,
            logprobs=every,
        )
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
        for i, output in enumerate(outputs):
            key = f"{job['name']}/{i}/"
            if job["logprobs"]:
                # The first prompt token has no distribution; each later entry is the one that predicted it.
                arrays[key + "logprobs"] = np.stack([_row(entry) for entry in output.prompt_logprobs[1:]])
                arrays[key + "last"] = _row(output.outputs[0].logprobs[0])
            arrays[key + "tokens"] = np.array(output.outputs[0].token_ids[: job["generate"]], np.int64)
        del engine
    np.savez(out_file, allow_pickle=False, **arrays)


def _row(entry: "dict[int, object]") -> np.ndarray:
    row = np.full(max(entry) + 1, np.nan, np.float32)
    for token, item in entry.items():
        row[token] = item.logprob  # type: ignore[attr-defined]
    return row


if __name__ == "__main__":
    main(*sys.argv[1:])
