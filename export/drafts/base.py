"""What every family of drafts has in common: its config in our own words, its opened checkpoint, how it is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from oxidize.runtime.contracts import DraftShape, GraphContract
from oxidize.runtime.manifest import GraphEntry, NeuralDraft

from ..config import ModelConfig
from ..graph import GraphBuilder
from ..layers import Scope
from ..plan import ExportPlan
from ..profile_std import StdProfile
from ..store import TensorStore
from ..tensors import ModelTensors, Progress
from ..weights import WeightSource
from .profile import DraftProfile

MARKOV, CONFIDENCE = "markov_head", "confidence_head.proj"


@dataclass(frozen=True, slots=True)
class PathSelection:
    """What DFlash 2 has beside DFlash: convolutions over a block, and a choice of paths through the likeliest tokens.

    conv_taps: rows of the block that a convolution sees. conv_group: neighbouring channels that share its dynamic part.
    rank, top_k: of the score of neighbouring tokens, and how many tokens per row it is computed for. multiplier,
    softcap: logits are multiplied, then bent by softcap * tanh(logits / softcap) where there is one.
    """

    conv_taps: int
    conv_group: int
    rank: int
    top_k: int
    multiplier: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """What DSpark has beside DFlash: the token before a row corrects its logits, and a guess whether the row is kept.

    rank: width of the codes of tokens, from which the correction is a linear map. gated: each entry of a code is
    weighed, by the row and the code. confident: a linear map of the row says how likely its token is kept;
    confidence_reads_code: of the row and the code of the token before. confidence_bias: that map has a bias.
    """

    rank: int
    gated: bool = False
    confident: bool = False
    confidence_reads_code: bool = True
    confidence_bias: bool = True


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """How Medusa heads are made: their number, residual blocks in each, and whether these have a bias.

    output: "own" where each head has an output matrix, "one" where they share one of theirs, "target" where they share
    the target's head.
    """

    count: int
    layers: int
    biased: bool
    output: str


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft in our own words.

    model: its own stack of layers (vocab_size: the target's). taps: target layers it reads, 0-based "output of layer
    i"; () where it reads the final hidden states. tap_convention: how the checkpoint counted, in words.
    target_hidden_size: width of one tap. draft_vocab_size: rows of its own head; None where it uses the target's.
    own_embedding: it has a table of its own. layer_causal: for each layer, whether rows of a block see earlier ones
    only. flags: what else the maths of the family depends on, by the names of the family's reader. paths: DFlash 2's.
    markov: DSpark's. heads: Medusa's.
    """

    kind: str
    model: ModelConfig
    taps: tuple[int, ...]
    tap_convention: str
    target_hidden_size: int
    block_size: int = 1
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    layer_causal: tuple[bool, ...] = ()
    flags: dict[str, bool] = field(default_factory=dict)
    paths: PathSelection | None = None
    heads: MedusaHeads | None = None
    markov: MarkovHead | None = None

    @property
    def feature_size(self) -> int:
        """Width of the target's rows that the draft reads."""
        return max(1, len(self.taps)) * self.target_hidden_size

    def shape(self, dtype: str) -> DraftShape:
        """What its contracts depend on."""
        model = self.model
        return DraftShape(
            kind=self.kind,
            hidden_size=model.hidden_size,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            feature_size=self.feature_size,
            vocab_size=model.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            sliding=any(model.is_sliding(layer) for layer in range(model.layers)),
            heads=self.block_size - 1,
            choices=self.paths.top_k if self.paths is not None else None,
            confident=self.markov is not None and self.markov.confident,
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """An opened draft. Weights have the canonical names of its family; d2t int64 [Vd] are target ids, if it has any.

    mismatch: for what other target it was made, if it was forced upon this one.
    """

    name: str
    revision: str | None
    config: DraftConfig
    weights: WeightSource
    files: tuple[Path, ...]
    d2t: np.ndarray | None = None
    mismatch: str | None = None


@dataclass(frozen=True, slots=True)
class DraftGraph:
    """One graph to be written: its contract and the function that fills it."""

    contract: GraphContract
    write: Callable[[Scope], None]
    file: str


def layer_shapes(model: ModelConfig, width: int | None = None, gated: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of one decoder layer and their shapes, by name inside the layer.

    width: of what queries, keys and values are made of, where that is not the hidden size. gated: queries carry a gate.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = width or hidden
    matrices = {
        "self_attn.q_proj": (2 * wide if gated else wide, width, model.attention_bias),
        "self_attn.k_proj": (narrow, width, model.attention_bias),
        "self_attn.v_proj": (narrow, width, model.attention_bias),
        "self_attn.o_proj": (hidden, wide, model.output_bias),
        "mlp.gate_proj": (inner, hidden, model.mlp_bias),
        "mlp.up_proj": (inner, hidden, model.mlp_bias),
        "mlp.down_proj": (hidden, inner, model.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if model.qk_norm:
        norms |= {"self_attn.q_norm": model.head_dim, "self_attn.k_norm": model.head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
    shapes |= {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in matrices.items()}
    return shapes | {f"{name}.bias": (rows,) for name, (rows, _, biased) in matrices.items() if biased}


def markov_shapes(markov: MarkovHead, model: ModelConfig, rows: int) -> dict[str, tuple[int, ...]]:
    """Tensors of DSpark's heads. Codes are of the target's tokens, corrections of the `rows` that the draft scores."""
    rank, hidden = markov.rank, model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{MARKOV}.markov_w1.weight": (model.vocab_size, rank),
        f"{MARKOV}.markov_w2.weight": (rows, rank),
    }
    if markov.gated:
        shapes |= {f"{MARKOV}.gate_proj.weight": (rank, hidden + rank), f"{MARKOV}.gate_proj.bias": (rank,)}
    if markov.confident:
        shapes[f"{CONFIDENCE}.weight"] = (1, hidden + rank if markov.confidence_reads_code else hidden)
        if markov.confidence_bias:
            shapes[f"{CONFIDENCE}.bias"] = (1,)
    return shapes


def write_draft_graphs(
    draft: DraftCheckpoint,
    graphs: Sequence[DraftGraph],
    plan: ExportPlan,
    folder: Path,
    progress: Progress | None = None,
) -> tuple[GraphEntry, ...]:
    """Write the graphs and `weights.bin` of a draft into an existing folder; entries name files inside that folder.

    Blocks that see all of themselves need masks of their own, so attention is plain ONNX in either profile; beside a
    target of profile "ort" the quantised products are ONNX Runtime's.
    """
    with TensorStore(folder / "weights.bin") as store:
        tensors = ModelTensors(draft.weights, store, plan.dtype, progress)
        profile = (DraftProfile if "ort" in plan.profiles else StdProfile)(tensors.filled)
        built = []
        for graph in graphs:
            builder = GraphBuilder(graph.contract, profile.dialect)
            graph.write(Scope(draft.config.model, plan, builder, tensors, profile))
            built.append(builder)
    for graph, builder in zip(graphs, built, strict=True):
        builder.save(folder / graph.file)
    return tuple(
        GraphEntry(
            role=graph.contract.role,
            profile=profile.name,
            ragged=False,
            file=graph.file,
            data=("weights.bin",),
            opset=profile.dialect.opset,
            precision=plan.precision,
            minimum_ort="1.31",
            contract=graph.contract,
        )
        for graph in graphs
    )


def neural_facts(config: DraftConfig, plan: ExportPlan, d2t: str | None) -> NeuralDraft:
    """What the manifest says of the draft."""
    model = config.model
    sliding = [layer for layer in range(model.layers) if model.is_sliding(layer)]
    full = [layer for layer in range(model.layers) if not model.is_sliding(layer)]
    return NeuralDraft(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden_size,
        feature_size=config.feature_size,
        taps=config.taps,
        tap_convention=config.tap_convention,
        max_positions=plan.positions(model),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        sample_from_anchor=config.sample_from_anchor,
        draft_vocab_size=config.draft_vocab_size,
        d2t=d2t,
        sliding_window=model.sliding_window if sliding else None,
        causal=any(config.layer_causal[layer] for layer in full) if config.layer_causal else True,
        sliding_causal=any(config.layer_causal[layer] for layer in sliding) if config.layer_causal else True,
        choices=config.paths.top_k if config.paths is not None else None,
    )
