"""Rows of the target that a draft has not read yet, in memory that its graphs read in place."""

from collections.abc import Sequence

import numpy as np

from ..session import Device, Tensor

_FIRST_ROWS = 64


class PendingRows:
    """Rows [n,F] of the draft's own type, of consecutive positions up to `end`.

    Rows that were read stay until their room is needed, so that the last can be read again.
    """

    def __init__(self, width: int, dtype: str) -> None:
        self._width, self._dtype = width, dtype
        self._start = 0  # position of the first stored row
        self._first = self._count = 0  # of `_count` stored rows, the first `_first` were read
        self.tensor, self._host = self._allocate(_FIRST_ROWS)  # [rows,F]

    def __len__(self) -> int:
        """Rows not read yet."""
        return self._count - self._first

    @property
    def position(self) -> int:
        """Position of the next row to read."""
        return self._start + self._first

    @property
    def offset(self) -> int:
        """Elements of `tensor` before the next row to read."""
        return self._first * self._width

    def append(self, position: int, parts: Sequence[np.ndarray]) -> None:
        """Copy rows whose first stands at `position`; `parts` [n,*] side by side make rows of F values.

        ValueError where rows wait that end elsewhere.
        """
        rows = len(parts[0])
        if self._first == self._count:
            self._start, self._first, self._count = position, 0, 0
        elif position != self._start + self._count:
            raise ValueError(f"rows from {position} on do not follow those up to {self._start + self._count}")
        if self._count + rows > len(self._host):
            self._make_room(rows)
        end, column = self._count + rows, 0
        for part in parts:
            width = part.shape[1]
            self._host[self._count : end, column : column + width] = part
            column += width
        self._count = end

    def before(self, position: int) -> int:
        """How many of the rows not read yet stand before a position."""
        return min(max(position - self.position, 0), len(self))

    def advance(self, rows: int) -> None:
        """The next `rows` were read."""
        self._first += rows

    def drop_from(self, position: int) -> None:
        """Forget the rows at a position and behind it."""
        self._count = min(self._count, max(position - self._start, 0))
        self._first = min(self._first, self._count)

    def step_back(self) -> bool:
        """Have the last row that was read read again; False if it is gone."""
        if self._first == 0:
            return False
        self._first -= 1
        return True

    def _make_room(self, rows: int) -> None:
        old, kept = self._host, len(self)
        if kept + rows > len(old):
            self.tensor, self._host = self._allocate(1 << (kept + rows - 1).bit_length())
        self._host[:kept] = old[self._first : self._count]
        self._start, self._first, self._count = self.position, 0, kept

    def _allocate(self, rows: int) -> tuple[Tensor, np.ndarray]:
        tensor = Tensor((rows, self._width), self._dtype, Device("cpu"))
        assert tensor.host is not None
        return tensor, tensor.host
