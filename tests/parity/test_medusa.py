"""Exported Medusa heads give what an independent torch implementation gives, in every layout and precision."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from checkpoints import write_hf_checkpoint
from draft_checkpoints_medusa import HIDDEN, VARIANTS, VOCAB, MedusaReference, Tensors, medusa_tensors, write_medusa

from oxidize.export.drafts.base import DraftCheckpoint, neural_facts, write_draft_graphs
from oxidize.export.drafts.medusa import read_medusa
from oxidize.export.drafts.medusa_graph import medusa_graphs
from oxidize.export.plan import ExportPlan
from oxidize.export.source import open_source

PROMISE = 1e-3
TOLERANCE = 1e-5  # what heads this small reach; logits are of size 10
ROWS = 12


@dataclass(frozen=True)
class Pair:
    """Opened heads, and the reference made of the same values."""

    draft: DraftCheckpoint
    reference: MedusaReference
    tensors: Tensors

    def export(self, folder: Path, plan: ExportPlan) -> "Exported":
        folder.mkdir()
        (entry,) = write_draft_graphs(self.draft, medusa_graphs(self.draft.config, plan.dtype), plan, folder)
        assert self.draft.weights.unread() == []
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = ort.InferenceSession(str(folder / entry.file), options, providers=["CPUExecutionProvider"])
        return Exported(session, entry.contract.inputs[0].dtype, self.draft, folder / entry.file)

    def expected(self, row: np.ndarray) -> np.ndarray:
        """[heads,V] over the rows that the heads have, or hidden [heads,H] where the target scores."""
        x = torch.from_numpy(row)
        if self.draft.config.draft_vocab_size is None:
            return self.reference.hidden(x).numpy()
        logits = self.reference.logits(x).numpy()
        return logits if self.draft.d2t is None else logits[:, self.draft.d2t]


@dataclass(frozen=True)
class Exported:
    """The graph of some heads as a plain session."""

    session: ort.InferenceSession
    dtype: str
    draft: DraftCheckpoint
    path: Path

    def run(self, row: np.ndarray) -> np.ndarray:
        (found,) = self.session.run(None, {"features": row[None, None].astype(self.dtype)})
        assert found.shape[0] == 1
        return found[0]


def make_pair(folder: Path, variant: str, **how) -> Pair:
    target = open_source(str(write_hf_checkpoint(folder / "target", "padded_vocab"))).config
    tensors = medusa_tensors(VARIANTS[variant], seed=2)
    draft = read_medusa(write_medusa(folder / "heads", variant, tensors=tensors, **how), target)
    return Pair(draft, MedusaReference(variant, tensors), tensors)


def rows() -> np.ndarray:
    """Normed rows, as the target's last norm leaves them."""
    made = np.random.default_rng(4).normal(0, 1, (ROWS, HIDDEN))
    return (made / np.sqrt((made**2).mean(1, keepdims=True))).astype(np.float32)


def worst(pair: Pair, exported: Exported) -> float:
    return max(float(np.abs(exported.run(row) - pair.expected(row)).max()) for row in rows())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout(variant: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, variant)
    exported = pair.export(tmp_path / "out", ExportPlan("fp32"))
    made, heads = exported.run(rows()[0]), VARIANTS[variant].heads
    own = {"target": HIDDEN}.get(VARIANTS[variant].output, VARIANTS[variant].truncated or VOCAB)
    assert made.shape == (heads, own) and made.dtype == np.float32
    error = worst(pair, exported)
    print(f"{variant}: largest error {error:.1e}")
    assert error <= TOLERANCE < PROMISE


