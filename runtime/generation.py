"""One text being generated, and what a round adds to it."""

from dataclasses import dataclass, field

from .drafters.base import DraftContext, Drafter
from .laws import Laws
from .logprobs import LogprobsParams, TokenLogprob
from .noise import NoiseKey
from .policy import Policy
from .stats import SpeculativeStats


@dataclass(slots=True)
class Generation:
    """One text being generated in one slot. `committed` is the authoritative token list, prompt included.

    drafters: in order of preference; each has observed exactly the committed tokens between rounds. left_out: names of
    those that broke down.
    """

    slot: int
    committed: list[int]
    laws: Laws
    max_new_tokens: int
    eos: frozenset[int]
    policy: Policy
    drafters: tuple[Drafter, ...] = ()
    strict: bool = False
    choice: int = 0
    logprobs: LogprobsParams | None = None
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    finish_reason: str | None = field(default=None, init=False)
    prompt_length: int = field(default=0, init=False)
    left_out: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.prompt_length = self.stats.prompt_tokens = len(self.committed)

    def leave_out(self, drafter: Drafter) -> None:
        """Go on without a drafter that broke down."""
        self.drafters = tuple(each for each in self.drafters if each is not drafter)
        self.left_out.append(drafter.name)
        self.policy.leave_out(drafter.name)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.committed) - self.prompt_length

    @property
    def key(self) -> NoiseKey:
        """Names this text's noise."""
        return NoiseKey(self.laws.params.seed, self.choice)

    @property
    def context(self) -> DraftContext:
        """What a drafter may know besides the committed tokens."""
        return DraftContext(self.laws.params, self.key, self.stats.rounds, self.strict, self.laws)


@dataclass(frozen=True, slots=True)
class Emission:
    """What one round gave one sequence.

    tokens: of which the first `accepted` were drafted. kind: what a token behind them is: a "correction" of a rejected
    draft token, a "bonus" after a draft that was kept whole, or "plain" when nothing was drafted. logprobs: one per
    token, if asked for.
    """

    tokens: tuple[int, ...]
    accepted: int
    finish_reason: str | None
    kind: str = "plain"
    logprobs: tuple[TokenLogprob, ...] | None = None
