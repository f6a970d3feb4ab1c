"""The entries of the reference against its own `forward` on the same tokens, and `sample` against jax.random.

`forward` is compared with transformers in test_reference. What an entry gives for a sequence must not depend on how
the sequence came: with others or alone, in one pass or token by token, over whatever the cache held before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from linnet_export import reference
from linnet_export.reference import phi3, random
from linnet_export.reference.phi3 import Cache, Phi3
from random_models import Spec, save, tokens_of

# As in test_reference: sums of a few hundred f32 terms in another order leave ten or twenty times 2^-24 = 6e-8 of the
# logits' deviation, and the mildest mutation below is a thousand times over the bound.
F32_BOUND = 1e-5

# A gradient has come through twice as many sums, the last ones over all tokens, and few of its values are large.
GRADIENT_BOUND = 1e-4

SHORT, LONG = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5), (1.1, 1.4, 1.9, 2.5, 3.2, 4.0)
CASES = {
    "equal heads": Spec(),
    "grouped and tied": Spec(kv_heads=3, tied=True),
    "partial rotary, window": Spec(kv_heads=3, partial_rotary=0.75, window=8),
    "longrope, window": Spec(
        original_context=16, partial_rotary=0.75, short_factors=SHORT, long_factors=LONG, attention_factor=1.3, window=8
    ),
}
WINDOW = CASES["partial rotary, window"]

BATCH, MAX_SEQ = 4, 32
NOWHERE = MAX_SEQ - 1  # a position that no request reads: where idle rows and padding go
LENGTHS = (5, 13, 9, 11)  # of the sequences' prompts: below and above the window of 8
WHOLE = 20  # up to where they are continued
SLOTS = (3, 0, 2, 1)  # the row of each sequence, where an entry can choose it

Loaded = Callable[..., Phi3]
Produced = dict[tuple[int, int], Tensor]  # logits after a position of a sequence


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The reference with a spec's weights, saved once; other arguments as reference.load."""
    directories: dict[Spec, Path] = {}

    def load(spec: Spec, **options: Any) -> Phi3:
        if spec not in directories:
            directories[spec] = tmp_path_factory.mktemp("model")
            save(spec, directories[spec])
        if spec.long_factors is not None:
            # Pinned: by length, keys cached before the original context would keep the short factors.
            options = {"factors": "long"} | options
        return reference.load(directories[spec], **options)

    return load


def distance(ours: Tensor, expected: Tensor) -> float:
    """The largest difference in deviations of what is expected."""
    ours, expected = ours.detach().float(), expected.detach().float()
    return float((ours - expected).abs().max() / expected.std())


def i32(*values: int | list[int] | tuple[int, ...]) -> Tensor:
    """A tensor of Linnet's integers."""
    return torch.tensor(values, dtype=torch.int32)


# What an earlier sequence may have left in a cache: 0 times a NaN is a NaN, and a score of 1e38 outweighs all others.
LEFT = {"NaN": torch.nan, "huge": 1e38}


def used_cache(model: Phi3, left: float = torch.nan) -> Cache:
    cache = model.cache(batch=BATCH, max_seq=MAX_SEQ)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(left)
    return cache


# Ways through the cache. Each runs the four sequences `tokens` [4, WHOLE] and returns logits along them.


def decode_on(model: Phi3, tokens: Tensor, cache: Cache, reached: dict[int, int], rows: tuple[int, ...]) -> Produced:
    """Continues sequences from where they are, all rows in each step; those that are through or not there idle."""
    produced = {}
    reached = dict(reached)
    while any(position < WHOLE for position in reached.values()):
        step, positions = torch.full((BATCH, 1), 7, dtype=torch.int32), torch.full((BATCH,), NOWHERE, dtype=torch.int32)
        running = [sequence for sequence, position in reached.items() if position < WHOLE]
        for sequence in running:
            step[rows[sequence]], positions[rows[sequence]] = tokens[sequence, reached[sequence]], reached[sequence]
        logits = model.decode_rows(step, positions, cache)
        for sequence in running:
            produced[sequence, reached[sequence]] = logits[rows[sequence]]
            reached[sequence] += 1
    return produced


