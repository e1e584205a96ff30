"""Opening bundles, hashes that are remembered, and the way a finished bundle gets into its place."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from oxidize.export import bundle as exporter
from oxidize.export.build import ExportPlan
from oxidize.export.bundle import DraftSource, check_free, export_bundle
from oxidize.export.source import Checkpoint, open_source
from oxidize.runtime import bundle as opener
from oxidize.runtime.bundle import Bundle, HashCheck, check_hashes, open_bundle, open_draft
from oxidize.runtime.errors import BundleError, OxidizeError, UsageError

PLAN = ExportPlan("fp32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny checkpoint."""
    from checkpoints import VARIANTS, write_hf_checkpoint

    return open_source(str(write_hf_checkpoint(tmp_path_factory.mktemp("source") / "tiny", VARIANTS["llama2"])))


@pytest.fixture
def bundle(tiny_bundle: Callable[..., Path], tmp_path: Path) -> Bundle:
    """A tiny bundle to be damaged."""
    return open_bundle(shutil.copytree(tiny_bundle("llama2"), tmp_path / "bundle"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all files that get hashed."""
    names: list[str] = []
    original = opener.verify_hashes

    def record(folder: Path, manifest, wanted: tuple[str, ...]) -> None:
        names.extend(wanted)
        original(folder, manifest, wanted)

    monkeypatch.setattr(opener, "verify_hashes", record)
    return names


@pytest.fixture
def weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opener, "SMALL", 100_000)


def _damage(path: Path) -> None:
    """Flip a bit in the middle, keeping the size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_large_files_are_hashed_once_and_small_ones_always(
    bundle: Bundle, tmp_path: Path, hashed: list[str], weights_are_large: None
) -> None:
    cache = tmp_path / "cache" / "deep"
    HashCheck(bundle, cache).result()
    assert sorted(hashed) == sorted(bundle.manifest.files)
    hashed.clear()
    HashCheck(bundle, cache).result()
    assert sorted(hashed) == sorted(set(bundle.manifest.files) - {"weights.bin"})
    hashed.clear()
    HashCheck(bundle, None).result()
    assert sorted(hashed) == sorted(bundle.manifest.files)


@pytest.mark.parametrize("name", ["weights.bin", "body.ort.onnx", "tokenizer.json", "chat_template.jinja"])
def test_a_file_altered_after_the_check_is_caught(
    bundle: Bundle, tmp_path: Path, name: str, weights_are_large: None
) -> None:
    HashCheck(bundle, tmp_path / "cache").result()
    _damage(bundle.folder / name)
    with pytest.raises(BundleError, match=f"{name} has sha256"):
        HashCheck(bundle, tmp_path / "cache").result()
    with pytest.raises(BundleError, match=f"{name} has sha256"):
        HashCheck(bundle, tmp_path / "cache").result()


def test_setting_the_times_back_does_not_help(bundle: Bundle, tmp_path: Path, weights_are_large: None) -> None:
    path = bundle.folder / "weights.bin"
    HashCheck(bundle, tmp_path).result()
    before = path.stat()
    _damage(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BundleError, match="it was altered"):
        HashCheck(bundle, tmp_path).result()


def test_another_manifest_for_the_same_file_is_another_claim(
    bundle: Bundle, tmp_path: Path, weights_are_large: None
) -> None:
    HashCheck(bundle, tmp_path).result()
    path = bundle.folder / "manifest.json"
    raw = json.loads(path.read_text())
    raw["files"]["weights.bin"]["sha256"] = "0" * 64
    path.write_text(json.dumps(raw))
    with pytest.raises(BundleError, match="the manifest says 000000000000"):
        HashCheck(open_bundle(bundle.folder), tmp_path).result()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": 3}', b'"text"', b'{"PATH": [1, 2]}']
)
def test_damaged_stamps_only_cost_a_second_hashing(
    bundle: Bundle, tmp_path: Path, hashed: list[str], weights_are_large: None, content: bytes
) -> None:
    stamps = tmp_path / "verified.json"
    stamps.write_bytes(content.replace(b"PATH", str(bundle.folder / "weights.bin").encode()))
    for expected in (True, False):
        hashed.clear()
        HashCheck(bundle, tmp_path).result()
        assert ("weights.bin" in hashed) == expected


def test_an_unusable_cache_folder_is_ignored(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    HashCheck(bundle, tmp_path / "file" / "cache").result()
    (tmp_path / "verified.json").mkdir()
    HashCheck(bundle, tmp_path).result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "file", "verified.json"]


def test_stamps_of_bundles_that_are_gone_are_dropped(bundle: Bundle, tmp_path: Path) -> None:
    other = Bundle(shutil.copytree(bundle.folder, tmp_path / "other"), bundle.manifest)
    check_hashes(other, tmp_path)
    shutil.rmtree(other.folder)
    check_hashes(bundle, tmp_path)
    paths = json.loads((tmp_path / "verified.json").read_text())
    assert {Path(path).parent for path in paths} == {bundle.folder}


def test_a_file_that_vanishes_meanwhile_is_a_bundle_error(bundle: Bundle, tmp_path: Path) -> None:
    (bundle.folder / "weights.bin").unlink()
    with pytest.raises(BundleError, match=r"weights\.bin"):
        HashCheck(bundle, tmp_path).result()


@pytest.fixture
def nested(source: Checkpoint, tmp_path: Path) -> Path:
    """A bundle with a draft inside."""
    export_bundle(source, PLAN, tmp_path / "nested", [DraftSource("small", source, PLAN)])
    return tmp_path / "nested"


def test_the_outer_manifest_vouches_for_the_draft(nested: Path, tmp_path: Path) -> None:
    bundle = open_bundle(nested)
    (draft,) = bundle.manifest.drafts
    assert (draft.name, draft.kind, draft.folder) == ("small", "model", "drafts/small")
    inner = open_draft(bundle, draft)
    assert {f"drafts/small/{name}" for name in inner.manifest.files} | {"drafts/small/manifest.json"} == {
        name for name in bundle.manifest.files if name.startswith("drafts/")
    }
    _damage(nested / "drafts/small/weights.bin")
    with pytest.raises(BundleError, match=r"drafts/small/weights\.bin has sha256"):
        HashCheck(bundle, tmp_path).result()


def test_a_draft_with_a_manifest_of_its_own_is_refused(nested: Path, tmp_path: Path) -> None:
    bundle = open_bundle(nested)
    inner = nested / "drafts/small/manifest.json"
    _damage(nested / "drafts/small/weights.bin")
    raw = json.loads(inner.read_text())
    altered = json.dumps(raw).replace(raw["files"]["weights.bin"]["sha256"], "1" * 64)
    inner.write_text(altered)
    with pytest.raises(BundleError, match=r"weights\.bin is not what the manifest of"):
        open_draft(bundle, bundle.manifest.drafts[0])
    with pytest.raises(BundleError, match=r"manifest\.json has \d+ bytes"):
        open_bundle(nested)


def test_a_draft_with_files_nobody_listed_is_refused(nested: Path) -> None:
    path = nested / "manifest.json"
    raw = json.loads(path.read_text())
    del raw["files"]["drafts/small/weights.bin"]
    path.write_text(json.dumps(raw))
    bundle = open_bundle(nested)
    with pytest.raises(BundleError, match=r"weights\.bin is not what the manifest of"):
        open_draft(bundle, bundle.manifest.drafts[0])


def test_draft_names_must_be_usable(source: Checkpoint, tmp_path: Path) -> None:
    for name in ("auto", "none", "ngram"):
        with pytest.raises(UsageError, match="is taken"):
            export_bundle(source, PLAN, tmp_path / "out", [DraftSource(name, source, PLAN)])
    for name in ("", ".", "..", "a/b", "a\\b", "c:d"):
        with pytest.raises(UsageError, match="cannot name a folder"):
            export_bundle(source, PLAN, tmp_path / "out", [DraftSource(name, source, PLAN)])
    with pytest.raises(UsageError, match="'a' is taken"):
        export_bundle(source, PLAN, tmp_path / "out", [DraftSource("a", source, PLAN)] * 2)
    assert not list(tmp_path.iterdir())


def test_nothing_but_a_bundle_is_ever_replaced(bundle: Bundle, tmp_path: Path) -> None:
    check_free(tmp_path / "new", force=False)
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", force=False)
    with pytest.raises(UsageError, match="already holds a bundle; nothing was written"):
        check_free(bundle.folder, force=False)
    check_free(bundle.folder, force=True)
    (bundle.folder / "weights.bin").unlink()  # a damaged bundle may be replaced
    check_free(bundle.folder, force=True)
    (bundle.folder / "sub").mkdir()
    (bundle.folder / "sub" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"sub/notes\.txt is no part of the bundle; nothing was written"):
        check_free(bundle.folder, force=True)


@pytest.mark.parametrize("manifest", [None, b"", b"{}", b"[]", b"3", b'{"name": "my web app", "files": []}', b"\xff"])
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_other_things_is_safe(tmp_path: Path, manifest: bytes | None, force: bool) -> None:
    (tmp_path / "precious").write_text("mine")
    if manifest is not None:
        (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(UsageError, match="exists and is not a bundle; nothing was written"):
        check_free(tmp_path, force)


def test_files_and_dangling_links_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="exists and is not a bundle"):
            check_free(tmp_path / name, force=True)


def test_a_link_to_a_bundle_stays_a_link(source: Checkpoint, tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    export_bundle(source, PLAN, real)
    link.symlink_to(real)
    export_bundle(source, ExportPlan("fp16"), link, force=True)
    assert link.is_symlink() and open_bundle(real).manifest.precision == "fp16"
    assert [path.name for path in real.parent.iterdir()] == ["real"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


class _Stop(BaseException):
    """An interrupt."""


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OxidizeError, "the disk of .* is full; nothing was"),
        (OSError(errno.EACCES, "Permission denied"), OxidizeError, "cannot write .*Permission denied"),
        (MemoryError(), MemoryError, None),
        (_Stop(), _Stop, None),
    ],
)
@pytest.mark.parametrize("where", ["list_files", "build_graphs", "write_tokenizer"])
def test_a_failed_export_leaves_nothing(
    source: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: BaseException,
    raised: type[BaseException],
    message: str | None,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(exporter, where, fail)
    with pytest.raises(raised, match=message):
        export_bundle(source, PLAN, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), _Stop()])
