"""A whole verification: structure, weights, then every runtime against the reference, into one report.

    report = verify("out/gguf/NAME-BF16.gguf", against="MODEL", runtimes=("llama.cpp",))

The reference reads the source by its own code. What it cannot follow (a size that --bind overrides) is refused. If the
export is so damaged that its tensors cannot be found, no runtime is started on it.
"""

import contextlib
import datetime
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from linnet_export import __version__, card, checkpoint, gguf_file, text
from linnet_export.converters.gguf import FILE_TYPES
from linnet_export.errors import InputError
from linnet_export.model import CONFIG, Model, open_model
from linnet_export.verify import bounds, expected, logits, structure
from linnet_export.verify import prompts as texts
from linnet_export.verify import weights as weight_checks
from linnet_export.verify.at_endpoint import Endpoint
from linnet_export.verify.in_llama_cpp import LlamaCpp
from linnet_export.verify.in_reference import Reference
from linnet_export.verify.in_transformers import Transformers
from linnet_export.verify.in_vllm import Vllm
from linnet_export.verify.records import (
    RUNTIMES,
    Finding,
    Report,
    RuntimeResult,
    TensorCheck,
    VerificationError,
)
from linnet_export.verify.runtimes import Outcome, Runtime, Task
from linnet_export.verify.truth import Truth

# Told what is being done, and how much of how much (0 where that is not known).
Progress = Callable[[str, int, int], None]

# Generics that the reference takes from elsewhere or does not need: cache sizes, the stored type, `layers`.
FOLLOWED = ("Layers", "Batch", "MaxSeq", "T")
KIB = 1024


