"""A DFlash draft that was made for a deeper target: refused, and with --force-dflash used, warned of and reported."""

import json
from pathlib import Path

import pytest
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dflash import VARIANTS as DFLASH_VARIANTS
from draft_checkpoints_dflash import write_dflash

LAYERS, DEEPER = 9, 12
REASON = f"made for a target of {DEEPER} layers, this one has {LAYERS}"
COUNTS = ("rounds", "draft_tokens", "accepted_draft_tokens")
PROMPT = ("1 2 3 1 2 3 1 2", "--raw", "-n", "24")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoints of the target and the draft."""
    folder, dflash = tmp_path_factory.mktemp("sources"), DFLASH_VARIANTS["qwen3"]
    same = {key: dflash[key] for key in ("hidden_size", "vocab_size")}
    config = {**VARIANTS["qwen3"], **same, "num_hidden_layers": LAYERS, "max_window_layers": LAYERS}
    target = write_hf_checkpoint(folder / "target", config)
    return target, write_dflash(folder / "misfit", {**dflash, "num_target_layers": DEEPER})


@pytest.fixture
def bundle(sources: tuple[Path, Path], oxidize, tmp_path: Path) -> Path:
    target, draft = sources
    asked = ("export", target, "-o", tmp_path / "bundle", "--precision", "fp32", "--no-eval", "--draft-model", draft)
    refused = oxidize(*asked)
    assert refused.code != 0 and REASON in refused.err and "--force-dflash" in refused.err
    assert not (tmp_path / "bundle").exists()
    written = oxidize(*asked, "--force-dflash")
    assert written.code == 0 and f"misfit was {REASON}; going on" in written.err
    return tmp_path / "bundle"


def test_a_draft_made_for_another_target(bundle: Path, oxidize) -> None:
    assert json.loads((bundle / "manifest.json").read_text())["drafts"][0]["neural"]["mismatch"] == REASON
    plain = oxidize("run", bundle, *PROMPT, "--no-spec", "--json")
    assert plain.code == 0 and "misfit" not in plain.err
    left_out = oxidize("run", bundle, *PROMPT, "--json")
    assert f"draft misfit was {REASON}: left out; --force-dflash uses it" in left_out.err
    assert "misfit" not in json.loads(left_out.out)["stats"]["by_drafter"]
    oxidize("run", bundle, *PROMPT, "--draft-model", "misfit").assert_error(2, REASON, "--force-dflash")
    forced = oxidize("run", bundle, *PROMPT, "--draft-model", "misfit", "--force-dflash", "--json")
    answer = json.loads(forced.out)
    counts = answer["stats"]["by_drafter"]["misfit"]
    assert 0 < counts["rounds"] <= 16
    assert (
        f"draft misfit was {REASON}: {counts['accepted_draft_tokens']} of {counts['draft_tokens']} draft tokens of its "
        f"first {counts['rounds']} rounds were kept"
    ) in forced.err
    assert answer["token_ids"] == json.loads(plain.out)["token_ids"]
    assert answer["mismatch"] == {"misfit": {"reason": REASON, **{key: counts[key] for key in COUNTS}}}
    assert "mismatch" not in {*json.loads(plain.out), *json.loads(left_out.out)}
    idle = oxidize("run", bundle, *PROMPT, "--draft-model", "misfit", "--force-dflash", "--draft-tokens", "0", "--json")
    assert f"draft misfit was {REASON}: it was not used in this answer\n" in idle.err
    assert json.loads(idle.out)["mismatch"] == {"misfit": {"reason": REASON, **dict.fromkeys(COUNTS, 0)}}
    as_text = oxidize("run", bundle, *PROMPT, "--draft-model", "auto", "--force-dflash")
    assert "draft tokens of its first" in as_text.err
