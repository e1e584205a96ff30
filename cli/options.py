"""Options and look-ups that several commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from oxidize.runtime.session import RuntimeOptions

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_PROVIDERS = click.Choice(["auto", "cpu", "cuda", "tensorrt"])
_SPIN = click.Choice(["auto", "on", "off"])


def runtime_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where and how sessions run."""
    for option in (
        click.option(
            "--provider-option",
            "provider_options",
            multiple=True,
            metavar="KEY=VALUE",
            help="Passed on to ONNX Runtime.",
        ),
        click.option("--spin", type=_SPIN, default="auto", show_default=True, help="Whether idle threads spin."),
        click.option("--threads", type=click.IntRange(0, 1024), default=0, help="CPU threads; 0: one per core."),
        click.option("--provider", type=_PROVIDERS, default="auto", show_default=True, help="Execution provider."),
    ):
        function = option(function)
    return function


def runtime_of(options: dict[str, Any]) -> "RuntimeOptions":
    """What the options of `runtime_options` say."""
    from oxidize.runtime.errors import UsageError
    from oxidize.runtime.session import RuntimeOptions

    pairs = options["provider_options"]
    bad = [pair for pair in pairs if "=" not in pair]
    if bad:
        raise UsageError(f"--provider-option must be KEY=VALUE, not {bad[0]!r}")
    settings = dict(pair.split("=", 1) for pair in pairs)
    return RuntimeOptions(options["provider"], options["threads"], options["spin"], 0, settings)


def cache_folder() -> Path | None:
    """Where oxidize remembers what is worth remembering between runs; None where there is no home."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if root.is_absolute():
        return root / "oxidize"
    try:
        return Path.home() / ".cache" / "oxidize"
    except RuntimeError:
        return None
