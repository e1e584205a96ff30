"""`run --no-mtp`: the bundle's own MTP head drafts unless that is said."""

import json
from pathlib import Path

import pytest
from draft_checkpoints_mtp import head_weights, write_mtp_checkpoint

PROMPT = ("1 2 3 1 2 3", "--raw", "-n", "8", "--json")


@pytest.fixture
def bundle(oxidize, tmp_path: Path) -> Path:
    target = write_mtp_checkpoint(tmp_path / "target", "qwen3", head_weights("qwen3", "mtp"))
    assert oxidize("export", target, "-o", tmp_path / "bundle", "--precision", "fp32", "--no-eval").code == 0
    return tmp_path / "bundle"


def test_the_head_drafts_unless_told_otherwise(bundle: Path, oxidize) -> None:
    def drafter(*options: str) -> str:
        return json.loads(oxidize("run", bundle, *PROMPT, *options).out)["stats"]["drafter"]

    assert drafter() == "ngram+mtp"
    assert drafter("--no-mtp") == "ngram"
    oxidize("run", bundle, *PROMPT, "--no-mtp", "--draft-model", "mtp").assert_error(
        2, "--no-mtp and --draft-model mtp contradict each other"
    )
