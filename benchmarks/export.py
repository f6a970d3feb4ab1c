"""Times exports of a synthetic Phi-3-mini-4k at its published shapes beside llama.cpp's converter, in one run.

    python benchmarks/export.py FOLDER [--layers 32] [--outtype bf16 ...] [--json FILE]

FOLDER gets the checkpoint (7.64 GB at 32 layers, seeded; kept and reused) and each output in turn (removed).
Prints wall time and peak memory of each job; the converter is found as the tests find it. Peak memory is the
largest resident set of the process (ru_maxrss), pages of mapped files included.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests/real")]

import real_vocabularies  # noqa: E402
import runtimes  # noqa: E402
from linnet_export import hf_config, phi3  # noqa: E402

SHARD = 5_000_000_000
PUBLISHED: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072,
    "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 8192, "num_hidden_layers": 32,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": 2047, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip


def synthesize(folder: Path, layers: int, vocabulary: Path) -> None:
    """A checkpoint of seeded bf16 weights of standard deviation 0.02, in shards of at most 5 GB."""
    done = folder / "complete"
    if done.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = {**PUBLISHED, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    real_vocabularies.phi3_tokenizer(vocabulary, folder, form="model")
    shards: list[list[phi3.Tensor]] = [[]]
    filled = 0
    for tensor in phi3.tensors(hf_config.read(config, "the published shapes")):
        nbytes = 2 * int(np.prod(tensor.shape))
        if filled + nbytes > SHARD:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += nbytes
    # One pool of values, read from a different place for each tensor: drawing 3.8 billion would take minutes.
    pool = (np.random.default_rng(0).normal(0, 0.02, 40_000_003).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    weight_map, total = {}, 0
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        table: dict[str, Any] = {}
        offset = 0
        for tensor in shard:
            nbytes = 2 * int(np.prod(tensor.shape))
            table[tensor.hf] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + nbytes]}
            weight_map[tensor.hf] = name
            offset += nbytes
        raw = json.dumps(table).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for number, tensor in enumerate(shard):
                count = int(np.prod(tensor.shape))
                start = (number * 7_919_001) % len(pool)
                while count:
                    part = pool[start : start + count]
                    file.write(part.data)
                    count -= len(part)
                    start = 0
        total += offset
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    done.touch()


# Runs a command and prints its figures. A process of its own, because a child's ru_maxrss starts at what its parent
# had resident when it was started: this one holds next to nothing.
LAUNCHER = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
wall = time.perf_counter() - started
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss * 1024 / 1e6}))
sys.exit(done.returncode)
"""


def measured(command: list[str | Path]) -> dict[str, float]:
    """Wall seconds, processor seconds and peak memory in MB of a command."""
    words = [sys.executable, "-S", "-c", LAUNCHER, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--outtype", nargs="+", default=["bf16", "f16", "q8_0"], help="GGUF types to time")
    parser.add_argument("--json", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    llama_cpp = runtimes.LlamaCpp(runtimes.cache_folder() / f"llama.cpp-{runtimes.pinned('llama-cpp-python')}")
    source = arguments.folder / f"source-{arguments.layers}"
    synthesize(source, arguments.layers, llama_cpp.source / "models/ggml-vocab-phi-3.gguf")

    rows: list[dict[str, Any]] = []
    for job in [*arguments.outtype, "hf"]:
        out = arguments.folder / "out"
        tools: dict[str, list[str | Path]] = {"linnet-export": [sys.executable, "-m", "linnet_export"]}
        if job == "hf":
            tools["linnet-export"] += ["hf", source, "-o", out / "hf"]
        else:
            tools["linnet-export"] += ["gguf", source, "-o", out / "ours.gguf", "--outtype", job]
            script = llama_cpp.source / "convert_hf_to_gguf.py"
            tools["convert_hf_to_gguf.py"] = [
                sys.executable,
                script,
                source,
                "--outfile",
                out / "theirs.gguf",
                "--outtype",
                job,
            ]
        for tool, command in tools.items():
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            rows.append({"job": job, "tool": tool, **measured(command)})
            row = rows[-1]
            print(
                f"{job:<6} {tool:<22} {row['wall_s']:7.1f} s  {row['cpu_s']:7.1f} s cpu  {row['peak_mb']:7.0f} MB peak",
                flush=True,
            )
        shutil.rmtree(out, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"layers": arguments.layers, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
