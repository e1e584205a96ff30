"""DSpark drafts give an independent torch implementation's results: the graphs, and rounds as the runtime plays them.

Rounds are played by the drafter over the exported graphs, with acceptance as the test says, and compared with DFlash's
reference, computed from all taps of the text, and DSpark's heads on top of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from draft_checkpoints_dflash import HIDDEN, VOCAB, target_config, vocabulary_map
from draft_checkpoints_dspark import (
    BLOCK,
    deepspec,
    heads_of,
    specforge,
    write_dspark,
    write_dspark_gguf,
    write_dspark_speculators,
)
from reference_dflash import DFlashReference, LayerRules, load_speculators, load_zlab
from reference_dspark import MarkovReference

from oxidize.export.drafts.base import DraftCheckpoint, neural_facts, write_draft_graphs
from oxidize.export.drafts.dflash_graph import dflash_graphs
from oxidize.export.drafts.dspark import read_dspark, read_dspark_speculators
from oxidize.export.drafts.dspark_gguf import read_dspark_gguf
from oxidize.export.plan import ExportPlan
from oxidize.export.quantize import dequantize, quantize
from oxidize.runtime.cache import CacheShape
from oxidize.runtime.drafters.base import DraftContext
from oxidize.runtime.drafters.dflash import DFlash, block_plan
from oxidize.runtime.drafters.heads import OwnHead, TargetHead
from oxidize.runtime.drafters.markov import MarkovReader
from oxidize.runtime.drafters.passes import DraftPasses, MaskRule
from oxidize.runtime.drafters.pending import PendingRows
from oxidize.runtime.drafters.reader import DraftParts
from oxidize.runtime.ends import Embedder, Scorer
from oxidize.runtime.noise import NoiseKey
from oxidize.runtime.rows import PassRows
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import Binding, Device, GraphSession, RuntimeOptions, Tensor

PROMISE = 1e-3
CAPACITY = 360
ACCEPTED = (0, 3, 7, 1, 5, 2)  # draft tokens kept in each round
OPTIONS = RuntimeOptions(provider="cpu", threads=1)
CPU = Device("cpu")
FULL, SLIDING_CAUSAL = LayerRules(False, None), LayerRules(True, 24)
KINDS = {  # keys of the config by what they make of the heads
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "no_confidence": {"enable_confidence_head": False},
    "confidence_of_the_row": {"confidence_head_with_markov": False},
    "gated_rank_12": {"markov_head_type": "gated", "markov_rank": 12},
    "row_0_discarded": {"sample_from_anchor": False},
}


@dataclass(frozen=True)
class Exported:
    """A draft's graphs as sessions by role."""

    draft: DraftCheckpoint
    sessions: dict[str, GraphSession]
    folder: Path

    def markov(self, hidden: np.ndarray, before: int) -> tuple[np.ndarray, float]:
        """The correction [V] and the confidence (1 without) of a row [H]."""
        binding, outputs = bound(self.sessions["markov"], hidden[None], before)
        self.sessions["markov"].run(binding)
        return outputs["bias"].read()[0], float(outputs["confidence"].read()[0]) if "confidence" in outputs else 1.0


def bound(session: GraphSession, hidden: np.ndarray, before: int) -> tuple[Binding, dict[str, Tensor]]:
    dtype = session.contract.inputs[0].dtype
    binding, row, previous = session.binding(), Tensor((1, HIDDEN), dtype, CPU), Tensor((1,), "int64", CPU)
    row.write(hidden)
    previous.write(before)
    binding.bind_input("hidden", row, row.shape)
    binding.bind_input("previous", previous, (1,))
    outputs = {spec.name: Tensor(spec.shape, spec.dtype, CPU) for spec in session.contract.outputs}
    for name, tensor in outputs.items():
        binding.bind_output(name, tensor, tensor.shape)
    return binding, outputs


def export(draft: DraftCheckpoint, folder: Path, plan: ExportPlan) -> Exported:
    folder.mkdir(exist_ok=True)
    entries = write_draft_graphs(draft, dflash_graphs(draft.config, plan.dtype), plan, folder)
    assert draft.weights.unread() == []
    sessions = {
        entry.contract.role: GraphSession(folder / entry.file, entry.contract, "cpu", OPTIONS, light=True)
        for entry in entries
    }
    return Exported(draft, sessions, folder)


