"""What a request asks for, beside its prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .decoder import SpeculativeConfig
from .errors import UsageError
from .grammar import GrammarSpec
from .logprobs import LogprobsParams
from .parsing import Parser
from .processors import Controls
from .sampling import SamplingParams

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Request:
    """How the answers to one prompt are to be made; the defaults give one greedy answer.

    config: how to speculate and how many tokens at most; None: as the engine's decoder was configured.
    bad_words: texts that the answer must not hold as their own tokens (alone or after a space). Other ways to cut the
        same characters into tokens are not forbidden.
    parsers: makes the parsers of one answer, reasoning before tool calls (see `parsing`).
    stops: the answer ends before the first of these texts.
    choices: so many answers, told apart by `Delta.choice`; with temperature 0 they are all alike.
    """

    config: SpeculativeConfig | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    controls: Controls = field(default_factory=Controls)
    bad_words: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    logprobs: LogprobsParams | None = None
    choices: int = 1
    parsers: Callable[[], Sequence[Parser]] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.choices <= MAX_CHOICES:
            raise UsageError(f"choices must be between 1 and {MAX_CHOICES}, not {self.choices}")
        if not all(self.bad_words):
            raise UsageError("a bad word is empty; give at least one character")
