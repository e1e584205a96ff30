"""Both acceptance rules leave the target's law untouched: whole texts against the exact law of their tokens.

The models are tables: logits depend on the position and on the last token, so every row of a round has a law
of its own, and a row read for the wrong prefix shows.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, product

import numpy as np
import pytest
from scipy import stats

from oxidize.runtime.acceptance import Acceptance, accept_match, accept_reject
from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.noise import NoiseKey
from oxidize.runtime.sampling import Law, SamplingParams, law_of

VOCABULARY = 4
PROMPT = [2]
PLAIN = SamplingParams(1.0)
GREEDY = SamplingParams()
RULES = {"match": accept_match, "reject": accept_reject}
Propose = Callable[[list[int], int, DraftContext], Proposal]


@dataclass
class Table:
    """A model whose logits are table[position modulo its length, last token], float32 [3, V, V]."""

    params: SamplingParams
    table: np.ndarray
    laws: dict[tuple[int, int], Law] = field(default_factory=dict)

    def law(self, text: Sequence[int]) -> Law:
        place = (len(text) % len(self.table), text[-1])
        if place not in self.laws:
            self.laws[place] = law_of(self.table[place], self.params)
        return self.laws[place]


def model(seed: int, params: SamplingParams) -> Table:
    logits = np.random.default_rng(seed).normal(0, 1.2, (3, VOCABULARY, VOCABULARY))
    return Table(params, logits.astype(np.float32))


def sampled(draft: Table) -> Propose:
    def propose(text: list[int], k: int, context: DraftContext) -> Proposal:
        text, laws = list(text), []
        for _ in range(k):
            laws.append(draft.law(text))
            text.append(context.draw(laws[-1], len(text)))
        return Proposal(tuple(text[len(text) - k :]), tuple(laws))

    return propose


def equal(target: Table) -> Propose:
    return sampled(target)


def near(target: Table) -> Propose:
    noise = np.random.default_rng(99).normal(0, 0.6, target.table.shape).astype(np.float32)
    return sampled(Table(target.params, target.table + noise))


def uncut(target: Table) -> Propose:
    """The draft ignores the target's cuts and temperature."""
    return sampled(Table(SamplingParams(1.3), target.table))


def opposite(target: Table) -> Propose:
    return sampled(Table(target.params, -target.table))


def outside(target: Table) -> Propose:
    """The draft never proposes the target's likeliest token, and the rest with certainty."""
    logits = np.where(target.table == target.table.max(axis=2, keepdims=True), -np.inf, target.table)
    return sampled(Table(SamplingParams(0.1), logits.astype(np.float32)))


def successor(text: list[int], k: int) -> tuple[int, ...]:
    return tuple((text[-1] + 1 + i) % VOCABULARY for i in range(k))


def certain(target: Table) -> Propose:
    return lambda text, k, context: Proposal(successor(text, k))


def certain_with_laws(target: Table) -> Propose:
    def propose(text: list[int], k: int, context: DraftContext) -> Proposal:
        return Proposal(successor(text, k), tuple(map(Law.one_hot, successor(text, k))))

    return propose


def mixed(target: Table) -> Propose:
    """Lookup after some tokens, a draft model after the others."""
    lookup, draft = certain(target), near(target)
    return lambda text, k, context: (lookup if text[-1] == 1 else draft)(text, k, context)


def steered(target: Table) -> Propose:
    """The length of a round depends on what was drafted for its position before, and lost.

    The draft's law is flat, so that the same noise would give the same token again.
    """
    draft, lost = sampled(Table(PLAIN, np.zeros_like(target.table))), dict[int, int]()

    def propose(text: list[int], k: int, context: DraftContext) -> Proposal:
        if text == PROMPT:
            lost.clear()
        proposal = draft(text, 0 if lost.get(len(text)) == 0 else k, context)
        lost.update(enumerate(proposal.tokens, start=len(text)))
        return proposal

    return propose


def nothing(target: Table) -> Propose:
    return lambda text, k, context: Proposal()


DRAFTS = [equal, near, uncut, opposite, outside, certain, certain_with_laws, mixed, steered, nothing]


def play(target: Table, propose: Propose, rule: str, k: int, key: NoiseKey) -> Iterator[tuple[list[int], Acceptance]]:
    """Play the rounds of one text; yields the text so far and the outcome, and checks the rule's manners."""
    text = list(PROMPT)
    for round_ in count():
        proposal = propose(text, k, DraftContext(target.params, key, round_, strict=rule == "match"))
        rows = _Rows(target, text, proposal)
        outcome = RULES[rule](proposal, rows.law, key, len(text))
        assert rows.asked == list(range(outcome.accepted + 1)), "each needed row once, in order, and no other"
        assert outcome.kind == ("bonus" if outcome.accepted == len(proposal.tokens) else "correction")
        text = [*text, *proposal.tokens[: outcome.accepted], outcome.token]
        yield text, outcome


