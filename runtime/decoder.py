"""The library's front: a target, a draft and a configuration become a decoder of token lists."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .calibration import Calibration
from .drafters.base import Drafter
from .drafters.draft_model import DraftModel
from .errors import UsageError
from .generation import Emission, Generation
from .laws import Constraint, Laws
from .logprobs import LogprobsParams
from .loop import GRAMMAR, TargetModel, generate
from .policy import HOPE, PassCost, Policy, PolicyConfig, Source, prior_cost
from .processors import Controls, Processors
from .sampling import SamplingParams
from .stats import SpeculativeStats
from .target import PREFILL_CHUNK, Target

MAX_DRAFT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to speculate.

    draft_tokens_per_step bounds k; `adaptive` lets the policy choose any k up to it (0 included) by what passes cost on
    this machine and how well drafts fare, otherwise every round drafts exactly that many. strict_mode selects the
    acceptance rule: true keeps a draft token only if it is the target's own (same seed, same text), false tests it
    against the ratio of the laws. min_acceptance_rate over the recent rounds ends speculation until drafts do better.
    """

    draft_tokens_per_step: int = 4
    max_new_tokens: int = 128
    min_acceptance_rate: float = 0.3
    strict_mode: bool = False
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.draft_tokens_per_step <= MAX_DRAFT_TOKENS:
            raise UsageError(
                f"draft_tokens_per_step must be between 0 and {MAX_DRAFT_TOKENS}, not {self.draft_tokens_per_step}"
            )
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0.0 <= self.min_acceptance_rate <= 1.0:
            raise UsageError(f"min_acceptance_rate must be between 0 and 1, not {self.min_acceptance_rate}")

    @classmethod
    def conservative(cls) -> "SpeculativeConfig":
        """Short drafts that are given up early."""
        return cls(draft_tokens_per_step=2, min_acceptance_rate=0.5)

    @classmethod
    def aggressive(cls) -> "SpeculativeConfig":
        """Long drafts that are given up late."""
        return cls(draft_tokens_per_step=8, min_acceptance_rate=0.2)

    @classmethod
    def builder(cls) -> "SpeculativeConfigBuilder":
        """A builder that starts from the defaults."""
        return SpeculativeConfigBuilder(cls())


@dataclass(frozen=True, slots=True)
class SpeculativeConfigBuilder:
    """Sets one field at a time; every call returns a new builder."""

    _config: SpeculativeConfig

    def draft_tokens_per_step(self, value: int) -> "SpeculativeConfigBuilder":
        """At most this many draft tokens a round."""
        return SpeculativeConfigBuilder(replace(self._config, draft_tokens_per_step=value))

    def max_new_tokens(self, value: int) -> "SpeculativeConfigBuilder":
        """At most this many generated tokens."""
        return SpeculativeConfigBuilder(replace(self._config, max_new_tokens=value))

    def min_acceptance_rate(self, value: float) -> "SpeculativeConfigBuilder":
        """Fall back to plain decoding under this rate."""
        return SpeculativeConfigBuilder(replace(self._config, min_acceptance_rate=value))

    def strict_mode(self, value: bool) -> "SpeculativeConfigBuilder":
        """Keep only the target's own tokens."""
        return SpeculativeConfigBuilder(replace(self._config, strict_mode=value))

    def adaptive(self, value: bool) -> "SpeculativeConfigBuilder":
        """Choose k each round, or always draft the same number."""
        return SpeculativeConfigBuilder(replace(self._config, adaptive=value))

    def build(self) -> SpeculativeConfig:
        """The finished configuration."""
        return self._config


