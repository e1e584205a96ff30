"""Logits become a law exactly once; everything downstream sees laws, and greedy is just the one-hot one.

With z = logits / temperature, the law is defined by the order "logit descending, id ascending on ties" and by
the weights w = exp(z - max z), as follows:

1. top-k keeps the first k tokens of the order, exactly k.
2. top-p keeps the smallest prefix of what is left that weighs at least top_p times all that is left.
3. min-p keeps the tokens whose weight is at least min_p (the heaviest token weighs 1).
4. The weights that remain are divided by their sum. A weight that underflows to zero is not in the law.

All three cuts are prefixes of one order, so only a short head of the vocabulary is ever sorted.
"""

import math
from dataclasses import dataclass

import numpy as np

from .errors import OxidizeError, UsageError
from .noise import Domain, NoiseKey, uniform

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6
_HEAD = 256  # tokens sorted in the hope that they hold the nucleus
_BINS, _BINS_PER_LOGIT = 4096, 64  # the last bin takes what is 64 or more below the peak
# What a float32 sum of exponentials may be off by: three roundings of an exponent of at most 88 (further down
# the terms vanish) give 1.6e-5, the exponential and the pairwise sum 2e-6.
_TAIL_BOUNDS = 1 + np.array([-3e-5, 3e-5])
_LOWEST = np.finfo(np.float32).min
_SMALLEST = math.ulp(0.0)
_CHUNK = 8192  # entries of a law drawn from at a time: the work stays in the cache of the core
_ROUNDING = 1 + 1e-9  # keeps rounding from excluding the winner of a race
_CERTAIN = np.ones(1)  # the probabilities of a law of one token
_CERTAIN.flags.writeable = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a law is made from logits. Temperature 0 is greedy; the other defaults switch a cut off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check(
            self.temperature == 0 or _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE,
            f"temperature must be 0 (greedy) or from {_MIN_TEMPERATURE:g} to {_MAX_TEMPERATURE:g}",
            self.temperature,
        )
        _check(self.top_k >= 0, "top_k must be 0 (off) or a positive number of tokens", self.top_k)
        _check(0 < self.top_p <= 1, "top_p must be above 0 and at most 1 (off)", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p must be from 0 (off) to 1", self.min_p)
        _check(-(2**63) <= self.seed < 2**64, "seed must fit in 64 bits", self.seed)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def _check(good: bool, expected: str, value: float) -> None:
    if not good:
        raise UsageError(f"{expected}, not {value}")


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A probability law over token ids.

    ids: int64 [n], strictly ascending, or None when `probs` covers the ids 0..n-1.
    probs: float64 [n], summing to 1. Ids that are not listed have probability 0.
    """

    ids: np.ndarray | None
    probs: np.ndarray

    @classmethod
    def one_hot(cls, token: int) -> "Law":
        """Return the law that always gives `token`."""
        return cls(np.array([token]), _CERTAIN)

    def prob(self, token: int) -> float:
        """Return the probability of one id; 0 for an id outside the law."""
        index = token if self.ids is None else int(self.ids.searchsorted(token))
        if not 0 <= index < len(self.probs) or (self.ids is not None and self.ids[index] != token):
            return 0.0
        return float(self.probs[index])

    def probs_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the probabilities float64 [m] of ids int64 [m]; 0 for an id outside the law."""
        last = len(self.probs) - 1
        index = np.minimum(ids if self.ids is None else self.ids.searchsorted(ids), last)
        known = index if self.ids is None else self.ids[index]
        return np.where(known == ids, self.probs[index], 0.0)

    def draw(self, key: NoiseKey, domain: Domain, position: int, round_: int = 0) -> int:
        """Return argmax over the law of log p + Gumbel noise, which has exactly this law.

        Computed as the same race in exponential form: the winner is argmin E / p with E = -log u.
        """
        if self.ids is not None and len(self.ids) == 1:
            return int(self.ids[0])
        winner, best = -1, math.inf
        for start in range(0, len(self.probs), _CHUNK):
            probs = self.probs[start : start + _CHUNK]
            ids = np.arange(start, start + len(probs)) if self.ids is None else self.ids[start:][:_CHUNK]
            index, time = _race(uniform(key, domain, position, ids, round_), probs, best)
            if time < best:
                winner, best = int(ids[index]), time
        return winner


def _race(noise: np.ndarray, probs: np.ndarray, limit: float) -> tuple[int, float]:
    """Return index and arrival time of the first of entries [n]; inf when none is earlier than `limit`.

    E = -log u >= 1 - u, so an entry with 1 - u above p times a known arrival is late: few logarithms are
    taken.
    """
    likeliest = int(probs.argmax())
    if probs[likeliest] == 0:
        return likeliest, math.inf
    limit = min(limit, -math.log(noise[likeliest]) / float(probs[likeliest]))
    runners = np.flatnonzero(1 - noise <= limit * _ROUNDING * probs)
    if len(runners) == 0:
        return likeliest, math.inf
    times = -np.log(noise[runners]) / probs[runners]
    first = int(times.argmin())
    return int(runners[first]), float(times[first])


def law_of(logits: np.ndarray, params: SamplingParams, top: int | None = None) -> Law:
    """Return the law of one row of logits, float32 [V]; V >= 1, -inf forbids a token. `top` is its argmax, if known.

    Raises OxidizeError when the row holds NaN or +inf, or forbids every token.
    """
    row = np.asarray(logits, dtype=np.float32)
    top = int(row.argmax()) if top is None else top
    peak = float(row[top])
    if not math.isfinite(peak):
        raise OxidizeError(_why_not_finite(row, peak))
    if params.greedy:
        return Law.one_hot(top)
    if 0 < params.top_k < len(row):
        return _cut_top_k(row, peak, params)
    if params.top_p < 1:
        return _cut_top_p(row, peak, params)
    if params.min_p > 0:
        return _cut_min_p(row, peak, params)
    weights = _weights(row, peak, params)
    weights /= weights.sum()
    return Law(None, weights)


def _why_not_finite(row: np.ndarray, peak: float) -> str:
    if peak == -math.inf:
        return f"all {len(row)} logits are -inf, so no token is allowed; loosen the mask or the logit bias"
    return (
        f"expected finite logits (or -inf), found {np.isnan(row).sum()} NaN and {np.isposinf(row).sum()} +inf"
        f" in a row of {len(row)}; the model overflowed: export it with a wider precision"
    )


def _cut_top_k(row: np.ndarray, peak: float, params: SamplingParams) -> Law:
    ids = _head(row, params.top_k)[: params.top_k]
    weights = _weights(row[ids], peak, params)
    if params.top_p < 1:
        running = weights.cumsum()
        count = int(running.searchsorted(params.top_p * running[-1])) + 1
        ids, weights = ids[:count], weights[:count]
    return _by_id(ids, weights, params)


def _cut_top_p(row: np.ndarray, peak: float, params: SamplingParams) -> Law:
    law = _short_nucleus(row, peak, params)
    return _wide_nucleus(row, peak, params) if law is None else law


def _short_nucleus(row: np.ndarray, peak: float, params: SamplingParams) -> Law | None:
    """Cut a sorted head of the row by top-p; None when the nucleus may reach beyond it.

    The tail is summed in float32, so the total is known within bounds. The cut must be the same at both.
    """
    ids = _head(row, _HEAD)
    weights = _weights(row[ids], peak, params)
    tail = _weights32(row, peak, params)
    tail[ids] = 0
    running = weights.cumsum()
    total = running[-1] + float(tail.sum()) * _TAIL_BOUNDS
    low, high = running.searchsorted(params.top_p * total)
    if low != high or high == len(ids):
        return None
    return _by_id(ids[: high + 1], weights[: high + 1], params)


def _wide_nucleus(row: np.ndarray, peak: float, params: SamplingParams) -> Law:
    """Cut a row by top-p in float64: bin the logits, then sort only the bin in which the cut falls."""
    weights = _weights(row, peak, params)
    bins = _bins(row, peak)
    running = np.bincount(bins, weights, minlength=_BINS).cumsum()
    goal = params.top_p * running[-1]
    edge_bin = int(running.searchsorted(goal))
    edge = _ordered(row, np.flatnonzero(bins == edge_bin))
    missing = goal - (running[edge_bin - 1] if edge_bin else 0.0)
    count = int(weights[edge].cumsum().searchsorted(missing)) + 1
    kept = bins < edge_bin
    kept[edge[:count]] = True
    ids = np.flatnonzero(kept)
    return _normalised(ids, weights[ids], params)


def _bins(row: np.ndarray, peak: float) -> np.ndarray:
    """Number the logits by their distance from the peak, int64 [V]; a larger logit has no larger number."""
    with np.errstate(over="ignore"):
        distance = (np.float32(peak) - row) * np.float32(_BINS_PER_LOGIT)
    return np.minimum(distance, np.float32(_BINS - 1), out=distance).astype(np.int64)


def _cut_min_p(row: np.ndarray, peak: float, params: SamplingParams) -> Law:
    lowest = peak + params.temperature * math.log(params.min_p)
    slack = 1e-6 * (abs(lowest) + params.temperature)  # the exact test on the weights follows
    ids = np.flatnonzero(row >= lowest - slack)
    return _normalised(ids, _weights(row[ids], peak, params), params)


def _by_id(ids: np.ndarray, weights: np.ndarray, params: SamplingParams) -> Law:
    order = ids.argsort()
    return _normalised(ids[order], weights[order], params)


def _normalised(ids: np.ndarray, weights: np.ndarray, params: SamplingParams) -> Law:
    """Apply min-p to ascending ids [n] and their weights [n], drop weights of zero, and normalise."""
    kept = weights >= max(params.min_p, _SMALLEST)
    if not kept.all():
        ids, weights = ids[kept], weights[kept]
    return Law(ids, weights / weights.sum())


def _weights(logits: np.ndarray, peak: float, params: SamplingParams) -> np.ndarray:
    """exp((logits - peak) / temperature), float64 [n], at most 1."""
    weights = logits.astype(np.float64)
    weights -= peak
    weights /= params.temperature
    return np.exp(weights, out=weights)


def _weights32(row: np.ndarray, peak: float, params: SamplingParams) -> np.ndarray:
    """The same in float32 [V], in a quarter of the time."""
    with np.errstate(over="ignore"):  # a difference below -3e38 weighs nothing
        weights = row - np.float32(peak)
        weights /= np.float32(params.temperature)
    return np.exp(weights, out=weights)


def _head(row: np.ndarray, size: int) -> np.ndarray:
    """Ids int64 [m] of the largest logits in the order of the law; m >= size unless fewer are above -inf.

    The maxima of more than `size` disjoint blocks of the row are that many different logits, so the size-th
    largest of the maxima bounds the size-th largest logit from below, and few logits more than `size` reach
    it.
    """
    blocks = 4 * size
    depth = len(row) // blocks
    if depth >= 2:
        maxima = (
            row[: depth * blocks].reshape(depth, blocks).max(axis=0)
        )  # block j holds every blocks-th logit from j on
        bound = np.partition(maxima, -size)[-size]
    elif size < len(row):
        bound = np.partition(row, -size)[-size]
    else:
        bound = -np.inf
    return _ordered(row, np.flatnonzero(row >= max(bound, _LOWEST)))


def _ordered(row: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Sort ascending ids [n] by logit, descending; the sort is stable and so keeps ties in id order."""
    return ids[np.argsort(-row[ids], kind="stable")]
