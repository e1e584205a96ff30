"""The tensors of Medusa heads in a folder: what two layouts call them, and that they are all there.

FasterDecoding's names, which text-generation-inference and TensorRT-LLM read too, in `medusa_lm_head.safetensors`: head
h has residual blocks `h.l.linear.{weight,bias}`, then `h.L.weight`, where L counts its blocks. Heads of "version 2" end
with their block, and the target's lm_head scores it. vLLM's names, in `model.safetensors`: `blocks.h.layers.l.weight`
(`.bias` with medusa_fc_bias), then `lm_heads.h.weight`, or a single one with original_lm_head. Either may stand behind
`medusa_heads.`. Pickles are refused.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from ..safetensors_source import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsTensor,
    find_safetensors,
    read_header,
    read_safetensors,
)
from .base import MedusaHeads

WEIGHTS_NAME = "medusa_lm_head.safetensors"
_PREFIX = "medusa_heads."
_SHARED = "lm_head.weight"  # of all heads, in vLLM's layout
_NUMBER = "([0-9]{1,4})"


@dataclass(frozen=True, slots=True)
class Layout:
    """What a layout calls the parts of head {h}: its block {l} and, behind {L} blocks, its output matrix."""

    block: str
    output: str

    def numbers(self, part: str, names: Iterable[str]) -> list[tuple[int, ...]]:
        """The numbers in all names of a part."""
        pattern = part.replace(".", r"\.").format(h=_NUMBER, l=_NUMBER, L=_NUMBER) + r"\.(?:weight|bias)"
        found = (re.fullmatch(pattern, name) for name in names)
        return [tuple(map(int, match.groups())) for match in found if match]


REFERENCE = Layout("{h}.{l}.linear", "{h}.{L}")
VLLM = Layout("blocks.{h}.layers.{l}", "lm_heads.{h}")


@dataclass(frozen=True, slots=True)
class OpenedHeads:
    """The tensors under their names without prefix, and what error messages call them."""

    where: str
    files: tuple[Path, ...]
    tensors: dict[str, SafetensorsTensor]
    layout: Layout


def pickles_of(folder: Path) -> list[Path]:
    """Heads as the reference publishes them."""
    return sorted(folder.glob("medusa*.pt"))


def open_heads(folder: Path) -> OpenedHeads:
    """The tensors of a folder; pickles are refused."""
    own = folder / WEIGHTS_NAME
    if own.is_file():
        where, files, found = str(own), (own,), {tensor.name: tensor for tensor in read_header(own)}
    else:
        _refuse_pickles(folder)
        index = folder / INDEX_NAME
        where, files = str(folder), (*filter(Path.is_file, [index]), *find_safetensors(folder))
        found = read_safetensors(folder)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in found.items()}
    if len(tensors) < len(found):
        raise CheckpointError(
            f"{where}: tensors occur with and without {_PREFIX!r}; the file mixes two checkpoints, fetch them again"
        )
    vllm = any(name.startswith(("blocks.", "lm_heads.")) for name in tensors)
    return OpenedHeads(where, files, tensors, VLLM if vllm else REFERENCE)


def _refuse_pickles(folder: Path) -> None:
    """An UnsupportedModelError where heads, if there are any, are in a pickle."""
    pickles = pickles_of(folder)
    if not pickles and any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        return
    name = pickles[0].name if pickles else "medusa_lm_head.pt"
    problem = f"{folder / name} is a pickle" if pickles else f"{folder} has no {WEIGHTS_NAME}; a {name} is a pickle"
    command = (
        "import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in "
        f"torch.load('{name}', map_location='cpu', weights_only=True).items()}}, '{WEIGHTS_NAME}')"
    )
    raise UnsupportedModelError(
        f'{problem}, which can run any program when it is read, so it is not; convert it once: python -c "{command}"'
    )


def output_name(opened: OpenedHeads, heads: MedusaHeads, head: int) -> str:
    """What the output matrix of a head is called, or of all heads."""
    if heads.output == "one" and _SHARED in opened.tensors:
        return _SHARED
    return f"{opened.layout.output.format(h=head, L=heads.layers)}.weight"


def heads_names(
    opened: OpenedHeads, heads: MedusaHeads, hidden: int, rows: int | None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors there must be: by stored name, the name inside the exporter and the shape."""
    names: dict[str, tuple[str, tuple[int, ...]]] = {}
    for head in range(heads.count):
        for layer in range(heads.layers):
            stored, ours = opened.layout.block.format(h=head, l=layer), f"heads.{head}.blocks.{layer}"
            names[f"{stored}.weight"] = (f"{ours}.weight", (hidden, hidden))
            if heads.biased:
                names[f"{stored}.bias"] = (f"{ours}.bias", (hidden,))
        if heads.output == "own" and rows is not None:
            names[output_name(opened, heads, head)] = (f"heads.{head}.lm_head.weight", (rows, hidden))
    if heads.output == "one" and rows is not None:
        names[output_name(opened, heads, 0)] = ("lm_head.weight", (rows, hidden))
    return names
