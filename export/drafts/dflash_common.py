"""What the readers of DFlash checkpoints share: which variants are refused, strict shapes, fitting the target."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError, UsageError

from ..config import ModelConfig
from ..weights import LazyTensor, TensorTable
from .base import DraftCheckpoint, DraftConfig, MarkovHead, PathSelection, layer_shapes, markov_shapes
from .strict import REMEDY, check_tensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of the draft's own, if it has them
CONVOLUTIONS = ("attention_conv", "mlp_conv")
SELECTOR, CODEBOOKS = "candidate_selector", ("predecessor", "successor")

# A part of a tensor's name -> the variant it belongs to, and what this version lacks for it.
_FOREIGN = {
    "attention_conv": "DFlash2: dynamic convolutions around each layer's attention",
    "attn_conv": "DFlash2: dynamic convolutions around each layer's attention",
    "mlp_conv": "DFlash2: dynamic convolutions around each layer's MLP",
    "ffn_conv": "DFlash2: dynamic convolutions around each layer's MLP",
    "selector": "DFlash2: a selector of paths through the likeliest tokens",
    "markov": "DSpark: a Markov head over the previous token",
    "conf_proj": "DSpark: a confidence head",
    "confidence": "DSpark: a confidence head",
    "gru": "Domino: a recurrent correction of the logits",
    "embed_proj": "Domino: a recurrent correction of the logits",
    "sink": "attention sinks",
    "mask_embedding": "an embedding of the mask apart from the table",
    "qkv_proj": "fused query, key and value projections",
    "g_proj": "gated attention",
    "aux_hidden_norm": "a norm for each tap",
    "fusion_": "learnt mixtures of the taps for each layer",
    "encoder.": "Muse-Glimmer's encoder",
}


@dataclass(frozen=True, slots=True)
class Stated:
    """What a DFlash config says before it meets its weights and the target.

    taps: 0-based "output of layer i", None for the layout's default. target_layers, target_hidden_size,
    draft_vocab_size: None where not said.
    """

    model: ModelConfig
    layer_causal: tuple[bool, ...]
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...] | None
    tap_convention: str
    target_layers: int | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    paths: PathSelection | None = None
    markov: MarkovHead | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The tensors of a checkpoint under canonical names, d2t and t2d (int64 target ids, bool) apart; see `assemble`.

    map_file: the file that d2t is in.
    """

    name: str
    where: Path
    tensors: Mapping[str, LazyTensor]
    files: tuple[Path, ...]
    d2t: np.ndarray | None = None
    t2d: np.ndarray | None = None
    map_file: Path | None = None


def refuse_foreign(names: Iterable[str], where: Path, allowed: str | None = None) -> None:
    """Refuse checkpoints of DFlash's descendants, but the one allowed, by what their tensors are for."""
    for name in names:
        for part, meaning in _FOREIGN.items():
            if part in name and meaning.partition(":")[0] != allowed:
                raise UnsupportedModelError(
                    f"{where}: tensor {name} belongs to {meaning}, which this version does not read from such a "
                    "checkpoint, and without it the draft would be another one; use a draft without it"
                )


