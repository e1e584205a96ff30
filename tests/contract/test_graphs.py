"""Contracts, versions and operators of the exported graphs, and where their weights lie.

Snapshots: `PYTHONPATH=tests python tests/contract/test_graphs.py` rewrites them; a change shows in review as a diff.
"""

import json
import sys
import tempfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint

from oxidize.export.build import ExportPlan, build_graphs
from oxidize.export.graph import graph_summary, saved_contract
from oxidize.export.source import open_source
from oxidize.runtime.contracts import TensorSpec
from oxidize.runtime.errors import UsageError
from oxidize.runtime.manifest import GraphEntry

SNAPSHOTS = Path(__file__).parent / "snapshots"
BOTH = ("ort", "std")
PLANS = {variant: (variant, ExportPlan("fp32", BOTH)) for variant in VARIANTS} | {
    "llama2.int4": ("llama2", ExportPlan("int4", BOTH)),
    "llama2.int4.half": ("llama2", ExportPlan("int4", half_activations=True)),
    "llama2.fp16": ("llama2", ExportPlan("fp16", BOTH)),
    "smollm2.int4.head4": ("smollm2", ExportPlan("int4", BOTH, head_bits=4)),
    "llama2.int4.narrow": ("llama2", ExportPlan("int4", BOTH, zero_points=False, int8_parts=())),
    "gemma3.taps": ("gemma3", ExportPlan("fp32", BOTH, taps=(0, 3))),
}
NODES_PER_LAYER = {"ort": 10, "std": 25}


def export(variant: str, plan: ExportPlan, folder: Path) -> tuple[GraphEntry, ...]:
    checkpoint = open_source(str(write_hf_checkpoint(folder / "source", variant)))
    (folder / "out").mkdir()
    return build_graphs(checkpoint.config, checkpoint.weights, plan, folder / "out")


def snapshot(entries: Sequence[GraphEntry], folder: Path) -> str:
    """Sorted JSON: what each graph file says about itself, one tensor a line."""
    graphs = {}
    for entry in entries:
        contract = saved_contract(folder / entry.file)
        facts = {"minimum_ort": entry.minimum_ort, "precision": entry.precision, "role": entry.role}
        tensors = {"inputs": [_line(spec) for spec in contract.inputs]}
        tensors["outputs"] = [_line(spec) for spec in contract.outputs]
        graphs[entry.file] = facts | tensors | graph_summary(folder / entry.file)
    return json.dumps(graphs, indent=1, sort_keys=True) + "\n"


def _line(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]"


@pytest.mark.parametrize("name", PLANS)
def test_graphs_equal_their_snapshot(name: str, tmp_path: Path):
    entries = export(*PLANS[name], tmp_path)
    assert snapshot(entries, tmp_path / "out") == (SNAPSHOTS / f"{name}.json").read_text()


def test_there_is_no_snapshot_without_a_plan():
    assert {path.stem for path in SNAPSHOTS.glob("*.json")} == set(PLANS)


@pytest.mark.parametrize("name", ["llama2", "llama2.int4", "llama2.int4.half", "llama2.fp16", "gemma3.taps"])
def test_onnx_runtime_sees_the_contract(name: str, tmp_path: Path):
    for entry in export(*PLANS[name], tmp_path):
        session = ort.InferenceSession(str(tmp_path / "out" / entry.file), providers=["CPUExecutionProvider"])
        for specs, values in (
            (entry.contract.inputs, session.get_inputs()),
            (entry.contract.outputs, session.get_outputs()),
        ):
            assert [spec.name for spec in specs] == [value.name for value in values]
            assert [spec.shape for spec in specs] == [tuple(value.shape) for value in values]


@pytest.mark.parametrize("name", ["llama2", "llama2.int4"])
def test_the_std_profile_has_no_contrib_operator_and_layers_stay_small(name: str, tmp_path: Path):
    entries = export(*PLANS[name], tmp_path)
    for entry in entries:
        summary = graph_summary(tmp_path / "out" / entry.file)
        contrib = [kind for kind in summary["operators"] if "::" in kind]
        assert not contrib or entry.profile == "ort"
        if entry.role == "body" and (entry.profile == "ort" or name == "llama2"):  # int4 in std is spelled out
            assert sum(summary["operators"].values()) <= 2 * NODES_PER_LAYER[entry.profile] + 1


