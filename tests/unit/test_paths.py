"""A path through a block, against numpy from scratch: each token after the one before it, among the likeliest few."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from laws import assert_follows, text_law
from onnx import helper, numpy_helper
from toy_drafts import Toy, ToyTarget, open_toy

from oxidize.runtime.contracts import DraftShape, TensorSpec, select_contract
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.drafters.blocks import Block
from oxidize.runtime.drafters.dflash import DFlash
from oxidize.runtime.drafters.heads import Head, OwnHead, TargetHead
from oxidize.runtime.drafters.passes import MaskRule
from oxidize.runtime.drafters.paths import PathReader
from oxidize.runtime.errors import OxidizeError
from oxidize.runtime.laws import Laws
from oxidize.runtime.noise import Domain, NoiseKey
from oxidize.runtime.processors import Controls, Processors
from oxidize.runtime.sampling import Law, SamplingParams, law_of
from oxidize.runtime.session import Device, GraphSession, RuntimeOptions, Tensor

HIDDEN, VOCAB, CHOICES, ROWS = 8, 24, 5, 6
TYPES = {"float32": onnx.TensorProto.FLOAT, "int64": onnx.TensorProto.INT64}
WARM = SamplingParams(temperature=0.8, seed=11)
COMMITTED = [3, 1, 4, 1, 5]
OWN_IDS = (20, 0, 3, 17, 9, 11, 5)  # a draft's own vocabulary


def bonds(vocab: int = VOCAB) -> np.ndarray:
    """How well a token goes with the one before it [V,V]."""
    return np.random.default_rng(1).normal(0, 2, (vocab, vocab)).astype(np.float32)


def write_select(path: Path, vocab: int = VOCAB, choices: int = CHOICES) -> GraphSession:
    """scores[t,a,b] = logit of b + bond(a, b) * first value of the row's hidden state."""
    contract = select_contract(DraftShape("dflash", HIDDEN, 1, 1, 8, 8, vocab, choices=choices))
    nodes = []

    def op(kind: str, inputs: Sequence[str], *outputs: str, **attributes) -> str:
        nodes.append(helper.make_node(kind, list(inputs), list(outputs), **attributes))
        return outputs[0]

    op("TopK", ["logits", "k"], "best", "tokens", axis=-1)
    first = op("Expand", ["anchor", "row"], "first")  # [1,K]
    earlier = op("Slice", ["tokens", "zero", "minus_one", "zero"], "earlier")
    before = op("Concat", [first, earlier], "before", axis=0)  # [N,K]
    all_bonds = op("Gather", ["bonds", before], "all_bonds", axis=0)  # [N,K,V]
    shape = op("Concat", [op("Shape", ["tokens"], "size"), "k"], "shape", axis=0)
    wanted = op("Expand", [op("Unsqueeze", ["tokens", "one"], "columns"), shape], "wanted")  # [N,K,K]
    pairs = op("GatherElements", [all_bonds, wanted], "pairs", axis=2)
    scale = op("Unsqueeze", [op("Slice", ["hidden", "zero", "one", "one"], "scale"), "one"], "scale.cube")
    op("Add", [op("Mul", [pairs, scale], "scaled"), op("Unsqueeze", ["best", "one"], "best.rows")], "scores")
    constants = {"k": [choices], "row": [1, choices], "zero": [0], "one": [1], "minus_one": [-1]}
    arrays = [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    arrays.append(numpy_helper.from_array(bonds(vocab), "bonds"))

    def values(specs: Sequence[TensorSpec]):
        return [helper.make_tensor_value_info(spec.name, TYPES[spec.dtype], spec.shape) for spec in specs]

    graph = helper.make_graph(nodes, "select", values(contract.inputs), values(contract.outputs), arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), path)
    return GraphSession(path, contract, "cpu", RuntimeOptions(provider="cpu", threads=1), light=True)


