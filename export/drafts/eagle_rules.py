"""What all layouts of EAGLE-3 share: which target layers are read, which vocabulary is scored, which tensors there are.

https://arxiv.org/abs/2503.01840. The readers of the layouts state what their files say as `EagleFacts`; the rules here
compare it with the tensors and the target, and nothing that contradicts is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from oxidize.runtime.errors import CheckpointError, UsageError

from ..config import ModelConfig
from ..weights import LazyTensor
from .base import DraftConfig, layer_shapes
from .strict import OTHER_DRAFT, REMEDY, check_tensors, tensor_label

INPUT, OUTPUT = "input", "output"  # how tap ids count: the stream that enters layer i, or the one that leaves it
_FC, _HEAD = "fc.weight", "lm_head.weight"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
Tensors = Mapping[str, LazyTensor]  # by canonical name


class TargetShape(Protocol):
    """What has to be known of the target; its config and the facts of its bundle both say it."""

    @property
    def layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of its residual stream."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        ...


@dataclass(frozen=True, slots=True)
class TapIds:
    """Tap ids as a checkpoint states them, what they count (INPUT or OUTPUT) and why we think so, in words."""

    ids: tuple[int, ...]
    counted: str
    reason: str


@dataclass(frozen=True, slots=True)
class EagleFacts:
    """What a checkpoint says of itself; None where it says nothing. `where` begins every error message."""

    where: str
    model: ModelConfig
    taps: TapIds | None
    draft_vocab_size: int | None
    target_hidden_size: int | None
    flags: dict[str, bool] = field(default_factory=dict)


def default_taps(target: TargetShape) -> TapIds:
    """The reference's choice: what enters an early, the middle and a late layer."""
    layers = target.layers
    return TapIds((2, layers // 2, layers - 3), INPUT, "the reference's default, the checkpoint states none")


def eagle_config(facts: EagleFacts, tensors: Tensors, target: TargetShape, convention: str | None) -> DraftConfig:
    """The draft, after all its numbers agree with each other, with its tensors' shapes and with the target.

    convention: overrides how the tap ids count, INPUT or OUTPUT. Raises CheckpointError where the checkpoint
    contradicts itself and UsageError where it does not fit the target, with both numbers.
    """
    stated = facts.taps or default_taps(target)
    taps, words = _resolve(stated, target, convention, facts.where)
    model, width = facts.model, _tap_width(facts, tensors, len(taps), target)
    if model.vocab_size != target.vocab_size:
        raise UsageError(
            f"{facts.where}: the draft is for a vocabulary of {model.vocab_size}, the target has {target.vocab_size}; "
            f"{OTHER_DRAFT}"
        )
    own_embedding = "model.embed_tokens.weight" in tensors
    if not own_embedding and model.hidden_size != target.hidden_size:
        raise UsageError(
            f"{facts.where}: the draft has hidden size {model.hidden_size} and no embed_tokens, and the target's "
            f"embeddings have {target.hidden_size}; {OTHER_DRAFT}"
        )
    return DraftConfig(
        kind="eagle3",
        model=model,
        taps=taps,
        tap_convention=words,
        target_hidden_size=width,
        draft_vocab_size=_head_rows(facts, tensors, target),
        own_embedding=own_embedding,
        flags={name: facts.flags.get(name, False) for name in FLAGS},
    )


def check_eagle_tensors(config: DraftConfig, tensors: Tensors, where: Path) -> None:
    """Refuse a missing, an extra or a wrongly shaped tensor, by file, name and shapes."""
    called = partial(_likely_name, tensors=tensors)
    check_tensors(where, tensors, eagle_shapes(config), "an EAGLE-3 draft", called=called)


def eagle_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The canonical names and shapes of every tensor the draft must have."""
    model = config.model
    hidden, features = model.hidden_size, config.feature_size
    shapes: dict[str, tuple[int, ...]] = {_FC: (hidden, features), "model.norm.weight": (hidden,)}
    if config.flags["norm_before_fc"]:
        shapes["input_norm.weight"] = (features,)
    if config.flags["fc_norm"]:
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(len(config.taps))}
    for layer in range(model.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(model, layer == 0).items()}
    if config.draft_vocab_size is not None:
        shapes[_HEAD] = (config.draft_vocab_size, hidden)
    if config.own_embedding:
        shapes["model.embed_tokens.weight"] = (model.vocab_size, hidden)
    return shapes


def _layer_shapes(model: ModelConfig, first: bool) -> dict[str, tuple[int, ...]]:
    """The first layer reads embedding and feature side by side, and norms the feature."""
    if not first:
        return layer_shapes(model)
    return layer_shapes(model, 2 * model.hidden_size) | {"hidden_norm.weight": (model.hidden_size,)}


def _likely_name(name: str, tensors: Tensors) -> str:
    """What a missing tensor would be called in a file with these others."""
    midlayer = any(getattr(found, "name", "").startswith("midlayer.") for found in tensors.values())
    return name.replace("model.layers.0.", "midlayer.") if midlayer else name.removeprefix("model.")


def _resolve(stated: TapIds, target: TargetShape, convention: str | None, where: str) -> tuple[tuple[int, ...], str]:
    """The taps as outputs of layers, and how they were counted in words."""
    if convention not in (None, INPUT, OUTPUT):
        raise UsageError(f"the tap convention is {INPUT!r} or {OUTPUT!r}, not {convention!r}")
    counted = convention or stated.counted
    reason = stated.reason if convention is None else "as asked for"
    taps = tuple(tap - 1 if counted == INPUT else tap for tap in stated.ids)
    named = f"{where}: taps {list(stated.ids)}, counted as the {counted} of layers ({reason}),"
    if any(not 0 <= tap < target.layers for tap in taps):
        lowest = 1 if counted == INPUT else 0
        raise UsageError(
            f"{named} are not all among {lowest} to {target.layers - 1 + lowest}, as a target of {target.layers} "
            f"layers has them; {OTHER_DRAFT}, or another tap convention"
        )
    if not taps or any(left >= right for left, right in pairwise(taps)):
        raise UsageError(
            f"{named} do not ascend; a target of {target.layers} layers cannot give them in this order, {REMEDY}"
        )
    return taps, f"{counted} of layer i, ids {' '.join(map(str, stated.ids))} ({reason})"


def _tap_width(facts: EagleFacts, tensors: Tensors, taps: int, target: TargetShape) -> int:
    """Width of one tap, which is the target's; whatever else fc has too many or too few of is said with its shape."""
    if facts.target_hidden_size not in (None, target.hidden_size):
        raise UsageError(
            f"{facts.where}: target_hidden_size is {facts.target_hidden_size}, the target has {target.hidden_size}; "
            f"{OTHER_DRAFT}"
        )
    fc, columns = tensors.get(_FC), taps * target.hidden_size
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != columns:
        raise UsageError(
            f"{tensor_label(fc, _FC, facts.where)} has shape {list(fc.shape)}, expected "
            f"{[facts.model.hidden_size, columns]}: {taps} taps of this target have {taps} x {target.hidden_size} "
            f"columns; {OTHER_DRAFT}, or correct its tap ids"
        )
    return target.hidden_size


def _head_rows(facts: EagleFacts, tensors: Tensors, target: TargetShape) -> int | None:
    """Rows of the draft's own head; None where the target's head scores its hidden states."""
    head, stated = tensors.get(_HEAD), facts.draft_vocab_size
    if head is not None:
        rows = head.shape[0] if len(head.shape) == 2 else stated or target.vocab_size
        if stated is not None and stated != rows:
            raise CheckpointError(f"{facts.where}: draft_vocab_size is {stated}, but {_HEAD} has {rows} rows; {REMEDY}")
        return rows
    rows, width = stated or target.vocab_size, facts.model.hidden_size
    if (rows, width) != (target.vocab_size, target.hidden_size):
        raise CheckpointError(
            f"{facts.where}: there is no tensor {_HEAD}, expected shape {[rows, width]}, and the target's head "
            f"{[target.vocab_size, target.hidden_size]} cannot stand in; the checkpoint is incomplete, fetch it again"
        )
    return None
