"""The commands: linnet.gguf.export, linnet.hf.export, and linnet-export, which groups them and adds its own.

stdout has facts and the next command; stderr has progress and problems. Exit 0 done, 1 refused, 2 usage.
Everything heavy is imported inside a command, so that help answers at once.
"""

import json
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from linnet_export import __version__, text
from linnet_export.errors import ExportError
from linnet_export.verify.records import RUNTIMES

if TYPE_CHECKING:
    from linnet_export.exported import Exported
    from linnet_export.inspect import Info
    from linnet_export.plan import Entry

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A Linnet card directory or a Hugging Face checkpoint directory.", show_default=False
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(help="The model's name in the output; default: the card's or directory's.", show_default=False),
]
WeightsOption = Annotated[
    Path | None, typer.Option(help="Where the weights are: a directory or a SafeTensors file.", show_default=False)
]
BindingsOption = Annotated[Path | None, typer.Option(help="Another bindings.json for a card.", show_default=False)]
BindOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Override a generic, such as Layers=2; repeatable.", show_default=False),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|none", help="The tokenizer's directory, or none for a model without one.", show_default=False
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be written; write nothing.")]
NonfiniteOption = Annotated[bool, typer.Option("--allow-nonfinite", help="Let NaN and infinity in weights through.")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=64, help="Threads; default: one a core, at most 8.", show_default=False)
]
OuttypeOption = Annotated[str, typer.Option(metavar="TYPE", help="f32, f16, bf16, q8_0, or auto (the source's own).")]
PreTokenizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="llama.cpp's pre-tokenizer name, where it is not recognised.", show_default=False
    ),
]
DtypeOption = Annotated[str, typer.Option(metavar="TYPE", help="f32, f16, bf16, or auto (bytes unchanged).")]
ShardOption = Annotated[str, typer.Option(metavar="SIZE", help="The largest weight file, such as 5GB.")]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Then prove the output against MODEL, in every runtime that is installed.")
]
VllmPythonOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PYTHON", help="The interpreter that vLLM is installed in; default: $LINNET_EXPORT_VLLM_PYTHON.",
        show_default=False,
    ),
]  # fmt: skip
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def gguf_command(
    model: ModelArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR|FILE.gguf",
            help="A directory for NAME-TYPE.gguf and a Modelfile, or just a file.",
            show_default=False,
        ),
    ] = None,
    outtype: OuttypeOption = "f16",
    name: NameOption = None,
    weights: WeightsOption = None,
    bindings: BindingsOption = None,
    bind: BindOption = None,
    tokenizer: TokenizerOption = None,
    pre_tokenizer: PreTokenizerOption = None,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    allow_nonfinite: NonfiniteOption = False,
    threads: ThreadsOption = None,
    verify: VerifyOption = False,
    vllm_python: VllmPythonOption = None,
) -> None:
    """Write MODEL as a GGUF file for llama.cpp, with a Modelfile for Ollama."""
    from linnet_export import gguf, progress

    options: dict[str, Any] = {
        "outtype": outtype.lower(), "name": name, "weights": weights, "bindings": bindings, "bind": _bind(bind),
        "tokenizer": tokenizer, "pre_tokenizer": pre_tokenizer,
    }  # fmt: skip
    if dry_run:
        plan = gguf.plan(model, **options)
        _print_tensors(plan.entries)
        _print_keys(plan.keys())
        _print_notes(plan.notes)
        typer.echo(
            f"{plan.file_name}: {text.counted(len(plan.entries), 'tensor')}, {text.size(plan.nbytes)}; "
            "nothing was written"
        )
        return
    if output is None:
        raise typer.BadParameter(
            "needed, unless --dry-run only shows what would be written", param_hint="--output / -o"
        )
    if verify:
        _require_reference()
    with progress.shown("writing GGUF") as report:
        done = gguf.export(
            model, output, force=force, allow_nonfinite=allow_nonfinite, threads=threads, progress=report, **options
        )
    following = [["llama-bench", "-m", str(done.files[0])]]
    following += [["ollama", "create", _ollama_name(done), "-f", str(modelfile)] for modelfile in done.files[1:]]
    _print_done(done, following)
    _settle_record(model, done.files[0], options, vllm_python, verify=verify)