class Rows:
    """A head that scores hidden states by a table [H,n]."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        return hidden.read().reshape(-1, HIDDEN)[first : first + count] @ self.table


@dataclass
class Bench:
    """A reader over one hidden tensor, and what it must do, written down from scratch."""

    session: GraphSession
    own: bool = False
    token_count: int = VOCAB

    def __post_init__(self) -> None:
        random = np.random.default_rng(2)
        self.hidden = Tensor((1, ROWS + 1, HIDDEN), "float32", Device("cpu"))
        self.hidden.write(random.normal(0, 1, self.hidden.shape))
        table = random.normal(0, 1.5, (HIDDEN, VOCAB)).astype(np.float32)
        self.ids = np.array(OWN_IDS) if self.own else np.arange(self.token_count)
        self.rows = Rows(np.ascontiguousarray(table[:, self.ids]))
        self.reader = self.made()

    def made(self) -> PathReader:
        head: Head = OwnHead(self.rows, self.ids, self.token_count) if self.own else TargetHead(self.rows)
        return PathReader(head, self.session, ROWS, self.token_count)

    def propose(self, k: int, context: DraftContext, first: int = 1) -> Proposal:
        return self.reader.propose(Block({"hidden": self.hidden}, first, k), COMMITTED, context)

    def scores(self, row: int, before: int) -> dict[int, float]:
        """The likeliest tokens of a row that are no padding, and their scores after `before`."""
        hidden = self.hidden.read()[0, row]
        logits = dict(zip(self.ids.tolist(), (hidden @ self.rows.table).tolist(), strict=True))
        best = sorted(logits, key=lambda token: -logits[token])[:CHOICES]
        return {token: logits[token] + float(bonds()[before, token]) * float(hidden[0]) for token in best}

    def law(self, row: int, before: int, params: SamplingParams) -> Law:
        scores = self.scores(row, before)
        ids = np.array(sorted(scores))
        law = law_of(np.array([scores[token] for token in ids.tolist()], np.float32), params)
        return Law(ids if law.ids is None else ids[law.ids], law.probs)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> GraphSession:
    return write_select(tmp_path_factory.mktemp("select") / "select.onnx")


@pytest.fixture(params=["target's head", "own head", "padded"])
def bench(request: pytest.FixtureRequest, session: GraphSession) -> Bench:
    return Bench(session, own=request.param == "own head", token_count=21 if request.param == "padded" else VOCAB)


def context(params: SamplingParams = WARM, **rest) -> DraftContext:
    return DraftContext(params, NoiseKey(params.seed), **rest)


def check(bench: Bench, proposal: Proposal, k: int, params: SamplingParams, first: int = 1) -> None:
    assert len(proposal.tokens) == k and proposal.laws is not None
    before = COMMITTED[-1]
    for row, (token, law) in enumerate(zip(proposal.tokens, proposal.laws, strict=True)):
        right = bench.law(first + row, before, params)
        assert law.ids is not None and right.ids is not None
        assert (np.diff(law.ids) > 0).all() and law.ids[-1] < bench.token_count
        np.testing.assert_array_equal(law.ids, right.ids)
        np.testing.assert_allclose(law.probs, right.probs, atol=1e-5)
        assert abs(law.probs.sum() - 1) < 1e-12 and law.prob(token) > 0
        before = token


@pytest.mark.parametrize("k", range(1, ROWS + 1))
@pytest.mark.parametrize(
    "params",
    [WARM, SamplingParams(1.5, top_k=3), SamplingParams(2.0, top_p=0.7, min_p=0.05), SamplingParams()],
    ids=["all", "top-k", "top-p", "greedy"],
)
def test_every_law_is_of_the_scores_behind_the_token_drawn(bench: Bench, params: SamplingParams, k: int) -> None:
    for round_ in range(4):
        check(bench, bench.propose(k, context(params, round_=round_)), k, params)
    check(bench, bench.propose(min(k, 2), context(params), first=5), min(k, 2), params, first=5)


def test_a_greedy_path_is_not_the_likeliest_token_of_each_row(session: GraphSession) -> None:
    bench = Bench(session)
    tokens, before = [], COMMITTED[-1]
    for row in range(1, ROWS + 1):
        scores = bench.scores(row, before)
        before = max(scores, key=scores.__getitem__)
        tokens.append(before)
    assert bench.propose(ROWS, context(SamplingParams())).tokens == tuple(tokens)
    each = bench.rows.score(bench.hidden, ROWS, 1).argmax(1).tolist()
    assert tokens != each


@pytest.mark.parametrize("strict", [False, True])
def test_tokens_are_drawn_with_the_noise_of_their_position(bench: Bench, strict: bool) -> None:
    """The target's noise under the match rule, the draft's own and the round's otherwise."""
    asked = context(strict=strict, round_=3)
    proposal = bench.propose(ROWS, asked)
    assert proposal.laws is not None
    domain, round_ = (Domain.TARGET, 0) if strict else (Domain.DRAFT, 3)
    drawn = [law.draw(asked.key, domain, len(COMMITTED) + i, round_) for i, law in enumerate(proposal.laws)]
    assert proposal.tokens == tuple(drawn)


