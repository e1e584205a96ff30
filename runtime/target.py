"""A model ready to run: its sessions over one KV cache. Knows nothing about drafting or sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from .bundle import Bundle
from .cache import CacheShape, KVCache
from .contracts import TensorSpec
from .ends import Embedder, Scorer
from .errors import BundleError, UsageError
from .manifest import GraphEntry
from .memory import collapse_in_background
from .rows import PassRows, RowBuffers, Rows
from .session import Arena, Binding, Device, GraphSession, RuntimeOptions, Tensor, check_version, resolve_provider

PREFILL_CHUNK = 512
_MAX_PASSES = 64
_ONE_BLOCK = 32  # rows that kernels take in one block, whatever the machine; wider passes may end in a block of one row
_EXACT_HEAD_DIM = 128  # up to it GroupQueryAttention's sums on the CPU do not depend on where a pass ends
_CPU = Device("cpu")


class _Layout(NamedTuple):
    """Which slots a pass covers ([low, high)) and how its rows are padded."""

    low: int
    high: int
    width: int  # rows per slot, S

    @property
    def batch(self) -> int:
        return self.high - self.low


@dataclass(slots=True)
class _Pass:
    """The bindings of one layout by role; by name its small inputs and the rows that pass from graph to graph.

    The head's `rows` and logits are bound again whenever their number changes.
    """

    bindings: dict[str, Binding]
    inputs: dict[str, Tensor]
    between: dict[str, Tensor]
    rows: Tensor | None = None
    chosen: list[int] | None = None  # the rows last written


class Target:
    """Runs ragged passes of token rows and returns logits; owns the sessions and the KV cache.

    `floor` is the least number of rows per slot and per head call: 2 makes results independent of how rows are
    grouped into passes on the CPU provider, whose one-row kernels round differently from all wider ones. Raises
    UsageError where a floor of 2 is known not to be enough.
    """

    def __init__(self, bundle: Bundle, options: RuntimeOptions, slots: int = 1, floor: int = 1) -> None:
        self.bundle, self.slots, self.floor = bundle, slots, floor
        self.provider = resolve_provider(options.provider)
        facts = bundle.manifest.model
        self.token_count = facts.token_count
        self.context = facts.max_positions - (floor - 1)
        self.sessions = {
            role: _open(bundle, entry, self.provider, options, light=role != "body")
            for role, entry in _choose_graphs(bundle, self.provider, slots, floor).items()
        }
        body = self.sessions["body"]
        self.device, dtype = body.device, body.contract.outputs[0].dtype
        self.cache = KVCache(CacheShape(facts.layers, facts.kv_heads, facts.head_dim, dtype), slots, self.device)
        self._window = facts.sliding_window
        self.taps = bundle.manifest.taps
        widths = {"inputs_embeds": 1, "hidden": 1, "taps": len(self.taps)}
        self._buffers = {
            name: RowBuffers(width * facts.hidden_size, dtype, self.device) for name, width in widths.items() if width
        }
        self._logits = Arena((facts.vocab_size,), "float32", _CPU)
        self._passes: dict[_Layout, _Pass] = {}
        self._generation = -1
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._embedder = Embedder(self.sessions["embed"])
        self._scorer = Scorer(self.sessions["head"], self.token_count)
        self._last: tuple[_Pass, _Layout, Sequence[Rows]] | None = None
        self._fetched: dict[str, np.ndarray] = {}  # what the host has read of the last pass
        self.passes = 0
        if self.device.is_cpu:
            collapse_in_background()

    def forward(self, requests: Sequence[Rows]) -> list[np.ndarray]:
        """Append each request's tokens to its slot in one pass.

        Returns, per request, float32 logits [wanted, V] of its last rows; they stay valid until the next pass.
        """
        layout = self._layout(requests)
        wanted = sum(request.wanted for request in requests)
        count = self._padded(wanted) if wanted else 0
        current = self._prepare(layout, count)
        self._fill(current.inputs, layout, requests)
        if wanted:
            self._choose_rows(current, _row_indices(layout, requests, count))
        for role in ("embed", "body", "head") if wanted else ("embed", "body"):
            self.sessions[role].run(current.bindings[role])
        self.passes += 1
        self._last = current, layout, requests
        self._fetched.clear()
        for request in requests:
            self._remember(request)
        return self._split(requests)

    def rows(self, index: int) -> PassRows:
        """What the last pass computed for its request number `index`."""
        assert self._last is not None
        _, layout, requests = self._last
        start = (requests[index].slot - layout.low) * layout.width
        end = start + len(requests[index].tokens)
        taps = partial(self._fetch, "taps", start, end) if self.taps else None
        return PassRows(partial(self._fetch, "hidden", start, end), taps)

    def _fetch(self, name: str, start: int, end: int) -> np.ndarray:
        """Rows of the last pass, numbered over all slots; a device is read once a pass, whoever asks for what."""
        if name not in self._fetched:
            assert self._last is not None
            self._fetched[name] = self._last[0].between[name].read()
        return self._fetched[name][start:end]

    def embed_tokens(self, ids: Sequence[int]) -> Tensor:
        """For drafts, see `Embedder`."""
        return self._embedder.embed_tokens(ids)

    def score(self, hidden: Tensor, count: int, first: int = 0) -> np.ndarray:
        """For drafts, see `Scorer`."""
        return self._scorer.score(hidden, count, first)

    def held(self, slot: int) -> list[int]:
        """The tokens behind what the slot's cache holds, whoever put them there."""
        return self._tokens[slot][: self.cache.lengths[slot]]

    def _remember(self, request: Rows) -> None:
        tokens = self._tokens[request.slot]
        del tokens[self.cache.lengths[request.slot] :]
        tokens.extend(request.tokens)
        self.cache.advance(request.slot, len(request.tokens))

    def ort_ns(self) -> dict[str, int]:
        """Nanoseconds spent in each session so far, by role."""
        return {role: session.elapsed_ns for role, session in self.sessions.items()}

    def prefill(self, slot: int, tokens: Sequence[int], chunk: int = PREFILL_CHUNK) -> None:
        """Append many tokens without scoring any, `chunk` rows a pass."""
        for start in range(0, len(tokens), chunk):
            self.forward([Rows(slot, tokens[start : start + chunk], 0)])

    def _layout(self, requests: Sequence[Rows]) -> _Layout:
        width = 0
        for request in requests:
            length = self.cache.lengths[request.slot] + len(request.tokens)
            width = max(width, self._padded(len(request.tokens)))
            if length > self.context:
                raise UsageError(
                    f"{length} tokens do not fit the model's context of {self.context}; "
                    "shorten the prompt or ask for fewer tokens"
                )
        slots = [request.slot for request in requests]
        low, high = min(slots), max(slots) + 1
        odd = (high - low) * width % 2 and (high - low) * width > _ONE_BLOCK
        return _Layout(low, high, width + 1 if odd and self.floor > 1 else width)

    def _padded(self, rows: int) -> int:
        """How many rows are run for so many, spare ones included.

        Kernels take a wide pass in blocks of an even number of rows, and a last block of one row is rounded like a pass
        of one; so under the floor wide passes are even.
        """
        if self.floor == 1 or self.floor <= rows <= _ONE_BLOCK:
            return rows
        return max(rows + rows % 2, self.floor)

    def _prepare(self, layout: _Layout, count: int) -> _Pass:
        self.cache.reserve(max(self.cache.lengths[layout.low : layout.high]) + layout.width)
        moved = self._logits.reserve(count)
        if moved or self.cache.generation != self._generation or len(self._passes) >= _MAX_PASSES:
            self._passes.clear()
            self._generation = self.cache.generation
        found = self._passes.get(layout)
        if found is None:
            found = self._passes[layout] = self._bind(layout)
        return found

    def _bind(self, layout: _Layout) -> _Pass:
        rows = layout.batch * layout.width
        axes = {"B": layout.batch, "S": layout.width, "M": rows, "C": self.cache.capacity}
        offset = layout.low * self.cache.slot_elements()
        between = {name: buffers.of(rows) for name, buffers in self._buffers.items()}
        bound = _Pass({}, {}, between)
        for role, session in self.sessions.items():
            bound.bindings[role] = self._bind_graph(session, axes, offset, bound)
        return bound

    def _bind_graph(self, session: GraphSession, axes: dict[str, int], offset: int, bound: _Pass) -> Binding:
        """Bind all but the rows to score and their logits; what the host is to fill in is added to `bound.inputs`."""
        binding, past, present = session.binding(), iter(self.cache.tensors), iter(self.cache.tensors)
        for spec in session.contract.inputs:
            if spec.name == "rows":
                continue
            shape = _concrete(spec, axes)
            if spec.name.startswith("past_key_values."):
                binding.bind_input(spec.name, next(past), shape, offset)
            elif spec.name in bound.between:
                binding.bind_input(spec.name, bound.between[spec.name], shape)
            else:
                bound.inputs[spec.name] = Tensor(shape, spec.dtype, _CPU)
                binding.bind_input(spec.name, bound.inputs[spec.name], shape)
        for spec in session.contract.outputs:
            if spec.name.startswith("present."):
                binding.bind_output(spec.name, next(present), _concrete(spec, axes), offset)
            elif spec.name in bound.between:
                binding.bind_output(spec.name, bound.between[spec.name], _concrete(spec, axes))
        return binding

    def _fill(self, inputs: dict[str, Tensor], layout: _Layout, requests: Sequence[Rows]) -> None:
        ids = inputs["input_ids"].host
        assert ids is not None
        past = self.cache.lengths[layout.low : layout.high]  # [B]
        counts = [0] * layout.batch  # [B] rows per slot, spare ones included
        if len(requests) < layout.batch or layout.batch > 1:
            ids.fill(0)
        for request in requests:
            row, tokens = request.slot - layout.low, request.tokens
            counts[row] = self._padded(len(tokens))
            ids[row, : len(tokens)] = tokens
            if len(tokens) < counts[row]:
                ids[row, len(tokens) : counts[row]] = tokens[-1]
        if "seqlens_k" in inputs:
            _fill_ort(inputs, past, counts)
        else:
            _fill_std(inputs, np.array(past), layout.width, self.bundle.manifest.model.max_positions, self._window)

    def _choose_rows(self, current: _Pass, rows: list[int]) -> None:
        """Have the head score these rows, numbered over all slots."""
        if rows == current.chosen:
            return
        count = len(rows)
        if current.rows is None or current.rows.shape != (count,):
            current.rows = Tensor((count,), "int64", _CPU)
            head, width = current.bindings["head"], self.bundle.manifest.model.vocab_size
            head.bind_input("rows", current.rows, (count,))
            head.bind_output("logits", self._logits.tensor, (count, width))
        current.rows.write(rows)
        current.chosen = rows

    def _split(self, requests: Sequence[Rows]) -> list[np.ndarray]:
        """The logits of each request, as views."""
        logits, start = self._logits.tensor.read(), 0
        result = []
        for request in requests:
            result.append(logits[start : start + request.wanted, : self.token_count])
            start += request.wanted
        return result