def hf_command(
    model: ModelArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The directory to write.", show_default=False)
    ] = None,
    dtype: DtypeOption = "auto",
    max_shard_size: ShardOption = "5GB",
    name: NameOption = None,
    weights: WeightsOption = None,
    bindings: BindingsOption = None,
    bind: BindOption = None,
    tokenizer: TokenizerOption = None,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    allow_nonfinite: NonfiniteOption = False,
    threads: ThreadsOption = None,
    verify: VerifyOption = False,
    vllm_python: VllmPythonOption = None,
) -> None:
    """Write MODEL as a Hugging Face checkpoint for vLLM and transformers."""
    from linnet_export import hf, progress

    options: dict[str, Any] = {
        "dtype": dtype.lower(), "max_shard_size": max_shard_size, "name": name, "weights": weights,
        "bindings": bindings, "bind": _bind(bind), "tokenizer": tokenizer,
    }  # fmt: skip
    if dry_run:
        plan = hf.plan(model, **options)
        _print_tensors(plan.entries)
        _print_keys(plan.config)
        _print_notes(plan.notes)
        typer.echo(
            f"{text.counted(len(plan.shards), 'weight file')}: {text.counted(len(plan.entries), 'tensor')}, "
            f"{text.size(plan.nbytes)}; nothing was written"
        )
        return
    if output is None:
        raise typer.BadParameter(
            "needed, unless --dry-run only shows what would be written", param_hint="--output / -o"
        )
    if verify:
        _require_reference()
    with progress.shown("writing checkpoint") as report:
        done = hf.export(
            model, output, force=force, allow_nonfinite=allow_nonfinite, threads=threads, progress=report, **options
        )
    _print_done(done, [["vllm", "serve", str(output)]])
    _settle_record(model, done.output, options, vllm_python, verify=verify)


