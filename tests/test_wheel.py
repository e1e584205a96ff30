"""The wheel: everything it needs is in it, nothing else is, and it works without the source tree."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("export", "runtime", "cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources so that the tree stays clean and old build folders stay out."""
    if int(metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools 77 or newer builds the wheel: pip install -e '.[dev]'")
    source = tmp_path_factory.mktemp("source")
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q", "-w", str(source)]
    command = [sys.executable, "-m", "pip", "wheel", str(source), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (found,) = source.glob("*.whl")
    return found


def test_contents(wheel: Path) -> None:
    expected = {
        f"oxidize/{path.relative_to(ROOT).as_posix()}"
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected
    assert {f"oxidize/{part}/py.typed" for part in PARTS} <= names
    assert "oxidize/export/data/perplexity.txt" in names
    assert "oxidize/__init__.py" not in names, "oxidize is a namespace package"


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        described = message_from_string(archive.read(f"{folder}/METADATA").decode())
        entry_points = archive.read(f"{folder}/entry_points.txt").decode()
    assert described.get_all("License-File") == ["LICENSE"]
    assert (described["Name"], described["License-Expression"]) == ("oxidize-ort", "Apache-2.0")
    assert described["Requires-Python"] == ">=3.11"
    assert entry_points.split() == ["[console_scripts]", "oxidize", "=", "oxidize.cli.main:main"]
    base = {line.partition(">")[0] for line in described.get_all("Requires-Dist") or [] if "extra ==" not in line}
    assert base == {"numpy", "tokenizers", "jinja2", "click", "rich"}
    assert set(described.get_all("Provides-Extra") or []) == {"cpu", "gpu", "grammar", "export", "optimum", "dev"}


def test_it_works_alone(wheel: Path, tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys, oxidize.cli.main as main, oxidize.runtime.loop as loop\n"
        "assert main.__file__.startswith(sys.argv[1]) and loop.__file__.startswith(sys.argv[1])\n"
        "sys.exit(main.run(['run', sys.argv[2], 'hello', '-n', '4']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site"), str(tiny_bundle("llama2"))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 1 and "ttft" in result.stderr