def by_decode_rows(model: Phi3, tokens: Tensor, cache: Cache) -> Produced:
    """From the first token on; a sequence joins as the one before it has three tokens."""
    produced: Produced = {}
    for time in range(WHOLE + 3 * (BATCH - 1)):
        at = {sequence: time - 3 * sequence for sequence in range(BATCH) if 0 <= time - 3 * sequence < WHOLE}
        step = [[int(tokens[sequence, at[sequence]]) if sequence in at else 7] for sequence in range(BATCH)]
        logits = model.decode_rows(i32(*step), i32(*(at.get(sequence, NOWHERE) for sequence in range(BATCH))), cache)
        produced |= {(sequence, position): logits[sequence] for sequence, position in at.items()}
    return produced


def by_prefill_slots(model: Phi3, tokens: Tensor, cache: Cache) -> Produced:
    """Three sequences into slots in no order, padded to the longest and beyond, then step by step."""
    joining = (0, 1, 2)
    padded = torch.full((3, 15), 7, dtype=torch.int32)
    for sequence in joining:
        padded[sequence, : LENGTHS[sequence]] = tokens[sequence, : LENGTHS[sequence]]
    logits = model.prefill_slots(padded, i32(*SLOTS[:3]), i32(*LENGTHS[:3]), cache)
    produced = {(sequence, LENGTHS[sequence] - 1): logits[sequence] for sequence in joining}
    return produced | decode_on(model, tokens, cache, {sequence: LENGTHS[sequence] for sequence in joining}, SLOTS)


@dataclass(frozen=True)
class Pack:
    """Prompts end to end, then three tokens of padding; the i-th of them is segment 40 - i, in row SLOTS[sequence]."""

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    segments: Tensor
    last: Tensor
    where: list[tuple[int, int]]  # the sequence and the position of each token, padding left out


def pack_of(tokens: Tensor, sequences: tuple[int, ...]) -> Pack:
    where = [(sequence, position) for sequence in sequences for position in range(LENGTHS[sequence])]
    ends = [where.index((sequence, LENGTHS[sequence] - 1)) for sequence in sequences]
    # Padding goes to a row of its prompts: where it is written, nobody reads.
    return Pack(
        tokens=i32(*(int(tokens[place]) for place in where), 7, 8, 9),
        rows=i32(*(SLOTS[sequence] for sequence, _ in where), *[SLOTS[sequences[0]]] * 3),
        positions=i32(*(position for _, position in where), *[NOWHERE] * 3),
        segments=i32(*(40 - sequences.index(sequence) for sequence, _ in where), 99, 99, 99),
        last=i32(*ends, *[ends[-1]] * (BATCH - len(ends))),
        where=where,
    )


def by_prefill_packed(model: Phi3, tokens: Tensor, cache: Cache) -> Produced:
    """Three sequences in one pack, then step by step."""
    joining = (2, 0, 1)
    pack = pack_of(tokens, joining)
    logits = model.prefill_packed(pack.tokens, pack.rows, pack.positions, pack.segments, pack.last, cache)
    assert torch.equal(logits[3], logits[2])  # `last` names that token again
    produced = {(sequence, LENGTHS[sequence] - 1): row for sequence, row in zip(joining, logits, strict=False)}
    return produced | decode_on(model, tokens, cache, {sequence: LENGTHS[sequence] for sequence in joining}, SLOTS)


def by_step_packed(model: Phi3, tokens: Tensor, cache: Cache) -> Produced:
    """Two sequences are on their way when two others join in the pass of their next step; then all step by step."""
    running, joining = (1, 3), (2, 0)
    first = pack_of(tokens, running)
    model.prefill_packed(first.tokens, first.rows, first.positions, first.segments, first.last, cache)
    pack = pack_of(tokens, joining)
    step, positions = torch.full((BATCH, 1), 7, dtype=torch.int32), torch.full((BATCH,), NOWHERE, dtype=torch.int32)
    for sequence in running:
        step[SLOTS[sequence]], positions[SLOTS[sequence]] = tokens[sequence, LENGTHS[sequence]], LENGTHS[sequence]
    logits = model.step_packed(pack.tokens, pack.rows, pack.positions, pack.segments, pack.last, step, positions, cache)
    assert logits.shape == (2 * BATCH, model.config.vocab)
    produced = {(sequence, LENGTHS[sequence] - 1): row for sequence, row in zip(joining, logits, strict=False)}
    produced |= {(sequence, LENGTHS[sequence]): logits[BATCH + SLOTS[sequence]] for sequence in running}
    reached = {sequence: LENGTHS[sequence] + (sequence in running) for sequence in range(BATCH)}
    return produced | decode_on(model, tokens, cache, reached, SLOTS)


