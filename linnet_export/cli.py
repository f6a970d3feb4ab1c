"""The commands: linnet.gguf.export, linnet.hf.export, and linnet-export, which groups them.

stdout has facts and the next command; stderr has progress and problems. Exit 0 done, 1 refused, 2 usage.
Everything heavy is imported inside a command, so that help answers at once.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from linnet_export import __version__, text
from linnet_export.errors import ExportError

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
    int | None, typer.Option(min=1, help="Threads; default: one a core, at most 8.", show_default=False)
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
    with progress.shown("writing GGUF") as report:
        done = gguf.export(
            model, output, force=force, allow_nonfinite=allow_nonfinite, threads=threads, progress=report, **options
        )
    following = [["llama-bench", "-m", str(done.files[0])]]
    following += [["ollama", "create", _ollama_name(done), "-f", str(modelfile)] for modelfile in done.files[1:]]
    _print_done(done, following)


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
    with progress.shown("writing checkpoint") as report:
        done = hf.export(
            model, output, force=force, allow_nonfinite=allow_nonfinite, threads=threads, progress=report, **options
        )
    _print_done(done, [["vllm", "serve", str(output)]])


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


def _run(application: typer.Typer) -> NoReturn:
    try:
        application()
    except ExportError as error:
        lines = error.problems
        if len(lines) == 1:
            print(f"error: {lines[0]}", file=sys.stderr)
        else:
            print(f"error: {len(lines)} problems, nothing was written", file=sys.stderr)
            for line in lines:
                print(f"  - {line}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(0)


def _bind(pairs: Iterable[str] | None) -> dict[str, int | str]:
    bound: dict[str, int | str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise typer.BadParameter(f"{pair!r}: NAME=VALUE is needed", param_hint="--bind")
        bound[name] = int(value) if re.fullmatch(r"[+-]?\d{1,18}", value) else value
    return bound


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
    typer.echo(
        f"{info.name}: {info.form}, {info.architecture}, {info.weights / 1e6:,.1f} M weights, {text.size(info.nbytes)}"
    )
    typer.echo(f"types: {', '.join(f'{count} {kind}' for kind, count in info.types.items())}\n")
    for key, value in info.settings.items():
        shown = {None: "none", True: "yes", False: "no"}.get(value, value) if isinstance(value, bool | None) else value
        typer.echo(f"  {key:<34} {shown}")
    ends = ", ".join(f"{token} {content}".rstrip() for token, content in info.eos) or "none"
    typer.echo(f"\ntokenizer: {info.tokenizer}, {info.vocabulary} rows; ends at {ends}")
    if info.chat_template is None:
        typer.echo("chat template: none\n")
    else:
        typer.echo("chat template:\n" + "\n".join(f"  {line}" for line in info.chat_template.splitlines()) + "\n")
    _print_table(
        ("tensor", "type", "shape", "size"),
        [(t.name, t.type, " x ".join(map(str, t.shape)), text.size(t.nbytes)) for t in info.tensors],
    )
    _print_notes(info.notes)
