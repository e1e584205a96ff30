"""Reads genai_config.json, the file onnxruntime-genai keeps beside a model's graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from oxidize.runtime.manifest import GenerationDefaults, check_relative

from .config_hf import read_json
from .config_keys import Keys

CONFIG_NAME = "genai_config.json"
_KNOWN_INPUTS = ("input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names")
_OTHER_MODELS = ("encoder", "embedding", "vision", "speech", "audio", "encoder_decoder_init", "joiner")
_Layers = tuple[tuple[str, str], ...]  # names of key and value, by layer


@dataclass(frozen=True, slots=True)
class GraphNames:
    """What the graph calls the things a decoder takes and gives."""

    input_ids: str
    attention_mask: str
    position_ids: str
    logits: str
    past: _Layers
    present: _Layers


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """What is known of a decoder that is one graph.

    file: where it was read, for messages. graph: the graph's file in the folder. context: positions allowed.
    """

    file: str
    architecture: str
    graph: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    names: GraphNames
    generation: GenerationDefaults


def read_genai_config(folder: Path) -> ForeignConfig:
    """The config of a folder; missing or malformed values are CheckpointErrors, other kinds of models are refused."""
    raw = read_json(folder / CONFIG_NAME)
    model = Keys(Keys(raw, {}, CONFIG_NAME).mapping("model"), {}, f"{CONFIG_NAME}: model")
    decoder = Keys(model.mapping("decoder"), {}, f"{CONFIG_NAME}: model.decoder")
    _refuse_compound(model, decoder)
    layers = decoder.size("num_hidden_layers")
    return ForeignConfig(
        file=CONFIG_NAME,
        architecture=_text(model, "type", "unknown"),
        graph=_file_name(_text(decoder, "filename", "model.onnx")),
        layers=layers,
        hidden_size=decoder.size("hidden_size"),
        heads=decoder.size("num_attention_heads"),
        kv_heads=decoder.size("num_key_value_heads"),
        head_dim=decoder.size("head_size"),
        vocab_size=model.size("vocab_size"),
        context=model.size("context_length"),
        names=_names(decoder, layers),
        generation=_generation(model, Keys(raw, {}, CONFIG_NAME).mapping("search")),
    )


def _refuse_compound(model: Keys, decoder: Keys) -> None:
    """Only a model that is one decoder graph, fed with token ids, is understood."""
    parts = [part for part in _OTHER_MODELS if model.mapping(part)]
    if parts:
        raise UnsupportedModelError(
            f"{CONFIG_NAME} names a model of several graphs ({parts[0]} beside the decoder); only a decoder alone, "
            "fed with token ids, can be wrapped"
        )
    if decoder.get("pipeline"):
        raise UnsupportedModelError(
            f"{CONFIG_NAME} splits the decoder into a pipeline; build it as one graph to wrap it"
        )
    strange = sorted(decoder.mapping("inputs").keys() - set(_KNOWN_INPUTS))
    if strange:
        raise UnsupportedModelError(
            f"{CONFIG_NAME} gives the decoder an input {strange[0]!r}; only token ids, a mask, positions and a cache "
            "of keys and values are understood"
        )


def _names(decoder: Keys, layers: int) -> GraphNames:
    inputs = Keys(decoder.mapping("inputs"), {}, f"{CONFIG_NAME}: model.decoder.inputs")
    outputs = Keys(decoder.mapping("outputs"), {}, f"{CONFIG_NAME}: model.decoder.outputs")
    return GraphNames(
        _text(inputs, "input_ids", "input_ids"),
        _text(inputs, "attention_mask", "attention_mask"),
        _text(inputs, "position_ids", "position_ids"),
        _text(outputs, "logits", "logits"),
        _by_layer(inputs, "past", "past_key_values", layers),
        _by_layer(outputs, "present", "present", layers),
    )


def _by_layer(keys: Keys, prefix: str, default: str, layers: int) -> _Layers:
    """Names for every layer, from patterns with one %d."""
    patterns = [_text(keys, f"{prefix}_{part}_names", f"{default}.%d.{part}") for part in ("key", "value")]
    for pattern in patterns:
        if pattern.count("%d") != 1:
            raise CheckpointError(f"{keys.where}: {pattern!r} must hold %d once, for the layer; build the folder again")
    key, value = patterns
    return tuple((key.replace("%d", str(layer)), value.replace("%d", str(layer))) for layer in range(layers))


def _generation(model: Keys, search: Mapping[str, Any]) -> GenerationDefaults:
    """End-of-answer ids; sampling defaults only where the folder asks for sampling."""
    eos = model.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError(f"{CONFIG_NAME}: eos_token_id must be a token id or a list of them, not {eos!r}")
    keys = Keys(search if search.get("do_sample") is True else {}, {}, f"{CONFIG_NAME}: search")
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(ids)),
        temperature=keys.optional_number("temperature"),
        top_k=keys.optional_integer("top_k"),
        top_p=keys.optional_number("top_p"),
        min_p=keys.optional_number("min_p"),
    )


def _text(keys: Keys, key: str, default: str) -> str:
    value = keys.get(key, default)
    if not isinstance(value, str) or not value:
        raise CheckpointError(f"{keys.where}: {key} must be text, not {value!r}; build the folder again")
    return value


def _file_name(name: str) -> str:
    try:
        check_relative(name)
    except BundleError:
        raise CheckpointError(
            f"{CONFIG_NAME}: filename {name!r} is no plain path inside the folder; build the folder again"
        ) from None
    return name
