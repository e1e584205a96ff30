"""Medusa heads in the loop, on a toy and on real graphs: never another text, and each proposal as torch makes it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_hf_checkpoint
from draft_checkpoints_medusa import VARIANTS, MedusaReference, medusa_tensors, write_medusa
from fakes import hashed_logits
from laws import assert_follows, text_law
from medusa_toys import HEADS, ToyHeads, export_toy_heads, toy_forms
from safetensors.numpy import load_file
from toy_drafts import ToyTarget

from oxidize.cli.main import run
from oxidize.runtime.bundle import Bundle, open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import DraftContext, Drafter, Proposal
from oxidize.runtime.drafters.medusa import Medusa
from oxidize.runtime.drafters.neural import open_neural
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.errors import BundleError
from oxidize.runtime.request import Request
from oxidize.runtime.rows import PassRows
from oxidize.runtime.sampling import SamplingParams, law_of
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Target

OPTIONS = RuntimeOptions(provider="cpu", threads=1)
WARM = SamplingParams(temperature=1.0, seed=5)
FORMS = toy_forms(6, truncated=4)
SHORT = ([1], [1, 2], [1, 2, 3, 4, 5] * 3, [1, 2, 3, 4, 5, 0], [2], [1, 2, 3, 4, 5] * 3)


def fixed(k: int, count: int, **rest) -> SpeculativeConfig:
    return SpeculativeConfig(
        draft_tokens_per_step=k, max_new_tokens=count, min_acceptance_rate=0.0, adaptive=False, **rest
    )


class Checked:
    """A drafter whose every proposal is compared with what `logits_of(committed)` [heads,V] makes of it."""

    def __init__(self, drafter: Medusa, logits_of) -> None:
        self._drafter, self._logits_of = drafter, logits_of
        self.made: list[tuple[int, ...]] = []

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        proposal = self._drafter.propose(committed, k, context)
        if not proposal.tokens:
            return proposal
        assert proposal.laws is not None and len(proposal.tokens) == min(k, self._drafter.most)
        self.made.append(proposal.tokens)
        for law, row in zip(proposal.laws, self._logits_of(list(committed)), strict=False):
            right = torch.from_numpy(row).double().softmax(-1).numpy()
            found = law.probs_of(np.arange(len(row)))
            if len(law.probs) == 1:  # greedy
                assert right[found.argmax()] >= right.max() - 1e-4
            else:
                np.testing.assert_allclose(found, right, atol=1e-4)
        return proposal

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)


# A toy target, whose rows and laws depend on every token before.


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ToyHeads]:
    root = tmp_path_factory.mktemp("medusa")
    return {name: export_toy_heads(root / name, variant) for name, variant in FORMS.items()}


@pytest.fixture(params=FORMS)
def heads(request: pytest.FixtureRequest, forms: dict[str, ToyHeads]) -> ToyHeads:
    return forms[request.param]


def toy_decoder(heads: ToyHeads, config: SpeculativeConfig, **options) -> tuple[SpeculativeDecoder, Checked]:
    target = ToyTarget(6, **options)
    checked = Checked(heads.drafter(target), lambda committed: heads.logits(target, committed))
    return SpeculativeDecoder(target, checked, config), checked


def plain_toy(prompt: Sequence[int], count: int, params: SamplingParams, eos: Sequence[int] = ()) -> list[int]:
    return SpeculativeDecoder(ToyTarget(6), None, fixed(0, count)).generate(prompt, params, eos=eos)


@pytest.mark.parametrize("params", [SamplingParams(), WARM], ids=["greedy", "warm"])
def test_texts_of_one_decoder_equal_plain_ones(heads: ToyHeads, params: SamplingParams) -> None:
    """One decoder, prompts that share beginnings or nothing, every k and one more: the plain text."""
    for k in range(1, HEADS + 2):
        decoder, checked = toy_decoder(heads, fixed(k, 30, strict_mode=True))
        for prompt in SHORT:
            assert decoder.generate(prompt, params) == plain_toy(prompt, 30, params)
        assert len(checked.made) > 20
        assert max(map(len, checked.made)) == min(k, HEADS)
        assert decoder.stats.accepted_draft_tokens > 0


class RememberingTarget(ToyTarget):
    """Computes every row once."""

    def __init__(self, vocabulary: int) -> None:
        self.logits_of = cache(lambda context: hashed_logits(context, vocabulary))
        super().__init__(vocabulary, rule=lambda context, _: self.logits_of(tuple(context)))
        self._rows_of = cache(super().rows_of)

    def rows_of(self, tokens: Sequence[int], start: int) -> PassRows:
        return self._rows_of(tuple(tokens), start)


@pytest.mark.parametrize("form", ["own", "map"])
def test_the_reject_rule_keeps_the_targets_law(form: str, forms: dict[str, ToyHeads]) -> None:
    """Chi-square over seeded texts of six tokens: the first comes without a draft, then there is room for all heads."""
    target, cut = RememberingTarget(6), SamplingParams(temperature=1.0, top_k=2)
    decoder = SpeculativeDecoder(target, forms[form].drafter(target), fixed(HEADS, 6))
    texts, drafted, accepted = [], 0, 0
    for seed in range(2500):
        texts.append(tuple(decoder.generate([1, 2], replace(cut, seed=seed))))
        drafted += decoder.stats.draft_tokens
        accepted += decoder.stats.accepted_draft_tokens
    assert drafted >= 2 * len(texts) and 0.1 < accepted / drafted < 0.9
    assert_follows(texts, text_law(lambda tokens: law_of(target.logits_of((1, 2, *tokens)), cut), 6))


@pytest.mark.parametrize("floor", [1, 2])
def test_other_drafters_and_quiet_texts_beside(heads: ToyHeads, floor: int) -> None:
    decoder, checked = toy_decoder(heads, fixed(3, 60), floor=floor)
    assert len(decoder.generate([1, 2, 3], WARM)) == 60
    made = len(checked.made)
    assert made > 5
    decoder = SpeculativeDecoder(decoder.target, [NgramDrafter(1), checked], fixed(3, 60))
    assert len(decoder.generate([1, 2, 3, 1, 2], WARM)) == 60
    quiet = SpeculativeConfig(draft_tokens_per_step=0, max_new_tokens=20)
    list(decoder.stream([1, 2, 3, 1, 2, 4, 5], WARM, config=quiet))  # the drafter sees nothing of this text
    decoder.generate([1, 2, 3, 1, 2, 4, 5, 0, 0], WARM)
    assert len(checked.made) > made


def test_every_token_as_the_end(heads: ToyHeads) -> None:
    """Drafted and rejected, accepted between others, or never drafted: an end ends the plain text there."""
    decoder, checked = toy_decoder(heads, fixed(HEADS, 40, strict_mode=True))
    inside = rejected = 0
    for end in range(6):
        for seed in range(12):
            params = SamplingParams(temperature=1.0, seed=seed)
            plain = plain_toy([1, 2], 40, params, eos={end})
            checked.made.clear()
            emissions = list(decoder.stream([1, 2], params, eos={end}))
            assert [token for emission in emissions for token in emission.tokens] == plain
            inside += 0 < emissions[-1].accepted == len(emissions[-1].tokens) < HEADS
            rejected += sum(end in tokens for tokens in checked.made) > 1
    assert rejected > 0 and (inside > 0 or heads.reference.variant.truncated)


def test_room_smaller_than_the_heads(heads: ToyHeads) -> None:
    decoder, _ = toy_decoder(heads, fixed(HEADS, 40, strict_mode=True), context=20)
    for length in (1, 12, 16, 17, 18, 19):
        prompt = ([1, 2, 3, 4] * 5)[:length]
        count = min(40, 20 - length)
        found = decoder.stream(prompt, WARM, config=fixed(HEADS, count, strict_mode=True))
        assert [token for emission in found for token in emission.tokens] == plain_toy(prompt, count, WARM)


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_prompts_in_chunks_and_texts_given_up(heads: ToyHeads, chunk: int) -> None:
    decoder, checked = toy_decoder(heads, fixed(3, 12, strict_mode=True))
    for prompt in SHORT:
        for rounds in (1, 3):
            stream = decoder.stream(prompt, WARM, chunk=chunk)
            for _ in range(rounds):
                next(stream)
            stream.close()
        found = decoder.stream(prompt, WARM, chunk=chunk)
        assert [token for emission in found for token in emission.tokens] == plain_toy(prompt, 12, WARM)
    assert checked.made


def test_a_repeated_prompt_costs_one_row(heads: ToyHeads) -> None:
    """The rows of the prompt are gone, and but for the one before the anchor nobody misses them."""
    decoder, checked = toy_decoder(heads, fixed(3, 12, strict_mode=True))
    prompt = [1, 2, 3, 4, 5] * 40
    first = decoder.generate(prompt, WARM)
    checked.made.clear()
    assert decoder.generate(prompt, WARM) == first and checked.made
    assert decoder.stats.cached_tokens == len(prompt) - 2


# Real targets: exported from published files.


@cache
def exported(folder: Path, precision: str, profile: str, names: tuple[str, ...]) -> Bundle:
    """A bundle of a random target, whose head has rows of padding, with these variants of heads."""
    target = write_hf_checkpoint(folder / "target", "padded_vocab")
    arguments = ["export", str(target), "-o", str(folder / "bundle"), "--no-eval", "--precision", precision]
    arguments += ["--profile", profile]
    for name in names:
        arguments += ["--draft-model", str(write_medusa(folder / name, name, seed=2))]
    assert run(arguments) == 0
    return open_bundle(folder / "bundle")


REAL = ("reference", "version2", "vllm_one", "vllm_map", "uploaded")
PROMPTS = ([7], [7, 8], list(range(5, 70)), list(range(5, 40)), [9] * 30)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported(tmp_path_factory.mktemp("real"), "fp32", "ort", REAL)


def open_heads(bundle: Bundle, name: str, target: Target) -> Medusa:
    entry = next(entry for entry in bundle.manifest.drafts if entry.name == name)
    drafter = open_neural(bundle, entry, target, OPTIONS)
    assert isinstance(drafter, Medusa)
    return drafter


class Watched(Checked):
    """Keeps the rows of a real target by position, for torch to start from."""

    def __init__(self, bundle: Bundle, name: str, target: Target) -> None:
        super().__init__(open_heads(bundle, name, target), self._logits)
        stored = load_file(bundle.folder.parent / "target/model.safetensors")["lm_head.weight"]
        self.head = torch.from_numpy(stored.astype(np.float32))
        self._reference = MedusaReference(name, medusa_tensors(VARIANTS[name], seed=2), self.head)
        self._rows, self._count = np.zeros((512, stored.shape[1]), np.float32), target.token_count
        self.anchors: list[tuple[int, int]] = []  # of the text, and what the target's head makes of the row read

    def watch(self, start: int, rows: PassRows) -> None:
        self._rows[start : start + len(rows.hidden)] = rows.hidden
        self._drafter.watch(start, rows)

    def _logits(self, committed: list[int]) -> np.ndarray:
        row = torch.from_numpy(self._rows[len(committed) - 2])
        self.anchors.append((committed[-1], int((self.head @ row)[: self._count].argmax())))
        return self._reference.logits(row).numpy()[:, : self._count]


@pytest.mark.parametrize("name", REAL)
def test_proposals_are_those_of_torch(name: str, real: Bundle) -> None:
    target = Target(real, OPTIONS)
    watched = Watched(real, name, target)
    decoder = SpeculativeDecoder(target, watched, fixed(4, 12))
    for prompt in PROMPTS:
        decoder.generate(prompt, WARM)
    assert len(watched.made) >= 12


def test_the_row_read_is_the_one_that_gave_the_anchor(real: Bundle) -> None:
    target = Target(real, OPTIONS)
    watched = Watched(real, "reference", target)
    decoder = SpeculativeDecoder(target, watched, fixed(3, 30))
    for prompt in PROMPTS:
        decoder.generate(prompt)
    assert len(watched.anchors) > 50
    assert all(anchor == given for anchor, given in watched.anchors)


@pytest.mark.parametrize("name", REAL)
def test_greedy_and_seeded_texts_are_the_plain_ones(name: str, real: Bundle) -> None:
    """Every k up to the heads and one more, one decoder for all prompts, in exact mode."""
    target = Target(real, OPTIONS, floor=2)
    heads = open_heads(real, name, target)
    for params in (SamplingParams(), WARM):
        plain = [SpeculativeDecoder(target, None, fixed(0, 20)).generate(prompt, params) for prompt in PROMPTS]
        for k in range(1, heads.most + 2):
            heads.reset()
            decoder = SpeculativeDecoder(target, heads, fixed(k, 20, strict_mode=True))
            assert [decoder.generate(prompt, params) for prompt in PROMPTS] == plain, k


def test_all_heads_at_once(real: Bundle) -> None:
    target = Target(real, OPTIONS, floor=2)
    drafts: list[Drafter] = [NgramDrafter(1), *(open_heads(real, name, target) for name in REAL)]
    plain = SpeculativeDecoder(target, None, fixed(0, 40)).generate(PROMPTS[2])
    assert SpeculativeDecoder(target, drafts, fixed(4, 40)).generate(PROMPTS[2]) == plain


@pytest.mark.parametrize(
    ("precision", "profile"), [("fp16", "ort"), ("fp16", "std"), ("int4", "ort"), ("int4", "std"), ("fp32", "std")]
)
def test_other_precisions_and_profiles(precision: str, profile: str, tmp_path: Path) -> None:
    bundle = exported(tmp_path, precision, profile, ("reference", "version2"))
    target = Target(bundle, OPTIONS, floor=2)
    plain = [SpeculativeDecoder(target, None, fixed(0, 20)).generate(prompt) for prompt in PROMPTS[:3]]
    for name in ("reference", "version2"):
        decoder = SpeculativeDecoder(target, open_heads(bundle, name, target), fixed(3, 20))
        assert [decoder.generate(prompt) for prompt in PROMPTS[:3]] == plain
        assert decoder.stats.draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engine_runs_them(temperature: float, real: Bundle) -> None:
    prompts = ("The quick brown fox jumps over the lazy dog. The quick", "The quick brown", "x")
    answers = {}
    for draft, k in (("none", 0), ("reference", 3), ("version2", 2), ("vllm_map", 3)):
        engine = Engine.open(real.folder, EngineOptions(OPTIONS, draft=draft, exact=True))
        request = Request(fixed(k, 30, strict_mode=True), SamplingParams(temperature, seed=7))
        answers[draft] = ["".join(delta.text for delta in engine.stream(engine.encode(p), request)) for p in prompts]
        assert engine.stats.drafter == draft and (engine.stats.draft_tokens > 0) == (k > 0)
    assert all(texts == answers["none"] for texts in answers.values())


def test_inspect_shows_them(real: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(real.folder)]) == 0
    shown = capsys.readouterr().out
    assert "draft      reference: medusa, " in shown
    assert "reads    final hidden states (of the row whose scores gave the anchor), 64 wide" in shown
    assert "model    3 heads, hidden 64, own head of 320, block 4" in shown
    assert "model    3 heads, hidden 64, the target's head, block 4" in shown
    assert "in       features float32[B,1,64]" in shown
    assert "out      logits float32[B,3,320]" in shown and "out      hidden float32[B,3,64]" in shown
    manifest = json.loads((real.folder / "manifest.json").read_text())
    size = {
        entry["name"]: manifest["files"][f"drafts/{entry['name']}/weights.bin"]["size"] for entry in manifest["drafts"]
    }
    table = 320 * 64 * 4
    assert size["version2"] < table < size["vllm_one"] < 2 * table < size["reference"]


def test_what_export_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_hf_checkpoint(tmp_path / "target", "padded_vocab")
    heads = write_medusa(tmp_path / "heads", "reference")
    arguments = ["export", str(target), "-o", str(tmp_path / "bundle"), "--draft-model"]
    assert run([*arguments, str(heads), "--dry-run"]) == 0
    assert "draft heads: medusa, 3 heads, reads the final hidden states (of the row" in capsys.readouterr().err
    (heads / "medusa_lm_head.safetensors").rename(heads / "medusa_lm_head.pt")
    assert run([*arguments, str(heads)]) == 1
    assert "is a pickle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"block_size": 1}, "has no Medusa heads"),
        ({"feature_size": 128}, "reads rows of 128 values, but the target's are of 64"),
        ({"hidden_size": 48}, "hidden size of 48"),
        ({"draft_vocab_size": 400}, "vocabulary of 400, but the target one of 320"),
    ],
)
def test_heads_that_do_not_fit_are_refused(facts: dict[str, int], text: str, real: Bundle) -> None:
    entry = next(entry for entry in real.manifest.drafts if entry.name == "reference")
    assert entry.neural is not None
    changed = replace(entry, neural=replace(entry.neural, **facts))
    with pytest.raises(BundleError, match=text):
        open_neural(real, changed, Target(real, OPTIONS), OPTIONS)
