"""`oxidize doctor`: what passes and drafts cost on this machine, and when drafting pays."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import cache_folder, runtime_of, runtime_options

if TYPE_CHECKING:
    from oxidize.runtime.bundle import Bundle
    from oxidize.runtime.drafters.base import Drafter
    from oxidize.runtime.session import RuntimeOptions
    from oxidize.runtime.target import Target

    from .advice import Diagnosis

_BUDGET_S = 5.0  # a bundle


@click.command()
@click.argument("bundles", nargs=-1, metavar="[BUNDLE]...", type=click.Path(path_type=Path))
@click.option(
    "--draft-model",
    "drafts",
    multiple=True,
    metavar="BUNDLE",
    help="Another draft to measure; may be repeated.",
)
@click.option("--exact", is_flag=True, help="Measure passes as `run --exact` makes them.")
@click.option("--refresh", is_flag=True, help="Measure again what is known already.")
@runtime_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def command(bundles: tuple[Path, ...], drafts: tuple[str, ...], refresh: bool, as_json: bool, **options: Any) -> None:
    """Measure for a few seconds what each BUNDLE costs on this machine, and say which k pays when.

    `run` uses what was measured. Without a BUNDLE: facts about the machine.
    """
    from oxidize.runtime.machine import describe_machine

    from .advice import as_dict, report

    runtime = runtime_of(options)
    machine, providers = describe_machine(), _providers()
    found = [_diagnose(bundle, drafts, runtime, options["exact"], refresh) for bundle in bundles]
    if as_json:
        click.echo(json.dumps(as_dict(machine, providers, found)))
    else:
        click.echo("\n".join(report(machine, providers, found)))


def _providers() -> dict[str, str]:
    """By name, why a provider cannot be used; empty if it can."""
    from oxidize.runtime.errors import ProviderError
    from oxidize.runtime.session import PROVIDERS, resolve_provider

    reasons = {}
    for name in PROVIDERS:
        try:
            resolve_provider(name)
            reasons[name] = ""
        except ProviderError as error:
            reasons[name] = str(error).partition(";")[0]
    return reasons


def _diagnose(
    folder: Path, drafts: tuple[str, ...], runtime: "RuntimeOptions", exact: bool, refresh: bool
) -> "Diagnosis":
    """Measure one bundle with its own drafts and those given."""
    from oxidize.runtime.bundle import HashCheck, open_bundle
    from oxidize.runtime.calibration import load_or_calibrate
    from oxidize.runtime.session import usable_cores
    from oxidize.runtime.target import Target

    from .advice import Diagnosis

    if sys.stderr.isatty():
        click.echo(f"measuring {folder} ...", err=True)
    bundle = open_bundle(folder)
    HashCheck(bundle, cache_folder()).result()  # its thread would disturb the times
    target = Target(bundle, runtime, floor=2 if exact else 1)
    drafters = _open_drafts(bundle, drafts, runtime, target)
    calibration = load_or_calibrate(target, drafters, runtime, cache_folder(), _BUDGET_S, refresh)
    threads, most = runtime.threads or usable_cores(), {each.name: each.most for each in drafters if each.most}
    return Diagnosis(
        str(folder), bundle.manifest.precision, target.provider, threads, runtime.spin, exact, calibration, most
    )


def _open_drafts(
    bundle: "Bundle", names: tuple[str, ...], runtime: "RuntimeOptions", target: "Target"
) -> "tuple[Drafter, ...]":
    """The drafts inside `bundle` and those of these names, as `run` opens and calls them.

    Those that `run` refuses as made for another target cost as much as any.
    """
    from oxidize.runtime.drafts import open_drafters

    own = [draft.name for draft in bundle.manifest.drafts]
    return open_drafters(bundle, [*own, *names], runtime, cache_folder(), target, force=True)
