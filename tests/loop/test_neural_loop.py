"""Drafts that read the target's rows, in the real loop: never another text, and each proposal what it should be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dflash import DFLASH2, vocabulary_map, write_dflash
from draft_checkpoints_eagle import write_eagle
from draft_checkpoints_mtp import head_weights, write_mtp_checkpoint
from reference_dflash import DFlashReference, LayerRules, load_zlab
from reference_eagle import EagleReference
from reference_mtp import MtpReference
from toy_drafts import Naive, Toy, ToyTarget, open_toy

from oxidize.export.bundle import export_bundle
from oxidize.export.drafts.dflash2 import read_dflash2
from oxidize.export.drafts.dflash_hf import read_dflash
from oxidize.export.drafts.eagle_hf import open_eagle_hf
from oxidize.export.drafts.eagle_speculators import open_eagle_speculators
from oxidize.export.drafts.mtp import split_mtp
from oxidize.export.drafts.write import NeuralSource
from oxidize.export.plan import ExportPlan
from oxidize.export.source import open_source
from oxidize.runtime.bundle import Bundle, open_bundle
from oxidize.runtime.contracts import TensorSpec
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.drafters.neural import open_neural, row_picker
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.drafters.passes import MaskRule
from oxidize.runtime.drafters.reader import RowReader
from oxidize.runtime.errors import BundleError
from oxidize.runtime.rows import PassRows
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Target

OPTIONS = RuntimeOptions(provider="cpu", threads=1)
WARM = SamplingParams(temperature=1.0, seed=5)
TOYS = {
    "dflash": Toy("dflash", block=6, rule=MaskRule(False, False, 6), vocabulary=6),
    "eagle3": Toy("eagle3", rule=MaskRule(window=6), ids=(0, 1, 4, 5), vocabulary=6),
    "mtp": Toy("mtp", rule=MaskRule(window=4), vocabulary=6),
}


def fixed(k: int, count: int, **rest) -> SpeculativeConfig:
    return SpeculativeConfig(
        draft_tokens_per_step=k, max_new_tokens=count, min_acceptance_rate=0.0, adaptive=False, **rest
    )


class Checked:
    """A drafter whose proposals are looked at on their way: `check(committed, proposal)`."""

    def __init__(self, drafter: RowReader, check: Callable[[list[int], Proposal], None]) -> None:
        self._drafter, self._check = drafter, check
        self.made = 0

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        proposal = self._drafter.propose(committed, k, context)
        if proposal.tokens:
            self._check(list(committed), proposal)
            self.made += 1
        return proposal

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)


def toy_decoder(name: str, folder: Path, config: SpeculativeConfig, **options) -> SpeculativeDecoder:
    toy = TOYS[name]
    target = ToyTarget(6, **options)
    naive = Naive(toy, target)

    def check(committed: list[int], proposal: Proposal) -> None:
        assert proposal.laws is not None
        for law, right in zip(proposal.laws, naive.laws(committed, proposal.tokens), strict=True):
            found = law.probs_of(np.arange(6))
            if len(law.probs) == 1:  # greedy
                assert right[found.argmax()] >= right.max() - 1e-3
            else:
                np.testing.assert_allclose(found, right, atol=1e-3)

    return SpeculativeDecoder(target, Checked(open_toy(toy, target, folder), check), config)


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("params", [SamplingParams(), WARM], ids=["greedy", "warm"])
def test_texts_of_one_decoder_equal_plain_ones(name: str, params: SamplingParams, tmp_path: Path) -> None:
    """One decoder, prompts that share beginnings or nothing, every k: the plain text, under the match rule."""
    for k in (1, 2, 5):
        decoder = toy_decoder(name, tmp_path, fixed(k, 30, strict_mode=True))
        for prompt in ([1], [1, 2], [1, 2, 3, 4, 5] * 3, [1, 2, 3, 4, 5, 0], [2], [1, 2, 3, 4, 5] * 3):
            plain = SpeculativeDecoder(ToyTarget(6), None, fixed(0, 30)).generate(prompt, params)
            assert decoder.generate(prompt, params) == plain
        assert decoder.drafters[0].made > 20
        assert decoder.stats.accepted_draft_tokens > 0


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("floor", [1, 2])
def test_the_reject_rule_and_other_drafters_beside(name: str, floor: int, tmp_path: Path) -> None:
    decoder = toy_decoder(name, tmp_path, fixed(3, 60), floor=floor)
    assert len(decoder.generate([1, 2, 3], WARM)) == 60
    made = decoder.drafters[0].made
    assert made > 5
    decoder = SpeculativeDecoder(decoder.target, [NgramDrafter(1), *decoder.drafters], fixed(3, 60))
    assert len(decoder.generate([1, 2, 3, 1, 2], WARM)) == 60
    quiet = SpeculativeConfig(draft_tokens_per_step=0, max_new_tokens=20)
    list(decoder.stream([1, 2, 3, 1, 2, 4, 5], WARM, config=quiet))  # the drafter sees nothing of this text
    decoder.generate([1, 2, 3, 1, 2, 4, 5, 0, 0], WARM)
    assert decoder.drafters[1].made > made


@pytest.mark.parametrize("name", TOYS)
def test_every_token_as_the_end(name: str, tmp_path: Path) -> None:
    """Drafted or not, accepted mid-block or rejected, and where it is the mask: an end ends the plain text there."""
    decoder = toy_decoder(name, tmp_path, fixed(5, 40, strict_mode=True))
    for end in range(6):
        for prompt in ([1, 2], [end], [4, 4, 1]):
            plain = SpeculativeDecoder(ToyTarget(6), None, fixed(0, 40)).generate(prompt, WARM, eos={end})
            assert decoder.generate(prompt, WARM, eos={end}) == plain


@pytest.mark.parametrize("name", TOYS)
def test_room_smaller_than_a_draft(name: str, tmp_path: Path) -> None:
    decoder = toy_decoder(name, tmp_path, fixed(5, 40, strict_mode=True), context=20)
    for length in (1, 12, 16, 17, 18, 19):
        prompt = [1, 2, 3, 4] * 5
        count = min(40, 20 - length)
        plain = SpeculativeDecoder(ToyTarget(6), None, fixed(0, count)).generate(prompt[:length], WARM)
        found = decoder.stream(prompt[:length], WARM, config=fixed(5, count, strict_mode=True))
        assert [token for emission in found for token in emission.tokens] == plain


def test_a_prompt_of_many_chunks(tmp_path: Path) -> None:
    prompt = np.random.default_rng(0).integers(0, 6, 1300).tolist()
    for name in TOYS:
        decoder = toy_decoder(name, tmp_path, fixed(3, 8, strict_mode=True))
        plain = SpeculativeDecoder(ToyTarget(6), None, fixed(0, 8)).generate(prompt)
        assert decoder.generate(prompt) == plain and decoder.drafters[0].made


# Real targets with real graphs.


@dataclass(frozen=True)
class Real:
    """A bundle, and for each of its drafts logits [k,*] recomputed from rows [n,F] and tokens by torch."""

    bundle: Bundle
    references: dict[str, Callable[["Watched", list[int], Proposal], np.ndarray]]

    def open(self, name: str, target: Target) -> RowReader:
        entry = next(entry for entry in self.bundle.manifest.drafts if entry.name == name)
        return open_neural(self.bundle, entry, target, OPTIONS)


DRAFTS = ("dflash", "dflash_own", "dflash2", "dflash2_own", "eagle3", "eagle3_own", "mtp")
DFLASH_RULES = [LayerRules(True, 24), LayerRules(False, None), LayerRules(True, 24)]  # of the variant qwen35
DFLASH2_RULES = [LayerRules(False, 24)] * 3


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """Drafts whose taps overlap on one target of nine layers."""
    root = tmp_path_factory.mktemp("tapped")
    config = {**VARIANTS["llama2"], "num_hidden_layers": 9, "vocab_size": 320}
    checkpoint = open_source(str(write_hf_checkpoint(root / "target", config)))
    folders = {
        "dflash": write_dflash(root / "dflash", "qwen35", dtype="float32"),
        "dflash_own": write_dflash(root / "dflash_own", "qwen35", seed=1, dtype="float32", own_vocab=96),
        "dflash2": write_dflash(root / "dflash2", DFLASH2, dtype="float32"),
        "dflash2_own": write_dflash(root / "dflash2_own", DFLASH2, seed=1, dtype="float32", own_vocab=96),
        "eagle3": write_eagle(root / "eagle3", "target_head"),
        "eagle3_own": write_eagle(root / "eagle3_own", "speculators_sliding"),
    }
    readers = (read_dflash, read_dflash, read_dflash2, read_dflash2, open_eagle_hf, open_eagle_speculators)
    plan = ExportPlan("fp32")
    drafts = [
        NeuralSource(name, read(folder, checkpoint.config), plan)
        for (name, folder), read in zip(folders.items(), readers, strict=True)
    ]
    export_bundle(checkpoint, plan, root / "bundle", drafts)
    ids = torch.arange(96) + torch.from_numpy(vocabulary_map(96, seed=1)["d2t"]).long()
    references = {
        "dflash": block_reference(load_zlab(folders["dflash"], DFLASH_RULES), 310, 8),
        "dflash_own": block_reference(load_zlab(folders["dflash_own"], DFLASH_RULES), 310, 8, ids),
        "dflash2": path_reference(load_zlab(folders["dflash2"], DFLASH2_RULES)),
        "dflash2_own": path_reference(load_zlab(folders["dflash2_own"], DFLASH2_RULES), ids),
    }
    references |= {name: eagle_reference(EagleReference(folders[name])) for name in ("eagle3", "eagle3_own")}
    return Real(open_bundle(root / "bundle"), references)


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Real:
    root = tmp_path_factory.mktemp("mtp")
    head = head_weights("llama2", "mtp")
    checkpoint, draft = split_mtp(open_source(str(write_mtp_checkpoint(root / "target", "llama2", head))))
    assert draft is not None
    plan = ExportPlan("fp32")
    export_bundle(checkpoint, plan, root / "bundle", [NeuralSource("mtp", draft, plan)])
    reference = MtpReference(head, VARIANTS["llama2"])
    return Real(open_bundle(root / "bundle"), {"mtp": mtp_reference(reference)})


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Real:
    return request.getfixturevalue("with_mtp" if request.node.callspec.params["name"] == "mtp" else "tapped")


class Watched(Checked):
    """Keeps the rows of a real target by position, and compares laws at temperature 1 with the reference's."""

    def __init__(self, real: Real, name: str, target: Target) -> None:
        super().__init__(real.open(name, target), self._compare)
        self.target, self._reference = target, real.references[name]
        neural = next(entry.neural for entry in real.bundle.manifest.drafts if entry.name == name)
        assert neural is not None
        self._pick = row_picker(neural.taps, target.taps)
        self.features = np.zeros((512, neural.feature_size), np.float32)

    def watch(self, start: int, rows: PassRows) -> None:
        picked = np.concatenate(self._pick(rows), 1)
        self.features[start : start + len(picked)] = picked
        self._drafter.watch(start, rows)

    def known_rows(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.features[:count].copy())

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(self.target.embed_tokens(tokens).read()[0].copy())

    def scored(self, hidden: torch.Tensor) -> np.ndarray:
        """[n,H] -> [n,V], by the target's head."""
        tensor = self.target.embed_tokens([0] * len(hidden))  # of the right shape
        tensor.write(hidden.float().numpy()[None])
        return self.target.score(tensor, len(hidden)).copy()

    def _compare(self, committed: list[int], proposal: Proposal) -> None:
        assert proposal.laws is not None
        logits = self._reference(self, committed, proposal)[: len(proposal.laws)].astype(np.float64)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        for law, right in zip(proposal.laws, weights / weights.sum(1, keepdims=True), strict=True):
            np.testing.assert_allclose(law.probs_of(np.arange(len(right))), right, atol=1e-4)


