"""Opens bundles and checks their hashes: small files every time, each state of a large one only once."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from .errors import BundleError
from .manifest import DraftEntry, Manifest, load_manifest, verify_hashes

SMALL = 1 << 20  # bytes up to which a file is hashed at every start; takes under a millisecond
_STAMPS = "verified.json"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk whose manifest is valid and whose files have the right sizes."""

    folder: Path
    manifest: Manifest


def open_bundle(folder: str | Path) -> Bundle:
    """Read and validate the manifest of a bundle. Hashes are checked by `HashCheck`."""
    path = Path(folder)
    return Bundle(path, load_manifest(path))


def open_draft(bundle: Bundle, draft: DraftEntry) -> Bundle:
    """Open a draft inside `bundle`; its files must be among those the outer manifest vouches for."""
    inner = open_bundle(bundle.folder / draft.folder)
    for name, entry in inner.manifest.files.items():
        if bundle.manifest.files.get(f"{draft.folder}/{name}") != entry:
            raise BundleError(
                f"{inner.folder / name} is not what the manifest of {bundle.folder} says; export the bundle again"
            )
    return inner


class HashCheck:
    """Checks a bundle's sha256 sums in the background, so that it runs beside session creation.

    Hashing gigabytes at every start would dominate it, so the state (size, times, inode) in which a large
    file had the right hash is remembered in the folder `cache`, if there is one. Call `result()` before the
    first token leaves.
    """

    def __init__(self, bundle: Bundle, cache: Path | None) -> None:
        self._bundle, self._cache = bundle, cache
        self._error: BundleError | None = None
        # A daemon, so that an error or Ctrl-C elsewhere does not wait for gigabytes to be hashed.
        self._thread = Thread(target=self._run, name="oxidize-hash", daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait for the check; a wrong hash is a BundleError."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            check_hashes(self._bundle, self._cache)
        except BundleError as error:
            self._error = error
        except OSError as error:
            self._error = BundleError(f"cannot read {self._bundle.folder}: {error}; export or copy it again")


def check_hashes(bundle: Bundle, cache: Path | None) -> None:
    """Compare every file with its hash, but for large ones that had the right one in this very state."""
    root, files = bundle.folder.resolve(), bundle.manifest.files
    known = _read_stamps(cache)
    stamps = {name: _stamp(root / name, entry.sha256) for name, entry in files.items()}  # before hashing
    fresh = [name for name, stamp in stamps.items() if known.get(str(root / name)) != stamp]
    small = [name for name, entry in files.items() if entry.size <= SMALL and name not in fresh]
    verify_hashes(bundle.folder, bundle.manifest, (*small, *fresh))
    if cache is not None and fresh:
        _write_stamps(cache, known | {str(root / name): stamps[name] for name in fresh})


def _stamp(path: Path, sha256: str) -> list[int | str]:
    """What changes when a file does; unlike mtime, ctime cannot be set back."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, sha256]


def _read_stamps(cache: Path | None) -> dict[str, list[int | str]]:
    """The remembered stamps by path; none if the file is missing or damaged."""
    if cache is None:
        return {}
    try:
        stamps = json.loads((cache / _STAMPS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _write_stamps(cache: Path, stamps: dict[str, list[int | str]]) -> None:
    """Losing this file only costs a second hashing, so failures to write it are ignored."""
    temporary = cache / f"{_STAMPS}.{os.getpid()}"
    kept = {path: stamp for path, stamp in stamps.items() if os.path.exists(path)}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(kept), encoding="utf-8")
        temporary.replace(cache / _STAMPS)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