def test_paths_have_the_law_of_their_rows(session: GraphSession) -> None:
    bench = Bench(session)

    def law_after(tokens: tuple[int, ...]) -> Law:
        return bench.law(1 + len(tokens), tokens[-1] if tokens else COMMITTED[-1], WARM)

    texts = [bench.propose(3, context(replace(WARM, seed=seed))).tokens for seed in range(6000)]
    assert_follows(texts, text_law(law_after, 3))


def test_padding_is_never_named(session: GraphSession) -> None:
    """Not even where there are fewer tokens than choices, or padding of any logit."""
    bench = Bench(session, token_count=3)
    for round_ in range(20):
        check(bench, bench.propose(ROWS, context(round_=round_)), ROWS, WARM)
        assert max(bench.propose(ROWS, context(round_=round_)).tokens) < 3


class Only:
    """A grammar that allows a few tokens at each place."""

    def __init__(self, allowed: Sequence[Sequence[int]]) -> None:
        self._allowed = allowed

    def masks(self, drafted: Sequence[int]) -> np.ndarray:
        rows = self._allowed[: len(drafted) + 1]
        return np.array([np.isin(np.arange(VOCAB), row) for row in rows])

    def legal_prefix(self, drafted: Sequence[int]) -> int:
        return len(drafted)

    def forced(self) -> list[int]:
        return []

    def commit(self, tokens: Sequence[int]) -> None:
        pass


def test_a_grammar_chooses_among_the_tokens_of_a_row(session: GraphSession) -> None:
    bench = Bench(session)
    first = sorted(bench.scores(1, COMMITTED[-1]))
    allowed = [first[1:3], range(VOCAB), range(VOCAB)]
    asked = context(laws=Laws(WARM, grammar=Only(allowed)))
    for round_ in range(10):
        proposal = bench.propose(3, replace(asked, round_=round_))
        assert proposal.laws is not None and len(proposal.tokens) == 3 and proposal.tokens[0] in first[1:3]
        plain = bench.law(1, COMMITTED[-1], WARM).probs_of(np.array(first[1:3]))
        np.testing.assert_allclose(proposal.laws[0].probs_of(np.array(first[1:3])), plain / plain.sum(), atol=1e-5)
        second = bench.law(2, proposal.tokens[0], WARM)
        np.testing.assert_allclose(
            proposal.laws[1].probs_of(np.arange(VOCAB)), second.probs_of(np.arange(VOCAB)), atol=1e-5
        )


