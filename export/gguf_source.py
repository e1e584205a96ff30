"""Hands out GGUF tensors under Hugging Face's names, with the converter's changes undone.

llama.cpp's convert_hf_to_gguf stores Llama's q and k rows in pairs (its rotary embedding turns neighbours,
ours turns the halves of a head), and Gemma's norm weights with one added. The rest is renaming and
dequantising.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from oxidize.runtime.errors import CheckpointError

from .gguf_file import INTEGERS, GgufFile, TensorPlace
from .weights import BlockQuantized, LazyTensor

ROPE_FACTORS = "rope_freqs.weight"
_CHUNK = 1 << 16  # elements dequantised at a time: what stays in cache is twice as fast
_BLOCK = 32  # of Q4_0 and Q8_0
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file. `rows` reorders its outermost dimension, `offset` is added to its values."""

    path: Path
    place: TensorPlace
    rows: tuple[int, ...] | None = None
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        return self.place.shape

    def load(self) -> np.ndarray:
        """The values as float32, dequantised a few rows at a time."""
        if self.place.type in INTEGERS:
            raise CheckpointError(
                f"{self.path}: tensor {self.place.name} holds integers, expected a type of weights, such as F16"
            )
        raw = self._raw()
        width = math.prod(self.shape) // len(raw)
        values = np.empty((len(raw), width), np.float32)
        step = max(1, _CHUNK // width)
        for begin in range(0, len(raw), step):
            values[begin : begin + step] = dequantize(raw[self._source(begin, step)], self.place.type)
        if self.offset:
            values += np.float32(self.offset)
        return values.reshape(self.shape)

    def blocks(self) -> BlockQuantized | None:
        """Q4_0 and Q8_0 as they are, rows reordered; None for other types."""
        bits = {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q8_0: 8}.get(self.place.type)
        if bits is None or len(self.shape) != 2 or self.offset:
            return None
        raw = self._raw()
        rows, width = self.shape
        quants = np.empty((rows, width), np.int8)  # [N,K]
        scales = np.empty((rows, width // _BLOCK), np.float32)  # [N,K/32]
        step = max(1, _CHUNK // width)
        for begin in range(0, rows, step):
            blocks = raw[self._source(begin, step)].reshape(-1, width // _BLOCK, self.place.size // scales.size)
            part = slice(begin, begin + len(blocks))
            scales[part] = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
            quants[part] = _unpack(blocks[..., 2:], bits).reshape(len(blocks), width)
        return BlockQuantized(bits, _BLOCK, quants, scales)

    def _raw(self) -> np.ndarray:
        """The stored bytes, one row per row of the tensor: uint8 [N, bytes]."""
        try:
            raw = np.fromfile(self.path, np.uint8, self.place.size, offset=self.place.start)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error
        if raw.size != self.place.size:
            raise CheckpointError(f"{self.path} ends inside tensor {self.place.name}; download it again")
        return raw.reshape(1 if len(self.shape) == 1 and self.rows is None else self.shape[0], -1)

    def _source(self, begin: int, step: int) -> slice | list[int]:
        return slice(begin, begin + step) if self.rows is None else list(self.rows[begin : begin + step])


def map_tensors(file: GgufFile) -> dict[str, LazyTensor]:
    """The file's tensors by Hugging Face name. A name without a counterpart stays as it is, and so unread."""
    architecture = file.metadata.get("general.architecture")
    layer_names = _GEMMA_LAYER if architecture == "gemma3" else LAYER_NAMES
    tensors: dict[str, LazyTensor] = {}
    for place in file.tensors:
        if place.name == ROPE_FACTORS:
            continue
        name = _hugging_face_name(place.name, layer_names)
        rows = _row_order(file, place) if architecture == "llama" else None
        gemma_norm = architecture == "gemma3" and place.name.endswith("norm.weight")
        tensors[name] = GgufTensor(file.path, place, rows, -1.0 if gemma_norm else 0.0)
    return tensors


def rope_factors(file: GgufFile) -> tuple[float, ...] | None:
    """The divisors of the rotary frequencies that Llama 3 files carry as a tensor."""
    for place in file.tensors:
        if place.name == ROPE_FACTORS:
            return tuple(GgufTensor(file.path, place).load().ravel().tolist())
    return None


def read_integers(path: Path, place: TensorPlace) -> np.ndarray:
    """A tensor of token ids, int64 of its shape; another type than I32 and I64 is a CheckpointError."""
    if place.type not in INTEGERS:
        raise CheckpointError(f"{path}: tensor {place.name} is {place.type.name}, expected I32 or I64")
    stored = np.dtype("<i4" if place.type == GGMLQuantizationType.I32 else "<i8")
    try:
        values = np.fromfile(path, stored, math.prod(place.shape), offset=place.start)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if values.size != math.prod(place.shape):
        raise CheckpointError(f"{path} ends inside tensor {place.name}; download it again")
    return values.astype(np.int64).reshape(place.shape)


def _hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if prefix == "blk" and number.isdecimal() and part in layer_names:
        return f"model.layers.{number}.{layer_names[part]}.{kind}"
    return name


def _row_order(file: GgufFile, place: TensorPlace) -> tuple[int, ...] | None:
    """Which stored row is each row of q or k: pairs (2i, 2i + 1) of a head become (i, i + half)."""
    part = place.name.split(".")[2:3]
    key = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}.get("".join(part))
    if key is None:
        return None
    heads: Any = file.metadata.get(key, file.metadata.get("llama.attention.head_count"))
    rows = place.shape[0]
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise CheckpointError(f"{file.path}: tensor {place.name} has {rows} rows, which {heads!r} heads cannot share")
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()
    return tuple(order.tolist())


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Signed quants: uint8 [..., 16 or 32] -> int8 [..., 32]. Q4_0 has the first half in the low nibbles."""
    if bits == 8:
        return packed.view(np.int8)
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8) - np.int8(8)
