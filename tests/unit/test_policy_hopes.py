"""What a text taught about a draft's acceptance, the next begins with by half: on the clock of simulated texts."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from fakes import FakeDraft, FakeTarget, OracleDrafter, hashed_logits
from policy_world import MACHINES, Script, World, bernoulli, flat, fresh, linear, play, play_fixed

from oxidize.runtime.costs import CostCurve
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.policy import HOPE, Offer, PassCost, Policy, PolicyConfig, Source, State
from oxidize.runtime.sampling import SamplingParams, law_of

DRAFTS = {"model": linear(0.15), "dear model": linear(0.4), "block": flat(0.3)}
SHORT, TEXTS = 256, 12
LOWEST, HIGHEST = HOPE / 2, (HOPE + 1) / 2  # what a text may begin with at the worst


def times(machine: str, draft: str, chances: Sequence[float], remember: bool) -> list[float]:
    """Time of each of some short texts, drafts kept with these chances, relative to plain decoding."""
    hope, found = HOPE, []
    for seed, chance in enumerate(chances):
        made = world(machine, DRAFTS[draft], bernoulli(SHORT, lambda _, c=chance: c, seed + 1), hope)
        policy = fresh(made)
        found.append(play(made, policy).total / play_fixed(made, ("draft",), 0))
        hope = policy.hopes()["draft"] if remember else HOPE
    return found


def world(machine: str, draft: CostCurve, runs: list[int], hope: float) -> World:
    return World(MACHINES[machine], [Script(Source("draft", False, draft, hope), runs)], len(runs))


def gain(chances: Sequence[float], first: int = 1) -> dict[str, float]:
    """By draft, the time with memory relative to that without, over all machines and the texts from `first` on."""
    return {
        draft: mean(mean(times(machine, draft, chances, True)[first:]) for machine in MACHINES)
        / mean(mean(times(machine, draft, chances, False)[first:]) for machine in MACHINES)
        for draft in DRAFTS
    }


def test_hopeless_texts_cost_less_after_the_first() -> None:
    found = gain([0.02] * TEXTS)
    assert max(found.values()) < 0.997 and mean(found.values()) < 0.994
    assert max(gain([0.2] * TEXTS).values()) < 1.0


@pytest.mark.parametrize("chance", [0.5, 0.8])
def test_steady_texts_lose_nothing(chance: float) -> None:
    found = gain([chance] * TEXTS)
    assert max(found.values()) <= 1.006 and mean(found.values()) <= 1.003


@pytest.mark.parametrize("chances", [[0.85, 0.05] * 6, [0.85] * 4 + [0.05] * 4 + [0.85] * 4])
def test_mixed_texts_lose_next_to_nothing(chances: list[float]) -> None:
    """Even where every text is the opposite of the last."""
    found = gain(chances)
    assert max(found.values()) <= 1.01 and mean(found.values()) <= 1.005


def test_the_first_good_text_after_hopeless_ones() -> None:
    assert max(gain([0.02] * 3 + [0.85], first=3).values()) <= 1.03


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_hopeless_text_stays_near_plain_decoding_however_high_the_hopes(machine: str, draft: str) -> None:
    made = world(machine, DRAFTS[draft], [0] * 3000, HIGHEST)
    assert play(made, fresh(made, floor=0.0)).total / play_fixed(made, ("draft",), 0) <= 1.02


@pytest.mark.parametrize("floor", [0.3, 0.5])
@pytest.mark.parametrize("hope", [LOWEST, HIGHEST])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_fallback_ends_within_64_tokens_whatever_was_hoped_for(
    machine: str, draft: str, hope: float, floor: float
) -> None:
    """Under the higher floor a text may begin in Fallback, because of the texts before."""
    for turn in (0, 20, 40, 60, 200, 230):
        runs = bernoulli(turn + 100, lambda position, at=turn: 1.0 if position >= at else 0.02, turn)
        log = play(made := world(machine, DRAFTS[draft], runs, hope), fresh(made, floor))
        before = [log.states[0][1], *(state for position, state, _ in log.states if position <= turn)]
        if before[-1] is State.FALLBACK:
            back = next(position for position, state, _ in log.states if position > turn and state is State.SPECULATING)
            assert back - turn <= 64


def test_hopes_lie_halfway_between_the_text_and_the_first_guess() -> None:
    for chance, expected in ((0.0, LOWEST), (1.0, HIGHEST)):
        made = world("fp32", DRAFTS["model"], bernoulli(1000, lambda _, c=chance: c, 1), HOPE)
        policy = fresh(made)
        play(made, policy)
        assert policy.hopes()["draft"] == pytest.approx(expected, abs=0.05)


def test_what_was_not_tried_is_hoped_for_as_before() -> None:
    hope = HOPE
    for _ in range(50):
        policy = Policy(PolicyConfig(8, 0.3), PassCost(MACHINES["int4"]), [Source("draft", False, linear(0.15), hope)])
        policy.start()
        hope = policy.hopes()["draft"]
    assert hope == pytest.approx(HOPE, abs=0.05)


def test_free_sources_begin_anew() -> None:
    """What they offer is judged in every round anyway."""
    policy = Policy(PolicyConfig(8, 0.3), PassCost(MACHINES["int4"]), [Source("ngram", True)])
    policy.start()
    policy.plan(8, [Offer("ngram", 8, 3)])
    assert policy.hopes() == {}


# The decoder carries them from text to text.


class Hopes(list):
    """What the sources of each text began with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        seen = self

        class Seen(Policy):
            def __init__(self, config: PolicyConfig, cost: PassCost, sources: Sequence[Source]) -> None:
                seen.append({source.name: source.hope for source in sources})
                super().__init__(config, cost, sources)

        monkeypatch.setattr("oxidize.runtime.decoder.Policy", Seen)


