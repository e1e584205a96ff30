"""Drafters that read the target's rows, against the same drafts recomputed from the whole text each round."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_drafts import HIDDEN, TAPPED, Naive, Toy, ToyTarget, open_toy

from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.drafters.heads import OwnHead
from oxidize.runtime.drafters.neural import row_picker
from oxidize.runtime.drafters.passes import MaskRule
from oxidize.runtime.drafters.pending import PendingRows
from oxidize.runtime.drafters.reader import CHUNK
from oxidize.runtime.errors import BundleError
from oxidize.runtime.laws import Laws
from oxidize.runtime.noise import Domain, NoiseKey
from oxidize.runtime.processors import Controls, Processors
from oxidize.runtime.rows import FEW, PassRows
from oxidize.runtime.sampling import Law, SamplingParams, law_of

VOCABULARY = 29
WARM = SamplingParams(temperature=1.0)
SOME_IDS = (0, 2, 3, 7, 11, 12, 13, 20, 28)
TOYS = {
    "dflash": Toy("dflash", rule=MaskRule(False, False, 6)),
    "dflash_causal_window": Toy("dflash", block=7, rule=MaskRule(False, True, 5)),
    "dflash_causal": Toy("dflash", rule=MaskRule(True, True, 3)),
    "dflash_from_anchor": Toy("dflash", from_anchor=True, rule=MaskRule(False, False, 6)),
    "dflash_own_ends": Toy("dflash", rule=MaskRule(False, False, 6), ids=SOME_IDS, own_embedding=True),
    "eagle3": Toy("eagle3", rule=MaskRule(window=6)),
    "eagle3_own_head": Toy("eagle3", rule=MaskRule(window=6), ids=SOME_IDS[::-1], own_embedding=True),
    "mtp": Toy("mtp", rule=MaskRule(window=4)),
}


class Text:
    """A text that grows by rounds, as the loop would make it grow, with acceptance as the test says."""

    def __init__(self, toy: Toy, folder: Path) -> None:
        self.target = ToyTarget(VOCABULARY)
        self.naive = Naive(toy, self.target)
        self.drafter = open_toy(toy, self.target, folder)
        self.committed: list[int] = []
        self.round_ = 0

    def start(self, prompt: Sequence[int], chunk: int = CHUNK) -> None:
        """What the decoder and prefill do: rewind, observe, show the chunks, and the first round's plain pass."""
        same = next((i for i, (a, b) in enumerate(zip(prompt, self.committed, strict=False)) if a != b), None)
        same = min(len(prompt), len(self.committed)) if same is None else same
        self.drafter.rewind(min(same, len(prompt) - 1))
        self.committed = list(prompt)
        self.drafter.observe(self.committed)
        start = min(self.drafter.known, len(prompt) - 1)
        while len(prompt) - start > chunk:
            rows = self.target.rows_of(prompt[: start + chunk], start)
            self.drafter.watch(start, rows)
            start += chunk
        self.verify(start, (), 0)

    def verify(self, start: int, drafted: Sequence[int], accepted: int) -> None:
        """A pass of the target over tail and draft, and what is committed after it."""
        self.drafter.watch(start, self.target.rows_of([*self.committed, *drafted], start))
        correction = (sum(self.committed[-3:]) * 7 + self.round_ + 1) % VOCABULARY
        self.committed.extend((*drafted[:accepted], correction))
        self.drafter.observe(self.committed)
        self.round_ += 1

    def propose(self, k: int, context: DraftContext | None = None) -> Proposal:
        context = context or DraftContext(WARM, NoiseKey(3), self.round_)
        return self.drafter.propose(self.committed, k, context)

    def round(self, k: int, accepted: int) -> Proposal:
        """Propose, compare with the naive draft, verify."""
        proposal = self.propose(k)
        self.check(proposal)
        self.verify(len(self.committed) - 1, proposal.tokens, min(accepted, len(proposal.tokens)))
        return proposal

    def check(self, proposal: Proposal) -> None:
        assert self.drafter._passes.length <= len(self.committed) - 1, "drafted rows stay in the cache"
        if not proposal.tokens:
            assert proposal == Proposal()
            return
        assert proposal.laws is not None and len(proposal.laws) == len(proposal.tokens)
        expected = self.naive.laws(self.committed, proposal.tokens)
        for law, right in zip(proposal.laws, expected, strict=True):
            np.testing.assert_allclose(law.probs_of(np.arange(VOCABULARY)), right, atol=5e-4)


