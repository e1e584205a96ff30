"""A bundle as a draft model inside another bundle: its files are shared where the disk allows it, else copied."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from oxidize.runtime.errors import UsageError
from oxidize.runtime.manifest import MANIFEST_NAME, Manifest, load_manifest, verify_hashes

from .config_hf import CONFIG_NAME


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How many tokens, and the digest of their table."""

    token_count: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.token_count} tokens, {self.sha256[:8]}"


@dataclass(frozen=True, slots=True)
class BundleSource:
    """A bundle to put into another one as a draft model, under a name of its own, without drafts it may have."""

    name: str
    folder: Path
    manifest: Manifest

    @property
    def files(self) -> tuple[str, ...]:
        """What is taken over of it, apart from the manifest."""
        left = tuple(f"{draft.folder}/" for draft in self.manifest.drafts)
        return tuple(name for name in self.manifest.files if not name.startswith(left))


def is_bundle(path: Path) -> bool:
    """Whether a folder is a bundle rather than a checkpoint, which may have a manifest.json of another kind."""
    return (path / MANIFEST_NAME).is_file() and not (path / CONFIG_NAME).exists()


def open_bundle_draft(name: str, folder: Path) -> BundleSource:
    """A bundle as a draft; a BundleError where it is damaged."""
    return BundleSource(name, folder, load_manifest(folder))


def vocabulary_of(manifest: Manifest) -> Vocabulary:
    """The vocabulary of a bundle."""
    return Vocabulary(manifest.model.token_count, manifest.tokenizer.vocab_sha256)


def check_vocabulary(draft: str, found: Vocabulary, target: Vocabulary) -> None:
    """A draft model with another vocabulary than the target's is a UsageError."""
    if found != target:
        raise UsageError(
            f"draft {draft} has another vocabulary ({found}) than the target ({target}); "
            "a draft model needs the target's tokenizer"
        )


def write_nested(source: BundleSource, folder: Path, target: Vocabulary) -> None:
    """Put the bundle into an existing folder; one with another vocabulary is a UsageError."""
    check_vocabulary(source.name, vocabulary_of(source.manifest), target)
    verify_hashes(source.folder, source.manifest, source.files)
    for name in source.files:
        share(source.folder / name, folder / name)
    files = {name: source.manifest.files[name] for name in source.files}
    manifest = replace(source.manifest, files=files, drafts=())
    (folder / MANIFEST_NAME).write_text(manifest.dumps(), encoding="utf-8")


def share(source: Path, place: Path) -> None:
    """The same file at another place: a hard link, since files of bundles are replaced and never altered, or a copy."""
    place.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()
    try:
        os.link(source, place)
    except OSError:
        shutil.copyfile(source, place)
