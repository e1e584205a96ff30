"""`oxidize inspect`: what a bundle holds, and whether it is whole."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oxidize.runtime.manifest import DraftEntry, GraphEntry, Manifest, NeuralDraft, Provenance


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON line.")
def command(bundle: Path, as_json: bool) -> None:
    """Check every hash of BUNDLE and print what it holds."""
    import json

    from oxidize.runtime.bundle import check_hashes, open_bundle, open_draft

    opened = open_bundle(bundle)
    check_hashes(opened, cache=None)
    manifest = opened.manifest
    sources = {draft.name: draft.provenance for draft in manifest.drafts}
    for draft in manifest.drafts:
        if draft.neural is None:
            sources[draft.name] = open_draft(opened, draft).manifest.provenance
    if as_json:
        click.echo(json.dumps(json.loads(manifest.dumps())))
    else:
        click.echo("\n".join(_printable(line) for line in _table(manifest, sources)))


def _printable(line: str) -> str:
    """Names in a manifest may come from a stranger; none of them shall steer the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def _table(manifest: "Manifest", sources: "Mapping[str, Provenance | None]") -> list[str]:
    """All lines; `sources`: where drafts came from, by name."""
    model, source = manifest.model, manifest.provenance
    size = sum(entry.size for entry in manifest.files.values())
    lines = [
        f"target     {source.source} ({model.architecture}), {manifest.precision}, {size / 1e6:.0f} MB",
        f"model      {model.layers} layers, hidden {model.hidden_size}, {model.heads} heads on "
        f"{model.kv_heads} of {model.head_dim}, vocabulary {model.token_count} of {model.vocab_size}, "
        f"context {model.max_positions}",
        f"made by    {source.tool}",
        f"taps       {', '.join(map(str, manifest.taps)) or 'none'}",
        f"drafts     {', '.join(f'{draft.name} ({draft.kind})' for draft in manifest.drafts) or 'none'}",
    ]
    lines += [line for graph in manifest.graphs for line in _graph_lines(graph)]
    for draft in manifest.drafts:
        lines += _draft_lines(draft, manifest, sources[draft.name])
    return lines


def _draft_lines(draft: "DraftEntry", manifest: "Manifest", source: "Provenance | None") -> list[str]:
    size = sum(entry.size for name, entry in manifest.files.items() if name.startswith(f"{draft.folder}/"))
    lines = [
        f"draft      {draft.name}: {draft.kind}{_family(draft)}, {size / 1e6:.1f} MB",
        *_source_lines(draft, source),
    ]
    if draft.neural is not None:
        lines += _neural_lines(draft, draft.neural)
    return lines + [line for graph in draft.graphs for line in _graph_lines(graph)]


def _family(draft: "DraftEntry") -> str:
    """What the draft has beside what its kind has."""
    roles = {graph.role for graph in draft.graphs}
    return " (DFlash 2)" if "select" in roles else " (DSpark)" if "markov" in roles else ""


def _source_lines(draft: "DraftEntry", source: "Provenance | None") -> list[str]:
    if source is None:
        return ["  source   the target's own files"] if draft.kind == "mtp" else []
    revision = f" at {source.revision}" if source.revision else ""
    lines = [f"  source   {source.source}{revision}, made by {source.tool}"]
    return lines + [f"  file     {name}, sha256 {digest[:12]}..." for name, digest in source.files.items()]


def _neural_lines(draft: "DraftEntry", neural: "NeuralDraft") -> list[str]:
    reads = f"taps {', '.join(map(str, neural.taps))}" if neural.taps else "final hidden states"
    head = f"own head of {neural.draft_vocab_size}" if neural.draft_vocab_size else "the target's head"
    parts = f"{neural.block_size - 1} heads" if draft.kind == "medusa" else f"{neural.layers} layers"
    block = f", block {neural.block_size}" if draft.kind in ("dflash", "medusa") else ""
    lines = [
        f"  reads    {reads} ({neural.tap_convention}), {neural.feature_size} wide",
        f"  model    {parts}, hidden {neural.hidden_size}, {head}{block}",
    ]
    if draft.kind == "dflash":
        first = "the anchor's row" if neural.sample_from_anchor else "the row behind the anchor"
        lines.append(f"  block    mask token {neural.mask_token_id}, the first draft token from {first}")
    if neural.choices is not None:
        lines.append(f"  paths    through {neural.choices} tokens a row")
    lines += [_markov_line(graph) for graph in draft.graphs if graph.role == "markov"]
    if neural.mismatch is not None:
        lines.append(f"  forced   {neural.mismatch}")
    return lines


def _markov_line(graph: "GraphEntry") -> str:
    confident = any(spec.name == "confidence" for spec in graph.contract.outputs)
    return f"  markov   the token before corrects each row{', which has a confidence' if confident else ''}"


def _graph_lines(graph: "GraphEntry") -> list[str]:
    kind = f"{graph.role}, {graph.profile}{', ragged' if graph.ragged else ''}"
    lines = [f"graph      {graph.file}: {kind}, opset {graph.opset}, ONNX Runtime >= {graph.minimum_ort}"]
    for way, specs in (("in", graph.contract.inputs), ("out", graph.contract.outputs)):
        shown = [
            f"{spec.name} {spec.dtype}[{','.join(map(str, spec.shape))}]" for spec in specs if "." not in spec.name
        ]
        caches = len(specs) - len(shown)
        lines.append(f"  {way:<4}     {'; '.join(shown)}{f'; {caches} caches' if caches else ''}")
    return lines
