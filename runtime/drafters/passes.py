"""The graphs of a draft over its own KV cache: passes bound once per shape, positions, masks."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..cache import CacheShape, KVCache
from ..contracts import TensorSpec
from ..session import Arena, Binding, Device, GraphSession, Tensor

_MAX_PASSES = 64
_CPU = Device("cpu")
_HOST_INPUTS = ("context_positions", "position_ids", "write_indices", "attn_mask", "attn_mask_sliding")


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a tensor that a pass reads: as `shape`, from `offset` elements on."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class MaskRule:
    """What rows of a pass see besides all that the cache holds: each other, and up to which distance.

    causal, sliding_causal: earlier rows of the pass only, in full and in sliding layers. window: positions back that
    sliding layers see, the row itself included.
    """

    causal: bool = True
    sliding_causal: bool = True
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PassShape:
    """T context rows and S rows of a pass; passes of one shape that read each other's output differ in `turn`."""

    context: int
    rows: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class BoundPass:
    """The binding of one shape, the inputs that the host fills in, and the outputs: S rows, or more, of [*]."""

    binding: Binding
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class DraftPasses:
    """Runs a draft's graphs in one slot; a row's place in the cache is its position in the text.

    Rows behind `length` are stale. A pass writes there; `advance` makes the first rows it wrote count.
    """

    def __init__(
        self, sessions: Mapping[str, GraphSession], shape: CacheShape, rule: MaskRule, max_positions: int
    ) -> None:
        """`sessions` by role; "draft" runs here, the others' time counts too.

        No row is given a position from `max_positions` on; only rows whose output nobody reads may stand there.
        """
        self._sessions, self._rule = dict(sessions), rule
        self._draft = self._sessions["draft"]
        self.device, self.dtype = self._draft.device, shape.dtype
        self.cache = KVCache(shape, 1, self.device)
        self.passes = 0
        self._last = max_positions - 1
        self._bound: dict[PassShape, BoundPass] = {}
        self._arenas: dict[tuple[str, int], Arena] = {}  # of outputs, by name and turn
        self._generation = self.cache.generation

    @property
    def length(self) -> int:
        """Rows that count."""
        return self.cache.lengths[0]

    @property
    def ort_ns(self) -> int:
        """Nanoseconds in the draft's own sessions so far."""
        return sum(session.elapsed_ns for session in self._sessions.values())

    def run(self, shape: PassShape, spans: Mapping[str, Span], wanted: bool = True) -> BoundPass:
        """One pass: context rows at `length` and up, the S rows behind them.

        `spans` are the inputs that carry numbers. wanted: outputs are of interest, and the pass is worth keeping for
        others of its shape. Outputs are valid until the next pass of the same turn.
        """
        bound = self._prepare(shape, wanted)
        for name, span in spans.items():
            bound.binding.bind_input(name, span.tensor, span.shape, span.offset)
        self._place(bound.inputs, shape)
        self._draft.run(bound.binding)
        self.passes += 1
        return bound

    def advance(self, rows: int) -> None:
        """The first `rows` behind `length`, as the last pass wrote them, count from now on."""
        self.cache.advance(0, rows)

    def rewind_to(self, length: int) -> None:
        """Keep at most the first `length` rows."""
        self.cache.rewind_to(0, min(length, self.length))

    def _prepare(self, shape: PassShape, wanted: bool) -> BoundPass:
        self.cache.reserve(self.length + shape.context + shape.rows)
        if self.cache.generation != self._generation or len(self._bound) >= _MAX_PASSES:
            self._generation = self.cache.generation
            self._bound.clear()
        if not wanted:
            return self._bind(shape, wanted)
        found = self._bound.get(shape)
        if found is None:
            found = self._bound[shape] = self._bind(shape, wanted)
        return found

    def _bind(self, shape: PassShape, wanted: bool) -> BoundPass:
        """Bind the cache, what the host fills in, and the outputs if they are wanted."""
        axes = {"B": 1, "T": shape.context, "S": shape.rows, "C": self.cache.capacity}
        binding, past, present = self._draft.binding(), iter(self.cache.tensors), iter(self.cache.tensors)
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        for spec in self._draft.contract.inputs:
            if spec.name.startswith("past_key_values."):
                binding.bind_input(spec.name, next(past), _concrete(spec, axes))
            elif spec.name in _HOST_INPUTS:
                inputs[spec.name] = Tensor(_concrete(spec, axes), spec.dtype, _CPU)
                binding.bind_input(spec.name, inputs[spec.name], inputs[spec.name].shape)
        for spec in self._draft.contract.outputs:
            if spec.name.startswith("present."):
                binding.bind_output(spec.name, next(present), _concrete(spec, axes))
            elif wanted:
                outputs[spec.name] = self._output(spec, shape)
                binding.bind_output(spec.name, outputs[spec.name], _concrete(spec, axes))
        return BoundPass(binding, inputs, outputs)

    def _output(self, spec: TensorSpec, shape: PassShape) -> Tensor:
        """Room for an output on the device, shared by all passes of a turn."""
        key = (spec.name, shape.turn)
        if key not in self._arenas:
            self._arenas[key] = Arena((int(spec.shape[-1]),), spec.dtype, self.device)
        self._arenas[key].reserve(shape.rows)
        return self._arenas[key].tensor

    def _place(self, inputs: dict[str, Tensor], shape: PassShape) -> None:
        start = self.length
        first = start + shape.context  # the place of the first of the S rows in the cache
        if "context_positions" in inputs:
            inputs["context_positions"].write(np.arange(start, first))
        positions = range(first, first + shape.rows)  # [S]
        inputs["position_ids"].write([min(position, self._last) for position in positions])
        inputs["write_indices"].write(start)
        _fill_mask(_plane(inputs["attn_mask"]), first, self._rule.causal)
        if "attn_mask_sliding" in inputs:
            assert self._rule.window is not None
            mask = _plane(inputs["attn_mask_sliding"])
            _fill_mask(mask, first, self._rule.sliding_causal)
            _narrow(mask, first, self._rule.window)


def _plane(mask: Tensor) -> np.ndarray:
    """The [S,C] of a mask [1,1,S,C]."""
    assert mask.host is not None
    return mask.host[0, 0]


def _fill_mask(mask: np.ndarray, first: int, causal: bool) -> None:
    """Row r of [S,C] sees every column before `first`, and of the S columns from there on all, or the first r + 1."""
    rows = len(mask)
    mask[:, :first] = True
    mask[:, first : first + rows] = np.tri(rows, dtype=np.bool_) if causal and rows > 1 else True
    mask[:, first + rows :] = False


def _narrow(mask: np.ndarray, first: int, window: int) -> None:
    """Hide from row r of [S,C], which stands at column first + r, what is `window` columns back or more."""
    low = max(first - window + 1, 0)  # up to here nothing is seen by any row
    mask[:, :low] = False
    near = mask[:, low : first + len(mask)]
    columns, rows = np.arange(low, low + near.shape[1]), np.arange(first, first + len(mask))
    near &= columns > rows[:, None] - window


def _concrete(spec: TensorSpec, axes: dict[str, int]) -> tuple[int, ...]:
    return tuple(axes[axis] if isinstance(axis, str) else axis for axis in spec.shape)