def by_hidden_packed(model: Phi3, tokens: Tensor, _: Cache) -> Produced:
    """Without a cache: the head over the states of a pack whose tokens lie in no order."""
    pack = pack_of(tokens, (3, 1, 0, 2))
    order = torch.randperm(len(pack.tokens), generator=torch.Generator().manual_seed(5))
    states = model.hidden_packed(pack.tokens[order], pack.positions[order], pack.segments[order])
    logits = functional.linear(states, head_of(model))
    found = zip(order.tolist(), logits, strict=True)
    return {pack.where[token]: row for token, row in found if token < len(pack.where)}


def by_prefill(model: Phi3, tokens: Tensor, cache: Cache) -> Produced:
    """All rows at the same positions, in three passes; the last one's position is a tensor, as in a compiled graph."""
    produced: Produced = {}
    starts: tuple[int | Tensor, ...] = (0, 5, torch.tensor(12, dtype=torch.int32))
    for start, end in zip(starts, (5, 12, WHOLE), strict=True):
        logits = model.prefill(tokens[:, int(start) : end], start, cache)
        produced |= {(sequence, end - 1): row for sequence, row in enumerate(logits)}
    return produced


WAYS: dict[str, Callable[[Phi3, Tensor, Cache], Produced]] = {
    "prefill": by_prefill,
    "decode_rows": by_decode_rows,
    "prefill_slots": by_prefill_slots,
    "prefill_packed": by_prefill_packed,
    "step_packed": by_step_packed,
    "hidden_packed": by_hidden_packed,
}


def head_of(model: Phi3) -> Tensor:
    return (model.embedding if model.lm_head is None else model.lm_head).weight


def sequences_of(spec: Spec) -> Tensor:
    return tokens_of(spec, WHOLE, batch=BATCH).int()


def furthest(produced: Produced, whole: Tensor) -> float:
    """The largest distance of produced logits from those of forward, `[4, WHOLE, Vocab]`; NaN if there is a NaN."""
    assert produced
    places = list(produced)
    return distance(torch.stack([produced[place] for place in places]), torch.stack([whole[place] for place in places]))


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_through_the_cache_gives_the_logits_of_forward(way: str, case: str, left: str, loaded: Loaded) -> None:
    model, tokens = loaded(CASES[case]), sequences_of(CASES[case])
    assert furthest(WAYS[way](model, tokens, used_cache(model, LEFT[left])), model(tokens)) <= F32_BOUND


# Mutations.


