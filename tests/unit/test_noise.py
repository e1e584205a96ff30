"""The noise is uniform, depends on every one of its arguments, and is the same for one id as for many."""

import numpy as np
import pytest
from scipy import stats

from oxidize.runtime.noise import Domain, NoiseKey, gumbel, uniform

IDS = np.arange(4096)
KEY = NoiseKey(7)
BASE = (KEY, Domain.TARGET, 5, IDS, 0)


def test_scalar_and_vector_agree_bit_for_bit() -> None:
    many = uniform(KEY, Domain.DRAFT, 17, IDS[:64], round_=3)
    assert [uniform(KEY, Domain.DRAFT, 17, int(i), round_=3) for i in IDS[:64]] == many.tolist()
    picked = uniform(KEY, Domain.DRAFT, 17, np.array([63, 0, 7]), round_=3)
    assert picked.tolist() == many[[63, 0, 7]].tolist()


def test_values_never_change() -> None:
    """A seed must give the same text in the next release too."""
    assert uniform(NoiseKey(0), Domain.TARGET, 0, 0) == 0.17320549405262053
    assert uniform(NoiseKey(1, 2), Domain.RESIDUAL, 3, 4, 5) == 0.5368129960513904


def test_stays_strictly_inside_the_unit_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    for extreme, expected in ((0, 2.0**-53), (2**64 - 1, 1 - 2.0**-53)):
        monkeypatch.setattr("oxidize.runtime.noise._finalise", lambda x, value=extreme: value)
        monkeypatch.setattr(
            "oxidize.runtime.noise._hash_many",
            lambda start, ids, value=extreme: np.full(len(ids), value, np.uint64),
        )
        assert uniform(KEY, Domain.TARGET, 0, 0) == expected
        assert uniform(KEY, Domain.TARGET, 0, IDS[:1])[0] == expected
        assert np.isfinite(gumbel(KEY, Domain.TARGET, 0, IDS[:1])).all()


@pytest.mark.parametrize("axis", ["id", "position", "seed", "choice", "round", "domain"])
def test_uniform_along_every_axis(axis: str) -> None:
    samples = _samples_along(axis)
    assert stats.kstest(samples, "uniform").pvalue > 1e-4
    serial = np.corrcoef(samples[:-1], samples[1:])[0, 1]
    assert abs(serial) * np.sqrt(len(samples)) < 4


def _samples_along(axis: str) -> np.ndarray:
    def at(i: int) -> np.ndarray:
        key = NoiseKey(i if axis == "seed" else 7, i if axis == "choice" else 0)
        domain = Domain(i % 4) if axis == "domain" else Domain.TARGET
        position = i if axis in ("position", "domain") else 5
        return uniform(key, domain, position, IDS[:4], i if axis == "round" else 0)

    if axis == "id":
        return uniform(KEY, Domain.TARGET, 5, np.arange(20_000))
    return np.array([at(i) for i in range(5000)])[:, 0]


@pytest.mark.parametrize(
    "other",
    [
        (NoiseKey(8), Domain.TARGET, 5, IDS, 0),
        (NoiseKey(7, 1), Domain.TARGET, 5, IDS, 0),
        (NoiseKey(-7), Domain.TARGET, 5, IDS, 0),
        (NoiseKey(7 + 2**63), Domain.TARGET, 5, IDS, 0),
        (KEY, Domain.DRAFT, 5, IDS, 0),
        (KEY, Domain.ACCEPT, 5, IDS, 0),
        (KEY, Domain.RESIDUAL, 5, IDS, 0),
        (KEY, Domain.TARGET, 6, IDS, 0),
        (KEY, Domain.TARGET, 5, IDS, 1),
        (KEY, Domain.TARGET, 5, IDS + 1, 0),
        (KEY, Domain.TARGET, 5, IDS + 2**32, 0),
    ],
)
def test_every_argument_gives_unrelated_noise(other: tuple) -> None:
    here, there = uniform(*BASE), uniform(*other)
    assert np.mean(here == there) == 0
    assert abs(np.corrcoef(here, there)[0, 1]) * np.sqrt(len(IDS)) < 4
    cells = np.histogram2d(here, there, bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(cells.ravel()).pvalue > 1e-4


def test_words_do_not_commute() -> None:
    swapped = [
        uniform(NoiseKey(1, 2), Domain.TARGET, 3, 4, 5),
        uniform(NoiseKey(2, 1), Domain.TARGET, 3, 4, 5),
    ]
    moved = [uniform(NoiseKey(1, 2), Domain.TARGET, 5, 4, 3), uniform(NoiseKey(1, 2), Domain.TARGET, 4, 3, 5)]
    assert len({*swapped, *moved}) == 4


def test_no_value_twice_in_a_long_text() -> None:
    rows = [uniform(KEY, domain, position, IDS) for domain in Domain for position in range(40)]
    flat = np.concatenate(rows)
    assert len(np.unique(flat)) == len(flat)


def test_every_bit_flips_half_of_the_others() -> None:
    """Avalanche: a bit of the id, the position or the seed changes each output bit with probability one half."""

    def bits(key: NoiseKey, position: int, ids: np.ndarray) -> np.ndarray:
        return (uniform(key, Domain.TARGET, position, ids) * 2.0**52).astype(np.uint64)

    base = bits(KEY, 5, IDS)
    for bit in range(16):
        for other in (
            bits(KEY, 5, IDS ^ (1 << bit)),
            bits(KEY, 5 ^ (1 << bit), IDS),
            bits(NoiseKey(7 ^ (1 << bit)), 5, IDS),
        ):
            flips = np.unpackbits((base ^ other).view(np.uint8)).mean() * 64 / 52
            assert abs(flips - 0.5) < 0.006


def test_gumbel_has_the_gumbel_law_and_scalar_form() -> None:
    noise = gumbel(KEY, Domain.TARGET, 1, np.arange(20_000))
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-4
    assert gumbel(KEY, Domain.TARGET, 1, 3) == pytest.approx(noise[3], rel=1e-12)
