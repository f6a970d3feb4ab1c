"""An exported checkpoint directory against what `converters.hf.plan` decides for its source."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from linnet_export import checkpoint, dtypes, hf_config, text, tokenizer_files
from linnet_export.converters import hf as converter
from linnet_export.errors import ExportError, InputError
from linnet_export.model import CONFIG, GENERATION_CONFIG, Model
from linnet_export.verify.differences import (
    CONTEXT,
    group,
    ids,
    read_json,
    row_problem,
    settings,
    shown,
    tensors,
    text_problem,
)
from linnet_export.verify.records import Finding

# A Hugging Face configuration: fields of `Config` and `Rope`, their plain words and the key that says it.
CONFIG_FIELDS = {
    "vocab": ("vocabulary size", "vocab_size"),
    "hidden": ("hidden size", "hidden_size"),
    "heads": ("heads", "num_attention_heads"),
    "kv_heads": ("key/value heads", "num_key_value_heads"),
    "inner": ("inner size", "intermediate_size"),
    "layers": ("layers", "num_hidden_layers"),
    "context": ("context length", "max_position_embeddings"),
    "eps": ("norm epsilon", "rms_norm_eps"),
    "window": ("attention window", "sliding_window"),
    "tied": ("head tied to the embedding", "tie_word_embeddings"),
}
ROPE_FIELDS = {
    "theta": ("rope base", "rope_theta"),
    "dims": ("rotary dims", "partial_rotary_factor"),
    "original_context": ("original context", "original_max_position_embeddings"),
    "short": ("short factors", "rope_scaling.short_factor"),
    "long": ("long factors", "rope_scaling.long_factor"),
    "attention_factor": ("rope attention factor", "rope_scaling.attention_factor"),
}
# Keys that `hf_config.read` reads, in whichever schema, and so the fields above compare.
_READ_BACK = {key for _, key in CONFIG_FIELDS.values()} | {
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
}  # fmt: skip
# What transformers adds when it saves a configuration again.
_HARMLESS = ("transformers_version", "_name_or_path")


def findings(directory: Path, source: Model) -> Iterator[Finding]:
    found: Mapping[str, checkpoint.FileTensor] = {}
    try:
        found = checkpoint.index(directory)
    except InputError as error:
        yield from (Finding("weight files", False, line) for line in error.problems)
    if found:
        yield from _shards(directory, found)
    plan = _planned_checkpoint(source, found)
    if found:
        yield from tensors(
            {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()},
            {entry.name: (entry.shape, entry.type) for entry in plan.entries},
        )
    yield from _config(directory, source, plan)
    generation, problems = read_json(directory / GENERATION_CONFIG)
    if generation is None:
        yield from problems
    else:
        wrong = _value_problems(generation, plan.generation_config)
        yield from group(GENERATION_CONFIG, settings(plan.generation_config), wrong)
    yield from _tokenizer(directory, source)


def _planned_checkpoint(source: Model, found: Mapping[str, checkpoint.FileTensor]) -> converter.Plan:
    """What the directory must be: the source's types, or one type for all, whichever fits most tensors."""
    kinds = {name: tensor.dtype for name, tensor in found.items()}
    plans = [converter.plan(source, dtype=dtype) for dtype in (converter.KEEP, *dtypes.BY_NAME)]
    return max(plans, key=lambda plan: sum(kinds.get(entry.name) == entry.type for entry in plan.entries))


def _shards(directory: Path, found: Mapping[str, checkpoint.FileTensor]) -> Iterator[Finding]:
    """Whether the files are those of the index, and their sizes those that it states."""
    used = {tensor.path.name for tensor in found.values()}
    problems = [
        (path.name, f"the index does not name this file, or {checkpoint.SINGLE} stands beside it; it must not be there")
        for path in sorted(directory.glob("*.safetensors"))
        if path.name not in used
    ]
    total = sum(tensor.nbytes for tensor in found.values())
    if (directory / checkpoint.INDEX).is_file():
        with_index, wrong = read_json(directory / checkpoint.INDEX)
        problems += [(finding.subject, finding.message) for finding in wrong]
        metadata = (with_index or {}).get("metadata")
        stated = metadata.get("total_size") if isinstance(metadata, dict) else None
        if stated is not None and stated != total:
            problems.append((checkpoint.INDEX, f"total_size is {shown(stated)}; {total} is needed"))
    yield from group("weight files", f"{text.counted(len(used), 'file')}, {text.size(total)}, whole", problems)