def verify(
    export: str | Path,
    *,
    against: str | Path,
    runtimes: Sequence[str] | None = None,
    prompts: str | Path | None = None,
    tokens: int = 64,
    layers: int | None = None,
    name: str | None = None,
    weights: str | Path | None = None,
    bindings: str | Path | None = None,
    bind: Mapping[str, int | str] | None = None,
    tokenizer: str | Path | None = None,
    pre_tokenizer: str | None = None,
    context: int | None = None,
    vllm_python: str | Path | None = None,
    endpoint: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """The report of an exported GGUF file or checkpoint directory against the model it was made from.

    `runtimes` None means those of RUNTIMES that read this form of export and are installed; one that is named must be
    both. `endpoint` adds a served model. `layers` is how many of the source's layers the export has. `name`, `weights`,
    `bindings`, `bind`, `tokenizer` and `pre_tokenizer` are what the export was made with. `context` is that of
    llama.cpp and vLLM.
    Raises InputError for a source or an export that cannot be opened, VerificationError for what cannot be asked.
    """
    started = time.monotonic()
    told = progress or _silent
    place, source = Path(export), Path(against)
    require()
    bound = dict(bind or {})
    if layers is not None:
        bound["Layers"] = layers
    told("opening the source", 0, 0)
    model = open_model(source, weights=weights, bindings=bindings, bind=bound, tokenizer=tokenizer, name=name)
    codec = texts.codec(model)
    form, kind = type_of(place)
    chosen = _runtimes(place, runtimes, vllm_python, endpoint, told)
    asked = texts.shipped(model, tokens=tokens) if prompts is None else texts.read(Path(prompts), model, tokens=tokens)
    task = Task(
        export=place, type=kind, prompts=asked, tokens=tokens, ends=frozenset(model.eos), config=model.config,
        context=context,
    )  # fmt: skip
    if context is not None and context < task.length:
        raise VerificationError(
            f"--context {context}: {task.length} are needed, for the longest prompt and {tokens} tokens of answer"
        )
    findings = structure.check_structure(place, model, pre_tokenizer=pre_tokenizer)
    results: tuple[RuntimeResult, ...] = ()
    checks: tuple[TensorCheck, ...] = ()
    with _as_the_reference_reads(source, weights, bindings, bound) as (readable, elsewhere):
        try:
            checks = _weights(place, readable, elsewhere, model, told)
        except InputError as error:
            if all(finding.passed for finding in findings):
                findings = (*findings, Finding(str(place), False, "; ".join(error.problems)))
            results = tuple(
                RuntimeResult(runtime=runtime.name, skipped="the export's tensors cannot be read")
                for runtime, _ in chosen
            )
        else:
            truth = Truth(
                readable, weights=elsewhere, layers=model.config.layers,
                progress=lambda done, total: told("the reference, layer by layer", done, total),
            )  # fmt: skip
            results = _run(chosen, task, truth, codec, told)
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB  # Linux counts KiB
    return Report(
        export=str(export),
        source=str(against),
        type=f"{form} {kind.upper()}",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment=_environment(),
        structure=findings,
        weights=checks,
        runtimes=results,
        seconds=time.monotonic() - started,
        peak_mb=usage / 1e6,
        options={
            "runtimes": [runtime.name for runtime, _ in chosen], "tokens": tokens, "layers": model.config.layers,
            "prompts": "shipped" if prompts is None else str(prompts), "tokenizer": codec.how,
        },
    )  # fmt: skip


def require() -> None:
    """Raises VerificationError, with the command that installs it, without PyTorch: nothing can be compared."""
    if (reason := Reference().unavailable()) is not None:
        raise VerificationError(f"a verification needs the reference: {reason}")


def type_of(export: Path) -> tuple[str, str]:
    """The form and the type of an export (`bf16`): what its header or its config.json says; "unknown" if neither."""
    if export.is_dir():
        said: Any = None
        with contextlib.suppress(InputError):
            config = text.read_json_object(export / CONFIG)
            said = config.get("dtype") or config.get("torch_dtype")
        names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
        return "Hugging Face", names.get(said, "unknown") if isinstance(said, str) else "unknown"
    if not export.exists():
        raise InputError(f"{export} does not exist; a .gguf file or an exported checkpoint directory is needed")
    with contextlib.suppress(InputError):
        number = gguf_file.read(export).value("general.file_type")
        return "GGUF", next((name for name, kind in FILE_TYPES.items() if kind.number == number), "unknown")
    return "GGUF", "unknown"


def _runtimes(
    export: Path,
    names: Sequence[str] | None,
    vllm_python: str | Path | None,
    endpoint: str | None,
    told: Progress,
) -> list[tuple[Runtime, str | None]]:
    """The runtimes to use, each with the reason why it cannot be. What was asked for by name must be able to run."""
    known: dict[str, Runtime] = {
        "reference": Reference(lambda done, total: told("the export in the reference", done, total)),
        "transformers": Transformers(),
        "llama.cpp": LlamaCpp(),
        "vllm": Vllm(vllm_python),
    }
    problems = []
    chosen: list[tuple[Runtime, str | None]] = []
    for name in dict.fromkeys(RUNTIMES if names is None else names):
        runtime = known.get(name)
        if runtime is None:
            problems.append(f"--runtime {name}: no such runtime; known: {', '.join(RUNTIMES)}")
        elif not runtime.takes(export):
            if names is not None:
                form = "a checkpoint directory" if export.is_dir() else "a GGUF file"
                problems.append(f"--runtime {name}: it does not read {form}, which {export} is")
        elif (reason := runtime.unavailable()) is not None and names is not None:
            problems.append(f"--runtime {name}: {reason}")
        else:
            chosen.append((runtime, reason))
    if endpoint is not None:
        served = Endpoint(endpoint)
        if (reason := served.unavailable()) is not None:
            problems.append(f"--endpoint: {reason}")
        chosen.append((served, None))
    if problems:
        raise VerificationError(problems)
    return chosen


def _weights(
    export: Path, source: Path, elsewhere: Path | None, model: Model, told: Progress
) -> tuple[TensorCheck, ...]:
    return weight_checks.check_weights(
        export, source, weights=elsewhere, layers=model.config.layers,
        progress=lambda done, total: told("comparing weights", done, total),
    )  # fmt: skip


def _run(
    chosen: Iterable[tuple[Runtime, str | None]], task: Task, truth: Truth, codec: texts.Codec, told: Progress
) -> tuple[RuntimeResult, ...]:
    """Every runtime first, then the reference once for all of them. One that breaks is a failure, not the end."""
    results: dict[str, RuntimeResult] = {}
    outcomes: dict[str, Outcome] = {}
    for runtime, reason in chosen:
        results[runtime.name] = RuntimeResult(runtime=runtime.name, skipped=reason or "")
        if reason is not None:
            continue
        told(f"running {runtime.name}", 0, 0)
        try:
            outcomes[runtime.name] = runtime.run(task)
        except VerificationError as error:
            results[runtime.name] = RuntimeResult(
                runtime=runtime.name, passed=False, failures=error.problems,
                bounds=bounds.find(task.type, runtime.name),
            )  # fmt: skip
    if outcomes:
        told("the reference, layer by layer", 0, 0)
        references = expected.expect(truth, task, list(outcomes.values()))
        for (name, outcome), theirs in zip(outcomes.items(), references, strict=True):
            results[name] = logits.judge(name, outcome, theirs, task, codec, bounds.find(task.type, name))
    return tuple(results.values())


@contextlib.contextmanager
def _as_the_reference_reads(
    source: Path,
    elsewhere: str | Path | None,
    bindings: str | Path | None,
    bound: Mapping[str, int | str],
) -> Iterator[tuple[Path, Path | None]]:
    """The source and its weights in a form that the reference opens: itself, or a folder of links for what it has
    no option for (other bindings, a checkpoint whose weights lie elsewhere)."""
    others = [name for name in bound if name not in FOLLOWED]
    if others:
        raise VerificationError(
            f"--bind {others[0]}: the reference takes sizes from the card itself; only {', '.join(FOLLOWED)} can be "
            "overridden where an export is verified"
        )
    place = None if elsewhere is None else Path(elsewhere)
    if place is not None and place.is_file() and place.suffix != ".safetensors":
        place = place.parent  # an index
    is_card = card.is_card(source)
    if bindings is None and (is_card or place is None):
        yield source, place
        return
    with tempfile.TemporaryDirectory(prefix="linnet-export-") as made:
        folder = Path(made)
        if is_card:
            named = text.read_toml(source / card.NEST).get("weights", {}).get("bindings")
            if not isinstance(named, str) or "/" in named:
                raise VerificationError(
                    f"--bindings {bindings}: {source / card.NEST} names no bindings file beside it, which the "
                    "reference reads; one is needed where an export is verified"
                )
            links = {entry.name: entry for entry in source.iterdir()} | {named: Path(str(bindings))}
            for entry_name, target in links.items():
                (folder / entry_name).symlink_to(target.resolve())
            yield folder, place
            return
        (folder / CONFIG).symlink_to((source / CONFIG).resolve())
        files: Iterable[Path] = ()
        if place is not None:
            files = (place,) if place.is_file() else (*place.glob("*.safetensors"), place / checkpoint.INDEX)
        for file in files:
            if file.exists():
                (folder / file.name).symlink_to(file.resolve())
        yield folder, None


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


def _environment() -> dict[str, str]:
    import numpy
    import torch

    return {
        "linnet-export": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    }
