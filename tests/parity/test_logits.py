"""The exported graphs give transformers' logits: every architecture, both profiles, any way of cutting the passes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from checkpoints import VARIANTS, write_gguf_checkpoint, write_hf_checkpoint
from transformers import AutoModelForCausalLM

from oxidize.export.build import ExportPlan, build_graphs
from oxidize.export.gguf_tokenizer import build_gguf_tokenizer
from oxidize.export.plan import PARTS
from oxidize.export.reference import reference_model
from oxidize.export.source import open_source
from oxidize.runtime.manifest import GraphEntry

DATA = Path(__file__).parent.parent / "data"
PROMISE = 2e-3
TOLERANCE = 1e-4  # what tiny models reach
CAPACITY = 40
STALE = 100.0  # what unused cache rows hold
PREFILL, END = 20, 28
# (from, to): prefill, single rows, several rows, then rewinds and replays of several sizes
SCHEDULE = [(0, 20), *((i, i + 1) for i in range(20, 24)), (24, 28), (22, 26), (26, 27), (27, 28), (9, 28)]


class GraphRunner:
    """Embed, body and head as plain sessions over numpy caches; one slot."""

    def __init__(
        self, folder: Path, entries: Sequence[GraphEntry], profile: str, ragged: bool = False, capacity: int = CAPACITY
    ) -> None:
        chosen = [
            item for item in entries if item.profile == profile and item.ragged == (ragged and item.role == "body")
        ]
        self.sessions = {item.role: _session(folder / item.file) for item in chosen}
        self.contract = next(item.contract for item in chosen if item.role == "body")
        self.profile, self.ragged, self.capacity, self.length = profile, ragged, capacity, 0
        self.window = 0
        axes = {"B": 1, "C": capacity}
        self.cache = {
            spec.name: np.full([axes.get(dim, dim) for dim in spec.shape], STALE, spec.dtype)
            for spec in self.contract.inputs
            if spec.name.startswith("past_key_values")
        }

    def run(self, tokens: Sequence[int], start: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Logits [n,V] and taps [n,L*H] of the tokens at positions start.. ; forgets what lay beyond."""
        (embeds,) = self.sessions["embed"].run(None, {"input_ids": np.array([tokens], np.int64)})
        feeds = {"inputs_embeds": embeds, **self._places(start, len(tokens)), **self.cache}
        names = [spec.name for spec in self.contract.outputs]
        outputs = dict(zip(names, self.sessions["body"].run(names, feeds), strict=True))
        for name in self.cache:
            self.cache[name] = outputs[name.replace("past_key_values", "present")]
        rows = np.arange(len(tokens))
        (logits,) = self.sessions["head"].run(None, {"hidden": outputs["hidden"][0], "rows": rows})
        taps = outputs.get("taps")
        return logits, None if taps is None else taps[0]

    def _places(self, start: int, count: int) -> dict[str, np.ndarray]:
        if self.profile == "ort":
            total = start + count
            feeds = {"seqlens_k": np.array([total - 1], np.int32), "total_sequence_length": np.array(total, np.int32)}
            return feeds | ({"query_seqlens": np.array([count], np.int32)} if self.ragged else {})
        rows, columns = np.arange(start, start + count)[:, None], np.arange(self.capacity)
        mask = columns <= rows  # [S,C]
        feeds = {
            "position_ids": rows.T.astype(np.int64),
            "write_indices": np.array([start], np.int64),
            "attn_mask": mask[None, None],
        }
        if any(spec.name == "attn_mask_sliding" for spec in self.contract.inputs):
            feeds["attn_mask_sliding"] = (mask & (columns > rows - self.window))[None, None]
        return feeds


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def build(source: Path, folder: Path, plan: ExportPlan):
    folder.mkdir()
    checkpoint = open_source(str(source))
    entries = build_graphs(checkpoint.config, checkpoint.weights, plan, folder)
    assert checkpoint.weights.unread() == []

    def runner(profile: str, ragged: bool = False, capacity: int = CAPACITY) -> GraphRunner:
        made = GraphRunner(folder, entries, profile, ragged, capacity)
        made.window = checkpoint.config.sliding_window or 0
        return made

    return runner


def tokens_for(model, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.config.vocab_size, count).tolist()


