"""Graph contracts: the exact inputs and outputs of each role.

The exporter builds graphs that satisfy a contract, the manifest stores it and the runtime checks it at load.
Standard library only. Symbolic axes:

B  slots in the pass        S  rows per slot (padded)     C  capacity of the KV cache
N  rows given to the head   M  rows offered to the head   T  rows of the target that a draft reads
Everything else is a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PROFILES = ("ort", "std")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One graph input or output: name, ONNX dtype name ("float32", "int64", ...) and shape."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class GraphContract:
    """The inputs and outputs of one graph, in order."""

    role: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class BodyShape:
    """What the body's contract depends on."""

    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    taps: tuple[int, ...] = ()
    sliding: bool = False  # some layer attends to a window only


def embed_contract(hidden_size: int, dtype: str = "float32") -> GraphContract:
    """input_ids [B,S] -> inputs_embeds [B,S,H]."""
    return GraphContract(
        "embed",
        (TensorSpec("input_ids", "int64", ("B", "S")),),
        (TensorSpec("inputs_embeds", dtype, ("B", "S", hidden_size)),),
    )


def head_contract(hidden_size: int, vocab_size: int, dtype: str = "float32") -> GraphContract:
    """hidden [M,H], rows [N] (which of the M rows are wanted) -> logits [N,V], always float32."""
    return GraphContract(
        "head",
        (TensorSpec("hidden", dtype, ("M", hidden_size)), TensorSpec("rows", "int64", ("N",))),
        (TensorSpec("logits", "float32", ("N", vocab_size)),),
    )


