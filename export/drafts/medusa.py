"""Reads Medusa heads (https://arxiv.org/abs/2401.10774): config.json and safetensors, in the published layouts.

A head is a stack of residual blocks x + silu(W x + b) and an output matrix (`medusa_tensors`). All layouts read the
target's final hidden state, its norm applied, of the row whose scores gave the anchor, and head 0 stands for the token
right behind the anchor: the reference trains head h at row t on token t + 2 + h, and the engines propose in that order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError, UsageError

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, read_json
from ..config_keys import Keys
from ..config_tables import HARMLESS
from ..weights import TensorTable
from .base import DraftCheckpoint, DraftConfig, MedusaHeads
from .medusa_tensors import (
    REFERENCE,
    VLLM,
    WEIGHTS_NAME,
    OpenedHeads,
    heads_names,
    open_heads,
    output_name,
    pickles_of,
)
from .medusa_vocabulary import TOKEN_MAP, PickedRows, target_ids
from .strict import REMEDY, check_tensors

_VERSION = "2"  # of heads that the target's lm_head scores
_SAID, _UPLOADED = 2, 5  # the reference's uploads have 5 heads and say 2: its own code corrects them, so we do
_DESCRIPTIVE = HARMLESS | {"base_model_name_or_path", "max_paths", "topk", "max_seq_len"}  # of the source; of trees


@dataclass(frozen=True, slots=True)
class _Stated:
    """What the config says; None where it says nothing."""

    heads: int | None
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    truncated: int | None
    biased: bool
    one_output: bool
    version: str | None


def is_medusa(folder: Path) -> bool:
    """Whether a folder holds Medusa heads, readable or not."""
    if (folder / WEIGHTS_NAME).is_file() or pickles_of(folder):
        return True
    raw = read_json(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    if "speculators_model_type" in raw:
        return False
    return raw.get("model_type") == "medusa" or raw.get("architectures") == ["MedusaModel"] or "medusa_num_heads" in raw


def read_medusa(folder: Path, target: ModelConfig) -> DraftCheckpoint:
    """Open the heads in a folder, for this target; all but the values of their matrices is checked.

    Raises UnsupportedModelError for pickles and for maths that is not implemented, CheckpointError where the heads
    contradict themselves, UsageError where they do not fit the target.
    """
    opened, config_file = open_heads(folder), folder / CONFIG_NAME
    stated = _stated(read_json(config_file), str(config_file))
    table = opened.tensors.pop(TOKEN_MAP, None)
    heads = _count_heads(opened, stated)
    rows = _check_fit(opened, stated, heads, target)
    ids = target_ids(table, stated.truncated, target.vocab_size, opened.where)
    names = heads_names(opened, heads, target.hidden_size, rows)
    shapes = {stored: shape for stored, (_, shape) in names.items()}
    check_tensors(opened.where, opened.tensors, shapes, "Medusa heads")
    tensors = {ours: opened.tensors[stored] for stored, (ours, _) in names.items()}
    if ids is not None and rows == target.vocab_size:
        tensors = {ours: PickedRows(each, ids) if "lm_head" in ours else each for ours, each in tensors.items()}
    config = DraftConfig(
        kind="medusa",
        model=_without_layers(target),
        taps=(),
        tap_convention="of the row whose scores gave the anchor",
        target_hidden_size=target.hidden_size,
        block_size=heads.count + 1,
        draft_vocab_size=rows if ids is None else len(ids),
        heads=heads,
    )
    files = (config_file, *opened.files)
    return DraftCheckpoint(folder.resolve().name, None, config, TensorTable(opened.where, tensors), files, ids)


def _stated(raw: Mapping[str, Any], where: str) -> _Stated:
    keys = Keys(raw, {}, where)
    architectures = keys.texts("architectures")
    if architectures not in (None, (), ("MedusaModel",)):
        raise UnsupportedModelError(
            f"{where}: architectures {list(architectures)} with Medusa heads are not implemented; this version "
            "reads heads that stand alone, with architectures ['MedusaModel'] or none"
        )
    version = keys.get("version")
    if version not in (None, _VERSION):
        raise UnsupportedModelError(
            f"{where}: version {version!r} of Medusa heads is not implemented; this version knows {_VERSION!r}"
        )
    stated = _Stated(
        heads=_either(keys, "medusa_num_heads", "num_heads"),
        layers=_either(keys, "medusa_num_layers", "num_hidden_layers"),
        hidden_size=keys.optional_integer("hidden_size"),
        vocab_size=keys.optional_integer("vocab_size"),
        truncated=keys.optional_integer("truncated_vocab_size"),
        biased=keys.flag("medusa_fc_bias", False),
        one_output=keys.flag("original_lm_head", False),
        version=version,
    )
    keys.refuse_unread(_DESCRIPTIVE, only={"logit_scale": 1.0})
    return stated


def _either(keys: Keys, *names: str) -> int | None:
    """A number that may have either name, or both if they agree."""
    stated = {name: number for name in names if (number := keys.optional_integer(name)) is not None}
    if len(set(stated.values())) > 1:
        words = " and ".join(f"{name} {stated[name]}" for name in stated)
        raise CheckpointError(f"{keys.where}: {words} disagree; {REMEDY}")
    return next(iter(stated.values()), None)


def _count_heads(opened: OpenedHeads, stated: _Stated) -> MedusaHeads:
    """What the tensors are, as far as the config does not contradict."""
    layout, vllm = opened.layout, opened.layout is VLLM
    blocks = layout.numbers(layout.block, opened.tensors)
    outputs = layout.numbers(layout.output, opened.tensors)
    count, layers = len({head for head, *_ in (*blocks, *outputs)}), len({layer for _, layer in blocks})
    if count == 0:
        raise UnsupportedModelError(
            f"{opened.where} holds no Medusa heads under a name this version knows ({REFERENCE.block}.weight, "
            f"{VLLM.block}.weight), but {next(iter(opened.tensors), 'nothing')}"
        )
    output = "one" if vllm and stated.one_output else "own" if vllm or outputs else "target"
    if not vllm and (stated.one_output or (stated.version == _VERSION and outputs)):
        raise CheckpointError(
            f"{opened.where}: the config says that the heads share an lm_head, but there are {len(outputs)} of their "
            "own; {REMEDY}"
        )
    if output == "target" and layers != 1:
        raise UnsupportedModelError(
            f"{opened.where}: heads of {layers} blocks that the target's lm_head scores are not implemented; this "
            "version knows those of 1"
        )
    if vllm or (stated.heads, count) != (_SAID, _UPLOADED):
        _check_count(opened, "heads", stated.heads, count)
    _check_count(opened, "blocks a head", stated.layers, layers)
    return MedusaHeads(count, layers, stated.biased if vllm else True, output)


def _check_count(opened: OpenedHeads, what: str, said: int | None, found: int) -> None:
    if said not in (None, found):
        raise CheckpointError(f"{opened.where}: the config says {said} {what}, the tensors are of {found}; {REMEDY}")


def _check_fit(opened: OpenedHeads, stated: _Stated, heads: MedusaHeads, target: ModelConfig) -> int | None:
    """Rows of an output matrix, None where there are none; a UsageError where the target has other sizes."""
    output = output_name(opened, heads, 0)
    first = f"{opened.layout.block.format(h=0, l=0)}.weight" if heads.layers else output
    rows = None if heads.output == "target" else _size(opened, output, 0, target.vocab_size)
    whole = rows if stated.truncated is None else None
    _check_truncated(opened, stated, rows, target.vocab_size)
    _check_size(opened, "hidden size", stated.hidden_size, _size(opened, first, 1, None), target.hidden_size)
    _check_size(opened, "vocabulary", stated.vocab_size, whole, target.vocab_size)
    return rows


def _check_truncated(opened: OpenedHeads, stated: _Stated, rows: int | None, vocabulary: int) -> None:
    """A truncated vocabulary has matrices of its own, or the loader takes its rows out of whole ones."""
    whole = stated.vocab_size or vocabulary
    if None not in (rows, stated.truncated) and rows not in (stated.truncated, whole):
        raise CheckpointError(
            f"{opened.where}: the config says truncated_vocab_size {stated.truncated} of a vocabulary of {whole}, the "
            f"output matrices have {rows} rows, which is neither; {REMEDY}"
        )


def _size(opened: OpenedHeads, name: str, axis: int, default: int | None) -> int | None:
    """One side of a matrix; of a missing or misshapen one the default, what is wrong with it is said elsewhere."""
    shape = opened.tensors[name].shape if name in opened.tensors else ()
    return shape[axis] if len(shape) == 2 else default


def _check_size(opened: OpenedHeads, what: str, said: int | None, found: int | None, theirs: int) -> None:
    if None not in (said, found) and said != found:
        raise CheckpointError(f"{opened.where}: the config says a {what} of {said}, the tensors have {found}; {REMEDY}")
    for ours in (found, said):
        if ours not in (None, theirs):
            raise UsageError(
                f"{opened.where}: the heads are for a {what} of {ours}, the target has {theirs}; use the heads of this "
                "very target"
            )


def _without_layers(target: ModelConfig) -> ModelConfig:
    """The heads' own model: as wide as the target, with its vocabulary and positions, and no decoder layer."""
    return replace(
        target,
        layers=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        intermediate_size=0,
        layer_types=(),
        sliding_window=None,
        sandwich_norms=False,
    )