def reference(model, tokens: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [n,V] and the outputs of all layers [n,H], the last before the final norm."""
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.numpy(), [out.reshape(len(tokens), -1).numpy() for out in outputs]


def worst(runner: GraphRunner, tokens: list[int], expected: np.ndarray) -> float:
    """The largest error over a schedule of passes."""
    errors = []
    for start, end in SCHEDULE:
        logits, _ = runner.run(tokens[start:end], start)
        assert np.isfinite(logits).all(), (start, end)
        errors.append(np.abs(logits - expected[start:end]).max())
    return float(max(errors))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_taps_of_every_variant(variant: str, tmp_path: Path):
    source = write_hf_checkpoint(tmp_path / "source", variant)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = tokens_for(model, END)
    expected, layers = reference(model, tokens)
    taps = (0, len(layers) - 1)
    runner = build(source, tmp_path / "out", ExportPlan("fp32", ("ort", "std"), taps=taps))
    for profile, ragged in (("ort", False), ("ort", True), ("std", False)):
        made = runner(profile, ragged)
        assert worst(made, tokens, expected) <= TOLERANCE, (profile, ragged)
        _, tapped = made.run(tokens, 0)
        assert tapped is not None
        np.testing.assert_allclose(tapped, np.hstack([layers[tap] for tap in taps]), atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_model_is_what_transformers_loads_itself(variant: str, tmp_path: Path):
    source = write_hf_checkpoint(tmp_path / "source", variant)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = tokens_for(model, END)
    ours = reference_model(open_source(str(source)))
    np.testing.assert_allclose(reference(ours, tokens)[0], reference(model, tokens)[0], atol=1e-6)


@pytest.mark.parametrize("variant", ["llama2", "qwen2", "gemma3"])
@pytest.mark.parametrize(
    ("quant", "plan"),
    [("Q4_0", ExportPlan("int4", ("ort", "std"))), ("Q8_0", ExportPlan("int4", ("ort", "std"), int8_parts=PARTS))],
)
def test_blocks_of_the_source_reach_the_graph_without_loss(quant: str, plan: ExportPlan, variant: str, tmp_path: Path):
    source = write_gguf_checkpoint(tmp_path / "blocks.gguf", variant, quant=quant)
    model = reference_model(open_source(str(source)))
    tokens = tokens_for(model, END)
    expected, _ = reference(model, tokens)
    runner = build(source, tmp_path / "out", plan)
    assert worst(runner("std"), tokens, expected) <= TOLERANCE
    # MatMulNBits rounds activations to 8 bits a block: about 1 % a product
    assert worst(runner("ort"), tokens, expected) <= 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("variant", ["llama2", "qwen3"])
@pytest.mark.parametrize("profile", ["ort", "std"])
def test_half_precision_stays_near(variant: str, profile: str, tmp_path: Path):
    source = write_hf_checkpoint(tmp_path / "source", variant)
    model = reference_model(open_source(str(source)))
    tokens = tokens_for(model, END)
    expected, _ = reference(model, tokens)
    runner = build(source, tmp_path / "out", ExportPlan("fp16", (profile,)))
    assert worst(runner(profile), tokens, expected) <= 0.01 * np.abs(expected).max()


@pytest.mark.checkpoint
def test_smollm2_logits_on_five_prompts_one_of_them_long(smollm2_gguf: Path, tmp_path: Path):
    checkpoint = open_source(str(smollm2_gguf))
    assert checkpoint.gguf_metadata is not None
    tokenizer = build_gguf_tokenizer(checkpoint.gguf_metadata)
    prompts = json.loads((DATA / "prompts.json").read_text())
    texts = [*prompts[:4], (DATA / "tokenizer_corpus.txt").read_text() + "\n".join(prompts)]
    texts[-1] *= 1 + 1000 // len(tokenizer.encode(texts[-1]).ids)
    model = reference_model(checkpoint)
    runner = build(smollm2_gguf, tmp_path / "out", ExportPlan("fp32", ("ort", "std"), max_positions=2048))
    prompts_tokens = [tokenizer.encode(text).ids[:1100] for text in texts]
    assert len(prompts_tokens[-1]) > 1000
    references = [reference(model, tokens)[0] for tokens in prompts_tokens]
    del model
    for profile in ("ort", "std"):
        made = runner(profile, capacity=1104)
        for tokens, expected in zip(prompts_tokens, references, strict=True):
            cut = len(tokens) - 5  # a chunk that fills the cache, then several rows, then a single one
            parts = [made.run(tokens[:cut], 0)[0], made.run(tokens[cut:-1], cut)[0]]
            parts.append(made.run(tokens[-1:], len(tokens) - 1)[0])
            error = np.abs(np.vstack(parts) - expected).max()
            print(f"{profile}: {len(tokens)} tokens, largest error {error:.1e}")
            assert error <= PROMISE, (profile, len(tokens))
