"""The two profiles of a draft's graphs compute the same, at every precision.

At 4 bits up to what MatMulNBits loses by rounding its input to 8 bits, which is faster, and which it is told not to do
here: what is left are the weights, and these have to be the same.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from draft_checkpoints_dflash import target_config, write_dflash
from draft_checkpoints_eagle import EAGLE_VARIANTS, TARGET, write_eagle
from draft_checkpoints_mtp import head_weights, write_mtp_checkpoint

from oxidize.export.drafts.base import DraftCheckpoint, write_draft_graphs
from oxidize.export.drafts.dflash_hf import read_dflash
from oxidize.export.drafts.eagle_hf import open_eagle_hf
from oxidize.export.drafts.eagle_speculators import open_eagle_speculators
from oxidize.export.drafts.mtp import split_mtp
from oxidize.export.drafts.write import _GRAPHS
from oxidize.export.plan import ExportPlan
from oxidize.export.source import open_source
from oxidize.runtime.contracts import GraphContract, TensorSpec

PROMISE = 1e-3
HALF_STEPS = 4 * 2**-10  # of float16 beside its largest value, where the two round in different places
CAPACITY, BLOCK = 24, 5
READS = ((0, 7), (7, 1), (8, 3))  # (first row, rows) of the target that are read
CHAINED = 3  # rows behind them that the draft makes of its own
PRECISIONS = {
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "int4": {"precision": "int4"},
    "int4_half": {"precision": "int4", "half_activations": True},
    "int4_plain": {"precision": "int4", "zero_points": False, "int8_parts": ()},
}
MTP = {  # variant, layout, gated, tables
    "mtp": ("qwen3", "mtp", True, "none"),
    "mtp_own_tables": ("qwen3", "mtp", True, "own"),
    "mtp_qwen2": ("qwen2", "mtp", False, "none"),
    "mtp_llama": ("llama2", "nextn", False, "none"),
    "mtp_bias": ("llama_bias", "nextn", False, "own"),
}


class Side:
    """The graphs of one profile as plain sessions over a cache of their own."""

    def __init__(self, draft: DraftCheckpoint, plan: ExportPlan, folder: Path) -> None:
        folder.mkdir(parents=True)
        entries = write_draft_graphs(draft, _GRAPHS[draft.config.kind](draft.config, plan.dtype), plan, folder)
        assert draft.weights.unread() == []
        assert {entry.profile for entry in entries} == set(plan.profiles)
        self.contracts = {entry.role: entry.contract for entry in entries}
        self.window, self.dtype = draft.config.model.sliding_window, np.dtype(plan.dtype)
        self.files = [folder / entry.file for entry in entries]
        self._sessions = {entry.role: _session(folder / entry.file) for entry in entries}
        self._cache = {
            spec.name: np.zeros(_sizes(spec, {"B": 1, "C": CAPACITY}), spec.dtype)
            for spec in self.contracts["draft"].inputs
            if spec.name.startswith("past_key_values")
        }

    def run(self, role: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Of the feeds, those that this graph has; its outputs but the cache, which is kept."""
        given = {**feeds, **self._cache}
        named = {spec.name: given[spec.name].astype(spec.dtype) for spec in self.contracts[role].inputs}
        names = [spec.name for spec in self.contracts[role].outputs]
        outputs = {}
        for name, values in zip(names, self._sessions[role].run(names, named), strict=True):
            kept, key = name.startswith("present."), name.replace("present.", "past_key_values.")
            (self._cache if kept else outputs)[key] = np.array(values)
        return outputs

    def operators(self) -> Counter[str]:
        nodes = [node for file in self.files for node in onnx.load(file, load_external_data=False).graph.node]
        return Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes)


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def random_feeds(contract: GraphContract, rows: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """What a graph reads beside positions and caches: `rows` rows, and a block of BLOCK where it reads both."""
    axes = {"B": 1, "T": rows, "S": BLOCK if _has(contract, "context_positions") else rows, "M": rows, "N": rows}
    feeds = {}
    for spec in contract.inputs:
        if spec.name in ("features", "fused", "inputs_embeds", "hidden"):
            feeds[spec.name] = random.normal(0, 1, _sizes(spec, axes))
    return feeds | {"rows": np.arange(rows), "input_ids": random.integers(0, 300, (1, rows))}


def places(contract: GraphContract, start: int, rows: int, window: int | None) -> dict[str, np.ndarray]:
    """Positions and masks of a pass that begins at row `start`."""
    block = np.arange(start, start + rows)
    context = {}
    if _has(contract, "context_positions"):
        context, block = {"context_positions": block[None]}, np.arange(start + rows, start + rows + BLOCK)
    columns = np.arange(CAPACITY)
    mask = columns <= block[:, None]
    near = mask & (columns > block[:, None] - (window or CAPACITY))
    masks = {"attn_mask": mask[None, None], "attn_mask_sliding": near[None, None]}
    return {"position_ids": block[None], "write_indices": np.array([start]), **masks, **context}


def _sizes(spec: TensorSpec, axes: dict[str, int]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else axes[dim] for dim in spec.shape)


def _has(contract: GraphContract, name: str) -> bool:
    return any(spec.name == name for spec in contract.inputs)


def differences(one: Side, other: Side) -> dict[str, float]:
    """The largest difference of each output, by "role.output"; of float16 beside the largest value."""
    assert one.contracts == other.contracts
    found: dict[str, float] = {}

    def both(role: str, *feeds: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        made = [side.run(role, each) for side, each in zip((one, other), feeds, strict=True)]
        for name, values in made[0].items():
            assert np.isfinite(values).all() and np.abs(values).max() > 0.1, (role, name)
            error = np.abs(values.astype(np.float32) - made[1][name].astype(np.float32)).max()
            scale = max(1, np.abs(values).max()) if one.dtype == np.float16 else 1
            found[f"{role}.{name}"] = max(float(error / scale), found.get(f"{role}.{name}", 0))
        return made

    random = np.random.default_rng(11)
    for role, contract in one.contracts.items():
        for start, rows in READS:
            feeds = random_feeds(contract, rows, random) | places(contract, start, rows, one.window)
            made = both(role, feeds, feeds)
        start, rows = READS[-1]
        for place in range(start + rows, start + rows + CHAINED) if "recycled" in made[0] else ():
            feeds = random_feeds(contract, 1, random) | places(contract, place, 1, one.window)
            made = both(role, *({**feeds, "fused": outputs["recycled"][:, -1:]} for outputs in made))
    return found


def opened_eagle(name: str, folder: Path) -> DraftCheckpoint:
    layout = EAGLE_VARIANTS[name].layout
    return (open_eagle_hf if layout == "midlayer" else open_eagle_speculators)(write_eagle(folder, name), TARGET)


def opened_mtp(name: str, folder: Path) -> DraftCheckpoint:
    variant, layout, gated, tables = MTP[name]
    head = head_weights(variant, layout, seed=3, tables=tables, gated=gated)
    _, draft = split_mtp(open_source(str(write_mtp_checkpoint(folder, variant, head))))
    assert draft is not None
    return draft


def opened_dflash(name: str, folder: Path) -> DraftCheckpoint:
    own_vocab = 96 if name == "qwen35" else None
    return read_dflash(write_dflash(folder, name, own_vocab=own_vocab), target_config())


Open = Callable[[str, Path], DraftCheckpoint]
CASES: dict[str, tuple[Open, str]] = {
    **{f"eagle3_{name}": (opened_eagle, name) for name in EAGLE_VARIANTS},
    **{name: (opened_mtp, name) for name in MTP},
    **{f"dflash_{name}": (opened_dflash, name) for name in ("qwen3", "qwen35", "bias")},
}


def sides(case: str, precision: str, folder: Path) -> tuple[Side, Side]:
    """Profile "ort" and profile "std"."""
    opened, name = CASES[case]
    made = []
    for profile in ("ort", "std"):
        draft = opened(name, folder / profile / "source")
        made.append(Side(draft, ExportPlan(profiles=(profile,), **PRECISIONS[precision]), folder / profile / "out"))
    return made[0], made[1]


def possible(case: str, precision: str) -> bool:
    """Not at 4 bits where the width is not in whole blocks: `ExportPlan.check` refuses that."""
    return case != "eagle3_eagle31" or not precision.startswith("int4")


@pytest.mark.parametrize(
    ("case", "precision"),
    [(case, precision) for case in CASES for precision in PRECISIONS if possible(case, precision)],
)
def test_both_profiles_agree(case: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oxidize.export.profile_ort.INT8_COMPUTE", 1)
    fast, plain = sides(case, precision, tmp_path)
    found = differences(fast, plain)
    print(case, precision, {name: f"{error:.1e}" for name, error in found.items()})
    quantised = {name for name in fast.operators() if name.startswith("com.microsoft")}
    assert quantised <= {"com.microsoft::MatMulNBits", "com.microsoft::GatherBlockQuantized"}
    assert bool(quantised) == precision.startswith("int4")
    assert not [name for name in plain.operators() if "::" in name]
    assert max(found.values()) <= (HALF_STEPS if precision == "int4_half" else PROMISE)