class _Rows:
    def __init__(self, target: Table, text: list[int], proposal: Proposal) -> None:
        self.target, self.text, self.proposal = target, text, proposal
        self.asked: list[int] = []

    def law(self, row: int) -> Law:
        self.asked.append(row)
        return self.target.law([*self.text, *self.proposal.tokens[:row]])


def write(target: Table, propose: Propose, rule: str, k: int, key: NoiseKey, length: int) -> tuple[int, ...]:
    """Return the first `length` tokens after the prompt."""
    for text, _ in play(target, propose, rule, k, key):
        if len(text) >= len(PROMPT) + length:
            return tuple(text[len(PROMPT) :][:length])
    raise AssertionError


def exact_law(target: Table, length: int) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {}
    for tokens in product(range(VOCABULARY), repeat=length):
        text = [*PROMPT, *tokens]
        law[tokens] = float(np.prod([target.law(text[:i]).prob(text[i]) for i in range(len(PROMPT), len(text))]))
    return law


def assert_law(samples: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Chi-square over all texts of one length; texts expected less than five times share a cell."""
    counts = Counter(samples)
    assert all(law[text] > 0 for text in counts), "a text the target cannot write"
    common = [text for text, p in law.items() if p * len(samples) >= 5]
    observed = [counts[text] for text in common]
    expected = [law[text] * len(samples) for text in common]
    rest = len(samples) - sum(expected)
    if rest > 1:
        observed.append(len(samples) - sum(observed))
        expected.append(rest)
    assert stats.chisquare(observed, np.array(expected) / sum(expected) * sum(observed)).pvalue > 1e-4


def check_law(make: Callable[[Table], Propose], rule: str, params: SamplingParams, k: int, samples: int) -> None:
    target = model(k, params)
    propose = make(target)
    texts = [write(target, propose, rule, k, NoiseKey(seed, k), length=3) for seed in range(samples)]
    assert_law(texts, exact_law(target, 3))


@pytest.mark.parametrize(
    ("make", "rule", "params", "k", "samples"),
    [
        (near, "reject", SamplingParams(0.7), 3, 20_000),
        (uncut, "reject", SamplingParams(1.5, top_p=0.8), 2, 10_000),
        (near, "match", SamplingParams(1.0, top_k=3), 2, 20_000),
        (steered, "reject", SamplingParams(1.0), 2, 10_000),
    ],
)
def test_law_of_three_tokens(make: Callable, rule: str, params: SamplingParams, k: int, samples: int) -> None:
    check_law(make, rule, params, k, samples)


CUTS = [SamplingParams(0.7), SamplingParams(1.0, top_k=2), SamplingParams(1.5, top_p=0.7)]


@pytest.mark.parametrize("make", DRAFTS)
@pytest.mark.parametrize("rule", RULES)
def test_law_with_every_draft(make: Callable, rule: str) -> None:
    index = DRAFTS.index(make)
    check_law(make, rule, CUTS[index % 3], k=1 + index % 4, samples=1000)


@pytest.mark.parametrize("params", [GREEDY, *CUTS])
def test_same_seed_same_text_under_match_with_any_draft(params: SamplingParams) -> None:
    target = model(5, params)
    for seed in range(20):
        plain = write(target, nothing(target), "match", 0, NoiseKey(seed), 12)
        for make, k in product(DRAFTS, (1, 3, 8)):
            assert write(target, make(target), "match", k, NoiseKey(seed), 12) == plain, (make, k)


def test_certain_proposals_write_the_same_text_under_both_rules() -> None:
    target = model(5, PLAIN)
    for seed in range(50):
        plain = write(target, nothing(target), "reject", 0, NoiseKey(seed), 12)
        assert write(target, certain(target), "reject", 4, NoiseKey(seed), 12) == plain


@pytest.mark.parametrize("with_laws", [True, False])
def test_rules_agree_on_every_proposal_at_temperature_zero(with_laws: bool) -> None:
    target, draft = model(6, GREEDY), Table(PLAIN, model(6, PLAIN).table)
    seen = Counter[int]()
    for tokens in product(range(VOCABULARY), repeat=3):
        laws = tuple(draft.law([*PROMPT, *tokens][: i + 1]) for i in range(3))
        proposal = Proposal(tokens, laws if with_laws else None)
        rows = [target.law([*PROMPT, *tokens][: i + 1]) for i in range(4)]
        match, reject = (rule(proposal, rows.__getitem__, NoiseKey(1), 1) for rule in RULES.values())
        assert match == reject
        seen[match.accepted] += 1
    assert seen == {0: 48, 1: 12, 2: 3, 3: 1}


def test_a_sampling_draft_against_a_greedy_target() -> None:
    """The draft is not greedy, the target is: the text must be."""
    target = model(6, GREEDY)
    draft = sampled(Table(PLAIN, target.table))
    plain = write(target, nothing(target), "match", 0, NoiseKey(0), 12)
    for seed in range(50):
        assert write(target, draft, "reject", 3, NoiseKey(seed), 12) == plain


@pytest.mark.parametrize("params", [GREEDY, *CUTS])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_equal_to_the_target_is_always_accepted(rule: str, params: SamplingParams) -> None:
    target = model(7, params)
    for seed in range(50):
        for _, (_, outcome) in zip(range(6), play(target, equal(target), rule, 4, NoiseKey(seed)), strict=False):
            assert (outcome.accepted, outcome.kind) == (4, "bonus")


def acceptance_rate(make: Callable[[Table], Propose], rule: str, samples: int = 3000) -> tuple[float, float]:
    """Return the measured rate for one drafted token and its standard error."""
    target = model(8, PLAIN)
    propose = make(target)
    outcomes = [next(play(target, propose, rule, 1, NoiseKey(seed)))[1] for seed in range(samples)]
    rate = sum(outcome.accepted for outcome in outcomes) / samples
    return rate, (rate * (1 - rate) / samples) ** 0.5


def test_reject_accepts_as_often_as_any_rule_can() -> None:
    """The overlap sum min(p, q) is the most that is possible."""
    target = model(8, PLAIN)
    p, q = target.law(PROMPT), Table(PLAIN, -target.table).law(PROMPT)
    best = sum(min(p.prob(i), q.prob(i)) for i in range(VOCABULARY))
    rate, error = acceptance_rate(opposite, "reject")
    assert abs(rate - best) < 4 * error


@pytest.mark.parametrize("make", [certain, certain_with_laws])
@pytest.mark.parametrize("rule", RULES)
def test_a_certain_token_is_accepted_with_its_probability(make: Callable, rule: str) -> None:
    rate, error = acceptance_rate(make, rule)
    assert abs(rate - model(8, PLAIN).law(PROMPT).prob(successor(PROMPT, 1)[0])) < 4 * error


def test_shared_noise_makes_a_draft_agree_more_often_than_chance() -> None:
    draft = near(model(8, PLAIN))

    def deaf(text: list[int], k: int, context: DraftContext) -> Proposal:
        blind = DraftContext(context.params, context.key, context.round_, strict=False)
        return draft(text, k, blind)

    shared, error = acceptance_rate(near, "match")
    chance, _ = acceptance_rate(lambda _: deaf, "match")
    assert shared > chance + 10 * error


def decide(p: Law, q: Law, drafted: int, seed: int = 0) -> Acceptance:
    return accept_reject(Proposal((drafted,), (q,)), lambda row: p, NoiseKey(seed), 3)


def test_token_of_draft_probability_zero_is_kept_if_the_target_allows_it() -> None:
    p, q = Law(np.array([1, 2]), np.array([0.5, 0.5])), Law.one_hot(7)
    assert decide(p, q, drafted=1).accepted == 1
    assert decide(p, q, drafted=9).accepted == 0


def test_residual_is_empty_only_by_rounding_and_then_the_target_decides() -> None:
    """The laws are equal but the drafted token is outside both, so a rejection leaves no residual."""
    law = Law(np.array([1, 2]), np.array([0.25, 0.75]))
    tokens = Counter(decide(law, law, drafted=9, seed=seed).token for seed in range(4000))
    assert stats.binomtest(tokens[1], 4000, 0.25).pvalue > 1e-4 and tokens.keys() == {1, 2}


@pytest.mark.parametrize("dense_target", [True, False])
@pytest.mark.parametrize("dense_draft", [True, False])
def test_residual_of_sparse_and_dense_laws_of_different_length(dense_target: bool, dense_draft: bool) -> None:
    """p - q is 0.3 at 5 and 0.1 at 2; the target knows more ids than the draft's vocabulary has."""
    p = Law(np.array([0, 2, 5]), np.array([0.5, 0.2, 0.3]))
    q = Law(np.array([0, 2]), np.array([0.9, 0.1]))
    p = Law(None, np.array([0.5, 0, 0.2, 0, 0, 0.3])) if dense_target else p
    q = Law(None, np.array([0.9, 0, 0.1])) if dense_draft else q
    rejected = [outcome.token for seed in range(4000) if (outcome := decide(p, q, 0, seed)).kind == "correction"]
    counts = Counter(rejected)
    assert counts.keys() == {2, 5}
    assert stats.binomtest(counts[5], len(rejected), 0.75).pvalue > 1e-4


def test_laws_must_match_the_tokens() -> None:
    with pytest.raises(ValueError, match="zip"):
        accept_reject(Proposal((1, 1), (Law.one_hot(1),)), lambda row: Law.one_hot(1), NoiseKey(0), 0)
