"""What goes into a pass of the target and what it leaves behind, by request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .session import Device, Tensor

FEW = 33  # rows of the widest round of one text; wider passes are prompts, each of its own length

Fetch = Callable[[], np.ndarray]  # brings rows to the host


@dataclass(frozen=True, slots=True)
class Rows:
    """What one slot contributes to a pass: tokens to append, and how many of the last rows need logits."""

    slot: int
    tokens: Sequence[int]
    wanted: int


class PassRows:
    """What the target computed for the tokens of one request, on the host once asked for; valid until the next pass.

    The numbers are of the target's own type.
    """

    __slots__ = ("_hidden", "_taps")

    def __init__(self, hidden: np.ndarray | Fetch, taps: np.ndarray | Fetch | None) -> None:
        self._hidden, self._taps = hidden, taps

    @property
    def hidden(self) -> np.ndarray:
        """[n,H], the final norm applied."""
        return self._hidden() if callable(self._hidden) else self._hidden

    @property
    def taps(self) -> np.ndarray | None:
        """[n, L*H] in the order of `Target.taps`; None without taps."""
        return self._taps() if callable(self._taps) else self._taps


class RowBuffers:
    """Memory for the rows [M,width] of passes, one buffer per size, of which only the last pass's content is of use.

    A device is only ever read by whole buffers, so narrow passes have theirs to the row.
    """

    def __init__(self, width: int, dtype: str, device: Device) -> None:
        self._width, self._dtype, self._device = width, dtype, device
        self._made: dict[int, Tensor] = {}

    def of(self, rows: int) -> Tensor:
        """The buffer for a pass of so many rows; wide ones are larger."""
        size = rows if rows <= FEW else 1 << (rows - 1).bit_length()
        if size not in self._made:
            self._made[size] = Tensor((size, self._width), self._dtype, self._device)
        return self._made[size]
