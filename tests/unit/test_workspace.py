"""Where bundles are written: what killed processes left of theirs goes, and nothing else does."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oxidize.export.workspace import workspace
from oxidize.runtime.errors import OxidizeError


@pytest.fixture
def dead() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def alive() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.kill()
    process.communicate()


def _make(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "weights.bin").write_bytes(b"half")
    return path


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    with workspace(tmp_path / "new" / "out") as folder:
        assert folder == tmp_path / "new" / f".out.partial-{os.getpid()}" and folder.is_dir()
    assert not _names(tmp_path / "new")


def test_workspaces_of_dead_processes_go_first(tmp_path: Path, dead: int) -> None:
    _make(tmp_path / f".out.partial-{dead}" / "drafts")
    with workspace(tmp_path / "out") as folder:
        assert _names(tmp_path) == [folder.name]


def test_one_of_a_process_that_had_this_ones_number_goes(tmp_path: Path) -> None:
    """As in a container, where the same few numbers come again."""
    _make(tmp_path / f".out.partial-{os.getpid()}")
    with workspace(tmp_path / "out") as folder:
        assert not list(folder.iterdir())


def test_nothing_else_goes(tmp_path: Path, dead: int, alive: int) -> None:
    kept = {
        f".out.partial-{alive}",
        f".other.partial-{dead}",
        f".out.partial-{dead}-replaced",  # what was there before, if the process died between two renames
        f".out.partial-{dead}x",
        f"out.partial-{dead}",
    }
    for name in kept:
        _make(tmp_path / name)
    with workspace(tmp_path / "out"):
        pass
    assert {*_names(tmp_path)} == kept


def test_a_link_is_not_followed(tmp_path: Path, dead: int) -> None:
    mine = _make(tmp_path / "mine")
    (tmp_path / f".out.partial-{dead}").symlink_to(mine)
    with workspace(tmp_path / "out"):
        pass
    assert _names(mine) == ["weights.bin"]


def test_one_in_use_stays_though_its_process_is_not_seen(tmp_path: Path, dead: int) -> None:
    """As from another container that shares the disk: such processes are told by their lock."""
    claimed = _make(tmp_path / f".out.partial-{dead}")
    handle = os.open(claimed, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with workspace(tmp_path / "out"):
        assert claimed.is_dir()
    os.close(handle)
    with workspace(tmp_path / "out"):
        assert not claimed.exists()


def test_a_workspace_is_locked_while_it_is_in_use(tmp_path: Path) -> None:
    with workspace(tmp_path / "out") as folder:
        handle = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OxidizeError, match=r"cannot write .*nothing was kept"), workspace(tmp_path / "file" / "out"):
        pass
