"""What the reference says of a model: logits at chosen positions, and its own greedy answers.

    truth = Truth(Path("MODEL"))
    [rows] = truth.logits([(1, 15043, 29892)], [(1, 2)])             # [2, vocab] in f32

Logits come layer by layer (`reference.stream`), so the memory is that of one layer, whatever the depth. Greedy answers
need the whole model at hand: they are given if its f32 weights fit into a share of the memory that is free.
"""

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from linnet_export import phi3
from linnet_export.exported import Progress
from linnet_export.verify.records import VerificationError
from linnet_export.verify.runtimes import Factors, Rows

if TYPE_CHECKING:
    from linnet_export.reference.phi3 import Phi3

# Of the memory that is free, what the weights may take: caches, logits and other programs need the rest.
SHARE = 0.4
F32_BYTES = 4


class Truth:
    """The reference on a card, a checkpoint or a GGUF file; `layers` keeps the first so many."""

    def __init__(
        self,
        path: Path,
        *,
        weights: Path | None = None,
        layers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.path, self.weights, self.layers, self.progress = path, weights, layers, progress

    def logits(
        self,
        sequences: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        *,
        factors: Factors | None = None,
    ) -> list[Rows]:
        """`[len(positions[i]), vocab]` of each sequence in f32; `factors` pins longrope's set."""
        from linnet_export import reference

        with self._told():
            found = reference.stream(
                self.path, sequences, weights=self.weights, layers=self.layers, dtype="f32", factors=factors,
                positions=positions, progress=self.progress,
            )  # fmt: skip
        return [rows.numpy() for rows in found]

    def fits(self, config: phi3.Config) -> bool:
        """Whether the f32 weights of a model of this size are within SHARE of the free memory."""
        weights = sum(math.prod(tensor.shape) for tensor in phi3.tensors(config))
        return weights * F32_BYTES <= SHARE * _free_bytes()

    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[int],
        *,
        ends: Collection[int],
        factors: Factors | None = None,
    ) -> list[tuple[int, ...]]:
        """The answers of up to `tokens[i]` tokens, each ended by one of `ends`, through the reference's cache."""
        from linnet_export import reference

        with self._told():
            model = reference.load(self.path, weights=self.weights, layers=self.layers, dtype="f32", factors=factors)
        return [_greedy(model, prompt, count, ends) for prompt, count in zip(prompts, tokens, strict=True)]

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            raise VerificationError(f"the reference cannot run {self.path}: {error}") from error


def _greedy(model: "Phi3", prompt: Sequence[int], tokens: int, ends: Collection[int]) -> tuple[int, ...]:
    import torch

    with torch.inference_mode():
        cache = model.cache(batch=1, max_seq=len(prompt) + tokens)
        best = int(model.prefill(torch.tensor([list(prompt)]), 0, cache).argmax())
        produced = [best]
        while len(produced) < tokens and best not in ends:
            place = len(prompt) + len(produced) - 1
            best = int(model.decode(torch.tensor([[best]]), place, cache).argmax())
            produced.append(best)
    return tuple(produced)


def _free_bytes() -> int:
    """What Linux calls available: free, or a cache that can be dropped."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return 0
