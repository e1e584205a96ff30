"""DSpark drafts in the real loop and from the command line: never another text, never another law, and they do stop."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dspark import BLOCK, deepspec, specforge, write_dspark, write_dspark_gguf
from fakes import FakeTarget, hashed_logits
from laws import assert_follows, text_law
from onnx import TensorProto, helper, numpy_helper

from oxidize.cli.main import run
from oxidize.runtime.contracts import DraftShape, markov_contract
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import DraftContext, Proposal, TokenReader
from oxidize.runtime.drafters.blocks import Block
from oxidize.runtime.drafters.heads import TargetHead
from oxidize.runtime.drafters.markov import MarkovReader
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.request import Request
from oxidize.runtime.sampling import SamplingParams, law_of
from oxidize.runtime.session import Device, GraphSession, RuntimeOptions, Tensor

OPTIONS = RuntimeOptions(provider="cpu", threads=1)
HIDDEN, VOCABULARY, LENGTH, ROWS, SAMPLES = 4, 5, 4, 3, 5_000
PROMPT = [1, 2, 1]


def fixed(k: int, count: int, strict: bool) -> SpeculativeConfig:
    return SpeculativeConfig(k, count, 0.0, strict_mode=strict, adaptive=False)


# A block drafter of numpy around the real reader and a real session: fast enough for the law of many texts.


def markov_session(path: Path) -> GraphSession:
    """bias = W2 W1[previous], and a chance of being kept by the token before: of some there is next to none."""
    random = np.random.default_rng(2)
    contract = markov_contract(DraftShape("dflash", HIDDEN, 1, 1, 4, 4, VOCABULARY, confident=True))
    arrays = {
        "table": random.normal(0, 1.5, (VOCABULARY, VOCABULARY)),
        "chances": np.array([0.9, 0.95, 0.05, 0.3, 0.8]),
    }
    nodes = [
        helper.make_node("Gather", ["table", "previous"], ["bias"]),
        helper.make_node("Gather", ["chances", "previous"], ["confidence"]),
    ]
    kinds = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    values = [
        [helper.make_tensor_value_info(spec.name, kinds[spec.dtype], spec.shape) for spec in specs]
        for specs in (contract.inputs, contract.outputs)
    ]
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "markov", *values, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), path)
    return GraphSession(path, contract, "cpu", OPTIONS, light=True)


@lru_cache(maxsize=100_000)
def rows_after(committed: tuple[int, ...]) -> np.ndarray:
    """Hidden states [ROWS,H] of the block behind a text."""
    return np.stack([hashed_logits((*committed, row), HIDDEN) for row in range(ROWS)])


class Numbers:
    """A head that scores hidden states."""

    weights = np.random.default_rng(6).normal(0, 0.5, (HIDDEN, VOCABULARY)).astype(np.float32)

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        return hidden.read()[first : first + count] @ self.weights


class Blocks(TokenReader):
    """A drafter whose blocks are made of nothing but the committed text."""

    name, free, passes, ort_ns = "blocks", False, 0, 0

    def __init__(self, reader: MarkovReader) -> None:
        self.reader = reader
        self.hidden = Tensor((ROWS, HIDDEN), "float32", Device("cpu"))
        self.shorter: list[bool] = []  # than asked for

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        self.hidden.write(rows_after(tuple(committed)))
        proposal = self.reader.propose(Block({"hidden": self.hidden}, 0, min(k, ROWS)), committed, context)
        self.shorter.append(len(proposal.tokens) < min(k, ROWS))
        return proposal

    def observe(self, committed: Sequence[int]) -> None: ...

    def rewind(self, length: int) -> None: ...

    def reset(self) -> None: ...


class Cheat(MarkovReader):
    """What must not be done: it ends before a token for what that is."""

    def propose(self, block: Block, committed: Sequence[int], context: DraftContext) -> Proposal:
        whole = super().propose(block, committed, context)
        keep = next((i for i, token in enumerate(whole.tokens) if i and token in (0, 1, 4)), len(whole.tokens))
        return Proposal(whole.tokens[:keep], whole.laws[:keep] if whole.laws else None)


@lru_cache(maxsize=100_000)
def _cached(context: tuple[int, ...], vocabulary: int) -> np.ndarray:
    return hashed_logits(context, vocabulary)


def rule(context: Sequence[int], vocabulary: int) -> np.ndarray:
    return _cached(tuple(context), vocabulary)


def sampled(drafter: Blocks, setting: dict) -> list[tuple[int, ...]]:
    decoder, texts = SpeculativeDecoder(FakeTarget(VOCABULARY, rule=rule), drafter), []
    for seed in range(SAMPLES):
        stream = decoder.stream(PROMPT, SamplingParams(**setting, seed=seed), config=fixed(ROWS, LENGTH, False))
        texts.append(tuple(token for emission in stream for token in emission.tokens))
    return texts


def law(setting: dict) -> dict[tuple[int, ...], float]:
    params = SamplingParams(**setting)
    return text_law(lambda tokens: law_of(rule([*PROMPT, *tokens], VOCABULARY), params), LENGTH)


@pytest.mark.parametrize("setting", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 3}], ids=["T1", "T0.8"])
def test_texts_have_the_targets_law_although_proposals_end_early(setting: dict, tmp_path: Path) -> None:
    drafter = Blocks(MarkovReader(TargetHead(Numbers()), markov_session(tmp_path / "markov.onnx")))
    assert_follows(sampled(drafter, setting), law(setting))
    assert 0.1 < np.mean(drafter.shorter) < 0.9


def test_ending_before_a_token_for_what_it_is_would_be_noticed(tmp_path: Path) -> None:
    drafter = Blocks(Cheat(TargetHead(Numbers()), markov_session(tmp_path / "markov.onnx"), 0.0))
    setting = {"temperature": 1.0}
    texts = sampled(drafter, setting)
    with pytest.raises(AssertionError):
        assert_follows(texts, law(setting))


def test_one_text_per_seed_under_the_match_rule(tmp_path: Path) -> None:
    reader = MarkovReader(TargetHead(Numbers()), markov_session(tmp_path / "markov.onnx"))
    for seed in range(20):
        params = SamplingParams(temperature=1.0, seed=seed)
        plain = SpeculativeDecoder(FakeTarget(VOCABULARY), None, fixed(0, 30, True)).generate(PROMPT, params)
        for k in range(1, ROWS + 1):
            decoder = SpeculativeDecoder(FakeTarget(VOCABULARY), Blocks(reader), fixed(k, 30, True))
            assert decoder.generate(PROMPT, params) == plain


# From published files, by the command line.


LAYERS = 9
TEXT = "The quick brown fox jumps over the lazy dog. The quick"
GATED = {"markov_head_type": "gated"}


def doubtful(bias: float) -> dict[str, np.ndarray]:
    """A confidence head that says the same of every row."""
    weight = np.zeros((1, 64 + 32), ml_dtypes.bfloat16)
    return {"confidence_head.proj.weight": weight, "confidence_head.proj.bias": np.array([bias], ml_dtypes.bfloat16)}


SOURCES = {
    "sure": lambda folder: write_dspark(folder, specforge(), tensors=doubtful(20.0)),
    "doubtful": lambda folder: write_dspark(folder, deepspec(), tensors=doubtful(-20.0)),
    "gated": lambda folder: write_dspark(folder, deepspec(**GATED)),
    "own_vocabulary": lambda folder: write_dspark(folder, own_vocab=120, tensors=doubtful(20.0)),
    "gguf": lambda folder: write_dspark_gguf(folder / "draft.gguf"),
    "unaware": lambda folder: write_dspark(folder, specforge(enable_confidence_head=False, sample_from_anchor=False)),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a random target with random drafts of all kinds."""
    root = tmp_path_factory.mktemp("dspark")
    shape = {"num_hidden_layers": LAYERS, "max_window_layers": LAYERS, "vocab_size": 320, "head_dim": 16}
    write_hf_checkpoint(root / "target", {**VARIANTS["qwen3"], **shape})
    arguments = ["export", str(root / "target"), "-o", str(root / "bundle"), "--precision", "fp32", "--no-eval"]
    for name, write in SOURCES.items():
        arguments += ["--draft-model", str(write(root / name))]
    assert run(arguments) == 0
    return root / "bundle"


