"""Cost curves, and the arithmetic of when drafting pays."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oxidize.runtime.costs import FREE, CostCurve, best_k, break_even, expected_tokens, round_ms, speedup

TARGET = CostCurve(((1, 10.0), (2, 12.0), (4, 16.0), (8, 40.0)))
TIMES = st.dictionaries(st.integers(1, 40), st.floats(0.01, 1e4, allow_subnormal=False), min_size=1)


def curves(most: float = 4.0) -> st.SearchStrategy[CostCurve]:
    """Pass costs that grow by up to `most` plain steps a row."""
    slopes = st.lists(st.floats(0.0, most, allow_subnormal=False), min_size=2, max_size=12)
    return slopes.map(lambda s: CostCurve(tuple((1 + i, 5.0 * (1 + sum(s[:i]))) for i in range(len(s)))))


@pytest.mark.parametrize(
    ("count", "expected"), [(0, 10), (1, 10), (2, 12), (3, 14), (4, 16), (6, 28), (8, 40), (9, 46), (18, 100)]
)
def test_between_and_past_the_points(count: int, expected: float) -> None:
    assert TARGET.at(count) == pytest.approx(expected)


def test_a_falling_end_stays_level() -> None:
    assert CostCurve(((1, 3.0), (2, 2.0))).at(9) == 2.0


def test_one_point_holds_everywhere() -> None:
    assert [CostCurve(((4, 7.0),)).at(count) for count in (1, 4, 30)] == [7.0] * 3


@pytest.mark.parametrize(
    "points",
    [(), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),), ((1, -1.0),), ((1, math.inf),), ((1, math.nan),)],
)
def test_bad_points_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="a cost curve needs"):
        CostCurve(points)


def test_a_disturbed_narrow_pass_is_corrected_by_the_wider_ones() -> None:
    assert CostCurve.rising({4: 16.0, 1: 54.0, 2: 12.0, 8: 40.0}).points == ((1, 12.0), (2, 12.0), (4, 16.0), (8, 40.0))


@given(TIMES)
def test_rising_never_falls_and_never_adds(measured: dict[int, float]) -> None:
    curve = CostCurve.rising(measured)
    times = [ms for _, ms in curve.points]
    assert [count for count, _ in curve.points] == sorted(measured)
    assert times == sorted(times)
    assert all(ms <= measured[count] for count, ms in curve.points)
    assert CostCurve.rising(dict(curve.points)) == curve


@given(st.integers(0, 12), st.floats(0.0, 0.99, allow_subnormal=False))
def test_expected_tokens_is_the_geometric_sum(k: int, acceptance: float) -> None:
    assert expected_tokens(k, acceptance) == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance))


def test_all_kept_yields_every_token() -> None:
    assert expected_tokens(5, 1.0) == 6


def test_a_plain_round_costs_no_draft() -> None:
    draft = CostCurve(((1, 3.0), (2, 5.0)))
    assert (round_ms(TARGET, draft, 0), round_ms(TARGET, draft, 1), round_ms(TARGET, draft, 3)) == (10.0, 15.0, 23.0)
    assert speedup(TARGET, draft, 0, 0.7) == 1.0


def test_break_even_of_one_free_token_is_what_its_row_adds() -> None:
    assert break_even(TARGET, FREE, 1) == pytest.approx(0.2)


@given(curves(), st.integers(1, 9), st.floats(0.0, 3.0, allow_subnormal=False))
def test_break_even_is_where_drafting_begins_to_pay(target: CostCurve, k: int, draft_ms: float) -> None:
    draft = CostCurve(((1, draft_ms), (2, 2 * draft_ms)))
    found = break_even(target, draft, k)
    if found is None:
        assert speedup(target, draft, k, 1.0) < 1.0
        return
    assert 0.0 <= found <= 1.0
    assert speedup(target, draft, k, min(found + 1e-6, 1.0)) >= 1.0 - 1e-9
    assert found < 1e-9 or speedup(target, draft, k, found - 1e-6) <= 1.0


def test_a_draft_as_dear_as_the_target_never_pays() -> None:
    assert break_even(TARGET, CostCurve(((1, 10.0), (2, 20.0))), 3) is None


def test_break_even_needs_a_draft() -> None:
    with pytest.raises(ValueError, match="k of at least 1"):
        break_even(TARGET, FREE, 0)


@given(curves(1.5), st.floats(0.0, 1.0, allow_subnormal=False), st.integers(0, 12))
def test_best_k_is_the_fastest(target: CostCurve, acceptance: float, most: int) -> None:
    best = best_k(target, FREE, acceptance, most)
    assert 0 <= best <= most
    assert all(speedup(target, FREE, best, acceptance) >= speedup(target, FREE, k, acceptance) for k in range(most + 1))


def test_nothing_kept_is_best_decoded_plainly() -> None:
    assert best_k(TARGET, FREE, 0.0, 8) == 0
