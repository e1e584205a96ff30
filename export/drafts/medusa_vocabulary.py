"""The truncated vocabulary of Medusa heads in vLLM's layout: `token_map` names the target's token of each row."""

from dataclasses import dataclass

import numpy as np

from oxidize.runtime.errors import CheckpointError

from ..safetensors_source import SafetensorsTensor
from ..weights import BlockQuantized, LazyTensor
from .strict import REMEDY

TOKEN_MAP = "token_map"
_INTEGERS = {"I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Some rows of a matrix [V,H], in the order of `ids` [n]: vLLM takes them when it loads a whole matrix."""

    tensor: LazyTensor
    ids: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        return (len(self.ids), *self.tensor.shape[1:])

    def load(self) -> np.ndarray:
        """The rows as float32."""
        return self.tensor.load()[self.ids]

    def blocks(self) -> BlockQuantized | None:
        """Never quantised."""
        return None


def target_ids(
    stored: SafetensorsTensor | None, truncated: int | None, vocabulary: int, where: str
) -> np.ndarray | None:
    """The target's ids int64 [n] of the heads' rows; None where the heads score the target's whole vocabulary.

    truncated: how many the config says they score. CheckpointError where it and the table disagree, or an id is
    outside the target's vocabulary or named twice.
    """
    if truncated in (None, vocabulary):
        if stored is not None:
            raise CheckpointError(
                f"{where}: there is a {TOKEN_MAP} {list(stored.shape)}, but truncated_vocab_size is {truncated} of "
                f"{vocabulary}; {REMEDY}"
            )
        return None
    if stored is None or stored.shape != (truncated,) or stored.dtype not in _INTEGERS:
        found = f"{stored.dtype} {list(stored.shape)}" if stored is not None else "none"
        raise CheckpointError(
            f"{where}: truncated_vocab_size {truncated} of {vocabulary} asks for integers {TOKEN_MAP} [{truncated}], "
            f"found {found}; {REMEDY}"
        )
    ids = np.concatenate([np.empty(0, np.int64), *(piece for _, piece in stored.pieces(_INTEGERS[stored.dtype]))])
    distinct = len(np.unique(ids))
    if ids.min() < 0 or ids.max() >= vocabulary or distinct < len(ids):
        raise CheckpointError(
            f"{where}: {TOKEN_MAP} names {distinct} different tokens from {ids.min()} to {ids.max()}, expected "
            f"{len(ids)} from 0 to {vocabulary - 1}; the file is damaged, or of another target: fetch the "
            "heads of this very target"
        )
    return ids.astype(np.int64)
