"""Bundles of a random target with drafts of all kinds that read it, each from its published format."""

from pathlib import Path

import pytest
from checkpoints import VARIANTS
from draft_checkpoints_dflash import VARIANTS as DFLASH_VARIANTS
from draft_checkpoints_dflash import write_dflash
from draft_checkpoints_eagle import EAGLE_VARIANTS, EagleVariant, TinyTarget, write_eagle
from draft_checkpoints_mtp import head_weights, write_mtp_checkpoint

from oxidize.cli.main import run

LAYERS = 9
BLOCK = 8  # of the DFlash draft
_OWN_ROWS = 96  # of the head that a DFlash draft with an embedding of its own brings too
DRAFTS = ("dflash", "eagle3", "mtp")


def write_neural_bundle(
    folder: Path, hidden: int = 64, vocab: int = 320, own_tables: tuple[str, ...] = (), profile: str = "ort"
) -> Path:
    """A float32 bundle whose drafts are called as in DRAFTS; those in `own_tables` bring an embedding of their own."""
    shape = {"hidden_size": hidden, "vocab_size": vocab}
    config = {**VARIANTS["qwen3"], **shape, "num_hidden_layers": LAYERS, "max_window_layers": LAYERS}
    dflash = {**DFLASH_VARIANTS["qwen3"], **shape, "num_target_layers": LAYERS}
    own_vocab = _OWN_ROWS if "dflash" in own_tables else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "read", config)
        patch.setattr("draft_checkpoints_eagle.TARGET", TinyTarget(LAYERS, hidden, vocab))
        tables = "own" if "mtp" in own_tables else "none"
        target = write_mtp_checkpoint(folder / "target", "read", head_weights("read", "mtp", tables=tables))
        drafts = [
            write_dflash(folder / "dflash", dflash, own_vocab=own_vocab),
            write_eagle(folder / "eagle3", _eagle(shape, "eagle3" in own_tables)),
        ]
    out = folder / "bundle"
    named = [argument for draft in drafts for argument in ("--draft-model", str(draft))]
    arguments = ["--precision", "fp32", "--no-eval", "--profile", profile]
    assert run(["export", str(target), "-o", str(out), *arguments, *named]) == 0
    return out


def _eagle(shape: dict[str, int], own_embedding: bool) -> EagleVariant:
    plain = EAGLE_VARIANTS["specforge"]
    return EagleVariant({**plain.config, **shape}, plain.taps, own_embedding=own_embedding)
