"""Blocks land at their places in any order, and every value is looked at."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet_export import files, plan, stream
from linnet_export.errors import ExportError, InputError
from linnet_export.plan import Constant, Entry, Span

RANDOM = np.random.default_rng(3)


def source(name: str, rows: int, columns: int, dtype: str = "F32") -> Constant:
    values = RANDOM.normal(size=(rows, columns)).astype(np.float32)
    return Constant(name, plan.narrow(values, dtype), dtype)


def entry(*spans: Span, to: str | None = None) -> Entry:
    first = spans[0].source
    target = to or first.dtype
    rows, size = sum(span.stop - span.start for span in spans), {"F32": 4, "BF16": 2, "F16": 2}[target]
    columns = first.shape[1]
    return Entry("out", (rows, columns), target, columns * size, spans, plan.conversion(first.dtype, target))


def empty(path: Path, size: int) -> Path:
    path.touch()
    files.preallocate(path, size)
    return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one to three rows of the sources here, so that a tensor takes many."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 100)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("threads", [1, 8])
def test_spans_of_several_sources_lie_end_to_end_at_their_offset(tmp_path: Path, threads: int) -> None:
    query, key, value = source("q", 13, 8), source("k", 5, 8), source("v", 7, 8)
    fused = entry(Span(query, 0, 13), Span(key, 1, 5), Span(value, 2, 3))
    second = entry(*plan.whole(source("next", 9, 11)))
    path = empty(tmp_path / "x", 2000)
    stream.write(path, [stream.Placement(fused, 64), stream.Placement(second, 1024)], threads=threads)
    raw = path.read_bytes()
    expected = np.concatenate([query.values, key.values[1:5], value.values[2:3]]).tobytes()
    assert raw[64 : 64 + len(expected)] == expected
    assert raw[1024 : 1024 + 9 * 11 * 4] == second.spans[0].source.read(0, 9).tobytes()
    assert raw[:64] == bytes(64)
    assert raw[64 + len(expected) : 1024] == bytes(1024 - 64 - len(expected))
    assert len(raw) == 2000


@pytest.mark.usefixtures("small_blocks")
def test_the_bytes_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    entries = [entry(*plan.whole(source(f"t{i}", 31 + i, 17 + i)), to="BF16") for i in range(6)]
    found = set()
    for threads in (1, 2, 8):
        path = empty(tmp_path / str(threads), 1 << 16)
        places = [stream.Placement(e, i << 13) for i, e in enumerate(entries)]
        stream.write(path, places, threads=threads)
        found.add(path.read_bytes())
    assert len(found) == 1
    assert found.pop().strip(b"\0")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("threads", [1, 8])
def test_progress_is_told_every_output_byte_once(tmp_path: Path, threads: int) -> None:
    told: list[int] = []
    converted = entry(*plan.whole(source("t", 50, 9)), to="F16")
    stream.write(empty(tmp_path / "x", 900), [stream.Placement(converted, 0)], threads=threads, progress=told.append)
    assert sum(told) == converted.nbytes == 900
    assert len(told) > 10


def test_a_row_larger_than_a_block_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1)
    wide = source("t", 3, 100)
    path = empty(tmp_path / "x", 1200)
    stream.write(path, [stream.Placement(entry(*plan.whole(wide)), 0)])
    assert path.read_bytes() == wide.values.tobytes()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
@pytest.mark.parametrize("to", ["F32", None])
def test_one_value_that_is_not_finite_is_found_with_its_tensor_and_index(
    tmp_path: Path, threads: int, dtype: str, value: float, shown: str, to: str | None
) -> None:
    values = RANDOM.normal(size=(40, 6)).astype(np.float32)
    values[33, 4] = value
    bad = Constant("layers.7.bad", plan.narrow(values, dtype), dtype)
    placement = stream.Placement(entry(Span(bad, 20, 40), to=to), 0)
    with pytest.raises(InputError) as caught:
        stream.write(empty(tmp_path / "x", 480), [placement], threads=threads)
    assert len(caught.value.problems) == 1
    for fact in ("layers.7.bad", f"{shown} at [33, 4]", "--allow-nonfinite"):
        assert fact in caught.value.problems[0]
    stream.write(tmp_path / "x", [placement], threads=threads, allow_nonfinite=True)
    written = np.frombuffer((tmp_path / "x").read_bytes(), {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[to or dtype])
    index = 13 * 6 + 4
    assert str(float(plan.widen(written[index : index + 1], to or dtype)[0])) == shown


def test_a_vector_has_an_index_of_one_number(tmp_path: Path) -> None:
    norm = Constant("norm", np.array([1, np.nan, 1], np.float32), "F32")
    with pytest.raises(InputError, match=r"nan at \[1\]"):
        stream.write(empty(tmp_path / "x", 12), [stream.Placement(Entry("n", (3,), "F32", 4, plan.whole(norm)), 0)])


def test_a_value_that_f16_cannot_hold_is_found_where_it_overflows(tmp_path: Path) -> None:
    values = np.ones((4, 5), np.float32)
    values[2, 3] = 65520.0  # the smallest that rounds to infinity
    big = Constant("big", plan.narrow(values, "F32"), "F32")
    placement = stream.Placement(entry(*plan.whole(big), to="F16"), 0)
    path = empty(tmp_path / "x", 40)
    with pytest.raises(InputError, match=r"big holds inf at \[2, 3\].*F32 to F16.*too large"):
        stream.write(path, [placement])
    stream.write(path, [placement], allow_nonfinite=True)
    assert np.frombuffer(path.read_bytes(), np.float16)[13] == np.inf
    values[2, 3] = 65519.996  # the largest that does not
    stream.write(path, [placement])
    assert np.frombuffer(path.read_bytes(), np.float16)[13] == 65504


def test_what_a_conversion_refuses_is_named_after_its_tensor(tmp_path: Path) -> None:
    def refuse(_: plan.Rows) -> plan.Rows:
        raise InputError("a block does not fit")

    rows = source("blk.0", 2, 32)
    placement = stream.Placement(Entry("out", (2, 32), "Q8_0", 34, plan.whole(rows), refuse), 0)
    with pytest.raises(InputError, match=r"blk\.0: a block does not fit"):
        stream.write(empty(tmp_path / "x", 68), [placement])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("error", "kind"),
    [(InputError("shrunk"), InputError), (RuntimeError("defect"), RuntimeError), (OSError(28, "full"), OSError)],
)
@pytest.mark.parametrize("threads", [1, 8])
def test_an_error_of_any_thread_reaches_the_caller_and_stops_the_others(
    tmp_path: Path, error: Exception, kind: type[Exception], threads: int
) -> None:
    class Failing(Constant):
        reads = 0

        def read(self, start: int, stop: int) -> plan.Rows:
            with lock:
                Failing.reads += 1
            if start >= 12:
                raise error
            return super().read(start, stop)

    lock = threading.Lock()
    failing = Failing("t", RANDOM.normal(size=(3000, 8)).astype(np.float32), "F32")
    before = threading.active_count()
    with pytest.raises(kind):
        stream.write(empty(tmp_path / "x", 96000), [stream.Placement(entry(*plan.whole(failing)), 0)], threads=threads)
    assert threading.active_count() == before
    assert Failing.reads < 100  # of 1000 blocks


def test_a_conversion_of_the_wrong_size_is_a_defect_that_is_not_written(tmp_path: Path) -> None:
    cut: Callable[[Any], Any] = lambda rows: rows[:, :-1]  # noqa: E731
    wrong = Entry("out", (2, 8), "F32", 32, plan.whole(source("t", 2, 8)), cut)
    with pytest.raises(ExportError, match="defect"):
        stream.write(empty(tmp_path / "x", 64), [stream.Placement(wrong, 0)])
    assert (tmp_path / "x").read_bytes() == bytes(64)
