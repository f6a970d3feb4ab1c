"""Figures between the logits of two implementations, position by position, over the whole vocabulary.

    figures = compare(reference(tokens)[0], other_logits)      # two [S, Vocab]
    figures = compare_log_probs(reference(tokens)[0], other)   # where the other gives log-probabilities

Everything is computed in f64, so that the figures' own rounding is far below what they measure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 64  # positions at a time: f64 copies of a few whole rows, not of everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How far another implementation is from the reference.

    `std` is the deviation of the reference's logits, the scale to read `max_abs` and `mean_abs` in. `worst` is the
    position of the largest difference. KL is KL(reference || other) in nats, over positions. A position is decided
    if the reference's two best differ by more than twice `bound`: an `other` within `bound` of the reference has the
    same argmax there, so `decided_disagreements` lists the positions where that failed. NaN, if there is any, comes
    through in every figure that it touches.
    """

    positions: int
    max_abs: float
    mean_abs: float
    std: float
    worst: int
    argmax_agreement: float
    decided: int
    decided_disagreements: tuple[int, ...]
    bound: float
    kl_mean: float
    kl_p99: float
    kl_max: float


def compare(reference: Tensor, other: Tensor, *, bound: float | None = None) -> Figures:
    """The figures of two `[S, Vocab]` logits of any float types.

    `bound` None is the largest difference itself: then no decided position can disagree, and `decided` says how
    many positions could not have flipped. State a bound to test against it. ValueError if the shapes differ.
    """
    return _compare(reference, other, bound, as_log_probs=False)


def compare_log_probs(reference: Tensor, other: Tensor, *, bound: float | None = None) -> Figures:
    """`compare` of log-probabilities: either side may be logits, for log_softmax leaves log-probabilities alone."""
    return _compare(reference, other, bound, as_log_probs=True)


def _compare(reference: Tensor, other: Tensor, bound: float | None, *, as_log_probs: bool) -> Figures:
    if reference.dim() != 2 or reference.shape != other.shape or reference.numel() == 0 or reference.shape[1] < 2:
        raise ValueError(f"two [S, Vocab] are needed, not {list(reference.shape)} and {list(other.shape)}")
    largest, totals, divergences, gaps, agreeing, sums, squares = [], [], [], [], [], [], []
    centre = reference[0].double().mean()  # near the mean, so that the sum of squares cancels little
    for start in range(0, len(reference), ROWS):
        a, b = (logits[start : start + ROWS].double() for logits in (reference, other))
        log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
        if as_log_probs:
            a, b = log_p, log_q
        difference = (a - b).abs()
        largest.append(difference.amax(-1))
        totals.append(difference.sum(-1))
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        best = a.topk(2, dim=-1).values
        gaps.append(best[:, 0] - best[:, 1])
        agreeing.append(a.argmax(-1) == b.argmax(-1))
        sums.append((a - centre).sum())
        squares.append((a - centre).square().sum())

    by_position, kl, gap, agrees = torch.cat(largest), torch.cat(divergences), torch.cat(gaps), torch.cat(agreeing)
    count = reference.numel()
    variance = torch.stack(squares).sum() / count - (torch.stack(sums).sum() / count).square()
    limit = float(by_position.amax()) if bound is None else bound
    decided = gap > 2 * limit
    return Figures(
        positions=len(reference),
        max_abs=float(by_position.amax()),
        mean_abs=float(torch.cat(totals).sum() / count),
        std=float(variance.sqrt()),
        worst=int(by_position.argmax()),
        argmax_agreement=float(agrees.double().mean()),
        decided=int(decided.sum()),
        decided_disagreements=tuple(torch.nonzero(decided & ~agrees).flatten().tolist()),
        bound=limit,
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        kl_max=float(kl.amax()),
    )