def everybody_sees_everybody(config: phi3.Config, positions: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    return PACK(config, positions, torch.zeros_like(segments))


def write_elsewhere(rows_on: int, positions_on: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def write(cache: Cache, layer: int, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return WRITE(cache, layer, k, v, (rows + rows_on) % BATCH, (positions + positions_on) % MAX_SEQ)

    return write


PACK, WRITE = phi3.pack, Cache.write
Patch = tuple[Any, str, Any]
CACHED = ("prefill", "decode_rows", "prefill_slots", "prefill_packed", "step_packed")
PACKED = ("prefill_packed", "step_packed", "hidden_packed")
MUTATIONS: dict[str, tuple[tuple[str, ...], dict[str, Any], Patch | None]] = {
    "window one too short": (tuple(WAYS), {"window": 7}, None),
    "window one too long": (tuple(WAYS), {"window": 9}, None),
    "prompts of a pack see each other": (PACKED, {}, (phi3, "pack", everybody_sees_everybody)),
    "written to the next row": (CACHED, {}, (Cache, "write", write_elsewhere(1, 0))),
    "written one position further": (CACHED, {}, (Cache, "write", write_elsewhere(0, 1))),
}


@pytest.mark.parametrize(("mutation", "way"), [(name, way) for name, (ways, _, _) in MUTATIONS.items() for way in ways])
def test_a_mutation_fails_the_bound(mutation: str, way: str, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = loaded(WINDOW), sequences_of(WINDOW)
    whole = model(tokens)
    _, changes, patch = MUTATIONS[mutation]
    if patch is not None:
        monkeypatch.setattr(*patch)
    mutated = model.variant(**changes)
    # Over zeros, so that it is not a NaN that fails.
    assert furthest(WAYS[way](mutated, tokens, used_cache(mutated, 0.0)), whole) > 1000 * F32_BOUND


# Padding.


def test_padding_changes_no_bit(loaded: Loaded) -> None:
    model, tokens = loaded(WINDOW), sequences_of(WINDOW)
    pack, results = pack_of(tokens, (2, 0, 1)), []
    for padding in (7, 150):
        padded = torch.full((2, 15), padding, dtype=torch.int32)
        padded[0, :5], padded[1, :13] = tokens[0, :5], tokens[1, :13]
        slots = model.prefill_slots(padded, i32(3, 0), i32(5, 13), used_cache(model))
        filled = pack.tokens.clone()
        filled[-3:] = padding
        packed = model.prefill_packed(filled, pack.rows, pack.positions, pack.segments, pack.last, used_cache(model))
        results.append(torch.cat((slots, packed)))
    assert torch.equal(*results)


def test_rows_that_are_not_named_keep_what_they_hold(loaded: Loaded) -> None:
    model, tokens = loaded(WINDOW), sequences_of(WINDOW)
    caches = [used_cache(model, 0.25) for _ in range(2)]
    model.prefill_slots(tokens[:2, :9], i32(3, 0), i32(9, 9), caches[0])
    pack = pack_of(tokens, (0, 1))  # rows 3 and 0
    model.prefill_packed(pack.tokens, pack.rows, pack.positions, pack.segments, pack.last, caches[1])
    for cache in caches:
        for tensor in (*cache.keys, *cache.values):
            assert bool((tensor[1:3] == 0.25).all())
            assert not bool((tensor[[0, 3], :, :5] == 0.25).any())


# Longrope by length.


def test_each_sequence_of_a_call_picks_its_own_longrope_factors(loaded: Loaded) -> None:
    spec = replace(CASES["longrope, window"], window=None)
    model = loaded(spec, factors=None)
    tokens = sequences_of(spec)
    short, long = (model.variant(factors=factors) for factors in ("short", "long"))
    padded = tokens[:2].clone()
    padded[0, 12:] = 7
    expected = torch.stack((short(tokens[:1, :12])[0, -1], long(tokens[1:2])[0, -1]))
    assert distance(expected, long(padded)[[0, 1], [11, -1]]) > 1000 * F32_BOUND

    cache = model.cache(batch=2, max_seq=MAX_SEQ)
    assert distance(model.prefill_slots(padded, i32(0, 1), i32(12, WHOLE), cache), expected) <= F32_BOUND
    # One token less in the cache of each, then both of them in a step.
    short.prefill_slots(padded[:1, :11], i32(0), i32(11), cache)
    long.prefill_slots(padded[1:, :-1], i32(1), i32(WHOLE - 1), cache)
    last = torch.stack((padded[0, 11:12], padded[1, -1:]))
    assert distance(model.decode_rows(last, i32(11, WHOLE - 1), cache), expected) <= F32_BOUND

    packed = torch.cat((tokens[0, :12], tokens[1], i32(7)))
    positions = i32(*range(12), *range(WHOLE), NOWHERE)
    segments = i32(*[0] * 12, *[1] * WHOLE, 2)
    states = model.hidden_packed(packed, positions, segments)[[11, 11 + WHOLE]]
    assert distance(functional.linear(states, head_of(model)), expected) <= F32_BOUND
    stepped = model.step_packed(
        packed, i32(*[0] * 12, *[1] * (WHOLE + 1)), positions, segments, i32(11, 11 + WHOLE), i32([7], [7]),
        i32(NOWHERE, NOWHERE), cache,
    )  # fmt: skip
    assert distance(stepped[:2], expected) <= F32_BOUND
    # The padding is past the original context: a choice for the whole pass would be the long factors.
    alone = model.step_packed(
        packed[[*range(12), -1]], i32(*[0] * 13), positions[[*range(12), -1]], segments[[*range(12), -1]], i32(11, 11),
        last, i32(NOWHERE, WHOLE - 1), cache,
    )  # fmt: skip
    assert distance(alone[[0, 3]], expected) <= F32_BOUND


# Losses.


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_cross_entropy(case: str, loaded: Loaded) -> None:
    model, tokens = loaded(CASES[case]), sequences_of(CASES[case])
    model.requires_grad_(True)
    parameters = list(model.parameters())
    sequences = (3, 1, 0, 2)
    pack = pack_of(tokens, sequences)
    draw = torch.Generator().manual_seed(6)
    targets = torch.randint(model.config.vocab, pack.tokens.shape, generator=draw)
    weights = torch.rand(pack.tokens.shape, generator=draw)
    weights[2], weights[-3:] = 0.0, 0.0

    # Each prompt alone.
    logits = torch.cat([model(tokens[[sequence], : LENGTHS[sequence]])[0] for sequence in sequences])
    entropy = functional.cross_entropy(logits, targets[:-3], reduction="none")
    expected = (weights[:-3] * entropy).sum()
    expected_gradients = torch.autograd.grad(expected, parameters)

    packed = pack.tokens, pack.positions, pack.segments, targets
    log_probs = model.log_probs_packed(*packed)
    assert log_probs.dtype == torch.float32
    assert distance(log_probs[:-3], -entropy) <= F32_BOUND
    loss = model.loss_packed(*packed, weights)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # a sum of positive terms, some units of 2^-24 each
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), expected_gradients, strict=True):
        assert distance(ours, theirs) <= GRADIENT_BOUND

    # A position that is left out has no gradient, and a shifted target or another prompt's token another one.
    shifted = model.loss_packed(pack.tokens, pack.positions, pack.segments, targets.roll(1), weights)
    joined = model.loss_packed(pack.tokens, pack.positions, torch.zeros_like(pack.segments), targets, weights)
    for mutated in (shifted, joined):
        assert distance(torch.autograd.grad(mutated, parameters)[0], expected_gradients[0]) > 100 * GRADIENT_BOUND


def test_losses_of_bf16_are_f32_of_its_logits(loaded: Loaded) -> None:
    model, tokens = loaded(WINDOW, dtype="bf16"), sequences_of(WINDOW)[0]
    targets = tokens.roll(-1).long()
    packed = tokens, torch.arange(WHOLE), torch.zeros_like(tokens)
    assert model.hidden_packed(*packed).dtype == torch.bfloat16
    log_probs = model.log_probs_packed(*packed, targets)
    logits = model(tokens[None])[0]  # of the same shapes, so the same bits
    expected = -functional.cross_entropy(logits.float(), targets, reduction="none")
    assert distance(log_probs, expected) <= F32_BOUND
    # In bf16 the log-probabilities, about -5, would be multiples of 2^-6.
    assert distance(-functional.cross_entropy(logits, targets, reduction="none"), expected) > 1000 * F32_BOUND
    loss = model.loss_packed(*packed, targets, torch.ones(WHOLE))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(-float(expected.sum()), rel=1e-6)


# Generation that stops.


def test_generate_until_stops_when_all_rows_end_together(loaded: Loaded) -> None:
    model, tokens = loaded(WINDOW), sequences_of(WINDOW)

    def until(rows: Tensor, eos: int, max_new: int = 12) -> tuple[Tensor, int]:
        cache = model.cache(batch=len(rows), max_seq=MAX_SEQ)
        model.prefill(rows[:, :-1], 0, cache)
        return model.generate_until(rows[:, -1:], rows.shape[1] - 1, max_new, eos, cache)

    greedy = tokens[:2, :6]
    for _ in range(12):
        greedy = torch.cat((greedy, model(greedy)[:, -1].argmax(-1, keepdim=True).int()), dim=1)
    greedy = greedy[:, 6:]
    eos, other = int(greedy[0, 4]), int(greedy[1, 4])
    assert eos != other
    first = greedy[0].tolist().index(eos) + 1

    produced, count = until(tokens[[0, 0], :6], eos)
    assert (produced.dtype, produced.shape, count) == (torch.int32, (2, 12), first)
    assert torch.equal(produced[:, :first], greedy[[0, 0], :first])
    assert not bool(produced[:, first:].any())

    # One row has produced it and the other has not: both go on, and neither stops at its own.
    assert eos not in greedy[1].tolist()
    produced, count = until(tokens[:2, :6], eos)
    assert count == 12
    assert torch.equal(produced, greedy)
    # The last step allowed may be the end as well.
    assert until(tokens[[0, 0], :6], eos, first)[1] == first


def test_no_token_is_no_generation(loaded: Loaded) -> None:
    model = loaded(WINDOW)
    cache = model.cache(batch=1, max_seq=8)
    for generate in (
        lambda: model.generate(i32([7]), 0, 0, cache),
        lambda: model.generate_until(i32([7]), 0, 0, 1, cache),
        lambda: model.sample(i32([7]), 0, 0, torch.tensor([0, 1]), 1.0, cache),
    ):
        with pytest.raises(ValueError, match="0 tokens asked for; at least 1 is needed"):
            generate()


# Sampling.


SEEDS = (0, 1, 42, 2**31 + 5, 2**32 - 1)


def jax_key(seed: int) -> tuple[Any, Tensor]:
    key = jax.random.key(seed, impl="threefry2x32")
    return key, words(jax.random.key_data(key))


def words(of: Any) -> Tensor:
    return torch.from_numpy(np.asarray(of).astype(np.int64))


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_bits_and_uniforms_are_those_of_jax(seed: int) -> None:
    assert jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    theirs, ours = jax_key(seed)
    for count in (1, 7, 1001):
        assert torch.equal(random.split(ours, count), words(jax.random.key_data(jax.random.split(theirs, count))))
        assert torch.equal(random.random_bits(ours, count), words(jax.random.bits(theirs, (count,))))
        expected = torch.from_numpy(np.array(jax.random.uniform(theirs, (count,))))
        assert torch.equal(random.uniform(ours, count), expected)
    # A key of a key, and the draws of a matrix in the order of its rows.
    theirs, ours = jax.random.split(theirs, 3)[1], random.split(ours, 3)[1]
    expected = torch.from_numpy(np.array(jax.random.uniform(theirs, (5, 13))))
    assert torch.equal(random.uniform(ours, 65).view(5, 13), expected)


def drawn(key: Any, logits: Tensor) -> tuple[list[int], float]:
    """What categorical says, computed in f64 from JAX's uniforms, and the smallest lead of a choice."""
    noise = -np.log(-np.log(1 - np.asarray(jax.random.uniform(key, (logits.numel(),))).astype(np.float64)))
    noisy = torch.from_numpy(noise).view(logits.shape) + logits.double()
    best = noisy.topk(2, dim=-1)
    return best.indices[:, 0].tolist(), float((best.values[:, 0] - best.values[:, 1]).min())


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.5])
def test_sample_draws_what_the_definition_draws(temperature: float, loaded: Loaded) -> None:
    model, tokens = loaded(WINDOW), sequences_of(WINDOW)[:3, :6]
    theirs, ours = jax_key(42)
    cache = model.cache(batch=3, max_seq=MAX_SEQ)
    model.prefill(tokens[:, :-1], 0, cache)
    produced = model.sample(tokens[:, -1:], 5, 12, ours, temperature, cache)
    assert (produced.dtype, produced.shape) == (torch.int32, (3, 12))
    for key in jax.random.split(theirs, 12):
        chosen, lead = drawn(key, model(tokens)[:, -1] / temperature)
        assert lead > 1e-4  # far over what f32 and another order of sums can turn
        tokens = torch.cat((tokens, i32(*([token] for token in chosen))), dim=1)
    assert torch.equal(produced, tokens[:, 6:])
    again = model.sample(tokens[:, 5:6], 5, 12, random.split(ours, 2)[1], temperature, cache)
    assert not torch.equal(produced, again)


