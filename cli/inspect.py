"""`oxidize inspect`: what a bundle holds, and whether it is whole."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from oxidize.runtime.manifest import DraftEntry, GraphEntry, Manifest


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON line.")
def command(bundle: Path, as_json: bool) -> None:
    """Check every hash of BUNDLE and print what it holds."""
    import json

    from oxidize.runtime.bundle import check_hashes, open_bundle, open_draft

    opened = open_bundle(bundle)
    check_hashes(opened, cache=None)
    for draft in opened.manifest.drafts:
        if draft.neural is None:
            open_draft(opened, draft)
    manifest = opened.manifest
    if as_json:
        click.echo(json.dumps(json.loads(manifest.dumps())))
    else:
        click.echo("\n".join(_printable(line) for line in _table(manifest)))


def _printable(line: str) -> str:
    """Names in a manifest may come from a stranger; none of them shall steer the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def _table(manifest: "Manifest") -> list[str]:
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
    return lines + [line for draft in manifest.drafts for line in _draft_lines(draft, manifest)]


def _draft_lines(draft: "DraftEntry", manifest: "Manifest") -> list[str]:
    size = sum(entry.size for name, entry in manifest.files.items() if name.startswith(f"{draft.folder}/"))
    lines = [f"draft      {draft.name}: {draft.kind}, {size / 1e6:.1f} MB"]
    if draft.neural is not None:
        neural = draft.neural
        reads = f"taps {', '.join(map(str, neural.taps))}" if neural.taps else "final hidden states"
        head = f"own head of {neural.draft_vocab_size}" if neural.draft_vocab_size else "the target's head"
        lines.append(f"  reads    {reads} ({neural.tap_convention}), {neural.feature_size} wide")
        parts = f"{neural.block_size - 1} heads" if draft.kind == "medusa" else f"{neural.layers} layers"
        lines.append(f"  model    {parts}, hidden {neural.hidden_size}, {head}, block {neural.block_size}")
        if neural.choices is not None:
            lines.append(f"  paths    through {neural.choices} tokens a row")
        if neural.mismatch is not None:
            lines.append(f"  forced   {neural.mismatch}")
    return lines + [line for graph in draft.graphs for line in _graph_lines(graph)]


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
