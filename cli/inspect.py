"""`oxidize inspect`: what a bundle holds, and whether it is whole."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from oxidize.runtime.manifest import GraphEntry, Manifest


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
    return lines + [line for graph in manifest.graphs for line in _graph_lines(graph)]


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
