"""What a drafter is: it sees committed tokens and proposes the next; it knows neither target nor loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..laws import Laws
from ..noise import Domain, NoiseKey
from ..rows import PassRows
from ..sampling import Law, SamplingParams


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft tokens of one round.

    laws: the law each token was drawn from, after temperature and cuts, one per token; None when the tokens
        are a function of the committed text and were proposed with certainty.
    match_length: for a lookup, how many tokens the match shares with the end of the text; 0 otherwise.
    """

    tokens: tuple[int, ...] = ()
    laws: tuple[Law, ...] | None = None
    match_length: int = 0


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter that samples needs to know of the round it proposes for.

    strict: the match rule is in force, so drafting with the target's own noise agrees with it as often as
        possible. Under the reject rule that noise is not the drafter's to read (see `acceptance.py`).
    round_: a number that no other round of this text has.
    laws: what the request asks for beside sampling, as it stands after the committed tokens.
    """

    params: SamplingParams
    key: NoiseKey
    round_: int = 0
    strict: bool = False
    laws: Laws | None = None

    def law(self, logits: np.ndarray, drafted: Sequence[int]) -> Law:
        """The draft's law from its logits float32 [V] after `drafted`, under the request's controls and grammar."""
        laws = self.laws or Laws(self.params)
        return laws.round(drafted).at(len(drafted), logits)

    def draw(self, law: Law, position: int) -> int:
        """Draw the draft token for `position`, its index in the committed list, from the draft's own law."""
        if self.strict:
            return law.draw(self.key, Domain.TARGET, position)
        return law.draw(self.key, Domain.DRAFT, position, self.round_)


class Drafter(Protocol):
    """Proposes tokens for one text. Between rounds it has observed exactly the committed tokens.

    free: proposing costs next to nothing, so proposals may be made only to see how they would have fared.
    watches: it reads what the target computes, so `watch` is to be called; `known` is then the number of first tokens
        whose rows it has.
    passes, ort_ns: forward passes and nanoseconds spent in ONNX Runtime so far; 0 without a model.
    """

    name: str
    free: bool
    watches: bool
    known: int

    @property
    def most(self) -> int | None:
        """Tokens of a proposal at most; None where nothing bounds it."""
        ...

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        ...

    @property
    def ort_ns(self) -> int:
        """Nanoseconds in ONNX Runtime so far."""
        ...

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        """Propose at most k tokens to follow `committed`; an empty proposal is a valid answer.

        A drafter that samples may stop after any token it has drawn. It must not drop a token, or switch to
        another source, because of what it drew: the tokens that remain would no longer have the laws it
        reports. The same holds for whoever shortens a proposal with laws.
        """
        ...

    def watch(self, start: int, rows: PassRows) -> None:
        """What the target computed for the tokens at `start` and up: committed ones, then those just proposed.

        Called after every pass of the target; `observe` tells next what was kept.
        """
        ...

    def observe(self, committed: Sequence[int]) -> None:
        """Take note of the whole committed list, which extends the one seen before."""
        ...

    def rewind(self, length: int) -> None:
        """Return to the state after the first `length` tokens; ValueError outside [0, observed length]."""
        ...

    def reset(self) -> None:
        """Forget everything, stale cache rows too; after an error, the next text starts from here."""
        ...


class TokenReader:
    """The part of a drafter that reads tokens alone."""

    watches = False
    known = 0
    most = None

    def watch(self, start: int, rows: PassRows) -> None:
        """Nothing to do."""