@pytest.mark.parametrize("name", TOYS)
def test_rounds_with_partial_acceptance(name: str, tmp_path: Path) -> None:
    text = Text(TOYS[name], tmp_path)
    text.start([5, 1, 9])
    random = np.random.default_rng(1)
    most = 3 if TOYS[name].kind != "dflash" else TOYS[name].block - (not TOYS[name].from_anchor)
    for index in range(40):
        k = int(random.integers(1, most + 1))
        proposal = text.round(k, int(random.integers(0, k + 1)))
        assert len(proposal.tokens) == k, index


@pytest.mark.parametrize("name", ["dflash", "eagle3", "mtp"])
def test_rounds_without_a_proposal_between(name: str, tmp_path: Path) -> None:
    """Plain and foreign rounds leave rows waiting, few and many; all are read by the next proposal."""
    text = Text(TOYS[name], tmp_path)
    text.start([5, 1, 9, 4])
    for waiting in (1, 3, FEW - 1, FEW, FEW + 1, 3 * FEW):
        for _ in range(waiting):
            text.verify(len(text.committed) - 1, (8, 8), waiting % 3)
        text.round(3, 1)
    shapes = text.drafter._passes._bound
    assert max(max(shape.context, shape.rows) for shape in shapes) <= FEW


@pytest.mark.parametrize("name", ["dflash", "eagle3", "mtp"])
def test_capacity_grows_under_the_rows(name: str, tmp_path: Path) -> None:
    text = Text(TOYS[name], tmp_path)
    text.start((np.arange(240) % VOCABULARY).tolist())
    for _ in range(12):
        text.round(3, 3)
    assert len(text.committed) > 256


@pytest.mark.parametrize("name", ["dflash", "eagle3", "mtp"])
@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 77])
def test_a_long_prompt_is_read_as_it_comes(name: str, length: int, tmp_path: Path) -> None:
    text = Text(TOYS[name], tmp_path)
    text.start(np.random.default_rng(2).integers(0, VOCABULARY, length).tolist())
    assert text.drafter._passes.length >= length - CHUNK  # read before the first proposal
    assert text.drafter._pending.tensor.shape[0] <= 2 * CHUNK, "all rows of the prompt were kept"
    text.round(3, 2)
    text.round(3, 0)


@pytest.mark.parametrize("name", ["dflash", "eagle3", "mtp"])
def test_a_second_prompt_keeps_the_common_beginning(name: str, tmp_path: Path) -> None:
    text = Text(TOYS[name], tmp_path)
    text.start([5, 1, 9, 4, 7, 7, 2])
    for _ in range(5):
        text.round(3, 2)
    before = list(text.committed)
    for prompt in ([*before[:9], 1, 2, 3], before[:6], [*before, 6, 6], [8], [8, 9], [*before[:5], 11]):
        text.start(prompt)
        for accepted in (3, 0, 1):
            assert len(text.round(3, accepted).tokens) == 3