def test_a_path_ends_behind_a_token_that_only_the_grammar_names(session: GraphSession) -> None:
    """There is no score for what follows it. The next proposal knows nothing of it."""
    bench = Bench(session)
    second = bench.scores(2, 0)  # which tokens they are does not depend on the one before
    outside = [token for token in range(VOCAB) if token not in second]
    asked = context(laws=Laws(WARM, grammar=Only([range(VOCAB), outside, range(VOCAB)])))
    proposal = bench.propose(ROWS, asked)
    assert len(proposal.tokens) == 2 and proposal.tokens[1] in outside
    assert proposal.laws is not None and proposal.laws[1].prob(proposal.tokens[1]) > 0
    check(bench, bench.propose(ROWS, context()), ROWS, WARM)
    neutral = context(laws=Laws(WARM, grammar=Only([range(VOCAB)] * (ROWS + 1))))
    names = bench.propose(ROWS, neutral)
    assert names.laws is not None
    for row, law in enumerate(names.laws):
        named = {token for token in range(VOCAB) if law.prob(token) > 0}
        assert named <= set(bench.scores(1 + row, 0))


def test_controls_change_the_scores_by_each_rows_own_prefix(session: GraphSession) -> None:
    bench = Bench(session)
    controls = Controls(frequency_penalty=2.0, logit_bias=((7, -np.inf),))
    processors = Processors(controls, frozenset(), COMMITTED, VOCAB)
    proposal = bench.propose(ROWS, context(laws=Laws(WARM, processors)))
    assert proposal.laws is not None and 7 not in proposal.tokens
    before, seen = COMMITTED[-1], []
    for row, (token, law) in enumerate(zip(proposal.tokens, proposal.laws, strict=True)):
        scores = bench.scores(1 + row, before)
        logits = np.full(VOCAB, -np.inf)
        for name, score in scores.items():
            logits[name] = -np.inf if name == 7 else score - 2.0 * seen.count(name)
        weights = np.exp((logits - logits.max()) / WARM.temperature)
        np.testing.assert_allclose(law.probs_of(np.arange(VOCAB)), weights / weights.sum(), atol=1e-5)
        before = token
        seen.append(token)


def test_an_error_of_the_controls_leaves_no_trace(session: GraphSession) -> None:
    bench = Bench(session)
    with pytest.raises(OxidizeError):
        bench.propose(ROWS, context(laws=Laws(WARM, grammar=Only([()]))))  # no token is allowed
    neutral = bench.propose(1, context(laws=Laws(WARM, grammar=Only([range(VOCAB)]))))
    assert neutral.laws is not None
    right = bench.law(1, COMMITTED[-1], WARM).probs_of(np.arange(VOCAB))
    np.testing.assert_allclose(neutral.laws[0].probs_of(np.arange(VOCAB)), right, atol=1e-5)


