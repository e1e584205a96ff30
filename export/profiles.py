"""What a graph profile decides: how each layer of the vocabulary becomes ONNX nodes."""

from dataclasses import dataclass
from typing import Protocol

from .graph import Dialect, GraphBuilder
from .store import StoredTensor
from .tensors import StoredBlocks


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention: which cache it reads and writes, heads, scale, window and rope tables [P,D/2]."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # tokens it sees, the current one included; None sees all
    cos: StoredTensor
    sin: StoredTensor

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of the query, key and value projections."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def table_name(self, part: str) -> str:
        """The initializer name of the cos or sin table: equal for layers that share the table."""
        return f"rope.{self.cos.offset}.{part}"


class Profile(Protocol):
    """The operators of one profile. Values are [B,S,width]; `name` prefixes the nodes."""

    name: str
    dialect: Dialect

    def norm(self, graph: GraphBuilder, x: str, weight: str, eps: float, name: str) -> str:
        """RMS norm over the last axis."""
        ...

    def add_norm(
        self, graph: GraphBuilder, terms: tuple[str, str], weight: str, eps: float, name: str
    ) -> tuple[str, str]:
        """The RMS norm of a sum of two terms, and the sum."""
        ...

    def activation(self, graph: GraphBuilder, x: str, kind: str, name: str) -> str:
        """Activation of the gate; kind: "silu" or "gelu_tanh"."""
        ...

    def attend(self, graph: GraphBuilder, qkv: tuple[str, ...], spec: Attention, name: str) -> str:
        """Rotary embedding, cache update, attention. qkv: one packed value or query, key and value."""
        ...

    def matmul_blocks(self, graph: GraphBuilder, x: str, weight: StoredBlocks, bias: str | None, name: str) -> str:
        """x [...,K] times a quantised matrix [N,K], transposed, plus bias [N]."""
        ...

    def gather_blocks(self, graph: GraphBuilder, ids: str, table: StoredBlocks, name: str) -> str:
        """Rows of a quantised table, dequantised."""
        ...
