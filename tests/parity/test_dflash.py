"""DFlash graphs give an independent torch implementation's results, round after round, whatever was cached before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from draft_checkpoints_dflash import (
    DFLASH2,
    HIDDEN,
    VARIANTS,
    VOCAB,
    target_config,
    write_dflash,
    write_dflash_gguf,
    write_speculators,
)
from reference_dflash import DFlashReference, LayerRules, load_speculators, load_zlab

from oxidize.export.drafts.base import DraftCheckpoint, neural_facts, write_draft_graphs
from oxidize.export.drafts.dflash2 import read_dflash2
from oxidize.export.drafts.dflash_gguf import read_dflash_gguf
from oxidize.export.drafts.dflash_graph import dflash_graphs
from oxidize.export.drafts.dflash_hf import read_dflash
from oxidize.export.drafts.dflash_speculators import read_dflash_speculators
from oxidize.export.plan import ExportPlan
from oxidize.runtime.manifest import NeuralDraft

PROMISE = 1e-4  # of float32, where values are about 1
WRONG = 0.03  # what a mutation has to reach
CAPACITY = 384
# What void cache rows hold. ONNX Runtime masks by adding the lowest number, so at float16 products have to stay below.
POISON = {"float32": 3e4, "float16": 1e3}
ACCEPTED = (0, 3, 7, 1, 5, 2)  # draft tokens kept in each round
FULL, SLIDING, SLIDING_CAUSAL = LayerRules(False, None), LayerRules(False, 24), LayerRules(True, 24)
RULES = {
    "qwen3": [FULL] * 3,
    "llama31": [FULL] * 3,
    "one_layer": [FULL],
    "qwen35": [SLIDING_CAUSAL, FULL, SLIDING_CAUSAL],
    "use_swa": [SLIDING] * 3,
    "is_causal": [SLIDING_CAUSAL, LayerRules(True, None), SLIDING_CAUSAL],
    "all_sliding_not_causal": [SLIDING] * 3,
    "bias": [FULL] * 3,
}


@dataclass(frozen=True)
class Mutation:
    """A way of feeding a draft wrongly."""

    tap_shift: int = 0
    block_shift: int = 0
    mask_shift: int = 0


RIGHT = Mutation()


class Rounds:
    """Rounds over one text of random taps: a plain session beside the reference that computes all from scratch."""

    def __init__(self, draft: DraftCheckpoint, plan: ExportPlan, folder: Path, capacity: int = CAPACITY) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        entries = write_draft_graphs(draft, dflash_graphs(draft.config, plan.dtype), plan, folder)
        assert draft.weights.unread() == []
        self.sessions = {entry.role: _session(folder / entry.file) for entry in entries}
        self.contract = entries[0].contract
        self.config, self.capacity, self.dtype = draft.config, capacity, np.dtype(plan.dtype)
        self.facts: NeuralDraft = neural_facts(draft.config, plan, None)
        self.poison = POISON[plan.dtype]
        random = np.random.default_rng(7)
        self.features = random.normal(0, 1, (capacity, self.facts.feature_size)).astype(np.float32)
        self.table = random.normal(0, 1, (VOCAB, self.facts.hidden_size)).astype(np.float32)
        self.head = random.normal(0, 0.1, (VOCAB, self.facts.hidden_size)).astype(np.float32)
        axes = {"B": 1, "C": capacity}
        self.cache = {
            spec.name: np.full([axes.get(dim, dim) for dim in spec.shape], self.poison, spec.dtype)
            for spec in self.contract.inputs
            if spec.name.startswith("past_key_values")
        }

    def errors(self, reference: DFlashReference, first: int, mutation: Mutation = RIGHT) -> list[tuple[float, float]]:
        """The largest errors of hidden states and logits in each round, of a text with `first` tokens of context."""
        found = []
        for known, got in self.played(first, mutation):
            block = torch.from_numpy(self._block(known % 300, RIGHT))
            expected = reference.hidden(torch.from_numpy(self.features[:known]), block)
            found.append(self._compare(got, expected, reference))
        return found

    def played(self, first: int, mutation: Mutation = RIGHT) -> Iterator[tuple[int, np.ndarray]]:
        """Of each round: how many tokens its context has, and the hidden states of its block."""
        known, start = first, 0
        for accepted in ACCEPTED:
            yield known, self._round(start, known, self._block(known % 300, mutation), mutation)
            start, known = known, known + accepted + 1

    def _compare(self, got: np.ndarray, expected: torch.Tensor, reference: DFlashReference) -> tuple[float, float]:
        if self.config.draft_vocab_size is not None:
            return 0.0, float(np.abs(got - reference.logits(expected).numpy()).max())
        hidden = expected.numpy()
        return float(np.abs(got - hidden).max()), float(np.abs((got - hidden) @ self.head.T).max())

    def _block(self, anchor: int, mutation: Mutation) -> np.ndarray:
        """Embeddings [S,H] of the anchor and the masks."""
        mask = self.config.mask_token_id + mutation.mask_shift
        ids = np.array([anchor] + [mask] * (self.config.block_size - 1), np.int64)
        if "embed" not in self.sessions:
            return self.table[ids]
        return self.sessions["embed"].run(None, {"input_ids": ids[None]})[0][0]

    def _round(self, start: int, known: int, block: np.ndarray, mutation: Mutation) -> np.ndarray:
        features = self.features[start:known]
        if mutation.tap_shift:
            features = np.roll(features, mutation.tap_shift * self.config.target_hidden_size, axis=1)
        feeds = {
            "features": features[None].astype(self.dtype),
            "inputs_embeds": block[None].astype(self.dtype),
            "context_positions": np.arange(start, known)[None],
            "position_ids": np.arange(known, known + len(block))[None] + mutation.block_shift,
            "write_indices": np.array([start]),
            **self._masks(known, len(block)),
            **self.cache,
        }
        names = [spec.name for spec in self.contract.outputs]
        outputs = dict(zip(names, self.sessions["draft"].run(names, feeds), strict=True))
        for name in self.cache:
            self.cache[name] = outputs[name.replace("past_key_values", "present")].copy()
            self.cache[name][:, :, known:] = self.poison  # the block's rows are void after the round
        hidden = outputs["hidden"][0]
        if "head" not in self.sessions:
            return hidden
        return self.sessions["head"].run(None, {"hidden": hidden, "rows": np.arange(len(block))})[0]

    def _masks(self, known: int, size: int) -> dict[str, np.ndarray]:
        rows, columns = np.arange(known, known + size)[:, None], np.arange(self.capacity)[None]
        valid = np.broadcast_to(columns < known + size, (size, self.capacity))  # [S,C]
        masks = {"attn_mask": valid & (columns <= rows) if self.facts.causal else valid}
        if self.facts.sliding_window is not None:
            seen = valid & (columns > rows - self.facts.sliding_window)
            masks["attn_mask_sliding"] = seen & (columns <= rows) if self.facts.sliding_causal else seen
        return {name: np.ascontiguousarray(mask)[None, None] for name, mask in masks.items()}


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def zlab(folder: Path, variant: str, plan: ExportPlan | None = None, **how) -> tuple[Rounds, DFlashReference]:
    source = write_dflash(folder / "source", variant, **how)
    draft = read_dflash(source, target_config())
    return Rounds(draft, plan or ExportPlan("fp32"), folder / "out"), load_zlab(source, RULES[variant])


def worst(errors: Sequence[tuple[float, float]]) -> float:
    return max(max(pair) for pair in errors)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_over_several_rounds(variant: str, tmp_path: Path):
    rounds, reference = zlab(tmp_path, variant, dtype="float32" if variant == "qwen3" else "bfloat16")
    for first in (1, 17, 300):
        error = worst(rounds.errors(reference, first))
        print(f"{variant}: context {first}, largest error {error:.1e}")
        assert error <= PROMISE, (variant, first)


def test_a_prompt_of_one_token_has_no_context_yet(tmp_path: Path):
    rounds, reference = zlab(tmp_path, "qwen35")
    assert worst(rounds.errors(reference, 0)) <= PROMISE


def test_a_draft_with_its_own_vocabulary(tmp_path: Path):
    rounds, reference = zlab(tmp_path, "qwen3", own_vocab=120)
    assert set(rounds.sessions) == {"draft", "embed", "head"}
    assert worst(rounds.errors(reference, 17)) <= PROMISE
    ids = np.array([[0, 7, VOCAB - 1]], np.int64)
    (rows,) = rounds.sessions["embed"].run(None, {"input_ids": ids})
    np.testing.assert_array_equal(rows[0], reference.tensors["embed_tokens.weight"][ids[0]].numpy())


def test_a_speculators_checkpoint(tmp_path: Path):
    source = write_speculators(tmp_path / "source")
    draft = read_dflash_speculators(source, target_config())
    rounds = Rounds(draft, ExportPlan("fp32"), tmp_path / "out")
    assert worst(rounds.errors(load_speculators(source, RULES["qwen35"]), 17)) <= PROMISE


@pytest.mark.parametrize("variant", ["qwen3", "qwen35"])
def test_a_gguf_file_is_the_checkpoint_it_was_converted_from(variant: str, tmp_path: Path):
    draft = read_dflash_gguf(write_dflash_gguf(tmp_path / "draft.gguf", variant), target_config())
    rounds = Rounds(draft, ExportPlan("fp32"), tmp_path / "out")
    reference = load_zlab(write_dflash(tmp_path / "source", variant), RULES[variant])
    for first in (1, 17):
        assert worst(rounds.errors(reference, first)) <= PROMISE


@pytest.mark.parametrize("variant", ["qwen3", "qwen35"])
@pytest.mark.parametrize(
    "mutation",
    [Mutation(tap_shift=1), Mutation(block_shift=1), Mutation(mask_shift=-1)],
    ids=["taps", "positions", "mask"],
)
def test_wrong_taps_positions_or_masks_are_noticed(mutation: Mutation, variant: str, tmp_path: Path):
    rounds, reference = zlab(tmp_path, variant)
    assert min(max(pair) for pair in rounds.errors(reference, 17, mutation)) > WRONG


def test_half_precision_takes_taps_as_large_as_it_has_numbers(tmp_path: Path):
    """hidden_norm divides the size away again, so large taps give what their directions give."""
    rounds, reference = zlab(tmp_path, "qwen3", ExportPlan("fp16"))
    rounds.features *= 60000 / np.abs(rounds.features).max()
    rounds.features = rounds.features.astype(np.float16).astype(np.float32)
    fc = np.abs(rounds.features @ reference.tensors["fc.weight"].numpy().T)
    assert fc.max() > np.finfo(np.float16).max
    errors = rounds.errors(reference, 17)
    assert worst(errors) <= 0.02
    # The CPU computes more exactly than the graph asks for, so what a GPU would do has to be read from the types.
    inferred = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "out/draft.onnx", load_external_data=False))
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    assert types["fc"] == types["hidden_norm"] == onnx.TensorProto.FLOAT
    assert types["hidden_norm.cast"] == types["layers.0.self_attn.rows"] == onnx.TensorProto.FLOAT16


@pytest.mark.parametrize("plan", [ExportPlan("int4"), ExportPlan("int4", half_activations=True)], ids=["int4", "int4h"])
def test_four_bits_stay_near(plan: ExportPlan, tmp_path: Path):
    rounds, reference = zlab(tmp_path, "qwen3", plan)
    assert worst(rounds.errors(reference, 17)) <= 1.0
    own, reference = zlab(tmp_path, "qwen3", plan, own_vocab=120)
    assert worst(own.errors(reference, 17)) <= 1.0
    second, reference = dflash2(tmp_path / "second", plan, selector_rank=32)
    check_scores(second, reference, 7, 0.2)


def test_what_joins_the_taps_has_eight_bits_whatever_the_layers_have(tmp_path: Path):
    zlab(tmp_path, "qwen3", ExportPlan("int4", int8_parts=()))
    nodes = onnx.load(tmp_path / "out/draft.onnx", load_external_data=False).graph.node
    bits = {
        node.name: attribute.i
        for node in nodes
        for attribute in node.attribute
        if (node.op_type, attribute.name) == ("MatMulNBits", "bits")
    }
    assert bits.pop("fc") == 8 and set(bits.values()) == {4}


def test_the_widths_of_target_and_draft_may_differ(tmp_path: Path):
    """fc absorbs another width where the draft has embedding and head of its own."""
    wide = {**VARIANTS["qwen3"], "target_hidden_size": 2 * HIDDEN}
    source = write_dflash(tmp_path / "source", wide, own_vocab=120)
    draft = read_dflash(source, target_config(hidden_size=2 * HIDDEN))
    rounds = Rounds(draft, ExportPlan("fp32"), tmp_path / "out")
    assert rounds.facts.feature_size == 3 * 2 * HIDDEN
    assert worst(rounds.errors(load_zlab(source, RULES["qwen3"]), 17)) <= PROMISE


def dflash2(folder: Path, plan: ExportPlan | None = None, **own) -> tuple[Rounds, DFlashReference]:
    config = {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], **own}}
    source = write_dflash(folder / "source", config)
    rounds = Rounds(read_dflash2(source, target_config()), plan or ExportPlan("fp32"), folder / "out")
    return rounds, load_zlab(source, RULES["all_sliding_not_causal"])


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_dflash2_convolutions_over_several_rounds(taps: int, tmp_path: Path):
    rounds, reference = dflash2(tmp_path, conv_kernel_size=taps)
    for first in (1, 17, 300):
        error = worst(rounds.errors(reference, first))
        print(f"dflash2, {taps} taps: context {first}, largest error {error:.1e}")
        assert error <= PROMISE


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", PROMISE), ("fp16", 0.02)])
@pytest.mark.parametrize("rows", [1, 7])
def test_dflash2_scores_every_pair_of_neighbours(rows: int, precision: str, tolerance: float, tmp_path: Path):
    check_scores(*dflash2(tmp_path, ExportPlan(precision)), rows, tolerance)


def selected(rounds: Rounds, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """What a select graph is fed with, and the tokens [N,K] and scores [N,K,K] it gives."""
    random = np.random.default_rng(3)
    hidden = random.normal(0, 1, (rows, HIDDEN)).astype(rounds.dtype)
    logits = random.normal(0, 5, (rows, VOCAB)).astype(np.float32)
    feeds = {"hidden": hidden, "logits": logits, "anchor": np.array([42])}
    return feeds, *rounds.sessions["select"].run(None, feeds)


def check_scores(rounds: Rounds, reference: DFlashReference, rows: int, tolerance: float) -> None:
    feeds, tokens, scores = selected(rounds, rows)
    anchor = feeds["anchor"][0]
    known = torch.from_numpy(feeds["hidden"].astype(np.float32)), torch.from_numpy(feeds["logits"])
    for row in range(rows):
        before = tokens[row - 1] if row else [anchor] * tokens.shape[1]
        for index, token in enumerate(before):
            expected_tokens, expected = reference.pair_scores(*known, row, int(token))
            np.testing.assert_array_equal(tokens[row], expected_tokens.numpy())
            np.testing.assert_allclose(scores[row, index], expected.numpy(), atol=tolerance)


def test_dflash2_from_gguf(tmp_path: Path):
    draft = read_dflash_gguf(write_dflash_gguf(tmp_path / "draft.gguf", DFLASH2), target_config())
    rounds = Rounds(draft, ExportPlan("fp32"), tmp_path / "out")
    reference = load_zlab(write_dflash(tmp_path / "source", DFLASH2), RULES["all_sliding_not_causal"])
    for first in (1, 17, 300):
        assert worst(rounds.errors(reference, first)) <= PROMISE
    check_scores(rounds, reference, 7, PROMISE)


def with_exact_products(rounds: Rounds, folder: Path) -> None:
    """Let MatMulNBits leave activations as they are, which it rounds to 8 bits because that is faster."""
    for role in rounds.sessions:
        model = onnx.load(folder / f"{role}.onnx", load_external_data=False)
        for node in model.graph.node:
            kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend(kept)
        onnx.save(model, folder / f"{role}.onnx")
        rounds.sessions[role] = _session(folder / f"{role}.onnx")


@pytest.mark.parametrize(("precision", "rounded"), [("fp32", 1e-4), ("int4", 0.5)])
@pytest.mark.parametrize("rank", [12, 32])  # a codebook is in blocks if there are whole ones
def test_dflash2_graphs_of_both_profiles_agree(rank: int, precision: str, rounded: float, tmp_path: Path):
    ort_rounds, reference = dflash2(tmp_path / "ort", ExportPlan(precision, ("ort",)), selector_rank=rank)
    std_rounds, _ = dflash2(tmp_path / "std", ExportPlan(precision, ("std",)), selector_rank=rank)

    def difference() -> float:
        _, tokens, scores = selected(ort_rounds, 7)
        _, same_tokens, same_scores = selected(std_rounds, 7)
        np.testing.assert_array_equal(tokens, same_tokens)
        pairs = [(scores, same_scores)]
        for first in (1, 17, 300):
            both = zip(ort_rounds.played(first), std_rounds.played(first), strict=True)
            pairs += [(one, other) for (_, one), (_, other) in both]
        return max(float(np.abs(one - other).max()) for one, other in pairs)

    assert difference() <= rounded
    with_exact_products(ort_rounds, tmp_path / "ort/out")
    assert difference() <= 1e-4
    check_scores(std_rounds, reference, 7, 0.1 if precision == "int4" else PROMISE)
    kinds = {node.op_type for node in onnx.load(tmp_path / "ort/out/select.onnx").graph.node}
    assert ("GatherBlockQuantized" in kinds) == (precision == "int4" and rank == 32)
