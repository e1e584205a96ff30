"""EAGLE-3 graphs against torch: rounds of a prefix and a chain, partly accepted, over a cache full of stale rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from draft_checkpoints_eagle import EAGLE_VARIANTS, TARGET, EagleVariant, write_eagle, write_eagle_gguf
from reference_eagle import EagleReference

from oxidize.export.drafts.base import DraftCheckpoint, write_draft_graphs
from oxidize.export.drafts.eagle_gguf import open_eagle_gguf
from oxidize.export.drafts.eagle_graph import eagle_graphs
from oxidize.export.drafts.eagle_hf import open_eagle_hf
from oxidize.export.drafts.eagle_speculators import open_eagle_speculators
from oxidize.export.plan import ExportPlan

TOLERANCE = 1e-4
MUTATED = 1e-2  # what any mistake of wiring exceeds
STALE = 3e4
ROUNDS = ((1, 0), (3, 3), (4, 1), (2, 2), (4, 0), (3, 1))  # (tokens drafted, of them accepted)
LONGEST = sum(accepted + 1 for _, accepted in ROUNDS) + 5


@dataclass(frozen=True, slots=True)
class Mistakes:
    """Ways to use the graphs wrongly, each of which has to show."""

    embedding: int = 0  # how many tokens too early the embeddings are
    taps: int = 0  # how many layers too far the taps are
    normed: bool = False  # the final norm is applied to what is recycled


class Graphs:
    """The sessions of one exported draft over a numpy cache of `capacity` rows, all stale."""

    def __init__(self, folder: Path, draft: DraftCheckpoint, plan: ExportPlan, capacity: int) -> None:
        folder.mkdir()
        entries = write_draft_graphs(draft, eagle_graphs(draft.config, plan.dtype), plan, folder)
        assert draft.weights.unread() == []
        self.sessions = {entry.role: _session(folder / entry.file) for entry in entries}
        self.contract = next(entry.contract for entry in entries if entry.role == "draft")
        self.window, self.capacity = draft.config.model.sliding_window, capacity
        axes = {"B": 1, "C": capacity}
        self.cache = {
            spec.name: np.full([axes.get(dim, dim) for dim in spec.shape], STALE, spec.dtype)
            for spec in self.contract.inputs
            if spec.name.startswith("past_key_values")
        }
        self.dtype = np.dtype(plan.dtype)

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """[T,F] -> [T,H]."""
        (fused,) = self.sessions["fuse"].run(None, {"features": features[None].astype(self.dtype)})
        return fused[0]

    def step(self, fused: np.ndarray, embeds: np.ndarray, start: int) -> dict[str, np.ndarray]:
        """The outputs of rows start.., each [S, width]; what lay beyond them is forgotten."""
        rows, columns = np.arange(start, start + len(fused))[:, None], np.arange(self.capacity)
        mask = columns <= rows
        feeds = {
            "fused": fused[None].astype(self.dtype),
            "inputs_embeds": embeds[None].astype(self.dtype),
            "position_ids": rows.T,
            "write_indices": np.array([start]),
            "attn_mask": mask[None, None],
            **self.cache,
        }
        if self.window:
            feeds["attn_mask_sliding"] = (mask & (columns > rows - self.window))[None, None]
        names = [spec.name for spec in self.contract.outputs]
        outputs = dict(zip(names, self.sessions["draft"].run(names, feeds), strict=True))
        for name in self.cache:
            self.cache[name] = outputs.pop(name.replace("past_key_values", "present"))
        found = {name: value[0] for name, value in outputs.items()}
        if "head" in self.sessions:
            rows = {"hidden": found["hidden"], "rows": np.arange(len(fused))}
            (found["logits"],) = self.sessions["head"].run(None, rows)
        return found


class World:
    """What a target would give: tokens, the output of each of its layers and an embedding table."""

    def __init__(self, reference: EagleReference, count: int, hidden: int) -> None:
        random = np.random.default_rng(count)
        self.random = random
        self.tokens = random.integers(0, TARGET.vocab_size, count).tolist()
        self.layers = random.normal(0, 1, (TARGET.layers, count, TARGET.hidden_size)).astype(np.float32)
        own = reference.tensors.get("embed_tokens.weight")
        table = random.normal(0, 0.5, (TARGET.vocab_size, hidden)) if own is None else own.numpy()
        self.table = table.astype(np.float32)

    def features(self, rows: slice, taps: Sequence[int]) -> np.ndarray:
        return np.concatenate([self.layers[tap % TARGET.layers, rows] for tap in taps], axis=-1)


def run_rounds(
    graphs: Graphs, reference: EagleReference, variant: EagleVariant, context: int, mistakes: Mistakes | None = None
) -> float:
    """The largest error of any output over ROUNDS, beginning with the features of `context` tokens."""
    wrong = mistakes or Mistakes()
    world = World(reference, context + LONGEST, variant.layer["hidden_size"])
    tokens, done, errors = world.tokens, 0, [0.0]
    for drafted, accepted in ROUNDS:
        pending, shift = slice(done, context), 1 - wrong.embedding
        shifted = [tap + wrong.taps for tap in variant.taps]
        fused = graphs.fuse(world.features(pending, shifted))
        embeds = world.table[tokens[done + shift : context + shift]]
        rows = reference.fuse(torch.from_numpy(world.features(slice(0, context), variant.taps)))
        followers, proposal, start = tokens[1 : context + 1], [], done
        for _ in range(drafted):
            outputs = graphs.step(fused, embeds, start)
            scores, recycled = reference.forward(rows, torch.from_numpy(world.table[followers]))
            errors += compare(outputs, scores[start:], recycled[start:])
            proposal.append(pick(reference, scores[-1]))
            start = context + len(proposal) - 1
            fused = outputs["recycled"][-1:]
            if wrong.normed:
                fused = reference.final_norm(torch.from_numpy(fused).double()).numpy()
            embeds = world.table[
                [proposal[-1 - wrong.embedding] if len(proposal) > wrong.embedding else tokens[context]]
            ]
            rows, followers = torch.cat([rows, recycled[-1:]]), [*followers, proposal[-1]]
        tokens[context + 1 : context + 1 + accepted] = proposal[:accepted]
        done, context = context, context + accepted + 1
    return max(errors)


def compare(outputs: dict[str, np.ndarray], scores: torch.Tensor, recycled: torch.Tensor) -> list[float]:
    given = outputs["logits"] if "logits" in outputs else outputs["hidden"]
    assert np.isfinite(given).all() and np.isfinite(outputs["recycled"]).all()
    pairs = ((given, scores), (outputs["recycled"], recycled))
    return [float(np.abs(ours - theirs.numpy()).max()) for ours, theirs in pairs]


def pick(reference: EagleReference, scores: torch.Tensor) -> int:
    """The target id of the likeliest draft id."""
    best = int(scores.argmax())
    return best if reference.tokens is None else int(reference.tokens[best])


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def opened(folder: Path, variant: EagleVariant) -> DraftCheckpoint:
    return (open_eagle_hf if variant.layout == "midlayer" else open_eagle_speculators)(folder, TARGET)


@pytest.fixture
def exported(tmp_path: Path):
    """make(variant, context, plan) -> graphs, reference."""

    def make(name: str, context: int, plan: ExportPlan) -> tuple[Graphs, EagleReference]:
        source = write_eagle(tmp_path / "source", name)
        draft = opened(source, EAGLE_VARIANTS[name])
        graphs = Graphs(tmp_path / f"out{context}", draft, plan, context + LONGEST + 3)
        return graphs, EagleReference(source)

    return make


@pytest.mark.parametrize("context", [1, 17, 300])
@pytest.mark.parametrize("name", EAGLE_VARIANTS)
def test_rounds_of_every_variant(name: str, context: int, exported):
    graphs, reference = exported(name, context, ExportPlan("fp32"))
    assert run_rounds(graphs, reference, EAGLE_VARIANTS[name], context) <= TOLERANCE


@pytest.mark.parametrize(
    "mistakes", [Mistakes(embedding=1), Mistakes(taps=1), Mistakes(normed=True)], ids=["embedding", "taps", "normed"]
)
def test_mistakes_of_wiring_show(mistakes: Mistakes, exported):
    graphs, reference = exported("specforge", 17, ExportPlan("fp32"))
    assert run_rounds(graphs, reference, EAGLE_VARIANTS["specforge"], 17, mistakes) > MUTATED


@pytest.mark.parametrize("name", ["safeailab", "specforge", "specforge_70b", "nvidia", "target_head"])
def test_gguf_gives_what_its_source_gives(name: str, tmp_path: Path):
    source = write_eagle(tmp_path / "source", name)
    draft = open_eagle_gguf(write_eagle_gguf(tmp_path / "draft.gguf", name), TARGET)
    graphs = Graphs(tmp_path / "out", draft, ExportPlan("fp32"), 17 + LONGEST)
    assert run_rounds(graphs, EagleReference(source), EAGLE_VARIANTS[name], 17) <= TOLERANCE


def test_own_embedding_is_the_table(exported):
    graphs, reference = exported("specforge_70b", 1, ExportPlan("fp32"))
    ids = np.array([[0, 5, TARGET.vocab_size - 1]])
    (embeds,) = graphs.sessions["embed"].run(None, {"input_ids": ids})
    assert np.array_equal(embeds[0], reference.tensors["embed_tokens.weight"][ids[0]].float().numpy())


def test_half_precision_fuses_taps_whose_sums_pass_its_range(exported):
    graphs, reference = exported("specforge", 1, ExportPlan("fp16"))
    random = np.random.default_rng(0)
    features = random.choice([-30_000, 30_000], (8, 3 * TARGET.hidden_size)).astype(np.float16)
    expected = reference.fuse(torch.from_numpy(features)).numpy()
    partial = np.abs(np.cumsum(features.astype(float)[:, None] * reference.tensors["fc.weight"].numpy(), axis=-1))
    fused = graphs.fuse(features)
    within = np.abs(expected) < 60_000
    assert partial[within].max() > 65504 and (~within).any()
    assert np.abs(fused - expected)[within].max() <= 32  # half a step of float16 there, and of its weights
    assert np.isfinite(fused).all()


@pytest.mark.parametrize("name", ["specforge", "nvidia", "speculators_qwen3", "speculators_sliding"])
def test_half_precision_stays_close(name: str, exported, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.STALE", 100.0)  # masks are added, so a score past float16's range would show
    graphs, reference = exported(name, 17, ExportPlan("fp16"))
    assert run_rounds(graphs, reference, EAGLE_VARIANTS[name], 17) <= 0.02


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_int4_stays_close(half: bool, exported, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.STALE", 100.0)
    graphs, reference = exported("specforge_70b", 17, ExportPlan("int4", half_activations=half))
    assert run_rounds(graphs, reference, EAGLE_VARIANTS["specforge_70b"], 17) <= 1.5
