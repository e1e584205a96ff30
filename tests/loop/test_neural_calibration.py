"""Drafts that read the target's rows are calibrated before the first token, and nothing of it shows in the text."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from neural_bundles import BLOCK, DRAFTS, write_neural_bundle

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.calibration import calibrate, load_or_calibrate
from oxidize.runtime.calibration_store import measurement_key
from oxidize.runtime.costs import CostCurve
from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.drafters.base import Drafter, Proposal
from oxidize.runtime.drafts import open_drafters
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.machine import Machine
from oxidize.runtime.policy import PassCost, Policy, PolicyConfig, Source
from oxidize.runtime.request import Request
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.stats import SpeculativeStats
from oxidize.runtime.target import Target

OPTIONS = RuntimeOptions(provider="cpu", threads=1)
MACHINE = Machine("a cpu", 4, 8 << 30, (), "1.32.0")
PROMPTS = ([*range(3, 60)], [*range(3, 40), 7, 8, 9])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_neural_bundle(tmp_path_factory.mktemp("neural"))


def opened(bundle: Path, names: Sequence[str] = DRAFTS) -> tuple[Target, tuple[Drafter, ...]]:
    target = Target(open_bundle(bundle), OPTIONS)
    return target, open_drafters(target.bundle, names, OPTIONS, None, target)


def test_every_kind_has_a_curve(bundle: Path) -> None:
    target, drafters = opened(bundle)
    found = calibrate(target, drafters, 0.1).drafts
    assert tuple(found) == DRAFTS
    assert all(curve.points[0][0] == 1 and curve.at(1) > 0 for curve in found.values())
    assert [curve.points[-1][0] for curve in found.values()] == [BLOCK - 1, 8, 8]


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("exact", [False, True])
def test_a_calibrated_drafter_is_as_good_as_new(bundle: Path, name: str, exact: bool, tmp_path: Path) -> None:
    """The same proposals in two texts, and no pass of the calibration is counted with them."""
    config = SpeculativeConfig(4, 24, 0.0, adaptive=False)

    def played(cache: Path | None) -> tuple[list[Proposal], list[SpeculativeStats]]:
        engine = Engine.open(bundle, EngineOptions(OPTIONS, draft=name, exact=exact, cache=cache))
        (drafter,) = engine.decoder.drafters
        assert engine.target.cache.lengths == [0] and drafter.known == 0
        proposals, stats, propose = [], [], drafter.propose
        drafter.propose = lambda *given: proposals.append(propose(*given)) or proposals[-1]
        for prompt in PROMPTS:
            list(engine.decoder.stream(prompt, SamplingParams(0.9, seed=7), config=config))
            stats.append(engine.stats)
        return proposals, stats

    (plain, before), (calibrated, after) = played(None), played(tmp_path)
    assert [each.tokens for each in plain] == [each.tokens for each in calibrated]
    laws = [[law.probs for proposal in each for law in proposal.laws or ()] for each in (plain, calibrated)]
    assert len(laws[0]) > 50 and all(map(np.array_equal, *laws))
    for old, new in zip(before, after, strict=True):
        assert (new.draft_tokens, new.draft_forward_passes) == (old.draft_tokens, old.draft_forward_passes)
        assert (new.rounds, new.cached_tokens) == (old.rounds, old.cached_tokens)
    assert len(list((tmp_path / "calibration").iterdir())) == 2


def test_the_policy_knows_what_drafts_cost_before_the_first_token(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Source] = []

    class Seen(Policy):
        def __init__(self, config: PolicyConfig, cost: PassCost, sources: Sequence[Source]) -> None:
            made.extend(sources)
            super().__init__(config, cost, sources)

    monkeypatch.setattr("oxidize.runtime.decoder.Policy", Seen)
    engine = Engine.open(bundle, EngineOptions(OPTIONS, draft=DRAFTS, cache=tmp_path))
    next(engine.stream(PROMPTS[0], Request()))
    assert [source.name for source in made] == list(DRAFTS)
    assert all(isinstance(source.draft, CostCurve) for source in made)
    known = load_or_calibrate(*opened(bundle), OPTIONS, tmp_path)
    assert {source.name: source.draft for source in made} == known.drafts


def test_the_second_time_nothing_is_run(bundle: Path, tmp_path: Path) -> None:
    first = load_or_calibrate(*opened(bundle), OPTIONS, tmp_path, 0.05)
    target, drafters = opened(bundle)
    assert load_or_calibrate(target, drafters, OPTIONS, tmp_path, 0.05) == first
    assert target.passes == 0 and all(drafter.passes == 0 for drafter in drafters)
    assert len(list((tmp_path / "calibration").iterdir())) == 1 + len(DRAFTS)


def test_a_draft_that_is_new_is_measured_alone(bundle: Path, tmp_path: Path) -> None:
    alone = load_or_calibrate(*opened(bundle, ["mtp"]), OPTIONS, tmp_path, 0.05)
    target, drafters = opened(bundle)
    found = load_or_calibrate(target, drafters, OPTIONS, tmp_path, 0.05)
    assert (found.target, found.drafts["mtp"]) == (alone.target, alone.drafts["mtp"])
    assert [drafter.passes > 0 for drafter in drafters] == [True, True, False]


def test_a_drafter_of_no_manifest_is_measured_and_not_kept(bundle: Path, tmp_path: Path) -> None:
    for _ in range(2):
        target, (drafter,) = opened(bundle, ["mtp"])
        drafter.name = "my own"
        assert load_or_calibrate(target, [drafter], OPTIONS, tmp_path, 0.05).drafts["my own"].at(1) > 0
        assert drafter.passes > 0
    assert len(list((tmp_path / "calibration").iterdir())) == 1


def test_the_key_has_all_that_makes_a_draft(bundle: Path, tmp_path: Path) -> None:
    """Graphs, weights and facts of the draft, and the target whose head it uses; not its name."""

    def keys(folder: Path) -> list[str]:
        target, _ = opened(folder, ["none"])
        manifest = target.bundle.manifest
        return [
            json.dumps(measurement_key(target, "proposal", OPTIONS, MACHINE, draft), sort_keys=True)
            for draft in manifest.drafts
        ]

    whole = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    folder = shutil.copytree(bundle, tmp_path / "copy")

    def changed(**parts: object) -> list[str]:
        (folder / "manifest.json").write_text(json.dumps({**whole, **parts}), encoding="utf-8")
        return keys(folder)

    plain = changed()
    assert plain == keys(bundle) and len(set(plain)) == len(DRAFTS)
    dflash, *others = whole["drafts"]
    files = {name: {**file, "sha256": "0" * 64} for name, file in whole["files"].items()}
    weights = "drafts/dflash/weights.bin"
    shorter = {**dflash, "neural": {**dflash["neural"], "block_size": 4}}
    alone = [
        changed(files={**whole["files"], weights: files[weights]}),
        changed(files={**whole["files"], "drafts/dflash/draft.onnx": files["drafts/dflash/draft.onnx"]}),
        changed(drafts=[shorter, *others]),
    ]
    for found in alone:
        assert found[0] != plain[0] and found[1:] == plain[1:]
    assert len({plain[0], *(found[0] for found in alone)}) == 4
    every = changed(files={**whole["files"], "weights.bin": files["weights.bin"]})
    assert not set(every) & set(plain)
    target, _ = opened(bundle, ["none"])
    draft = target.bundle.manifest.drafts[0]
    assert measurement_key(target, "proposal", OPTIONS, MACHINE, replace(draft, name="x")) == json.loads(plain[0])
