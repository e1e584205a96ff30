"""How well a bundle predicts a text: perplexity, the measure of what quantisation cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import UsageError
from .target import Rows, Target

_ROWS = 64  # rows scored in one pass; bounds the memory of the logits


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp(mean negative log likelihood, in nats) over `tokens` predictions."""

    value: float
    tokens: int


def measure_perplexity(target: Target, tokens: Sequence[int]) -> Perplexity:
    """Teacher-forced perplexity of `tokens` [n >= 2] in slot 0 of a fresh or rewound target."""
    if len(tokens) < 2:
        raise UsageError(f"perplexity needs a text of at least two tokens, this one has {len(tokens)}")
    target.cache.rewind_to(0, 0)
    total = 0.0
    for start in range(0, len(tokens) - 1, _ROWS):
        inputs = tokens[start : min(start + _ROWS, len(tokens) - 1)]
        (logits,) = target.forward([Rows(0, inputs, len(inputs))])
        total += _loss(logits, tokens[start + 1 : start + 1 + len(inputs)])
    return Perplexity(math.exp(total / (len(tokens) - 1)), len(tokens) - 1)


def _loss(logits: np.ndarray, expected: Sequence[int]) -> float:
    """Sum of -log softmax(logits [n, V])[expected [n]], in nats."""
    peak = logits.max(axis=1)
    norm = np.log(np.exp(logits - peak[:, None]).sum(axis=1, dtype=np.float64)) + peak
    return float((norm - logits[np.arange(len(logits)), list(expected)]).sum())
