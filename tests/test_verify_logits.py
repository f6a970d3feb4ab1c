"""Logits, texts and the whole of `verify`, on random models, in the reference, transformers and a server's protocol."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import damage
import random_models
import tiny
from linnet_export import cli, gguf, hf, reference, verify
from linnet_export.model import open_model
from linnet_export.reference.compare import compare as reference_compare
from linnet_export.verify import bounds, expected, logits, output, prompts
from linnet_export.verify.at_endpoint import Endpoint
from linnet_export.verify.in_reference import Reference
from linnet_export.verify.in_transformers import Transformers
from linnet_export.verify.records import Prompt, VerificationError
from linnet_export.verify.runtimes import Outcome, Task
from linnet_export.verify.truth import Truth

SHORT = tuple(1.0 + i / 8 for i in range(8))
LONG = tuple(2.0 + i for i in range(8))
# Logits of a deviation that lets a largest one stand out: nearly uniform ones would hide what a greedy answer shows.
SPEC = random_models.Spec(context=512, window=24)
TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they bring in products this small, above all where others use the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "model"
    random_models.save(SPEC, directory)
    return directory


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported") / "hf"
    hf.export(source, directory, tokenizer="none")
    return directory


def task_of(source: Path, export: Path, **changes: Any) -> Task:
    model = open_model(source, tokenizer="none")
    made = Task(
        export=export, type="f32", prompts=prompts.shipped(model, tokens=TOKENS), tokens=TOKENS, ends=frozenset(),
        config=model.config,
    )  # fmt: skip
    return replace(made, **changes)


def result_of(outcome: Outcome, source: Path, task: Task, name: str = "transformers") -> verify.records.RuntimeResult:
    [theirs] = expected.expect(Truth(source), task, [outcome])
    codec = prompts.codec(open_model(source, tokenizer="none"))
    return logits.judge(name, outcome, theirs, task, codec, bounds.find(task.type, name))


# ---- the whole ------------------------------------------------------------------------------------------------------


def test_an_export_passes_in_the_reference_and_in_transformers(source: Path, exported: Path) -> None:
    told: list[str] = []
    report = verify.verify(
        exported, against=source, runtimes=("reference", "transformers"), tokens=TOKENS, tokenizer="none",
        progress=lambda what, _done, _total: told.append(what),
    )  # fmt: skip
    assert report.passed, report
    assert report.type == "Hugging Face F32"
    for runtime in report.runtimes:
        assert [figures.prompt for figures in runtime.prompts] == ["random 7", "random 16", "random 41", "random long"]
        assert sum(len(figures.positions) for figures in runtime.prompts) == 7 + 16 + 41 + 64
        assert [sample.agreeing_prefix for sample in runtime.samples] == [TOKENS] * 4
        assert all(sample.output == sample.reference for sample in runtime.samples)
        for figures in runtime.prompts:
            assert figures.perplexity == pytest.approx(figures.reference_perplexity, rel=1e-4)
    assert {"comparing weights", "running transformers", "the reference, layer by layer"} <= set(told)


def swapped(source: Path, directory: Path) -> Path:
    """The source with gate and up in each other's place in its second layer."""
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    damage.swap_halves(directory, "model.layers.1.mlp.gate_up_proj.weight")
    return directory


def test_gate_and_up_swapped_fail_in_weights_and_logits(source: Path, exported: Path, tmp_path: Path) -> None:
    other = swapped(source, tmp_path / "swapped")
    report = verify.verify(exported, against=other, runtimes=("transformers",), tokens=TOKENS, tokenizer="none")
    assert not report.passed
    [broken] = [check for check in report.weights if not check.passed]
    assert broken.name == "layers.1.mlp.gate_up.weight"
    [runtime] = report.runtimes
    assert not runtime.passed
    assert any("at position" in failure for failure in runtime.failures), runtime.failures


@pytest.mark.parametrize("setting", [{"sliding_window": 23}, {"sliding_window": 25}, {"rope_theta": 20000.0},
                                     {"rms_norm_eps": 1e-6}])  # fmt: skip
