"""The command group: names the commands, loads one when it is called, and turns errors into exit codes."""

import importlib
import io
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

COMMANDS = {
    "export": "Turn a checkpoint into a bundle of ONNX graphs.",
    "run": "Answer one prompt from a bundle.",
    "inspect": "Show and check what a bundle holds.",
    "doctor": "Measure what passes and drafts cost here, and when drafting pays.",
    "verify": "Check on this machine that speculation does not change the text.",
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
    from importlib import metadata  # costs a third of the time that --help may take

    if value and not ctx.resilient_parsing:
        click.echo(f"oxidize {metadata.version('oxidize-ort')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Export language models to ONNX and decode them speculatively: the same text, sooner."""


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the command line and exit: 0 ok, 1 failure, 2 usage, 3 mismatch, 4 bad bundle, 130 interrupt."""
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _unwind)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def _unwind(number: int, _frame: object) -> None:
    sys.exit(128 + number)  # instead of dying on the spot, so that half-written bundles go away


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; errors become one line on stderr."""
    from oxidize.runtime.errors import OxidizeError

    try:
        return cli.main(list(arguments) or ["--help"], "oxidize", standalone_mode=False) or 0
    except click.ClickException as error:
        return _fail(f"{error.format_message().rstrip('.')}{_hint(error)}", error.exit_code)
    except OxidizeError as error:
        return _interrupted() if _hides_interrupt(error) else _fail(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        return _fail(f"{package} is not installed; run `pip install 'oxidize-ort[export]'`", 1)
    except MemoryError:
        return _fail("out of memory; use a smaller model, a smaller precision or a shorter context", 1)
    except OSError as error:
        return _fail(f"{error}; check that the path exists and may be used", 1)


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code


def _interrupted() -> int:
    click.echo("interrupted", err=True)
    return 130


def _hides_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: extension modules turn one that comes while they load into an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"; see `{context.command_path} --help`" if context is not None else ""
