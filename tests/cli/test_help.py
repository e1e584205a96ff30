"""The whole text of every help page, beside this file in help.txt; `python tests/cli/test_help.py` writes it anew."""

import io
import os
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path

from oxidize.cli.main import run

PAGES = Path(__file__).with_name("help.txt")
COMMANDS = ([], ["run"], ["export"], ["inspect"], ["doctor"], ["verify"])


def _render() -> str:
    pages = []
    for command in COMMANDS:
        with redirect_stdout(io.StringIO()) as page:
            assert run([*command, "--help"]) == 0
        pages.append(page.getvalue())
    return "\n".join(pages)


def test_help_pages() -> None:
    assert _render() == PAGES.read_text(encoding="utf-8")


def test_no_arguments_show_the_help(oxidize) -> None:
    first_page = PAGES.read_text(encoding="utf-8").partition("\nUsage: oxidize run")[0]
    for arguments in ([], ["--help"], ["-h"]):
        result = oxidize(*arguments)
        assert (result.code, result.out, result.err) == (0, first_page, "")


def test_version(oxidize) -> None:
    result = oxidize("--version")
    assert (result.code, result.out, result.err) == (0, f"oxidize {metadata.version('oxidize-ort')}\n", "")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    PAGES.write_text(_render(), encoding="utf-8")
