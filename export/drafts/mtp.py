"""Takes the MTP head out of a target's checkpoint: one more decoder layer that proposes the token after the next.

Three layouts, told apart by names: "mtp.*" (Qwen3-Next, Qwen3.5), one decoder layer behind the last with `eh_proj`
(DeepSeek-V3 section 2.2, GLM-4.5), and the same in GGUF as "blk.N.nextn.*". All compute

    x_i = fc([norm_e(embedding of token i+1), norm_h(h_i)]),   h'_i = norm(layer(x)_i),   head(h'_i) -> token i+2

where h_i is the target's hidden state after its final norm. A head applied again reads its own h'.

Canonical names: model.{fc,enorm,hnorm,norm}.weight, model.layers.0.*, and model.embed_tokens.weight and lm_head.weight
where they differ from the target's.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from ..config import ModelConfig
from ..config_hf import CONFIG_NAME, FULL, read_json
from ..source import Checkpoint
from .base import DraftCheckpoint, DraftConfig, layer_shapes
from .strict import check_tensors
from .views import TensorView

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
GATED = "gated"  # DraftConfig.flags: query projections give [query, gate] per head, the gate scales what is attended
CONVENTION = "after the target's last norm"
_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_JOINING = ("eh_proj.weight", "enorm.weight", "hnorm.weight")  # what tells a head from one more layer
_DEDICATED = "mtp_use_dedicated_embeddings"
_LAYER = "model.layers.0."
_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_UNSUPPORTED = {  # by parts of tensor names
    "expert": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
    "_exps": "a mixture of experts",
    "ffn_gate_inp": "a mixture of experts",
    "kv_a_proj": "latent attention (MLA)",
    "kv_b_proj": "latent attention (MLA)",
    "q_a_proj": "latent attention (MLA)",
    "attn_kv_a": "latent attention (MLA)",
}


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of a stored tensor before it is read."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one format stores a head.

    prefixes: what the tensors of all heads begin with. layer: what those of the decoder layer begin with. parts:
    canonical name -> stored name. heads: how many there are. norm_offset: what is added to the weights of all its
    norms. may_gate: its queries may come with a gate.
    """

    prefixes: tuple[str, ...]
    layer: str
    parts: Mapping[str, str]
    heads: int = 1
    norm_offset: float = 0.0
    may_gate: bool = False

    def owns(self, name: str) -> bool:
        return name.startswith(self.prefixes)

    def stored(self, name: str) -> str:
        """The stored name of a canonical one."""
        if name.startswith(_LAYER):
            return self.layer + name.removeprefix(_LAYER)
        return self.parts[name]


def split_mtp(checkpoint: Checkpoint, wanted: bool = True) -> tuple[Checkpoint, DraftCheckpoint | None]:
    """The target without its head, and the head; None where there is none or it is not `wanted`.

    Raises UnsupportedModelError for heads of a kind that is not implemented, CheckpointError for missing, unknown and
    wrongly shaped tensors and for keys that contradict them. A head that is not wanted is not looked at.
    """
    names = checkpoint.weights.names()
    layout = _find_layout(checkpoint, names)
    if layout is None:
        return checkpoint, None
    rest = {name: name for name in names if not layout.owns(name)}
    target = replace(checkpoint, weights=TensorView(checkpoint.weights, rest, checkpoint.name))
    return target, _read_head(checkpoint, layout) if wanted else None


def _find_layout(checkpoint: Checkpoint, names: list[str]) -> _Layout | None:
    if any(name.startswith("mtp.") for name in names):
        return _qwen_layout()
    root = "blk.{}.nextn.{}" if checkpoint.kind == "gguf" else "model.layers.{}.{}"
    first, count = checkpoint.config.layers, 0
    while any(root.format(first + count, part) in names for part in _JOINING):
        count += 1
    if not count:
        return None
    return _gguf_layout(checkpoint, count) if checkpoint.kind == "gguf" else _nextn_layout(first, count)


