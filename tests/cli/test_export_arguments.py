"""`oxidize export`: what it answers to arguments that make no sense, before it reads any weights."""

import shutil
from pathlib import Path

import pytest
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dflash import DFLASH2, write_dflash, write_dflash_gguf, write_speculators
from draft_checkpoints_eagle import write_eagle, write_eagle_gguf
from draft_checkpoints_medusa import write_medusa

from oxidize.export import source
from oxidize.runtime.manifest import load_manifest


@pytest.fixture
def drafts(tmp_path: Path) -> Path:
    """A folder of drafts that need a target."""
    folder = tmp_path / "drafts"
    folder.mkdir()
    write_dflash(folder / "dflash")
    write_dflash(folder / "dflash2", DFLASH2)
    write_dflash_gguf(folder / "dflash.gguf")
    write_eagle(folder / "eagle", "specforge")
    write_eagle_gguf(folder / "eagle.gguf", "safeailab")
    write_medusa(folder / "medusa", "reference")
    (folder / "folder").mkdir()
    shutil.copy(folder / "dflash.gguf", folder / "folder")
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dflash", "a DFlash draft"),
        ("dflash2", "a DFlash 2 draft"),
        ("dflash.gguf", "a DFlash draft"),
        ("folder", "a DFlash draft"),
        ("eagle", "an EAGLE-3 draft"),
        ("eagle.gguf", "an EAGLE-3 draft"),
        ("medusa", "a set of Medusa heads"),
    ],
)
def test_a_draft_is_no_target(oxidize, drafts: Path, checkpoint: Path, tmp_path: Path, name: str, kind: str) -> None:
    draft, out = drafts / name, tmp_path / "out"
    for more in ([], ["--draft-model", checkpoint], ["--exporter", "optimum"]):
        oxidize("export", draft, "-o", out, *more).assert_error(
            2, f"{draft} is {kind}, which needs its target: oxidize export TARGET -o {out} --draft-model {draft}"
        )
    oxidize("export", draft).assert_error(2, f"is {kind}", "oxidize export TARGET -o BUNDLE --draft-model")
    assert not out.exists()


