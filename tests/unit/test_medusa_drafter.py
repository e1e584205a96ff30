"""The Medusa drafter over graphs of the exporter, against heads recomputed in torch from the whole text each round."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from medusa_toys import HEADS, ToyHeads, export_toy_heads, toy_forms
from toy_drafts import ToyTarget

from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.laws import Laws
from oxidize.runtime.noise import Domain, NoiseKey
from oxidize.runtime.processors import Controls, Processors
from oxidize.runtime.rows import PassRows
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import GraphSession

VOCABULARY = 29
WARM = SamplingParams(temperature=1.0)
FORMS = toy_forms(VOCABULARY, truncated=11)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ToyHeads]:
    root = tmp_path_factory.mktemp("medusa")
    return {name: export_toy_heads(root / name, variant) for name, variant in FORMS.items()}


class Text:
    """A text that grows by rounds, as the loop would make it grow, with acceptance as the test says."""

    def __init__(self, heads: ToyHeads) -> None:
        self.target, self.heads = ToyTarget(VOCABULARY), heads
        self.drafter = heads.drafter(self.target)
        self.committed: list[int] = []
        self.round_ = 0

    def start(self, prompt: Sequence[int], chunk: int = 512) -> None:
        """What the decoder and prefill do: rewind, observe, show the chunks; the first round's pass is a plain one."""
        same = next((i for i, (a, b) in enumerate(zip(prompt, self.committed, strict=False)) if a != b), None)
        same = min(len(prompt), len(self.committed)) if same is None else same
        same = min(same, len(prompt) - 1)
        self.drafter.rewind(same)
        self.committed = list(prompt)
        self.drafter.observe(self.committed)
        start = min(self.drafter.known, same)  # so much is in the target's cache
        while len(prompt) - start > chunk:
            self.drafter.watch(start, self.target.rows_of(prompt[: start + chunk], start))
            start += chunk
        self.verify(start, (), 0)

    def verify(self, start: int, drafted: Sequence[int], accepted: int) -> None:
        """A pass of the target over tail and draft, and what is committed after it."""
        rows = self.target.rows_of([*self.committed, *drafted], start)
        self.drafter.watch(start, rows)
        rows.hidden[:] = np.nan  # they are valid until the next pass only
        correction = (sum(self.committed[-3:]) * 7 + self.round_ + 1) % VOCABULARY
        self.committed.extend((*drafted[:accepted], correction))
        self.drafter.observe(self.committed)
        self.round_ += 1

    def propose(self, k: int, context: DraftContext | None = None) -> Proposal:
        return self.drafter.propose(self.committed, k, context or DraftContext(WARM, NoiseKey(3), self.round_))

    def laws(self) -> np.ndarray:
        """[heads,V] at temperature 1."""
        return torch.from_numpy(self.heads.logits(self.target, self.committed)).double().softmax(-1).numpy()

    def round(self, k: int, accepted: int) -> Proposal:
        """Propose, compare with the reference, verify."""
        proposal = self.propose(k)
        self.check(proposal)
        self.verify(len(self.committed) - 1, proposal.tokens, min(accepted, len(proposal.tokens)))
        return proposal

    def check(self, proposal: Proposal) -> None:
        if not proposal.tokens:
            assert proposal == Proposal()
            return
        assert proposal.laws is not None and len(proposal.laws) == len(proposal.tokens)
        for law, right in zip(proposal.laws, self.laws(), strict=False):
            np.testing.assert_allclose(law.probs_of(np.arange(VOCABULARY)), right, atol=1e-5)


@pytest.fixture(params=FORMS)
def text(request: pytest.FixtureRequest, forms: dict[str, ToyHeads]) -> Text:
    return Text(forms[request.param])


@pytest.fixture
def own(forms: dict[str, ToyHeads]) -> Text:
    return Text(forms["own"])


def test_rounds_with_partial_acceptance(text: Text) -> None:
    text.start([5, 1, 9])
    random = np.random.default_rng(1)
    for index in range(60):
        k = int(random.integers(1, HEADS + 3))
        proposal = text.round(k, int(random.integers(0, k + 1)))
        assert len(proposal.tokens) == min(k, HEADS), index


