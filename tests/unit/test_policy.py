"""The policy's choices one by one: k follows costs and outcomes, states have reasons, Fallback ends when text turns."""

from itertools import pairwise
from time import perf_counter_ns

import pytest

from oxidize.runtime.costs import CostCurve
from oxidize.runtime.estimates import ByContext, ByPosition, DraftCost
from oxidize.runtime.policy import Offer, PassCost, Plan, Policy, PolicyConfig, Source, State, prior_cost

PLAIN = Plan(None, 0)


def line(slope: float) -> CostCurve:
    """T(M) = 1 + slope * (M - 1)."""
    return CostCurve(((1, 1.0), (2, 1.0 + slope)))


def policy(*sources: Source, slope: float = 0.1, max_k: int = 8, floor: float = 0.3, adaptive: bool = True) -> Policy:
    made = Policy(PolicyConfig(max_k, floor, adaptive), PassCost(line(slope)), sources)
    made.start()
    return made


def lookup(slope: float = 0.1, **rest) -> Policy:
    return policy(Source("ngram", True), slope=slope, **rest)


def model(per_token: float = 0.1, slope: float = 0.1, **rest) -> Policy:
    return policy(Source("model", False, CostCurve(((1, per_token), (2, 2 * per_token)))), slope=slope, **rest)


def offer(match: int, available: int = 8) -> list[Offer]:
    return [Offer("ngram", available, match)]


def play(made: Policy, rounds: int, accepted: int, match: int = 0, draft_ms: float | None = None) -> list[int]:
    """Rounds of one source that keeps up to `accepted` tokens; returns each round's k."""
    lookups = match > 0
    played = []
    for _ in range(rounds):
        plan = made.plan(8, offer(match) if lookups else [])
        if plan.source is not None:
            if not lookups:
                made.record_draft_cost(plan.source, plan.k, 0.1 * plan.k if draft_ms is None else draft_ms)
            made.record(plan.source, plan.k, min(accepted, plan.k), match)
        elif lookups:
            made.record_unused("ngram", accepted > 0, match)
        played.append(plan.k)
    return played


# What a pass costs


def test_first_sample_of_a_width_is_discarded() -> None:
    cost = prior_cost("fp32")
    cost.observe(1, 50.0)
    assert cost.plain_ms is None
    cost.observe(1, 10.0)
    assert cost.plain_ms == 10.0


def test_unseen_widths_follow_the_prior_at_the_scale_seen() -> None:
    cost = prior_cost("int4")
    assert cost.estimate(1) == 1.0
    assert not cost.known
    for _ in range(2):
        cost.observe(1, 10.0)
    assert cost.known
    assert cost.estimate(2) == pytest.approx(12.5)
    assert cost.table(4) == pytest.approx([10.0, 12.5, 15.5, 18.5])


def test_a_calibration_is_in_milliseconds_and_followed_from_there() -> None:
    cost = PassCost(CostCurve(((1, 10.0), (2, 12.0))))
    assert cost.known
    assert cost.plain_ms == 10.0
    assert cost.estimate(2) == 12.0
    for _ in range(20):
        cost.observe(1, 20.0)
    assert cost.estimate(2) == pytest.approx(24.0, rel=0.05)


def test_the_shape_is_learned_where_it_differs_from_the_prior() -> None:
    cost = prior_cost("int4")
    for _ in range(100):
        cost.observe(1, 10.0)
        cost.observe(8, 15.0)
    assert cost.estimate(8) / cost.estimate(1) == pytest.approx(1.5, rel=0.1)


def test_a_busy_spell_slows_all_widths_alike() -> None:
    cost = PassCost(line(0.3))
    for _ in range(50):
        cost.observe(1, 1.0)
        cost.observe(5, 2.2)
    before = cost.estimate(5) / cost.estimate(1)
    for _ in range(10):
        cost.observe(5, 8.8)
    assert cost.estimate(5) > 4
    for _ in range(8):
        cost.observe(1, 1.0)
    assert cost.estimate(5) / cost.estimate(1) == pytest.approx(before, rel=0.35)


def test_a_slow_outlier_moves_the_estimate_little() -> None:
    cost = prior_cost("fp32")
    for milliseconds in (10, 10, 10, 500):
        cost.observe(1, milliseconds)
    assert cost.estimate(1) < 15


def test_int4_verification_is_dearer_than_float() -> None:
    assert prior_cost("int4").estimate(8) > 2 * prior_cost("fp32").estimate(8)


