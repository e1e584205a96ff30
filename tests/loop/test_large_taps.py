"""Taps near the largest numbers of float16 reach drafts whole: real rounds, beside the same checkpoints in float32.

The sums of such taps pass float16's range before anything brings them back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dflash import write_dflash
from draft_checkpoints_eagle import write_eagle
from safetensors.numpy import load_file, save_file

from oxidize.export.bundle import export_bundle
from oxidize.export.drafts.dflash_hf import read_dflash
from oxidize.export.drafts.eagle_hf import open_eagle_hf
from oxidize.export.drafts.write import NeuralSource
from oxidize.export.plan import ExportPlan
from oxidize.export.source import open_source
from oxidize.runtime.bundle import Bundle, open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.drafters.neural import open_neural
from oxidize.runtime.drafters.reader import RowReader
from oxidize.runtime.rows import PassRows, Rows
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Target

LARGEST = float(np.finfo(np.float16).max)
OPTIONS = RuntimeOptions(provider="cpu", threads=1)
LAYERS, HIDDEN, VOCABULARY, COUNT = 9, 64, 320, 24
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=1.0, seed=5)
PROMPTS = ([7, 8], list(range(5, 40)), [9] * 30)
# How far the laws of a draft may be from its twin's, by total variation: logits up to 4 that differ by four steps of
# float16 there, which are 2**-9 each, make laws that differ by no more.
CLOSE = 4 * 2**-9
OTHER = 0.1  # what the laws of neighbouring rounds differ by, in the middle
CUT_OFF = 0.1  # where float16 cannot hold what fc gives, a draft guesses on from the largest number it can hold


_write_eagle = partial(write_eagle, variant="specforge")


@dataclass(frozen=True)
class Case:
    """A draft. fc, layer: factors of weights of its fc and its layer; close: how near its laws are to the twin's."""

    fc: float
    taps: int
    layer: float = 1
    close: float = CLOSE

    def factors(self) -> dict[str, float]:
        """By the ends of names."""
        return {"fc.weight": self.fc, "o_proj.weight": self.layer, "down_proj.weight": self.layer}


CASES = {"dflash": Case(1, 5), "eagle3": Case(0.3, 3), "eagle3_beyond": Case(1, 3, 100, CUT_OFF)}


def rescaled(folder: Path, factors: dict[str, float], table: np.ndarray | None = None) -> Path:
    """A checkpoint with the weights that end like this multiplied, and maybe another embedding."""
    path = folder / "model.safetensors"
    weights = {name: values.copy() for name, values in load_file(path).items()}
    for name, values in weights.items():
        factor = next((factor for end, factor in factors.items() if name.endswith(end)), 1)
        weights[name] = (values.astype(np.float32) * factor).astype(values.dtype)
    if table is not None:
        weights["model.embed_tokens.weight"] = table.astype(weights["model.embed_tokens.weight"].dtype)
    save_file(weights, path, {"format": "pt"})
    return folder


def write_target(folder: Path) -> Path:
    """Large embeddings to which every layer adds much, so that float16 holds what it adds, but not too much."""
    config = {**VARIANTS["llama2"], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    random, shape = np.random.default_rng(0), (VOCABULARY, HIDDEN)
    table = random.choice([-1, 1], shape) * random.uniform(25e3, 33e3, shape)
    source = write_hf_checkpoint(folder, config, dtype="float16")
    return rescaled(source, {"o_proj.weight": 2000, "down_proj.weight": 4000}, table)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """The same target and drafts at both precisions."""
    root = tmp_path_factory.mktemp("large")
    write_target(root / "target")
    for name, case in CASES.items():
        # DFlash with an embedding of its own: in one as large as the target's, what the draft adds to it would drown
        write = partial(write_dflash, variant="qwen35", own_vocab=96) if name == "dflash" else _write_eagle
        rescaled(write(root / name), case.factors())
    for precision in ("fp16", "fp32"):
        checkpoint, plan = open_source(str(root / "target")), ExportPlan(precision)
        drafts = []
        for name in CASES:
            read = read_dflash if name == "dflash" else open_eagle_hf
            drafts.append(NeuralSource(name, read(root / name, checkpoint.config), plan))
        export_bundle(checkpoint, plan, root / precision, drafts)
    return {precision: open_bundle(root / precision) for precision in ("fp16", "fp32")}


def opened(bundle: Bundle, name: str, target: Target) -> RowReader:
    return open_neural(bundle, next(entry for entry in bundle.manifest.drafts if entry.name == name), target, OPTIONS)


class Recorder:
    """Keeps what a drafter read and made."""

    def __init__(self, drafter: RowReader) -> None:
        self._drafter = drafter
        self.made: list[tuple[list[int], DraftContext, Proposal]] = []
        self.features: list[np.ndarray] = []

    def watch(self, start: int, rows: PassRows) -> None:
        self.features.append(np.concatenate(self._drafter._parts.pick(rows), 1))
        self._drafter.watch(start, rows)

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        known = self._drafter.known
        proposal = self._drafter.propose(committed, k, context)
        assert bool(proposal.tokens) == (known > 0), "a round behind the first has no proposal"
        if proposal.tokens:
            self.made.append((list(committed), context, proposal))
        return proposal

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)


