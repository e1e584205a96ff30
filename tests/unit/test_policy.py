"""The policy on scripted costs and outcomes: k follows both, Fallback ends when the text turns predictable."""

import pytest

from oxidize.runtime.policy import AcceptanceEstimate, PassCost, Policy, PolicyConfig, State, prior_cost


def flat_cost(slope):
    """A cost model that has seen every width: T(M) = 1 + slope * (M - 1)."""
    cost = PassCost(slope, slope)
    for width in range(1, 20):
        for _ in range(2):
            cost.observe(width, 1 + slope * (width - 1))
    return cost


def policy(slope=0.1, max_k=8, free=True, **rest):
    made = Policy(PolicyConfig(max_k, rest.pop("min_rate", 0.3), **rest), flat_cost(slope), free)
    made.start()
    return made


def train(made, rounds, accepted, context=4):
    for _ in range(rounds):
        k = made.choose(8, context)
        made.record(k, min(accepted, k), context) if k else made.record_unused(accepted > 0, context)


def test_first_sample_of_a_width_is_discarded():
    cost = PassCost(0.2, 0.2)
    cost.observe(1, 50.0)
    assert cost.plain_ms is None
    cost.observe(1, 10.0)
    assert cost.plain_ms == 10.0


def test_unseen_widths_follow_the_prior_at_the_scale_seen():
    cost = PassCost(0.25, 0.30)
    assert cost.estimate(1) == 1.0
    for _ in range(2):
        cost.observe(1, 10.0)
    assert cost.estimate(2) == pytest.approx(12.5)
    assert cost.estimate(4) == pytest.approx(18.5)


def test_the_shape_is_learned_where_it_differs_from_the_prior():
    cost = PassCost(0.25, 0.30)
    for _ in range(100):
        cost.observe(1, 10.0)
        cost.observe(8, 15.0)
    assert cost.estimate(8) / cost.estimate(1) == pytest.approx(1.5, rel=0.1)


def test_a_busy_spell_slows_all_widths_alike():
    cost = flat_cost(0.3)
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


def test_a_width_that_looked_slow_is_tried_again():
    """Ten slow rounds with a draft that is always right must not end drafting."""
    made = policy(slope=0.3)
    ks = []
    for turn in range(200):
        k = made.choose(8, 20)
        slow = 4 if 20 <= turn < 30 else 1
        made.cost.observe(1 + k, slow * (1 + 0.3 * k))
        made.record(k, k, 20) if k else made.record_unused(True, 20)
        ks.append(k)
    assert min(ks[60:]) >= 6


def test_a_slow_outlier_moves_the_estimate_little():
    cost = PassCost(0.2, 0.2)
    for milliseconds in (10, 10, 10, 500):
        cost.observe(1, milliseconds)
    assert cost.estimate(1) < 15


def test_free_verification_drafts_everything_and_dear_verification_nothing():
    assert policy(slope=0.0).choose(8, 20) == 8
    assert policy(slope=2.0).choose(8, 20) == 0


def test_k_grows_with_acceptance():
    bad, good = policy(slope=0.3), policy(slope=0.3)
    train(bad, 40, accepted=0)
    train(good, 40, accepted=8)
    assert bad.choose(8, 4) == 0
    assert good.choose(8, 4) == 8


def test_room_and_cap_bound_the_proposal():
    made = policy(max_k=5)
    assert made.wanted(100) == 5
    assert made.wanted(3) == 3
    assert made.wanted(0) == 0


def test_low_acceptance_falls_back_and_predictable_text_returns():
    made = policy(slope=0.0)
    for _ in range(10):
        made.record(8, 0, 4)
    assert made.state is State.FALLBACK
    assert "under 0.30" in made.reason
    assert made.choose(8, 4) == 0
    for _ in range(64):
        made.record_unused(True, 4)
        if made.state is State.SPECULATING:
            break
    assert made.state is State.SPECULATING


def test_a_long_match_is_tried_in_fallback_and_ends_it():
    made = policy(slope=0.0)
    for _ in range(10):
        made.record(8, 0, 4)
    assert made.state is State.FALLBACK
    assert made.choose(8, 12) > 0
    made.record(8, 8, 12)
    assert made.state is State.SPECULATING


def test_costly_drafts_are_probed_at_growing_intervals():
    made = policy(free=False, min_rate=0.5)
    while made.state is State.SPECULATING:
        made.record(4, 0, 0)
    gaps, since = [], 0
    for _ in range(1000):
        since += 1
        k = made.wanted(100)
        if k:
            gaps.append(since)
            since = 0
            made.record(k, 0, 0)
    assert gaps == [16, 32, 64, 128, 256, 256]


def test_a_draft_that_costs_more_than_it_saves_falls_back_and_is_tried_again():
    made = policy(slope=0.05, free=False)
    assert made.wanted(8) > 0
    for _ in range(50):
        made.record_draft_cost(4, 40.0)
    assert made.wanted(8) == 0
    assert made.state is State.FALLBACK
    assert made.reason == "drafts cost more than they save"
    for _ in range(600):  # the draft is fast again, and right
        k = made.wanted(8)
        if k:
            made.record_draft_cost(k, 0.01 * k)
            made.record(k, k, 0)
    assert made.state is State.SPECULATING


def test_no_drafter_means_plain_decoding():
    made = policy(max_k=0)
    assert made.state is State.FALLBACK
    assert made.reason == "no drafter"


def test_estimate_follows_the_text():
    estimate = AcceptanceEstimate(lambda _: 0.5)
    for _ in range(200):
        estimate.observe(3, True)
    assert estimate.probability(3) > 0.95
    assert estimate.probability(30) == 0.5
    for _ in range(200):
        estimate.observe(3, False)
    assert estimate.probability(3) < 0.05


def test_int4_verification_is_dearer_than_float():
    assert prior_cost("int4").estimate(8) > 2 * prior_cost("fp32").estimate(8)
