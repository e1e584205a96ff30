"""Randomness as a function: noise is a hash of (seed, choice, domain, position, round, token id), no stream.

Because nothing is consumed, a token's noise does not depend on how many tokens were drafted, rejected or
asked for before it. What each domain is for, and why they are apart, is argued in `acceptance.py`.

The hash is counter based: the first five words are absorbed one after the other by SplitMix64's finaliser
(Steele, Lea and Flood 2014, with the constants of Stafford's variant 13); the result starts a SplitMix64
sequence indexed by token id.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import overload

import numpy as np

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_STEP64, _LAST_SHIFT64 = np.uint64(_STEP), np.uint64(_SHIFTS[2])
_STAGES64 = tuple(zip(np.array(_SHIFTS[:2], np.uint64), np.array(_MULTIPLIERS, np.uint64), strict=True))
_DROPPED_BITS = 12  # 52 bits remain, so that adding one half is exact and the result stays inside (0, 1)
_DROPPED_BITS64 = np.uint64(_DROPPED_BITS)
_UNIT = 2.0**-52


class Domain(IntEnum):
    """What a piece of noise decides. Two domains are independent of each other."""

    TARGET = 0  # the target's own token at a position
    DRAFT = 1  # a drafted token, together with the round
    ACCEPT = 2  # whether a drafted token is kept
    RESIDUAL = 3  # the token that replaces a rejected one


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Names one sampled text: the user's seed and the index of the choice (several texts for one prompt)."""

    seed: int
    choice: int = 0


@overload
def uniform(key: NoiseKey, domain: Domain, position: int, ids: int, round_: int = 0) -> float: ...
@overload
def uniform(key: NoiseKey, domain: Domain, position: int, ids: np.ndarray, round_: int = 0) -> np.ndarray: ...
def uniform(key: NoiseKey, domain: Domain, position: int, ids: int | np.ndarray, round_: int = 0) -> float | np.ndarray:
    """Return uniform noise, strictly inside (0, 1): one float64 for one id, float64 [n] for ids [n]."""
    start = _absorb(key.seed, key.choice, domain, position, round_)
    if isinstance(ids, np.ndarray):
        values = (_hash_many(start, ids) >> _DROPPED_BITS64).astype(np.float64)
        values += 0.5
        values *= _UNIT
        return values
    bits = _finalise((start + ids * _STEP) & _MASK) >> _DROPPED_BITS
    return (bits + 0.5) * _UNIT


def gumbel(key: NoiseKey, domain: Domain, position: int, ids: int | np.ndarray, round_: int = 0) -> float | np.ndarray:
    """Return standard Gumbel noise, shaped like `uniform`; argmax(log p + gumbel) has the law p."""
    return -np.log(-np.log(uniform(key, domain, position, ids, round_)))


def _absorb(*words: int) -> int:
    """Fold integers of any size into 64 well-mixed bits; the order of the words matters."""
    state = _STEP
    for word in words:
        state = _finalise(((state ^ (word & _MASK)) + _STEP) & _MASK)
    return state


def _finalise(x: int) -> int:
    x = ((x ^ (x >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> _SHIFTS[2])


def _hash_many(start: int, ids: np.ndarray) -> np.ndarray:
    """`_finalise(start + id * step)` for each of ids [n] -> uint64 [n]; array arithmetic wraps silently."""
    x = ids.astype(np.uint64)
    x *= _STEP64
    x += np.uint64(start)
    scratch = np.empty_like(x)
    for shift, multiplier in _STAGES64:
        np.right_shift(x, shift, out=scratch)
        x ^= scratch
        x *= multiplier
    np.right_shift(x, _LAST_SHIFT64, out=scratch)
    x ^= scratch
    return x
