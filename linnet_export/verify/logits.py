"""A runtime against the reference: the figures, and whether they are good enough.

    [expected] = expect(truth, task, [outcome])
    result = judge("llama.cpp", outcome, expected, task, codec, bounds.find("bf16", "llama.cpp"))

Everything is computed in f64, a few positions at a time.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from linnet_export.verify.expected import Expected, counted, first_other, steps
from linnet_export.verify.prompts import Codec
from linnet_export.verify.records import Bounds, Prompt, PromptFigures, RuntimeResult, Sample
from linnet_export.verify.runtimes import Kind, Outcome, Rows, Task

ROWS = 16  # positions at a time: a few whole rows of the vocabulary in f64
SMALLEST = 1e-12  # of a remainder that rounding made 0 or less

Wide = npt.NDArray[np.float64]


def judge(
    name: str, outcome: Outcome, expected: Sequence[Expected], task: Task, codec: Codec, bounds: Bounds | None
) -> RuntimeResult:
    """The figures and answers of an outcome; `failures` has a line for each bound that a prompt breaks."""
    figures: list[PromptFigures] = []
    samples: list[Sample] = []
    failures: list[str] = []
    for index, prompt in enumerate(task.prompts):
        positions, excluded = counted(outcome, index, task)
        row = {position: number for number, position in enumerate(outcome.positions[index])}
        rows = outcome.values[index][[row[position] for position in positions]]
        if positions:
            made = compare(prompt, positions, expected[index].rows, rows, outcome.kind, bounds, excluded)
            figures.append(made)
            failures += _failures(made, bounds)
        if count := steps(outcome, index, task):
            answer = outcome.greedy[index][:count]
            samples.append(_sample(prompt, answer, expected[index], outcome, task, codec))
            if positions:
                failures += _text_failures(prompt, answer, expected[index], figures[-1].std, bounds)
    everywhere = [value for one in figures for value in one.kl]
    if bounds is not None and everywhere and not (mean := math.fsum(everywhere) / len(everywhere)) <= bounds.kl_mean:
        failures.append(f"KL is {mean:.3g} on average; at most {bounds.kl_mean:g} is needed ({bounds.reason})")
    if not everywhere:
        failures.append("no position counts; a prompt shorter than the window is needed (--prompts)")
    limits = outcome.limits
    if bounds is None:
        limits = (*limits, f"no bound is stated for {task.type} here: the figures are not judged")
    if outcome.kind == "top entries":
        limits = (*limits, "KL of the entries given and the remainder as one: at most the true one")
    return RuntimeResult(
        runtime=name,
        version=outcome.version,
        settings=outcome.settings,
        passed=not failures,
        failures=tuple(failures),
        kind=outcome.kind,
        bounds=bounds,
        prompts=tuple(figures),
        samples=tuple(samples),
        limits=limits,
        seconds=outcome.seconds,
    )


def compare(
    prompt: Prompt,
    positions: Sequence[int],
    reference: Rows,
    runtime: Rows,
    kind: Kind,
    bounds: Bounds | None = None,
    excluded: str = "",
) -> PromptFigures:
    """The figures of two `[positions, vocab]`; a disagreement is decided by `bounds.difference`."""
    kl: list[float] = []
    largest: list[float] = []
    agreeing: list[bool] = []
    gaps: list[float] = []
    surprise: list[tuple[float, float]] = []
    total, entries = 0.0, 0
    for place, wide, other in _blocks(positions, reference, runtime):
        log_p = _log_softmax(wide)
        known = ~np.isnan(other) if kind == "top entries" else np.ones(other.shape, bool)
        log_q = other if kind == "top entries" else _log_softmax(other)
        ours, theirs = (wide, other) if kind == "logits" else (log_p, log_q)
        difference = np.abs(np.where(known, ours - theirs, 0))
        largest += difference.max(-1).tolist()
        total, entries = total + float(difference.sum()), entries + int(known.sum())
        kl += _divergence(log_p, log_q, known).tolist()
        agreeing += (wide.argmax(-1) == np.where(known, theirs, -np.inf).argmax(-1)).tolist()
        top = np.partition(wide, -2, axis=-1)[:, -2:]
        gaps += (top[:, 1] - top[:, 0]).tolist()
        for i, position in enumerate(place):
            if position + 1 < len(prompt.ids) and known[i, following := prompt.ids[position + 1]]:
                surprise.append((float(log_p[i, following]), float(log_q[i, following])))
    std = float(reference.std(dtype=np.float64))
    limit = math.inf if bounds is None or bounds.difference is None else 2 * bounds.difference * std
    return PromptFigures(
        prompt=prompt.name,
        positions=tuple(positions),
        kl=tuple(kl),
        differences=tuple(largest),
        mean_abs=total / entries if entries else math.nan,
        std=std,
        argmax_agreement=sum(agreeing) / len(agreeing),
        decided_disagreements=tuple(
            position
            for position, gap, agrees in zip(positions, gaps, agreeing, strict=True)
            if gap > limit and not agrees
        ),
        perplexity=_perplexity([theirs for _, theirs in surprise]),
        reference_perplexity=_perplexity([ours for ours, _ in surprise]),
        excluded=excluded,
    )


def _blocks(positions: Sequence[int], reference: Rows, runtime: Rows) -> Iterator[tuple[Sequence[int], Wide, Wide]]:
    for start in range(0, len(positions), ROWS):
        block = slice(start, start + ROWS)
        yield positions[block], reference[block].astype(np.float64), runtime[block].astype(np.float64)


def _log_softmax(rows: Wide) -> Wide:
    shifted = rows - rows.max(-1, keepdims=True)
    found: Wide = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def _divergence(log_p: Wide, log_q: Wide, known: npt.NDArray[np.bool_]) -> Wide:
    """KL(p || q) of each row, in nats; entries that are not known count as one, what is left of both."""
    p = np.where(known, np.exp(log_p), 0)
    q = np.where(known, np.exp(np.where(known, log_q, 0)), 0)
    found: Wide = (p * np.where(known, log_p - log_q, 0)).sum(-1)
    if not known.all():
        rest_p, rest_q = (np.maximum(1 - part.sum(-1), SMALLEST) for part in (p, q))
        found = found + rest_p * np.log(rest_p / rest_q)
    return np.where(found < 0, 0, found)  # below 0 by rounding alone; NaN stays


def _perplexity(log_probabilities: Sequence[float]) -> float:
    """exp of the mean surprise at the prompt's own next tokens; NaN where no position has one."""
    if not log_probabilities:
        return math.nan
    return math.exp(min(700.0, -math.fsum(log_probabilities) / len(log_probabilities)))  # exp overflows at 709


