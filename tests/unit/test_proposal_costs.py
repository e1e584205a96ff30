"""Drafts that read the target's rows are timed by whole proposals, in rounds as the loop plays them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from oxidize.runtime.calibration import Calibration, calibrate
from oxidize.runtime.costs import CostCurve
from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.policy import PassCost, Plan, Policy, PolicyConfig, Source
from oxidize.runtime.rows import Rows

STEP, ROW = 10.0, 2.0  # milliseconds


class SlowCache:
    def __init__(self, held: int = 0) -> None:
        self.lengths, self.capacity = [held], 256

    def advance(self, slot: int, rows: int) -> None:
        self.lengths[slot] += rows

    def rewind_to(self, slot: int, length: int) -> None:
        assert length <= self.lengths[slot]
        self.lengths[slot] = length


class World:
    """A target and a drafter that only take time, on one clock, and note in which order they are called."""

    context, token_count, watches, free, name = 4096, 5, True, False, "slow"

    def __init__(self, cost: Callable[[int], float], most: int = 99, scale: float = 1.0, held: int = 0) -> None:
        self.cost, self.most, self.scale = cost, most, scale
        self.cache = SlowCache(held)
        self.now = 0.0
        self.calls: list[tuple[Any, ...]] = []
        self.asked: list[int] = []
        self.first_ms = 0.0
        self.observed: list[int] = []
        self.fail = False

    def clock(self) -> float:
        return self.now

    def calibrate(self, budget_s: float) -> Calibration:
        world: Any = self
        return calibrate(world, [world], budget_s, self.clock)

    # as a target

    def forward(self, requests: Sequence[Rows]) -> list[Any]:
        (request,) = requests
        width = len(request.tokens)
        assert self.cache.lengths[0] + width <= self.context
        self.now += 1e-3 * self.scale * (STEP + ROW * (width - 1))
        self.calls.append(("forward", tuple(request.tokens), request.wanted))
        return []

    def rows(self, index: int) -> str:
        return f"rows of pass {len(self.calls)}"

    # as a drafter

    def watch(self, start: int, rows: Any) -> None:
        self.calls.append(("watch", start, rows == f"rows of pass {len(self.calls)}"))

    def observe(self, committed: Sequence[int]) -> None:
        self.observed = list(committed)
        self.calls.append(("observe", len(committed)))

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        assert list(committed) == self.observed and context.params.greedy
        assert max(committed) < self.token_count
        self.now += 1e-3 * (self.scale * self.cost(k) + (0 if self.asked else self.first_ms))
        self.asked.append(k)
        self.calls.append(("propose", k))
        if self.fail:
            raise RuntimeError("propose")
        return Proposal(tuple(range(min(k, self.most))))

    def reset(self) -> None:
        self.observed = []
        self.calls.append(("reset",))


def chain(k: int) -> float:
    return 3.0 + 1.5 * (k - 1)


def block(k: int) -> float:
    return 4.0 + 0.2 * k


def test_a_chain_is_a_line_whatever_its_first_pass_pays() -> None:
    world = World(chain)
    world.first_ms = 500.0
    curve = world.calibrate(0.4).drafts["slow"]
    assert [curve.at(k) for k in (1, 2, 3, 8, 15)] == pytest.approx([chain(k) for k in (1, 2, 3, 8, 15)])


def test_a_block_is_timed_up_to_its_end() -> None:
    world = World(block, most=5)
    curve = world.calibrate(0.4).drafts["slow"]
    assert {count for count, _ in curve.points} >= {1, 5} and curve.points[-1][0] == 5
    assert [curve.at(k) for k in (1, 3, 5)] == pytest.approx([block(k) for k in (1, 3, 5)])
    assert set(world.asked[1:]) <= {1, 2, 4, 5}


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_draft_of_few_tokens_has_a_curve(most: int) -> None:
    curve = World(block, most=most).calibrate(0.4).drafts["slow"]
    assert [count for count, _ in curve.points] == list(range(1, max(1, most) + 1))


def test_each_proposal_ends_a_round_and_is_taken_back() -> None:
    """The target's rows of all committed tokens but the anchor are shown; they are those of the pass just run."""
    world = World(chain, held=7)
    world.calibrate(0.4)
    ends = [index for index, call in enumerate(world.calls) if call[0] == "propose"]
    assert len(ends) > 5
    for end in ends:
        forward, watch, observe, _, reset = world.calls[end - 3 : end + 2]
        rows = len(forward[1])
        assert forward[0] == "forward" and forward[2] == rows == 2
        assert watch == ("watch", 0, True) and observe == ("observe", rows + 1) and reset == ("reset",)
    assert world.cache.lengths == [7] and world.observed == []


