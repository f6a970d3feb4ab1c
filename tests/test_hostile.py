"""Input that is damaged, hostile or absurd, through the real command: one message, exit code 1, nothing written."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny

COMMANDS = ("gguf", "hf")


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "linnet_export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(source: Path, output: Path, *facts: str, commands: tuple[str, ...] = COMMANDS) -> None:
    for command in commands:
        done = run(command, source, "-o", output)
        assert done.returncode == 1, (command, done.stdout)
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        for fact in facts:
            assert fact in done.stderr
        assert done.stdout == ""
        assert sorted(p.name for p in output.parent.iterdir()) == [source.name]


def dangling(name: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to("../gone")

    return change


def fifo(name: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        os.mkfifo(source / name)

    return change


def folder(name: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        (source / name).mkdir()

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda source: edit(source / "config.json", **changes)


def written(name: str, content: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).write_text(content)

    return change


def added_token(source: Path) -> None:
    path = source / "tokenizer.json"
    entry = {"id": 95, "content": "zz", "special": True}
    edit(path, added_tokens=[*json.loads(path.read_text())["added_tokens"], entry])


CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a link to a missing tokenizer_config": (dangling("tokenizer_config.json"), ("missing", "tokenizer_config.json")),
    "a link to a missing generation_config": (dangling("generation_config.json"), ("missing",)),
    "a link to a missing index": (dangling("model.safetensors.index.json"), ("missing",)),
    "a link to missing weights": (dangling("model.safetensors"), ("missing",)),
    "a directory for a tokenizer file": (folder("tokenizer_config.json"), ("not a regular file",)),
    "a pipe for weights": (fifo("model.safetensors"), ("not a regular file",)),
    "a pipe for a config": (fifo("config.json"), ("not a regular file",)),
    "two billion layers": (config(num_hidden_layers=2**31 - 1), ("512",)),
    "theta beyond f32": (config(rope_theta=1e300), ("rope theta", "1e+300")),
    "theta below f32": (config(rope_theta=1e-300), ("rope theta", "1e-300")),
    "epsilon below f32": (config(rms_norm_eps=1e-300), ("epsilon", "1e-300")),
    "an original context beyond 32 bits": (config(original_max_position_embeddings=2**33), ("8589934592",)),
    "a context beyond 32 bits": (config(max_position_embeddings=2**33), ("8589934592",)),
    "a negative end token": (config(eos_token_id=-1), ("eos", "-1", "90")),
    "an end token past the rows": (config(eos_token_id=90), ("eos", "90")),
    "more tokens than rows": (added_token, ("96", "90", "--tokenizer")),
    "a lone surrogate in a template": (
        lambda source: edit(source / "tokenizer_config.json", chat_template="\ud800"),
        ("not Unicode text", "tokenizer_config.json"),
    ),
    "a lone surrogate in a generation config": (
        written("generation_config.json", '{"\\ud800": 1}'),
        ("not Unicode text",),
    ),
    "token ids that are none": (
        written("generation_config.json", '{"bos_token_id": "x"}'),
        ("bos_token_id", "an integer"),
    ),
    "an id of 5000 digits": (
        lambda source: edit(source / "tokenizer_config.json", added_tokens_decoder={"9" * 5000: {"content": "x"}}),
        ("added_tokens_decoder",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_refused_with(tmp_path: Path, case: str) -> None:
    source = tiny.checkpoint(tmp_path / "source")
    change, facts = CASES[case]
    change(source)
    refused(source, tmp_path / "out", *facts)


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("Layers = 2", "Layers = 2000000000", ("Layers", "512")),
        ("MaxSeq = 128", "MaxSeq = 4294967296", ("MaxSeq", "4294967296")),
        ('name = "tiny-phi"', f'name = "{"n" * 300}"', ("name", "--name")),
        ('files = ["model.safetensors"]', f'files = ["{"f" * 300}"]', ("too long",)),
        ('bindings = "bindings.json"', 'bindings = ""', ("bindings",)),
        ('path = "src/lib.linnet"', 'path = "\\u0000"', ("[source] path",)),
    ],
)
def test_a_card_is_refused_with(tmp_path: Path, old: str, new: str, facts: tuple[str, ...]) -> None:
    assert old in tiny.NEST
    source = tiny.card(tmp_path / "source", nest=tiny.NEST.replace(old, new))
    refused(source, tmp_path / "out", *facts)


@pytest.mark.parametrize("constant", [{"theta": "1e+39"}, {"window": "99999999999"}])
def test_a_card_is_refused_with_a_constant_that_no_file_holds(tmp_path: Path, constant: dict[str, Any]) -> None:
    refused(tiny.card(tmp_path / "source", **constant), tmp_path / "out", next(iter(constant.values()))[:3])


def test_a_loop_of_links_is_an_error_not_a_crash(tmp_path: Path) -> None:
    source = tiny.card(tmp_path / "source")
    (source / "src/lib.linnet").unlink()
    (source / "src/lib.linnet").symlink_to("lib.linnet")
    refused(source, tmp_path / "out", "lib.linnet")
    (tmp_path / "loop").symlink_to("loop")
    good = tiny.checkpoint(tmp_path / "good")
    for output in (tmp_path / "loop", tmp_path / "loop/x"):
        done = run("hf", good, "-o", output)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)


@pytest.mark.parametrize("command", COMMANDS)
def test_names_too_long_for_a_file_system_are_errors(tmp_path: Path, command: str) -> None:
    source, long = tiny.checkpoint(tmp_path / "source"), "x" * 300
    for arguments in (
        (long, "-o", tmp_path / "out"),
        (source, "-o", tmp_path / long),
        (source, "-o", tmp_path / "out", "--name", long),
        (source, "-o", tmp_path / "out", "--weights", long),
        (source, "-o", tmp_path / "out", "--tokenizer", long),
    ):
        done = run(command, *arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    assert run("inspect", long).returncode == 1


def test_a_padding_id_of_minus_one_is_none(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source", {**tiny.CONFIG, "pad_token_id": -1})
    done = run("hf", source, "-o", tmp_path / "out")
    assert done.returncode == 0
    assert "pad_token_id -1" in done.stdout
    assert json.loads((tmp_path / "out/config.json").read_text())["pad_token_id"] is None
    assert "pad_token_id" not in json.loads((tmp_path / "out/generation_config.json").read_text())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, command: str, number: signal.Signals) -> None:
    """Also a second one while the first is being answered."""
    config = {**tiny.CONFIG, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24}
    source = tiny.checkpoint(tmp_path / "source", config, dtype="F32")
    arguments = [sys.executable, "-m", "linnet_export", command, source, "-o", tmp_path / "out", "--threads", "1"]

    def heed() -> None:  # a test run in the background, or under nohup, has them ignored, and its children with it
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL)

    process = subprocess.Popen(
        list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.rglob(".*partial-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(number)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number, errors
    assert number.name in errors
    assert "Traceback" not in errors
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_output_that_cannot_be_printed_is_an_error_not_a_crash(tmp_path: Path) -> None:
    source = tiny.checkpoint(tmp_path / "source")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "linnet_export", "gguf", str(source), "--dry-run"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
