"""Phi-3 in PyTorch, from Linnet's description of it: the model that every export is compared with.

    model = Phi3(config)                           # parameters carry their Linnet paths
    logits = model(torch.tensor([[1, 2, 3]]))      # [Batch, S, Vocab]
    cache = model.cache(batch=1, max_seq=4096)
    logits = model.prefill(prompt, 0, cache)       # then model.decode(token, prompt.shape[1], cache)

Shapes: B or M sequences of S tokens, P tokens of several sequences packed end to end, Batch rows of a cache of MaxSeq
positions; Hidden wide; Heads query heads share KvHeads key/value heads of width D.
T is the type of the parameters (f32, bf16 or f16) and of everything between layers. What is f32 whatever T is:

- RMS norm: the mean square and the product with its inverse root; then cast to T, then times the weight in T.
- The rotary tables: frequencies, angles, cosines and sines; then cast to T. The rotation itself is in T.
- Attention: scores, softmax and mixing, from queries, keys and values cast up; the result is cast to T.
- Losses, log-probabilities and what `sample` draws from: of logits in T, cast up.

Matrix products accumulate as the library does (f32 inside) and give T; SiLU rounds once, to T.

Every entry is `hidden_states` with its own positions and its own `attend`: where keys and values come from, and who
sees whom. Nothing but `generate_until` depends on values read back from a tensor, so each other entry compiles to one
graph; which is why shapes are checked, while rows, positions and tokens that do not exist are left to torch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from linnet_export.reference.random import categorical, split

Factors = Literal["short", "long"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

MASKED = -1e30  # what a masked score becomes: finite, and exp(MASKED - peak) is exactly 0 in f32
HEAD_ROWS = 1 << 15  # of the head in one product: all that Phi-3-mini has, and what `stream` holds of a larger head


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the model is. ValueError, naming every problem, if it is not a model.

    `window` counts the query itself. `rotary_dims` are the first dimensions of a head, those that rotate. The factor
    tuples (`rotary_dims / 2` long) are longrope's: the short ones serve up to `original_context` positions, the long
    ones past it, unless `factors` pins a set. `attention_factor` multiplies cosines and sines; 1 without longrope.
    """

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int
    eps: float
    window: int | None
    theta: float
    rotary_dims: int
    tied: bool
    original_context: int | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    attention_factor: float = 1.0
    factors: Factors | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}, it must be a whole number above 0"
            for name in ("vocab", "hidden", "heads", "kv_heads", "inner", "layers")
            if not isinstance(value := getattr(self, name), int) or value < 1
        ]
        if not problems:
            if self.hidden % self.heads:
                problems.append(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
            if self.heads % self.kv_heads:
                problems.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
            if self.rotary_dims % 2 or not 0 < self.rotary_dims <= self.head_dim:
                problems.append(f"rotary_dims {self.rotary_dims} must be even, above 0, at most {self.head_dim}")
        if self.window is not None and self.window < 1:
            problems.append(f"window is {self.window}, it must be at least 1, or None for no window")
        if (self.short_factors is None) != (self.long_factors is None):
            problems.append("longrope needs both the short and the long factors")
        for name, listed in (("short", self.short_factors), ("long", self.long_factors)):
            if listed is not None and len(listed) != self.rotary_dims // 2:
                problems.append(f"{len(listed)} {name} factors, rotary_dims {self.rotary_dims} need half as many")
        if self.long_factors is not None and self.original_context is None:
            problems.append("longrope needs original_context, the length up to which the short factors serve")
        if self.factors not in (None, "short", "long"):
            problems.append(f"factors is {self.factors!r}, it must be 'short', 'long' or None (by length)")
        if problems:
            raise ValueError("\n".join(problems))


# Arithmetic without parameters.


def inverse_frequencies(config: Config, largest: Tensor) -> Tensor:
    """Radians per position, f32 `[*L, rotary_dims / 2]` (without `*L` if the same for all), where `largest` `[*L]` is
    the largest position that a sequence uses.

    theta^(-2i / rotary_dims), divided by longrope's factors: the long ones if `largest + 1` positions are more than
    `original_context` (the rule of transformers), unless `config.factors` pins a set. The rotary sources write the
    same number as exp(-(2i / D) log theta): within 2^-20 of it, less exact in f32 than the power, and the power is
    what transformers computes.
    """
    steps = torch.arange(0, config.rotary_dims, 2, device=largest.device).float()
    powers = config.theta ** (steps / config.rotary_dims)
    if config.short_factors is None or config.long_factors is None or config.original_context is None:
        return 1.0 / powers
    short, long = (torch.tensor(f, device=largest.device) for f in (config.short_factors, config.long_factors))
    if config.factors is None:
        # A choice without a branch: its condition is a tensor, which a compiled graph cannot branch on.
        return 1.0 / (torch.where(largest[..., None] >= config.original_context, long, short) * powers)
    return 1.0 / ((long if config.factors == "long" else short) * powers)


def rope_rows(config: Config, positions: Tensor, largest: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine rows of `positions` `[*P]`: two `[*P, rotary_dims]`, each frequency once in either half.

    `largest`, which broadcasts with the positions, is the largest one of each token's sequence; None: of its row.
    """
    if largest is None:
        largest = positions.amax(dim=-1, keepdim=True)
    angles = positions[..., None].float() * inverse_frequencies(config, largest)
    full = torch.cat((angles, angles), dim=-1)
    return (full.cos() * config.attention_factor).to(dtype), (full.sin() * config.attention_factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[B, N, S, D]`, its first R dimensions rotated by rows `[S, R]` or `[B, S, R]`, the others as they are.

    Dimension i turns with dimension i + R / 2: (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    turning, passing = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos.unsqueeze(-3) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(-3)
    return torch.cat((turned, passing), dim=-1)


def sees(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions `[K]` each query position `[*Q]` sees, `[*Q, K]`: itself and the `window - 1` before it."""
    queries = queries[..., None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Queries `[B, Heads, Q, D]` over keys and values `[B, KvHeads, K, D]`: `[B, Heads, Q, D]`, in the queries' type.

    `mask` is `[Q, K]` or `[B, 1, Q, K]`, true where a query sees a key. Consecutive query heads share a key/value
    head: their queries stand side by side in one product, so keys and values are never repeated.
    """
    batch, heads, length, dim = q.shape
    grouped = (batch, k.shape[1], heads // k.shape[1] * length)
    scores = q.float().reshape(*grouped, dim) @ k.float().transpose(-1, -2) * dim**-0.5
    scores = scores.view(batch, heads, length, -1).masked_fill(~mask, MASKED)
    weights = scores.softmax(dim=-1).view(*grouped, -1)
    mixed: Tensor = weights @ v.float()
    return mixed.view(q.shape).to(q.dtype)


def over_all(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`attention` over all positions of a cache, written or not.

    Values that no query sees become 0: what an earlier sequence left there may be anything, and its weight of 0 times
    a NaN would be a NaN.
    """
    return attention(q, keys, values.masked_fill(~mask.any(dim=-2).unsqueeze(-1), 0), mask)


def whole(config: Config, length: int, device: torch.device) -> tuple[Tensor, LayerAttend]:
    """Positions `[S]` and attention of whole sequences, from position 0 and without a cache."""
    positions = torch.arange(length, device=device)
    mask = sees(positions, positions, config.window)
    return positions, lambda _, q, k, v: attention(q, k, v, mask)


def pack(config: Config, positions: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Who sees whom among the tokens of a pack, `[P, P]`, and the largest position of each one's segment, `[P]`."""
    same = segments[:, None] == segments
    largest = positions.expand(same.shape).masked_fill(~same, 0).amax(dim=-1)
    return same & sees(positions, positions, config.window), largest


def head_parts(vocab: int) -> list[slice]:
    """The rows of the head, in the parts that are multiplied one by one: products of these shapes give these bits."""
    return [slice(start, min(start + HEAD_ROWS, vocab)) for start in range(0, vocab, HEAD_ROWS)]


def greedy(_: int, logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def check(**tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    """ValueError, naming every tensor that does not have the shape beside it."""
    problems = [
        f"{name} is {list(tensor.shape)}, it must be {list(shape)}"
        for name, (tensor, shape) in tensors.items()
        if tensor.shape != shape
    ]
    if problems:
        raise ValueError("\n".join(problems))


def check_pack(tokens: Tensor, **others: Tensor) -> None:
    """`check` that all are `[P]`."""
    check(**{name: (tensor, (len(tokens),)) for name, tensor in {"tokens": tokens, **others}.items()})


# Blocks, named so that their parameters have the Linnet paths.


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return normalized.to(x.dtype) * self.weight


class Attention(nn.Module):
    """`qkv.weight` is `[(Heads + 2 KvHeads) D, Hidden]`: query rows, then key rows, then value rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        projected = self.qkv(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        turning, v = projected.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        q, k = torch.split(rotate(turning, cos, sin), [self.heads, self.kv_heads], dim=1)
        mixed = attend(q, k, v)
        merged: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return merged


class Mlp(nn.Module):
    """`gate_up.weight` is `[2 Inner, Hidden]`: the gate's rows (those that pass the activation), then the others."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden, 2 * config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        narrowed: Tensor = self.down(functional.silu(gate) * up)
        return narrowed


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.mlp_norm = RmsNorm(config.hidden, config.eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        attended = x + self.attention(self.attention_norm(x), cos, sin, attend)
        added: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return added


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys (rotated) and values of every position, one `[Batch, KvHeads, MaxSeq, D]` tensor a layer, in T.

    A call writes the positions it is given and never clears: what an earlier sequence left further on is not seen.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0]

    @property
    def max_seq(self) -> int:
        return self.keys[0].shape[2]

    def write(self, layer: int, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Puts `[B, KvHeads, S, D]` at `rows` and `positions`, which broadcast to `[B, S]`; returns all of the layer.

        Where several tokens go to one place, which of them stays is not defined.
        """
        self.keys[layer][rows, :, positions] = k.transpose(1, 2)
        self.values[layer][rows, :, positions] = v.transpose(1, 2)
        return self.keys[layer], self.values[layer]


class Phi3(nn.Module):
    """The model and its entries. Tokens and positions are integers, logits are T; `lm_head` is absent when tied."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.hidden, config.eps)
        self.lm_head = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)

    def variant(self, **changes: Any) -> Self:
        """The same weights, not copied, under a config changed in what has no shape, such as `variant(window=None)`."""
        with torch.device("meta"):
            other = type(self)(replace(self.config, **changes))
        other.load_state_dict(self.state_dict(), assign=True)
        return other.requires_grad_(False).train(self.training)

    def cache(self, *, batch: int, max_seq: int) -> Cache:
        """An empty cache in the model's type, on its device."""
        weight, config = self.embedding.weight, self.config
        shape = (batch, config.kv_heads, max_seq, config.head_dim)
        keys, values = ([weight.new_zeros(shape) for _ in range(config.layers)] for _ in range(2))
        return Cache(keys, values)

    # Entries.

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position: tokens `[B, S]`, logits `[B, S, Vocab]`."""
        return self.logits(self._whole(tokens))

    def next_token(self, tokens: Tensor) -> Tensor:
        """Logits after the last position: tokens `[B, S]`, logits `[B, Vocab]`."""
        return self.logits(self._whole(tokens)[:, -1])

    def prefill(self, tokens: Tensor, pos: int | Tensor, cache: Cache) -> Tensor:
        """Logits `[Batch, Vocab]` after the last of tokens `[Batch, S]`, which stand at positions pos .. pos + S - 1.

        Their keys and values go into the cache, and each query sees the cached positions up to its own, so a prompt
        may come in parts; `decode` continues at pos + S. With longrope a call of any entry picks the factors of a
        sequence from the largest position that it has in this call, and keys cached by earlier calls stay rotated as
        they were. A `pos` that is a 0-d tensor serves a compiled graph at every position. ValueError if the tokens do
        not fit into the cache.
        """
        batch, length = tokens.shape
        if batch != cache.rows:
            raise ValueError(f"{batch} sequences, but the cache has {cache.rows} rows")
        reach = None
        if isinstance(pos, int):
            reach = pos + length
            if not 0 <= pos < reach <= cache.max_seq:
                raise ValueError(
                    f"{length} tokens at position {pos} do not fit into a cache of {cache.max_seq} positions"
                )
        return self._cached(tokens, torch.arange(length, device=tokens.device)[None] + pos, cache, reach)

    def decode(self, token: Tensor, pos: int | Tensor, cache: Cache) -> Tensor:
        """Logits `[Batch, Vocab]` after one more token a row, `[Batch, 1]`, at position `pos`: see `prefill`."""
        return self.prefill(token, pos, cache)

    def decode_rows(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """`decode` with a position for each row: tokens `[Batch, 1]` at `positions` `[Batch]`, logits `[Batch, Vocab]`.

        A row without a request computes along, at any position that no request will read; ignore its logits.
        """
        check(tokens=(tokens, (cache.rows, 1)), positions=(positions, (cache.rows,)))
        return self._cached(tokens, positions[:, None], cache, None)

    def prefill_slots(self, tokens: Tensor, slots: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """Logits `[M, Vocab]` after each of M prompts, which go into the rows `slots` `[M]`, all different.

        Row m of tokens `[M, S]` begins with its `lengths[m]` tokens. The rest pads it: its keys and values are
        written as well, behind the prompt, where `decode_rows` puts a token's own before it reads them. It continues
        row `slots[m]` at position `lengths[m]`.
        """
        count, length = tokens.shape
        check(slots=(slots, (count,)), lengths=(lengths, (count,)))
        if length > cache.max_seq:
            raise ValueError(f"{length} tokens do not fit into a cache of {cache.max_seq} positions")
        positions, attend_whole = whole(self.config, length, tokens.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, k, v, slots[:, None], positions)
            return attend_whole(layer, q, k, v)

        last = lengths[:, None] - 1
        states = self.hidden_states(tokens, positions, attend, largest=last)
        return self.logits(states[torch.arange(count, device=tokens.device), last[:, 0]])

    def prefill_packed(
        self, tokens: Tensor, rows: Tensor, positions: Tensor, segments: Tensor, last: Tensor, cache: Cache
    ) -> Tensor:
        """Logits `[Batch, Vocab]` after the tokens `last` `[Batch]` of a pack: the last one of each of its prompts.

        tokens, rows, positions and segments are `[P]`: token p stands at `positions[p]` of prompt `segments[p]`, sees
        that prompt up to itself, and is cached in row `rows[p]`. Padding is a prompt of its own at a position that no
        request reads, such as MaxSeq - 1. Where there are fewer prompts than rows, `last` may name any token again.
        """
        check_pack(tokens, rows=rows, positions=positions, segments=segments)
        check(last=(last, (cache.rows,)))
        mask, largest = pack(self.config, positions, segments)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, k, v, rows[None], positions)
            return attention(q, k, v, mask)

        states = self.hidden_states(tokens[None], positions, attend, largest=largest)
        return self.logits(states[0, last])

    def step_packed(
        self,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        segments: Tensor,
        last: Tensor,
        step_tokens: Tensor,
        step_positions: Tensor,
        cache: Cache,
    ) -> Tensor:
        """`prefill_packed` and `decode_rows` in one pass: logits `[2 Batch, Vocab]`, those of `last`, then each row's.

        step_tokens is `[Batch, 1]`, step_positions `[Batch]`. A row that a prompt of this pass fills steps along, at
        a position that no request reads.
        """
        batch, packed = cache.rows, len(tokens)
        check_pack(tokens, rows=rows, positions=positions, segments=segments)
        check(last=(last, (batch,)), step_tokens=(step_tokens, (batch, 1)), step_positions=(step_positions, (batch,)))
        every_row = torch.arange(batch, device=tokens.device)
        mask, largest = pack(self.config, positions, segments)
        cells = torch.arange(cache.max_seq, device=tokens.device)
        step_mask = sees(step_positions[:, None], cells, self.config.window).unsqueeze(1)
        into, at = torch.cat((rows, every_row)), torch.cat((positions, step_positions))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.write(layer, k, v, into[None], at)
            prompts = attention(q[:, :, :packed], k[:, :, :packed], v[:, :, :packed], mask)
            steps = over_all(q[:, :, packed:].transpose(0, 2), keys, values, step_mask)  # rows as a batch
            return torch.cat((prompts, steps.transpose(0, 2)), dim=2)

        states = self.hidden_states(
            torch.cat((tokens, step_tokens[:, 0]))[None], at, attend, largest=torch.cat((largest, step_positions))
        )
        return self.logits(states[0, torch.cat((last, packed + every_row))])

    def hidden_packed(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """States `[P, Hidden]` after the final norm, which the head reads, of a pack as `prefill_packed` takes it."""
        check_pack(tokens, positions=positions, segments=segments)
        mask, largest = pack(self.config, positions, segments)
        states = self.hidden_states(
            tokens[None], positions, lambda _, q, k, v: attention(q, k, v, mask), largest=largest
        )
        normed: Tensor = self.norm(states)[0]
        return normed

    def log_probs_packed(self, tokens: Tensor, positions: Tensor, segments: Tensor, targets: Tensor) -> Tensor:
        """The log-probability of `targets[p]` after each token of a pack, f32 `[P]`; targets are i64 `[P]`."""
        check_pack(tokens, targets=targets)
        logits = self._head(self.hidden_packed(tokens, positions, segments))
        return logits.float().log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]

    def loss_packed(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        """The cross entropy of a pack, f32 0-d: the sum of `-weights[p] * log_probs_packed[p]`, weights f32 `[P]`.

        A weight of 0 leaves a position out; with weights of 1 / count the sum is a mean.
        """
        check_pack(tokens, weights=weights)
        return -(weights.float() * self.log_probs_packed(tokens, positions, segments, targets)).sum()

    def generate(self, token: Tensor, pos: int, steps: int, cache: Cache) -> Tensor:
        """The `steps` greedy tokens `[Batch, steps]` that follow `token` `[Batch, 1]` at `pos`, in the token's type.

        The first of equal maxima wins, as torch.argmax documents. The last token produced is not in the cache.
        """
        return torch.cat(list(self._follow(token, pos, steps, cache, greedy)), dim=1)

    def sample(self, token: Tensor, pos: int, steps: int, key: Tensor, temperature: float, cache: Cache) -> Tensor:
        """As `generate`, but drawn from the softmax of the logits, in f32, over `temperature`: see `categorical`.

        `key` is two 32-bit words in an i64 `[2]`, split into one key a step, so the same key draws the same tokens.
        ValueError if the temperature is not above 0.
        """
        check(key=(key, (2,)))
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, it must be above 0; generate takes the most likely token")
        keys, divisor = split(key, steps), torch.tensor(temperature, device=token.device)

        def draw(step: int, logits: Tensor) -> Tensor:
            return categorical(keys[step], logits.float() / divisor)

        return torch.cat(list(self._follow(token, pos, steps, cache, draw)), dim=1)

    def generate_until(self, token: Tensor, pos: int, max_new: int, eos: int, cache: Cache) -> tuple[Tensor, int]:
        """As `generate`, up to `max_new` tokens, but ended by a step in which every row produces `eos`.

        Returns the tokens `[Batch, max_new]` and their count, which includes that step; past it stand zeros. A row
        that is past its own `eos` goes on: only a step that all rows end together is the end.
        """
        produced, count = token.new_zeros(token.shape[0], max_new), 0
        for tokens in self._follow(token, pos, max_new, cache, greedy):
            produced[:, count] = tokens[:, 0]
            count += 1
            if bool((tokens == eos).all()):
                break
        return produced, count

    # What the entries share.

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: LayerAttend, *, largest: Tensor | None = None
    ) -> Tensor:
        """States after the last layer, `[B, S, Hidden]`, of tokens `[B, S]` at positions `[S]` or `[B, S]`.

        `attend(layer, q, k, v)` is given rotated queries and keys and does the layer's attention; `largest` is that
        of `rope_rows`.
        """
        x: Tensor = self.embedding(tokens)
        cos, sin = rope_rows(self.config, positions, largest, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, partial(attend, index))
        return x

    def logits(self, states: Tensor) -> Tensor:
        """The final norm and the head: `[*, Hidden]` to `[*, Vocab]`."""
        return self._head(self.norm(states))

    def _head(self, normed: Tensor) -> Tensor:
        """The head (the embedding's rows when tied) over states after the final norm."""
        head = self.embedding if self.lm_head is None else self.lm_head
        parts = [functional.linear(normed, head.weight[rows]) for rows in head_parts(self.config.vocab)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _whole(self, tokens: Tensor) -> Tensor:
        """`hidden_states` of whole sequences, from position 0 and without a cache."""
        return self.hidden_states(tokens, *whole(self.config, tokens.shape[1], tokens.device))

    def _cached(self, tokens: Tensor, positions: Tensor, cache: Cache, reach: int | None) -> Tensor:
        """Logits `[Batch, Vocab]` after the last of tokens `[Batch, S]`, cached at positions `[1 or Batch, S]`.

        The queries of a row see what is cached in that row, up to themselves. The positions below `reach` have all
        been written, and nobody sees further; None: it is not known how far that is.
        """
        rows = torch.arange(cache.rows, device=tokens.device)[:, None]
        cells = torch.arange(cache.max_seq if reach is None else reach, device=tokens.device)
        mask = sees(positions, cells, self.config.window).unsqueeze(1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.write(layer, k, v, rows, positions)
            if reach is None:
                return over_all(q, keys, values, mask)
            return attention(q, keys[:, :, :reach], values[:, :, :reach], mask)

        return self.logits(self.hidden_states(tokens, positions, attend)[:, -1])

    def _follow(
        self, token: Tensor, pos: int, steps: int, cache: Cache, choose: Callable[[int, Tensor], Tensor]
    ) -> Iterator[Tensor]:
        """The tokens `[Batch, 1]` after `token`: each what `choose(step, logits)` `[Batch]` makes of the one before."""
        if steps < 1:
            raise ValueError(f"{steps} tokens asked for; at least 1 is needed")
        for step in range(steps):
            token = choose(step, self.decode(token, pos + step, cache))[:, None].to(token.dtype)
            yield token


def longrope_attention_factor(original: int, factor: float) -> float:
    """LongRoPE's scale for `factor` times the original context: sqrt(1 + ln factor / ln original), 1 if not longer."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