def _row_indices(layout: _Layout, requests: Sequence[Rows], count: int) -> list[int]:
    """Flat indices [count] of the rows to score; spare entries repeat the last one."""
    indices: list[int] = []
    for request in requests:
        end = (request.slot - layout.low) * layout.width + len(request.tokens)
        indices.extend(range(end - request.wanted, end))
    indices.extend(indices[-1:] * (count - len(indices)))
    return indices


def _fill_ort(inputs: dict[str, Tensor], past: list[int], counts: list[int]) -> None:
    totals = [max(length + count, 1) for length, count in zip(past, counts, strict=True)]
    inputs["seqlens_k"].write([total - 1 for total in totals])
    inputs["total_sequence_length"].write(max(totals))
    if "query_seqlens" in inputs:
        inputs["query_seqlens"].write(counts)


def _fill_std(inputs: dict[str, Tensor], past: np.ndarray, width: int, limit: int, window: int | None) -> None:
    positions = past[:, None] + np.arange(width)  # [B,S]
    inputs["position_ids"].write(np.minimum(positions, limit - 1))
    inputs["write_indices"].write(past)
    columns = np.arange(inputs["attn_mask"].shape[-1])  # [C]
    causal = columns <= positions[:, None, :, None]  # [B,1,S,C]
    inputs["attn_mask"].write(causal)
    if "attn_mask_sliding" in inputs:
        assert window is not None
        inputs["attn_mask_sliding"].write(causal & (columns > positions[:, None, :, None] - window))