@pytest.mark.parametrize(("name", "known"), [("dflash", 9), ("eagle3", 8), ("mtp", 8)])
def test_what_is_known_after_a_rewind(name: str, known: int, tmp_path: Path) -> None:
    """A chain read row 8 beside the token that followed, which no longer does."""
    text = Text(TOYS[name], tmp_path)
    text.start([5, 1, 9, 4, 7, 7, 2])
    for _ in range(5):
        text.round(3, 2)
    assert text.drafter.known == len(text.committed) - 1
    text.drafter.rewind(9)
    assert text.drafter.known == known
    with pytest.raises(ValueError, match="cannot rewind to 10: 9 tokens were observed"):
        text.drafter.rewind(10)
    text.drafter.reset()
    assert text.drafter.known == 0


@pytest.mark.parametrize("name", ["dflash", "eagle3", "mtp"])
def test_nothing_is_proposed_without_the_last_row(name: str, tmp_path: Path) -> None:
    text = Text(TOYS[name], tmp_path)
    for prompt in ([5], [5, 1, 9]):
        text.drafter.reset()
        text.drafter.observe(prompt)
        text.committed = list(prompt)
        assert text.propose(3) == Proposal()
    text.drafter.watch(1, text.target.rows_of([5, 1, 9], 1))  # row 0 was never shown
    assert text.drafter.known == 0 and text.propose(3) == Proposal()
    text.drafter.watch(0, text.target.rows_of([5, 1], 0))
    assert len(text.propose(3).tokens) == 3
    assert text.propose(0) == Proposal()


@pytest.mark.parametrize("name", ["dflash", "eagle3", "mtp"])
def test_proposing_twice_gives_the_same(name: str, tmp_path: Path) -> None:
    text = Text(TOYS[name], tmp_path)
    text.start([5, 1, 9, 4])
    text.round(3, 1)
    first = text.propose(3)
    again = text.propose(3)
    assert again.tokens == first.tokens
    text.check(again)
    text.round(2, 2)
    text.round(3, 1)


@pytest.mark.parametrize(("name", "limit"), [("dflash", 20), ("eagle3", 20), ("mtp", 20), ("mtp", 3)])
def test_the_drafts_context_ends_before_the_targets(name: str, limit: int, tmp_path: Path) -> None:
    text = Text(replace(TOYS[name], limit=limit), tmp_path)
    text.start([5, 1])
    made = {}
    while len(text.committed) < limit + 8:
        length = len(text.committed)
        made[length] = len(text.round(3, 0).tokens)
    if name == "dflash":  # a block of 4 from position length - 1 on
        assert made == {length: 3 if length + 3 <= limit else 0 for length in made}
    else:  # rows length - 2 to length + k - 3
        assert made == {length: max(0, min(3, limit + 2 - length)) for length in made}
    assert text.drafter._passes.length + len(text.drafter._pending) <= limit
    text.start([*text.committed[:2], 4])
    assert len(text.round(3, 0).tokens) == (3 if limit == 20 else 1)


@pytest.mark.parametrize("name", ["dflash", "eagle3", "mtp"])
def test_a_prompt_longer_than_the_drafts_context(name: str, tmp_path: Path) -> None:
    text = Text(replace(TOYS[name], limit=CHUNK), tmp_path)
    text.start([7] * (CHUNK + 40))
    assert text.propose(3) == Proposal()
    assert text.drafter._passes.length == CHUNK, "read in one piece, to the last position there is"
    text.start([7] * (CHUNK - 20))
    assert len(text.round(3, 0).tokens) == 3


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_no_pass_writes_where_it_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(TOYS[name], tmp_path)
    text.start([5, 1, 9, 4])
    run, recycled = text.drafter._passes.run, []

    def watched(shape, spans, wanted=True):
        bound = run(shape, spans, wanted)
        recycled.append(bound.outputs["recycled"])
        assert spans["fused"].tensor is not recycled[-1]
        return bound

    monkeypatch.setattr(text.drafter._passes, "run", watched)
    for accepted in (0, 3):
        text.round(5, accepted)
    assert len(recycled) == 10


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_rows_of_an_interrupted_proposal_do_not_stay(name: str, tmp_path: Path) -> None:
    text = Text(TOYS[name], tmp_path)
    text.start([5, 1, 9, 4])
    text.round(4, 2)

    class Interrupted(DraftContext):
        def draw(self, law: Law, position: int) -> int:
            if position == len(text.committed) + 2:
                raise KeyboardInterrupt
            return super().draw(law, position)

    with pytest.raises(KeyboardInterrupt):
        text.propose(4, Interrupted(WARM, NoiseKey(3), text.round_))
    text.verify(len(text.committed) - 1, (), 0)
    for accepted in (1, 3):
        assert len(text.round(4, accepted).tokens) == 4