def test_a_wrong_setting_fails_in_logits(
    source: Path, exported: Path, tmp_path: Path, setting: dict[str, float]
) -> None:
    wrong = swapped(exported, tmp_path / "wrong")
    damage.swap_halves(wrong, "model.layers.1.mlp.gate_up_proj.weight")  # back again

    def edit(config: dict[str, Any]) -> None:
        config |= setting
        if "rope_theta" in setting:
            config["rope_parameters"] |= setting

    damage.edit_json(wrong / "config.json", edit)
    task = task_of(source, wrong)
    assert result_of(Transformers().run(task_of(source, exported)), source, task).passed
    result = result_of(Transformers().run(task), source, task)
    assert not result.passed
    assert all("position" in failure or "average" in failure or "token" in failure for failure in result.failures)


def test_what_cannot_be_asked_is_refused_before_anything_runs(source: Path, exported: Path, tmp_path: Path) -> None:
    def refused(**options: Any) -> tuple[str, ...]:
        with pytest.raises(VerificationError) as caught:
            verify.verify(options.pop("export", exported), against=source, tokenizer="none", **options)
        return caught.value.problems

    [line] = refused(runtimes=["torch"])
    assert line == "--runtime torch: no such runtime; known: reference, transformers, llama.cpp, vllm"
    [line] = refused(runtimes=["llama.cpp"])
    assert "it does not read a checkpoint directory" in line
    [line] = refused(runtimes=["vllm"], vllm_python=sys.executable)
    assert "vLLM is not installed in" in line
    assert "pip install vllm" in line
    [line] = refused(runtimes=["vllm"], vllm_python=tmp_path / "absent")
    assert "cannot be run (No such file or directory)" in line
    [line] = refused(endpoint="localhost:1")
    assert "a URL that begins with http:// or https:// is needed" in line
    [line] = refused(endpoint="http://127.0.0.1:9", runtimes=["reference"])
    assert "start a server first" in line
    assert any("--tokens 512: 1 to 511 are needed" in line for line in refused(tokens=512))
    [line] = refused(context=100, tokens=16)
    assert line == "--context 100: 316 are needed, for the longest prompt and 16 tokens of answer"