def widened(logits: torch.Tensor, tokens: torch.Tensor | None, count: int) -> np.ndarray:
    """Logits of a draft's own vocabulary as logits of the target's."""
    wide = torch.full((len(logits), 320), -torch.inf, dtype=torch.float64)
    wide[:, torch.arange(logits.shape[1]) if tokens is None else tokens] = logits.double()
    return wide[:, :count].numpy()


def block_reference(reference: DFlashReference, mask: int, size: int, ids_of_head: torch.Tensor | None = None):
    def logits(watched: Watched, committed: list[int], proposal: Proposal) -> np.ndarray:
        hidden = block_hidden(reference, watched, committed, mask, size)
        if "lm_head.weight" not in reference.tensors:
            return watched.scored(hidden)
        return widened(reference.logits(hidden), ids_of_head, watched.target.token_count)

    return logits


def block_hidden(reference: DFlashReference, watched: Watched, committed: list[int], mask: int, size: int):
    """Hidden states [S-1,H] of the rows behind the anchor."""
    ids = [committed[-1]] + [mask] * (size - 1)
    own = reference.tensors.get("embed_tokens.weight")
    block = watched.embed(ids) if own is None else own[ids]
    return reference.hidden(watched.known_rows(len(committed) - 1), block)[1:]


def path_reference(reference: DFlashReference, ids_of_head: torch.Tensor | None = None):
    """DFlash 2: scores of the likeliest tokens of each row behind the one drafted before, -inf elsewhere."""
    scored = block_reference(reference, 310, 8, ids_of_head)

    def logits(watched: Watched, committed: list[int], proposal: Proposal) -> np.ndarray:
        unary = torch.from_numpy(scored(watched, committed, proposal).astype(np.float32))
        hidden = block_hidden(reference, watched, committed, 310, 8)
        wide = np.full(unary.shape, -np.inf)
        for row, before in enumerate([committed[-1], *proposal.tokens[:-1]]):
            tokens, scores = reference.pair_scores(hidden, unary, row, before)
            wide[row, tokens.numpy()] = scores.numpy()
        return wide

    return logits


