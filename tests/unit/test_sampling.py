"""`law_of` against the definition written out naively, and draws against the law."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from oxidize.runtime.errors import OxidizeError, UsageError
from oxidize.runtime.noise import Domain, NoiseKey, gumbel
from oxidize.runtime.sampling import Law, SamplingParams, law_of

PARAMS = [
    SamplingParams(temperature, top_k, top_p, min_p)
    for temperature in (0.7, 1.0, 1.5, 8.0)
    for top_k, top_p, min_p in (
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (5, 1.0, 0.0),
        (50, 1.0, 0.0),
        (700, 0.9, 0.0),
        (0, 0.95, 0.0),
        (0, 0.5, 0.0),
        (0, 0.9999, 0.0),
        (0, 1e-9, 0.0),
        (0, 1.0, 0.02),
        (0, 1.0, 1.0),
        (0, 0.9, 0.01),
        (20, 0.8, 0.05),
        (10**6, 1.0, 0.0),
    )
]


def naive_law(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """The definition, with one full sort in float64."""
    row = logits.astype(np.float64)
    order = np.lexsort((np.arange(len(row)), -row)).tolist()
    weights = np.exp((row[order] - row.max()) / params.temperature)
    if params.top_k:
        order, weights = order[: params.top_k], weights[: params.top_k]
    if params.top_p < 1:
        reached = np.cumsum(weights) >= params.top_p * weights.sum()
        count = int(np.argmax(reached)) + 1 if reached.any() else len(order)
        order, weights = order[:count], weights[:count]
    kept = [(i, w) for i, w in zip(order, weights, strict=True) if w >= params.min_p and w > 0]
    total = sum(w for _, w in kept)
    return {i: w / total for i, w in kept}


def as_dict(law: Law) -> dict[int, float]:
    ids = range(len(law.probs)) if law.ids is None else law.ids.tolist()
    return {i: p for i, p in zip(ids, law.probs.tolist(), strict=True) if p > 0}


def assert_same(logits: np.ndarray, params: SamplingParams) -> None:
    law, expected = law_of(logits, params), naive_law(logits, params)
    got = as_dict(law)
    assert got.keys() == expected.keys(), (params, len(got), len(expected))
    np.testing.assert_allclose([got[i] for i in expected], list(expected.values()), rtol=1e-9)
    assert abs(law.probs.sum() - 1) < 1e-12
    assert law.probs.dtype == np.float64
    if law.ids is not None:
        assert (np.diff(law.ids) > 0).all() and law.ids.dtype == np.int64


def _rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 3, 3001)
    masked = normal.copy()
    masked[rng.permutation(3001)[:2900]] = -np.inf
    one_left = np.full(3001, -np.inf)
    one_left[77] = -5.0
    rows = {
        "normal": normal,
        "peaked": np.where(rng.random(3001) < 0.01, normal + 9, normal),
        "heavy tail": -np.log1p(np.arange(3001.0))[::-1],
        "flat": np.zeros(3001),
        "nearly flat": rng.normal(0, 1e-4, 3001),
        "ties": np.round(normal),
        "ties in halves": np.tile([2.0, -1.0], 1500),
        "one spike": np.where(np.arange(3001) == 1234, 80.0, normal),
        "spike on the floor": np.where(np.arange(3001) == 3000, 1e4, -1e4),
        "masked": masked,
        "one left": one_left,
        "two left": np.where(np.arange(3001) % 2999 == 1, 0.5, -np.inf),
        "signed zeros": np.where(np.arange(3001) % 2 == 0, 0.0, -0.0),
        "huge": normal * 1e30,
        "widest float32": np.where(np.arange(3001) == 5, 3.4e38, -3.4e38),
        "far tail": np.where(np.arange(3001) < 3, normal, -90.0),
        "tiny vocabulary": np.array([0.3, 0.1, 0.9]),
        "one token": np.array([-4.0]),
        "256": normal[:256],
        "257": normal[:257],
        "8192": rng.normal(0, 2, 8192),
        "9000": rng.normal(0, 2, 9000),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


ROWS = _rows()


@pytest.mark.parametrize("name", ROWS)
def test_equals_the_definition(name: str) -> None:
    for params in PARAMS if len(ROWS[name]) < 4000 else PARAMS[::3]:
        assert_same(ROWS[name], params)


def test_equals_the_definition_on_many_random_rows() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        size = int(rng.integers(2, 2500))
        row = (rng.normal(0, rng.choice([0.01, 1, 3, 10]), size) - rng.choice([0, 50])).astype(np.float32)
        row[rng.random(size) < rng.choice([0, 0.5, 0.9])] = -np.inf
        row[rng.integers(size)] = rng.normal()
        params = SamplingParams(
            float(rng.uniform(0.05, 3)),
            int(rng.choice([0, 0, rng.integers(1, 300)])),
            float(rng.choice([1.0, rng.uniform(0.01, 0.9999)])),
            float(rng.choice([0.0, 0.0, rng.uniform(0, 0.3)])),
        )
        assert_same(row, params)


def test_nucleus_cut_is_exact_where_float32_cannot_decide() -> None:
    """The tail weighs just under or over what float32 rounding could hide."""
    tail = np.random.default_rng(2).uniform(-12, -10.5, 50_000).astype(np.float32)
    row = np.concatenate([np.array([0.0, -1.0, -2.0], np.float32), tail])
    weights = np.exp(row.astype(np.float64))
    running, total = weights[:3].cumsum(), weights.sum()
    for index in range(3):
        at = running[index] / total
        assert len(law_of(row, SamplingParams(1.0, top_p=at * (1 - 1e-11))).probs) == index + 1
        assert len(law_of(row, SamplingParams(1.0, top_p=at * (1 + 1e-11))).probs) == index + 2


def test_nucleus_takes_boundary_ties_by_id() -> None:
    row = np.zeros(1000, np.float32)
    law = law_of(row, SamplingParams(1.0, top_p=0.5))
    assert law.ids is not None and law.ids.tolist() == list(range(500))
    law = law_of(row, SamplingParams(1.0, top_k=3))
    assert law.ids is not None and law.ids.tolist() == [0, 1, 2]


def test_law_does_not_depend_on_memory_layout_and_leaves_logits_alone() -> None:
    row = ROWS["normal"]
    strided = np.repeat(row, 2)[::2]
    before = row.copy()
    row.setflags(write=False)
    for params in PARAMS:
        one, other = law_of(row, params), law_of(strided, params)
        assert np.array_equal(one.probs, other.probs)
        assert (one.ids is None and other.ids is None) or np.array_equal(one.ids, other.ids)
    assert np.array_equal(row, before)


def test_greedy_is_one_hot_at_the_lowest_best_id() -> None:
    law = law_of(np.array([1.0, 7.0, 7.0, -np.inf], np.float32), SamplingParams())
    assert as_dict(law) == {1: 1.0}
    assert law.draw(NoiseKey(0), Domain.TARGET, 0) == 1


def test_lowest_temperature_is_greedy_unless_tied() -> None:
    params = SamplingParams(1e-6)
    assert as_dict(law_of(np.array([1.0, 7.0, 6.999], np.float32), params)) == {1: 1.0}
    assert as_dict(law_of(np.array([7.0, 7.0, -np.inf], np.float32), params)) == {0: 0.5, 1: 0.5}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, 2, 0.9)])
def test_logits_that_are_not_finite_are_an_error(bad: float, params: SamplingParams) -> None:
    for place in range(3):
        row = np.array([1.0, -np.inf, 2.0], np.float32)
        row[place] = bad
        with pytest.raises(OxidizeError, match=r"1 (NaN|\+inf)"):
            law_of(row, params)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7, 0, 0.9)])
def test_a_row_that_allows_nothing_is_an_error(params: SamplingParams) -> None:
    with pytest.raises(OxidizeError, match="all 3 logits are -inf"):
        law_of(np.full(3, -np.inf, np.float32), params)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (-0.1, 1e-9, float("nan"), float("inf"))),
        ("top_k", (-1,)),
        ("top_p", (0.0, 1.01, float("nan"))),
        ("min_p", (-0.01, 1.5, float("nan"))),
        ("seed", (2**64, -(2**63) - 1)),
    ],
)
def test_bad_params_name_the_field_and_the_value(field: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"^{field} .*not {value}".replace("+", r"\+")):
            SamplingParams(**{field: value})  # type: ignore[arg-type]


LAWS = {
    "sparse": Law(np.array([3, 8, 20]), np.array([0.2, 0.5, 0.3])),
    "dense": Law(None, np.array([0.0, 0.2, 0.0, 0.5, 0.3])),
    "one hot": Law.one_hot(4),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=list(LAWS))
def test_prob_of_one_and_of_many(law: Law) -> None:
    expected = as_dict(law)
    ids = np.arange(30)
    assert law.probs_of(ids).tolist() == [law.prob(int(i)) for i in ids] == [expected.get(int(i), 0.0) for i in ids]
    assert law.prob(-1) == 0.0


DRAW_LAWS: dict[str, Callable[[], Law]] = {
    "sparse": lambda: LAWS["sparse"],
    "dense": lambda: LAWS["dense"],
    "skewed": lambda: law_of(np.linspace(0, -6, 12).astype(np.float32), SamplingParams(0.7)),
    "cut": lambda: law_of(np.linspace(3, -3, 40).astype(np.float32), SamplingParams(1.5, 0, 0.9)),
}


@pytest.mark.parametrize("name", DRAW_LAWS)
def test_draw_has_the_law(name: str) -> None:
    law = DRAW_LAWS[name]()
    expected = as_dict(law)
    draws = [law.draw(NoiseKey(seed), Domain.TARGET, 9) for seed in range(10_000)]
    ids, counts = np.unique(draws, return_counts=True)
    assert set(ids.tolist()) <= expected.keys()
    observed = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    result = stats.chisquare([observed.get(i, 0) for i in expected], [p * len(draws) for p in expected.values()])
    assert result.pvalue > 1e-4


@pytest.mark.parametrize("size", [2, 50, 5000, 30_000])
def test_draw_is_argmax_of_log_p_plus_gumbel(size: int) -> None:
    rng = np.random.default_rng(size)
    for trial in range(60):
        probs = rng.exponential(size=size) ** rng.choice([1, 5])
        probs[rng.random(size) < 0.3] = 0.0
        probs[-1] += 1e-3
        probs /= probs.sum()
        noise = gumbel(NoiseKey(3), Domain.DRAFT, trial, np.arange(size), 2)
        with np.errstate(divide="ignore"):
            expected = int(np.argmax(np.log(probs) + noise))
        assert Law(None, probs).draw(NoiseKey(3), Domain.DRAFT, trial, 2) == expected
        ids = np.flatnonzero(probs)
        assert Law(ids, probs[ids]).draw(NoiseKey(3), Domain.DRAFT, trial, 2) == expected


def test_draw_survives_chunks_without_mass() -> None:
    probs = np.zeros(20_000)
    probs[19_999] = 1.0
    assert Law(None, probs).draw(NoiseKey(0), Domain.TARGET, 0) == 19_999
