"""Builds all graphs of a bundle and their weights file. The door to this package's graph half."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oxidize.runtime.contracts import BodyShape, GraphContract, body_contract, embed_contract, head_contract
from oxidize.runtime.manifest import GraphEntry

from .config import ModelConfig
from .graph import GraphBuilder
from .layers import Scope
from .plan import ExportPlan
from .profile_ort import OrtProfile
from .profile_std import StdProfile
from .profiles import Profile
from .roles import body_graph, embed_graph, head_graph
from .store import TensorStore
from .tensors import ModelTensors, Progress
from .weights import WeightSource

__all__ = ["ExportPlan", "Progress", "build_graphs"]

WEIGHTS_NAME = "weights.bin"


def build_graphs(
    config: ModelConfig,
    weights: WeightSource,
    plan: ExportPlan,
    folder: Path,
    progress: Progress | None = None,
) -> tuple[GraphEntry, ...]:
    """Write the graphs and `weights.bin` to an existing folder and return their manifest entries.

    Tensors are read, converted and written one at a time. progress(name, done, total) counts weights read.
    """
    plan.check(config)
    with TensorStore(folder / WEIGHTS_NAME) as store:
        tensors = ModelTensors(weights, store, plan.dtype, progress)
        parts = _parts(config, plan, tensors)
        graphs = [_build(part, config, plan, tensors) for part in parts]
    for part, graph in zip(parts, graphs, strict=True):
        graph.save(folder / part.file)
    return tuple(part.entry(plan.precision) for part in parts)


@dataclass(frozen=True, slots=True)
class _Part:
    """One graph to be written."""

    contract: GraphContract
    profile: Profile
    write: Callable[[Scope], None]
    file: str
    ragged: bool = False

    def entry(self, precision: str) -> GraphEntry:
        return GraphEntry(
            role=self.contract.role,
            profile=self.profile.name,
            ragged=self.ragged,
            file=self.file,
            data=(WEIGHTS_NAME,),
            opset=self.profile.dialect.opset,
            precision=precision,
            minimum_ort="1.32" if self.ragged else "1.31",
            contract=self.contract,
        )


def _build(part: _Part, config: ModelConfig, plan: ExportPlan, tensors: ModelTensors) -> GraphBuilder:
    graph = GraphBuilder(part.contract, part.profile.dialect)
    part.write(Scope(config, plan, graph, tensors, part.profile))
    return graph


def _parts(config: ModelConfig, plan: ExportPlan, tensors: ModelTensors) -> list[_Part]:
    """The graphs of the plan, in the order their weights are to lie in the file."""
    embed = embed_contract(config.hidden_size, plan.dtype)
    head = head_contract(config.hidden_size, config.vocab_size, plan.dtype)
    shape = _body_shape(config, plan)
    parts = []
    for name in plan.profiles:
        profile = OrtProfile() if name == "ort" else StdProfile(tensors.filled)
        body = body_contract(shape, name)
        suffix = "" if name == plan.profiles[0] else f".{name}"
        parts += [
            _Part(embed, profile, embed_graph, f"embed{suffix}.onnx"),
            _Part(body, profile, body_graph, f"body.{name}.onnx"),
            _Part(head, profile, head_graph, f"head{suffix}.onnx"),
        ]
        if name == "ort" and plan.dtype == "float32":
            ragged = body_contract(shape, name, ragged=True)
            parts.append(_Part(ragged, OrtProfile(ragged=True), body_graph, "body.ort.ragged.onnx", ragged=True))
    return parts


def _body_shape(config: ModelConfig, plan: ExportPlan) -> BodyShape:
    return BodyShape(
        hidden_size=config.hidden_size,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=plan.dtype,
        taps=plan.taps,
        sliding=any(config.is_sliding(layer) for layer in range(config.layers)),
    )