def test_each_head_has_numbers_of_its_own(tmp_path: Path) -> None:
    """A reference whose heads are swapped, or whose block does nothing, is far away."""
    pair = make_pair(tmp_path, "reference")
    exported = pair.export(tmp_path / "out", ExportPlan("fp32"))

    def with_names(names: Mapping[str, str]) -> Pair:
        tensors = {names.get(name, name): each for name, each in pair.tensors.items()}
        return replace(pair, reference=MedusaReference("reference", tensors))

    for part in ("0.linear.weight", "0.linear.bias", "1.weight"):
        assert worst(with_names({f"0.{part}": f"1.{part}", f"1.{part}": f"0.{part}"}), exported) > 10 * PROMISE, part
    still = {name: 0 * each if ".linear." in name else each for name, each in pair.tensors.items()}
    assert worst(replace(pair, reference=MedusaReference("reference", still)), exported) > 10 * PROMISE


@pytest.mark.parametrize("variant", ["reference", "version2", "vllm_one", "vllm_map"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int4"])
def test_both_profiles_agree(variant: str, precision: str, tmp_path: Path) -> None:
    """In float32 and float16 to the last digits; MatMulNBits also rounds activations, to 8 bits."""
    graphs = []
    for profile in ("ort", "std"):
        pair = make_pair(tmp_path / profile, variant)
        exported = pair.export(tmp_path / profile / "out", ExportPlan(precision, (profile,)))
        domains = {node.domain for node in onnx.load(exported.path, load_external_data=False).graph.node}
        assert domains == ({"", "com.microsoft"} if (precision, profile) == ("int4", "ort") else {""})
        graphs.append(exported)
    apart = max(float(np.abs(graphs[0].run(row) - graphs[1].run(row)).max()) for row in rows())
    print(f"{variant}, {precision}: ort and std {apart:.1e} apart")
    assert apart <= (0.15 if precision == "int4" else PROMISE)


@pytest.mark.parametrize("variant", ["reference", "no_blocks", "version2", "vllm_one"])
def test_half_precision_stays_near(variant: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, variant)
    exported = pair.export(tmp_path / "out", ExportPlan("fp16"))
    assert worst(pair, exported) <= 0.02


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_output_matrices_are_as_precise_as_a_head(bits: int, half: bool, tmp_path: Path) -> None:
    """Logits are off by what their bits explain, so blocks, which have 8, are not the coarser part."""
    pair = make_pair(tmp_path, "reference")
    plan = ExportPlan("int4", ("std",), head_bits=bits, half_activations=half)
    exported = pair.export(tmp_path / "out", plan)
    error = worst(pair, exported)
    print(f"head_bits {bits}: largest error {error:.2f}")
    assert error <= {4: 1.2, 8: 0.12}[bits]
    kinds = {
        tensor.name: tensor.data_type for tensor in onnx.load(exported.path, load_external_data=False).graph.initializer
    }
    stored = {name: kind for name, kind in kinds.items() if name.endswith(".packed")}
    eight, four = onnx.TensorProto.UINT8, onnx.TensorProto.UINT4
    assert len(stored) == 2 * VARIANTS["reference"].heads
    for name, kind in stored.items():
        assert kind == (eight if "blocks" in name or bits == 8 else four), name


def test_one_matrix_of_all_heads_is_stored_once(tmp_path: Path) -> None:
    sizes = {}
    for variant in ("vllm", "vllm_one", "version2"):
        exported = make_pair(tmp_path / variant, variant).export(tmp_path / variant / "out", ExportPlan("fp32"))
        sizes[variant] = exported.path.with_name("weights.bin").stat().st_size
    table = VOCAB * HIDDEN * 4
    assert 3 * table <= sizes["vllm"] < 4 * table
    assert table <= sizes["vllm_one"] < 2 * table
    assert sizes["version2"] < table


def test_what_the_manifest_says(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "reference")
    facts = neural_facts(pair.draft.config, ExportPlan("fp32"), None)
    assert (facts.layers, facts.kv_heads, facts.head_dim, facts.taps) == (0, 0, 0, ())
    assert (facts.hidden_size, facts.feature_size, facts.block_size) == (HIDDEN, HIDDEN, 4)
    assert (facts.draft_vocab_size, facts.mask_token_id, facts.sliding_window) == (VOCAB, None, None)