def test_rounds_without_a_proposal_between(text: Text) -> None:
    """Plain rounds and rounds of another drafter, kept in part: the row is that of the last pass."""
    text.start([5, 1, 9, 4])
    for waiting in (1, 2, 40):
        for index in range(waiting):
            text.verify(len(text.committed) - 1, (8, 8, 3), index % 4)
        assert len(text.round(3, 1).tokens) == 3


@pytest.mark.parametrize(("length", "chunk"), [(2, 1), (3, 1), (7, 1), (7, 3), (512, 512), (513, 512), (1300, 512)])
def test_prompts_of_any_length(own: Text, length: int, chunk: int) -> None:
    own.start(np.random.default_rng(2).integers(0, VOCABULARY, length).tolist(), chunk)
    assert own.drafter._rows.shape[0] <= 2, "rows of the prompt were kept"
    for accepted in (2, 0, 4):
        assert len(own.round(4, accepted).tokens) == 4


def test_a_prompt_of_one_token(own: Text) -> None:
    own.drafter.observe([5])
    own.committed = [5]
    assert own.propose(3) == Proposal() and own.drafter.known == 0
    own.committed = []
    own.start([5])
    assert len(own.round(3, 1).tokens) == 3


def test_another_prompt_begins_anywhere(text: Text) -> None:
    text.start([5, 1, 9, 4, 7, 7, 2])
    for _ in range(5):
        text.round(3, 2)
    before = list(text.committed)
    for prompt in ([*before[:9], 1, 2, 3], before[:6], [*before, 6, 6], [8], [8, 9], [*before[:5], 11], before, before):
        text.start(prompt)
        for accepted in (3, 0, 1):
            assert len(text.round(3, accepted).tokens) == 3


def test_what_is_known(own: Text) -> None:
    """All but the anchor, less one token where the row before the anchor is missing: its pass gives the row again."""
    drafter = own.drafter
    assert drafter.known == 0
    own.start([5, 1, 9, 4, 7, 7, 2])
    for _ in range(3):
        own.verify(len(own.committed) - 1, (3, 3, 3), 2)
        assert drafter.known == len(own.committed) - 1
    length = len(own.committed)
    drafter.rewind(length - 1)  # the last pass gave rows length - 4 and up
    assert drafter.known == length - 2
    drafter.rewind(length - 2)
    assert drafter.known == length - 3
    drafter.observe(own.committed[: length - 1])
    assert drafter.known == length - 2
    own.committed = own.committed[: length - 1]
    own.check(own.propose(3))
    drafter.rewind(5)
    assert drafter.known == 3  # row 3 is long gone
    assert drafter.propose(own.committed[:5], 3, DraftContext(WARM, NoiseKey(3), 0)) == Proposal()
    with pytest.raises(ValueError, match="cannot rewind to 6: 5 tokens were observed"):
        drafter.rewind(6)
    drafter.reset()
    assert drafter.known == 0


def test_a_row_passed_anew_is_at_hand_again(own: Text) -> None:
    """What the decoder does after a rewind: the cache is kept up to `known`, the tokens behind pass."""
    own.start([5, 1, 9, 4, 7, 7, 2])
    own.round(3, 3)
    own.drafter.rewind(4)
    own.committed = [5, 1, 9, 4]
    start = own.drafter.known
    assert start == 2
    own.drafter.watch(start, own.target.rows_of(own.committed, start))
    assert own.drafter.known == 3
    proposal = own.propose(4)
    assert len(proposal.tokens) == 4
    own.check(proposal)


def test_rows_of_another_text_are_void(own: Text) -> None:
    """The texts part at the token whose row was the last to be shown."""
    own.start([5, 1, 9, 4, 7])
    own.round(3, 3)
    length = len(own.committed)
    own.drafter.rewind(length - 2)
    own.committed[-2:] = [(token + 1) % VOCABULARY for token in own.committed[-2:]]
    own.drafter.observe(own.committed)
    assert own.drafter.known == length - 2 and own.propose(3) == Proposal()
    own.drafter.watch(length - 2, own.target.rows_of(own.committed, length - 2))
    proposal = own.propose(3)
    assert len(proposal.tokens) == 3
    own.check(proposal)