@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_failed_replacement_keeps_the_old_bundle(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, fails_at: int
) -> None:
    out = tmp_path / "out"
    before = export_bundle(source, PLAN, out)
    calls: list[Path] = []
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) - 1 == fails_at:
            raise error
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises((OxidizeError, _Stop)):
        export_bundle(source, ExportPlan("fp16"), out, force=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert open_bundle(out).manifest == before
    check_hashes(open_bundle(out), None)


def test_what_cannot_be_put_back_is_at_least_kept(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk gives up between the two renames: the old bundle stays under its other name."""
    before = export_bundle(source, PLAN, tmp_path / "out")
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == "out":
            raise OSError(errno.EIO, "I/O error")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OxidizeError):
        export_bundle(source, ExportPlan("fp16"), tmp_path / "out", force=True)
    (kept,) = tmp_path.iterdir()
    assert open_bundle(kept).manifest == before


def test_an_export_that_cannot_fit_is_not_begun(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = exporter.estimate_bytes(source.config, PLAN)
    free = shutil._ntuple_diskusage(10**9, 10**9, needed)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    export_bundle(source, PLAN, tmp_path / "fits")
    with pytest.raises(OxidizeError, match=r"needs about .* free some space or choose another -o"):
        export_bundle(source, PLAN, tmp_path / "out", [DraftSource("d", source, PLAN)])
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


def test_the_estimate_is_close(tiny_bundle: Callable[..., Path], source: Checkpoint) -> None:
    for precision in ("fp32", "int4"):
        size = (tiny_bundle("llama2", precision) / "weights.bin").stat().st_size
        estimate = exporter.estimate_bytes(source.config, ExportPlan(precision))
        assert 0.5 * size < estimate < 1.2 * size, (precision, estimate, size)
