"""Opens a bundle: reads its manifest and checks its files, each state of a large file only once."""

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .manifest import Manifest, load_manifest, verify_hashes


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk whose manifest is valid and whose files have the right sizes."""

    folder: Path
    manifest: Manifest


def open_bundle(folder: str | Path) -> Bundle:
    """Read and validate the manifest of a bundle. Hashes are checked by `HashCheck`."""
    path = Path(folder)
    return Bundle(path, load_manifest(path))


class HashCheck:
    """Checks a bundle's sha256 sums in the background, so that it runs beside session creation.

    Hashing gigabytes at every start would dominate it, so a file's (size, mtime, inode) that once had the right hash
    is remembered under `cache`; call `result()` before the first token leaves.
    """

    def __init__(self, bundle: Bundle, cache: Path) -> None:
        self._bundle, self._cache = bundle, cache
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="oxidize-hash")
        self._future: Future[None] = self._pool.submit(self._check)
        self._pool.shutdown(wait=False)

    def result(self) -> None:
        """Wait for the check; a wrong hash is a BundleError."""
        self._future.result()

    def _check(self) -> None:
        manifest, folder = self._bundle.manifest, self._bundle.folder
        known = _read_stamps(self._cache)
        stamps = {name: _stamp(folder / name, entry.sha256) for name, entry in manifest.files.items()}
        fresh = [name for name in stamps if known.get(str((folder / name).resolve())) != stamps[name]]
        verify_hashes(folder, manifest, tuple(fresh))
        if fresh:
            known |= {str((folder / name).resolve()): stamps[name] for name in fresh}
            _write_stamps(self._cache, known)


def _stamp(path: Path, sha256: str) -> list[int | str]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino, sha256]


def _read_stamps(cache: Path) -> dict[str, list[int | str]]:
    try:
        stamps = json.loads((cache / "verified.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _write_stamps(cache: Path, stamps: dict[str, list[int | str]]) -> None:
    """Losing this file only costs a second hashing, so failures to write it are ignored."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = cache / f"verified.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(stamps), encoding="utf-8")
        temporary.replace(cache / "verified.json")
    except OSError:
        return
