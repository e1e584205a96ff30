"""Exported MTP heads give the independent reference's proposals, round after round, and leave their target alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import onnxruntime as ort
import pytest
import torch
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_mtp import as_nextn, head_weights, write_mtp_checkpoint, write_mtp_gguf
from reference_mtp import MUTATIONS, MtpReference
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from oxidize.export.build import ExportPlan, build_graphs
from oxidize.export.drafts.base import DraftCheckpoint, neural_facts, write_draft_graphs
from oxidize.export.drafts.mtp import split_mtp
from oxidize.export.drafts.mtp_graph import mtp_graphs
from oxidize.export.plan import PARTS
from oxidize.export.reference import reference_model
from oxidize.export.source import Checkpoint, open_source
from oxidize.runtime.manifest import GraphEntry

PROMISE = 1e-3
TOLERANCE = 2e-5  # what tiny heads reach
# What cache rows hold that nobody may read. ONNX Runtime masks float16 scores by adding -65504, which huge keys beat.
STALE = {"float32": 3e4, "float16": 100.0}
CAPACITY = 336
CONTEXTS = (1, 17, 300)
ROUNDS = [(4, 2), (3, 3), (1, 0), (4, 0), (2, 1), (1, 1)]  # (proposed, accepted)
# variant, layout, gated, whether the file is a GGUF
CASES = {
    "qwen3_mtp": ("qwen3", "mtp", True, False),
    "qwen3_mtp_without_gate": ("qwen3", "mtp", False, False),
    "qwen2_mtp": ("qwen2", "mtp", True, False),
    "llama_mtp": ("llama2", "mtp", True, False),
    "qwen3_nextn": ("qwen3", "nextn", False, False),
    "llama_nextn": ("llama2", "nextn", False, False),
    "bias_nextn": ("llama_bias", "nextn", False, False),
    "qwen3_gguf": ("qwen3", "nextn", False, True),
    "qwen3_gguf_of_mtp": ("qwen3", "mtp", True, True),
    "llama_gguf": ("llama2", "nextn", False, True),
    "mistral_nextn": ("mistral", "nextn", False, False),
}


@dataclass(frozen=True)
class Pair:
    """A target, its head and the reference of each."""

    target: Checkpoint
    draft: DraftCheckpoint
    reference: MtpReference
    model: torch.nn.Module

    def rows(self, tokens: list[int], normed: bool = True) -> torch.Tensor:
        """The target's final hidden states [n,H], after or before its last norm."""
        before = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0][0]))
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        hook.remove()
        return hidden if normed else before[0]

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return self.model.get_input_embeddings().weight.detach()[tokens]


class HeadRunner:
    """A head's graphs as plain sessions over numpy caches; one slot."""

    def __init__(self, folder: Path, entries: tuple[GraphEntry, ...], lookahead: int = 0) -> None:
        self.sessions = {entry.role: _session(folder / entry.file) for entry in entries}
        self.contract = next(entry.contract for entry in entries if entry.role == "draft")
        self.dtype = self.contract.inputs[0].dtype
        self.lookahead = lookahead  # rows behind its own that a query sees: a mistake
        axes = {"B": 1, "C": CAPACITY}
        self.cache = {
            spec.name: np.full([axes.get(dim, dim) for dim in spec.shape], STALE[spec.dtype], spec.dtype)
            for spec in self.contract.inputs
            if spec.name.startswith("past_key_values")
        }

    def forget(self, length: int) -> None:
        for cache in self.cache.values():
            cache[:, :, length:] = STALE[self.dtype]

    def step(self, fused: np.ndarray, embeds: np.ndarray, start: int) -> dict[str, np.ndarray]:
        rows = np.arange(start, start + len(fused))
        feeds = {
            "fused": fused[None].astype(self.dtype),
            "inputs_embeds": embeds[None].astype(self.dtype),
            "position_ids": rows[None].astype(np.int64),
            "write_indices": np.array([start], np.int64),
            "attn_mask": (np.arange(CAPACITY) <= rows[:, None] + self.lookahead)[None, None],
            **self.cache,
        }
        names = [spec.name for spec in self.contract.outputs]
        outputs = dict(zip(names, self.sessions["draft"].run(names, feeds), strict=True))
        for name in self.cache:
            self.cache[name] = outputs.pop(name.replace("past_key_values", "present")).copy()
        return {name: values[0] for name, values in outputs.items()}


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def make_pair(folder: Path, case: str, tables: str = "none", quant: str = "F32") -> Pair:
    variant, layout, gated, is_gguf = CASES[case]
    head = head_weights(variant, layout, seed=3, tables=tables, gated=gated)
    if is_gguf:
        stored = as_nextn(variant, head) if layout == "mtp" else head
        source = write_mtp_gguf(folder / "model.gguf", variant, stored, quant=quant)
    else:
        source = write_mtp_checkpoint(folder / "source", variant, head)
    target, draft = split_mtp(open_source(str(source)))
    assert draft is not None
    reference = MtpReference(_rounded(head, quant), VARIANTS[variant])
    return Pair(target, draft, reference, reference_model(target))