Draft = Drafter | Target


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a text asks for beside its sampling parameters. `grammar` is a fresh state; `choice` tells texts apart that
    share prompt and seed."""

    controls: Controls = field(default_factory=Controls)
    grammar: Constraint | None = None
    logprobs: LogprobsParams | None = None
    choice: int = 0


class SpeculativeDecoder:
    """Decodes token lists with one target and any number of drafters, in one slot of the target.

    `draft` is a Drafter, a Target used as a draft model, several of them in order of preference, or None. What the
    cache already holds of a prompt is re-used. After `generate` or a finished `stream`, `stats` describes the last
    generation.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: Draft | Sequence[Draft] | None = None,
        config: SpeculativeConfig | None = None,
        slot: int = 0,
        calibration: Calibration | None = None,
    ) -> None:
        self.target, self.slot = target, slot
        self.config = config or SpeculativeConfig()
        self.drafters = _drafters(draft)
        self.stats = SpeculativeStats()
        self._calibration = calibration
        self._cost = self._pass_cost()
        self._draft_passes = 0  # of the drafters, when the current text began
        self._observed: list[int] = []  # the text the drafters saw
        self._hopes: dict[str, float] = {}  # by drafter, what the last text taught about its acceptance

    def generate(
        self, prompt: Sequence[int], params: SamplingParams | None = None, eos: Collection[int] = ()
    ) -> list[int]:
        """All generated tokens for `prompt`, the EOS that ended them included."""
        return [token for emission in self.stream(prompt, params, eos) for token in emission.tokens]

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        eos: Collection[int] = (),
        config: SpeculativeConfig | None = None,
        chunk: int = PREFILL_CHUNK,
        wishes: Wishes | None = None,
    ) -> Iterator[Emission]:
        """One Emission per round. `config` replaces the decoder's for this call."""
        generation = self._start(
            list(prompt), params or SamplingParams(), frozenset(eos), config or self.config, wishes or Wishes()
        )
        try:
            yield from generate(self.target, generation, chunk)
        except GeneratorExit:  # between two rounds, where all parts agree
            raise
        except BaseException:
            self.target.cache.wipe(self.slot)
            self._forget()
            raise
        finally:
            if generation.left_out:
                self._forget()
            generation.stats.draft_forward_passes = self._passes() - self._draft_passes
            self._hopes |= generation.policy.hopes()

    def _start(
        self,
        prompt: list[int],
        params: SamplingParams,
        eos: frozenset[int],
        config: SpeculativeConfig,
        wishes: Wishes,
    ) -> Generation:
        check_prompt(prompt, self.target.context)
        controls = wishes.controls
        processors = None if controls.neutral else Processors(controls, eos, prompt, self.target.token_count)
        drafters = self.drafters if config.draft_tokens_per_step else ()
        generation = Generation(
            slot=self.slot,
            committed=prompt,
            laws=Laws(params, processors, wishes.grammar),
            max_new_tokens=config.max_new_tokens,
            eos=eos,
            policy=self._policy(config, drafters, wishes.grammar is not None),
            drafters=drafters,
            strict=config.strict_mode,
            choice=wishes.choice,
            logprobs=wishes.logprobs,
        )
        if drafters:
            same = _common_prefix(prompt, self._observed)
            for drafter in drafters:
                drafter.rewind(same)
                drafter.observe(prompt)
            self._observed = generation.committed
        known = [drafter.known for drafter in drafters if drafter.watches]
        generation.stats.cached_tokens = self._reuse(prompt, min(known, default=len(prompt)))
        self._describe(generation)
        self._draft_passes = self._passes()
        self.stats = generation.stats
        return generation

    def _policy(self, config: SpeculativeConfig, drafters: Sequence[Drafter], grammar: bool) -> Policy:
        bounds = PolicyConfig(config.draft_tokens_per_step, config.min_acceptance_rate, config.adaptive)
        forced = [Source(GRAMMAR, free=True)] if grammar and config.draft_tokens_per_step else []
        curves = self._calibration.drafts if self._calibration is not None else {}
        sources = [
            Source(
                name=drafter.name,
                free=drafter.free,
                draft=curves.get(drafter.name),
                hope=self._hopes.get(drafter.name, HOPE),
                most=drafter.most,
            )
            for drafter in drafters
        ]
        return Policy(bounds, self._cost, [*forced, *sources])

    def _forget(self) -> None:
        """After an error in the middle of a round, or one of theirs, the drafters begin anew."""
        self._observed = []
        for drafter in self.drafters:
            drafter.reset()

    def _passes(self) -> int:
        return sum(drafter.passes for drafter in self.drafters)

    def _reuse(self, prompt: list[int], most: int) -> int:
        """Keep what the cache holds of the prompt, at most so many tokens: drafts may need to see the others pass."""
        kept = min(_common_prefix(prompt, self.target.held(self.slot)), most)
        self.target.cache.rewind_to(self.slot, kept)
        return kept

    def _describe(self, generation: Generation) -> None:
        stats = generation.stats
        stats.acceptance_rule = "match" if generation.strict else "reject"
        stats.drafter = "+".join(drafter.name for drafter in generation.drafters) or "none"
        if isinstance(self.target, Target):
            stats.provider, stats.precision = self.target.provider, self.target.bundle.manifest.precision

    def _pass_cost(self) -> PassCost:
        if self._calibration is not None:
            return PassCost(self._calibration.target)
        precision = self.target.bundle.manifest.precision if isinstance(self.target, Target) else "fp32"
        return prior_cost(precision)


def _drafters(draft: Draft | Sequence[Draft] | None) -> tuple[Drafter, ...]:
    given = [] if draft is None else draft if isinstance(draft, Sequence) else [draft]
    drafters = tuple(DraftModel(item) if isinstance(item, Target) else item for item in given)
    names = [drafter.name for drafter in drafters]
    if len(set(names)) < len(names):
        raise UsageError(f"two drafters are both called {max(names, key=names.count)!r}; give them names of their own")
    return drafters


def _common_prefix(prompt: list[int], before: list[int]) -> int:
    """Length of the common prefix of a prompt and an earlier text, the prompt's last token left out."""
    most = min(len(prompt) - 1, len(before))
    return next((i for i in range(most) if prompt[i] != before[i]), most)


def check_prompt(prompt: Sequence[int], context: int) -> None:
    """Refuse an empty prompt and one that leaves no room for an answer."""
    if not prompt:
        raise UsageError("the prompt is empty; give at least one token")
    if len(prompt) >= context:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens and the model's context {context}, one of which must stay free; "
            "shorten the prompt"
        )