def _concrete(spec: TensorSpec, axes: dict[str, int]) -> tuple[int, ...]:
    return tuple(axes[axis] if isinstance(axis, str) else axis for axis in spec.shape)


def _choose_graphs(bundle: Bundle, provider: str, slots: int, floor: int) -> dict[str, GraphEntry]:
    """The graph of each role; TensorRT wants the standard profile, others the ort one where the floor holds with it."""
    manifest = bundle.manifest
    only_std = provider == "cpu" and floor > 1 and manifest.model.head_dim > _EXACT_HEAD_DIM
    if only_std and manifest.graph("body", "std") is None:
        raise UsageError(
            f"exact mode needs the std profile for a model with heads of {manifest.model.head_dim} on the CPU, because "
            "the other one's attention rounds by where a pass ends; export it again with --profile std, or both"
        )
    for profile in ("std",) if only_std else ("std", "ort") if provider == "tensorrt" else ("ort", "std"):
        ragged = profile == "ort" and slots > 1
        body = manifest.graph("body", profile, ragged)
        if body is not None:
            embed = manifest.graph("embed", profile) or manifest.graph("embed", _other(profile))
            head = manifest.graph("head", profile) or manifest.graph("head", _other(profile))
            if embed and head:
                return {"embed": embed, "body": body, "head": head}
    raise BundleError(
        f"{bundle.folder} has no graphs for {slots} slots on provider {provider}; "
        "export it again with --profile std (any batch, TensorRT) or --profile ort (CPU, CUDA); "
        "what was wrapped has one slot"
    )


def _other(profile: str) -> str:
    return "ort" if profile == "std" else "std"


def _open(bundle: Bundle, entry: GraphEntry, provider: str, options: RuntimeOptions, light: bool) -> GraphSession:
    check_version(entry.minimum_ort)
    return GraphSession(bundle.folder / entry.file, entry.contract, provider, options, light)
