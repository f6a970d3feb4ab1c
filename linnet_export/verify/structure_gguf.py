"""A GGUF file against what `converters.gguf.plan` decides for its source: file, keys, tokenizer, tensors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet_export import checkpoint, dtypes, gguf_file, phi3, text
from linnet_export.converters import gguf as converter
from linnet_export.converters import tokenizer
from linnet_export.errors import ExportError, InputError
from linnet_export.model import Model
from linnet_export.verify.differences import (
    LISTED,
    group,
    ids,
    row_problem,
    shown,
    stored,
    summary,
    tensors,
    text_problem,
)
from linnet_export.verify.records import Finding

# Keys that only describe a model: another name or license changes no result.
DESCRIPTIVE = "general."
DECISIVE = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version")

# The type of a key's value in a GGUF file, by its Python type: llama.cpp refuses a key of another one.
SCALARS = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
ITEMS = {bool: "BOOL[]", int: "INT32[]", float: "FLOAT32[]", str: "STRING[]", bytes: "STRING[]"}

# Plain words, and the keys that say it. Keys that stand in no group are compared in the last one.
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("architecture", ("general.architecture",)),
    ("file type", ("general.file_type", "general.quantization_version")),
    ("context length", ("phi3.context_length",)),
    ("hidden size", ("phi3.embedding_length",)),
    ("inner size", ("phi3.feed_forward_length",)),
    ("layers", ("phi3.block_count",)),
    ("heads", ("phi3.attention.head_count",)),
    ("key/value heads", ("phi3.attention.head_count_kv",)),
    ("norm epsilon", ("phi3.attention.layer_norm_rms_epsilon",)),
    ("attention window", ("phi3.attention.sliding_window",)),
    ("rope base", ("phi3.rope.freq_base",)),
    ("rotary dims", ("phi3.rope.dimension_count",)),
    ("original context", ("phi3.rope.scaling.original_context_length",)),
    ("rope attention factor", ("phi3.rope.scaling.attn_factor",)),
    ("tokenizer model", ("tokenizer.ggml.model", "tokenizer.ggml.pre")),
    ("tokens", ("tokenizer.ggml.tokens",)),
    ("token scores", ("tokenizer.ggml.scores",)),
    ("token types", ("tokenizer.ggml.token_type",)),
    ("merges", ("tokenizer.ggml.merges",)),
    (
        "special tokens",
        tuple(
            f"tokenizer.ggml.{role}_token_id"
            for role in ("bos", "eos", "unknown", "seperator", "padding", "mask", "eot")  # as gguf spells them
        ),
    ),
    ("tokens added to a text", tuple(f"tokenizer.ggml.add_{what}" for what in
                                     ("bos_token", "eos_token", "sep_token", "space_prefix"))),
    ("chat template", ("tokenizer.chat_template",)),
)  # fmt: skip


def findings(path: Path, source: Model, pre_tokenizer: str | None) -> Iterator[Finding]:
    try:
        file = gguf_file.read(path)
    except InputError as error:
        yield from (Finding(path.name, False, line) for line in error.problems)
        return
    whole = f"{text.size(file.size)}, {text.counted(len(file.tensors), 'tensor')}, none cut or over another"
    yield from group(path.name, whole, [(path.name, problem) for problem in file.layout_problems()])

    outtype, problem = _outtype(file, source)
    if problem is not None:
        yield Finding("file type", False, problem)
    plan = _planned(source, outtype, file, pre_tokenizer)
    yield from _keys(file, plan)
    yield from _end_tokens(file, plan)
    needed = {entry.name: (entry.shape, None if problem else entry.type) for entry in plan.entries}
    yield from tensors({t.name: (t.shape, t.type) for t in file.tensors.values()}, needed)
    yield from _factors(file, source.config.rope)


def _outtype(file: gguf_file.GgufFile, source: Model) -> tuple[str, str | None]:
    """The file type by what it decides, the types of the matrices, and what is wrong with them.

    Where two fit the same (rows that no block type divides fall back to f16), general.file_type decides.
    """
    found = {tensor.name: tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    fits: dict[str, tuple[int, bool]] = {}
    for outtype, kind in converter.FILE_TYPES.items():
        entries = converter.plan(replace(source, tokenizer=None), outtype=outtype).entries
        equal = sum(found.get(entry.name) == entry.type for entry in entries if len(entry.shape) > 1)
        fits[outtype] = equal, file.value("general.file_type") == kind.number
    best = max(fits, key=lambda outtype: fits[outtype])
    if fits[best][0]:
        return best, None
    kinds = ", ".join(dict.fromkeys(found.values())) or "missing"
    needed = ", ".join(kind.tensor for kind in converter.FILE_TYPES.values())
    return best, f"the matrices are {kinds}; one of {needed} is needed"


def _planned(source: Model, outtype: str, file: gguf_file.GgufFile, pre: str | None) -> converter.Plan:
    """What the file must be. A pre-tokenizer that the source does not tell is taken from the file."""
    try:
        return converter.plan(source, outtype=outtype, pre_tokenizer=pre)
    except ExportError:
        stated = file.value("tokenizer.ggml.pre")
        if pre is not None or not isinstance(stated, str):
            raise
        return converter.plan(source, outtype=outtype, pre_tokenizer=stated)


def _keys(file: gguf_file.GgufFile, plan: converter.Plan) -> Iterator[Finding]:
    expected = {key: value for key, value in plan.keys().items() if _decisive(key)}
    found = {key: value for key, value in file.keys.items() if _decisive(key)}
    found.pop(gguf_file.ALIGNMENT, None)  # used, and so checked, by the layout
    grouped = {key for _, keys in GROUPS for key in keys}
    others = tuple(key for key in dict.fromkeys((*expected, *found)) if key not in grouped)
    for label, keys in (*GROUPS, ("other keys", others)):
        stated = [key for key in keys if key in expected]
        if not stated and not any(key in found for key in keys):
            continue  # a model of another kind
        problems = [
            (key, f"{label}: {problem}")
            for key in keys
            if (problem := _key_problem(key, found.get(key), expected.get(key))) is not None
        ]
        said = ", ".join(f"{key.rsplit('.', 1)[-1]} {summary(expected[key])}" for key in stated)
        yield from group(label, summary(expected[stated[0]]) if len(stated) == 1 else said, problems)
    yield _description(file, plan)


def _description(file: gguf_file.GgufFile, plan: converter.Plan) -> Finding:
    """The keys that are not compared; the name among them decides one thing in llama.cpp, which is stated."""
    keys = [key for key in file.keys if not _decisive(key)]
    message = f"{text.counted(len(keys), 'key')} of general.*, not compared"
    files, name = plan.model.tokenizer, str(file.value("general.name"))
    if files is not None and any(token.rstrip for token in files.added):
        does = "takes along" if tokenizer.strips_after_added(name) else "keeps"
        message += f"; by the name {shown(name)} llama.cpp {does} the whitespace after added tokens"
    return Finding("description", True, message)


def _decisive(key: str) -> bool:
    return not key.startswith(DESCRIPTIVE) or key in DECISIVE


def _key_problem(key: str, found: gguf_file.Value | None, needed: Any) -> str | None:
    if needed is None:
        return None if found is None else f"{key} is {shown(found.value)}; the source has none: no key is needed"
    many = isinstance(needed, list | tuple)
    kind = (ITEMS if many else SCALARS)[type(needed[0] if many and needed else needed)]
    if found is None:
        return f"{key} is missing; {summary(needed)} is needed"
    if found.type != kind:
        return f"{key} is stored as {found.type}; {kind} is needed"
    if many:
        return row_problem(key, found.value, [stored(item) for item in needed])
    value = stored(needed)
    if found.value == value:
        return None
    if isinstance(value, str) and len(value) > LISTED:
        return f"{key} {text_problem(str(found.value), value)}"
    return f"{key} is {shown(found.value)}; {shown(value)} is needed"


def _end_tokens(file: gguf_file.GgufFile, plan: converter.Plan) -> Iterator[Finding]:
    """Whether llama.cpp ends at every token that the source ends at, by the file's ids or by a token's text."""
    vocabulary, needed = plan.vocabulary, plan.model.eos
    if vocabulary is None:
        return
    tokens = file.value("tokenizer.ggml.tokens")
    told = [file.value(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    if not isinstance(tokens, list):
        return  # a missing list of tokens is a finding of its own
    known = {end.encode() for end in tokenizer.END_TEXTS}
    ends = {i for i, token in enumerate(tokens) if token in known} | {token for token in told if type(token) is int}
    reachable = tokenizer.ends_in_llama_cpp(vocabulary)
    missed = [token for token in needed if token in reachable and token not in ends]
    limit = [token for token in needed if token not in reachable]
    message = f"llama.cpp ends at {ids(token for token in needed if token in ends)}"
    if missed or ends - reachable:
        message = (
            f"llama.cpp ends at {ids(sorted(ends))}; {ids(sorted(reachable))} needed: as the source, and known texts"
        )
        yield Finding("end tokens", False, message)
        return
    if limit:
        message += f"; the format has no place for {ids(limit)}, at which the source also ends"
    yield Finding("end tokens", True, message)


def _factors(file: gguf_file.GgufFile, rope: phi3.Rope) -> Iterator[Finding]:
    """longrope's factors, which are tensors in a GGUF file."""
    for name, factors in (("rope_factors_long.weight", rope.long), ("rope_factors_short.weight", rope.short)):
        tensor = file.tensors.get(name)
        if tensor is None or factors is None or tensor.type != dtypes.F32.gguf or tensor.shape != (len(factors),):
            continue  # named among the tensors
        raw = bytearray(tensor.nbytes)
        try:
            checkpoint.read_exactly(file.path, tensor.offset, raw)
        except InputError as error:
            yield from (Finding(name, False, line) for line in error.problems)
            continue
        problem = row_problem(name, np.frombuffer(raw, "<f4").tolist(), [stored(factor) for factor in factors])
        yield Finding(name, problem is None, problem or text.counted(len(factors), "factor"))
