"""What a request asks of the logits before they become a law: bias, penalties, forbidden tokens, a least length.

A row's logits are changed by its own prefix, drafted tokens included. The committed part of that prefix is kept as
counts that only `commit` changes, so a rejected draft leaves no trace here.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import UsageError

_MOST_BIASES = 1024
_LARGEST_BIAS = 1e4
_REPETITION = (0.01, 100)


def _check(good: bool, expected: str, value: object) -> None:
    if not good:
        raise UsageError(f"{expected}, not {value}")


@dataclass(frozen=True, slots=True)
class Controls:
    """Changes to the logits of one request; the defaults change nothing.

    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the answer (Keskar
        et al. 2019).
    presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from logits of tokens in the answer,
        as OpenAI defines them.
    logit_bias: (token, added) pairs.
    min_new_tokens: no end before so many tokens.
    bad_words: token sequences whose last token is forbidden after the others.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        low, high = _REPETITION
        _check(
            low <= self.repetition_penalty <= high,
            f"repetition_penalty must be from {low} to {high} (1: off)",
            self.repetition_penalty,
        )
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty must be from -2 to 2", self.presence_penalty)
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty must be from -2 to 2", self.frequency_penalty)
        _check(
            len(self.logit_bias) <= _MOST_BIASES,
            f"logit_bias takes at most {_MOST_BIASES} tokens",
            len(self.logit_bias),
        )
        ids = [token for token, _ in self.logit_bias]
        _check(
            len(set(ids)) == len(ids),
            "logit_bias takes each token once",
            f"token {max(ids, key=ids.count, default=0)} twice",
        )
        for token, bias in self.logit_bias:
            good = abs(bias) <= _LARGEST_BIAS or bias == -math.inf
            _check(
                good, f"logit_bias must be from {-_LARGEST_BIAS:g} to {_LARGEST_BIAS:g}, or -inf", f"{bias} for {token}"
            )
        _check(self.min_new_tokens >= 0, "min_new_tokens must be 0 or more", self.min_new_tokens)
        _check(all(self.bad_words), "bad_words must not hold an empty word", self.bad_words)

    @property
    def neutral(self) -> bool:
        """Whether nothing is changed."""
        return self == _NEUTRAL

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens matter."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


_NEUTRAL = Controls()


class Processors:
    """Applies the controls of one request; `vocabulary` is the number of ids a row scores."""

    def __init__(self, controls: Controls, eos: Collection[int], prompt: Sequence[int], vocabulary: int) -> None:
        self.controls = controls
        self._check_ids(vocabulary)
        self._eos = np.array(sorted(token for token in eos if token < vocabulary), np.int64)
        self._bias_ids = np.array([token for token, _ in controls.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in controls.logit_bias], np.float32)
        self._seen = {token for token in prompt if token < vocabulary}  # in prompt or answer
        self._counts: Counter[int] = Counter()  # in the answer
        self._answer: list[int] = []
        self._before = tuple(prompt[-_longest(controls.bad_words) :])
        self._gather()

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer grew by `tokens`."""
        self._answer.extend(tokens)
        if self.controls.penalises:
            self._seen.update(tokens)
            self._counts.update(tokens)
            self._gather()

    def apply(self, logits: np.ndarray, drafted: Sequence[int] = ()) -> np.ndarray:
        """The logits [V] of the row that follows the answer and `drafted`, changed, in a new array."""
        row = logits.astype(np.float32, copy=True)
        row[self._bias_ids] += self._bias
        if self.controls.penalises:
            self._penalise(row, drafted)
        if len(self._answer) + len(drafted) < self.controls.min_new_tokens:
            row[self._eos] = -np.inf
        for word in self.controls.bad_words:
            if self._ends_with(word[:-1], drafted):
                row[word[-1]] = -np.inf
        return row

    def _gather(self) -> None:
        """The committed tokens as arrays: ids seen [n], ids in the answer [m] and how often [m]."""
        self._seen_ids = np.fromiter(self._seen, np.int64, len(self._seen))
        self._answer_ids = np.fromiter(self._counts, np.int64, len(self._counts))
        self._times = np.fromiter(self._counts.values(), np.float32, len(self._counts))

    def _penalise(self, row: np.ndarray, drafted: Sequence[int]) -> None:
        """Drafted tokens are told apart, so that their number alone, not the vocabulary, costs time.

        Each logit goes through the same operations as when its tokens are committed: not a bit may depend on that.
        """
        controls, extra = self.controls, Counter(drafted)
        if controls.repetition_penalty != 1.0:
            factor = np.float32(controls.repetition_penalty)
            for ids in (self._seen_ids, np.array([token for token in extra if token not in self._seen], np.int64)):
                values = row[ids]
                row[ids] = np.where(values > 0, values / factor, values * factor)
        before = {token: row[token] for token in extra}
        row[self._answer_ids] -= self._taken_off(self._times)
        for token, count in extra.items():
            row[token] = before[token] - self._taken_off(np.float32(self._counts[token] + count))

    def _taken_off(self, times: np.ndarray | np.float32) -> np.ndarray | np.float32:
        return np.float32(self.controls.presence_penalty) + np.float32(self.controls.frequency_penalty) * times

    def _ends_with(self, beginning: tuple[int, ...], drafted: Sequence[int]) -> bool:
        if not beginning:
            return True
        size = len(beginning)
        text = (*self._before, *self._answer[-size:], *drafted)
        return tuple(text[-size:]) == beginning

    def _check_ids(self, vocabulary: int) -> None:
        named = [token for token, _ in self.controls.logit_bias]
        named += [token for word in self.controls.bad_words for token in word]
        for token in named:
            _check(0 <= token < vocabulary, f"token ids must be from 0 to {vocabulary - 1}", token)


def _longest(words: tuple[tuple[int, ...], ...]) -> int:
    return max((len(word) for word in words), default=1)