def exported(tmp_path: Path, plan: ExportPlan | None = None, own_vocab: int | None = None, **own) -> Exported:
    source = write_dspark(tmp_path / "source", specforge(**own), own_vocab=own_vocab)
    return export(read_dspark(source, target_config()), tmp_path / "out", plan or ExportPlan("fp32"))


def reference_of(own_vocab: int | None = None, **own) -> MarkovReference:
    heads = heads_of(specforge(**own), rows=own_vocab or VOCAB)
    return MarkovReference({name: torch.from_numpy(values) for name, values in heads.items()})


def samples(count: int = 6) -> list[tuple[np.ndarray, int]]:
    random = np.random.default_rng(2)
    return [(random.normal(0, 1, HIDDEN).astype(np.float32), int(random.integers(VOCAB))) for _ in range(count)]


def worst(made: Exported, reference: MarkovReference, confident: bool = True) -> float:
    errors = []
    for hidden, before in samples():
        bias, confidence = made.markov(hidden, before)
        row = torch.from_numpy(hidden)
        errors.append(np.abs(bias - reference.correction(row, before).numpy()).max())
        if confident:
            errors.append(abs(confidence - reference.confidence(row, before)))
    return float(max(errors))


# The graph alone.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("profiles", [("ort",), ("std",)], ids=["ort", "std"])
def test_corrections_and_confidences(kind: str, profiles: tuple[str, ...], tmp_path: Path):
    made = exported(tmp_path, ExportPlan("fp32", profiles), **KINDS[kind])
    confident = kind != "no_confidence"
    assert [spec.name for spec in made.sessions["markov"].contract.outputs] == ["bias", "confidence"][: 1 + confident]
    error = worst(made, reference_of(**KINDS[kind]), confident)
    print(f"{kind} {profiles}: largest error {error:.1e}")
    assert error <= 1e-4


def test_corrections_of_a_vocabulary_of_the_drafts_own(tmp_path: Path):
    """Codes are of the target's ids, whatever the draft's rows are."""
    made = exported(tmp_path, own_vocab=120)
    assert made.sessions["markov"].contract.outputs[0].shape == (1, 120)
    assert worst(made, reference_of(own_vocab=120)) <= 1e-4


@pytest.mark.parametrize("profiles", [("ort",), ("std",)], ids=["ort", "std"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "gated_rank_12"])
def test_half_precision_stays_near(kind: str, profiles: tuple[str, ...], tmp_path: Path):
    made = exported(tmp_path, ExportPlan("fp16", profiles), **KINDS[kind])
    assert worst(made, reference_of(**KINDS[kind])) <= 0.02


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "gated_rank_12"])
def test_both_forms_of_four_bits_are_the_same_numbers(kind: str, half: bool, tmp_path: Path):
    """Up to what MatMulNBits loses by rounding its input to 8 bits, which it is told not to do here."""
    forms = []
    for profile in ("ort", "std"):
        plan = ExportPlan("int4", (profile,), half_activations=half)
        source = write_dspark(tmp_path / profile / "source", specforge(**KINDS[kind]))
        forms.append(export(read_dspark(source, target_config()), tmp_path / profile / "out", plan))
    (fast, plain), reference = forms, reference_of(**KINDS[kind])
    spread = max(float(reference.correction(torch.from_numpy(row), token).abs().max()) for row, token in samples())
    rounded = [(fast.markov(*sample), plain.markov(*sample)) for sample in samples()]
    assert max(np.abs(a[0] - b[0]).max() for a, b in rounded) <= 0.02 * spread
    exact = dict(fast.sessions, markov=_exact(fast))
    fast = Exported(fast.draft, exact, fast.folder)
    tolerance = 0.01 if half else PROMISE
    for sample in samples():
        (bias, confidence), (other, other_confidence) = fast.markov(*sample), plain.markov(*sample)
        np.testing.assert_allclose(bias, other, atol=tolerance)
        assert confidence == pytest.approx(other_confidence, abs=tolerance)


def _exact(made: Exported) -> GraphSession:
    """The markov graph with products computed in float32."""
    contract, path = made.sessions["markov"].contract, made.folder / "exact.onnx"
    model = onnx.load_model(made.folder / "markov.onnx", load_external_data=False)
    changed = [a for node in model.graph.node for a in node.attribute if a.name == "accuracy_level"]
    assert changed
    for attribute in changed:
        attribute.i = 1
    onnx.save_model(model, path)
    return GraphSession(path, contract, "cpu", OPTIONS, light=True)


