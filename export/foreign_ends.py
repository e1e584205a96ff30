"""What the cuts of every foreign decoder graph share: its ends, its inputs and outputs, the positions of its rows."""

from dataclasses import dataclass

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from .foreign_config import ForeignConfig, GraphNames
from .onnx_surgery import Cut, NewOp, Op, SourceGraph

_LOOKUPS = ("Gather", "com.microsoft::GatherBlockQuantized")
_PRODUCTS = ("MatMul", "com.microsoft::MatMulNBits")
_BEHIND_HEAD = ("Cast", "Add", "Sub", "Mul", "Div", "Tanh", "Where")  # row by row, with constants
_ROWWISE = ("Cast", "Add", "Mul", "Div")


@dataclass(frozen=True, slots=True)
class Cuts:
    """Three pieces of one graph, and what it says about itself.

    dtype: of hidden states and cache. window: tokens a sliding layer sees, None if none slides or only the graph knows.
    positions: how many the rope tables and the config allow.
    """

    embed: Cut
    body: Cut
    head: Cut
    dtype: str
    window: int | None
    positions: int


def refuse_nested(graph: SourceGraph) -> None:
    """Graphs within the graph read values around them that the cuts do not follow."""
    nested = [op for op in graph.ops if op.nested]
    if nested or graph.functions:
        what = f"{nested[0].kind} ({nested[0].name})" if nested else f"the function {graph.functions[0]}"
        raise UnsupportedModelError(
            f"{graph.path} has graphs within the graph: {what}, for instance to change rope tables with the length; "
            "that is not understood, export the checkpoint instead"
        )


def check_values(graph: SourceGraph, config: ForeignConfig) -> str:
    """Inputs and outputs are those the config names; returns the cache's type."""
    names = config.names
    past = [name for layer in names.past for name in layer]
    strange = sorted(graph.inputs.keys() - {names.input_ids, names.attention_mask, names.position_ids, *past})
    if strange:
        raise UnsupportedModelError(
            f"{graph.path} has an input {strange[0]!r}; only token ids, a mask, positions and a cache of keys and "
            "values for each layer are understood"
        )
    present = [name for layer in names.present for name in layer]
    missing = [name for name in (names.input_ids, *past) if name not in graph.inputs]
    missing += [name for name in (names.logits, *present) if name not in graph.outputs]
    if missing:
        raise CheckpointError(
            f"{graph.path} has no {missing[0]!r}, which {config.file} names; the files do not belong together"
        )
    if graph.inputs[names.input_ids].dtype != "int64":
        raise UnsupportedModelError(
            f"{graph.path}: {names.input_ids} is {graph.inputs[names.input_ids].dtype}; only int64 is understood"
        )
    width = graph.outputs[names.logits].shape[-1:]
    if width and isinstance(width[0], int) and width[0] not in (0, config.vocab_size):
        raise CheckpointError(
            f"{config.file} says vocab_size {config.vocab_size}, {graph.path} gives {width[0]} logits; "
            "the files do not belong together"
        )
    types = sorted({graph.inputs[name].dtype for name in past})
    if types not in (["float32"], ["float16"]):
        raise UnsupportedModelError(
            f"{graph.path} keeps its cache as {' and '.join(types)}; only float32 or float16 throughout is understood"
        )
    for name in past:
        _check_cache(graph, name, config)
    return types[0]


def _check_cache(graph: SourceGraph, name: str, config: ForeignConfig) -> None:
    """[B, kv heads, rows, head size], where the file gives numbers."""
    shape = graph.inputs[name].shape
    expected = (None, config.kv_heads, None, config.head_dim)
    pairs = zip(shape, expected, strict=False)
    if len(shape) != 4 or any(isinstance(size, int) and size and wanted not in (None, size) for size, wanted in pairs):
        raise CheckpointError(
            f"{graph.path}: {name} has shape {list(shape)}, {config.file} says {config.kv_heads} heads of "
            f"{config.head_dim}; the files do not belong together"
        )


def find_lookup(graph: SourceGraph, names: GraphNames) -> str:
    """The rows of the embedding table, where nothing else reads the ids."""
    users = graph.users(names.input_ids)
    odd = [op for op in users if not is_lookup(graph, op) or op.input(1) != names.input_ids]
    if odd or len(users) != 1:
        what = f"{odd[0].kind} ({odd[0].name})" if odd else f"{len(users)} nodes"
        raise UnsupportedModelError(
            f"{graph.path}: {names.input_ids} goes to {what}; only one lookup in the embedding table is understood"
        )
    return users[0].output(0)


def is_lookup(graph: SourceGraph, op: Op) -> bool:
    """Whether a node takes rows of a table that is the same in every pass."""
    return op.kind in _LOOKUPS and not graph.reads([op.input(0)])


