"""The command group: names the commands, loads one only when it is called, and turns errors into exit codes."""

import importlib
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import click

COMMANDS = {
    "export": "Turn a checkpoint into a bundle of ONNX graphs.",
    "run": "Answer one prompt from a bundle.",
    "inspect": "Show and check what a bundle holds.",
}


class LazyGroup(click.Group):
    """Knows its commands by name; imports the module of a command when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The command names, in reading order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import `oxidize.cli.<name>` and return its `command`."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f".{cmd_name}", __package__).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"oxidize {metadata.version('oxidize-ort')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show it.")
def cli() -> None:
    """Export language models to ONNX and decode them speculatively: the same text, sooner."""


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the command line and exit: 0 ok, 1 failure, 2 usage, 3 mismatch, 4 bad bundle, 130 interrupt."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors become one line on stderr."""
    from oxidize.runtime.errors import OxidizeError

    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that half-written bundles go away
        return cli.main(args=arguments, standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except OxidizeError as error:
        click.echo(f"error: {_one_line(error)}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except MemoryError:
        click.echo("error: out of memory; use a smaller model, a smaller precision or a shorter context", err=True)
        return 1


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