def test_a_draft_of_the_hub_is_no_target(
    oxidize, drafts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not fetched before it is known where to write."""
    fetched: list[str | None] = []

    def download(name: str, offline: bool, revision: str | None) -> Path:
        fetched.append(revision)
        return drafts / "dflash"

    monkeypatch.setattr(source, "_download", download)
    oxidize("export", "org/name", "--revision", "main").assert_error(2, "does not exist here")
    assert not fetched
    result = oxidize("export", "org/name", "-o", tmp_path / "out", "--revision", "main")
    result.assert_error(2, "org/name is a DFlash draft, which needs its target", "--draft-model org/name")
    assert fetched == ["main"]


def test_heads_beside_a_model_leave_it_a_target(oxidize, drafts: Path, checkpoint: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    shutil.copy(drafts / "medusa" / "medusa_lm_head.safetensors", model)
    assert oxidize("export", model, "-o", tmp_path / "out", "--no-eval").code == 0


def test_a_checkpoint_needs_a_place(oxidize, checkpoint: Path, tmp_path: Path) -> None:
    required = ("-o / --out is required", "see `oxidize export --help`")
    for more in ([], ["--draft-model", checkpoint]):
        oxidize("export", checkpoint, *more).assert_error(2, f"{checkpoint} is no bundle, and", *required)
        oxidize("export", tmp_path, *more).assert_error(2, f"{tmp_path} is no bundle, and", *required)
        for missing in (tmp_path / "none", "none/none"):
            oxidize("export", missing, *more).assert_error(2, f"{missing} does not exist here", *required)


def test_a_draft_given_twice(oxidize, bundle, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    for same in (checkpoint, tmp_path / "link"):
        for target in ((checkpoint, "-o", tmp_path / "out"), (bundle,)):
            result = oxidize("export", *target, "--draft-model", checkpoint, "--draft-model", same)
            result.assert_error(2, f"the draft {checkpoint.resolve()} is given twice")
    twice = ("--draft-model", "org/name") * 2
    oxidize("export", checkpoint, "-o", tmp_path / "out", *twice).assert_error(2, "the draft org/name is given twice")


def test_empty_names(oxidize, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the working directory, which an empty path stands for."""
    monkeypatch.chdir(checkpoint)
    oxidize("export", "", "-o", tmp_path / "out").assert_error(2, "SOURCE is an empty name")
    result = oxidize("export", checkpoint, "-o", tmp_path / "out", "--draft-model", "")
    result.assert_error(2, "--draft-model is an empty name")


def test_a_new_bundle_inside_another(oxidize, bundle, checkpoint: Path, tmp_path: Path) -> None:
    before = sorted(bundle.folder.rglob("*"))
    (tmp_path / "link").symlink_to(bundle.folder)
    for out in (bundle.folder / "sub", bundle.folder / "deep" / "sub", tmp_path / "link" / "sub"):
        result = oxidize("export", bundle, "-o", out, "--draft-model", checkpoint)
        result.assert_error(2, f"{out} lies inside the bundle {bundle}")
        result = oxidize("export", checkpoint, "-o", out, "--draft-model", bundle)
        result.assert_error(2, f"{out} lies inside the bundle {bundle}")
    assert sorted(bundle.folder.rglob("*")) == before
    assert oxidize("export", bundle, "-o", bundle, "--draft-model", checkpoint).code == 0


def test_options_without_effect(oxidize, tmp_path: Path) -> None:
    """A warning, once, where no draft is of the family the option is about."""
    taps = "warning: --tap-convention has no effect: no EAGLE-3 draft is exported\n"
    force = "warning: --force-dflash has no effect: no DFlash draft is exported\n"
    shape = {"num_hidden_layers": 9, "vocab_size": 320}
    target = write_hf_checkpoint(tmp_path / "target", {**VARIANTS["llama2"], **shape})
    dflash = write_speculators(tmp_path / "dflash")
    eagle = write_eagle(tmp_path / "eagle", "safeailab")
    both = ("--tap-convention", "input", "--force-dflash")
    out = tmp_path / "out"
    assert oxidize("export", target, "-o", out, "--no-eval").code == 0
    for place in ((target, "-o", tmp_path / "new"), (out,)):
        for drafts, words in (
            ([target], (taps, force)),
            ([dflash], (taps,)),
            ([eagle], (force,)),
            ([eagle, dflash], ()),
        ):
            given = [word for draft in drafts for word in ("--draft-model", draft)]
            result = oxidize("export", *place, *given, *both, "--dry-run")
            assert result.code == 0, result.err
            assert [line for line in (taps, force) if line in result.err] == list(words)
            assert "no effect" not in oxidize("export", *place, *given, "--dry-run").err


def test_a_folder_of_one_file_is_a_draft(oxidize, drafts: Path, tmp_path: Path) -> None:
    """As it is a target."""
    shape = {"num_hidden_layers": 9, "vocab_size": 320}
    target = write_hf_checkpoint(tmp_path / "target", {**VARIANTS["llama2"], **shape})
    export = ("export", target, "-o", tmp_path / "out", "--no-eval", "--draft-model", drafts / "folder")
    assert oxidize(*export).code == 0
    (entry,) = load_manifest(tmp_path / "out").drafts
    assert (entry.name, entry.kind) == ("folder", "dflash")
    shutil.copy(drafts / "eagle.gguf", drafts / "folder")
    oxidize(*export, "--force").assert_error(1, "holds 2 .gguf files; name the one to export")


def test_the_reference_drafts_of_a_full_vocabulary(oxidize, tmp_path: Path) -> None:
    """Their config says no more than Llama; the tensors tell."""
    shape = {"num_hidden_layers": 8, "vocab_size": 320}
    target = write_hf_checkpoint(tmp_path / "target", {**VARIANTS["llama2"], **shape})
    draft = write_eagle(tmp_path / "eagle", "safeailab_full")
    assert oxidize("export", target, "-o", tmp_path / "out", "--no-eval", "--draft-model", draft).code == 0
    (entry,) = load_manifest(tmp_path / "out").drafts
    assert entry.kind == "eagle3" and entry.neural is not None and entry.neural.d2t is None