def _qwen_layout() -> _Layout:
    """Its norms all multiply by (1 + weight), whatever the target's do."""
    parts = {
        "model.fc.weight": "mtp.fc.weight",
        "model.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "model.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        NORM: "mtp.norm.weight",
        EMBEDDING: "mtp.embed_tokens.weight",
        HEAD: "mtp.lm_head.weight",
    }
    return _Layout(("mtp.",), "mtp.layers.0.", parts, norm_offset=1.0, may_gate=True)


def _nextn_layout(first: int, heads: int) -> _Layout:
    prefixes = tuple(f"model.layers.{first + head}." for head in range(heads))
    layer = prefixes[0]
    parts = {
        "model.fc.weight": f"{layer}eh_proj.weight",
        "model.enorm.weight": f"{layer}enorm.weight",
        "model.hnorm.weight": f"{layer}hnorm.weight",
        NORM: f"{layer}shared_head.norm.weight",
        EMBEDDING: f"{layer}embed_tokens.weight",
        HEAD: f"{layer}shared_head.head.weight",
    }
    return _Layout(prefixes, layer, parts, heads)


def _gguf_layout(checkpoint: Checkpoint, heads: int) -> _Layout:
    """What the block leaves out is the target's; norms are stored as the target's are, any offset already added.

    Llama's query rows are reordered head by head, which a gate among them would not survive.
    """
    first = checkpoint.config.layers
    block = f"blk.{first}.nextn."
    norm = f"{block}shared_head_norm.weight"
    parts = {
        "model.fc.weight": f"{block}eh_proj.weight",
        "model.enorm.weight": f"{block}enorm.weight",
        "model.hnorm.weight": f"{block}hnorm.weight",
        NORM: norm if norm in checkpoint.weights.names() else NORM,
        EMBEDDING: f"{block}embed_tokens.weight",
        HEAD: f"{block}shared_head_head.weight",
    }
    prefixes = tuple(f"{root}.{first + head}." for head in range(heads) for root in ("model.layers", "blk"))
    return _Layout(prefixes, prefixes[0], parts, heads, may_gate=checkpoint.config.architecture != "llama")


def _read_head(checkpoint: Checkpoint, layout: _Layout) -> DraftCheckpoint:
    own = [name for name in checkpoint.weights.names() if layout.owns(name)]
    _check_kind(checkpoint, own)
    _check_keys(checkpoint, layout, own)
    gated = _is_gated(checkpoint, layout, own)
    model = _head_model(checkpoint.config, layout, gated)
    shapes = _shapes(model, gated)
    tables = {name: (model.vocab_size, model.hidden_size) for name in (EMBEDDING, HEAD) if layout.stored(name) in own}
    _check_tensors(checkpoint, layout, own, shapes | tables)
    kept = [name for name in tables if not _is_the_targets(checkpoint, name, layout.stored(name), tables[name])]
    config = DraftConfig(
        kind="mtp",
        model=model,
        taps=(),
        tap_convention=CONVENTION,
        target_hidden_size=model.hidden_size,
        draft_vocab_size=model.vocab_size if HEAD in kept else None,
        own_embedding=EMBEDDING in kept,
        flags={GATED: gated},
    )
    stored = {name: layout.stored(name) for name in (*shapes, *kept)}
    weights = TensorView(checkpoint.weights, stored, f"the MTP head of {checkpoint.name}")
    return DraftCheckpoint("mtp", checkpoint.revision, config, weights, files=())  # the files are the target's


def _check_kind(checkpoint: Checkpoint, own: Iterable[str]) -> None:
    """Refuse heads whose maths this version does not do."""
    config, where = checkpoint.config, f"{_weights_file(checkpoint)}: the MTP head"
    for name in own:
        for mark, kind in _UNSUPPORTED.items():
            if mark in name:
                raise _unsupported(f"{where} has {kind} ({name}), which is not implemented")
    if config.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise _unsupported(f"{where} is one of a {config.architecture} model; this version reads those of {known}")
    if any(config.is_sliding(layer) for layer in range(config.layers)):
        raise _unsupported(f"{where} belongs to a model with sliding layers and does not say whether it slides too")


