"""Texts decoded for comparison: with a fixed draft length, with a hostile drafter, several at once; and their gaps."""

from collections.abc import Sequence

import numpy as np

from .decoder import SpeculativeConfig
from .drafters.base import DraftContext, Drafter, Proposal, TokenReader
from .generation import Generation
from .laws import Laws
from .loop import play_round, prefill
from .policy import Policy, PolicyConfig, Source, prior_cost
from .rounding import margin_shift
from .sampling import SamplingParams
from .target import Rows, Target

GREEDY = SamplingParams()


class RandomDrafter(TokenReader):
    """Proposes tokens that have nothing to do with the text, so that nearly every round is rejected at once."""

    name = "random"
    free = True
    passes = 0
    ort_ns = 0

    def __init__(self, token_count: int, seed: int = 0) -> None:
        self._count, self._seed = token_count, seed

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        """Propose k tokens drawn evenly, a function of seed and position."""
        generator = np.random.default_rng((self._seed, len(committed)))
        return Proposal(tuple(generator.integers(0, self._count, k).tolist()))

    def observe(self, committed: Sequence[int]) -> None:
        """Nothing to learn."""

    def rewind(self, length: int) -> None:
        """Nothing to forget."""

    def reset(self) -> None:
        """Nothing to forget."""


def fixed(k: int, tokens: int) -> SpeculativeConfig:
    """Draft k tokens in every round, whatever comes of it, under the match rule."""
    return SpeculativeConfig(k, tokens, min_acceptance_rate=0.0, strict_mode=True, adaptive=False)


def play_together(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[Drafter | None],
    k: int,
    lengths: Sequence[int],
) -> list[list[int]]:
    """Decode several texts greedily, one per slot and all in the same passes; the texts without their prompts.

    prompts, drafters, lengths: one per slot; a drafter serves one text only.
    """
    texts = []
    for slot, (prompt, drafter, length) in enumerate(zip(prompts, drafters, lengths, strict=True)):
        target.cache.rewind_to(slot, 0)
        texts.append(_begin(slot, prompt, drafter, k, length))
        prefill(target, texts[-1])
    while alive := [text for text in texts if text.finish_reason is None]:
        play_round(target, alive)
    return [text.committed[text.prompt_length :] for text in texts]


def _begin(slot: int, prompt: Sequence[int], drafter: Drafter | None, k: int, length: int) -> Generation:
    drafters = (drafter,) if drafter else ()
    for each in drafters:
        each.reset()
        each.observe(prompt)
    bounds = PolicyConfig(k if drafters else 0, min_acceptance_rate=0.0, adaptive=False)
    policy = Policy(bounds, prior_cost("fp32"), [Source(each.name, each.free) for each in drafters])
    return Generation(slot, list(prompt), Laws(GREEDY), length, frozenset(), policy, drafters, strict=True)


def weigh(target: Target, prompt: Sequence[int], answer: Sequence[int], plain: int, other: int) -> tuple[float, float]:
    """The gap between two tokens' logits after prompt and answer as plain decoding saw it, and the noise there.

    The noise is the largest change of the gap between two likely tokens, these two included, from plain decoding to one
    pass over the whole text.
    """
    target.cache.rewind_to(0, 0)
    (narrow,) = target.forward([Rows(0, prompt, 1)])
    for token in answer:
        (narrow,) = target.forward([Rows(0, [token], 1)])
    row = narrow[0].copy()  # [V]
    target.cache.rewind_to(0, 0)
    text = [*prompt, *answer]
    (wide,) = target.forward([Rows(0, text, min(2, len(text)))])
    return float(row[plain] - row[other]), margin_shift(row, wide[-1], plain, other)