def _rounded(head: Mapping[str, np.ndarray], quant: str) -> dict[str, np.ndarray]:
    """The values a GGUF file of this type gives back."""
    kind = gguf.GGMLQuantizationType[quant]
    return {
        name: gguf.dequantize(gguf.quantize(values, kind), kind) if values.ndim == 2 else values
        for name, values in head.items()
    }


def export_head(draft: DraftCheckpoint, folder: Path, plan: ExportPlan) -> HeadRunner:
    folder.mkdir()
    entries = write_draft_graphs(draft, mtp_graphs(draft.config, plan.dtype), plan, folder)
    assert draft.weights.unread() == []
    return HeadRunner(folder, entries)


def tokens_for(pair: Pair, count: int) -> list[int]:
    return np.random.default_rng(5).integers(3, pair.target.config.vocab_size, count).tolist()


def worst(pair: Pair, runner: HeadRunner, context: int, normed: bool = True) -> float:
    """The largest error of all proposals' hidden states over the rounds.

    The rows of accepted tokens come from the target, those behind them are stale, and the chain reads its own output.
    """
    tokens = tokens_for(pair, context + 24)
    truth, given = pair.rows(tokens), pair.rows(tokens, normed).numpy()
    read, known, errors = 0, context, []
    for count, accepted in ROUNDS:
        right = tokens[known + 1 : known + 1 + accepted]
        wrong = [(token + 1) % 300 for token in tokens[known + 1 + accepted : known + count]]
        chain = [*right, *wrong][: count - 1]
        embeds = pair.embed([*tokens[1 : known + 1], *chain])
        expected = pair.reference.propose(truth[:known], embeds, known)
        runner.forget(read)
        outputs = _proposals(runner, given[read:known], embeds.numpy()[read:], read)
        assert np.isfinite(outputs).all()
        errors.append(np.abs(outputs - expected.numpy()).max())
        read, known = known, known + accepted + 1
    return float(max(errors))


def _proposals(runner: HeadRunner, fused: np.ndarray, embeds: np.ndarray, start: int) -> np.ndarray:
    """Read the target's rows in two parts, then chain; the hidden state of each proposal [k,H]."""
    count, cut = len(fused), len(fused) // 2
    if cut:
        runner.step(fused[:cut], embeds[:cut], start)
    outputs = runner.step(fused[cut:], embeds[cut:count], start + cut)
    hidden = [outputs["hidden"][-1]]
    for place, embed in enumerate(embeds[count:], start + count):
        outputs = runner.step(outputs["recycled"][-1:], embed[None], place)
        hidden.append(outputs["hidden"][-1])
    return np.stack(hidden)


@pytest.mark.parametrize("case", CASES)
def test_proposals_of_every_layout_over_several_rounds(case: str, tmp_path: Path):
    pair = make_pair(tmp_path, case)
    runner = export_head(pair.draft, tmp_path / "head", ExportPlan("fp32"))
    assert list(runner.sessions) == ["draft"]
    for context in CONTEXTS:
        error = worst(pair, runner, context)
        print(f"{case}, {context} rows: largest error {error:.1e}")
        assert error <= TOLERANCE < PROMISE, context
        runner.forget(0)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_in_the_maths_show(mutation: str, tmp_path: Path):
    pair = make_pair(tmp_path, "qwen3_mtp")
    runner = export_head(pair.draft, tmp_path / "head", ExportPlan("fp32"))
    wrong = replace(pair, reference=replace(pair.reference, mutation=mutation))
    assert worst(wrong, runner, 17) > 10 * PROMISE


def test_mistakes_in_the_inputs_show(tmp_path: Path):
    pair = make_pair(tmp_path, "qwen3_mtp")
    runner = export_head(pair.draft, tmp_path / "head", ExportPlan("fp32"))
    assert worst(pair, runner, 17, normed=False) > 10 * PROMISE  # the target's rows before its last norm
    runner.forget(0)
    runner.lookahead = 1
    assert worst(pair, runner, 17) > 10 * PROMISE  # a stale row is seen


