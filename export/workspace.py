"""Where a bundle is written before it is moved into place, and what killed processes left of such places."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oxidize.runtime.errors import OxidizeError


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """A folder beside `out` that is gone again unless it was moved away; those of dead processes are removed first."""
    place = out.absolute()
    folder = place.with_name(f".{place.name}.partial-{os.getpid()}")
    try:
        _sweep(place)
        folder.mkdir(parents=True)
        with _claim(folder):
            yield folder
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OxidizeError(f"the disk of {out} is full; nothing was kept, free some space") from error
        raise OxidizeError(f"cannot write {out}: {error}; nothing was kept") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move_into_place(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; what was there is put back if that fails or is interrupted."""
    old = folder.with_name(folder.name + "-replaced")
    try:
        if out.exists():
            out.replace(old)
        folder.replace(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.replace(out)
        raise
    finally:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove the workspaces for this place whose process is dead; what cannot be removed stays."""
    if os.name != "posix" or not place.parent.is_dir():  # elsewhere there is no asking a process whether it lives
        return
    for path in place.parent.iterdir():
        found = re.fullmatch(rf"\.{re.escape(place.name)}\.partial-(\d{{1,9}})", path.name)
        if found and path.is_dir() and not path.is_symlink() and _is_dead(int(found[1])) and not _is_claimed(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_dead(process: int) -> bool:
    """Whether there is no such process but perhaps this one, which then has the number of one that is gone."""
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # it belongs to somebody else
    return False


@contextmanager
def _claim(folder: Path) -> Iterator[None]:
    """Lock the folder while this process lives: whoever shares the disk but not the process numbers sees that too."""
    if os.name != "posix":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a disk without locks
            _lock(handle)
        yield
    finally:
        os.close(handle)


def _is_claimed(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        _lock(handle)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a disk without locks
    finally:
        os.close(handle)
    return False


def _lock(handle: int) -> None:
    import fcntl  # not on every system

    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