def default_taps(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The taps of a config that names none: from layer 1 to the third from the end, evenly; one alone in the middle."""
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers))


def assemble(stated: Stated, opened: Opened, target: ModelConfig, force: bool) -> DraftCheckpoint:
    """The draft as it fits the target, every tensor checked.

    force: go on where the draft was made for another target but is defined for this one too, and note it. Raises
    CheckpointError for a checkpoint that contradicts itself, UsageError for one that does not fit the target.
    """
    mismatch = _mismatch(stated, opened, target, force)
    taps = _taps(stated, opened, target)
    head = opened.tensors.get(HEAD)
    draft_vocab = stated.draft_vocab_size or target.vocab_size
    if head is not None and stated.draft_vocab_size is None and len(head.shape) == 2:
        draft_vocab = head.shape[0]
    config = DraftConfig(
        kind="dflash",
        model=stated.model,
        taps=taps,
        tap_convention=stated.tap_convention,
        target_hidden_size=_tap_width(stated, opened, len(taps)),
        block_size=stated.block_size,
        mask_token_id=stated.mask_token_id,
        sample_from_anchor=stated.sample_from_anchor,
        draft_vocab_size=draft_vocab if head is not None or draft_vocab != target.vocab_size else None,
        own_embedding=EMBEDDING in opened.tensors,
        layer_causal=stated.layer_causal,
        paths=stated.paths,
        markov=stated.markov,
    )
    _check_paths(config, opened.where)
    check_tensors(opened.where, opened.tensors, tensor_shapes(config), "a DFlash draft")
    _check_fit(config, opened, target)
    return DraftCheckpoint(
        name=opened.name,
        revision=None,
        config=config,
        weights=TensorTable(str(opened.where), opened.tensors),
        files=opened.files,
        d2t=_target_ids(config, opened, target),
        mismatch=mismatch,
    )


def _check_paths(config: DraftConfig, where: Path) -> None:
    paths, hidden, rows = config.paths, config.model.hidden_size, config.draft_vocab_size or config.model.vocab_size
    if paths is None:
        return
    if hidden % paths.conv_group:
        raise CheckpointError(
            f"{where}: conv_group_size {paths.conv_group} does not divide hidden_size {hidden}; {REMEDY}"
        )
    if paths.top_k > rows:
        raise CheckpointError(f"{where}: selector_top_k {paths.top_k} exceeds the vocabulary of {rows} rows; {REMEDY}")
    if paths.multiplier <= 0:
        raise CheckpointError(
            f"{where}: logits are multiplied by {paths.multiplier}, expected a positive number; {REMEDY}"
        )


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every tensor of the draft."""
    model = config.model
    hidden = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.own_embedding:
        shapes[EMBEDDING] = (model.vocab_size, hidden)
    if config.draft_vocab_size is not None:
        shapes[HEAD] = (config.draft_vocab_size, hidden)
    for layer in range(model.layers):
        prefix = f"layers.{layer}"
        shapes |= {f"{prefix}.{name}": shape for name, shape in layer_shapes(model).items()}
        if config.paths is not None:
            shapes |= {f"{prefix}.{name}": shape for name, shape in _convolutions(config.paths, hidden).items()}
    if config.paths is not None:
        rank = config.paths.rank
        shapes |= {f"{SELECTOR}.{part}_codebook.weight": (model.vocab_size, rank) for part in CODEBOOKS}
        shapes[f"{SELECTOR}.hidden_projection.weight"] = (rank, hidden)
    if config.markov is not None:
        shapes |= markov_shapes(config.markov, model, config.draft_vocab_size or model.vocab_size)
    return shapes


def _convolutions(paths: PathSelection, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the two convolutions of a layer; base kernels are [2,taps,H] with the first two dimensions as one."""
    rows, groups = 2 * paths.conv_taps, hidden // paths.conv_group
    return {
        name: shape
        for part in CONVOLUTIONS
        for name, shape in (
            (f"{part}.base_kernel.weight", (rows, hidden)),
            (f"{part}.kernel_projection.weight", (rows * groups, hidden)),
        )
    }


def _mismatch(stated: Stated, opened: Opened, target: ModelConfig, force: bool) -> str | None:
    """For what other target the draft was made, if for another one; a UsageError unless that was to be forced."""
    if stated.target_layers in (None, target.layers):
        return None
    reason = f"made for a target of {stated.target_layers} layers, this one has {target.layers}"
    if not force:
        raise UsageError(
            f"{opened.where} was {reason}; choose the draft of this target, or --force-dflash to try all the same"
        )
    return reason


def _taps(stated: Stated, opened: Opened, target: ModelConfig) -> tuple[int, ...]:
    taps = stated.taps or default_taps(stated.target_layers or target.layers, stated.model.layers)
    for tap in taps:
        if not 0 <= tap < target.layers:
            raise UsageError(
                f"{opened.where} reads the output of layer {tap} ({stated.tap_convention}), the target has layers 0 "
                f"to {target.layers - 1}; choose the draft of this target"
            )
    return taps


def _tap_width(stated: Stated, opened: Opened, taps: int) -> int:
    """Width of one tap, from fc, which has the last word where the config says nothing."""
    fc = opened.tensors.get("fc.weight")
    said = stated.target_hidden_size
    if fc is None or len(fc.shape) != 2 or said is not None or fc.shape[1] % taps:
        return said or stated.model.hidden_size
    return fc.shape[1] // taps


def _check_fit(config: DraftConfig, opened: Opened, target: ModelConfig) -> None:
    draft, width = config.model, config.target_hidden_size
    if width != target.hidden_size:
        raise UsageError(
            f"{opened.where}: fc reads {len(config.taps)} taps of width {width}, the target's hidden size is "
            f"{target.hidden_size}; choose the draft of this target"
        )
    borrows = not config.own_embedding or config.draft_vocab_size is None
    if borrows and draft.hidden_size != target.hidden_size:
        raise UsageError(
            f"{opened.where} has hidden size {draft.hidden_size}, the target {target.hidden_size}; fc cannot help: "
            "the draft uses the target's embedding or head; choose the draft of this target"
        )
    if draft.vocab_size != target.vocab_size:
        raise UsageError(
            f"{opened.where} has a vocabulary of {draft.vocab_size} rows, the target {target.vocab_size}; "
            "choose the draft of this target"
        )
    if config.mask_token_id is None or config.mask_token_id >= target.vocab_size:
        raise UsageError(
            f"{opened.where}: mask token id {config.mask_token_id} is beyond the target's {target.vocab_size} rows; "
            "choose the draft of this target"
        )


def _target_ids(config: DraftConfig, opened: Opened, target: ModelConfig) -> np.ndarray | None:
    """The target id of each row of the draft's head; None where they are the same."""
    rows, ids, where = config.draft_vocab_size, opened.d2t, opened.map_file or opened.where
    if ids is None:
        if rows not in (None, target.vocab_size):
            raise CheckpointError(
                f"{opened.where} has no tensor d2t, expected shape [{rows}]: its head has {rows} rows for the "
                f"target's {target.vocab_size} tokens; fetch the draft again"
            )
        return None
    if rows is None:
        raise CheckpointError(
            f"{opened.where} has a tensor d2t but no {HEAD} whose rows it names; it is incomplete, fetch it again"
        )
    if ids.shape != (rows,):
        raise CheckpointError(
            f"{where}: tensor d2t has shape {list(ids.shape)}, expected [{rows}], the rows of {HEAD}; {REMEDY}"
        )
    if ids.min() < 0 or ids.max() >= target.vocab_size or len(np.unique(ids)) != rows:
        raise CheckpointError(
            f"{where}: d2t must name {rows} different tokens below {target.vocab_size}; it goes from "
            f"{ids.min()} to {ids.max()} with {len(np.unique(ids))} different ones; fetch the draft again"
        )
    if opened.t2d is not None and not np.array_equal(np.flatnonzero(opened.t2d), np.sort(ids)):
        raise CheckpointError(
            f"{where}: tensors d2t and t2d name different tokens; the file is damaged, fetch the draft again"
        )
    return None if np.array_equal(ids, np.arange(target.vocab_size)) else ids


def with_layout(model: ModelConfig, types: tuple[str, ...], window: int | None) -> ModelConfig:
    """DFlash's layers always have norms on queries and keys, and one rope for all of them."""
    return replace(model, qk_norm=True, layer_types=types, sliding_window=window)