def test_four_bits_are_the_blocks_of_the_weights(tmp_path: Path):
    """Corrections at 4 bits with zero points, codes at 8 like an embedding table, confidences as they are."""
    made = exported(tmp_path, ExportPlan("int4", ("std",)))
    heads = {name: values.copy() for name, values in heads_of(specforge()).items()}
    for part, bits in (("markov_w1", 8), ("markov_w2", 4)):
        name = f"markov_head.{part}.weight"
        heads[name] = dequantize(quantize(heads[name], bits, zero_points=bits == 4))
    reference = MarkovReference({name: torch.from_numpy(values) for name, values in heads.items()})
    assert worst(made, reference) <= PROMISE
    sizes = {tensor.name: tensor for tensor in onnx.load_model(tmp_path / "out/markov.onnx").graph.initializer}
    stored = sum(len(tensor.raw_data) for tensor in sizes.values() if "markov_w" in tensor.name)
    assert stored < VOCAB * 32 * 4 * 0.55  # of float32, twice: 8 and 4 bits and the scales of blocks


# Rounds.


class Table:
    """What a target lends a draft: rows of random taps, an embedding and a head."""

    def __init__(self, features: int) -> None:
        random = np.random.default_rng(7)
        self.features = random.normal(0, 1, (CAPACITY, features)).astype(np.float32)
        self.table = random.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32)
        self.head = random.normal(0, 0.2, (VOCAB, HIDDEN)).astype(np.float32)

    def embed_tokens(self, ids: Sequence[int]) -> Tensor:
        tensor = Tensor((1, len(ids), HIDDEN), "float32", CPU)
        tensor.write(self.table[list(ids)])
        return tensor

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        return hidden.read().reshape(-1, HIDDEN)[first : first + count] @ self.head.T


class Rounds:
    """A drafter over exported graphs beside the reference; the first `first` tokens have rows from the start."""

    def __init__(self, made: Exported, reference: DFlashReference, heads: MarkovReference, ids=None) -> None:
        config = made.draft.config
        self.facts = neural_facts(config, ExportPlan("fp32"), None)
        self.table = Table(self.facts.feature_size)
        self.reference, self.heads, self.ids = reference, heads, ids
        ends, table = made.sessions, self.table
        self.head = TargetHead(table)
        if "head" in ends:
            self.head = OwnHead(Scorer(ends["head"], config.draft_vocab_size), ids, VOCAB)
        rule = MaskRule(self.facts.causal, self.facts.sliding_causal, self.facts.sliding_window)
        kept = {role: session for role, session in ends.items() if role != "markov"}
        shape = CacheShape(self.facts.layers, self.facts.kv_heads, self.facts.head_dim)
        parts = DraftParts(
            name="dspark",
            passes=DraftPasses(kept, shape, rule, self.facts.max_positions),
            pending=PendingRows(self.facts.feature_size, "float32"),
            pick=lambda rows: (rows.taps,),
            embedding=Embedder(ends["embed"]) if "embed" in ends else table,
            head=self.head,
            max_positions=self.facts.max_positions,
        )
        reader = MarkovReader(self.head, ends["markov"], least_kept=0.0)
        self.plan = block_plan("dspark", self.facts)
        self.drafter = DFlash(parts, self.plan, reader, HIDDEN)

    def errors(self, first: int) -> list[float]:
        """The largest error of log probabilities in each round."""
        self.drafter.reset()
        committed, found = [int(token) for token in np.arange(first) % 300], []
        self.drafter.observe(committed)
        self._verify(committed, 0, (), 5)
        for index, accepted in enumerate(ACCEPTED):
            known = len(committed) - 1
            context = DraftContext(SamplingParams(temperature=1.0), NoiseKey(3), index)
            proposal = self.drafter.propose(committed, BLOCK, context)
            assert len(proposal.tokens) == self.plan.most
            ids = np.arange(VOCAB) if self.ids is None else self.ids
            expected = self._expected(known, committed[-1], proposal.tokens)
            errors = [np.log(law.probs_of(ids)) - row for law, row in zip(proposal.laws, expected, strict=True)]
            found.append(float(np.abs(errors).max()))
            self._verify(committed, known, proposal.tokens, accepted)
        return found

    def _verify(self, committed: list[int], start: int, drafted: Sequence[int], accepted: int) -> None:
        """A pass of the target over tokens from `start` on and drafted ones, and what is committed after it."""
        rows = self.table.features[start : len(committed) + len(drafted)]
        self.drafter.watch(start, PassRows(np.zeros((len(rows), HIDDEN), np.float32), rows))
        committed += [*drafted[:accepted], (7 * len(committed) + 11) % 300]
        self.drafter.observe(committed)

    def _expected(self, known: int, anchor: int, drafted: Sequence[int]) -> list[np.ndarray]:
        block = [anchor] + [310] * (BLOCK - 1)
        own = self.reference.tensors.get("embed_tokens.weight")
        embeds = torch.from_numpy(self.table.table[block]) if own is None else own[block]
        hidden = self.reference.hidden(torch.from_numpy(self.table.features[:known]), embeds)[self.plan.first :]
        if "lm_head.weight" in self.reference.tensors:
            logits = self.reference.logits(hidden)
        else:
            logits = hidden @ torch.from_numpy(self.table.head).T
        corrected = self.heads.corrected(hidden, logits, anchor, drafted)
        return list(corrected.double().log_softmax(-1).numpy())


