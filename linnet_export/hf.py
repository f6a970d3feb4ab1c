"""Hugging Face checkpoints from Python, as `linnet.hf.export` does it.

    from linnet_export import hf
    hf.export("phi-3-mini-4k-instruct", "out/hf")

Options and results are the command's; what it refuses is raised as an ExportError.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from linnet_export.converters import hf as converter
from linnet_export.exported import Exported, Progress, counter
from linnet_export.model import open_model


def plan(
    model: str | Path,
    *,
    dtype: str = converter.KEEP,
    max_shard_size: str | int = converter.DEFAULT_SHARD,
    name: str | None = None,
    weights: str | Path | None = None,
    bindings: str | Path | None = None,
    bind: Mapping[str, int | str] | None = None,
    tokenizer: str | Path | None = None,
) -> converter.Plan:
    """The checkpoint that `export` would write with the same arguments; no weight is read. Raises ExportError."""
    opened = open_model(model, weights=weights, bindings=bindings, bind=bind, tokenizer=tokenizer, name=name)
    return converter.plan(opened, dtype=dtype, max_shard_size=max_shard_size)


def export(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str = converter.KEEP,
    max_shard_size: str | int = converter.DEFAULT_SHARD,
    name: str | None = None,
    weights: str | Path | None = None,
    bindings: str | Path | None = None,
    bind: Mapping[str, int | str] | None = None,
    tokenizer: str | Path | None = None,
    force: bool = False,
    allow_nonfinite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes a checkpoint directory; the weights' bytes stay as they are unless `dtype` asks for another type.

    Raises ExportError: InputError for the model, OutputError for the output; then nothing was written.
    """
    started = time.monotonic()
    planned = plan(
        model,
        dtype=dtype,
        max_shard_size=max_shard_size,
        name=name,
        weights=weights,
        bindings=bindings,
        bind=bind,
        tokenizer=tokenizer,
    )
    target = Path(output)
    converter.write(
        planned,
        target,
        force=force,
        threads=threads,
        progress=counter(progress, planned.nbytes),
        allow_nonfinite=allow_nonfinite,
    )
    return Exported(
        output=target,
        files=tuple(sorted(path for path in target.rglob("*") if path.is_file())),
        tensors=len(planned.entries),
        nbytes=planned.nbytes,
        seconds=time.monotonic() - started,
        notes=planned.notes,
    )