def test_a_context_of_one_more_row_is_enough() -> None:
    world = World(chain, held=World.context - 1)
    assert world.calibrate(0.4).drafts["slow"].at(1) == pytest.approx(chain(1))


def test_a_failing_proposal_leaves_nothing_behind() -> None:
    world = World(chain, held=7)
    world.fail = True
    with pytest.raises(RuntimeError, match="propose"):
        world.calibrate(0.4)
    assert world.cache.lengths == [7] and world.observed == [] and world.calls[-1] == ("reset",)


@pytest.mark.parametrize(("scale", "limit"), [(0.1, 0.4), (1.0, 0.4), (9.0, 2.6), (40.0, 7.0)])
def test_the_silent_calibration_stays_short(scale: float, limit: float) -> None:
    """On slow models the first passes and `_FEWEST_ROUNDS` rounds come on top of the budget."""
    world = World(chain, scale=scale)
    world.calibrate(0.35)
    assert world.now < limit


def test_the_passes_before_proposals_are_part_of_the_budget() -> None:
    first = 1e-3 * (STEP + STEP + ROW + chain(8))  # of target and draft; it comes on top
    for hundredth in range(30, 45):
        world = World(chain)
        world.calibrate(hundredth / 100)
        assert world.now <= first + hundredth / 100 + 1e-9


def test_a_target_with_a_draft_still_times_each_of_its_widths() -> None:
    world = World(chain)
    found = world.calibrate(0.35)
    assert {1, 2, 4, 8} <= {count for count, _ in found.target.points}
    assert [found.target.at(width) for width in (1, 8)] == pytest.approx([STEP, STEP + 7 * ROW])
    assert world.now <= 0.35 + 0.04


def test_drafters_without_a_model_are_left_out() -> None:
    world: Any = World(chain)
    assert list(calibrate(world, [NgramDrafter(), world], 0.1, world.clock).drafts) == ["slow"]


# What the policy makes of it.

MACHINE = CostCurve(((1, 10.0), (2, 11.0), (16, 16.0)))


def first_plan(draft: CostCurve | None) -> Plan:
    policy = Policy(PolicyConfig(8, 0.3), PassCost(MACHINE), [Source("slow", False, draft)])
    policy.start()
    return policy.plan(8, [])


def test_a_known_cost_needs_no_learning() -> None:
    """Guessed, a token costs a fifth of a pass. A chain that costs less drafts longer, and a dear one not at all."""
    cheap, dear = CostCurve(((1, 0.5), (8, 2.0))), CostCurve(((1, 9.0), (8, 72.0)))
    assert first_plan(cheap).k > first_plan(None).k > first_plan(dear).k == 0


def test_the_prompt_read_by_the_first_proposal_is_not_held_against_a_draft() -> None:
    curve = CostCurve(((1, 0.5), (8, 2.0)))
    policies = [Policy(PolicyConfig(8, 0.3), PassCost(MACHINE), [Source("slow", False, curve)]) for _ in range(2)]
    plans: list[list[Plan]] = [[], []]
    for index, policy in enumerate(policies):
        policy.start()
        for round_ in range(6):
            plan = policy.plan(8, [])
            reading = 5000.0 if index == 0 and round_ == 0 else 0.0
            policy.record_draft_cost("slow", plan.k, curve.at(plan.k) + reading)
            policy.record("slow", plan.k, plan.k // 2, 0)
            plans[index].append(plan)
    assert plans[0] == plans[1] and all(plan.k > 0 for plan in plans[0])


def test_a_known_cost_is_still_refined() -> None:
    """One token is always kept, worth 11 ms. Where it really costs 10, that is found out within a few rounds."""

    def played(factor: float) -> list[int]:
        curve = CostCurve(((1, 2.0), (8, 9.0)))
        policy = Policy(PolicyConfig(8, 0.3), PassCost(MACHINE), [Source("slow", False, curve)])
        policy.start()
        ks = []
        for _ in range(60):
            plan = policy.plan(8, [])
            if plan.source is not None:
                policy.record_draft_cost("slow", plan.k, factor * curve.at(plan.k))
                policy.record("slow", plan.k, 1, 0)
            ks.append(plan.k)
        return ks

    same, dear = played(1.0), played(5.0)
    assert min(same) == 1
    assert dear[0] == same[0] and sum(k > 0 for k in dear[20:]) < 10
