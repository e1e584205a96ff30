"""`oxidize verify`: the whole measurement on tiny bundles, and on targets and decoders that are made to fail."""

import json

import numpy as np
import pytest
from neural_bundles import DRAFTS, write_neural_bundle

from oxidize.cli import main
from oxidize.cli.verify import PROMPTS
from oxidize.runtime import trials, verify
from oxidize.runtime.decoder import SpeculativeDecoder
from oxidize.runtime.target import Target

SHORT = ("--tokens", "12", "--prompts", "3", "--threads", "1")
CHECKS = ["default greedy", "exact greedy", "exact sampled", "exact, other chunks", "exact, batch of 4"]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(main.COMMANDS, "verify", "Show that drafts do not change the text here.")


def test_a_sound_bundle_passes(oxidize, bundle):
    result = oxidize("verify", bundle, *SHORT)
    assert result.code == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0] == "cpu, fp32, 3 prompts of 12 tokens"
    for name in CHECKS:
        assert sum(line.startswith(name) for line in lines) >= 1, name
    assert lines[-2].startswith("exact mode: bitwise equal, 0 of ")
    assert lines[-1].startswith("default mode: ")


def test_json_is_one_line_with_everything(oxidize, bundle):
    result = oxidize("verify", bundle, *SHORT, "--json", "--draft-model", bundle, "--draft-model", "ngram", "--full")
    assert result.code == 0
    assert result.out.count("\n") == 1
    report = json.loads(result.out)
    assert report["passed"] is True and report["floor_holds"] is True
    assert report["drafters"] == ["bundle", "ngram", "random"]
    assert [check["name"] for check in report["checks"]] == CHECKS
    assert [check["texts"] for check in report["checks"]] == [27, 27, 27, 3, 3]
    assert not any(each["differing"] for each in report["floored"])
    assert report["noise"][0]["widths"] == [1] and report["noise"][0]["largest"] > 0