def _failures(figures: PromptFigures, bounds: Bounds | None) -> Iterator[str]:
    where = figures.prompt
    if broken := [p for p, kl in zip(figures.positions, figures.kl, strict=True) if not math.isfinite(kl)]:
        yield f"{where}: not a number at position {broken[0]} ({len(broken)} of {len(figures.kl)} positions)"
        return
    if bounds is None:
        return
    worst = max(range(len(figures.kl)), key=lambda i: figures.kl[i])
    if figures.kl[worst] > bounds.kl_max:
        over = sum(kl > bounds.kl_max for kl in figures.kl)
        yield (
            f"{where}: KL {figures.kl[worst]:.3g} at position {figures.positions[worst]}; at most {bounds.kl_max:g} is "
            f"needed ({over} of {len(figures.kl)} positions are above; {bounds.reason})"
        )
    if bounds.argmax_decided and figures.decided_disagreements:
        first = figures.decided_disagreements[0]
        yield (
            f"{where}: another best token at position {first}, where the reference's two best are further apart than "
            f"any allowed difference explains ({len(figures.decided_disagreements)} of {len(figures.kl)} positions)"
        )
    if bounds.difference is not None and max(figures.differences) > bounds.difference * figures.std:
        worst = max(range(len(figures.differences)), key=lambda i: figures.differences[i])
        yield (
            f"{where}: a difference of {figures.differences[worst]:.3g} at position {figures.positions[worst]}; "
            f"at most {bounds.difference:g} of the logits' deviation of {figures.std:.3g} is needed ({bounds.reason})"
        )


def _text_failures(
    prompt: Prompt, answer: Sequence[int], expected: Expected, std: float, bounds: Bounds | None
) -> Iterator[str]:
    """A step of the answer at which the reference, after the same tokens, is decidedly for another one."""
    if bounds is None or bounds.difference is None or not bounds.argmax_decided:
        return
    for step, (token, best, gap) in enumerate(zip(answer, expected.best, expected.gaps, strict=True)):
        if token != best and gap > 2 * bounds.difference * std:
            yield (
                f"{prompt.name}: token {step} of the answer is {token}, and {best} in the reference, {gap:.3g} ahead: "
                "further than any allowed difference explains"
            )
            return


def _sample(
    prompt: Prompt, answer: tuple[int, ...], expected: Expected, outcome: Outcome, task: Task, codec: Codec
) -> Sample:
    """The answer beside the reference's."""
    theirs = expected.answer
    stack = "linnet-export reference (f32, argmax)"
    if not expected.own:
        stack = "linnet-export reference (f32, argmax, up to its first other token)"
    common = first_other(answer, theirs)
    shown, reference = (
        tokens[:-1] if tokens[-1:] and tokens[-1] in task.ends else tokens for tokens in (answer, theirs)
    )
    return Sample(
        prompt=prompt.text,
        chat=prompt.chat,
        output=codec.decode(shown),
        reference=codec.decode(reference),
        reference_stack=stack,
        tokens=len(answer),
        agreeing_prefix=min(len(answer), len(theirs)) if common is None else common,
        stack=f"{outcome.version} ({outcome.settings})",
        output_pieces=codec.pieces(shown),
        reference_pieces=codec.pieces(reference),
    )
