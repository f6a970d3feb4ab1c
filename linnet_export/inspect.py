"""What a card, a checkpoint or a GGUF file is: sizes, tensors, tokenizer, template, end tokens.

    info = inspect.read("out/gguf/NAME-BF16.gguf")
    info.data()                                    # a JSON object

A GGUF file of any architecture can be looked at; cards and checkpoints are opened as an export opens them.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linnet_export import card, dtypes, gguf_file, model, phi3, text
from linnet_export.errors import InputError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """`eos` is the end-of-sequence set as (id, text); `keys` are a GGUF file's own, long lists cut."""

    form: str
    name: str
    architecture: str
    settings: Mapping[str, Any]
    tokenizer: str
    vocabulary: int
    eos: tuple[tuple[int, str], ...]
    chat_template: str | None
    tensors: tuple[TensorInfo, ...]
    keys: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def weights(self) -> int:
        return sum(math.prod(t.shape) for t in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def types(self) -> dict[str, int]:
        """How many tensors of each type."""
        return dict(Counter(t.type for t in self.tensors).most_common())

    def data(self) -> dict[str, Any]:
        """Everything as JSON values."""
        found = asdict(self)
        return found | {"weights": self.weights, "nbytes": self.nbytes, "types": self.types}


def read(path: str | Path) -> Info:
    """Looks at a card directory, a checkpoint directory or a GGUF file; raises ExportError."""
    place = Path(path)
    try:
        if not place.exists():
            raise InputError(f"{place} does not exist; a card or checkpoint directory, or a GGUF file, is needed")
        return _model(place) if place.is_dir() else _gguf(place)
    except OSError as error:
        raise InputError(f"{text.shortened(place)} cannot be read: {error.strerror or error}") from None


def _model(directory: Path) -> Info:
    try:
        opened = model.open_model(directory)
    except InputError as error:
        if not any("no tokenizer in" in line for line in error.problems):
            raise
        opened = model.open_model(directory, tokenizer="none")
    config = opened.config
    settings: dict[str, Any] = {
        "vocabulary": config.vocab,
        "hidden size": config.hidden,
        "layers": config.layers,
        "heads": config.heads,
        "key/value heads": config.kv_heads,
        "inner size": config.inner,
        "context": config.context,
        "window": config.window,
        "norm epsilon": config.eps,
        "rope theta": config.rope.theta,
        "rotary dims": f"{config.rope.dims} of {config.head_dim}",
        "rope scaling": "longrope" if config.rope.is_long else "none",
        "tied head": config.tied,
    }
    if config.rope.is_long:
        settings["original context"] = config.rope.original_context
        settings["attention factor"] = config.rope.attention_factor
    files = opened.tokenizer
    texts = {token.id: token.content for token in files.added} if files else {}
    specs = phi3.tensors(config)
    return Info(
        form=opened.form,
        name=opened.name,
        architecture=phi3.ARCHITECTURE,
        settings=settings,
        tokenizer=files.kind if files else "none",
        vocabulary=config.vocab,
        eos=tuple((token, texts.get(token, "")) for token in opened.eos),
        chat_template=files.chat_template if files else None,
        tensors=tuple(
            TensorInfo(
                spec.path if card.is_card(directory) else spec.hf,
                opened.tensors[spec.path].dtype,
                spec.shape,
                math.prod(spec.shape) * dtypes.BY_SAFETENSORS[opened.tensors[spec.path].dtype].size,
            )
            for spec in specs
        ),
        keys={},
        notes=opened.notes,
    )


# A list longer than this is shown by its length and its first values.
_LONG_LIST = 8


def _gguf(path: Path) -> Info:
    found = gguf_file.read(path)
    if problems := found.layout_problems():
        raise InputError([f"{path}: {problem}" for problem in problems])
    values = {key: _readable(value) for key, value in found.keys.items()}
    tokens = values.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, list) else []
    ends = (values.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot"))
    eos = dict.fromkeys(end for end in ends if type(end) is int)
    template = values.get("tokenizer.chat_template")
    architecture = str(values.get("general.architecture", "unknown"))
    prefix = f"{architecture}."
    return Info(
        form="GGUF file",
        name=str(values.get("general.name", path.stem)),
        architecture=architecture,
        settings={key.removeprefix(prefix): _short(value) for key, value in values.items() if key.startswith(prefix)},
        tokenizer=str(values.get("tokenizer.ggml.model", "none")),
        vocabulary=len(texts),
        eos=tuple((end, str(texts[end]) if 0 <= end < len(texts) else "") for end in eos),
        chat_template=template if isinstance(template, str) else None,
        tensors=tuple(TensorInfo(t.name, t.type, t.shape, t.nbytes) for t in found.tensors.values()),
        keys={key: _short(value) for key, value in values.items()},
        notes=(),
    )


def _readable(value: gguf_file.Value) -> Any:
    """A key's value with JSON types: text for bytes, f32 numbers as short as they were written."""

    def one(item: Any) -> Any:
        if isinstance(item, bytes):
            return item.decode("utf-8", "replace")
        if isinstance(item, float):
            if not math.isfinite(item):
                return str(item)
            return float(str(np.float32(item))) if value.type.startswith("FLOAT32") else item
        return item

    return [one(item) for item in value.value] if isinstance(value.value, list) else one(value.value)


def _short(value: object) -> object:
    if isinstance(value, list) and len(value) > _LONG_LIST:
        return f"{len(value)} values: {text.shown(value[:_LONG_LIST])}"
    return value
