"""Which drafted tokens are kept, and which token follows them. Both rules leave the target's law untouched.

For one position let p be the target's law there, d the draft token and q the law d was drawn from.

**Match** (`accept_match`). The target's token is argmax(log p + Gumbel noise), a function of the seed and p
alone; d is kept if it is that token. The text is the same whatever is proposed, so its law is that of plain
sampling.

**Reject** (`accept_reject`; Leviathan, Kalman and Matias 2023; Chen et al. 2023). d is kept with probability
min(1, p(d) / q(d)); on rejection the token is drawn from max(0, p - q), normalised. The token then has the
law p: min(p, q) comes from acceptance, the rest from the residual, which is drawn with probability 1 - sum
min(p, q).

Why the noise is independent where this argument needs it. Positions are decided in order and each exactly
once, so noise that only the decision of a position reads is fresh when it is read, whatever the text before
it:

- ACCEPT and RESIDUAL noise of a position are read by its test and by the draw after a failed test. They must
  be apart: a residual drawn with the noise that failed the test would be conditioned on the failure.
- TARGET noise of a position is read when it is decided without a test: by the bonus after full acceptance, by
  a round without proposal, by the match rule. Under the reject rule a drafter must not draw from it, or the
  length of a round could depend on the noise of its bonus. Under the match rule a drafter should: that makes
  it agree.
- DRAFT noise is the exception: a position behind a rejection is drafted again, and what was drafted there
  before may have steered the length of this round. The round is part of this noise, so the new draw knows
  nothing of it.

A proposal without laws was made with certainty: q is one-hot, min(1, p/q) = p(d) is also the probability that
the target draws d itself, and the residual is p without d. So the match rule then accepts as often as the
reject rule, and `accept_reject` uses it: with a lookup drafter both rules give the same text.

At temperature 0 p is one-hot; both rules keep d if it is the target's token and return that token if it is
not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .drafters.base import Proposal
from .noise import Domain, NoiseKey, uniform
from .sampling import Law


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The outcome of a round: the first `accepted` draft tokens, then `token`.

    kind: "correction" when `token` replaces a rejected draft token, "bonus" when every draft token was kept.
    """

    accepted: int
    token: int
    kind: Literal["correction", "bonus"]


def accept_match(proposal: Proposal, law_at: Callable[[int], Law], key: NoiseKey, position: int) -> Acceptance:
    """Keep draft tokens while they are the target's own tokens.

    law_at: the target's law for row i, given the i draft tokens before it; asked for in order, once per row,
        and never past the first token that is not kept.
    position: index in the committed list of the first token decided here.
    """
    for row, drafted in enumerate(proposal.tokens):
        token = law_at(row).draw(key, Domain.TARGET, position + row)
        if token != drafted:
            return Acceptance(row, token, "correction")
    return _bonus(proposal, law_at, key, position)


def accept_reject(proposal: Proposal, law_at: Callable[[int], Law], key: NoiseKey, position: int) -> Acceptance:
    """Keep each draft token with probability min(1, p/q); arguments as for `accept_match`.

    The proposal's laws must be the ones its tokens were really drawn from, temperature and cuts included.
    """
    if proposal.laws is None:
        return accept_match(proposal, law_at, key, position)
    for row, (drafted, draft_law) in enumerate(zip(proposal.tokens, proposal.laws, strict=True)):
        target_law = law_at(row)
        p, q = target_law.prob(drafted), draft_law.prob(drafted)
        # The product form also holds for q = 0; p >= q keeps rounding out of a certain acceptance.
        if p >= q > 0 or (p > 0 and uniform(key, Domain.ACCEPT, position + row, 0) * q < p):
            continue
        token = _residual(target_law, draft_law).draw(key, Domain.RESIDUAL, position + row)
        return Acceptance(row, token, "correction")
    return _bonus(proposal, law_at, key, position)


def _bonus(proposal: Proposal, law_at: Callable[[int], Law], key: NoiseKey, position: int) -> Acceptance:
    row = len(proposal.tokens)
    return Acceptance(row, law_at(row).draw(key, Domain.TARGET, position + row), "bonus")


def _residual(target: Law, draft: Law) -> Law:
    """max(0, p - q), normalised; the target's law where rounding left nothing, or where it has one token."""
    if target.ids is not None and len(target.ids) == 1:
        return target
    ids = np.arange(len(target.probs)) if target.ids is None else target.ids
    excess = target.probs - draft.probs_of(ids)
    positive = excess > 0
    if not positive.any():
        return target
    excess = excess[positive]
    return Law(ids[positive], excess / excess.sum())
