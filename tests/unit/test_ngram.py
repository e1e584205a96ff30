"""The n-gram drafter against a naive search, and what it promises about rewinding and repetition."""

import random
from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxidize.runtime.drafters.base import DraftContext, Drafter, Proposal
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.noise import NoiseKey
from oxidize.runtime.sampling import SamplingParams

CONTEXT = DraftContext(SamplingParams(), NoiseKey(0))


def naive(text: list[int], k: int, min_match: int) -> Proposal:
    """Compare the end of the text with every earlier end; the longest match wins, then the latest."""
    best, end = 0, -1
    for stop in range(1, len(text)):
        length = 0
        while length < stop and text[stop - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= best:
            best, end = length, stop
    if best < max(min_match, 1) or k < 1:
        return Proposal()
    return Proposal(tuple(islice(cycle(text[end:]), k)), match_length=best)


texts = st.integers(1, 6).flatmap(lambda size: st.lists(st.integers(0, size), max_size=60))


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(0, 9), st.integers(1, 4))
def test_equals_the_naive_search_after_every_token(text: list[int], k: int, min_match: int) -> None:
    drafter = NgramDrafter(min_match)
    for length in range(len(text) + 1):
        drafter.observe(text[:length])
        assert drafter.propose(text[:length], k, CONTEXT) == naive(text[:length], k, min_match)


@settings(max_examples=100, deadline=None)
@given(texts, st.lists(st.integers(1, 7), max_size=30))
def test_blocks_of_any_size_give_the_same_state(text: list[int], sizes: list[int]) -> None:
    in_blocks, at_once = NgramDrafter(1), NgramDrafter(1)
    length = 0
    for size in sizes:
        length = min(len(text), length + size)
        in_blocks.observe(text[:length])
    in_blocks.observe(text)
    assert in_blocks.propose(text, 5, CONTEXT) == at_once.propose(text, 5, CONTEXT)


@settings(max_examples=100, deadline=None)
@given(texts, texts, st.data())
def test_rewind_leaves_no_trace(text: list[int], other: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(text)))
    rewound, fresh = NgramDrafter(1), NgramDrafter(1)
    rewound.observe(text)
    rewound.rewind(length)
    for end in range(len(other) + 1):
        both = text[:length] + other[:end]
        assert rewound.propose(both, 4, CONTEXT) == fresh.propose(both, 4, CONTEXT)


def test_long_text_with_a_real_alphabet() -> None:
    """Copies, loops and noise mixed, some hundred tokens, checked at every tenth."""
    chance = random.Random(5)
    text: list[int] = []
    while len(text) < 700:
        start = chance.randrange(len(text)) if text else 0
        text += chance.choice([text[start : start + 30], [chance.randrange(200)] * 3, [chance.randrange(200)]])
    drafter = NgramDrafter(2)
    for length in range(1, len(text)):
        drafter.observe(text[:length])
        if length % 10 == 0:
            assert drafter.propose(text[:length], 6, CONTEXT) == naive(text[:length], 6, 2)


def test_the_longest_match_beats_a_later_shorter_one() -> None:
    text = [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 1, 2, 3, 4]
    assert NgramDrafter().propose(text, 2, CONTEXT) == Proposal((50, 9), match_length=4)


def test_the_latest_of_equal_matches_is_continued() -> None:
    text = [3, 4, 50, 8, 3, 4, 60, 9, 3, 4]
    assert NgramDrafter().propose(text, 1, CONTEXT) == Proposal((60,), match_length=2)


def test_a_recent_shorter_match_is_known_after_the_longer_one_moved_on() -> None:
    """An end that was seen as part of a longer match counts as an end of its suffixes too."""
    text = [7, 3, 4, 50, 8, 3, 4, 60, 7, 3, 4, 55, 2, 3, 4]
    assert NgramDrafter().propose(text, 1, CONTEXT).tokens == (55,)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_periodic_text_is_continued_beyond_its_own_end(period: int) -> None:
    text = list(islice(cycle(range(period)), 4 * period))
    proposal = NgramDrafter().propose(text, 3 * period + 1, CONTEXT)
    assert list(proposal.tokens) == list(islice(cycle(range(period)), 4 * period, 7 * period + 1))
    assert proposal.match_length == 3 * period


def test_a_long_run_stays_exact_in_length_and_cheap_in_links() -> None:
    text = [7] * 5000
    drafter = NgramDrafter()
    assert drafter.propose(text, 3, CONTEXT) == Proposal((7, 7, 7), match_length=4999)
    text += [8, 7, 7]
    assert drafter.propose(text, 1, CONTEXT).match_length == 2


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_nothing_repeats_nothing_proposed(text: list[int]) -> None:
    assert NgramDrafter(1).propose(text, 4, CONTEXT) == Proposal()


def test_min_match_and_k_are_limits() -> None:
    text = [1, 2, 3, 9, 1, 2]
    assert NgramDrafter(2).propose(text, 2, CONTEXT).tokens == (3, 9)
    assert NgramDrafter(3).propose(text, 2, CONTEXT) == Proposal()
    assert NgramDrafter(2).propose(text, 0, CONTEXT) == Proposal()
    with pytest.raises(ValueError, match="min_match must be at least 1, not 0"):
        NgramDrafter(0)


def test_rewind_outside_the_text_is_an_error_and_changes_nothing() -> None:
    drafter = NgramDrafter()
    drafter.observe([1, 2, 3, 1, 2])
    for length in (-1, 6):
        with pytest.raises(ValueError, match=f"cannot rewind to {length}: 5 tokens"):
            drafter.rewind(length)
    assert drafter.propose([1, 2, 3, 1, 2], 1, CONTEXT).tokens == (3,)


def test_reset_starts_a_new_text() -> None:
    drafter = NgramDrafter()
    drafter.observe([1, 2, 3, 1, 2])
    drafter.reset()
    assert drafter.propose([1, 2], 4, CONTEXT) == Proposal()


def test_proposals_are_certain_and_independent_of_the_rule() -> None:
    drafter: Drafter = NgramDrafter()
    text = [1, 2, 3, 1, 2]
    strict = DraftContext(SamplingParams(1.0), NoiseKey(9), 7, strict=True)
    assert drafter.propose(text, 3, strict) == drafter.propose(text, 3, CONTEXT)
    assert drafter.propose(text, 3, strict).laws is None