def eagle_reference(reference: EagleReference):
    def logits(watched: Watched, committed: list[int], proposal: Proposal) -> np.ndarray:
        tokens = [*committed[1:], *proposal.tokens[:-1]]
        own = reference.tensors.get("embed_tokens.weight")
        embeds = watched.embed(tokens) if own is None else own[tokens]
        fused, found = reference.fuse(watched.known_rows(len(committed) - 1)), []
        for end in range(len(committed) - 1, len(tokens) + 1):
            scores, recycled = reference.forward(fused, embeds[:end])
            found.append(scores[-1])
            fused = torch.cat([fused, recycled[-1:]])
        rows = torch.stack(found)
        if "lm_head.weight" not in reference.tensors:
            return watched.scored(rows)
        return widened(rows, reference.tokens, watched.target.token_count)

    return logits


def mtp_reference(reference: MtpReference):
    def logits(watched: Watched, committed: list[int], proposal: Proposal) -> np.ndarray:
        embeds = watched.embed([*committed[1:], *proposal.tokens[:-1]])
        context = len(committed) - 1
        return watched.scored(reference.propose(watched.known_rows(context), embeds, context))

    return logits


PROMPTS = ([7], [7, 8], list(range(5, 70)), list(range(5, 40)), [9] * 280)


@pytest.mark.parametrize("name", DRAFTS)
def test_proposals_are_those_of_torch(name: str, real: Real) -> None:
    """Over prompts of one token, of many, with common beginnings, across windows and the first growth of the cache."""
    target = Target(real.bundle, OPTIONS)
    watched = Watched(real, name, target)
    decoder = SpeculativeDecoder(target, watched, fixed(4, 12))
    for prompt in PROMPTS:
        decoder.generate(prompt, WARM)
    assert watched.made >= 12


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_and_seeded_texts_are_the_plain_ones(name: str, real: Real) -> None:
    target = Target(real.bundle, OPTIONS, floor=2)
    draft = real.open(name, target)
    for params in (SamplingParams(), WARM):
        for prompt in PROMPTS[:4]:
            plain = SpeculativeDecoder(target, None, fixed(0, 20)).generate(prompt, params)
            for k in range(1, 8):
                target.cache.rewind_to(0, 0)
                decoder = SpeculativeDecoder(target, draft, fixed(k, 20, strict_mode=True))
                draft.reset()
                assert decoder.generate(prompt, params) == plain, (k, prompt)