def test_categorical_draws_in_proportion() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4)
    shares = random.categorical(torch.tensor([0, 9]), logits).bincount() / 20_000
    # Five deviations of a share of 20,000 draws, at most sqrt(0.25 / 20,000) each.
    assert float((shares - torch.tensor([0.5, 0.3, 0.15, 0.05])).abs().max()) <= 5 * (0.25 / 20_000) ** 0.5


def test_a_draw_of_zero_takes_its_token() -> None:
    key, place = torch.tensor([0, 46]), 9926  # found by trying keys
    assert float(random.uniform(key, 1 << 14)[place]) == 0
    logits = torch.zeros(2, 1 << 13)
    logits[1, place - (1 << 13)] = -1000.0
    assert int(random.categorical(key, logits)[1]) == place - (1 << 13)


def test_a_key_counts_by_its_low_words() -> None:
    assert torch.equal(
        random.random_bits(torch.tensor([-1, 2**40 + 3]), 9), random.random_bits(torch.tensor([2**32 - 1, 3]), 9)
    )


def test_a_temperature_that_is_none_is_refused(loaded: Loaded) -> None:
    model = loaded(WINDOW)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="it must be above 0; generate takes the most likely token"):
            model.sample(i32([7]), 0, 1, torch.tensor([0, 1]), temperature, model.cache(batch=1, max_seq=8))


