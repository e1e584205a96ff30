"""The two profiles of a target compute the same at every precision: logits, hidden states and taps.

At 4 bits up to what MatMulNBits loses by rounding its input to 8 bits, which it is told not to do here.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint

from oxidize.export.bundle import export_bundle
from oxidize.export.plan import ExportPlan
from oxidize.export.source import open_source
from oxidize.runtime.bundle import Bundle, open_bundle
from oxidize.runtime.rows import Rows
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Target

PROMISE = 1e-3
HALF_STEPS = 4 * 2**-10  # of float16 beside its largest value, where the two round in different places
FAMILIES = ("llama3", "llama_bias", "smollm2", "mistral_sliding", "qwen2", "qwen2_sliding", "qwen3", "gemma3")
PLANS = {
    "fp32": ExportPlan("fp32", ("ort", "std"), taps=(0, 1)),
    "fp16": ExportPlan("fp16", ("ort", "std"), taps=(0, 1)),
    "int4": ExportPlan("int4", ("ort", "std"), taps=(0, 1)),
    "int4_narrow": ExportPlan("int4", ("ort", "std"), (0, 1), head_bits=4, zero_points=False, int8_parts=()),
    "int4_half": ExportPlan("int4", ("ort", "std"), (0, 1), half_activations=True),
}
# (from, to): prefill, single rows, several, then rewinds and replays
SCHEDULE = ((0, 20), (20, 21), (21, 22), (22, 28), (24, 26), (9, 28))


def exported(variant: str, plan: ExportPlan, folder: Path) -> list[Bundle]:
    """The bundle as if only profile "ort" had been exported, and only "std"."""
    source = write_hf_checkpoint(folder / "source", VARIANTS[variant])
    export_bundle(open_source(str(source)), plan, folder / "bundle")
    bundle = open_bundle(folder / "bundle")
    graphs = bundle.manifest.graphs
    parts = [tuple(graph for graph in graphs if graph.profile == profile) for profile in plan.profiles]
    return [replace(bundle, manifest=replace(bundle.manifest, graphs=part)) for part in parts]


def outputs_of(bundle: Bundle, tokens: list[int]) -> dict[str, np.ndarray]:
    """What the target gives over the schedule, one pass behind the other."""
    target = Target(bundle, RuntimeOptions(provider="cpu", threads=1))
    found: dict[str, list[np.ndarray]] = {"logits": [], "hidden": [], "taps": []}
    for start, end in SCHEDULE:
        target.cache.rewind_to(0, start)
        (logits,) = target.forward([Rows(0, tokens[start:end], end - start)])
        rows = target.rows(0)
        assert rows.taps is not None
        for name, values in (("logits", logits), ("hidden", rows.hidden), ("taps", rows.taps)):
            found[name].append(values.copy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def possible(variant: str, precision: str) -> bool:
    """Gemma is refused where it overflows."""
    return variant != "gemma3" or PLANS[precision].dtype == "float32"


@pytest.mark.parametrize(
    ("variant", "precision"), [(name, plan) for name in FAMILIES for plan in PLANS if possible(name, plan)]
)
def test_both_profiles_agree(variant: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oxidize.export.profile_ort.INT8_COMPUTE", 1)
    tokens = np.random.default_rng(4).integers(3, 300, SCHEDULE[-1][1]).tolist()
    fast, plain = (outputs_of(bundle, tokens) for bundle in exported(variant, PLANS[precision], tmp_path))
    for name, values in fast.items():
        assert np.isfinite(values).all() and values.std() > 0.1, name
        error = float(np.abs(values - plain[name]).max())
        print(variant, precision, name, f"{error:.1e} of {np.abs(values).max():.1f}")
        half = PLANS[precision].dtype == "float16"
        assert error <= (HALF_STEPS * np.abs(values).max() if half else PROMISE), name