def test_a_target_and_all_its_drafts_at_once(tapped: Real) -> None:
    target = Target(tapped.bundle, OPTIONS, floor=2)
    drafts = [tapped.open(name, target) for name in DRAFTS[:-1]]
    plain = SpeculativeDecoder(target, None, fixed(0, 40)).generate(PROMPTS[2])
    decoder = SpeculativeDecoder(target, [NgramDrafter(1), *drafts], fixed(4, 40))
    assert decoder.generate(PROMPTS[2]) == plain


# What does not fit is refused.


def changed(real: Real, name: str, **facts) -> tuple:
    entry = next(entry for entry in real.bundle.manifest.drafts if entry.name == name)
    assert entry.neural is not None
    return entry, replace(entry, neural=replace(entry.neural, **facts))


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("dflash", {"taps": (0, 2, 3, 6, 7)}, r"layers \[0, 2, 3, 6, 7\].*give those of \[0, 1, 2, 3, 4, 5, 6, 8\]"),
        ("dflash", {"feature_size": 128}, "reads rows of 128 values, but the target's are of 320"),
        ("dflash", {"hidden_size": 48}, "hidden size of 48.*target of hidden size 64"),
        ("dflash_own", {"draft_vocab_size": 999}, "vocabulary of 999.*of 320"),
        ("dflash", {"mask_token_id": None}, "needs a mask token"),
        ("dflash", {"block_size": 1}, "a block of at least 2 tokens.*block_size 1"),
        ("dflash", {"sliding_window": None}, "sliding layers, but a window of None"),
        ("eagle3_own", {"draft_vocab_size": 95}, "vocabulary of 95, but its d2t names 96"),
    ],
)
def test_a_draft_that_does_not_fit(tapped: Real, name: str, facts: dict, message: str) -> None:
    target = Target(tapped.bundle, OPTIONS)
    with pytest.raises(BundleError, match=message):
        open_neural(tapped.bundle, changed(tapped, name, **facts)[1], target, OPTIONS)


def test_a_draft_without_its_graphs_or_of_another_type(tapped: Real) -> None:
    target = Target(tapped.bundle, OPTIONS)
    entry, _ = changed(tapped, "eagle3")
    for role in ("draft", "fuse"):
        rest = tuple(graph for graph in entry.graphs if graph.role != role)
        with pytest.raises(BundleError, match=f"has no {role} graph"):
            open_neural(tapped.bundle, replace(entry, graphs=rest), target, OPTIONS)
    graph = next(graph for graph in entry.graphs if graph.role == "draft")
    inputs = tuple(
        TensorSpec(spec.name, "float16", spec.shape) if spec.name == "inputs_embeds" else spec
        for spec in graph.contract.inputs
    )
    half = replace(graph, contract=replace(graph.contract, inputs=inputs))
    graphs = tuple(half if each is graph else each for each in entry.graphs)
    with pytest.raises(BundleError, match="computes in float16, but the target in float32"):
        open_neural(tapped.bundle, replace(entry, graphs=graphs), target, OPTIONS)
