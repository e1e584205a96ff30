"""`oxidize inspect`: what it says of drafts, and where each of them came from."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VARIANTS, write_gguf_checkpoint, write_hf_checkpoint
from draft_checkpoints_dflash import DFLASH2, write_dflash
from draft_checkpoints_dspark import write_dspark
from draft_checkpoints_eagle import write_eagle
from draft_checkpoints_medusa import write_medusa
from draft_checkpoints_mtp import head_weights, write_mtp_checkpoint

from oxidize.cli.main import run
from oxidize.runtime.errors import BundleError
from oxidize.runtime.manifest import load_manifest, parse_manifest

LAYERS = 9
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OWN_FILES = ("dflash", "dflash2", "dspark", "eagle", "medusa")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with an MTP head, and drafts that go by their folders' names."""
    root = tmp_path_factory.mktemp("sources")
    shape = {"vocab_size": 320, "num_hidden_layers": LAYERS, "max_window_layers": LAYERS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "read", {**VARIANTS["qwen3"], **shape})
        write_mtp_checkpoint(root / "target", "read", head_weights("read", "mtp"))
    write_dflash(root / "dflash", "qwen3")
    write_dflash(root / "dflash2", DFLASH2)
    write_dspark(root / "dspark")
    write_eagle(root / "eagle", "specforge")
    write_medusa(root / "medusa", "reference")
    small = {**VARIANTS["llama2"], "vocab_size": 320}
    write_hf_checkpoint(root / "model", small, seed=5)
    write_gguf_checkpoint(root / "file.gguf", small, seed=6)
    return root


def _export(*arguments: object) -> None:
    assert run(["export", *map(str, arguments), "--precision", "fp32"]) == 0


def _drafts(root: Path, *names: str) -> list[object]:
    return [word for name in names for word in ("--draft-model", root / name)]


@pytest.fixture(scope="module")
def full(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a draft of each kind: some exported with it, the others added."""
    bundle = tmp_path_factory.mktemp("full") / "bundle"
    first = _drafts(sources, "dflash", "dspark", "model")
    _export(sources / "target", "-o", bundle, "--no-eval", *first)
    _export(bundle, *_drafts(sources, "dflash2", "eagle", "medusa", "file.gguf"))
    return bundle


def _sections(shown: str) -> dict[str, str]:
    """By name, what is said of each draft."""
    parts = shown.split("\ndraft      ")[1:]
    return {part.partition(":")[0]: part for part in parts}


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_manifest_says_where_drafts_came_from(full: Path, sources: Path) -> None:
    manifest = load_manifest(full)
    drafts = {draft.name: draft for draft in manifest.drafts}
    for name in OWN_FILES:
        found = drafts[name].provenance
        assert found is not None
        assert (found.source, found.revision, found.tool) == (name, None, manifest.provenance.tool)
        assert found.files == _hashes(sources / name)
    assert [name for name, draft in drafts.items() if draft.provenance is None] == ["model", "mtp", "file"]
    assert {"model.safetensors", "config.json"} <= manifest.provenance.files.keys()  # where the MTP head is


def test_a_draft_from_the_hub_is_named_after_it(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _export(sources / "target", "-o", tmp_path / "bundle", "--no-eval", "--no-mtp")
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.parent.mkdir()
    snapshot.symlink_to(sources / "eagle")
    monkeypatch.setattr("oxidize.export.source._download", lambda *_: snapshot)
    _export(tmp_path / "bundle", "--draft-model", "somebody/their-eagle")
    (draft,) = load_manifest(tmp_path / "bundle").drafts
    assert draft.name == "their-eagle" and draft.provenance is not None
    assert (draft.provenance.source, draft.provenance.revision) == ("somebody/their-eagle", COMMIT)
    assert draft.provenance.files == _hashes(sources / "eagle")


def test_a_bundle_without_it_is_read_and_a_wrong_one_refused(full: Path) -> None:
    raw = json.loads((full / "manifest.json").read_text())
    (good,) = (draft["provenance"] for draft in raw["drafts"] if draft["name"] == "eagle")
    for draft in raw["drafts"]:
        del draft["provenance"]
    assert all(draft.provenance is None for draft in parse_manifest(raw).drafts)
    for wrong in ("hub", {**good, "files": {"a": 1}}, {**good, "more": 1}, {"tool": "x"}):
        raw["drafts"][0]["provenance"] = wrong
        with pytest.raises(BundleError, match="provenance"):
            parse_manifest(raw)


def test_each_draft_is_described(oxidize: Callable[..., Any], full: Path, sources: Path) -> None:
    result = oxidize("inspect", full)
    assert (result.code, result.err) == (0, "")
    found, tool = _sections(result.out), load_manifest(full).provenance.tool
    assert list(found) == ["dflash", "dspark", "model", "mtp", "dflash2", "eagle", "medusa", "file"]
    for name in OWN_FILES:
        assert f"\n  source   {name}, made by {tool}\n" in found[name]
        for file, digest in _hashes(sources / name).items():
            assert f"\n  file     {file}, sha256 {digest[:12]}...\n" in found[name]
    assert "\n  source   the target's own files\n" in found["mtp"]
    assert f"\n  source   model, made by {tool}\n" in found["model"]
    assert f"\n  source   file.gguf, made by {tool}\n  file     file.gguf, sha256 " in found["file"]
    heads = {name: part.splitlines()[0].rpartition(",")[0] for name, part in found.items()}
    assert heads["dflash"] == "dflash: dflash"
    assert (heads["dspark"], heads["dflash2"]) == ("dspark: dflash (DSpark)", "dflash2: dflash (DFlash 2)")
    assert "\n  block    mask token 310, the first draft token from the anchor's row\n" in found["dspark"]
    assert "\n  block    mask token 310, the first draft token from the row behind the anchor\n" in found["dflash"]
    assert "\n  markov   the token before corrects each row, which has a confidence\n" in found["dspark"]
    assert [name for name, part in found.items() if "markov " in part] == ["dspark"]
    assert [name for name, part in found.items() if ", block " in part] == ["dflash", "dspark", "dflash2", "medusa"]


def test_json_has_all_of_it(oxidize: Callable[..., Any], full: Path, sources: Path) -> None:
    drafts = {draft["name"]: draft for draft in json.loads(oxidize("inspect", full, "--json").out)["drafts"]}
    assert drafts["dspark"]["provenance"]["files"] == _hashes(sources / "dspark")
    assert drafts["mtp"]["provenance"] is None


def test_a_strangers_provenance_does_not_steer_the_terminal(oxidize: Callable[..., Any], full: Path) -> None:
    """It is text of whoever made the bundle."""
    path = full / "manifest.json"
    before = path.read_text()
    raw = json.loads(before)
    raw["drafts"][0]["provenance"].update(source="a\x1b[31m", files={"b\x07": "c\x1b"})
    path.write_text(json.dumps(raw))
    shown = oxidize("inspect", full).out
    path.write_text(before)
    assert "source   a\ufffd[31m, made" in shown and not {"\x1b", "\x07"} & {*shown}