@pytest.mark.parametrize("name", ["dflash", "eagle3", "mtp"])
def test_passes_reuse_their_bindings(name: str, tmp_path: Path) -> None:
    text = Text(TOYS[name], tmp_path)
    text.start([5, 1, 9, 4])
    for accepted in (0, 1, 2, 3) * 2:
        text.round(3, accepted)
    passes = text.drafter._passes
    kept, made = set(passes._bound), passes.passes
    for accepted in (3, 2, 0, 1):
        text.round(3, accepted)
    assert set(passes._bound) == kept
    assert passes.passes - made == 4 * (1 if name == "dflash" else 3)
    assert text.drafter.passes == passes.passes and text.drafter.ort_ns > 0


def test_a_block_runs_whole_whatever_k_is(tmp_path: Path) -> None:
    text = Text(TOYS["dflash_causal_window"], tmp_path)
    text.start([5, 1, 9, 4])
    assert len(text.round(1, 0).tokens) == 1
    assert len(text.round(50, 0).tokens) == 6


def test_strict_mode_draws_with_the_targets_noise(tmp_path: Path) -> None:
    for name in ("dflash", "eagle3"):
        text = Text(TOYS[name], tmp_path)
        text.start([5, 1, 9, 4])
        key = NoiseKey(11)
        proposal = text.propose(3, DraftContext(WARM, key, 1, strict=True))
        assert proposal.laws is not None
        for index, (token, law) in enumerate(zip(proposal.tokens, proposal.laws, strict=True)):
            assert token == law.draw(key, Domain.TARGET, len(text.committed) + index)


def test_greedy_laws_are_certain(tmp_path: Path) -> None:
    for name in ("dflash_own_ends", "eagle3_own_head", "mtp"):
        text = Text(TOYS[name], tmp_path)
        text.start([5, 1, 9, 4])
        proposal = text.propose(3, DraftContext(SamplingParams(), NoiseKey(0)))
        expected = text.naive.laws(text.committed, proposal.tokens)
        assert proposal.tokens == tuple(int(law.argmax()) for law in expected)
        assert proposal.laws is not None
        assert [law.ids.tolist() for law in proposal.laws] == [[token] for token in proposal.tokens]


# Heads over a vocabulary of their own.


def _context(controls: Controls | None = None, grammar=None, temperature: float = 1.0) -> DraftContext:
    params = SamplingParams(temperature=temperature)
    processors = Processors(controls, (), [5], VOCABULARY) if controls else None
    return DraftContext(params, NoiseKey(0), laws=Laws(params, processors, grammar))


@pytest.mark.parametrize("ids", [SOME_IDS, SOME_IDS[::-1], (3, 40, 1), tuple(range(12))])
def test_own_vocabulary_is_renamed(ids: tuple[int, ...]) -> None:
    logits = np.random.default_rng(0).normal(0, 2, len(ids)).astype(np.float32)
    wide = np.full(VOCABULARY, -np.inf, np.float32)
    for id_, value in zip(ids, logits, strict=True):
        if id_ < VOCABULARY:  # above is padding, never produced
            wide[id_] = value
    head = OwnHead(ToyTarget(), np.array(ids), VOCABULARY)
    for params in (WARM, SamplingParams(), SamplingParams(temperature=0.7, top_k=2), SamplingParams(1.0, top_p=0.6)):
        law, right = head.law(logits, (), DraftContext(params, NoiseKey(0))), law_of(wide, params)
        assert law.ids is not None and (np.diff(law.ids) > 0).all()
        np.testing.assert_allclose(law.probs_of(np.arange(VOCABULARY)), right.probs_of(np.arange(VOCABULARY)))


