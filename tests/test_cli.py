"""The commands: what they print, how they exit, and that a refusal writes nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tiny
from linnet_export import __version__, cli
from tiny import edited

SCRIPTS = Path(sys.executable).parent


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "hf")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: exit code, stdout, stderr."""
    mains = {"linnet-export": cli.main, "linnet.gguf.export": cli.gguf_main, "linnet.hf.export": cli.hf_main}

    def command(name: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            mains[name]()
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return command


Run = Callable[..., tuple[int, str, str]]


def script(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs an installed console script."""
    return subprocess.run(
        [SCRIPTS / name, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_the_scripts_export_with_facts_on_stdout_only(hf: Path, tmp_path: Path) -> None:
    done = script("linnet.gguf.export", hf, "-o", tmp_path / "out/gguf", "--outtype", "bf16")
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path / "out/gguf/hf-BF16.gguf"
    assert file.is_file()
    assert (tmp_path / "out/gguf/Modelfile").is_file()
    for fact in ("15 tensors", str(file), f"llama-bench -m {file}", "ollama create"):
        assert fact in done.stdout
    done = script("linnet.hf.export", hf, "-o", tmp_path / "out/hf")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out/hf/model.safetensors").is_file()
    for fact in ("15 tensors", f"vllm serve {tmp_path / 'out/hf'}"):
        assert fact in done.stdout


def test_a_script_that_refuses_exits_1_with_one_line_and_no_traceback(hf: Path, tmp_path: Path) -> None:
    (hf / "model.safetensors").write_bytes(b"short")
    done = script("linnet-export", "gguf", hf, "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "model.safetensors" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_module_runs_as_the_script_does(hf: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "linnet_export", "inspect", hf, "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["architecture"] == "Phi3ForCausalLM"


def test_cached_weights_are_found_where_the_environment_says(tmp_path: Path) -> None:
    card = tiny.card(tmp_path / "card")
    nest = card / "nest.toml"
    nest.write_text(nest.read_text().replace("[weights]\n", '[weights]\nrepo = "example/tiny-phi"\n'))
    hub = tmp_path / "home/hub/models--example--tiny-phi"
    (hub / "snapshots/abc").mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("abc")
    (card / "model.safetensors").rename(hub / "snapshots/abc/model.safetensors")
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "home/hub")}
    done = script("linnet.hf.export", card, "-o", tmp_path / "out", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out/model.safetensors").is_file()


def test_help_imports_nothing_heavy() -> None:
    heavy = ["gguf", "huggingface_hub", "jinja2", "numpy", "safetensors", "sentencepiece", "tokenizers", "torch"]
    code = f"import sys; from linnet_export import cli; sys.exit(str([m for m in {heavy} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["gguf", "-h"], ["hf", "--help"], ["inspect", "-h"]])
def test_help_is_given(run: Run, arguments: list[str]) -> None:
    code, out, err = run("linnet-export", *arguments)
    assert (code, err) == (0, "")
    assert "Usage:" in out


@pytest.mark.parametrize(
    ("name", "fact"), [("linnet.gguf.export", "--outtype"), ("linnet.hf.export", "--max-shard-size")]
)
def test_the_dotted_scripts_have_the_options_of_linnet_s_converters(run: Run, name: str, fact: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    for option in (
        fact,
        "--name",
        "--weights",
        "--bindings",
        "--bind",
        "--tokenizer",
        "--force",
        "--dry-run",
        "--output",
    ):
        assert option in out


def test_the_version_is_told(run: Run) -> None:
    assert run("linnet-export", "--version") == (0, f"linnet-export {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["gguf"],
        ["gguf", "MODEL"],
        ["hf", "MODEL"],
        ["hf", "MODEL", "-o", "OUT", "--nothing"],
        ["gguf", "MODEL", "-o", "OUT", "--bind", "Layers"],
        ["gguf", "MODEL", "-o", "OUT", "--bind", "=2"],
        ["gguf", "MODEL", "-o", "OUT", "--bind", "Layers="],
        ["gguf", "MODEL", "-o", "OUT", "--threads", "0"],
        ["nothing"],
    ],
)
def test_wrong_usage_exits_2(run: Run, hf: Path, tmp_path: Path, arguments: list[str]) -> None:
    places = {"MODEL": str(hf), "OUT": str(tmp_path / "out")}
    code, out, err = run("linnet-export", *(places.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    assert err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["gguf", "hf"])
def test_a_dry_run_prints_tensors_and_keys_and_writes_nothing(run: Run, hf: Path, tmp_path: Path, command: str) -> None:
    for output in ([], ["-o", tmp_path / "out"]):
        code, out, err = run("linnet-export", command, hf, "--dry-run", *output)
        assert (code, err) == (0, "")
        lines = [line.split() for line in out.splitlines()]
        if command == "gguf":
            assert ["blk.1.attn_qkv.weight", "F16", "192", "x", "64", "24.6", "KB"] in lines
            assert ["output_norm.weight", "F32", "64", "256", "B"] in lines
            assert "phi3.attention.sliding_window = 47" in out
            assert "tokenizer.ggml.tokens = 90 values" in out
            assert "hf-F16.gguf: 15 tensors" in out
        else:
            assert ["model.layers.1.self_attn.qkv_proj.weight", "BF16", "192", "x", "64", "24.6", "KB"] in lines
            assert "sliding_window = 47" in out
            assert "1 weight file: 15 tensors" in out
        assert "nothing was written" in out
    assert tiny.listing(tmp_path) == ["hf"]


def test_a_dry_run_refuses_what_an_export_refuses(run: Run, hf: Path) -> None:
    (hf / "tokenizer.json").unlink()
    code, out, err = run("linnet-export", "hf", hf, "--dry-run")
    assert (code, out) == (1, "")
    assert "--tokenizer" in err


def test_options_reach_the_export(run: Run, tmp_path: Path) -> None:
    card = tiny.card(tmp_path / "card", tokenizer=False)
    weights = tmp_path / "weights"
    weights.mkdir()
    (card / "model.safetensors").rename(weights / "model.safetensors")
    bindings = tmp_path / "bindings.json"
    (card / "bindings.json").rename(bindings)
    (card / "nest.toml").write_text((card / "nest.toml").read_text().replace('bindings = "bindings.json"\n', ""))
    common = ["--weights", weights, "--bindings", bindings, "--bind", "Layers=1", "--bind", "MaxSeq=8", "--name", "cut"]
    code, out, err = run(
        "linnet.gguf.export",
        card,
        *common,
        "--tokenizer",
        "none",
        "--outtype",
        "Q8_0",
        "-o",
        tmp_path / "a",
        "--threads",
        1,
    )
    assert (code, err) == (0, "")
    assert "layer 1" in out
    assert "no tokenizer" in out
    assert (tmp_path / "a/cut-Q8_0.gguf").is_file()
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    tiny.byte_level_tokenizer(tokenizer, 90)
    code, _, err = run(
        "linnet.hf.export", card, *common, "--tokenizer", tokenizer, "--dtype", "F32", "--max-shard-size", "30KB",
        "--output", tmp_path / "b",
    )  # fmt: skip
    assert (code, err) == (0, "")
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert (config["num_hidden_layers"], config["dtype"], config["max_position_embeddings"]) == (1, "float32", 128)
    assert (tmp_path / "b/tokenizer.json").is_file()
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 1


def test_the_next_command_can_be_pasted(run: Run, hf: Path, tmp_path: Path) -> None:
    _, out, _ = run("linnet-export", "hf", hf, "-o", tmp_path / "my models")
    assert f"vllm serve '{tmp_path / 'my models'}'" in out


def test_an_existing_output_is_refused_and_force_replaces_it(run: Run, hf: Path, tmp_path: Path) -> None:
    for command, output in (("gguf", tmp_path / "g"), ("gguf", tmp_path / "x.gguf"), ("hf", tmp_path / "h")):
        assert run("linnet-export", command, hf, "-o", output)[0] == 0
        code, out, err = run("linnet-export", command, hf, "-o", output)
        assert (code, out) == (1, "")
        assert "--force" in err
        assert run("linnet-export", command, hf, "-o", output, "--force")[0] == 0


def test_several_problems_are_counted_and_listed(run: Run, hf: Path, tmp_path: Path) -> None:
    (hf / "config.json").write_text(json.dumps(edited("vocab_size", "rope_theta", rms_norm_eps="x")))
    code, out, err = run("linnet-export", "hf", hf, "-o", tmp_path / "out")
    lines = err.splitlines()
    assert (code, out) == (1, "")
    assert "3 problems" in lines[0]
    assert len(lines) == 4
    assert all(line.startswith("  - ") for line in lines[1:])


# Every kind of bad input, as a user meets it.


def config(**values: Any) -> Callable[[Path], object]:
    return lambda model: (model / "config.json").write_text(json.dumps(edited(**values)))


def weights(change: Callable[[dict[str, np.ndarray]], object], dtype: str = "BF16") -> Callable[[Path], object]:
    def apply(model: Path) -> None:
        tensors = tiny.weights(tiny.CONFIG)
        change(tensors)
        tiny.save(model / "model.safetensors", {name: np.ascontiguousarray(v) for name, v in tensors.items()}, dtype)

    return apply


def leftovers(model: Path) -> None:
    tensors = {name: torch.from_numpy(values).bfloat16() for name, values in tiny.weights(tiny.CONFIG).items()}
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.zeros(1, 2560, dtype=torch.uint8)
    tensors[name.replace("weight", "SCB")] = torch.zeros(64)
    save_file(tensors, model / "model.safetensors")


def index(weight_map: dict[str, str]) -> Callable[[Path], object]:
    return lambda model: (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


DOWN = "model.layers.1.mlp.down_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda m: (m / "config.json").unlink(), ["config.json", "nest.toml"]),
    "broken config": (lambda m: (m / "config.json").write_text("{"), ["config.json", "not valid JSON", "line 1"]),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "empty weights": (lambda m: (m / "model.safetensors").write_bytes(b""), ["model.safetensors", "download it again"]),
    "cut weights": (
        lambda m: (m / "model.safetensors").write_bytes((m / "model.safetensors").read_bytes()[:-1]),
        ["model.safetensors", "outside", "download it again"],
    ),
    "pickle": (pickle, ["pytorch_model.bin", "pickle", "SafeTensors"]),
    "index outside": (index({"a": "../x.safetensors"}), ["../x.safetensors", "inside the directory"]),
    "index without its shard": (index({"a": "x.safetensors"}), ["x.safetensors", "not there", "download"]),
    "index that disagrees": (index({"a": "model.safetensors"}), ["lacks 1 tensor (a)", "holds 15 tensors"]),
    "missing tensor": (weights(lambda t: t.pop(DOWN)), ["missing 1 tensor", DOWN]),
    "unknown tensor": (weights(lambda t: t.update(extra=t[DOWN])), ["extra", "does not have"]),
    "no head": (weights(lambda t: t.pop("lm_head.weight")), ["missing 1 tensor", "lm_head.weight"]),
    "transposed": (weights(lambda t: t.update({DOWN: t[DOWN].T})), [DOWN, "[80, 64]", "[64, 80]", "transposed"]),
    "more rows": (config(vocab_size=89), ["[90, 64]", "[89, 64]"]),
    "quantized leftovers": (leftovers, ["U8", "16 bits", "SCB"]),
    "quantized config": (config(quantization_config={"quant_method": "awq"}), ["awq", "16 bits"]),
    "look-alike": (config(architectures=["Phi3SmallForCausalLM"]), ["Phi3SmallForCausalLM", "Phi3ForCausalLM"]),
    "linear scaling": (config(rope_scaling={"type": "linear", "factor": 2.0}), ["linear", "longrope"]),
    "longrope without short": (config(rope_scaling={"type": "longrope", "long_factor": [1.0] * 8}), ["short_factor"]),
    "heads": (config(num_attention_heads=5, num_key_value_heads=5), ["64", "5 heads"]),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), ["tokenizer.json", "--tokenizer"]),
    "token id": (config(eos_token_id=90), ["eos", "90 rows"]),
    "nan": (weights(lambda t: t[DOWN].__setitem__((63, 7), np.nan)), [DOWN, "nan at [63, 7]", "--allow-nonfinite"]),
}  # fmt: skip


@pytest.mark.parametrize("command", ["gguf", "hf"])
@pytest.mark.parametrize(("breaks", "facts"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_its_facts_and_nothing_is_written(
    run: Run, hf: Path, tmp_path: Path, command: str, breaks: Callable[[Path], object], facts: list[str]
) -> None:
    breaks(hf)
    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    code, out, err = run("linnet-export", command, hf, "-o", tmp_path / "new/out")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    for fact in facts:
        assert fact in err
    assert tiny.listing(tmp_path) == ["hf"]
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before


CARD: dict[str, tuple[tuple[str, str], list[str]]] = {
    "unknown generic": (("Vocab = 90", "Vocab = 90\nDepth = 2"), ["Depth", "no such generic"]),
    "float generic": (("Vocab = 90", "Vocab = 90.5"), ["Vocab", "90.5", "integer"]),
    "constraint": (("Heads = 4", "Heads = 5"), ["H % Heads"]),
    "broken toml": (("[model]", "[model"), ["nest.toml", "not valid TOML"]),
    "bindings outside": (('"bindings.json"', '"../b.json"'), ["../b.json", "outside"]),
    "missing weights": (('"model.safetensors"', '"gone.safetensors"'), ["gone.safetensors", "--weights"]),
    "type": (('"bf16"', '"f32"'), ["T is f32", "BF16", "--outtype", "--dtype"]),
}


@pytest.mark.parametrize(("change", "facts"), CARD.values(), ids=CARD)
def test_a_bad_card_is_refused_with_its_facts_and_nothing_is_written(
    run: Run, tmp_path: Path, change: tuple[str, str], facts: list[str]
) -> None:
    card = tiny.card(tmp_path / "card")
    nest = card / "nest.toml"
    content = nest.read_text()
    assert content.count(change[0]) == 1
    nest.write_text(content.replace(*change))
    code, out, err = run("linnet.gguf.export", card, "-o", tmp_path / "new/out")
    assert (code, out) == (1, "")
    for fact in facts:
        assert fact in err
    assert tiny.listing(tmp_path) == ["card"]


@pytest.mark.parametrize("bind", ["T=f32", "Layers=3", "Depth=1", "Layers=x", "H=62"])
def test_a_bind_that_cannot_be_is_refused(run: Run, tmp_path: Path, bind: str) -> None:
    card = tiny.card(tmp_path / "card")
    code, _, err = run("linnet.hf.export", card, "-o", tmp_path / "out", "--bind", bind)
    assert code == 1
    assert bind.split("=")[0] in err
    assert tiny.listing(tmp_path) == ["card"]


def test_nonfinite_values_pass_where_they_are_allowed(run: Run, hf: Path, tmp_path: Path) -> None:
    weights(lambda t: t[DOWN].__setitem__((63, 7), np.inf))(hf)
    assert run("linnet-export", "hf", hf, "-o", tmp_path / "out", "--allow-nonfinite")[0] == 0


def test_inspect_prints_what_a_model_is(run: Run, hf: Path, tmp_path: Path) -> None:
    card = tiny.card(tmp_path / "card")
    assert run("linnet-export", "gguf", hf, "-o", tmp_path / "x.gguf")[0] == 0
    for path, facts in (
        (hf, ["Hugging Face checkpoint", "Phi3ForCausalLM", "model.layers.1.mlp.down_proj.weight"]),
        (card, ["Linnet card", "tiny-phi", "layers.1.mlp.down.weight"]),
        (tmp_path / "x.gguf", ["GGUF file", "blk.1.ffn_down.weight"]),
    ):
        code, out, err = run("linnet-export", "inspect", path)
        assert (code, err) == (0, "")
        for fact in [*facts, "64 x 80", "<|end|>", "chat template: none"]:
            assert fact in out
        code, out, err = run("linnet-export", "inspect", path, "--json")
        assert (code, err) == (0, "")
        assert len(json.loads(out)["tensors"]) == 15
    code, out, err = run("linnet-export", "inspect", tmp_path / "gone")
    assert (code, out) == (1, "")
    assert "does not exist" in err