def test_prompts_of_ones_own(oxidize, bundle, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("The quick brown fox\n\ndef add(left, right):\n", encoding="utf-8")
    report = json.loads(oxidize("verify", bundle, "--prompt-file", file, "--tokens", 8, "--json").out)
    assert report["prompts"] == 2
    assert report["plan"]["tokens"] == 8


def test_std_bundles_are_measured_too(oxidize, tiny_bundle):
    result = oxidize("verify", tiny_bundle("llama2", "int4", ("std",)), *SHORT, "--json")
    assert result.code == 0
    assert len(json.loads(result.out)["checks"]) == len(CHECKS)


def test_all_drafts_that_read_the_target_share_one(oxidize, tmp_path, monkeypatch):
    """Beside the targets of default mode, exact mode and the batch, that is; without such a draft there is none."""
    folder, opened = write_neural_bundle(tmp_path), []
    original = Target.__init__

    def count(self, bundle, *arguments, **options):
        opened.append(bundle.folder)
        original(self, bundle, *arguments, **options)

    monkeypatch.setattr(Target, "__init__", count)
    named = [word for name in DRAFTS for word in ("--draft-model", name)]
    result = oxidize("verify", folder, "--tokens", "6", "--prompts", "2", "--threads", "1", "--json", *named)
    assert result.code == 0
    assert json.loads(result.out)["drafters"] == [*DRAFTS, "random"]
    assert opened == [folder] * 4
    opened.clear()
    oxidize("verify", folder, "--tokens", "2", "--prompts", "1", "--threads", "1", "--draft-model", "ngram")
    assert opened == [folder] * 3


def test_logits_that_depend_on_the_width_under_the_floor_exit_3(oxidize, bundle, monkeypatch):
    """As if a kernel rounded passes of 65 rows otherwise, floor or not."""

    class Rounding(Target):
        def forward(self, requests):
            rows = super().forward(requests)
            if len(requests[0].tokens) == 65:
                rows[0][:, 5] += np.float32(1e-5)
            return rows

    monkeypatch.setattr(verify, "Target", Rounding)
    result = oxidize("verify", bundle, *SHORT)
    assert result.code == 3
    assert "exact mode: NOT bitwise equal, 0 of" in result.out
    assert result.err.startswith("error: ") and result.err.count("\n") == 1


def break_last_token(monkeypatch, floor):
    """A decoder that changes the last token of drafted texts on targets with this floor."""

    class Wrong(SpeculativeDecoder):
        def stream(self, *arguments, **options):
            emissions = list(super().stream(*arguments, **options))
            if self.drafters and self.target.floor == floor:
                last = emissions[-1].tokens
                object.__setattr__(emissions[-1], "tokens", (*last[:-1], (last[-1] + 1) % 200))
            return iter(emissions)

    monkeypatch.setattr(verify, "SpeculativeDecoder", Wrong)


def test_a_gap_that_noise_does_not_explain_exits_3(oxidize, bundle, monkeypatch):
    break_last_token(monkeypatch, floor=1)
    result = oxidize("verify", bundle, *SHORT, "--json")
    report = json.loads(result.out)
    assert result.code == 3
    assert report["passed"] is False
    assert [check["broken"] for check in report["checks"]] == [6, 0, 0, 0, 0]
    first = report["checks"][0]["partings"][0]
    assert first["position"] == 11 and first["gap"] > 2 * first["noise"] > 0
    assert "GAPS EXCEED TWICE THE NOISE" in result.err


def test_any_parting_in_exact_mode_exits_3(oxidize, bundle, monkeypatch):
    break_last_token(monkeypatch, floor=2)
    result = oxidize("verify", bundle, *SHORT)
    assert result.code == 3
    assert "exact mode: NOT bitwise equal, 12 of" in result.out
    assert "exact greedy: prompt 1, ngram, k=1, token 11:" in result.out


def test_a_batch_that_mixes_up_its_slots_exits_3(oxidize, bundle, monkeypatch):
    real = trials.play_together
    monkeypatch.setattr(verify, "play_together", lambda *arguments: real(*arguments)[::-1])
    report = json.loads(oxidize("verify", bundle, *SHORT, "--json").out)
    assert [check["broken"] for check in report["checks"]][:4] == [0, 0, 0, 0]
    assert report["checks"][4]["broken"] > 0


def test_a_text_that_depends_on_the_prefill_chunk_exits_3(oxidize, bundle, monkeypatch):
    class Chunky(SpeculativeDecoder):
        def stream(self, prompt, params=None, eos=(), config=None, chunk=512, wishes=None):
            prompt = prompt if chunk == 512 else [*prompt[:-1], 5]
            return super().stream(prompt, params, eos, config, chunk, wishes)

    monkeypatch.setattr(verify, "SpeculativeDecoder", Chunky)
    report = json.loads(oxidize("verify", bundle, *SHORT, "--json").out)
    assert [bool(check["broken"]) for check in report["checks"]] == [False, False, False, True, False]


def test_usage_errors(oxidize, bundle, tmp_path):
    oxidize("verify", bundle, "--prompts", len(PROMPTS) + 1).assert_error(2, "--prompt-file")
    oxidize("verify", bundle, "--tokens", 0).assert_error(2, "--tokens")
    oxidize("verify", bundle, "--draft-model", "nobody").assert_error(2, "nobody")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n", encoding="utf-8")
    oxidize("verify", bundle, "--prompt-file", empty).assert_error(2, "holds no prompt")
    empty.write_bytes(b"\xff\xfe")
    oxidize("verify", bundle, "--prompt-file", empty).assert_error(2, "UTF-8")
    empty.write_text("long " * 600, encoding="utf-8")
    oxidize("verify", bundle, "--prompt-file", empty).assert_error(2, "context")
    oxidize("verify", bundle, "--prompt-file", tmp_path / "missing").assert_error(2, "missing")


def test_a_damaged_bundle_is_not_measured(oxidize, bundle):
    (bundle.folder / "weights.bin").write_bytes(b"")
    oxidize("verify", bundle).assert_error(4, "weights.bin")
    oxidize("verify", bundle.folder.parent / "nothing").assert_error(4)