def test_a_draft_of_unknown_cost_is_guessed_in_the_unit_of_the_pass() -> None:
    cost, target = DraftCost(None), prior_cost("fp32")
    assert cost.table_or_guess(2, target) == pytest.approx([0.2, 0.4])
    for _ in range(2):
        target.observe(1, 10.0)
    assert cost.table_or_guess(2, target) == pytest.approx([2.0, 4.0])
    cost.observe(2, 1.0)
    assert cost.table_or_guess(2, target)[1] == pytest.approx(1.0)


# How likely a token is kept


def test_a_position_without_evidence_is_like_the_one_before() -> None:
    estimate = ByPosition(0.7, 8)
    assert estimate.chances(3) == pytest.approx([0.7] * 3, abs=0.05)
    for _ in range(60):
        estimate.record(2, 2)
    assert min(estimate.chances(8)) > 0.95


def test_positions_are_told_apart() -> None:
    estimate = ByPosition(0.7, 8)
    for _ in range(100):
        estimate.record(8, 3)
    assert estimate.chances(3)[2] > 0.9
    assert estimate.chances(4)[3] < 0.1


def test_the_estimate_is_steady_on_steady_text_and_quick_when_it_changes() -> None:
    estimate = ByPosition(0.7, 1)
    for index in range(400):
        estimate.record(1, index % 2)
    assert estimate.chances(1)[0] == pytest.approx(0.5, abs=0.05)
    for _ in range(20):
        estimate.record(1, 1)
    assert estimate.chances(1)[0] > 0.75


def test_code_teaches_nothing_about_the_second_token_in_prose() -> None:
    estimate = ByPosition(0.7, 8)
    for _ in range(30):
        estimate.record(8, 8)
    for _ in range(60):
        estimate.record(8, 0)
    first, second = estimate.chances(2)
    assert first < 0.1
    assert second < 0.5


def test_a_lookup_is_trusted_by_its_match_length() -> None:
    estimate = ByContext()
    assert estimate.chances(3, 2) == sorted(estimate.chances(3, 2))
    assert estimate.chances(1, 2)[0] == pytest.approx(0.43, abs=0.05)
    assert estimate.chances(40, 25)[-1] > 0.85
    for _ in range(100):
        estimate.record(1, 0, 2)
    assert estimate.chances(1, 2)[0] < 0.1
    assert estimate.chances(1, 12)[0] > 0.75


# Which source, and how many tokens


def test_free_verification_drafts_everything_and_dear_verification_nothing() -> None:
    assert lookup(slope=0.0).plan(8, offer(20)) == Plan("ngram", 8)
    assert lookup(slope=2.0).plan(8, offer(20)) == PLAIN


def test_k_grows_with_acceptance() -> None:
    assert play(lookup(slope=0.3), 60, accepted=0, match=4)[-1] == 0
    assert play(lookup(slope=0.3), 60, accepted=8, match=4)[-1] == 8
    short, long = play(model(slope=0.2), 100, accepted=2)[-1], play(model(slope=0.2), 100, accepted=8)[-1]
    assert short == 2
    assert long == 8


def test_room_cap_and_offer_bound_the_proposal() -> None:
    made = lookup(slope=0.0, max_k=5)
    assert made.plan(100, offer(20)).k == 5
    assert made.plan(3, offer(20)).k == 3
    assert made.plan(0, offer(20)) == PLAIN
    assert made.plan(100, offer(20, available=2)).k == 2
    assert model(slope=0.0, per_token=0.0001, max_k=5).plan(100, []).k == 5


def test_a_long_match_beats_a_model_which_beats_a_poor_match_and_nothing_beats_both() -> None:
    sources = (Source("ngram", True), Source("model", False, line(0.0)))
    cheap = policy(Source("ngram", True), Source("model", False, CostCurve(((1, 0.1),))))
    assert cheap.plan(8, offer(20)).source == "ngram"
    assert cheap.plan(8, offer(1)).source == "model"
    assert cheap.plan(8, []).source == "model"
    assert policy(*sources, slope=0.9).plan(8, offer(1)) == PLAIN


def test_of_two_models_the_one_that_proves_better_is_used() -> None:
    made = policy(Source("bad", False, CostCurve(((1, 0.1),))), Source("good", False, CostCurve(((1, 0.2),))))
    chosen = []
    for _ in range(300):
        plan = made.plan(8, [])
        made.record_draft_cost(plan.source, plan.k, 0.1 if plan.source == "bad" else 0.2)
        made.record(plan.source, plan.k, plan.k if plan.source == "good" else min(1, plan.k), 0)
        chosen.append(plan.source)
    assert chosen[0] == "bad"
    assert chosen[-100:].count("good") >= 99
    assert 0 < chosen[100:].count("bad") <= 2  # tried now and then: the text may change