def find_hidden(graph: SourceGraph, names: GraphNames) -> tuple[str, Op]:
    """What the head's matrix is multiplied with, found from the logits backwards, and that product."""
    value = names.logits
    while True:
        op = graph.maker(value)
        moving = [name for name in op.inputs if name and graph.reads([name])] if op else []
        if op is not None and op.kind in _PRODUCTS and moving == [op.input(0)]:
            break
        if op is None or op.kind not in _BEHIND_HEAD or len(moving) != 1 or not _are_flat(graph, op, moving[0]):
            what = f"{op.kind} ({op.name})" if op else "an input"
            raise UnsupportedModelError(
                f"{graph.path}: {names.logits} come from {what}; only a MatMul or MatMulNBits with weights, with "
                f"{', '.join(_BEHIND_HEAD)} behind it, is understood as a head"
            )
        value = moving[0]
    maker = graph.maker(op.input(0))
    while maker is not None and maker.kind == "Reshape":
        maker = graph.maker(maker.input(0))
    if maker is None or not (maker.kind.endswith("Normalization") or maker.kind in _ROWWISE):
        what = f"{maker.kind} ({maker.name})" if maker else "an input"
        raise UnsupportedModelError(
            f"{graph.path}: its head reads {what}, not the final norm of every row; build it without prune_lm_head"
        )
    return op.input(0), op


def _are_flat(graph: SourceGraph, op: Op, moving: str) -> bool:
    """Whether what an operator takes beside `moving` are constants of at most one axis, which fit [N,V] too."""
    others = [graph.compute(name, {}) for name in op.inputs if name and name != moving]
    return all(array is not None and array.ndim <= 1 for array in others)


def check_width(graph: SourceGraph, value: str, dtype: str, config: ForeignConfig) -> None:
    """The value has the cache's type and the model's width, where the file states its own."""
    known = graph.known(value)
    if known is None:
        return
    last = known.shape[-1] if known.shape else 0
    if known.dtype != dtype or (isinstance(last, int) and last not in (0, config.hidden_size)):
        raise UnsupportedModelError(
            f"{graph.path}: {value} is {known.dtype} {list(known.shape)}; expected {dtype}, as the cache, "
            f"and {config.hidden_size} columns, as {config.file} says"
        )


def cut_ends(graph: SourceGraph, names: GraphNames, lookup: str, hidden: str) -> tuple[Cut, Cut]:
    """Embed and head."""
    head_type = graph.outputs[names.logits].dtype
    raw = "logits" if head_type == "float32" else "logits.raw"
    after = () if raw == "logits" else (NewOp("Cast", (raw,), "logits", {"to": 1}),)  # 1 is float32
    wanted = NewOp("Gather", ("hidden", "rows"), "rows_wanted", {"axis": 0})
    embed = Cut({names.input_ids: "input_ids"}, {lookup: "inputs_embeds"})
    return embed, Cut({hidden: "rows_wanted"}, {names.logits: raw}, (wanted,), after)


def check_positions(graph: SourceGraph, name: str) -> None:
    """One position a row."""
    spec = graph.inputs[name]
    if spec.dtype != "int64" or len(spec.shape) != 2:
        raise UnsupportedModelError(
            f"{graph.path}: {name} is {spec.dtype} {list(spec.shape)}; only one int64 position a row, [batch, rows], "
            "is understood"
        )


def refuse_other_readers(graph: SourceGraph, cut: Cut) -> None:
    """Inputs of the graph that a piece reads and the cut does not give."""
    left = sorted(graph.reads(cut.results, cut.given))
    if left:
        reader = graph.readers(left[0], cut.results, cut.given)[0]
        raise UnsupportedModelError(
            f"{graph.path}: {reader.kind} ({reader.name}) reads {left[0]} for more than the lengths of attention; "
            "that is not understood"
        )


def row_positions() -> tuple[NewOp, ...]:
    """row_positions [1,S], int64: those of the last S of total_sequence_length; row_start and row_end bound them."""
    return (
        NewOp("Constant", (), "one", {"value_int": 1}),
        NewOp("Shape", ("inputs_embeds",), "rows_shape", {}),
        NewOp("Gather", ("rows_shape", "one"), "row_count", {"axis": 0}),
        NewOp("Cast", ("total_sequence_length",), "row_end", {"to": 7}),  # 7 is int64
        NewOp("Sub", ("row_end", "row_count"), "row_start", {}),
        NewOp("Range", ("row_start", "row_end", "one"), "row_range", {}),
        NewOp("Constant", (), "row_axes", {"value_ints": (0,)}),
        NewOp("Unsqueeze", ("row_range", "row_axes"), "row_positions", {}),
    )