# Shapes.


def test_every_wrong_shape_is_named(loaded: Loaded) -> None:
    model = loaded(WINDOW)
    cache = model.cache(batch=2, max_seq=8)
    five, two = i32(*range(5)), i32(0, 1)
    with pytest.raises(ValueError, match=r"(?s)tokens is \[1, 1\], it must be \[2, 1\].*positions is \[5\].* \[2\]"):
        model.decode_rows(i32([7]), five, cache)
    with pytest.raises(ValueError, match=r"(?s)slots is \[5\], it must be \[1\].*lengths is \[2\], it must be \[1\]"):
        model.prefill_slots(five[None], five, two, cache)
    with pytest.raises(ValueError, match="9 tokens do not fit into a cache of 8 positions"):
        model.prefill_slots(i32([*range(9)]), i32(0), i32(9), cache)
    with pytest.raises(ValueError, match=r"(?s)rows is \[2\], it must be \[5\].*segments is \[5, 1\]"):
        model.prefill_packed(five, two, five, five[:, None], two, cache)
    with pytest.raises(ValueError, match=r"last is \[5\], it must be \[2\]"):
        model.prefill_packed(five, five, five, five, five, cache)
    with pytest.raises(ValueError, match=r"(?s)step_tokens is \[2\], it must be \[2, 1\].*step_positions is \[5\]"):
        model.step_packed(five, five, five, five, two, two, five, cache)
    with pytest.raises(ValueError, match=r"(?s)tokens is \[1, 5\], it must be \[1\].*segments is \[2\]"):
        model.hidden_packed(five[None], two, two)
    with pytest.raises(ValueError, match=r"targets is \[2\], it must be \[5\]"):
        model.log_probs_packed(five, five, five, two)
    with pytest.raises(ValueError, match=r"weights is \[2\], it must be \[5\]"):
        model.loss_packed(five, five, five, five.long(), two)
    with pytest.raises(ValueError, match=r"key is \[3\], it must be \[2\]"):
        model.sample(i32([7], [7]), 0, 1, torch.tensor([0, 1, 2]), 1.0, cache)