def test_a_width_that_looked_slow_is_tried_again() -> None:
    """Ten slow rounds with a draft that is always right must not end drafting."""
    made = lookup(slope=0.3)
    ks = []
    for turn in range(200):
        k = made.plan(8, offer(20)).k
        made.cost.observe(1 + k, (4 if 20 <= turn < 30 else 1) * (1 + 0.3 * k))
        if k:
            made.record("ngram", k, k, 20)
        else:
            made.record_unused("ngram", True, 20)
        ks.append(k)
    assert min(ks[60:]) >= 6


# States and reasons


def test_states_of_a_generation() -> None:
    made = Policy(PolicyConfig(8, 0.3), PassCost(line(0.1)), [Source("ngram", True)])
    assert made.state is State.PREFILL
    made.start()
    assert (made.state, made.reason) == (State.SPECULATING, "prompt is read")
    made.finish("stop")
    assert (made.state, made.reason) == (State.DONE, "stop")


@pytest.mark.parametrize("made", [policy(), model(max_k=0)], ids=["no source", "no tokens"])
def test_without_drafts_it_is_plain_decoding(made: Policy) -> None:
    assert (made.state, made.reason) == (State.FALLBACK, "no drafter")
    assert made.plan(8, []) == PLAIN


def test_a_rate_under_the_floor_ends_speculation_though_it_would_pay() -> None:
    made = model(slope=0.0, per_token=0.01)
    for turn in range(400):
        plan = made.plan(8, [])
        if plan.source is not None:
            made.record("model", plan.k, int(turn % 8 == 0), 0)
        if made.state is State.FALLBACK:
            break
    assert made.state is State.FALLBACK
    assert made.reason.endswith("of recent draft tokens is under 0.30")
    assert not model(slope=0.0, per_token=0.01, floor=0.0).reason.endswith("0.30")


def test_what_was_under_the_floor_comes_back_only_over_it() -> None:
    """A quarter of the first tokens are kept: not clearly under 0.3, but under it."""
    made = model(slope=0.0, per_token=0.01)
    play(made, 60, accepted=0, draft_ms=0.01)
    assert made.state is State.FALLBACK
    asked = 0
    for _ in range(4000):
        plan = made.plan(8, [])
        if plan.source is not None:
            asked += 1
            made.record("model", plan.k, int(asked % 4 == 0), 0)
        assert made.state is State.FALLBACK
    assert asked > 100


def test_short_runs_of_long_drafts_are_over_the_floor() -> None:
    """One token of eight is kept in every round: 0.13 of those proposed, but every first one."""
    made = model(slope=0.0, per_token=0.0001)
    assert max(play(made, 300, accepted=1, draft_ms=0.0005)) >= 2
    assert made.state is State.SPECULATING


def test_a_draft_that_costs_more_than_it_saves_falls_back_and_is_tried_again() -> None:
    made = model(slope=0.05)
    assert play(made, 10, accepted=8)[-1] > 0
    play(made, 20, accepted=8, draft_ms=9.0)
    assert (made.state, made.reason) == (State.FALLBACK, "drafts cost more than they save")
    for _ in range(1500):  # the draft is fast again, and right
        play(made, 1, accepted=8, draft_ms=0.01)
        if made.state is State.SPECULATING:
            break
    assert made.state is State.SPECULATING


def test_probes_are_short_and_further_and_further_apart() -> None:
    made = model(per_token=0.3, slope=0.2)
    played = play(made, 1500, accepted=0, draft_ms=0.3)
    assert made.state is State.FALLBACK
    probes = [index for index, k in enumerate(played) if k]
    gaps = [b - a for a, b in pairwise(probes) if b - a > 1]
    assert {played[index] for index in probes[-5:]} == {1}
    assert gaps[-1] == max(gaps)
    assert gaps[0] < 15
    assert 38 <= gaps[-1] <= 41


def test_fallback_ends_after_a_few_probes_that_are_right() -> None:
    made = model()
    play(made, 200, accepted=0)
    assert made.state is State.FALLBACK
    emitted = 0
    while made.state is State.FALLBACK and emitted <= 64:
        emitted += 1 + play(made, 1, accepted=8)[0]
    assert emitted <= 64
    assert made.reason == "model: 7 draft tokens in a row were kept"
    assert play(made, 20, accepted=8)[-1] == 8