@pytest.mark.parametrize("case", CASES)
def test_the_target_is_what_it_is_without_a_head(case: str, tmp_path: Path):
    pair = make_pair(tmp_path, case)
    variant = CASES[case][0]
    plain = open_source(str(write_hf_checkpoint(tmp_path / "plain", variant)))
    expected_config = replace(plain.config, architecture=pair.target.config.architecture)
    assert pair.target.config == expected_config
    assert sorted(pair.target.weights.names()) == sorted(plain.weights.names())
    tokens = tokens_for(pair, 12)
    with torch.no_grad():
        expected = reference_model(plain)(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(_target_logits(pair.target, tokens, tmp_path / "target"), expected, atol=1e-4)
    assert pair.target.weights.unread() == []


def _target_logits(target: Checkpoint, tokens: list[int], folder: Path) -> np.ndarray:
    folder.mkdir()
    entries = build_graphs(target.config, target.weights, ExportPlan("fp32", ("std",)), folder)
    run = {entry.role: _session(folder / entry.file) for entry in entries}
    count = len(tokens)
    (embeds,) = run["embed"].run(None, {"input_ids": np.array([tokens], np.int64)})
    cache = {
        spec.name: np.zeros((1, spec.shape[1], count, spec.shape[3]), np.float32)
        for entry in entries
        if entry.role == "body"
        for spec in entry.contract.inputs
        if spec.name.startswith("past")
    }
    places = {
        "position_ids": np.arange(count)[None],
        "write_indices": np.array([0]),
        "attn_mask": np.tri(count, dtype=bool)[None, None],
    }
    (hidden,) = run["body"].run(["hidden"], {"inputs_embeds": embeds, **places, **cache})
    return run["head"].run(None, {"hidden": hidden[0], "rows": np.arange(count)})[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("case", ["llama_nextn", "qwen3_mtp", "qwen3_gguf"])
def test_a_head_with_tables_of_its_own(case: str, precision: str, tmp_path: Path):
    pair = make_pair(tmp_path, case, tables="own")
    plan = ExportPlan(precision)
    runner = export_head(pair.draft, tmp_path / "head", plan)
    facts = neural_facts(pair.draft.config, plan, None)
    assert facts.draft_vocab_size == pair.target.config.vocab_size
    assert sorted(runner.sessions) == ["draft", "embed", "head"]
    tokens = tokens_for(pair, 9)
    hidden, reference = pair.rows(tokens)[:-1], pair.reference
    (embeds,) = runner.sessions["embed"].run(None, {"input_ids": np.array([tokens[1:]], np.int64)})
    outputs = runner.step(hidden.numpy(), embeds[0], 0)
    (logits,) = runner.sessions["head"].run(None, {"hidden": outputs["hidden"], "rows": np.arange(len(embeds[0]))})
    assert logits.dtype == np.float32
    scored, _ = reference.step(hidden, reference.embed(tokens[1:]))
    expected = reference.logits(scored).numpy()
    limit = TOLERANCE if precision == "fp32" else 0.01 * np.abs(expected).max()
    assert np.abs(logits - expected).max() <= limit


@pytest.mark.parametrize("case", ["qwen3_gguf", "qwen3_gguf_of_mtp", "llama_gguf"])
@pytest.mark.parametrize(
    ("quant", "plan"),
    [("Q4_0", ExportPlan("int4", ("std",))), ("Q8_0", ExportPlan("int4", ("std",), int8_parts=PARTS))],
)
def test_blocks_of_the_source_reach_the_head_without_loss(case: str, quant: str, plan: ExportPlan, tmp_path: Path):
    """In the std form, whose products are exact; MatMulNBits rounds activations to 8 bits."""
    pair = make_pair(tmp_path, case, quant=quant)
    assert worst(pair, export_head(pair.draft, tmp_path / "head", plan), 17) <= TOLERANCE


@pytest.mark.parametrize("case", ["qwen3_mtp", "llama_nextn"])
def test_half_precision_stays_near(case: str, tmp_path: Path):
    pair = make_pair(tmp_path, case)
    assert worst(pair, export_head(pair.draft, tmp_path / "head", ExportPlan("fp16")), 17) <= 0.02


def test_the_reference_attends_as_transformers_does():
    config = VARIANTS["qwen3"]
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    theirs = Qwen3NextConfig(
        **{key: config[key] for key in keys},
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": 1.0},
    )
    theirs._attn_implementation = "eager"
    module = Qwen3NextAttention(theirs, 0)
    prefix, head = "mtp.layers.0.self_attn.", head_weights("qwen3", "mtp", seed=3)
    parts = {name.removeprefix(prefix): torch.from_numpy(array) for name, array in head.items() if prefix in name}
    module.load_state_dict(parts)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(11, config["hidden_size"])).astype(np.float32))
    cos_sin = Qwen3NextRotaryEmbedding(theirs)(x[None], torch.arange(11)[None])
    mask = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = module(x[None], position_embeddings=cos_sin, attention_mask=mask)[0][0]
    torch.testing.assert_close(MtpReference(head, config)._attend(x), expected, atol=1e-5, rtol=0)
