"""Random numbers from a key, the same on every machine: what `Phi3.sample` draws with.

    keys = split(torch.tensor([0, 42]), 3)       # i64 [3, 2]
    tokens = categorical(keys[0], logits)        # i64 [B], of f32 logits [B, V]

A key is two 32-bit words in an i64 `[2]`; of larger numbers the low 32 bits count. The generator is Threefry-2x32 with
20 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011) over the counters (0, i). Keys, bits and
uniforms are those of jax.random in its partitionable layout, bit for bit.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
PARITY = 0x1BD11BDA  # the third word of the key schedule is the parity of the others: the paper's C240, 32 bits of it
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # bits, in turns of four rounds
FOURS = 5  # 20 rounds


def threefry(key: Tensor, count: int) -> Tensor:
    """The words, i64 `[count, 2]`, that the counters (0, 0) .. (0, count - 1) become under a key."""
    first, second = (key & WORD).unbind()
    schedule = (first, second, first ^ second ^ PARITY)
    a = first.expand(count)
    b = (torch.arange(count, device=key.device) + second) & WORD
    for four in range(FOURS):
        for bits in ROTATIONS[four % 2]:
            a = (a + b) & WORD
            b = ((b << bits | b >> (32 - bits)) & WORD) ^ a
        a = (a + schedule[(four + 1) % 3]) & WORD
        b = (b + schedule[(four + 2) % 3] + four + 1) & WORD
    return torch.stack((a, b), dim=-1)


def split(key: Tensor, count: int) -> Tensor:
    """`count` new keys, i64 `[count, 2]`."""
    return threefry(key, count)


def random_bits(key: Tensor, count: int) -> Tensor:
    """`count` words of 32 random bits, i64."""
    first, second = threefry(key, count).unbind(-1)
    return first ^ second


def uniform(key: Tensor, count: int) -> Tensor:
    """`count` f32 in [0, 1): multiples of 2^-23, from the 23 high bits of each word."""
    return (random_bits(key, count) >> 9).float() * 2**-23


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """One index per row of f32 logits `[B, V]`, i64 `[B]`, in proportion to exp(logits): the first largest of
    logits + Gumbel noise, -log(-log(1 - u)), with B * V draws u in the order of the rows.

    A u of 0, one in 2^23 draws, has infinite noise: its index is taken whatever its logit.
    """
    noise = -torch.log(-torch.log(1 - uniform(key, logits.numel())))
    return (logits + noise.view(logits.shape)).argmax(dim=-1)
