"""Writes docs/cli.md from the live help of every command."""

from pathlib import Path

import click

from oxidize.cli.main import cli

PAGE = Path(__file__).with_name("cli.md")
_WIDTH = 100
_HEAD = """# Command line

Made by `make docs` from the help of the commands; do not edit. What is written where, and the exit codes, are in
[AGENTS.md](../AGENTS.md); the keys of `--json` are in [architecture.md](architecture.md).
"""


def render() -> str:
    """The page as it should be; the same on every terminal."""
    root = click.Context(cli, info_name="oxidize", terminal_width=_WIDTH, **cli.context_settings)
    sections = [_section("oxidize", cli.get_help(root))]
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        sections.append(_section(f"oxidize {name}", command.get_help(click.Context(command, root, info_name=name))))
    return "\n".join([_HEAD, *sections])


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
