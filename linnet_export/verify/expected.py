"""What the reference says to an outcome: its logits at the positions that count, its choices, its own answers.

    [expected] = expect(truth, task, [outcome])

The reference runs on the source, in f32, with the longrope set that the runtime used. All sequences of all runtimes go
through it in one pass: each prompt with the answer that a runtime gave after it, which shows at once the reference's
choice at every step of that answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from linnet_export.verify.runtimes import Factors, Outcome, Rows, Task
from linnet_export.verify.truth import Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The reference on one prompt of one outcome: logits at the positions that count; its best token and how far it is
    ahead of the second, at each step of the runtime's answer; its own answer, which is all of it if `own`, else up to
    the first token that the runtime has not."""

    rows: Rows
    best: tuple[int, ...]
    gaps: tuple[float, ...]
    answer: tuple[int, ...] = ()
    own: bool = False


def counted(outcome: Outcome, index: int, task: Task) -> tuple[tuple[int, ...], str]:
    """The positions of a prompt that count, and which do not and why."""
    given, window = outcome.positions[index], task.config.window
    if outcome.window or window is None:
        return given, ""
    kept = tuple(position for position in given if position < window)
    if len(kept) == len(given):
        return given, ""
    return kept, (
        f"{len(given) - len(kept)} of {len(given)} positions, from {window} on: the runtime ignores the window of "
        f"{window}, so it sees more there than the model does"
    )


def steps(outcome: Outcome, index: int, task: Task) -> int:
    """How many tokens of an answer count."""
    return min(len(outcome.greedy[index]), _most_steps(outcome, index, task))


def _most_steps(outcome: Outcome, index: int, task: Task) -> int:
    """The length of an answer up to which the model's window is not passed, nor longrope's factors change."""
    length, config = len(task.prompts[index].ids), task.config
    most = task.tokens
    if not outcome.window and config.window is not None:
        most = min(most, config.window - length + 1)
    if outcome.factors is None and config.rope.is_long and length <= config.rope.original_context:
        most = min(most, config.rope.original_context - length + 1)
    return max(0, most)


def expect(truth: Truth, task: Task, outcomes: Sequence[Outcome]) -> list[list[Expected]]:
    """What the reference gives for each outcome and each of its prompts, in as few passes as there are factor sets."""
    wanted: dict[Factors | None, dict[tuple[int, ...], dict[int, None]]] = {}
    for outcome in outcomes:
        sequences = wanted.setdefault(outcome.factors, {})
        for index in range(len(task.prompts)):
            sequence, asked, following = _sequence(outcome, index, task)
            sequences.setdefault(sequence, {}).update(dict.fromkeys((*asked, *following)))
    given: dict[tuple[Factors | None, tuple[int, ...]], tuple[dict[int, int], Rows]] = {}
    for factors, sequences in wanted.items():
        positions = [list(asked) for asked in sequences.values()]
        for sequence, asked_here, rows in zip(
            sequences, positions, truth.logits(list(sequences), positions, factors=factors), strict=True
        ):
            given[factors, sequence] = {position: row for row, position in enumerate(asked_here)}, rows

    def one(outcome: Outcome, index: int) -> Expected:
        sequence, asked, following = _sequence(outcome, index, task)
        places, rows = given[outcome.factors, sequence]
        ahead = rows[[places[position] for position in following]]
        best, gaps = _best(ahead)
        return Expected(rows=rows[[places[position] for position in asked]], best=best, gaps=gaps)

    return _answered(truth, task, outcomes, [[one(o, index) for index in range(len(task.prompts))] for o in outcomes])


def _answered(
    truth: Truth, task: Task, outcomes: Sequence[Outcome], expected: list[list[Expected]]
) -> list[list[Expected]]:
    """Adds the reference's own answers, which begin with its choices along a runtime's answer, up to and with the first
    that is another token: the longest such beginning is all of it, or goes on from there if the model fits into memory.
    """
    known: dict[tuple[Factors | None, int], tuple[int, ...]] = {}
    needed: dict[tuple[Factors | None, int], int] = {}
    for outcome, theirs in zip(outcomes, expected, strict=True):
        for index, one in enumerate(theirs):
            key = outcome.factors, index
            first = first_other(outcome.greedy[index], one.best)
            known[key] = max(known.get(key, ()), one.best if first is None else one.best[: first + 1], key=len)
            needed[key] = max(needed.get(key, 0), _most_steps(outcome, index, task) if one.best else 0)

    def is_whole(answer: Sequence[int], length: int) -> bool:
        return len(answer) >= length or (bool(answer) and answer[-1] in task.ends)

    if truth.fits(task.config):
        for factors in dict.fromkeys(factors for factors, _ in known):
            open_ended = [key for key in known if key[0] == factors and not is_whole(known[key], needed[key])]
            starts = [(*task.prompts[key[1]].ids, *known[key]) for key in open_ended]
            counts = [needed[key] - len(known[key]) for key in open_ended]
            if open_ended:
                found = truth.greedy(starts, counts, ends=task.ends, factors=factors)
                for key, answer in zip(open_ended, found, strict=True):
                    known[key] += answer

    def answered(outcome: Outcome, index: int, one: Expected) -> Expected:
        most = _most_steps(outcome, index, task)
        answer = known[outcome.factors, index][:most]
        return replace(one, answer=answer, own=is_whole(answer, most))

    return [
        [answered(outcome, index, one) for index, one in enumerate(theirs)]
        for outcome, theirs in zip(outcomes, expected, strict=True)
    ]


def _best(rows: Rows) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The best entry of each row, and how far it is ahead of the second."""
    if not len(rows):
        return (), ()
    top = np.partition(rows, -2, axis=-1)[:, -2:]
    return tuple(rows.argmax(-1).tolist()), tuple((top[:, 1] - top[:, 0]).tolist())


def first_other(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where two answers differ; None where one begins with the other."""
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)


def _sequence(outcome: Outcome, index: int, task: Task) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A prompt with its answer (without the last token, which nothing follows); positions that count in the prompt;
    those that the answer's tokens follow."""
    ids, count = task.prompts[index].ids, steps(outcome, index, task)
    answer = outcome.greedy[index][: max(0, count - 1)]
    return (*ids, *answer), counted(outcome, index, task)[0], tuple(range(len(ids) - 1, len(ids) - 1 + count))
