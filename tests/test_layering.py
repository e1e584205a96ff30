"""Who may import whom: checked in the source of every module, and in fresh processes that really run."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for name in ("export", "runtime", "cli") for path in (ROOT / name).rglob("*.py"))
CONTRACT = ("oxidize.runtime.manifest", "oxidize.runtime.contracts", "oxidize.runtime.errors")

# Third-party packages and the only modules that may import them.
DOORS = {
    "onnx": {"export/graph.py", "export/onnx_surgery.py", "export/onnx_tensors.py"},
    "onnx_ir": {"export/graph.py"},
    "onnxruntime": set(),  # by name, in runtime/session.py
    "torch": {"export/reference.py"},
    "optimum": {"export/optimum.py"},
    "tokenizers": {"runtime/text.py", "export/tokenizer.py", "export/gguf_tokenizer.py", "export/pretokenizers.py"},
    "jinja2": {"runtime/chat.py"},
    "llguidance": {"runtime/grammar.py"},
    "rich": {"cli/export.py"},
}
HEAVY = ("onnxruntime", "numpy", "tokenizers", "jinja2", "rich")
EXPORT_SIDE = (
    *("torch", "transformers", "onnx", "onnx_ir", "optimum"),
    *("safetensors", "gguf", "ml_dtypes", "huggingface_hub", "oxidize.export"),
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(path: Path, only_top: bool = False) -> Iterator[str]:
    """Absolute names of everything a module imports; with `only_top` what it imports when it is loaded."""
    package = ["oxidize", *path.relative_to(ROOT).parent.parts]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if only_top else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` names a module, `from .x import y` a thing inside one
            yield from [origin] if node.module else (f"{origin}.{alias.name}" for alias in node.names)


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_there_is_something_to_check() -> None:
    assert {"runtime/loop.py", "export/graph.py", "cli/main.py"} <= {_name(path) for path in MODULES}
    assert "oxidize.runtime.errors" in set(_imports(ROOT / "runtime/bundle.py"))
    assert "oxidize.runtime.noise" in set(_imports(ROOT / "runtime/drafters/base.py"))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_direction(path: Path) -> None:
    """cli -> export, runtime; export -> the bundle's contract; runtime -> nothing of ours but itself."""
    part = path.relative_to(ROOT).parts[0]
    for name in _imports(path):
        assert name.partition(".")[0] not in ("export", "runtime", "cli", "tests"), f"{name} would be a second copy"
        if not _within(name, "oxidize") or _within(name, f"oxidize.{part}"):
            continue
        if part == "export" and name not in CONTRACT:
            assert name == "oxidize.runtime.vocab", name  # the digest both sides compare; standard library only
        assert part != "runtime", name


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_doors(path: Path) -> None:
    for name in _imports(path):
        top = name.partition(".")[0]
        assert _name(path) in DOORS.get(top, {_name(path)}), f"{top} has another door"


def test_the_door_to_onnx_runtime() -> None:
    found = {_name(path) for path in MODULES if '"onnxruntime"' in path.read_text(encoding="utf-8")}
    assert found == {"runtime/session.py"}


@pytest.mark.parametrize("name", ["manifest", "contracts", "errors", "schema", "vocab", "bundle"])
def test_what_defines_the_bundle_needs_the_standard_library_only(name: str) -> None:
    for imported in _imports(ROOT / f"runtime/{name}.py"):
        assert _within(imported, "oxidize.runtime") or imported.partition(".")[0] in sys.stdlib_module_names


def _loaded(code: str, *arguments: object) -> tuple[set[str], str]:
    """Names of the modules a fresh process has loaded after `code`, and its stdout before that."""
    script = f"import sys\n{code}\nprint()\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    out, _, names = result.stdout.rstrip("\n").rpartition("\n")
    return set(json.loads(names)), out


def _any_of(modules: set[str], packages: tuple[str, ...]) -> set[str]:
    return {name for name in modules for package in packages if _within(name, package)}


def test_help_is_light() -> None:
    code = "from oxidize.cli.main import run\nassert run(['--help']) == 0"
    modules, out = _loaded(code)
    assert out.startswith("Usage: oxidize ")
    assert not _any_of(modules, (*HEAVY, *EXPORT_SIDE, "oxidize.runtime.engine", "importlib.metadata"))


@pytest.mark.parametrize("command", ["run", "export", "inspect"])
def test_help_of_a_command_is_light(command: str) -> None:
    modules, out = _loaded(f"from oxidize.cli.main import run\nassert run(['{command}', '--help']) == 0")
    assert out.startswith(f"Usage: oxidize {command} ")
    assert not _any_of(modules, (*HEAVY, *EXPORT_SIDE))


def test_running_a_bundle_loads_nothing_of_the_export_side(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    code = (
        "import os\nos.environ['XDG_CACHE_HOME'] = sys.argv[3]\n"
        "from oxidize.cli.main import run\n"
        "assert run(['run', sys.argv[1], 'hello', '-n', '8', '--draft-model', sys.argv[2]]) == 0\n"
        "assert run(['inspect', sys.argv[1]]) == 0"
    )
    bundle = tiny_bundle("llama2")
    modules, out = _loaded(code, bundle, bundle, tmp_path)
    assert {"onnxruntime", "tokenizers", "oxidize.runtime.engine"} <= modules and len(out) > 8
    assert not _any_of(modules, EXPORT_SIDE)


def test_exporting_needs_neither_torch_nor_onnx_runtime(tmp_path: Path) -> None:
    from checkpoints import VARIANTS, write_hf_checkpoint

    source = write_hf_checkpoint(tmp_path / "source", VARIANTS["llama2"])
    code = "from oxidize.cli.main import run\nassert run(['export', sys.argv[1], '-o', sys.argv[2], '--no-eval']) == 0"
    modules, _ = _loaded(code, source, tmp_path / "out")
    assert "oxidize.export.graph" in modules
    assert not _any_of(modules, ("torch", "transformers", "optimum", "onnxruntime"))
