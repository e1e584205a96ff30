"""`oxidize inspect`: what a bundle holds, and whether it is whole."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from oxidize.runtime.manifest import Manifest


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON line.")
def command(bundle: Path, as_json: bool) -> None:
    """Check every hash of BUNDLE and print what it holds."""
    import json

    from oxidize.runtime.manifest import load_manifest, verify_hashes

    manifest = load_manifest(bundle)
    verify_hashes(bundle, manifest)
    click.echo(json.dumps(json.loads(manifest.dumps()), ensure_ascii=False) if as_json else _table(manifest))


def _table(manifest: "Manifest") -> str:
    model, source = manifest.model, manifest.provenance
    size = sum(entry.size for entry in manifest.files.values())
    lines = [
        f"target     {source.source} ({model.architecture}), {manifest.precision}, {size / 1e6:.0f} MB",
        f"model      {model.layers} layers, hidden {model.hidden_size}, {model.heads} heads on {model.kv_heads} "
        f"of {model.head_dim}, vocabulary {model.token_count} of {model.vocab_size}, context {model.max_positions}",
        f"made by    {source.tool}",
        f"taps       {', '.join(map(str, manifest.taps)) or 'none'}",
        f"drafts     {', '.join(f'{draft.name} ({draft.kind})' for draft in manifest.drafts) or 'none'}",
    ]
    for graph in manifest.graphs:
        kind = f"{graph.role}, {graph.profile}{', ragged' if graph.ragged else ''}"
        lines.append(f"graph      {graph.file}: {kind}, opset {graph.opset}, ONNX Runtime >= {graph.minimum_ort}")
        for way, specs in (("in", graph.contract.inputs), ("out", graph.contract.outputs)):
            shown = [f"{spec.name} {spec.dtype}{list(spec.shape)}" for spec in specs if "." not in spec.name]
            caches = len(specs) - len(shown)
            lines.append(f"  {way:<4}     {'; '.join(shown)}{f'; {caches} caches' if caches else ''}")
    return "\n".join(lines)
