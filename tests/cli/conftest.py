"""What tests of the command line share: run it in this process or in a child, and copies of a tiny bundle to damage."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oxidize.cli.main import run
from oxidize.runtime.manifest import MANIFEST_NAME, sha256_of


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def assert_error(self, code: int, *words: str) -> None:
        """One line on stderr, saying these words; nothing on stdout."""
        assert self.code == code, self
        assert self.out == ""
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        for word in words:
            assert word in self.err


Oxidize = Callable[..., Result]
Child = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def oxidize(capsys: pytest.CaptureFixture[str]) -> Oxidize:
    """oxidize("run", bundle, ...) in this process."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def child() -> Iterator[Child]:
    """child("python code", "run", bundle, ...) starts a process that runs the code, then the command line."""
    started: list[subprocess.Popen[str]] = []

    def start(
        code: str, *arguments: object, env: dict[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        script = f"{code}\nfrom oxidize.cli.main import main\nmain()"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        command = [sys.executable, "-c", script, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        process = subprocess.Popen(command, text=True, env=environment, **{**pipes, **options})
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@dataclass(frozen=True)
class BundleCopy:
    """A bundle of one's own to damage."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Let `change` alter the decoded manifest in place."""
        path = self.folder / MANIFEST_NAME
        raw = json.loads(path.read_text(encoding="utf-8"))
        change(raw)
        path.write_text(json.dumps(raw), encoding="utf-8")

    def seal(self, *names: str) -> None:
        """Make size and hash of some files right again, as whoever makes a hostile bundle would."""

        def change(raw: dict[str, Any]) -> None:
            for name in names:
                path = self.folder / name
                raw["files"][name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}

        self.edit(change)

    def overwrite(self, name: str, content: bytes) -> None:
        """Replace a file and seal it."""
        (self.folder / name).write_bytes(content)
        self.seal(name)


@pytest.fixture
def bundle(tiny_bundle: Callable[..., Path], tmp_path: Path) -> BundleCopy:
    """A tiny Llama bundle."""
    return BundleCopy(shutil.copytree(tiny_bundle("llama2"), tmp_path / "bundle"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint in the Hugging Face layout."""
    from checkpoints import VARIANTS, write_hf_checkpoint

    return write_hf_checkpoint(tmp_path_factory.mktemp("source") / "tiny", VARIANTS["llama2"])
