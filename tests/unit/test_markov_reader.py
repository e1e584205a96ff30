"""The reader of DSpark's blocks over a graph written by hand: whose laws, behind which token, and where it stops."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from oxidize.runtime.contracts import DraftShape, markov_contract
from oxidize.runtime.drafters.base import DraftContext
from oxidize.runtime.drafters.blocks import Block, RowByRow
from oxidize.runtime.drafters.heads import Head, OwnHead, TargetHead
from oxidize.runtime.drafters.markov import LEAST_KEPT, MarkovReader
from oxidize.runtime.laws import Laws
from oxidize.runtime.noise import Domain, NoiseKey
from oxidize.runtime.processors import Controls, Processors
from oxidize.runtime.sampling import SamplingParams, law_of
from oxidize.runtime.session import Device, GraphSession, RuntimeOptions, Tensor

HIDDEN, VOCABULARY, PADDED, ROWS, RANK = 8, 23, 29, 6, 4
SOME_IDS = (0, 2, 3, 7, 11, 12, 13, 20, 22)
WARM = SamplingParams(temperature=1.0)
COMMITTED = [5, 1, 9]


@dataclass(frozen=True)
class Heads:
    """codes [V,R], corrections [R,*], gate [H,R] of the row; chances [V]: what the graph says behind each token."""

    codes: np.ndarray
    corrections: np.ndarray
    gate: np.ndarray
    chances: np.ndarray | None

    def correction(self, hidden: np.ndarray, before: int) -> np.ndarray:
        return (self.codes[before] * (hidden @ self.gate)) @ self.corrections

    def write(self, path: Path, own: int | None = None) -> GraphSession:
        """The graph: bias = (W1[previous] * hidden G) W2, confidence = a table's entry for the token before."""
        confident = self.chances is not None
        shape = DraftShape("dflash", HIDDEN, 1, 1, 8, 8, PADDED, own, confident=confident)
        contract = markov_contract(shape)
        nodes = [
            helper.make_node("Gather", ["codes", "previous"], ["code"]),
            helper.make_node("MatMul", ["hidden", "gate"], ["weight"]),
            helper.make_node("Mul", ["code", "weight"], ["weighed"]),
            helper.make_node("MatMul", ["weighed", "corrections"], ["bias"]),
        ]
        arrays = {"codes": self.codes, "gate": self.gate, "corrections": self.corrections}
        if confident:
            nodes.append(helper.make_node("Gather", ["chances", "previous"], ["confidence"]))
            arrays["chances"] = self.chances
        kinds = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
        values = [
            [helper.make_tensor_value_info(spec.name, kinds[spec.dtype], spec.shape) for spec in specs]
            for specs in (contract.inputs, contract.outputs)
        ]
        constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
        graph = helper.make_graph(nodes, "markov", *values, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
        onnx.save(model, path)
        return GraphSession(path, contract, "cpu", RuntimeOptions(provider="cpu", threads=1), light=True)


class Scores:
    """A head that scores hidden states."""

    def __init__(self, columns: int) -> None:
        self.weights = np.random.default_rng(4).normal(0, 1, (HIDDEN, columns)).astype(np.float32)

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        return hidden.read().reshape(-1, HIDDEN)[first : first + count] @ self.weights


def heads(chances: np.ndarray | None = None, columns: int = PADDED) -> Heads:
    random = np.random.default_rng(1)
    codes, gate = random.normal(0, 1, (PADDED, RANK)), random.normal(0, 0.5, (HIDDEN, RANK))
    corrections = random.normal(0, 1.5, (RANK, columns))
    return Heads(codes, corrections, gate, chances)


def block(k: int, first: int = 0) -> Block:
    hidden = Tensor((1, ROWS + 2, HIDDEN), "float32", Device("cpu"))  # buffers are longer than blocks
    hidden.write(np.random.default_rng(3).normal(0, 1, hidden.shape))
    return Block({"hidden": hidden}, first, k)


def context(seed: int = 0, params: SamplingParams = WARM, **rest) -> DraftContext:
    return DraftContext(params, NoiseKey(seed), 1, **rest)


def expected_laws(kind: Heads, scores: Scores, made: Block, drafted: Sequence[int], columns: int) -> list[np.ndarray]:
    """Probabilities [n,columns] at temperature 1."""
    hidden = made.outputs["hidden"].read().reshape(-1, HIDDEN)
    rows = []
    for index, before in enumerate([COMMITTED[-1], *drafted][: len(drafted)]):
        row = hidden[made.first + index]
        logits = (row @ scores.weights + kind.correction(row, before))[:columns].astype(np.float64)
        weights = np.exp(logits - logits.max())
        rows.append(weights / weights.sum())
    return rows


class Narrow(Scores):
    """A target's head, whose padding is cut off."""

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        return super().score(hidden, count, first)[:, :VOCABULARY]


@pytest.mark.parametrize("first", [0, 1])
def test_each_row_is_corrected_by_the_token_before_it(first: int, tmp_path: Path) -> None:
    kind, scores = heads(), Narrow(PADDED)
    reader = MarkovReader(TargetHead(scores), kind.write(tmp_path / "markov.onnx"))
    texts = set()
    for seed in range(8):
        made = block(ROWS - first, first)
        proposal = reader.propose(made, COMMITTED, context(seed))
        assert len(proposal.tokens) == ROWS - first and max(proposal.tokens) < VOCABULARY
        assert proposal.laws is not None
        right = expected_laws(kind, scores, made, proposal.tokens, VOCABULARY)
        for law, probs in zip(proposal.laws, right, strict=True):
            np.testing.assert_allclose(law.probs_of(np.arange(VOCABULARY)), probs, atol=1e-5)
        texts.add(proposal.tokens)
    assert len(texts) > 4


@pytest.mark.parametrize("strict", [False, True])
def test_tokens_are_drawn_from_the_laws_that_are_reported(strict: bool, tmp_path: Path) -> None:
    reader = MarkovReader(TargetHead(Narrow(PADDED)), heads().write(tmp_path / "markov.onnx"))
    asked = context(11, strict=strict)
    proposal = reader.propose(block(ROWS), COMMITTED, asked)
    assert proposal.laws is not None
    for index, (token, law) in enumerate(zip(proposal.tokens, proposal.laws, strict=True)):
        domain, round_ = (Domain.TARGET, 0) if strict else (Domain.DRAFT, asked.round_)
        assert token == law.draw(asked.key, domain, len(COMMITTED) + index, round_)


def test_greedy_laws_are_certain(tmp_path: Path) -> None:
    kind, scores = heads(), Narrow(PADDED)
    reader = MarkovReader(TargetHead(scores), kind.write(tmp_path / "markov.onnx"))
    made = block(ROWS)
    proposal = reader.propose(made, COMMITTED, context(params=SamplingParams()))
    right = expected_laws(kind, scores, made, proposal.tokens, VOCABULARY)
    assert proposal.tokens == tuple(int(law.argmax()) for law in right)
    plain = RowByRow(TargetHead(scores)).propose(made, COMMITTED, context(params=SamplingParams()))
    assert plain.tokens != proposal.tokens, "the corrections correct nothing"


def test_a_vocabulary_of_the_drafts_own(tmp_path: Path) -> None:
    """The graph is asked about target ids; what it corrects are the draft's rows."""
    kind, scores = heads(columns=len(SOME_IDS)), Scores(len(SOME_IDS))
    reader = MarkovReader(_own_head(scores), kind.write(tmp_path / "markov.onnx", own=len(SOME_IDS)))
    made = block(ROWS)
    proposal = reader.propose(made, COMMITTED, context())
    assert set(proposal.tokens) <= set(SOME_IDS) and len(proposal.tokens) == ROWS
    assert proposal.laws is not None
    right = expected_laws(kind, scores, made, proposal.tokens, len(SOME_IDS))
    for law, probs in zip(proposal.laws, right, strict=True):
        np.testing.assert_allclose(law.probs_of(np.array(SOME_IDS)), probs, atol=1e-5)


def _own_head(scores: Scores) -> Head:
    return OwnHead(scores, np.array(SOME_IDS), VOCABULARY)


def test_controls_change_corrected_logits(tmp_path: Path) -> None:
    """What a request asks for comes after the correction, and follows the drafted tokens."""
    kind, scores = heads(), Narrow(PADDED)
    reader = MarkovReader(TargetHead(scores), kind.write(tmp_path / "markov.onnx"))
    processors = Processors(Controls(repetition_penalty=1.7), (), COMMITTED, VOCABULARY)
    asked = context(laws=Laws(WARM, processors))
    made = block(ROWS)
    proposal = reader.propose(made, COMMITTED, asked)
    hidden = made.outputs["hidden"].read().reshape(-1, HIDDEN)
    assert proposal.laws is not None
    for index, before in enumerate([COMMITTED[-1], *proposal.tokens[:-1]]):
        logits = (hidden[index] @ scores.weights + kind.correction(hidden[index], before)).astype(np.float32)
        right = law_of(processors.apply(logits[:VOCABULARY], proposal.tokens[:index]), WARM)
        np.testing.assert_allclose(proposal.laws[index].probs, right.probs, atol=1e-5)


# Where it stops.


def chances_of(tokens: Sequence[int], chances: np.ndarray) -> np.ndarray:
    """The chance that all tokens up to each row are kept, one row further than there are tokens."""
    return np.cumprod([chances[token] for token in [COMMITTED[-1], *tokens]])


@pytest.mark.parametrize("bound", [LEAST_KEPT, 0.3, 0.9])
def test_it_stops_before_a_row_for_what_was_known_before_its_token(bound: float, tmp_path: Path) -> None:
    chances = np.random.default_rng(8).uniform(0.2, 1.0, PADDED)
    session = heads(chances).write(tmp_path / "markov.onnx")
    reader = MarkovReader(TargetHead(Narrow(PADDED)), session, bound)
    endless = MarkovReader(TargetHead(Narrow(PADDED)), session, 0.0)
    lengths = set()
    for seed in range(60):
        proposal = reader.propose(block(ROWS), COMMITTED, context(seed))
        whole = endless.propose(block(ROWS), COMMITTED, context(seed))
        length = len(proposal.tokens)
        assert proposal.tokens == whole.tokens[:length] and len(whole.tokens) == ROWS
        known = chances_of(proposal.tokens, chances)
        assert (known[1:length] >= bound).all(), "it went on where it should have stopped"
        assert length == ROWS or known[length] < bound, "it stopped for what it drew, or too early"
        lengths.add(length)
    assert len(lengths) > 1 or bound == 0.9


def test_there_is_always_one_token(tmp_path: Path) -> None:
    reader = MarkovReader(TargetHead(Narrow(PADDED)), heads(np.zeros(PADDED)).write(tmp_path / "markov.onnx"))
    proposal = reader.propose(block(ROWS), COMMITTED, context())
    assert len(proposal.tokens) == 1 and proposal.laws is not None and len(proposal.laws) == 1


def test_a_draft_without_doubts_proposes_all(tmp_path: Path) -> None:
    reader = MarkovReader(TargetHead(Narrow(PADDED)), heads(np.ones(PADDED)).write(tmp_path / "markov.onnx"))
    for k in range(1, ROWS + 1):
        assert len(reader.propose(block(k), COMMITTED, context()).tokens) == k


def test_one_binding_serves_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = heads(np.ones(PADDED)).write(tmp_path / "markov.onnx")
    reader = MarkovReader(TargetHead(Narrow(PADDED)), session)
    monkeypatch.setattr(session, "binding", lambda: pytest.fail("a binding was made"))
    for _ in range(3):
        reader.propose(block(ROWS), COMMITTED, context())
    assert session.runs == 3 * ROWS and reader.ort_ns == session.elapsed_ns > 0