def heads_in(reference: DFlashReference) -> MarkovReference:
    return MarkovReference({name: value for name, value in reference.tensors.items() if "head." in name})


def rounds(tmp_path: Path, own_vocab: int | None = None, layout=specforge, **own) -> Rounds:
    source = write_dspark(tmp_path / "source", layout(**own), own_vocab=own_vocab)
    made = export(read_dspark(source, target_config()), tmp_path / "out", ExportPlan("fp32"))
    reference = load_zlab(source, [FULL] * 3)
    ids = np.flatnonzero(vocabulary_map(own_vocab, 0)["t2d"]) if own_vocab else None
    return Rounds(made, reference, heads_in(reference), ids)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_with_partial_acceptance(kind: str, tmp_path: Path):
    played = rounds(tmp_path, **KINDS[kind])
    assert played.plan.most == BLOCK - (kind == "row_0_discarded")
    for first in (1, 17, 300):
        error = max(played.errors(first))
        print(f"{kind}: context {first}, largest error {error:.1e}")
        assert error <= PROMISE, (kind, first)


@pytest.mark.parametrize("layout", [specforge, deepspec])
def test_rounds_over_a_vocabulary_of_the_drafts_own(layout, tmp_path: Path):
    played = rounds(tmp_path, own_vocab=120, layout=layout, markov_head_type="gated")
    for first in (1, 17, 300):
        assert max(played.errors(first)) <= PROMISE


def test_rounds_of_a_speculators_checkpoint(tmp_path: Path):
    source = write_dspark_speculators(tmp_path / "source")
    made = export(read_dspark_speculators(source, target_config()), tmp_path / "out", ExportPlan("fp32"))
    reference = load_speculators(source, [SLIDING_CAUSAL, FULL, SLIDING_CAUSAL])
    played = Rounds(made, reference, heads_in(reference), np.flatnonzero(vocabulary_map(120, 0)["t2d"]))
    for first in (1, 17, 300):
        assert max(played.errors(first)) <= PROMISE


def test_rounds_of_a_gguf_file(tmp_path: Path):
    draft = read_dspark_gguf(write_dspark_gguf(tmp_path / "draft.gguf"), target_config())
    made = export(draft, tmp_path / "out", ExportPlan("fp32"))
    reference = load_zlab(write_dspark(tmp_path / "source"), [FULL] * 3)
    played = Rounds(made, reference, heads_in(reference))
    for first in (1, 17, 300):
        assert max(played.errors(first)) <= PROMISE


@pytest.mark.parametrize("shift", ["code", "row"])
def test_a_wrong_token_before_or_a_wrong_row_is_noticed(shift: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    played = rounds(tmp_path, markov_head_type="gated")
    look = MarkovReader._look
    wrong = {
        "code": lambda self, hidden, row, before: look(self, hidden, row, (before + 1) % VOCAB),
        "row": lambda self, hidden, row, before: look(self, hidden, (row + 1) % BLOCK, before),
    }
    monkeypatch.setattr(MarkovReader, "_look", wrong[shift])
    assert min(played.errors(17)) > 0.03