def inspect_command(
    path: Annotated[
        Path, typer.Argument(metavar="X", help="A card, a checkpoint directory, or a GGUF file.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Show what X is: sizes, tensors, tokenizer, template, end tokens."""
    from linnet_export import inspect

    info = inspect.read(path)
    if as_json:
        typer.echo(json.dumps(info.data(), indent=2, ensure_ascii=False))
    else:
        _print_info(info)


def verify_command(
    export: Annotated[
        Path,
        typer.Argument(
            metavar="EXPORT", help="A .gguf file or an exported checkpoint directory.", show_default=False
        ),
    ],
    against: Annotated[
        Path, typer.Option(metavar="MODEL", help="What it was exported from: a card or a checkpoint.")
    ],
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help=f"Of {', '.join(RUNTIMES)}; default: those that are installed.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text file of prompts, with lines of --- between them (--- chat before a chat message).",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each greedy answer.")] = 64,
    layers: Annotated[
        int | None, typer.Option(min=1, help="How many of MODEL's layers the export has.", show_default=False)
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False,
            help="The context of llama.cpp and vLLM, which picks longrope's factors; default: what the prompts need.",
        ),
    ] = None,
    name: NameOption = None,
    weights: WeightsOption = None,
    bindings: BindingsOption = None,
    bind: BindOption = None,
    tokenizer: TokenizerOption = None,
    pre_tokenizer: PreTokenizerOption = None,
    vllm_python: VllmPythonOption = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Compare a server of the export, too (OpenAI's API).", show_default=False),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write report.json and report.html there.", show_default=False),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the answers as a card's samples.json has them.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Prove EXPORT against the model it was made from: structure, weights, logits and text. Exit 1 if it fails."""
    from linnet_export import progress
    from linnet_export.verify import output, summary
    from linnet_export.verify.run import verify

    with progress.stages() as told:
        made = verify(
            export, against=against, runtimes=None if runtime is None else re.split(r"[,\s]+", runtime.strip(", ")),
            prompts=prompts, tokens=tokens, layers=layers, context=context, name=name, weights=weights,
            bindings=bindings, bind=_bind(bind), tokenizer=tokenizer, pre_tokenizer=pre_tokenizer,
            vllm_python=vllm_python, endpoint=endpoint, progress=told,
        )  # fmt: skip
    written = list(output.write_report(made, report)) if report is not None else []
    if samples is not None:
        output.write_samples(made, samples)
        written.append(samples)
    typer.echo(output.report_json(made).rstrip() if as_json else summary.terminal(made))
    if not as_json:
        for path in written:
            typer.echo(f"  {path}")
    if not made.passed:
        raise typer.Exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"linnet-export {__version__}")
        raise typer.Exit


def _options(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Export Phi-3 models: Linnet cards and Hugging Face checkpoints to GGUF and Hugging Face."""


_STYLE: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(no_args_is_help=True, callback=_options, **_STYLE)
app.command("gguf")(gguf_command)
app.command("hf")(hf_command)
app.command("verify")(verify_command)
app.command("inspect")(inspect_command)
gguf_app = typer.Typer(add_completion=False, **_STYLE)
gguf_app.command()(gguf_command)
hf_app = typer.Typer(add_completion=False, **_STYLE)
hf_app.command()(hf_command)


def main() -> None:
    """linnet-export"""
    _run(app)


def gguf_main() -> None:
    """linnet.gguf.export"""
    _run(gguf_app)


def hf_main() -> None:
    """linnet.hf.export"""
    _run(hf_app)


class _Stopped(BaseException):
    """A signal asked the program to end; not a KeyboardInterrupt, which typer would answer itself."""

    def __init__(self, number: int) -> None:
        self.number = number


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop(number: int, _frame: object) -> NoReturn:
    for each in _STOPPING:
        signal.signal(each, signal.SIG_IGN)  # what is half written is removed now, whoever is impatient
    raise _Stopped(number)


def _run(application: typer.Typer) -> NoReturn:
    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and shells' background jobs mean to be left alone
            signal.signal(number, _stop)
    try:
        application()
    except ExportError as error:
        lines = [_printable(line) for line in error.problems]
        if len(lines) == 1:
            print(f"error: {lines[0]}", file=sys.stderr)
        else:
            print(f"error: {len(lines)} problems, nothing was written", file=sys.stderr)
            for line in lines:
                print(f"  - {line}", file=sys.stderr)
        raise SystemExit(1) from None
    except _Stopped as stopped:
        print(f"stopped by {signal.Signals(stopped.number).name}, nothing was written", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else "the output of this command: "
        print(f"error: {_printable(where)}{error.strerror or error}", file=sys.stderr)
        raise SystemExit(1) from None
    raise SystemExit(0)


def _printable(line: str) -> str:
    """A line without control characters: names in files may hold some, and a terminal would obey them."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in line)


def _bind(pairs: Iterable[str] | None) -> dict[str, int | str]:
    bound: dict[str, int | str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise typer.BadParameter(f"{pair!r}: NAME=VALUE is needed", param_hint="--bind")
        bound[name] = int(value) if re.fullmatch(r"[+-]?\d{1,18}", value) else value
    return bound


def _require_reference() -> None:
    """Refuses `--verify` before anything is written, where nothing could be compared."""
    from linnet_export.verify.run import require

    require()


def _settle_record(
    model: Path, export: Path, options: Mapping[str, Any], vllm_python: Path | None, *, verify: bool
) -> None:
    """Verifies what was just written and keeps the report beside it; else drops the report of an earlier file."""
    from linnet_export import progress
    from linnet_export.verify import output

    if not verify:
        output.record_of(export).unlink(missing_ok=True)
        return
    from linnet_export.verify import summary
    from linnet_export.verify.run import verify as run

    taken = ("name", "weights", "bindings", "bind", "tokenizer", "pre_tokenizer")
    try:
        with progress.stages() as told:
            made = run(
                export, against=model, vllm_python=vllm_python, progress=told,
                **{option: options[option] for option in taken if option in options},
            )  # fmt: skip
    except ExportError as error:
        for line in error.problems:
            print(f"error: written, but not verified: {_printable(line)}", file=sys.stderr)
        raise typer.Exit(1) from None
    record = output.write_record(made, export)
    typer.echo(summary.terminal(made))
    typer.echo(f"  {record}")
    if not made.passed:
        raise typer.Exit(1)


def _ollama_name(done: "Exported") -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", done.files[0].stem.lower())


def _print_tensors(entries: "Iterable[Entry]") -> None:
    rows = [(e.name, e.type, " x ".join(map(str, e.shape)), text.size(e.nbytes)) for e in entries]
    _print_table(("tensor", "type", "shape", "size"), rows)


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if i == len(head) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
    typer.echo("")


def _print_keys(keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        if isinstance(value, list | tuple) and len(value) > 8:
            typer.echo(f"{key} = {len(value)} values")
        else:
            value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            typer.echo(f"{key} = {text.shown(value)}")
    typer.echo("")


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        typer.echo(f"note: {note}")


def _print_done(done: "Exported", following: Iterable[list[str]]) -> None:
    _print_notes(done.notes)
    typer.echo(
        f"wrote {done.output}: {text.counted(done.tensors, 'tensor')}, {text.size(done.nbytes)} in {done.seconds:.1f} s"
    )
    for file in done.files:
        typer.echo(f"  {file}")
    typer.echo("next:")
    for command in following:
        typer.echo(f"  {shlex.join(command)}")


def _print_info(info: "Info") -> None:
    what = _printable(f"{info.name}: {info.form}, {info.architecture}")
    typer.echo(f"{what}, {info.weights / 1e6:,.1f} M weights, {text.size(info.nbytes)}")
    typer.echo(f"types: {', '.join(f'{count} {kind}' for kind, count in info.types.items())}\n")
    width = max(map(len, info.settings), default=0)
    for key, value in info.settings.items():
        shown = {None: "none", True: "yes", False: "no"}.get(value, value) if isinstance(value, bool | None) else value
        typer.echo(f"  {key:<{width}}  {_printable(str(shown))}")
    ends = ", ".join(f"{token} {content}".rstrip() for token, content in info.eos) or "none"
    typer.echo(f"\ntokenizer: {info.tokenizer}, {info.vocabulary} rows; ends at {ends}")
    if info.chat_template is None:
        typer.echo("chat template: none\n")
    else:
        typer.echo(
            "chat template:\n" + "\n".join(f"  {_printable(line)}" for line in info.chat_template.splitlines()) + "\n"
        )
    _print_table(
        ("tensor", "type", "shape", "size"),
        [(_printable(t.name), t.type, " x ".join(map(str, t.shape)), text.size(t.nbytes)) for t in info.tensors],
    )
    _print_notes(info.notes)
