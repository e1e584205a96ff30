"""From a row's logits to its law, by everything a request asks for: grammar, controls, temperature and cuts.

The order is fixed: grammar mask and controls change logits, `sampling` makes the law. Each row is changed by its own
prefix, drafted tokens included; what is kept between rounds follows committed tokens alone, so a rejected draft leaves
no trace.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .processors import Processors
from .sampling import Law, SamplingParams, law_of


class Constraint(Protocol):
    """A grammar that follows one answer; `grammar.GrammarState` is the real one."""

    def masks(self, drafted: Sequence[int]) -> np.ndarray:
        """bool [n, V]: row i allows what may follow drafted[:i], for the legal part of `drafted`, to its first end."""
        ...

    def legal_prefix(self, drafted: Sequence[int]) -> int:
        """How many drafted tokens are legal, in order."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, as far as the grammar alone decides."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer grew."""
        ...


class Laws:
    """The laws of one answer."""

    def __init__(
        self, params: SamplingParams, processors: Processors | None = None, grammar: Constraint | None = None
    ) -> None:
        self.params, self.processors, self.grammar = params, processors, grammar

    @property
    def plain(self) -> bool:
        """Whether a row's logits become its law unchanged by any prefix."""
        return self.processors is None and self.grammar is None

    def round(self, drafted: Sequence[int]) -> "RoundLaws":
        """The laws of the rows that verify `drafted`."""
        masks = self.grammar.masks(drafted) if self.grammar is not None else None
        return RoundLaws(self, tuple(drafted), masks)

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer grew by `tokens`."""
        if self.processors is not None:
            self.processors.commit(tokens)
        if self.grammar is not None:
            self.grammar.commit(tokens)

    def legal(self, drafted: Sequence[int]) -> int:
        """How many of the drafted tokens the grammar allows, in order."""
        return self.grammar.legal_prefix(drafted) if self.grammar is not None else len(drafted)

    def forced(self) -> tuple[int, ...]:
        """What the grammar says must come next."""
        return tuple(self.grammar.forced()) if self.grammar is not None else ()


class RoundLaws:
    """The laws of one round: row i follows the first i drafted tokens."""

    def __init__(self, laws: Laws, drafted: tuple[int, ...], masks: np.ndarray | None) -> None:
        self._laws, self._drafted, self._masks = laws, drafted, masks

    def at(self, row: int, logits: np.ndarray, top: int | None = None) -> Law:
        """The law of `row` from its logits float32 [V]; `top` is their argmax, if known."""
        laws = self._laws
        if laws.plain:
            return Law.one_hot(top) if laws.params.greedy and top is not None else law_of(logits, laws.params, top)
        raw = logits
        if laws.processors is not None:
            logits = laws.processors.apply(logits, self._drafted[:row])
        if self._masks is not None and row < len(self._masks):  # behind an end token nothing is emitted
            logits = _masked(logits, raw, self._masks[row])
        return law_of(logits, laws.params)


def _masked(logits: np.ndarray, raw: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits [V] where the mask allows; the raw ones when the controls forbid all of those: the grammar wins."""
    masked = np.where(mask, logits, np.float32(-np.inf))
    return masked if masked.max() > -np.inf else np.where(mask, raw, np.float32(-np.inf))
