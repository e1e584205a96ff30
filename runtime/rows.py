"""What goes into a pass of the target and what it leaves behind, by request."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Rows:
    """What one slot contributes to a pass: tokens to append, and how many of the last rows need logits."""

    slot: int
    tokens: Sequence[int]
    wanted: int


@dataclass(frozen=True, slots=True)
class PassRows:
    """What the target computed for the tokens of one request: float32 on the host, valid until the next pass.

    hidden: [n,H], the final norm applied. taps: [n, L*H] in the order of `Target.taps`; None without taps.
    """

    hidden: np.ndarray
    taps: np.ndarray | None