def opened(bundle: Path, draft: str) -> Engine:
    return Engine.open(bundle, EngineOptions(OPTIONS, draft=draft, exact=True))


def texts(engine: Engine, k: int, temperature: float, strict: bool = True) -> list[str]:
    request = Request(fixed(k, 24, strict), SamplingParams(temperature, seed=7))
    prompts = (TEXT, TEXT + " brown", "x")
    return ["".join(delta.text for delta in engine.stream(engine.encode(prompt), request)) for prompt in prompts]


def names(bundle: Path) -> list[str]:
    return [draft["name"] for draft in json.loads((bundle / "manifest.json").read_text())["drafts"]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_untrained_draft_never_changes_the_text(bundle: Path, temperature: float) -> None:
    """Every k up to the whole block, several prompts on one decoder."""
    plain = texts(opened(bundle, "none"), 0, temperature)
    assert len(names(bundle)) == len(SOURCES)
    for name in names(bundle):
        engine = opened(bundle, name)
        for k in range(1, BLOCK + 1):
            assert texts(engine, k, temperature) == plain, (name, k)
            assert engine.stats.draft_tokens > 0 and engine.stats.drafter == name


def test_proposals_are_as_long_as_the_draft_is_confident(bundle: Path) -> None:
    lengths = {}
    for name in names(bundle):
        engine = opened(bundle, name)
        texts(engine, BLOCK, 0.9, strict=False)
        lengths[name] = len(engine.stats.proposed_per_position)
    made = dict(zip(SOURCES, (lengths[name] for name in names(bundle)), strict=True))
    assert made["doubtful"] == 1
    assert made["sure"] == made["own_vocabulary"] == BLOCK
    assert made["unaware"] == BLOCK - 1, "row 0 was proposed"


def test_the_bundle_has_the_graph_and_no_copy_of_the_targets_tables(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    for draft, kind in zip(manifest["drafts"], SOURCES, strict=True):
        roles = [graph["contract"]["role"] for graph in draft["graphs"]]
        assert roles == ["draft", *(["embed", "head"] if kind == "own_vocabulary" else []), "markov"]
        assert draft["kind"] == "dflash" and draft["neural"]["sample_from_anchor"] == (kind != "unaware")
        outputs = [spec["name"] for spec in draft["graphs"][-1]["contract"]["outputs"]]
        assert outputs == ["bias", "confidence"][: 1 if kind == "unaware" else 2]