def test_a_runtime_that_is_not_installed_is_named_with_its_command(
    source: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINNET_EXPORT_VLLM_PYTHON", sys.executable)
    report = verify.verify(exported, against=source, tokens=4, tokenizer="none")
    by_name = {runtime.runtime: runtime for runtime in report.runtimes}
    assert list(by_name) == ["reference", "transformers", "vllm"]  # llama.cpp does not read directories
    assert "pip install vllm" in by_name["vllm"].skipped
    assert report.passed


def test_a_truncated_file_stops_before_the_runtimes(source: Path, tmp_path: Path) -> None:
    file = gguf.export(source, tmp_path / "m.gguf", outtype="f32", tokenizer="none").files[0]
    file.write_bytes(file.read_bytes()[:-4096])
    report = verify.verify(file, against=source, runtimes=["reference"], tokens=4, tokenizer="none")
    assert not report.passed
    assert any("it ends before" in finding.message for finding in report.structure if not finding.passed)
    assert [(runtime.runtime, runtime.skipped) for runtime in report.runtimes] == [
        ("reference", "the export's tensors cannot be read")
    ]


def test_a_runtime_that_breaks_fails_with_its_last_words(source: Path, exported: Path, tmp_path: Path) -> None:
    """An interpreter that says it has vLLM, and dies in the worker."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "no such device" >&2\nexit 3\n')
    python.chmod(0o755)
    report = verify.verify(exported, against=source, runtimes=["vllm"], vllm_python=python, tokens=4, tokenizer="none")
    assert not report.passed
    [runtime] = report.runtimes
    assert runtime.failures == ("vLLM exited with 3; the end of its output:\nno such device",)


def test_an_export_of_fewer_layers_is_compared_with_as_many(source: Path, tmp_path: Path) -> None:
    hf.export(source, tmp_path / "one", tokenizer="none", bind={"Layers": 1})
    report = verify.verify(
        tmp_path / "one", against=source, layers=1, runtimes=["transformers"], tokens=4, tokenizer="none"
    )
    assert report.passed, report
    whole = verify.verify(tmp_path / "one", against=source, runtimes=["transformers"], tokens=4, tokenizer="none")
    assert not whole.passed


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = (
        "import sys, linnet_export.verify, linnet_export.verify.output\n"
        "print([name for name in ('torch', 'transformers', 'llama_cpp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- what is compared -----------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_references_own_comparison() -> None:
    draw = np.random.default_rng(3)
    ours = draw.normal(0, 5, (23, 301)).astype(np.float32)
    theirs = ours + draw.normal(0, 0.3, ours.shape).astype(np.float32)
    prompt = Prompt("p", "", False, tuple(range(40)), tuple(range(10, 33)))
    made = logits.compare(prompt, prompt.positions, ours, theirs, "logits")
    other = reference_compare(torch.from_numpy(ours), torch.from_numpy(theirs))
    assert max(made.differences) == pytest.approx(other.max_abs, rel=1e-12)
    assert made.positions[made.differences.index(max(made.differences))] == 10 + other.worst
    assert made.mean_abs == pytest.approx(other.mean_abs, rel=1e-12)
    assert made.std == pytest.approx(other.std, rel=1e-9)
    assert made.argmax_agreement == other.argmax_agreement < 1
    assert (max(made.kl), np.mean(made.kl)) == pytest.approx((other.kl_max, other.kl_mean), rel=1e-9)
    rows = torch.from_numpy(ours).double().log_softmax(-1)
    surprise = [-float(rows[i, position + 1]) for i, position in enumerate(prompt.positions)]
    assert made.reference_perplexity == pytest.approx(math.exp(sum(surprise) / len(surprise)), rel=1e-12)


def test_log_probabilities_are_compared_as_such() -> None:
    ours = np.random.default_rng(4).normal(0, 5, (9, 101)).astype(np.float32)
    prompt = Prompt("p", "", False, tuple(range(9)), tuple(range(9)))
    theirs = torch.from_numpy(ours + 17).log_softmax(-1).numpy()
    assert max(logits.compare(prompt, prompt.positions, ours, theirs, "log-probabilities").differences) < 1e-5
    assert max(logits.compare(prompt, prompt.positions, ours, theirs, "logits").differences) > 10


def test_top_entries_and_the_remainder_bound_the_divergence_from_below() -> None:
    draw = np.random.default_rng(5)
    ours = draw.normal(0, 4, (31, 201)).astype(np.float32)
    theirs = torch.from_numpy(ours + draw.normal(0, 1, ours.shape).astype(np.float32)).log_softmax(-1).numpy()
    prompt = Prompt("p", "", False, tuple(range(31)), tuple(range(31)))
    whole = logits.compare(prompt, prompt.positions, ours, theirs, "log-probabilities")
    cut = np.where(theirs >= np.sort(theirs, axis=-1)[:, -20:-19], theirs, np.nan)
    assert np.isnan(cut).sum() == 31 * 181
    part = logits.compare(prompt, prompt.positions, ours, cut, "top entries")
    for less, more in zip(part.kl, whole.kl, strict=True):
        assert 0 < less <= more * (1 + 1e-9)
    assert part.argmax_agreement == whole.argmax_agreement
    every = logits.compare(prompt, prompt.positions, ours, theirs, "top entries")
    assert every.kl == pytest.approx(whole.kl, rel=1e-4)  # the rows sum to 1 in f32 only


def test_a_value_that_is_no_number_fails(source: Path, exported: Path) -> None:
    task = task_of(source, exported)
    good = Reference().run(task)
    rows = good.values[1].copy()
    rows[5, 3] = math.nan
    bad = replace(good, values=(good.values[0], rows, *good.values[2:]))
    result = result_of(bad, source, task)
    assert result.failures[0] == "random 16: not a number at position 5 (1 of 16 positions)"


def test_a_best_token_that_is_decidedly_another_fails(source: Path, exported: Path) -> None:
    task = task_of(source, exported)
    good = Reference().run(task)
    rows = good.values[0].copy()
    best, other = int(rows[2].argmax()), int(rows[2].argmin())
    rows[2, [best, other]] = rows[2, [other, best]]
    result = result_of(replace(good, values=(rows, *good.values[1:])), source, task)
    assert any("random 7: another best token at position 2" in failure for failure in result.failures)
    assert result.prompts[0].decided_disagreements == (2,)


def test_an_answer_that_leaves_the_references_choices_fails_at_that_token(source: Path, exported: Path) -> None:
    task = task_of(source, exported)
    good = Transformers().run(task)
    answer = list(good.greedy[2])
    answer[4] = (answer[4] + 1) % task.config.vocab
    wrong = replace(good, greedy=(*good.greedy[:2], tuple(answer), *good.greedy[3:]))
    result = result_of(wrong, source, task)
    assert [sample.agreeing_prefix for sample in result.samples] == [TOKENS, TOKENS, 4, TOKENS]
    assert result.samples[2].reference == result_of(good, source, task).samples[2].output
    assert any(failure.startswith("random 41: token 4 of the answer is") for failure in result.failures)


def test_the_references_answer_is_its_own_greedy_one(
    source: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it follows from the runtime's answer, or goes on from its first other token, or stops there."""
    task = task_of(source, exported)
    good = Transformers().run(task)
    own = Truth(source).greedy([prompt.ids for prompt in task.prompts], [TOKENS] * 4, ends=())
    off = replace(good, greedy=tuple((*answer[:3], (answer[3] + 1) % 200, *answer[4:]) for answer in good.greedy))
    for outcomes in ([good], [off], [good, off]):
        for found in expected.expect(Truth(source), task, outcomes):
            assert [one.answer for one in found] == own
            assert all(one.own for one in found)
    monkeypatch.setattr(Truth, "fits", lambda *_: False)
    [found] = expected.expect(Truth(source), task, [off])
    assert [one.answer for one in found] == [answer[:4] for answer in own]
    assert not any(one.own for one in found)


def test_answers_end_with_an_end_token(source: Path, exported: Path) -> None:
    task = task_of(source, exported)
    answer = Transformers().run(task).greedy[0]
    end = next(token for token in answer if answer.index(token) == answer.index(token) > 0)
    ended = replace(task, ends=frozenset({end}))
    for runtime in (Transformers(), Reference()):
        outcome = runtime.run(ended)
        assert outcome.greedy[0] == answer[: answer.index(end) + 1]
        sample = result_of(outcome, source, ended).samples[0]
        assert (sample.tokens, sample.agreeing_prefix) == (answer.index(end) + 1,) * 2
        assert sample.output == sample.reference
        assert str(end) not in sample.output.split()


def test_positions_past_the_window_do_not_count_where_a_runtime_ignores_it(source: Path, exported: Path) -> None:
    """An engine without the window, as llama.cpp is one for this architecture."""
    task = task_of(source, exported)
    ids = [prompt.ids for prompt in task.prompts]
    rows = reference.stream(source, ids, positions=[p.positions for p in task.prompts], dtype="f32", window=None)
    outcome = Outcome(
        version="", settings="", kind="logits", positions=tuple(p.positions for p in task.prompts),
        values=tuple(r.numpy() for r in rows), greedy=((1,) * TOKENS,) * 4, window=False,
    )  # fmt: skip
    [theirs] = expected.expect(Truth(source), task, [outcome])
    result = result_of(outcome, source, task)
    assert [figures.positions for figures in result.prompts] == [
        tuple(range(7)), tuple(range(16)), tuple(range(24)), tuple(p for p in task.prompts[3].positions if p < 24)
    ]  # fmt: skip
    assert not any("KL" in failure or "difference of" in failure for failure in result.failures), result.failures
    assert [bool(figures.excluded) for figures in result.prompts] == [False, False, True, True]
    assert "17 of 41 positions, from 24 on: the runtime ignores the window of 24" in result.prompts[2].excluded
    assert [len(one.best) for one in theirs] == [TOKENS, 24 - 16 + 1, 0, 0]  # what is predicted from 0 .. 23
    assert not result_of(replace(outcome, window=True), source, task).passed


# ---- longrope -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("longrope") / "model"
    spec = replace(SPEC, window=None, original_context=256, short_factors=SHORT, long_factors=LONG)
    random_models.save(spec, directory)
    return directory


@pytest.mark.parametrize("pinned", ["short", "long"])
def test_the_reference_is_pinned_to_the_factors_that_a_runtime_used(longrope: Path, pinned: Any) -> None:
    task = task_of(longrope, longrope)
    task = replace(task, prompts=task.prompts[:3])
    assert (task.factors_for(256), task.factors_for(512)) == ("short", "long")
    positions = tuple(prompt.positions for prompt in task.prompts)
    rows = Truth(longrope).logits([prompt.ids for prompt in task.prompts], positions, factors=pinned)
    outcome = Outcome(
        version="",
        settings="",
        kind="logits",
        positions=positions,
        values=tuple(rows),
        greedy=((),) * 3,
        factors=pinned,
    )
    assert result_of(outcome, longrope, task).passed
    other = replace(outcome, factors="long" if pinned == "short" else "short")
    assert not result_of(other, longrope, task).passed


def test_transformers_follows_the_length_of_the_sequence(longrope: Path, tmp_path: Path) -> None:
    """One prompt below the original length whose answer would cross it, one above."""
    hf.export(longrope, tmp_path / "hf", tokenizer="none")
    task = task_of(longrope, tmp_path / "hf")
    ids = task.prompts[3].ids
    edge = Prompt("edge", "", False, ids[:250], prompts.positions(250, ()))
    task = replace(task, prompts=(edge, task.prompts[3]))
    result = result_of(Transformers().run(task), longrope, task)
    assert result.passed, result.failures
    assert [sample.tokens for sample in result.samples] == [256 - 250 + 1, TOKENS]
    assert "follow the length of the sequence" in result.limits[0]


# ---- a served model -------------------------------------------------------------------------------------------------


@pytest.fixture
def served(source: Path) -> Iterator[Callable[..., str]]:
    """A server of the source's logits in the protocols of vLLM's and of llama.cpp's server, on loopback."""
    servers: list[ThreadingHTTPServer] = []

    def start(owner: str, *, wrong: bool = False) -> str:
        model = reference.load(source, dtype="f32", window="own" if owner == "vllm" else None)
        if wrong:
            model = model.variant(theta=20000.0)

        def answer(body: dict[str, Any]) -> dict[str, Any]:
            ids = list(body["prompt"])
            with torch.inference_mode():
                for _ in range(body["max_tokens"]):
                    rows = model(torch.tensor([ids]))[0].log_softmax(-1)
                    ids.append(int(rows[-1].argmax()))
                rows = model(torch.tensor([ids]))[0].log_softmax(-1)
            count = len(body["prompt"])
            top = [dict(zip(*(part.tolist() for part in row.topk(20)[::-1]), strict=True)) for row in rows]
            if owner == "vllm":
                told = [None] + [{str(k): {"logprob": v} for k, v in entry.items()} for entry in top[: count - 1]]
                first = [{f"token_id:{k}": v for k, v in entry.items()} for entry in top[count - 1 : -1]]
                return {"prompt_logprobs": told, "token_ids": ids[count:], "logprobs": {"top_logprobs": first}}
            steps = [
                {"id": token, "top_logprobs": [{"id": k, "logprob": v} for k, v in entry.items()]}
                for token, entry in zip(ids[count:], top[count - 1 :], strict=False)
            ]
            return {"logprobs": {"content": steps}}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listed = {"data": [{"id": "m", "owned_by": owner, "max_model_len": 512}]}
                self.reply(listed if self.path == "/v1/models" else {"default_generation_settings": {"n_ctx": 512}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply({"choices": [answer(body)]} if self.path == "/v1/completions" else {})

            def reply(self, value: dict[str, Any]) -> None:
                raw = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def short(task: Task) -> Task:
    return replace(task, prompts=task.prompts[:3], tokens=3)


def test_a_server_with_prompt_logprobs_is_compared_at_every_position(
    source: Path, exported: Path, served: Callable[..., str]
) -> None:
    task = short(task_of(source, exported))
    outcome = Endpoint(served("vllm")).run(task)
    result = result_of(outcome, source, task, "endpoint")
    assert result.passed, result.failures
    assert result.kind == "top entries"
    assert [len(figures.positions) for figures in result.prompts] == [7, 16, 41]
    assert [sample.agreeing_prefix for sample in result.samples] == [3, 3, 3]
    assert any("at most the true one" in limit for limit in result.limits)
    wrong = Endpoint(served("vllm", wrong=True)).run(task)
    assert not result_of(wrong, source, task, "endpoint").passed


def test_a_server_without_is_compared_at_the_last_position_and_within_the_window(
    source: Path, exported: Path, served: Callable[..., str]
) -> None:
    task = short(task_of(source, exported))
    outcome = Endpoint(served("llamacpp")).run(task)
    result = result_of(outcome, source, task, "endpoint")
    assert result.passed, result.failures
    assert [figures.positions for figures in result.prompts] == [(6,), (15,)]  # 40 is past the window of 24
    assert any("only the last position" in limit for limit in result.limits)
    assert any("ignores phi3's sliding window" in limit for limit in result.limits)


# ---- files and commands ---------------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: exit code, stdout, stderr."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["linnet-export", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return command


def test_the_command_passes_with_0_and_writes_what_is_asked(
    source: Path, exported: Path, tmp_path: Path, run: Run
) -> None:
    code, out, err = run(
        "verify", exported, "--against", source, "--runtime", "transformers,reference", "--tokens", 4, "--tokenizer",
        "none", "--report", tmp_path / "report", "--samples", tmp_path / "samples.json",
    )  # fmt: skip
    assert code == 0, (out, err)
    assert "passed" in out
    assert "transformers" in out
    assert "comparing weights" in err
    content = json.loads((tmp_path / "report/report.json").read_text())
    assert next(iter(content)) == "passed"
    assert content["passed"] is True
    assert (tmp_path / "report/report.html").read_text().startswith("<!doctype html>")
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert len(samples) == 8
    assert list(samples[0]) == [
        "kind", "prompt", "chat", "output", "reference", "reference_stack", "tokens", "agreeing_prefix"
    ]  # fmt: skip


def test_the_command_fails_with_1_and_says_where(source: Path, exported: Path, tmp_path: Path, run: Run) -> None:
    other = swapped(exported, tmp_path / "swapped")
    options = ("--against", source, "--runtime", "transformers", "--tokens", 4, "--tokenizer", "none")
    code, out, _ = run("verify", other, *options)
    assert code == 1
    assert "layers.1.mlp.gate_up.weight" in out
    code, out, _ = run("verify", other, *options, "--json")
    assert code == 1
    assert json.loads(out)["passed"] is False
    code, out, err = run("verify", tmp_path / "absent", *options)
    assert (code, out) == (1, "")
    assert "does not exist" in err


def test_an_export_verified_keeps_its_record_and_a_later_one_drops_it(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINNET_EXPORT_VLLM_PYTHON", sys.executable)  # has none
    for form, name in (("gguf", "model-F32.verify.json"), ("hf", "verify.json")):
        options: tuple[object, ...] = (form, source, "-o", tmp_path / form, "--tokenizer", "none")
        options += ("--outtype", "f32") if form == "gguf" else ()
        code, out, _ = run(*options, "--verify")
        assert code == 0, out
        record = tmp_path / form / name
        assert str(record) in out
        assert json.loads(record.read_text())["passed"] is True
        code, out, err = run(*options, "--force")  # a record is an export's own file
        assert code == 0, err
        assert not record.exists()


def test_a_report_is_strict_json(source: Path, exported: Path) -> None:
    report = verify.verify(exported, against=source, runtimes=["reference"], tokens=4, tokenizer="none")
    [runtime] = report.runtimes
    odd = replace(runtime, prompts=(replace(runtime.prompts[0], perplexity=math.nan, mean_abs=math.inf),))
    content = json.loads(output.report_json(replace(report, runtimes=(odd,))), parse_constant=pytest.fail)
    assert content["runtimes"][0]["prompts"][0]["perplexity"] is None


# ---- what the reference has no option for ---------------------------------------------------------------------------


def test_a_checkpoint_whose_weights_lie_elsewhere_is_verified(source: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "weights").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "config" / name).write_bytes((source / name).read_bytes())
    file = tmp_path / "weights/model.safetensors"
    file.write_bytes((source / "model.safetensors").read_bytes())
    for weights in (tmp_path / "weights", file):
        report = verify.verify(
            exported, against=tmp_path / "config", weights=weights, runtimes=["transformers"], tokens=4,
            tokenizer="none",
        )  # fmt: skip
        assert report.passed, report


def test_a_card_with_other_bindings_is_verified(tmp_path: Path) -> None:
    card = tiny.card(tmp_path / "card", dtype="F32", tokenizer=False, nest=tiny.NEST.replace('T = "bf16"', 'T = "f32"'))
    other = tmp_path / "other.json"
    (card / "bindings.json").rename(other)
    (card / "bindings.json").write_text("{}")  # of names that the file does not have
    options: dict[str, Any] = {"bindings": other, "tokenizer": "none"}
    hf.export(card, tmp_path / "hf", **options)
    report = verify.verify(tmp_path / "hf", against=card, runtimes=["transformers"], tokens=4, **options)
    assert report.passed, report
    with pytest.raises(VerificationError, match=r"--bind Vocab: .* only Layers, Batch, MaxSeq, T can be overridden"):
        verify.verify(tmp_path / "hf", against=card, bind={"Vocab": 90}, runtimes=["transformers"], **options)