def test_bindings_are_made_once_per_number_of_rows(session: GraphSession, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, made, runs = Bench(session), [], session.runs
    bind = GraphSession.binding
    monkeypatch.setattr(GraphSession, "binding", lambda self: made.append(1) or bind(self))
    for _ in range(5):
        for k in (1, 3, ROWS):
            bench.propose(k, context())
    assert len(made) == 3 and session.runs == runs + 15
    moved = Tensor(bench.hidden.shape, "float32", Device("cpu"))
    moved.write(bench.hidden.read() + 0.5)
    bench.hidden = moved
    check(bench, bench.propose(3, context()), 3, WARM)
    assert len(made) == 4
    assert bench.reader.ort_ns == session.elapsed_ns > 0


def test_logits_that_are_no_numbers_are_an_error(session: GraphSession) -> None:
    bench = Bench(session)
    bench.hidden.write(np.full(bench.hidden.shape, np.nan))
    with pytest.raises(OxidizeError, match="overflowed"):
        bench.propose(ROWS, context())


def test_the_toy_target_lends_its_head(session: GraphSession) -> None:
    """Real ends: the head's logits are a view that the next call overwrites."""
    target = ToyTarget(VOCAB)
    reader = PathReader(TargetHead(target), session, ROWS, VOCAB)
    hidden = target.embed_tokens([1, 2, 3, 4])
    block = Block({"hidden": hidden}, 1, 3)
    first = reader.propose(block, COMMITTED, context())
    other = reader.propose(Block({"hidden": target.embed_tokens([5, 6, 7, 8])}, 1, 3), COMMITTED, context())
    again = reader.propose(block, COMMITTED, context())
    assert first.tokens == again.tokens and first.tokens != other.tokens


# In the real loop, on a target of so few tokens that most of them are in a row's choice.


def toy_decoder(folder: Path, config: SpeculativeConfig, vocab: int = 6, **options) -> SpeculativeDecoder:
    toy = Toy("dflash", block=6, rule=MaskRule(False, False, 6), vocabulary=vocab)
    target = ToyTarget(vocab, **options)
    drafter = open_toy(toy, target, folder)
    assert isinstance(drafter, DFlash)
    session = write_select(folder / "select.onnx", vocab, vocab - 2)
    drafter._reader = PathReader(TargetHead(target), session, toy.block - 1, vocab)
    return SpeculativeDecoder(target, drafter, config)


def fixed(k: int, count: int, **rest) -> SpeculativeConfig:
    return SpeculativeConfig(k, count, 0.0, adaptive=False, **rest)


@pytest.mark.parametrize("params", [WARM, SamplingParams()], ids=["warm", "greedy"])
@pytest.mark.parametrize("floor", [1, 2])
def test_texts_are_the_plain_ones_under_the_match_rule(params: SamplingParams, floor: int, tmp_path: Path) -> None:
    for k in range(1, 6):
        decoder = toy_decoder(tmp_path, fixed(k, 30, strict_mode=True), floor=floor)
        for prompt in ([1], [1, 2], [1, 2, 3, 4, 5] * 3, [1, 2, 3, 4, 5, 0], [2]):
            plain = SpeculativeDecoder(ToyTarget(6), None, fixed(0, 30)).generate(prompt, params)
            assert decoder.generate(prompt, params) == plain
        assert decoder.stats.accepted_draft_tokens > 0


def test_texts_have_the_targets_law_under_the_reject_rule(tmp_path: Path) -> None:
    decoder, prompt, params = toy_decoder(tmp_path, fixed(2, 3), vocab=5), [1, 2, 3], SamplingParams(1.0)
    texts, drafted, accepted = [], 0, 0
    for seed in range(4000):
        texts.append(tuple(decoder.generate(prompt, replace(params, seed=seed))))
        drafted, accepted = drafted + decoder.stats.draft_tokens, accepted + decoder.stats.accepted_draft_tokens
    assert 0.2 < accepted / drafted < 0.8
    law = text_law(lambda tokens: law_of(decoder.target.rule([*prompt, *tokens], 5), params), 3)
    assert_follows(texts, law)


def test_every_token_as_the_end(tmp_path: Path) -> None:
    decoder = toy_decoder(tmp_path, fixed(5, 40, strict_mode=True))
    for end in range(6):
        for prompt in ([1, 2], [end], [4, 4, 1]):
            plain = SpeculativeDecoder(ToyTarget(6), None, fixed(0, 40)).generate(prompt, WARM, eos={end})
            assert decoder.generate(prompt, WARM, eos={end}) == plain


def test_room_smaller_than_a_block(tmp_path: Path) -> None:
    decoder = toy_decoder(tmp_path, fixed(5, 40, strict_mode=True), context=20)
    for length in (1, 12, 16, 17, 18, 19):
        prompt, count = ([1, 2, 3, 4] * 5)[:length], 20 - length
        plain = SpeculativeDecoder(ToyTarget(6), None, fixed(0, count)).generate(prompt, WARM)
        found = decoder.stream(prompt, WARM, config=fixed(5, count, strict_mode=True))
        assert [token for emission in found for token in emission.tokens] == plain
