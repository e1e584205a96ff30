"""The documents say what is true: the command line, links, house words, versions, and examples that really run."""

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from oxidize.cli.main import cli, run
from oxidize.runtime.errors import OxidizeError
from oxidize.runtime.manifest import Manifest, load_manifest
from oxidize.runtime.schema import decode
from oxidize.runtime.stats import SpeculativeStats

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
GLOSSARY = DOCS / "glossary.md"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), ROOT / "artifacts/README.md"]
)
SETTLED = {"verifier", "assistant model", "candidate", "rollback", "trim"}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _prose(text: str) -> str:
    """The text without fenced code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(path: Path) -> set[str]:
    """What `#...` links into a page can name: its headings, lower case, punctuation gone, spaces as hyphens."""
    headings = re.findall(r"^#+ (.+)$", _prose(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def _avoided() -> set[str]:
    """The words in the glossary's last column."""
    rows = re.findall(r"^\|.*\|(.*)\|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return {word for cell in rows for word in re.findall(r"`(.+?)`", cell)}


def _commands() -> list[list[str]]:
    """The `oxidize ...` lines of the README, as arguments."""
    lines = "".join(_blocks(README, "sh")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("oxidize ")]


def test_the_command_line_page_is_the_live_help(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_cli", DOCS / "make_cli.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("COLUMNS", "50")
    assert module.render() == module.PAGE.read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_relative_links_resolve(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(path.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.is_relative_to(ROOT.resolve()) and target.exists(), f"{_name(path)}: {link}"
        assert not anchor or anchor in _anchors(target), f"{_name(path)}: {link}"


@pytest.mark.parametrize("path", [page for page in PAGES if page != GLOSSARY], ids=_name)
def test_house_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word in _avoided() | SETTLED:
        found = re.search(rf"\b{word}(s|d|ed|m?ing|med)?\b", text, re.IGNORECASE)
        assert found is None, f"{_name(path)}: {found}, see docs/glossary.md"


def test_the_glossary_settles_these() -> None:
    assert _avoided() >= SETTLED


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_files_that_are_named_exist(path: Path) -> None:
    """`folder/file.py` in prose, from the root or from one of the folders a page may be speaking of."""
    folders = [ROOT / name for name in (".", "runtime", "export", "export/models", "benchmarks")]
    for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.py)`", path.read_text(encoding="utf-8")):
        assert any((folder / name).exists() for folder in folders), f"{_name(path)}: {name}"


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == project["version"]
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert project["license"] == "Apache-2.0"


def test_pages_that_must_stay_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 80
    assert len(README.splitlines()) <= 150


def test_the_quick_start_is_two_lines() -> None:
    first = _blocks(README, "sh")[0].splitlines()
    assert first == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = re.findall(r"\bmake ((?:[a-z-]+ ?)+)", "\n".join(_blocks((ROOT / "AGENTS.md").read_text(), "sh")))
    for verb in {verb for line in verbs for verb in line.split()}:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb


def test_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for group in re.findall(r"oxidize-ort\[([\w,]+)\]", README) for extra in group.split(",")}
    assert named == {"cpu", "gpu", "export"} <= set(project["optional-dependencies"])


def test_every_key_of_the_statistics_is_explained() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page.partition("## What leaves the process")[2], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(SpeculativeStats().as_dict())


def test_every_architecture_and_provider_is_listed() -> None:
    from oxidize.export.config_hf import SUPPORTED
    from oxidize.export.models import DECODER_LAYERS
    from oxidize.runtime.session import PROVIDERS

    for name in {*SUPPORTED, *DECODER_LAYERS, *PROVIDERS}:
        assert re.search(rf"^\| .*`{name}`.* \|", README, re.MULTILINE), name


def test_the_format_page_names_every_key(tiny_bundle: Callable[..., Path]) -> None:
    """Of the manifest and of all objects in it, and every graph input and output without a layer number."""
    page = (DOCS / "bundle-format.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`([\w.]+)`", page)) | {"size", "sha256"}
    raw = json.loads(load_manifest(tiny_bundle("mistral_sliding", "fp32", ("ort", "std"))).dumps())
    raw["drafts"] = [{"name": "a", "kind": "model", "folder": "a"}]
    assert decode(Manifest, raw, "manifest").drafts[0].name == "a"
    objects = [raw, *(raw[key] for key in ("provenance", "model", "tokenizer", "generation"))]
    objects += [*raw["graphs"], *raw["drafts"], raw["graphs"][0]["contract"]]
    assert {key for item in objects for key in item} <= words
    contracts = [graph["contract"] for graph in raw["graphs"]]
    names = {spec["name"] for item in contracts for spec in (*item["inputs"], *item["outputs"])}
    assert {re.sub(r"\.\d+\.", ".i.", name) for name in names} <= words
    assert {graph["file"] for graph in raw["graphs"]} <= words


@pytest.mark.parametrize("arguments", _commands(), ids=" ".join)
def test_readme_commands_parse(arguments: list[str]) -> None:
    name, *rest = arguments
    root = click.Context(cli, info_name="oxidize")
    command = cli.get_command(root, name)
    assert command is not None
    command.make_context(name, rest, parent=root)


@pytest.fixture(scope="module")
def readme_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny checkpoints under the names the README uses."""
    from checkpoints import write_gguf_checkpoint, write_hf_checkpoint

    folder = tmp_path_factory.mktemp("readme")
    (folder / "models").mkdir()
    write_hf_checkpoint(folder / "models/target", "llama2")
    write_hf_checkpoint(folder / "models/small", "llama2", seed=1)
    write_gguf_checkpoint(folder / "models/target.gguf", "llama2")
    return folder


def test_readme_examples_run(
    readme_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command line of the README in order, shortened answers, then its Python."""
    monkeypatch.chdir(readme_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(readme_folder / "cache"))
    for arguments in _commands():
        short = {"run": ["-n", "8", "--threads", "1"], "export": ["--no-eval"]}.get(arguments[0], [])
        assert run([*arguments, *short]) == 0, (arguments, capsys.readouterr().err)
        out = capsys.readouterr().out
        assert bool(out) == (arguments[0] != "export")
        if "--json" in arguments:
            assert json.loads(out)["stats"]["drafter"] != "none"
    (script,) = _blocks(README, "python")
    names: dict[str, object] = {}
    exec(compile(script, "README.md", "exec"), names)
    assert names["tokens"] and capsys.readouterr().out


def test_exit_codes_are_the_documented_ones() -> None:
    """AGENTS.md, the docstring of `errors.py` and the classes themselves."""
    from oxidize.runtime import errors

    line = re.search(r"Exit codes: (.*?)\.", (ROOT / "AGENTS.md").read_text(encoding="utf-8"), re.DOTALL)
    assert line is not None
    documented = {int(code) for code in re.findall(r"\b(\d+) ", line[1])}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OxidizeError)]
    assert documented == {0, 130, *(kind.exit_code for kind in kinds)}
    for kind in kinds:
        assert re.search(rf"{kind.__name__} +exit {kind.exit_code}", str(errors.__doc__)), kind