def test_lookups_end_in_fallback_and_return_with_a_match_that_is_worth_it() -> None:
    made = lookup(slope=0.3)
    play(made, 60, accepted=0, match=4)
    assert made.state is State.FALLBACK
    assert made.plan(8, offer(4)) == PLAIN
    assert made.plan(8, offer(20)).k > 2
    assert made.state is State.SPECULATING
    assert made.reason.startswith("ngram pays: ")
    assert made.reason.endswith(" behind a match of 20")


def test_offers_are_judged_while_they_are_not_used() -> None:
    made = lookup(slope=0.3)
    play(made, 60, accepted=0, match=4)
    assert play(made, 20, accepted=8, match=4)[-1] > 0
    assert made.state is State.SPECULATING


def test_drafting_stops_when_it_has_lost_what_it_may() -> None:
    """Estimates that are misled: each time a long draft is expected to be kept, it is not."""
    made = model(per_token=0.4, slope=0.3, floor=0.0)
    reasons = set()
    for _ in range(3000):
        plan = made.plan(8, [])
        if plan.source is not None:
            made.record_draft_cost("model", plan.k, 0.4 * plan.k)
            made.record("model", plan.k, plan.k if plan.k < 3 else 0, 0)
        reasons.add(made.reason)
    assert "drafts have lost as much time as they may" in reasons


# A fixed k


def test_a_fixed_k_is_used_whatever_it_costs_until_the_rate_is_too_low() -> None:
    made = model(slope=2.0, adaptive=False)
    assert play(made, 30, accepted=8) == [8] * 30
    play(made, 30, accepted=1)
    assert made.state is State.FALLBACK
    assert made.reason.startswith("acceptance 0.")
    assert made.reason.endswith("draft tokens is under 0.30")


def test_a_fixed_k_comes_back_when_the_text_turns() -> None:
    made = model(adaptive=False)
    play(made, 200, accepted=0)
    assert made.state is State.FALLBACK
    play(made, 60, accepted=8)
    assert made.state is State.SPECULATING
    assert play(made, 5, accepted=8) == [8] * 5


def test_a_fixed_k_takes_the_first_source_that_can_propose() -> None:
    made = policy(Source("ngram", True), Source("model", False, CostCurve(((1, 5.0),))), adaptive=False)
    assert made.plan(8, offer(1, available=3)) == Plan("ngram", 3)
    assert made.plan(8, []) == Plan("model", 8)


# Its own cost


def test_a_plan_costs_microseconds() -> None:
    made = policy(Source("ngram", True), Source("model", False, CostCurve(((1, 0.1),))), max_k=32)
    for _ in range(50):
        made.record("model", 32, 20, 0)
    times = []
    for _ in range(300):
        start = perf_counter_ns()
        made.plan(32, [Offer("ngram", 32, 5)])
        times.append(perf_counter_ns() - start)
    assert sorted(times)[len(times) // 10] < 100_000  # about 15 microseconds on a quiet machine


@pytest.mark.parametrize("adaptive", [True, False])
def test_no_more_is_asked_of_a_source_than_it_can_propose(adaptive: bool) -> None:
    """A block has an end: what lies behind it is neither priced nor planned."""
    source = Source("block", False, CostCurve(((1, 0.1), (15, 0.1))), most=7)
    made = Policy(PolicyConfig(15, 0.0, adaptive), PassCost(CostCurve(((1, 10.0), (16, 10.1)))), [source])
    made.start()
    asked = []
    for _ in range(40):
        plan = made.plan(20, [])
        asked.append(plan.k)
        made.record("block", plan.k, plan.k, 0)
    assert max(asked) == 7 and asked[-1] == 7


def test_a_source_that_has_nothing_is_left_alone_longer_each_time() -> None:
    """A draft past its last position must not keep lookups, or plain rounds, from being what they are."""
    made = policy(Source("model", False, CostCurve(((1, 0.1), (2, 0.2)))), Source("ngram", True), slope=0.05, floor=0.0)
    asked, lookups = [0], 0
    for round_ in range(300):
        plan = made.plan(8, offer(1, 1))
        if plan.source == "model":
            asked.append(round_)
            made.record_draft_cost("model", 0, 0.01)
        elif plan.source == "ngram":
            lookups += 1
            made.record("ngram", 1, round_ % 2, 1)
    assert 2 < len(asked) < 20 and asked[-1] - asked[-2] >= 30 and lookups > 270
