"""Takes a finished ONNX graph apart: what is in it, what its small parts compute, pieces of it as graphs of their own.

Knows nothing of models.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from oxidize.runtime.contracts import GraphContract, TensorSpec
from oxidize.runtime.errors import CheckpointError, OxidizeError

from .graph import saved_contract
from .onnx_tensors import ForeignTensors, type_name
from .store import TensorStore

_NESTED = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


@dataclass(frozen=True, slots=True)
class Op:
    """One node. `kind` has the operator's domain in front, unless it is ONNX's own; `nested`: it holds graphs."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: Mapping[str, int | float]
    nested: bool

    def input(self, index: int) -> str:
        """The value it takes there; "" where it takes none."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def output(self, index: int) -> str:
        """The value it gives there; "" where it gives none."""
        return self.outputs[index] if index < len(self.outputs) else ""


@dataclass(frozen=True, slots=True)
class NewOp:
    """A node of ONNX's own to add to a piece, by the piece's names."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    numbers: Mapping[str, int | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a piece begins and ends: values of the whole graph and their names in the piece; nodes to add around it."""

    given: Mapping[str, str]
    results: Mapping[str, str]
    before: tuple[NewOp, ...] = ()
    after: tuple[NewOp, ...] = ()


class SourceGraph:
    """An ONNX file, its weights not read. A file that is no ONNX model is a CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model = _load(path)
        graph = self._model.graph
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._weights = ForeignTensors(path, self._tensors)
        inputs = [_spec(value) for value in graph.input]
        self.inputs = {spec.name: spec for spec in inputs if spec.name not in self._tensors}
        self.outputs = {spec.name: spec for spec in map(_spec, graph.output)}
        self._known = {spec.name: spec for spec in map(_spec, graph.value_info)} | self.inputs | self.outputs
        self.ops = tuple(_op(node) for node in graph.node)
        self._makers = {output: index for index, op in enumerate(self.ops) for output in op.outputs if output}
        self.functions = tuple(function.name for function in self._model.functions)
        self.opset = max((item.version for item in self._model.opset_import if not item.domain), default=0)

    def maker(self, value: str) -> Op | None:
        """The node that gives a value; None for inputs and tensors."""
        index = self._makers.get(value)
        return None if index is None else self.ops[index]

    def users(self, value: str) -> list[Op]:
        """The nodes that take a value."""
        return [op for op in self.ops if value in op.inputs]

    def readers(self, value: str, results: Collection[str], given: Collection[str]) -> list[Op]:
        """The nodes that take a value on the way from `given` to `results`."""
        ops = (self.ops[index] for index in self._above(results, given)[0])
        return [op for op in ops if value in op.inputs]

    def known(self, value: str) -> TensorSpec | None:
        """Type and shape of a value, where the file states them."""
        return self._known.get(value)

    def stored(self, value: str) -> TensorSpec | None:
        """Type and shape of a stored tensor; None for anything else."""
        tensor = self._tensors.get(value)
        return None if tensor is None else TensorSpec(value, type_name(tensor.data_type), tuple(tensor.dims))

    def reads(self, values: Collection[str], given: Collection[str] = ()) -> set[str]:
        """The inputs of the graph that `values` depend on, if the values `given` are there already."""
        return self._above(values, given)[1] & self.inputs.keys()

    def compute(self, value: str, feeds: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """A small value, worked out by onnx's reference implementation; None where that cannot be done."""
        from onnx.reference import ReferenceEvaluator

        indices, leaves = self._above([value], feeds)
        if not leaves <= self._tensors.keys():
            return None
        graph = helper.make_graph(
            [self._model.graph.node[index] for index in indices],
            "part",
            [_value_info(TensorSpec(name, array.dtype.name, array.shape)) for name, array in feeds.items()],
            [onnx.ValueInfoProto(name=value)],
            [self._weights.inline(name) for name in sorted(leaves)],
        )
        model = helper.make_model(graph, opset_imports=self._model.opset_import)
        try:
            (result,) = ReferenceEvaluator(model).run(None, dict(feeds))
            return np.asarray(result)
        except Exception:  # the reference implementation raises whatever its numpy code runs into
            return None

    def write_piece(self, contract: GraphContract, cut: Cut, store: TensorStore, path: Path) -> None:
        """Write the nodes between a cut's ends as a graph with this contract; its tensors go to `store`, each once."""
        views = self._views(self._above(cut.results, cut.given)[0])
        indices, leaves = self._above(cut.results, {*cut.given, *views})
        strange = sorted(leaves - self._tensors.keys())
        if strange:
            raise ValueError(f"the {contract.role} piece reads {strange[0]!r}, which the cut does not give")
        nodes = [self._model.graph.node[index] for index in indices]
        rename = _Names(contract, cut)
        tensors = [self._weights.moved(name, rename(name), store) for name in sorted(leaves)]
        tensors += [self._weights.moved(source, rename(name), store, dims) for name, (source, dims) in views.items()]
        graph = helper.make_graph(
            [*map(_new, cut.before), *(_renamed(node, rename) for node in nodes), *map(_new, cut.after)],
            contract.role,
            [_value_info(spec) for spec in contract.inputs],
            [_value_info(spec) for spec in contract.outputs],
            tensors,
        )
        imports, version = self._model.opset_import, self._model.ir_version
        onnx.save_model(
            helper.make_model(graph, opset_imports=imports, ir_version=version, producer_name="oxidize"), path
        )
        if saved_contract(path) != contract:
            raise OxidizeError(f"{path.name} does not keep its {contract.role} contract; this is a bug in oxidize")

    def data_files(self) -> tuple[Path, ...]:
        """The files its tensors lie in, apart from itself."""
        return self._weights.data_files()

    def _above(self, results: Collection[str], given: Collection[str]) -> tuple[list[int], set[str]]:
        """The nodes, in order, that make `results` out of `given`, and the inputs and tensors they read."""
        wanted, found, leaves = list(results), set(), set()
        while wanted:
            value = wanted.pop()
            if not value or value in given:
                continue
            index = self._makers.get(value)
            if index is None:
                leaves.add(value)
            elif index not in found:
                found.add(index)
                wanted.extend(self.ops[index].inputs)
        return sorted(found), leaves

    def _views(self, indices: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Stored tensors seen under another shape: value -> tensor, shape.

        ONNX Runtime would fold such a Reshape into a second copy, of a tied table for instance.
        """
        views = {}
        for op in (self.ops[index] for index in indices):
            if op.kind != "Reshape" or op.input(0) not in self._tensors:
                continue
            shape = self.compute(op.input(1), {})
            if shape is not None and math.prod(shape) == math.prod(self._tensors[op.input(0)].dims):
                views[op.output(0)] = (op.input(0), tuple(map(int, shape)))
        return views


class _Names:
    """Names in a piece: those of the cut, all others as they were unless that would be a name of the contract."""

    def __init__(self, contract: GraphContract, cut: Cut) -> None:
        self._cut = {**cut.given, **cut.results}
        self._taken = {spec.name for spec in (*contract.inputs, *contract.outputs)}
        self._taken |= {op.output for op in (*cut.before, *cut.after)} | set(self._cut.values())

    def __call__(self, name: str) -> str:
        found = self._cut.get(name)
        return found if found is not None else f"{name}.inner" if name in self._taken else name


def _load(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load_model(path, load_external_data=False)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; is the folder complete?") from None
    except Exception as error:  # protobuf's own error type is not to be imported for this
        reason = " ".join(str(error).split())[:100]
        raise CheckpointError(f"{path} is not an ONNX model ({reason}); download it again") from None


def _op(node: onnx.NodeProto) -> Op:
    numbers = {
        item.name: item.i if item.type == onnx.AttributeProto.INT else item.f
        for item in node.attribute
        if item.type in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT)
    }
    domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}::"
    nested = any(item.type in _NESTED for item in node.attribute)
    return Op(f"{domain}{node.op_type}", node.name, tuple(node.input), tuple(node.output), numbers, nested)


def _renamed(node: onnx.NodeProto, rename: _Names) -> onnx.NodeProto:
    result = onnx.NodeProto()
    result.CopyFrom(node)
    result.input[:] = [rename(name) for name in node.input]
    result.output[:] = [rename(name) for name in node.output]
    return result


def _new(op: NewOp) -> onnx.NodeProto:
    node = helper.make_node(op.kind, list(op.inputs), [op.output], name=f"oxidize/{op.output}")  # no node may share it
    node.attribute.extend(helper.make_attribute(name, value) for name, value in op.numbers.items())
    return node


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    shape = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
    return TensorSpec(value.name, type_name(kind.elem_type), shape)


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    names = {"float32": "FLOAT"}
    kind = onnx.TensorProto.DataType.Value(names.get(spec.dtype, spec.dtype.upper()))
    return helper.make_tensor_value_info(spec.name, kind, spec.shape)
