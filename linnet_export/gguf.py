"""GGUF from Python, as `linnet.gguf.export` does it.

    from linnet_export import gguf
    gguf.export("phi-3-mini-4k-instruct", "out/gguf", outtype="bf16")

Options and results are the command's; what it refuses is raised as an ExportError.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from linnet_export import files
from linnet_export.converters import gguf as converter
from linnet_export.converters import ollama
from linnet_export.errors import OutputError
from linnet_export.exported import Exported, Progress, counter
from linnet_export.model import open_model

MODELFILE = "Modelfile"


def plan(
    model: str | Path,
    *,
    outtype: str = "f16",
    name: str | None = None,
    weights: str | Path | None = None,
    bindings: str | Path | None = None,
    bind: Mapping[str, int | str] | None = None,
    tokenizer: str | Path | None = None,
    pre_tokenizer: str | None = None,
) -> converter.Plan:
    """The file that `export` would write with the same arguments; no weight is read. Raises ExportError."""
    opened = open_model(model, weights=weights, bindings=bindings, bind=bind, tokenizer=tokenizer, name=name)
    return converter.plan(opened, outtype=outtype, pre_tokenizer=pre_tokenizer)


def export(
    model: str | Path,
    output: str | Path,
    *,
    outtype: str = "f16",
    name: str | None = None,
    weights: str | Path | None = None,
    bindings: str | Path | None = None,
    bind: Mapping[str, int | str] | None = None,
    tokenizer: str | Path | None = None,
    pre_tokenizer: str | None = None,
    force: bool = False,
    allow_nonfinite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes OUTPUT/NAME-TYPE.gguf and OUTPUT/Modelfile, or just OUTPUT where it ends in .gguf.

    `outtype` is one of f32, f16, bf16, q8_0, auto (the source's own type). Raises ExportError: InputError for the
    model, UnsupportedError for what GGUF cannot hold, OutputError for the output; then nothing was written.
    """
    started = time.monotonic()
    planned = plan(
        model,
        outtype=outtype,
        name=name,
        weights=weights,
        bindings=bindings,
        bind=bind,
        tokenizer=tokenizer,
        pre_tokenizer=pre_tokenizer,
    )
    target = Path(output)
    notes = list(planned.notes)
    modelfile: ollama.Modelfile | None = None
    if target.suffix == ".gguf":
        written = [target]
    else:
        if target.exists() and not target.is_dir():
            raise OutputError(f"{target} is a file; a directory, or a name that ends in .gguf, is needed")
        written = [target / planned.file_name, target / MODELFILE]
        modelfile = _modelfile(planned)
        notes += modelfile.notes
    with contextlib.ExitStack() as stack:
        partials = [stack.enter_context(files.new_file(path, force=force)) for path in written]
        if modelfile is not None:
            partials[1].write_text(modelfile.text, encoding="utf-8")
        converter.write_partial(
            planned,
            partials[0],
            threads=threads,
            progress=counter(progress, planned.nbytes),
            allow_nonfinite=allow_nonfinite,
        )
    return Exported(
        output=target,
        files=tuple(written),
        tensors=len(planned.entries),
        nbytes=planned.nbytes,
        seconds=time.monotonic() - started,
        notes=tuple(notes),
    )


def _modelfile(planned: converter.Plan) -> ollama.Modelfile:
    vocabulary = planned.vocabulary
    stops: list[str] = []
    if vocabulary is not None:
        stops = [vocabulary.tokens[token].decode("utf-8", "replace") for token in planned.model.eos]
    return ollama.modelfile(
        planned.file_name, template=vocabulary.chat_template if vocabulary else None, stops=stops, name=planned.name
    )
