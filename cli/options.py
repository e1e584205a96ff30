"""Options and look-ups that several commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

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


def provider_settings(pairs: tuple[str, ...]) -> dict[str, str]:
    """Split KEY=VALUE options."""
    from oxidize.runtime.errors import UsageError

    bad = [pair for pair in pairs if "=" not in pair]
    if bad:
        raise UsageError(f"--provider-option must be KEY=VALUE, not {bad[0]!r}")
    return dict(pair.split("=", 1) for pair in pairs)


def cache_folder() -> Path | None:
    """Where oxidize remembers what is worth remembering between runs; None where there is no home."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if root.is_absolute():
        return root / "oxidize"
    try:
        return Path.home() / ".cache" / "oxidize"
    except RuntimeError:
        return None
