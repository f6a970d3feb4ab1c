"""Times cached greedy decoding of the reference beside that of transformers, on the real trained model, in one run.

    python benchmarks/decode.py [--dtype f32 bf16] [--prompt 64] [--new 64] [--repeats 5] [--threads N] [--json FILE]

transformers runs with eager attention and a static cache, in the fastest loop that it has: one forward a token and no
`generate` around it. Both caches hold the prompt and the new tokens and no more. The two take turns at every token,
the first one each in turn as well, so that what else the machine does slows both; a figure is the median over all
tokens of all repeats. Needs linnet-export[dev].
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import trained_model
from linnet_export import reference

Decode = Callable[[Tensor, int], Iterator[int]]  # prompt [1, S] and count to the tokens, each computed when asked for


def of_reference(directory: Path) -> Decode:
    model = reference.load(directory)

    def decode(prompt: Tensor, new: int) -> Iterator[int]:
        length = prompt.shape[1]
        cache = model.cache(batch=1, max_seq=length + new)
        token = model.prefill(prompt, 0, cache).argmax(dim=-1, keepdim=True)
        yield int(token)
        for position in range(length, length + new):
            token = model.decode(token, position, cache).argmax(dim=-1, keepdim=True)
            yield int(token)

    return decode


def of_transformers(directory: Path, dtype: torch.dtype) -> Decode:
    from transformers import Phi3ForCausalLM, StaticCache

    model = Phi3ForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")

    def decode(prompt: Tensor, new: int) -> Iterator[int]:
        cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + new)
        token = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(dim=-1, keepdim=True)
        yield int(token)
        for _ in range(new):
            token = model(token, past_key_values=cache).logits[:, -1].argmax(dim=-1, keepdim=True)
            yield int(token)

    return decode


@torch.no_grad()
def measure(directory: Path, dtype: reference.Dtype, prompt: int, new: int, repeats: int) -> dict[str, Any]:
    """Milliseconds a token and tokens a second of both, and the reference's speed over transformers'."""
    sides = {"reference": of_reference(directory), "transformers": of_transformers(directory, reference.DTYPES[dtype])}
    tokens = torch.randint(1000, (1, prompt), generator=torch.Generator().manual_seed(0))
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        running = {name: decode(tokens, new) for name, decode in sides.items()}
        produced = {name: [next(steps)] for name, steps in running.items()}  # the prompt is not timed
        for number in range(new):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                started = time.perf_counter()
                produced[name].append(next(running[name]))
                if repeat:  # the first round warms up
                    taken[name].append(time.perf_counter() - started)
        if dtype == "f32" and produced["reference"] != produced["transformers"]:
            sys.exit("the two produce different tokens in f32: what they do is not the same")
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {
        "dtype": dtype,
        "ms_per_token": {name: 1000 * seconds for name, seconds in medians.items()},
        "tokens_per_s": {name: 1 / seconds for name, seconds in medians.items()},
        "ratio": medians["transformers"] / medians["reference"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16"], choices=list(reference.DTYPES))
    parser.add_argument("--prompt", type=int, default=64, help="tokens before those that are timed")
    parser.add_argument("--new", type=int, default=64, help="tokens timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch (default: what it takes)")
    parser.add_argument("--json", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    rows = []
    for dtype in arguments.dtype:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "model"
            trained_model.build(directory, form="checkpoint", dtype=dtype)
            row = measure(directory, dtype, arguments.prompt, arguments.new, arguments.repeats)
        rows.append(row)
        rates = row["tokens_per_s"]
        print(
            f"{dtype:<5} reference {rates['reference']:6.1f} tokens/s   transformers {rates['transformers']:6.1f} "
            f"tokens/s   ratio {row['ratio']:.2f}",
            flush=True,
        )
    if arguments.json:
        settings = {"prompt": arguments.prompt, "new": arguments.new, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({**settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
