"""The whole text of every help page, beside this file in help.txt; `python tests/cli/test_help.py` writes it anew."""

import os
from importlib import metadata
from pathlib import Path

PAGES = Path(__file__).with_name("help.txt")
COMMANDS = ([], ["run"], ["export"], ["inspect"])


def _render() -> str:
    from click.testing import CliRunner

    from oxidize.cli.main import cli

    texts = []
    for command in COMMANDS:
        result = CliRunner().invoke(cli, [*command, "--help"], env={"COLUMNS": "100"}, prog_name="oxidize")
        assert result.exit_code == 0, result.output
        texts.append(result.stdout)
    return "\n".join(texts)


def test_help_pages() -> None:
    assert _render() == PAGES.read_text(encoding="utf-8")


def test_no_arguments_show_the_help(oxidize) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        result = oxidize(*arguments)
        assert (result.code, result.err) == (0, "")
        assert result.out == PAGES.read_text(encoding="utf-8").partition("\n\nUsage")[0] + "\n"


def test_version(oxidize) -> None:
    result = oxidize("--version")
    assert (result.code, result.out, result.err) == (0, f"oxidize {metadata.version('oxidize-ort')}\n", "")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    PAGES.write_text(_render(), encoding="utf-8")