def body_contract(shape: BodyShape, profile: str, ragged: bool = False) -> GraphContract:
    """The decoder layers with their KV cache; `hidden` has the final norm applied.

    Profile "ort": positions follow from the lengths. `seqlens_k` [B] is (valid cache length after the pass) - 1,
    `total_sequence_length` its maximum + 1; `ragged` graphs also take `query_seqlens` [B], the valid rows per slot,
    right-padded to S; others take one slot (B = 1).
    Profile "std": `position_ids` [B,S], `write_indices` [B] (where the S rows go in the cache) and a boolean
    `attn_mask` [B,1,S,C]; models with sliding layers also take `attn_mask_sliding`. Any batch.
    """
    inputs = (TensorSpec("inputs_embeds", shape.dtype, ("B", "S", shape.hidden_size)),)
    if profile == "ort":
        inputs += _ort_positions(ragged)
    elif profile == "std":
        inputs += _std_positions(shape.sliding)
    else:
        raise ValueError(f"profile must be one of {PROFILES}, not {profile!r}")
    outputs = (TensorSpec("hidden", shape.dtype, ("B", "S", shape.hidden_size)),)
    if shape.taps:
        outputs += (TensorSpec("taps", shape.dtype, ("B", "S", len(shape.taps) * shape.hidden_size)),)
    cache = [("B", shape.kv_heads, "C", shape.head_dim)] * shape.layers
    inputs += _kv("past_key_values", shape.dtype, cache)
    outputs += _kv("present", shape.dtype, cache)
    return GraphContract("body", inputs, outputs)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What the contracts of a draft that reads the target's rows depend on.

    kind: "dflash", "eagle3", "mtp" or "medusa". feature_size: width F of the target's rows it reads. vocab_size: width
    V of the target's logits. draft_vocab_size: rows of its own head; None where the target's head scores its hidden
    states. sliding: some layer attends to a window only. heads: of "medusa". choices: tokens K per row between which a
    path is chosen; None without a "select" graph. confident: the "markov" graph says how likely a token is kept.
    """

    kind: str
    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    feature_size: int
    vocab_size: int
    draft_vocab_size: int | None = None
    sliding: bool = False
    heads: int = 0
    choices: int | None = None
    confident: bool = False
    dtype: str = "float32"


def draft_contract(shape: DraftShape) -> GraphContract:
    """One pass of a draft over one slot; masks and positions are those of profile "std" (see `body_contract`).

    "dflash": `features` [1,T,F] of committed tokens are turned into keys and values at `write_indices`, under
    `context_positions`; the block `inputs_embeds` [1,S,H] (anchor and masks) comes right behind them, and its keys and
    values are stale afterwards.
    "eagle3", "mtp": `fused` [1,S,H] (what `fuse_contract` gives, the target's hidden states, or this graph's own
    `recycled`) beside the embeddings of the tokens that follow.
    Outputs `hidden` [1,S,H], to be scored by a head, the target's or the draft's own; "eagle3" and "mtp" also
    `recycled` [1,S,H].
    "medusa" keeps nothing: `features` [1,1,F] of the row before the anchor -> `logits` [1,heads,Vd] of the tokens
    behind the anchor, one row each, or `hidden` [1,heads,H] where the target's head scores them.
    """
    if shape.kind == "medusa":
        own = shape.draft_vocab_size
        rows = ("B", shape.heads, own or shape.hidden_size)
        return GraphContract(
            "draft",
            (TensorSpec("features", shape.dtype, ("B", 1, shape.feature_size)),),
            (TensorSpec("logits", "float32", rows) if own else TensorSpec("hidden", shape.dtype, rows),),
        )
    block = ("B", "S", shape.hidden_size)
    if shape.kind == "dflash":
        inputs = (
            TensorSpec("features", shape.dtype, ("B", "T", shape.feature_size)),
            TensorSpec("inputs_embeds", shape.dtype, block),
            TensorSpec("context_positions", "int64", ("B", "T")),
        )
        outputs: tuple[TensorSpec, ...] = ()
    else:
        inputs = (TensorSpec("fused", shape.dtype, block), TensorSpec("inputs_embeds", shape.dtype, block))
        outputs = (TensorSpec("recycled", shape.dtype, block),)
    outputs += (TensorSpec("hidden", shape.dtype, block),)
    cache = [("B", shape.kv_heads, "C", shape.head_dim)] * shape.layers
    inputs += (*_std_positions(shape.sliding), *_kv("past_key_values", shape.dtype, cache))
    return GraphContract("draft", inputs, (*outputs, *_kv("present", shape.dtype, cache)))


def fuse_contract(shape: DraftShape) -> GraphContract:
    """EAGLE-3: `features` [1,T,F], the taps of the target side by side -> `fused` [1,T,H]."""
    return GraphContract(
        "fuse",
        (TensorSpec("features", shape.dtype, ("B", "T", shape.feature_size)),),
        (TensorSpec("fused", shape.dtype, ("B", "T", shape.hidden_size)),),
    )


def select_contract(shape: DraftShape) -> GraphContract:
    """DFlash 2: hidden [N,H] and logits [N,V] of the rows that predict, anchor [1] -> tokens [N,K], scores [N,K,K].

    scores[t,a,b] is of token b of row t after token a of the row before (row 0: after the anchor, the same for all a).
    """
    choices = shape.choices or 0
    return GraphContract(
        "select",
        (
            TensorSpec("hidden", shape.dtype, ("N", shape.hidden_size)),
            TensorSpec("logits", "float32", ("N", shape.vocab_size)),
            TensorSpec("anchor", "int64", (1,)),
        ),
        (
            TensorSpec("tokens", "int64", ("N", choices)),
            TensorSpec("scores", "float32", ("N", choices, choices)),
        ),
    )


def markov_contract(shape: DraftShape) -> GraphContract:
    """DSpark: hidden [1,H] of a row and the token before it [1] -> bias [1,V] to be added to the row's logits.

    Where the draft is `confident` also confidence [1]: how likely the row's token is kept if those before it are.
    """
    vocabulary = shape.draft_vocab_size or shape.vocab_size
    outputs = (TensorSpec("bias", "float32", (1, vocabulary)),)
    if shape.confident:
        outputs += (TensorSpec("confidence", "float32", (1,)),)
    return GraphContract(
        "markov",
        (TensorSpec("hidden", shape.dtype, (1, shape.hidden_size)), TensorSpec("previous", "int64", (1,))),
        outputs,
    )


def _ort_positions(ragged: bool) -> tuple[TensorSpec, ...]:
    specs = (TensorSpec("seqlens_k", "int32", ("B",)), TensorSpec("total_sequence_length", "int32", ()))
    return (*specs, TensorSpec("query_seqlens", "int32", ("B",))) if ragged else specs


def _std_positions(sliding: bool) -> tuple[TensorSpec, ...]:
    mask = ("B", 1, "S", "C")
    specs = (
        TensorSpec("position_ids", "int64", ("B", "S")),
        TensorSpec("write_indices", "int64", ("B",)),
        TensorSpec("attn_mask", "bool", mask),
    )
    return (*specs, TensorSpec("attn_mask_sliding", "bool", mask)) if sliding else specs


def _kv(prefix: str, dtype: str, shapes: Sequence[tuple[int | str, ...]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{prefix}.{layer}.{part}", dtype, shape)
        for layer, shape in enumerate(shapes)
        for part in ("key", "value")
    )
