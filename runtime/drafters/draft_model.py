"""The draft-model drafter: a smaller language model that runs ahead one token at a time."""

from collections.abc import Sequence

import numpy as np

from ..sampling import Law
from ..target import PREFILL_CHUNK, Rows, Target
from .base import DraftContext, Proposal, TokenReader


class DraftModel(TokenReader):
    """Drafts with a second model and its own KV cache (one slot); each token's law is the draft's own.

    Under the match rule it draws with the target's own noise, so it agrees as often as the two laws allow; under the
    reject rule its noise is its own and fresh each round, as that rule needs (Leviathan et al. 2023, Chen et al. 2023).
    """

    free = False

    def __init__(self, model: Target, slot: int = 0, name: str = "draft-model") -> None:
        self.model, self._slot, self.name = model, slot, name
        self._fed: list[int] = []  # tokens in the draft's cache
        self._agreed = 0  # of which so many are known to equal the committed ones

    @property
    def ort_ns(self) -> int:
        """Nanoseconds spent in the draft's sessions so far."""
        return sum(self.model.ort_ns().values())

    @property
    def passes(self) -> int:
        """Passes of the draft so far."""
        return self.model.passes

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        """Up to k tokens after `committed`, each with the law it was drawn from."""
        k = min(k, self.model.context - len(committed))
        if k <= 0:
            return Proposal()
        pending = self._catch_up(committed)
        tokens: list[int] = []
        laws: list[Law] = []
        for index in range(k):
            law = context.law(self._feed(pending), tokens)
            token = context.draw(law, len(committed) + index)
            tokens.append(token)
            laws.append(law)
            pending = [token]
        return Proposal(tuple(tokens), tuple(laws))

    def observe(self, committed: Sequence[int]) -> None:
        """Nothing to do: `propose` reads what was committed."""

    def rewind(self, length: int) -> None:
        """Forget everything past an absolute length."""
        length = min(length, len(self._fed))
        del self._fed[length:]
        self._agreed = min(self._agreed, length)
        self.model.cache.rewind_to(self._slot, length)

    def reset(self) -> None:
        """Forget everything."""
        self.rewind(0)
        self.model.cache.wipe(self._slot)

    def _catch_up(self, committed: Sequence[int]) -> list[int]:
        """Drop what was rejected, read all that is missing but the last chunk, and return that chunk."""
        common, most = self._agreed, min(len(self._fed), len(committed) - 1)
        while common < most and self._fed[common] == committed[common]:
            common += 1
        self.rewind(min(common, most))
        self._agreed = len(self._fed)
        return list(committed[len(self._fed) :])

    def _feed(self, tokens: list[int]) -> np.ndarray:
        """Run the draft over `tokens` and return the logits [V] of the last."""
        early, rest = tokens[:-PREFILL_CHUNK], tokens[-PREFILL_CHUNK:]
        self.model.prefill(self._slot, early)
        (logits,) = self.model.forward([Rows(self._slot, rest, 1)])
        self._fed.extend(tokens)
        return logits[0]
