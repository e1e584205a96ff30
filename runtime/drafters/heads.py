"""Both ends of a draft that reads the target's rows: tokens become embeddings, hidden states become laws.

Either end is the draft's own, or the target's sessions are used and no copy is loaded.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..errors import BundleError
from ..sampling import Law, law_of
from ..session import Tensor
from .base import DraftContext

UNHEARD_OF = np.float32(-1e30)  # the logit of a token the draft cannot name; not -inf: a grammar may insist on it


class Embedding(Protocol):
    """Turns tokens into what the draft reads."""

    def embed_tokens(self, ids: Sequence[int]) -> Tensor:
        """Embeddings [1,n,H], valid until the next call."""
        ...


class Scorer(Protocol):
    """A head graph: the target's, or a draft's own."""

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        """Logits [count,*] of rows first, first + 1, ... of `hidden` [S,H]; valid until the next call."""
        ...


class Head(Protocol):
    """Turns what the draft graph returned into laws over the target's ids."""

    def logits(self, outputs: dict[str, Tensor], first: int, count: int) -> np.ndarray:
        """Logits [count,*] of rows first, first + 1, ... of a pass; valid until the next call."""
        ...

    def law(self, logits: np.ndarray, drafted: Sequence[int], context: DraftContext) -> Law:
        """The law of one row of them, after `drafted`."""
        ...

    def spread(self, logits: np.ndarray, wide: np.ndarray) -> None:
        """Put logits [n,*] into the first rows of `wide` [*,V] by the target's ids; columns it cannot name stay."""
        ...


def law_among(
    ids: np.ndarray, logits: np.ndarray, row: np.ndarray, drafted: Sequence[int], context: DraftContext
) -> Law:
    """The law of a row, after `drafted`, in which the draft can name no tokens but `ids` [n], ascending.

    Controls and grammars speak of all tokens, so for those the logits [n] are put into `row` [token_count] for a while;
    it is UNHEARD_OF throughout.
    """
    if context.laws is None or context.laws.plain:
        law = law_of(logits, context.params)
        return Law(ids if law.ids is None else ids[law.ids], law.probs)
    row[ids] = logits
    try:
        return context.law(row, drafted)
    finally:
        row[ids] = UNHEARD_OF


class TargetHead:
    """Hidden states scored by the target's own head."""

    def __init__(self, target: Scorer) -> None:
        self._target = target

    def logits(self, outputs: dict[str, Tensor], first: int, count: int) -> np.ndarray:
        """Logits [count, token_count]."""
        return self._target.score(outputs["hidden"], count, first)

    def law(self, logits: np.ndarray, drafted: Sequence[int], context: DraftContext) -> Law:
        """The law of one row."""
        return context.law(logits, drafted)

    def spread(self, logits: np.ndarray, wide: np.ndarray) -> None:
        """Logits [n, token_count]: all but the padding."""
        wide[: len(logits), : logits.shape[1]] = logits


class OwnHead:
    """Logits over a vocabulary of the draft's own, `ids` int64 [Vd] being the target's ids of it.

    Laws are made over the draft's vocabulary, which is the smaller one, and then renamed; controls and grammars speak
    of the target's ids, so for those a row of the target's width is filled in. Raises BundleError where `ids` names a
    token twice or none at all.
    """

    def __init__(self, scorer: Scorer, ids: np.ndarray, token_count: int) -> None:
        self._scorer = scorer
        known = np.flatnonzero(ids < token_count)  # ids above are padding, which is never produced
        self._order = known[np.argsort(ids[known], kind="stable")]
        self._ids = ids[self._order]  # [n], ascending
        if len(known) == 0 or self._ids[0] < 0 or (np.diff(self._ids) == 0).any():
            raise BundleError(
                f"a draft's vocabulary must name different tokens from 0 to {token_count - 1}; this one's {len(ids)} "
                f"go from {ids.min(initial=0)} to {ids.max(initial=0)}, or name one twice; export the bundle again"
            )
        self._straight = np.array_equal(self._order, np.arange(len(known)))  # its rows come by ascending id
        self._row = np.full(token_count, UNHEARD_OF, np.float32)

    def logits(self, outputs: dict[str, Tensor], first: int, count: int) -> np.ndarray:
        """Logits [count,Vd]."""
        return self._scorer.score(outputs["hidden"], count, first)

    def law(self, logits: np.ndarray, drafted: Sequence[int], context: DraftContext) -> Law:
        """The law of one row, over the target's ids."""
        row = logits[: len(self._ids)] if self._straight else logits[self._order]  # [n]
        return law_among(self._ids, row, self._row, drafted, context)

    def spread(self, logits: np.ndarray, wide: np.ndarray) -> None:
        """Logits [n,Vd]: those of the draft's vocabulary."""
        wide[: len(logits), self._ids] = logits[:, self._order]