class Judged(OracleDrafter):
    """Always right, or always wrong, and no lookup."""

    def __init__(self, target: FakeTarget, right: bool) -> None:
        super().__init__(target, 99 if right else 0)

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        return replace(super().propose(committed, k, context), match_length=0)


@pytest.mark.parametrize("right", [False, True])
def test_the_next_text_begins_with_what_the_last_taught(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hopes, target = Hopes(monkeypatch), FakeTarget()
    decoder = SpeculativeDecoder(target, Judged(target, right), SpeculativeConfig(4, 48))
    texts = [decoder.generate([1, 2, prompt]) for prompt in (3, 4, 3)]
    first, second, third = (each["fake"] for each in hopes)
    assert first == HOPE
    assert second > HOPE + 0.08 if right else second < HOPE - 0.1
    assert third == pytest.approx(second, abs=0.1)
    assert texts[0] == texts[2] == SpeculativeDecoder(FakeTarget()).generate([1, 2, 3])[:48]


def test_a_text_left_early_teaches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    hopes, target = Hopes(monkeypatch), FakeTarget()
    decoder = SpeculativeDecoder(target, Judged(target, False), SpeculativeConfig(4, 99))
    stream = decoder.stream([1, 2, 3])
    for _ in range(20):
        next(stream)
    stream.close()
    decoder.generate([1, 2, 3])
    assert hopes[1]["fake"] < HOPE - 0.1


def test_with_a_fixed_k_a_sampled_text_never_depends_on_the_texts_before() -> None:
    """Under the reject rule a text follows from seed, draft and k, as long as no measured time decides on drafts."""
    params = SamplingParams(1.0, seed=3)

    def decoder() -> SpeculativeDecoder:
        draft = FakeDraft(lambda context: law_of(np.roll(hashed_logits(context, 13), 1), params))
        return SpeculativeDecoder(FakeTarget(), draft, SpeculativeConfig(4, 60, 0.0, adaptive=False))

    used = decoder()
    texts = [used.generate([1, 2, 3], params) for _ in range(3)]
    assert 0 < used.stats.accepted_draft_tokens < used.stats.draft_tokens
    assert texts == [decoder().generate([1, 2, 3], params)] * 3
