"""One pass that overflowed must not outlive its text: neither in a draft's cache nor in the target's."""

from dataclasses import replace

import numpy as np
import pytest
from neural_bundles import DRAFTS, write_neural_bundle

from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import Drafter
from oxidize.runtime.drafts import open_drafters
from oxidize.runtime.errors import OxidizeError
from oxidize.runtime.rows import PassRows
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Target

OPTIONS = RuntimeOptions("cpu", 1)
CONFIG = SpeculativeConfig(3, 12, min_acceptance_rate=0.0, adaptive=False)
LONG = list(range(40, 80))  # its rows reach further than those of the next texts
PROMPTS = [[5, 6, 7, 8, 9], [9, 10, 11, 12], [5, 6, 30, 31]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Of profile std, whose attention multiplies stale rows by zero."""
    folder = write_neural_bundle(tmp_path_factory.mktemp("overflow"), profile="std")
    return Target(open_bundle(folder), OPTIONS, floor=2)


def texts(target: Target, drafter: Drafter | None) -> list[list[int]]:
    target.cache.rewind_to(0, 0)
    decoder = SpeculativeDecoder(target, drafter, CONFIG if drafter else replace(CONFIG, draft_tokens_per_step=0))
    return [decoder.generate(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_works_again_in_the_next_text(
    target: Target, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (drafter,) = open_drafters(target.bundle, [kind], OPTIONS, None, target)
    plain = texts(target, None)
    rows = target.rows

    def overflowing(index: int) -> PassRows:
        found = rows(index)
        taps = found.taps
        return PassRows(found.hidden * np.float32(np.inf), None if taps is None else taps * np.float32(np.inf))

    decoder = SpeculativeDecoder(target, drafter, CONFIG)
    target.cache.rewind_to(0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(target, "rows", overflowing)
        assert len(decoder.generate(LONG)) == 12
    assert f"draft '{kind}' broke down" in caplog.text
    caplog.clear()
    before = decoder.stats.draft_tokens
    assert before == 0
    for prompt, text in zip(PROMPTS, plain, strict=True):
        assert decoder.generate(prompt) == text
        assert decoder.stats.draft_tokens > 0
    assert not caplog.text


def test_the_target_works_again_in_the_next_text(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = texts(target, None)
    decoder = SpeculativeDecoder(target, None, replace(CONFIG, draft_tokens_per_step=0))
    target.cache.rewind_to(0, 0)
    forward = target.forward

    def overflowing(requests):
        logits = forward(requests)
        target.cache.fill_stale(np.nan)
        for row in logits:
            row[:] = np.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", overflowing)
        with pytest.raises(OxidizeError, match="NaN logits"):
            decoder.generate(LONG)
    assert [decoder.generate(prompt) for prompt in PROMPTS] == plain