def test_rows_of_rejected_tokens_are_void(own: Text) -> None:
    """Row n - 1 of a drafted token stood where another token was committed in its place."""
    own.start([5, 1, 9])
    drafted = (4, 4, 4)
    own.verify(len(own.committed) - 1, drafted, 1)
    assert own.committed[-1] != 4
    own.check(own.propose(4))
    own.drafter.observe([*own.committed, 6])  # its row was that of a drafted 4
    own.committed.append(6)
    assert own.drafter.known == len(own.committed) - 2 and own.propose(4) == Proposal()


def test_proposing_twice_gives_the_same(text: Text) -> None:
    text.start([5, 1, 9, 4])
    text.round(3, 1)
    first, again = text.propose(3), text.propose(3)
    assert again.tokens == first.tokens
    text.check(again)
    assert text.propose(0) == Proposal()
    text.round(2, 2)


def test_one_pass_a_proposal_whatever_k(own: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    own.start([5, 1, 9, 4])
    monkeypatch.setattr(GraphSession, "binding", None)  # nothing is bound again
    before, spent = own.drafter.passes, own.drafter.ort_ns
    for k in (1, 2, 3, 4, 9):
        own.round(k, 1)
    assert own.drafter.passes - before == 5
    assert own.drafter.ort_ns > spent


@pytest.mark.parametrize("strict", [False, True])
def test_tokens_are_drawn_from_their_laws(text: Text, strict: bool) -> None:
    text.start([5, 1, 9, 4])
    key, domain = NoiseKey(9), (Domain.TARGET,) if strict else (Domain.DRAFT,)
    proposal = text.propose(4, DraftContext(WARM, key, 6, strict))
    assert proposal.laws is not None
    for index, (token, law) in enumerate(zip(proposal.tokens, proposal.laws, strict=True)):
        position = len(text.committed) + index
        expected = law.draw(key, *domain, position) if strict else law.draw(key, *domain, position, 6)
        assert token == expected
    greedy = text.propose(4, DraftContext(SamplingParams(), key, 6, strict))
    assert list(greedy.tokens) == text.laws().argmax(1).tolist()


def test_controls_bend_the_laws_of_every_head(text: Text) -> None:
    """A repetition penalty by the head's own prefix, drafted tokens included; a bias that forbids."""
    text.start([5, 1, 9, 4])
    controls = Controls(presence_penalty=1.5, logit_bias=((int(text.laws()[0].argmax()), -100.0),))
    processors = Processors(controls, frozenset(), text.committed[:3], VOCABULARY)
    processors.commit(text.committed[3:])
    context = DraftContext(WARM, NoiseKey(3), 0, laws=Laws(WARM, processors))
    proposal = text.propose(4, context)
    assert proposal.laws is not None
    logits = text.heads.logits(text.target, text.committed)
    for index, law in enumerate(proposal.laws):
        wanted = np.where(np.isfinite(logits[index]), logits[index], -1e30).astype(np.float32)
        right = context.law(wanted, proposal.tokens[:index])
        ids = np.arange(VOCABULARY)
        np.testing.assert_allclose(law.probs_of(ids), right.probs_of(ids), atol=1e-5)
    assert int(text.laws()[0].argmax()) not in proposal.tokens


def test_rows_are_shown_before_anything_was_observed(own: Text) -> None:
    """As calibration does it."""
    tokens = [5, 1, 9]
    own.drafter.watch(0, own.target.rows_of(tokens[:2], 0))
    own.drafter.observe(tokens)
    own.committed = tokens
    proposal = own.propose(3)
    assert len(proposal.tokens) == 3
    own.check(proposal)


def test_rows_of_taps_are_of_no_interest(own: Text) -> None:
    own.committed = [5, 1, 9]
    rows = own.target.rows_of(own.committed[:2], 0)
    own.drafter.observe(own.committed)
    own.drafter.watch(0, PassRows(rows.hidden, None))
    own.check(own.propose(3))
