"""A model's whole depth in the memory of one layer: its forward, layer by layer over all prompts.

    from linnet_export import reference
    logits = reference.stream("checkpoints/Phi-3-mini-4k-instruct", [[1, 15043], [1, 3869, 29892]], dtype="f32")

A layer is read from the source, run over every prompt, and released; of the embedding only the rows of the prompts'
tokens are read, and the head is applied by parts of its rows. So memory is one layer or one part of the
head (0.45 GB of Phi-3-mini in f32), the prompts' states, the largest attention, and the logits asked for.

The logits are those of `Phi3.forward` on each prompt alone, to the bit: the same blocks of `phi3` compute the same
products, of the same shapes in the same order, and prompts never share one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from linnet_export.reference.load import EMBEDDING, HEAD, Dtype, Weights, open_weights
from linnet_export.reference.phi3 import Config, Factors, Layer, RmsNorm, head_parts, rope_rows, whole

Progress = Callable[[int, int], object]


@torch.no_grad()
def stream(
    model: str | Path,
    prompts: Sequence[Sequence[int]],
    *,
    weights: str | Path | None = None,
    layers: int | None = None,
    dtype: Dtype | torch.dtype | None = None,
    factors: Factors | None = None,
    window: int | Literal["own"] | None = "own",
    positions: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> list[Tensor]:
    """The logits `[S, Vocab]` of each prompt of S tokens, in the type computed in; the other arguments as `load`.

    `positions` lists for each prompt the positions whose logits are wanted, `[len, Vocab]` in that order; None means
    all. `progress(done, layers)` is called after each layer. ValueError as `load`, and, naming every problem, if a
    prompt is empty or has a token outside the vocabulary, or a position is not one of its prompt's.
    """
    opened = open_weights(model, weights=weights).settled(layers=layers, dtype=dtype, factors=factors, window=window)
    chosen = [list(range(len(prompt))) for prompt in prompts] if positions is None else positions
    _check(opened.config, prompts, chosen)
    states = _embedded(opened, prompts)
    for index in range(opened.config.layers):
        states = _through_layer(opened, index, states)
        if progress is not None:
            progress(index + 1, opened.config.layers)
    return _logits(opened, states, chosen)


def _check(config: Config, prompts: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]) -> None:
    if len(prompts) != len(chosen):
        raise ValueError(f"positions are listed for {len(chosen)} prompts, there are {len(prompts)}")
    problems = []
    for number, (prompt, wanted) in enumerate(zip(prompts, chosen, strict=True)):
        if not prompt:
            problems.append(f"prompt {number} is empty")
        if outside := sorted({token for token in prompt if not 0 <= token < config.vocab}):
            problems.append(f"prompt {number} has tokens outside the vocabulary of {config.vocab}: {outside[:3]}")
        if outside := sorted({position for position in wanted if not 0 <= position < len(prompt)}):
            problems.append(f"prompt {number} has {len(prompt)} positions, among which are not: {outside[:3]}")
    if problems:
        raise ValueError("\n".join(problems))


def _embedded(opened: Weights, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The prompts' embeddings, `[1, S, Hidden]` each."""
    tokens = sorted({token for prompt in prompts for token in prompt})
    place = {token: row for row, token in enumerate(tokens)}
    rows = opened.read(EMBEDDING, opened.dtype, tokens)
    return [rows[[place[token] for token in prompt]][None] for prompt in prompts]


def _through_layer(opened: Weights, index: int, states: list[Tensor]) -> list[Tensor]:
    """The states after a layer, which is in memory only here."""
    with torch.device("meta"):
        layer = Layer(opened.config)
    opened.fill(layer, f"layers.{index}.")
    after = []
    for x in states:
        positions, attend = whole(opened.config, x.shape[1], x.device)
        cos, sin = rope_rows(opened.config, positions, None, x.dtype)
        after.append(layer(x, cos, sin, partial(attend, index)))
    return after


def _logits(opened: Weights, states: list[Tensor], chosen: Sequence[Sequence[int]]) -> list[Tensor]:
    """The final norm and the head, of which some rows at a time are in memory."""
    config = opened.config
    with torch.device("meta"):
        norm = RmsNorm(config.hidden, config.eps)
    opened.fill(norm, "norm.")
    normed = [norm(x) for x in states]
    logits = [torch.empty(len(wanted), config.vocab, dtype=opened.dtype) for wanted in chosen]
    for part in head_parts(config.vocab):
        rows = opened.read(EMBEDDING if config.tied else HEAD, opened.dtype, part)
        for x, wanted, out in zip(normed, chosen, logits, strict=True):
            out[:, part] = functional.linear(x, rows)[0, list(wanted)]
        del rows  # before the next ones are read
    return logits