def test_every_quantised_product_computes_in_int8(tmp_path: Path):
    """Without accuracy_level 4 MatMulNBits is several times slower on the CPU, a hundred times at 8 bits."""
    for entry in export("llama2", ExportPlan("int4"), tmp_path):
        for node in onnx.load_model(tmp_path / "out" / entry.file, load_external_data=False).graph.node:
            if node.op_type == "MatMulNBits":
                attributes = {item.name: item.i for item in node.attribute}
                assert (attributes["accuracy_level"], attributes["block_size"]) == (4, 32)


def places(folder: Path, file: str) -> dict[str, tuple[int, int]]:
    """(offset, length) of every external initializer."""
    graph = onnx.load_model(folder / file, load_external_data=False).graph
    found = {}
    for tensor in graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            data = {item.key: item.value for item in tensor.external_data}
            assert data["location"] == "weights.bin"
            found[tensor.name] = (int(data["offset"]), int(data["length"]))
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int4"])
def test_every_tensor_lies_once_page_aligned_in_one_file(precision: str, tmp_path: Path):
    entries = export("smollm2", ExportPlan(precision, BOTH), tmp_path)
    out = tmp_path / "out"
    spans = {span for entry in entries for span in places(out, entry.file).values()}
    assert all(offset % 4096 == 0 for offset, _ in spans)
    starts = sorted(spans)
    assert all(a + length <= b for (a, length), (b, _) in pairwise(starts))
    assert (out / "weights.bin").stat().st_size == sum(starts[-1])
    used = sum(length + -length % 4096 for _, length in starts)
    assert used >= (out / "weights.bin").stat().st_size  # no gaps but the padding
    tied = set(places(out, "embed.onnx").values()) & set(places(out, "head.onnx").values())
    assert len(tied) == (2 if precision == "int4" else 1)
    bodies = [set(places(out, entry.file).values()) for entry in entries if entry.role == "body"]
    assert bodies[0] <= set.union(*bodies[1:])


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_memory_is_bounded_by_the_largest_tensor(precision: str, tmp_path: Path):
    config = VARIANTS["llama2"] | {"vocab_size": 40000, "num_hidden_layers": 8, "intermediate_size": 8192}
    checkpoint = open_source(str(write_hf_checkpoint(tmp_path / "source", config)))
    largest = 40000 * 64 * 4
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    build_graphs(checkpoint.config, checkpoint.weights, ExportPlan(precision), tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * largest


def test_large_models_keep_their_down_projection_at_4_bits(tmp_path: Path):
    config = open_source(str(write_hf_checkpoint(tmp_path, "llama2"))).config
    large = replace(config, hidden_size=2048, intermediate_size=8192, layers=16)
    assert ExportPlan("int4").wide_parts(config) == ("qkv", "down")
    assert ExportPlan("int4").wide_parts(large) == ("qkv",)
    assert ExportPlan("int4", int8_parts=("o",)).wide_parts(large) == ("o",)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ExportPlan("int5"), "precision"),
        (ExportPlan("fp32", ("trt",)), "profiles"),
        (ExportPlan("fp32", ()), "profiles"),
        (ExportPlan("fp32", taps=(2,)), "taps must be layers 0 to 1"),
        (ExportPlan("fp32", max_positions=0), "max_positions"),
        (ExportPlan("int4", head_bits=5), "head_bits"),
        (ExportPlan("int4", int8_parts=("v",)), "int8_parts"),
        (ExportPlan("fp32", half_activations=True), "half_activations"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_written(plan: ExportPlan, said: str, tmp_path: Path):
    with pytest.raises(UsageError, match=said):
        export("llama2", plan, tmp_path)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("plan", [ExportPlan("fp16"), ExportPlan("int4", half_activations=True)])
def test_gemma_is_refused_in_half_precision_where_it_overflows(plan: ExportPlan, tmp_path: Path):
    with pytest.raises(UsageError, match="overflows float16"):
        export("gemma3", plan, tmp_path)


def test_int4_needs_a_hidden_size_in_whole_blocks(tmp_path: Path):
    config = open_source(str(write_hf_checkpoint(tmp_path, "llama2"))).config
    with pytest.raises(UsageError, match="divisible by 32, not 80"):
        ExportPlan("int4").check(replace(config, hidden_size=80))


def _rewrite() -> None:
    for path in SNAPSHOTS.glob("*.json"):
        path.unlink()
    for name, (variant, plan) in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            entries = export(variant, plan, Path(folder))
            (SNAPSHOTS / f"{name}.json").write_text(snapshot(entries, Path(folder) / "out"))


if __name__ == "__main__":
    sys.exit(_rewrite())
