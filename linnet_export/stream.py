"""Executes a plan: blocks of rows from sources, through a conversion, to offsets of a file.

A few threads each hold one block, so memory does not grow with the model; blocks may finish in any order, so the
bytes do not depend on the number of threads. Every value is looked at: NaN and infinity are errors that name the
tensor and the index.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linnet_export import dtypes, plan
from linnet_export.errors import ExportError, InputError

# Bytes of source rows in one block: large enough that a block costs more than handing it out, small enough that
# a block and its f32 working copies (up to 6 times as large) stay in tens of megabytes for each thread.
BLOCK_BYTES = 4 * 1024 * 1024

MAX_THREADS = 64  # more only wait for one another

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Placement:
    """An entry and the offset where its bytes go."""

    entry: plan.Entry
    offset: int


def default_threads() -> int:
    return min(8, len(os.sched_getaffinity(0)))


def write(
    path: Path,
    placements: Iterable[Placement],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    allow_nonfinite: bool = False,
) -> None:
    """Writes every placement into an existing file; `progress` is told the output bytes of each block.

    Raises InputError for a value that is not finite (unless allowed) and OSError if the file cannot be written.
    """
    blocks = _blocks(placements)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(descriptor: int) -> None:
        while not errors:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            try:
                _write_block(descriptor, block, allow_nonfinite)
                if progress is not None:
                    with lock:
                        progress((block.stop - block.start) * block.placement.entry.row_bytes)
            except BaseException as error:  # noqa: BLE001 - handed to the calling thread below
                errors.append(error)

    descriptor = os.open(path, os.O_WRONLY)
    try:
        count = min(threads or default_threads(), MAX_THREADS)
        workers = [threading.Thread(target=work, args=(descriptor,), daemon=True) for _ in range(count)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except BaseException as error:
            errors.append(error)  # tells the workers to stop
            for worker in workers:
                worker.join()
            raise
    finally:
        os.close(descriptor)
    if errors:
        raise errors[0]


@dataclass(frozen=True, slots=True)
class _Block:
    placement: Placement
    span: plan.Span
    start: int  # in the source
    stop: int
    row: int  # in the output


def _blocks(placements: Iterable[Placement]) -> Iterator[_Block]:
    for placement in placements:
        row = 0
        for span in placement.entry.spans:
            source_row = max(1, _source_row_bytes(span.source))
            step = max(1, BLOCK_BYTES // source_row)
            for start in range(span.start, span.stop, step):
                stop = min(start + step, span.stop)
                yield _Block(placement, span, start, stop, row)
                row += stop - start


def _source_row_bytes(source: plan.Source) -> int:
    values = 1
    for n in source.shape[1:]:
        values *= n
    return values * dtypes.BY_SAFETENSORS[source.dtype].size


def _write_block(descriptor: int, block: _Block, allow_nonfinite: bool) -> None:
    entry, source = block.placement.entry, block.span.source
    rows = source.read(block.start, block.stop)
    if not allow_nonfinite:
        _refuse_nonfinite(rows, source.dtype, block, "")
    try:
        out = rows if entry.convert is None else entry.convert(rows)
    except InputError as error:
        raise InputError(f"{source.name}: {line}" for line in error.problems) from None
    if entry.convert is not None and not allow_nonfinite and entry.type in dtypes.BY_SAFETENSORS:
        _refuse_nonfinite(
            out, entry.type, block, f" after conversion from {source.dtype} to {entry.type}: it is too large"
        )
    data = np.ascontiguousarray(out).data.cast("B")
    needed = (block.stop - block.start) * entry.row_bytes
    if len(data) != needed:
        raise ExportError(
            f"{entry.name}: a block of {len(data)} bytes where {needed} belong; this is a defect of linnet-export"
        )
    offset = block.placement.offset + block.row * entry.row_bytes
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _refuse_nonfinite(rows: plan.Rows, dtype: str, block: _Block, why: str) -> None:
    found = plan.first_nonfinite(rows, dtype)
    if found is None:
        return
    values = plan.widen(rows.reshape(-1)[found : found + 1], dtype)
    index = list(np.unravel_index(found, rows.shape))
    index[0] += block.start
    raise InputError(
        f"{block.span.source.name} holds {values[0]} at {[int(i) for i in index]}{why}; "
        "repair the checkpoint, or let such values through with --allow-nonfinite"
    )
