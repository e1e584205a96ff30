"""What `verify` concludes from what it measured, and the pieces it measures with."""

import json

import numpy as np
import pytest
from fakes import FakeTarget
from hypothesis import given
from hypothesis import strategies as st

from oxidize.runtime.drafters.base import DraftContext
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.rounding import WIDTHS, Deviation, cut, describe, margin_shift, measure_rounding
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.trials import RandomDrafter, play_together, weigh
from oxidize.runtime.verify import Check, Parting, Report, VerifyPlan, noise_of


def parting(gap, noise=0.1):
    return Parting(prompt=2, drafter="ngram", k=3, position=7, plain=11, other=12, gap=gap, noise=noise)


def deviation(differing=0, margin=0.0):
    return Deviation((3,), rows=9, differing=differing, largest=margin, rms=margin / 2, margin=margin)


def report(default=(), exact=(), floored=None):
    floored = (deviation(),) if floored is None else floored
    checks = (Check("default greedy", False, 10, tuple(default)), Check("exact greedy", True, 20, tuple(exact)))
    return Report("cpu", "int4", 5, ("ngram", "random"), VerifyPlan(), (deviation(9, 0.1),), floored, checks)


@given(st.integers(0, 400), st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_cut_covers_the_text_and_leaves_no_single_row_behind(count, widths):
    passes = cut(count, widths)
    assert sum(passes) == count
    assert all(width > 0 for width in passes)
    if 1 not in widths and count > 1:
        assert 1 not in passes


def test_cut_takes_the_widths_in_turn():
    assert cut(12, (2, 3)) == [2, 3, 2, 3, 2]
    assert cut(11, (2, 3)) == [2, 3, 2, 4]
    assert cut(3, (1,)) == [1, 1, 1]
    assert cut(5, (9,)) == [5]


def test_widths_are_described():
    assert [describe(widths) for widths in ((1,), (3,), (2, 9))] == ["1 row", "3 rows", "2, 9 rows"]


def test_margin_shift_is_about_likely_tokens_only():
    before = np.arange(100, dtype=np.float32)
    after = before.copy()
    after[3] += 50
    assert margin_shift(before, after) == 0
    assert margin_shift(before, after, 3) == 50
    after[99] -= 1
    after[95] += 2
    assert margin_shift(before, after) == 3
    assert margin_shift(before, before + 7) == 0


def test_rounding_of_a_target_without_any():
    target = FakeTarget(context=140)
    found = measure_rounding(target, [1, 2, 3], lambda text: None)
    assert [each.widths for each in found] == [*WIDTHS, (132,)]
    assert all((each.differing, each.largest, each.rms, each.margin) == (0, 0, 0, 0) for each in found)
    assert found[0].rows == 132


def test_rounding_of_a_target_whose_bits_depend_on_the_width():
    """One-row passes have token 4 raised by 0.25, passes of 129 rows lowered by 0.5."""

    class Rounding(FakeTarget):
        def forward(self, requests):
            rows = super().forward(requests)
            rows[0][:, 4] += {1: 0.25, 129: -0.5}.get(len(requests[0].tokens), 0)
            return rows

    by_widths = {each.widths: each for each in measure_rounding(Rounding(), [5, 6], lambda text: None)}
    assert by_widths[1,].differing == 132
    assert by_widths[1,].largest == pytest.approx(0.25, abs=1e-6)
    assert by_widths[1,].rms == pytest.approx(0.25 / 13**0.5, rel=1e-3)
    assert by_widths[1,].margin == pytest.approx(0.25, abs=1e-6)
    assert by_widths[129,].differing == 8
    assert not any(each.differing for widths, each in by_widths.items() if widths not in ((1,), (129,)))
    assert noise_of(list(by_widths.values())) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(("gap", "explained"), [(0.0, True), (0.2, True), (-0.2, True), (0.21, False)])
def test_a_gap_of_twice_the_noise_is_explained(gap, explained):
    assert parting(gap).explained is explained


def test_default_mode_may_part_at_near_ties():
    found = report(default=[parting(0.05), parting(0.15)])
    assert found.passed
    assert found.verdict() == [
        "exact mode: bitwise equal, 0 of 20 texts parted",
        "default mode: 2 of 10 texts parted at near ties, largest gap 0.15, noise 0.1",
    ]


def test_a_gap_beyond_the_noise_fails():
    found = report(default=[parting(0.05), parting(1.5)])
    assert not found.passed
    assert "1 GAPS EXCEED TWICE THE NOISE" in found.verdict()[1]


def test_exact_mode_may_not_part_at_all():
    found = report(exact=[parting(0.0)])
    assert not found.passed
    assert found.verdict()[0] == "exact mode: NOT bitwise equal, 1 of 20 texts parted"


def test_logits_that_differ_under_the_floor_fail():
    found = report(floored=(deviation(), deviation(1, 1e-9)))
    assert not found.floor_holds
    assert not found.passed
    assert "NOT bitwise equal" in found.verdict()[0]


def test_without_exact_mode_nothing_is_claimed():
    found = Report("cpu", "int4", 1, (), VerifyPlan(), (deviation(),), (), (Check("default greedy", False, 1, ()),))
    assert found.passed
    assert found.verdict()[0] == "exact mode: not to be had here"


def test_report_becomes_json():
    found = json.loads(json.dumps(report(default=[parting(0.05)]).as_dict()))
    assert found["passed"] is True
    assert found["largest_margin"] == 0.1
    assert found["plan"] == {"tokens": 64, "ks": [1, 3, 8], "every_k": False}
    assert found["checks"][0]["partings"][0]["gap"] == 0.05
    assert [check["broken"] for check in found["checks"]] == [0, 0]


def test_draft_lengths_take_turns():
    plan = VerifyPlan()
    assert [plan.ks_of(index) for index in range(4)] == [(1,), (3,), (8,), (1,)]
    assert VerifyPlan(every_k=True).ks_of(5) == (1, 3, 8)


def test_random_drafts_are_a_function_of_seed_and_position():
    context = DraftContext(SamplingParams(), key=None)
    tokens = RandomDrafter(1000).propose([1, 2, 3], 5, context).tokens
    assert tokens == RandomDrafter(1000).propose([7, 8, 9], 5, context).tokens
    assert tokens != RandomDrafter(1000).propose([1, 2], 5, context).tokens
    assert tokens != RandomDrafter(1000, seed=1).propose([1, 2, 3], 5, context).tokens
    assert len(tokens) == 5 and all(0 <= token < 1000 for token in tokens)


def test_texts_played_together_are_those_played_alone():
    prompts, lengths = [[1, 2, 1, 2], [3], [4, 5, 6, 7, 8]], [20, 3, 11]
    drafters = [NgramDrafter(1), RandomDrafter(13), None]
    together = play_together(FakeTarget(slots=3), prompts, drafters, 4, lengths)
    alone = [play_together(FakeTarget(), [p], [None], 0, [n])[0] for p, n in zip(prompts, lengths, strict=True)]
    assert together == alone
    assert [len(text) for text in together] == lengths


def test_weigh_reads_the_gap_off_plain_decoding():
    class Rounding(FakeTarget):
        def forward(self, requests):
            rows = super().forward(requests)
            rows[0][:, 2] += 0.125 if len(requests[0].tokens) > 1 else 0
            return rows

    target = Rounding()
    logits = target.rule([1, 2, 3, 9, 4], 13)
    gap, noise = weigh(target, [1, 2, 3], [9, 4], 2, 7)
    assert gap == pytest.approx(float(logits[2] - logits[7]), abs=1e-6)
    assert noise == pytest.approx(0.125, abs=1e-6)