def test_controls_speak_of_the_targets_ids() -> None:
    head, logits = OwnHead(ToyTarget(), np.array(SOME_IDS), VOCABULARY), np.zeros(len(SOME_IDS), np.float32)
    banned = tuple((token, -np.inf) for token in SOME_IDS if token != 11)
    law = head.law(logits, (), _context(Controls(logit_bias=banned, repetition_penalty=1.8)))
    assert law.prob(11) == 1
    assert head.law(logits, (), _context(Controls(logit_bias=((2, 5.0),)))).probs.argmax() == 2
    assert head.law(logits, (), _context()).prob(11) == pytest.approx(1 / len(SOME_IDS)), "the row kept a control"


class OnlyToken:
    """A grammar that allows one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def masks(self, drafted: Sequence[int]) -> np.ndarray:
        return np.tile(np.arange(VOCABULARY) == self.token, (len(drafted) + 1, 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_insists_on_a_token_the_draft_cannot_name(temperature: float) -> None:
    head = OwnHead(ToyTarget(), np.array(SOME_IDS), VOCABULARY)
    law = head.law(np.zeros(len(SOME_IDS), np.float32), (), _context(None, OnlyToken(19), temperature))
    assert law.prob(19) == 1


@pytest.mark.parametrize("ids", [[1, 1, 2], [-1, 4], [VOCABULARY, VOCABULARY + 1], []])
def test_a_vocabulary_that_makes_no_sense(ids: list[int]) -> None:
    with pytest.raises(BundleError, match=f"from 0 to {VOCABULARY - 1}"):
        OwnHead(ToyTarget(), np.array(ids, np.int64), VOCABULARY)


# Parts.


def test_taps_are_picked_by_name_in_the_drafts_order() -> None:
    taps = np.arange(2 * 3 * HIDDEN, dtype=np.float32).reshape(2, -1)
    rows = PassRows(np.full((2, HIDDEN), -1, np.float32), taps)
    first, second, third = np.split(taps, 3, axis=1)
    for wanted, right in [((5, 1), (third, first)), ((1, 3), (first, second)), (TAPPED, (taps,))]:
        np.testing.assert_array_equal(np.concatenate(row_picker(wanted, TAPPED)(rows), 1), np.concatenate(right, 1))
    assert len(row_picker(TAPPED, TAPPED)(rows)) == 1  # neighbours are copied at once
    np.testing.assert_array_equal(row_picker((), TAPPED)(rows)[0], rows.hidden)


def test_pending_rows_survive_growth_and_room_made() -> None:
    pending, position, read = PendingRows(2, "float32"), 0, 0
    random = np.random.default_rng(4)
    for _ in range(200):
        count = int(random.integers(1, 90))
        numbers = np.arange(position, position + count, dtype=np.float32)[:, None]
        pending.append(position, [numbers, -numbers])
        position += count
        taken = int(random.integers(0, len(pending) + 1))
        host = pending.tensor.read().reshape(-1)[pending.offset :][: 2 * taken].reshape(taken, 2)
        assert pending.position == read
        np.testing.assert_array_equal(
            host, np.stack([np.arange(read, read + taken), -np.arange(read, read + taken)], 1)
        )
        pending.advance(taken)
        read += taken
        if taken and random.random() < 0.2:
            assert pending.step_back()
            read -= 1
    with pytest.raises(ValueError, match="do not follow"):
        pending.append(0, [np.zeros((1, 1)), np.zeros((1, 1))]) if len(pending) else pending.append(-1, [])