# Compiling.


def test_every_entry_compiles_to_one_graph(loaded: Loaded) -> None:
    spec = CASES["longrope, window"]
    model, tokens = loaded(spec, layers=1, factors=None), sequences_of(spec)
    pack = pack_of(tokens, (2, 0, 1))
    packed = pack.tokens, pack.rows, pack.positions, pack.segments, pack.last
    read = pack.tokens, pack.positions, pack.segments
    targets = pack.tokens.long()
    key = torch.tensor([0, 1])
    calls: dict[str, Callable[[Cache], tuple[Any, ...]]] = {
        "next_token": lambda _: (tokens,),
        "prefill": lambda cache: (tokens[:, :9], 0, cache),
        "decode": lambda cache: (tokens[:, :1], torch.tensor(9), cache),
        "decode_rows": lambda cache: (tokens[:, :1], i32(9, 3, 1, 0), cache),
        "prefill_slots": lambda cache: (tokens[:2], i32(3, 0), i32(5, 13), cache),
        "prefill_packed": lambda cache: (*packed, cache),
        "step_packed": lambda cache: (*packed, tokens[:, :1], i32(9, 3, 1, 0), cache),
        "hidden_packed": lambda _: read,
        "log_probs_packed": lambda _: (*read, targets),
        "loss_packed": lambda _: (*read, targets, torch.ones(len(targets))),
        "generate": lambda cache: (tokens[:, :1], 0, 2, cache),
        "sample": lambda cache: (tokens[:, :1], 0, 2, key, 0.7, cache),
    }
    for name, arguments in calls.items():
        entry: Callable[..., Tensor] = getattr(model, name)
        in_one_graph = torch.compile(entry, backend="eager", fullgraph=True)
        expected = entry(*arguments(used_cache(model, 0.0)))
        compiled = in_one_graph(*arguments(used_cache(model, 0.0)))
        if name in ("generate", "sample"):
            assert torch.equal(compiled, expected), name
        elif name == "loss_packed":
            assert float(compiled) == pytest.approx(float(expected), rel=1e-6)
        else:
            assert distance(compiled, expected) <= F32_BOUND, name