class Twin:
    """The target and the draft in float32, which read the text themselves."""

    def __init__(self, bundle: Bundle, name: str) -> None:
        self._target = Target(bundle, OPTIONS)
        self._drafter = opened(bundle, name, self._target)

    def propose(self, committed: list[int], k: int, context: DraftContext) -> Proposal:
        """After a longer text than before, or another."""
        held = self._target.held(0)
        if committed[: len(held)] != held:
            self._target.cache.rewind_to(0, 0)
            self._drafter.reset()
        start = self._target.cache.lengths[0]
        self._target.forward([Rows(0, committed[start:-1], 0)])
        self._drafter.watch(start, self._target.rows(0))
        return self._drafter.propose(committed, k, context)


def laws_of(proposal: Proposal) -> np.ndarray:
    """[k,V]"""
    assert proposal.laws is not None
    return np.stack([law.probs_of(np.arange(VOCABULARY)) for law in proposal.laws])


def apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Total variation of laws [n,V], each in [0,1]."""
    return 0.5 * np.abs(one - other).sum(-1)


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """The laws that can be compared: those after the same drafted tokens."""
    return next((index + 1 for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def fixed(k: int) -> SpeculativeConfig:
    return SpeculativeConfig(k, COUNT, 0.0, strict_mode=True, adaptive=False)


def played(bundle: Bundle, name: str, params: SamplingParams, k: int = 5) -> Recorder:
    """Texts of all prompts, each the plain one."""
    target = Target(bundle, OPTIONS, floor=2)
    recorder = Recorder(opened(bundle, name, target))
    for prompt in PROMPTS:
        target.cache.rewind_to(0, 0)
        plain = SpeculativeDecoder(target, None, fixed(0)).generate(prompt, params)
        assert len(plain) == COUNT
        target.cache.rewind_to(0, 0)
        recorder.reset()
        assert SpeculativeDecoder(target, recorder, fixed(k)).generate(prompt, params) == plain
    return recorder


@pytest.mark.parametrize("name", CASES)
def test_proposals_are_those_of_float32(name: str, bundles: dict[str, Bundle]) -> None:
    recorder, twin = played(bundles["fp16"], name, WARM), Twin(bundles["fp32"], name)
    taps = np.abs(np.concatenate(recorder.features)).reshape(-1, CASES[name].taps, HIDDEN)
    assert taps.max() < LARGEST
    for tap in range(CASES[name].taps):
        assert np.median(taps[:, tap]) > LARGEST / 3 and np.quantile(taps[:, tap], 0.02) > LARGEST / 5
    errors, firsts = [], []
    for committed, context, proposal in recorder.made:
        laws = laws_of(proposal)
        assert np.isfinite(laws).all() and np.abs(laws.sum(1) - 1).max() < 1e-5
        right = twin.propose(committed, len(proposal.tokens), context)
        count = agreeing(proposal.tokens, right.tokens)
        errors.append(apart(laws, laws_of(right))[:count].max())
        firsts.append(laws[0])
    others = np.median(apart(np.stack(firsts[1:]), np.stack(firsts[:-1])))
    print(f"{name}: {len(errors)} proposals, laws within {max(errors):.1e}, of other rounds {others:.2f} apart")
    assert len(errors) >= len(PROMPTS) * COUNT / 6
    assert max(errors) <= CASES[name].close and others >= OTHER


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", CASES)
def test_texts_are_the_plain_ones(name: str, params: SamplingParams, bundles: dict[str, Bundle]) -> None:
    for k in (1, 3, 7):
        assert len(played(bundles["fp16"], name, params, k).made) >= len(PROMPTS) * COUNT / (k + 1) - len(PROMPTS)
