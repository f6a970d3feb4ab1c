"""llama.cpp, in this process, through llama-cpp-python's bindings of its C interface.

    outcome = LlamaCpp().run(task)

The cache is f32 and flash attention is off, so that nothing is rounded which the file does not round. Logits are asked
for only at the positions that count: a batch then holds a few rows of the vocabulary, not one a token.
"""

import contextlib
import ctypes
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linnet_export.verify.records import VerificationError
from linnet_export.verify.runtimes import INSTALL, OUTPUT_KEPT, Outcome, Rows, Task, is_gguf, longrope_limit

BATCH = 256  # tokens a call
LOG_LINES = 200  # of llama.cpp's log that are kept for an error


class LlamaCpp:
    name = "llama.cpp"

    def unavailable(self) -> str | None:
        try:
            import llama_cpp  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:  # its shared library is loaded at import
            return f"llama-cpp-python cannot be imported ({error}): {INSTALL}"
        return None

    def takes(self, export: Path) -> bool:
        return is_gguf(export)

    def run(self, task: Task) -> Outcome:
        import llama_cpp

        started = time.monotonic()
        values: list[Rows] = []
        answers: list[tuple[int, ...]] = []
        with _Engine.opened(task.export, task.rounded_context) as engine:
            context = engine.context_size
            for prompt in task.prompts:
                rows, answer = engine.answer(prompt.ids, prompt.positions, task.tokens, task.ends)
                values.append(rows)
                answers.append(answer)
        window = task.config.window
        limits = ["its key/value cache is f16 by default; here it is f32, with flash attention off"]
        if window is not None and task.length > window:
            limits.append(
                f"it ignores phi3's sliding window: positions from {window} on, which see past it, do not count"
            )
        return Outcome(
            version=f"llama-cpp-python {llama_cpp.__version__}",
            settings=f"context {context}, f32 cache, no flash attention, {engine.threads} threads",
            kind="logits",
            positions=tuple(prompt.positions for prompt in task.prompts),
            values=tuple(values),
            greedy=tuple(answers),
            factors=task.factors_for(context),
            window=False,
            limits=(*limits, *longrope_limit(task, context)),
            seconds=time.monotonic() - started,
        )


class _Engine:
    """A model and a context of llama.cpp, by its C interface."""

    def __init__(self, library: Any, model: Any, context: Any, log: Sequence[str], threads: int) -> None:
        self._library, self._model, self._context, self._log = library, model, context, log
        self.threads = threads
        self.vocab = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(model)))
        self.context_size = int(library.llama_n_ctx_seq(context))
        self._batch = library.llama_batch_init(BATCH, 0, 1)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, context_size: int) -> Iterator["_Engine"]:
        from llama_cpp import llama_cpp as library

        log: deque[str] = deque(maxlen=LOG_LINES)
        callback = library.llama_log_callback(lambda _level, line, _data: log.append(line.decode("utf-8", "replace")))
        threads = len(os.sched_getaffinity(0))
        library.llama_log_set(callback, ctypes.c_void_p(0))
        model = context = engine = None
        try:
            library.llama_backend_init()
            settings = library.llama_model_default_params()
            settings.n_gpu_layers = 0
            model = library.llama_model_load_from_file(str(path).encode(), settings)
            if not model:
                raise VerificationError(f"llama.cpp does not load {path}; the end of its output:\n{_tail(log)}")
            wanted = library.llama_context_default_params()
            wanted.n_ctx, wanted.n_batch, wanted.n_ubatch, wanted.n_seq_max = context_size, BATCH, BATCH, 1
            wanted.n_threads = wanted.n_threads_batch = threads
            wanted.type_k = wanted.type_v = library.GGML_TYPE_F32
            wanted.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
            context = library.llama_init_from_model(model, wanted)
            if not context:
                raise VerificationError(
                    f"llama.cpp makes no context of {context_size} for {path}; the end of its output:\n{_tail(log)}"
                )
            engine = cls(library, model, context, log, threads)
            yield engine
        finally:
            if engine is not None:
                library.llama_batch_free(engine._batch)
            if context:
                library.llama_free(context)
            if model:
                library.llama_model_free(model)
            library.llama_log_set(_silent(library), ctypes.c_void_p(0))  # the other callback ends with this call

    def answer(
        self, ids: Sequence[int], positions: Sequence[int], tokens: int, ends: Collection[int]
    ) -> tuple[Rows, tuple[int, ...]]:
        """Logits at the positions of a prompt, and the greedy tokens after it (the first of equal logits)."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        wanted = {position: row for row, position in enumerate(positions)}
        rows = np.empty((len(positions), self.vocab), np.float32)
        last = len(ids) - 1
        best = -1
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            asked = [i for i in range(len(part)) if start + i in wanted or start + i == last]
            for i, logits in zip(asked, self._decode(part, start, asked), strict=True):
                if start + i in wanted:
                    rows[wanted[start + i]] = logits
                if start + i == last:
                    best = int(logits.argmax())
        produced = [best]
        while len(produced) < tokens and best not in ends:
            [logits] = self._decode([best], last + len(produced), [0])
            best = int(logits.argmax())
            produced.append(best)
        return rows, tuple(produced[:tokens])

    def _decode(self, tokens: Sequence[int], position: int, asked: Sequence[int]) -> Iterator[Rows]:
        """Runs tokens from a position on; the logits of those asked for, valid until the next call."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position + i, 1, 0
            batch.logits[i] = i in asked
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise VerificationError(
                f"llama.cpp: llama_decode gave {status} at position {position}; the end of its output:\n"
                f"{_tail(self._log)}"
            )
        for i in asked:
            pointer = self._library.llama_get_logits_ith(self._context, i)
            yield np.ctypeslib.as_array(pointer, shape=(self.vocab,))


def _tail(log: Sequence[str]) -> str:
    return "".join(log)[-OUTPUT_KEPT:].strip()


_SILENT: list[Any] = []  # llama.cpp keeps the address: the callback must outlive every call


def _silent(library: Any) -> Any:
    if not _SILENT:
        _SILENT.append(library.llama_log_callback(lambda *_: None))
    return _SILENT[0]