def _check_keys(checkpoint: Checkpoint, layout: _Layout, own: list[str]) -> None:
    """Refuse keys that do not say what the tensors say: one head, with tables of its own or without."""
    raw = _keys(checkpoint)
    for key in _COUNTS:
        count = raw.get(key)
        if count is not None and (type(count) is not int or count < 1):
            raise CheckpointError(
                f"{_config_file(checkpoint)}: {key} is {count!r} but there is an MTP head ({own[0]}); correct the key"
            )
        if max(count or 1, layout.heads) > 1:
            raise _unsupported(
                f"{_config_file(checkpoint)}: {max(count or 1, layout.heads)} MTP heads; this version reads one, not "
                "several"
            )
    dedicated = raw.get(_DEDICATED)
    if dedicated is not None and dedicated != (layout.stored(EMBEDDING) in own):
        has = "has none" if dedicated else f"has {layout.stored(EMBEDDING)}"
        raise CheckpointError(
            f"{_config_file(checkpoint)}: {_DEDICATED} is {dedicated!r} but the MTP head {has}; correct the key"
        )


def _config_file(checkpoint: Checkpoint) -> Path:
    """Where the checkpoint's keys stand."""
    return checkpoint.folder / CONFIG_NAME if checkpoint.folder is not None else checkpoint.files[0]


def _weights_file(checkpoint: Checkpoint) -> Path | str:
    """The file that holds the weights; the folder where there are several."""
    found = [path for path in checkpoint.files if path.suffix in (".safetensors", ".gguf")]
    return found[0] if len(found) == 1 else checkpoint.folder or checkpoint.name


def _keys(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The checkpoint's keys, under Hugging Face's names."""
    if checkpoint.folder is not None:
        return read_json(_config_file(checkpoint))
    metadata = checkpoint.gguf_metadata or {}
    return {"num_nextn_predict_layers": metadata.get(f"{metadata.get('general.architecture')}.nextn_predict_layers")}


def _is_gated(checkpoint: Checkpoint, layout: _Layout, own: list[str]) -> bool:
    config, name = checkpoint.config, layout.stored(f"{_LAYER}self_attn.q_proj.weight")
    rows = checkpoint.weights.shape(name)[0] if name in own else 0
    return layout.may_gate and rows == 2 * config.heads * config.head_dim


def _head_model(target: ModelConfig, layout: _Layout, gated: bool) -> ModelConfig:
    """The head's one layer, which is the target's; gated attention comes with norms on queries and keys."""
    return replace(
        target,
        layers=1,
        layer_types=(FULL,),
        sliding_window=None,
        norm_offset=layout.norm_offset,
        qk_norm=target.qk_norm or gated,
        tie_word_embeddings=False,
    )


def _shapes(model: ModelConfig, gated: bool) -> dict[str, tuple[int, ...]]:
    """The tensors a head has to have, by canonical name."""
    hidden = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"model.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
    return shapes | {f"{_LAYER}{name}": shape for name, shape in layer_shapes(model, gated=gated).items()}


def _check_tensors(
    checkpoint: Checkpoint, layout: _Layout, own: list[str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """All tensors of the head, no others, of these shapes; some may be the target's."""
    expected = {layout.stored(name): shape for name, shape in shapes.items()}
    known = {name for name in checkpoint.weights.names() if name in expected}.union(own)
    found = {name: _Found(checkpoint.weights.shape(name)) for name in sorted(known)}
    check_tensors(_weights_file(checkpoint), found, expected, "an MTP head", ", or pass --no-mtp to export without it")


def _is_the_targets(checkpoint: Checkpoint, name: str, stored: str, shape: tuple[int, int]) -> bool:
    """Whether the head's table repeats the target's, value for value. One of the two is in memory at a time."""
    tied = checkpoint.config.tie_word_embeddings
    theirs = EMBEDDING if tied else name
    weights = checkpoint.weights
    if weights.shape(theirs) != shape:
        return False
    mine, other = (hashlib.sha256(weights.read(item, shape).data).digest() for item in (stored, theirs))
    return mine == other


def _unsupported(problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{problem}; --no-mtp exports the target without it")
