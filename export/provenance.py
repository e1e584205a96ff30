"""Where things in a bundle came from: the tool, the source and the sha256 of each of its files."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from oxidize.runtime.manifest import Provenance, sha256_of


def provenance_of(source: str, revision: str | None, files: Sequence[Path]) -> Provenance:
    """Provenance of what this version makes of `files`, which are hashed, a piece at a time.

    source: a file's or folder's name, or a hub id; revision: its commit there.
    """
    tool = f"oxidize-ort {metadata.version('oxidize-ort')}"
    return Provenance(tool, source, revision, {path.name: sha256_of(path) for path in files})