def _config(directory: Path, source: Model, plan: converter.Plan) -> Iterator[Finding]:
    path = directory / CONFIG
    stated, problems = read_json(path)
    if stated is None:
        yield from problems
        return
    try:
        config = hf_config.read(stated, CONFIG)
    except ExportError as error:
        yield from (Finding(CONFIG, False, line) for line in error.problems)
    else:
        for record, ours, theirs in (
            (CONFIG_FIELDS, source.config, config),
            (ROPE_FIELDS, source.config.rope, config.rope),
        ):
            for name, (label, key) in record.items():
                needed, value = getattr(ours, name), getattr(theirs, name)
                wrong = "" if value == needed else f"; {shown(needed)} is needed"
                yield Finding(label, not wrong, f"{shown(value)} by {key}{wrong}")
    rest = {key: value for key, value in plan.config.items() if key not in _READ_BACK}
    found = {key: value for key, value in stated.items() if key not in (*_READ_BACK, *_HARMLESS)}
    yield from group(CONFIG, settings(rest), _value_problems(found, rest))


def _value_problems(found: Mapping[str, Any], needed: Mapping[str, Any]) -> list[tuple[str, str]]:
    problems = []
    for key in dict.fromkeys((*needed, *found)):
        if key not in found:
            problems.append((key, f"{key} is missing; {shown(needed[key])} is needed"))
        elif key not in needed:
            problems.append((key, f"{key} is {shown(found[key])}; no such key is needed"))
        # 1 == True and 1 == 1.0 in Python, but not to every reader of JSON.
        elif (type(found[key]), found[key]) != (type(needed[key]), needed[key]):
            problems.append((key, f"{key} is {shown(found[key])}; {shown(needed[key])} is needed"))
    return problems


def _tokenizer(directory: Path, source: Model) -> Iterator[Finding]:
    ours = source.tokenizer
    try:
        theirs = tokenizer_files.find(directory)
        problems: list[tuple[str, str]] = []
    except InputError as error:
        theirs, problems = None, [("tokenizer", line) for line in error.problems]
    if ours is None:
        names = [path.name for path in theirs.files] if theirs else []
        wrong = [(name, "the source has no tokenizer; the file must not be there") for name in names]
        yield from group("tokenizer files", "none, as in the source", [*problems, *wrong])
        return
    needed = {path.relative_to(ours.directory).as_posix(): path for path in ours.files}
    for name, path in needed.items():
        problem = _file_problem(directory / name, path)
        if problem is not None:
            problems.append((name, problem))
    if theirs is not None:
        names = [path.relative_to(directory).as_posix() for path in theirs.files]
        problems += [
            (name, "the source has no such file; it must not be there") for name in names if name not in needed
        ]
    yield from group("tokenizer files", f"{', '.join(needed)}: equal byte for byte", problems)
    if theirs is None:
        return
    if theirs.chat_templates != ours.chat_templates:
        for name in dict.fromkeys((*ours.chat_templates, *theirs.chat_templates)):
            found, template = theirs.chat_templates.get(name), ours.chat_templates.get(name)
            if found is None or template is None:
                there = "missing; the source has it" if found is None else "there; the source has none"
                yield Finding("chat template", False, f"{name} is {there}")
            elif found != template:
                yield Finding("chat template", False, f"{name} {text_problem(found, template)}")
    else:
        yield Finding("chat template", True, ", ".join(ours.chat_templates) or "none, as in the source")
    try:
        configs = [read_json(directory / name)[0] for name in (CONFIG, GENERATION_CONFIG)]
        ends = tokenizer_files.eos_ids(theirs, configs[0], configs[1])
    except InputError as error:
        yield from (Finding("end tokens", False, line) for line in error.problems)
        return
    same = set(ends) == set(source.eos)
    message = f"{ids(ends)} by {CONFIG}, {GENERATION_CONFIG} and the tokenizer together"
    yield Finding("end tokens", same, message if same else f"{message}; {ids(source.eos)} is needed")


def _file_problem(found: Path, needed: Path) -> str | None:
    """How two files differ; in a tokenizer.json by the first token that does."""
    try:
        theirs = found.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror or error}); the source's bytes are needed"
    ours = needed.read_bytes()
    if theirs == ours:
        return None
    if found.name == tokenizer_files.TOKENIZER_JSON:
        rows = [_token_rows(raw) for raw in (theirs, ours)]
        if rows[0] and rows[1] and (problem := row_problem("vocab", rows[0], rows[1])):
            return problem
    place = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"has {len(theirs)} bytes; {len(ours)} are needed, and they begin alike"
    excerpt = slice(max(0, place - CONTEXT), place + CONTEXT)
    return f"differs from byte {place} on: {shown(theirs[excerpt])}; {shown(ours[excerpt])} is needed"


def _token_rows(raw: bytes) -> list[str]:
    """The vocabulary of a tokenizer.json by id; empty where it has another form."""
    try:
        content = text.parse_json(raw, tokenizer_files.TOKENIZER_JSON)
        vocab = content["model"]["vocab"]
        return [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    except (InputError, AttributeError, KeyError, TypeError):
        return []
