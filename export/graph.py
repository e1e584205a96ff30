"""Builds, checks and saves ONNX graphs: nodes, external initializers, contracts. The door to onnx for our own graphs.

Knows nothing of models, profiles or numbers of layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from oxidize.runtime.contracts import GraphContract, TensorSpec
from oxidize.runtime.errors import OxidizeError

from .store import StoredTensor

CONTRIB = "com.microsoft"
Attribute = int | float | str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The ONNX version a graph is written in; `contrib` allows ONNX Runtime's own operators."""

    opset: int
    ir_version: int
    contrib: bool


class GraphBuilder:
    """One graph under construction. Values are names; its inputs and outputs are those of the contract."""

    def __init__(self, contract: GraphContract, dialect: Dialect) -> None:
        self.contract = contract
        self.dialect = dialect
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._outputs: dict[str, str] = {}  # contract name -> value
        self._inputs = {spec.name for spec in contract.inputs}

    def input(self, name: str) -> str:
        """An input of the contract, as a value."""
        if name not in self._inputs:
            raise ValueError(f"the {self.contract.role} contract has no input {name!r}")
        return name

    def op(
        self,
        kind: str,
        inputs: Sequence[str | None],
        name: str,
        attributes: Mapping[str, Attribute] | None = None,
        domain: str = "",
    ) -> str:
        """Append a node with one output, which carries the node's name."""
        return self.ops(kind, inputs, name, ("",), attributes, domain)[0]

    def ops(
        self,
        kind: str,
        inputs: Sequence[str | None],
        name: str,
        outputs: Sequence[str | None],
        attributes: Mapping[str, Attribute] | None = None,
        domain: str = "",
    ) -> tuple[str, ...]:
        """Append a node with several outputs "name.suffix"; a None output (or input) is left out."""
        if domain and not self.dialect.contrib:
            raise ValueError(f"{domain}::{kind} is not allowed in this graph, which is to be plain ONNX")
        values = ["" if suffix is None else f"{name}.{suffix}" if suffix else name for suffix in outputs]
        node = helper.make_node(kind, [value or "" for value in inputs], values, name=name, domain=domain)
        for key, value in (attributes or {}).items():
            node.attribute.append(helper.make_attribute(key, value))
        self._nodes.append(node)
        return tuple(values)

    def constant(self, name: str, array: np.ndarray) -> str:
        """A small initializer kept inside the graph file."""
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(array, name)
        return name

    def stored(self, name: str, tensor: StoredTensor) -> str:
        """An initializer that lies in the external data file."""
        if name not in self._initializers:
            self._initializers[name] = _external(name, tensor)
        return name

    def output(self, name: str, value: str) -> None:
        """Give a value to an output of the contract."""
        if value in self._outputs.values() or value in self._inputs:
            value = self.op("Identity", [value], f"{name}.copy")
        self._outputs[name] = value

    @staticmethod
    def element_type(dtype: str) -> int:
        """ONNX's number of an element type, for attributes such as Cast's "to"."""
        return _element_type(dtype)

    def build(self) -> onnx.ModelProto:
        """The finished model; its outputs are exactly the contract's."""
        missing = [spec.name for spec in self.contract.outputs if spec.name not in self._outputs]
        if missing or len(self._outputs) != len(self.contract.outputs):
            raise ValueError(f"{self.contract.role}: outputs without a value or contract: {missing or self._outputs}")
        self._rename({value: name for name, value in self._outputs.items()})
        graph = helper.make_graph(
            self._nodes,
            self.contract.role,
            [_value_info(spec) for spec in self.contract.inputs],
            [_value_info(spec) for spec in self.contract.outputs],
            list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", self.dialect.opset)]
        if self.dialect.contrib:
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=self.dialect.ir_version, producer_name="oxidize"
        )

    def save(self, path: Path) -> None:
        """Write the graph beside its external data, then check the file with onnx and against its contract."""
        onnx.save_model(self.build(), path)
        try:
            onnx.checker.check_model(str(path), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            reason = str(error).strip().splitlines()[0]
            raise OxidizeError(f"{path.name} is not a valid ONNX graph ({reason}); this is a bug in oxidize") from error
        saved = saved_contract(path)
        if saved != self.contract:
            raise OxidizeError(f"{path.name} does not keep its {self.contract.role} contract; this is a bug in oxidize")

    def _rename(self, names: Mapping[str, str]) -> None:
        for node in self._nodes:
            node.input[:] = [names.get(value, value) for value in node.input]
            node.output[:] = [names.get(value, value) for value in node.output]


def saved_contract(path: Path) -> GraphContract:
    """The contract a saved graph keeps, read from the file alone."""
    graph = onnx.load_model(path, load_external_data=False).graph
    return GraphContract(graph.name, _specs(graph.input), _specs(graph.output))


def graph_summary(path: Path) -> dict[str, object]:
    """Versions and operator counts of a saved graph, for snapshots and `inspect`."""
    model = onnx.load_model(path, load_external_data=False)
    counts: dict[str, int] = {}
    for node in model.graph.node:
        kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        counts[kind] = counts.get(kind, 0) + 1
    opsets = {item.domain or "ai.onnx": item.version for item in model.opset_import}
    return {"ir_version": model.ir_version, "opsets": opsets, "operators": dict(sorted(counts.items()))}


def given_values(path: Path) -> set[str]:
    """Every value that a node of a saved graph gives."""
    graph = onnx.load_model(path, load_external_data=False).graph
    return {value for node in graph.node for value in node.output}


def join_as_output(source: Path, path: Path, contract: GraphContract, name: str, values: Sequence[str]) -> None:
    """Save the graph in `source` as `path`, with `values` side by side as output `name`, in place of one it may have.

    contract: of the new graph. External data are neither read nor moved.
    """
    model = onnx.load_model(source, load_external_data=False)
    kept = [node for node in model.graph.node if name not in node.output]
    joined = helper.make_node("Concat", list(values), [name], name=name, domain="", axis=-1)
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend([*kept, joined])
    model.graph.output.extend(_value_info(spec) for spec in contract.outputs)
    onnx.save_model(model, path)
    if saved_contract(path) != contract:
        raise OxidizeError(f"{path.name} does not keep its {contract.role} contract; this is a bug in oxidize")


def _external(name: str, tensor: StoredTensor) -> onnx.TensorProto:
    proto = onnx.TensorProto(
        name=name,
        data_type=_element_type(tensor.dtype),
        dims=tensor.shape,
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in (("location", tensor.file), ("offset", tensor.offset), ("length", tensor.length)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, _element_type(spec.dtype), spec.shape)


def _element_type(dtype: str) -> int:
    names = {"float32": "FLOAT", "float16": "FLOAT16"}
    return onnx.TensorProto.DataType.Value(names.get(dtype, dtype.upper()))


def _specs(values: Sequence[onnx.ValueInfoProto]) -> tuple[TensorSpec, ...]:
    names = {"FLOAT": "float32"}
    specs = []
    for value in values:
        kind = value.type.tensor_type
        dtype = onnx.TensorProto.DataType.Name(kind.elem_type)
        shape = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
        specs.append(TensorSpec(value.name, names.get(dtype, dtype.lower()), shape))
    return tuple(specs)
