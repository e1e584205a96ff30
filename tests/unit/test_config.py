"""config.json, generation_config.json and GGUF metadata give one ModelConfig, or an error naming the key."""

import json
from typing import Any

import pytest
from checkpoints import VARIANTS

from oxidize.export.config import RopeConfig
from oxidize.export.config_gguf import config_from_gguf, generation_from_gguf
from oxidize.export.config_hf import config_from_hf, generation_from_hf
from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def llama(**changes: Any) -> dict[str, Any]:
    return {**VARIANTS["llama2"], **changes}


def gemma(**changes: Any) -> dict[str, Any]:
    return {**VARIANTS["gemma3"], **changes}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_absent_keys_have_the_defaults_of_transformers(model_type):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type)
    ours = config_from_hf({"model_type": model_type})
    names = {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tie_word_embeddings": "tie_word_embeddings",
        "sliding_window": "sliding_window",
    }
    assert {name: getattr(ours, name) for name in names} == {
        name: getattr(theirs, key, None) for name, key in names.items()
    }
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.attention_scale == getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_saves_reads_as_what_was_published(variant):
    """transformers 5 rewrites rope_theta and rope_scaling to rope_parameters, and adds layer_types."""
    transformers = pytest.importorskip("transformers")
    published = VARIANTS[variant]
    saved = transformers.AutoConfig.for_model(**published).to_dict()
    assert "rope_theta" not in saved and "rope_parameters" in saved
    assert config_from_hf(json.loads(json.dumps(saved))) == config_from_hf(published)


def test_rope_kinds():
    base = {"rope_theta": 500000.0, "max_position_embeddings": 4096}
    scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    got = config_from_hf(llama(**base, rope_scaling=scaling)).rope
    assert got == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, original_max_positions=4096)

    scaling = {"type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "beta_slow": 2}
    got = config_from_hf(llama(**base, rope_scaling=scaling)).rope
    assert (got.kind, got.factor, got.original_max_positions) == ("yarn", 4.0, 1024)
    assert (got.beta_fast, got.beta_slow, got.truncate) == (32.0, 2.0, True)

    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 123.0, "partial_rotary_factor": 1.0}
    got = config_from_hf({"model_type": "llama", "rope_parameters": parameters}).rope
    assert got == RopeConfig(123.0, "linear", 2.0)


def test_gemma_has_two_ropes_and_scales_the_full_layers_alone():
    config = config_from_hf(gemma(rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert config.rope == RopeConfig(1_000_000.0, "linear", 8.0)
    assert config.rope_local == RopeConfig(10_000.0)
    assert config.layer_types == (SLIDING, SLIDING, FULL, SLIDING)
    assert (config.sliding_window, config.norm_offset, config.activation) == (8, 1.0, "gelu_tanh")
    assert config.embedding_scale == 8.0 and config.attention_scale == 32**-0.5
    assert config.qk_norm and config.sandwich_norms and config.tie_word_embeddings


def test_multimodal_gemma_is_read_as_its_text_model():
    text = {key: value for key, value in gemma().items() if key != "tie_word_embeddings"}
    wrapped = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1}}
    assert config_from_hf({**wrapped, "mm_tokens_per_image": 256, "boi_token_index": 7}) == config_from_hf(gemma())
    untied = config_from_hf({**wrapped, "tie_word_embeddings": False})
    assert not untied.tie_word_embeddings
    with pytest.raises(CheckpointError, match="tie_word_embeddings differs"):
        config_from_hf({**wrapped, "tie_word_embeddings": False, "text_config": gemma()})


def test_windows():
    assert config_from_hf(VARIANTS["mistral"]).sliding_window is None
    sliding = config_from_hf(VARIANTS["mistral_sliding"])
    assert sliding.sliding_window == 8 and set(sliding.layer_types) == {SLIDING} and sliding.is_sliding(0)
    assert config_from_hf(VARIANTS["qwen2"]).sliding_window is None
    mixed = config_from_hf(VARIANTS["qwen2_sliding"])
    assert mixed.layer_types == (FULL, SLIDING, SLIDING)
    stated = config_from_hf({**VARIANTS["qwen2_sliding"], "layer_types": [SLIDING, FULL, SLIDING]})
    assert stated.layer_types == (SLIDING, FULL, SLIDING) and stated.sliding_window == 8


def test_biases_and_norms():
    qwen2, qwen3 = config_from_hf(VARIANTS["qwen2"]), config_from_hf(VARIANTS["qwen3"])
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (
        False,
        False,
        True,
        32,
    )
    biased = config_from_hf(VARIANTS["llama_bias"])
    assert (biased.attention_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    assert config_from_hf({**VARIANTS["qwen3"], "attention_bias": True}).output_bias


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mixtral"}, "'mixtral'.*llama, mistral, qwen2, qwen3, gemma3_text, gemma3"),
        ({}, "model_type None"),
        (llama(hidden_act="relu"), "hidden_act = 'relu'"),
        (llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type = 'dynamic'"),
        (llama(rope_scaling={"type": "longrope", "factor": 2.0}), "type = 'longrope'"),
        (llama(rope_scaling={"type": "linear", "factor": 2.0, "mrope_section": [1]}), "mrope_section"),
        (llama(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (
            llama(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        (llama(num_local_experts=8), "num_local_experts = 8"),
        (llama(sliding_window=4096), "sliding_window = 4096"),
        (llama(some_new_switch=False), "some_new_switch = False"),
        (llama(quantization_config={"bits": 4}), "quantization_config"),
        ({**VARIANTS["mistral"], "attention_bias": True}, "attention_bias = True"),
        ({**VARIANTS["qwen3"], "layer_types": [FULL, "linear_attention"]}, "linear_attention"),
        (gemma(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0"),
        (gemma(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0"),
        (gemma(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (gemma(rope_parameters={"rope_type": "default"}), "rope_type"),
    ],
)
def test_maths_we_do_not_have_is_refused_by_name(config, named):
    with pytest.raises(UnsupportedModelError, match=named):
        config_from_hf(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (llama(hidden_size="64"), "hidden_size must be a non-negative integer, not '64'"),
        (llama(num_hidden_layers=0), "num_hidden_layers must be a positive integer"),
        (llama(rms_norm_eps=float("nan")), "rms_norm_eps must be a finite number"),
        (llama(tie_word_embeddings=1), "tie_word_embeddings must be true or false"),
        (llama(num_key_value_heads=3), "4 attention heads cannot share 3"),
        (llama(hidden_size=66), "hidden_size 66 is not a multiple"),
        (llama(head_dim=15), "head_dim 15 is odd"),
        (llama(rope_scaling={"type": "linear"}), "factor must be a number"),
        (llama(rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2}), "disagree"),
        (llama(rope_scaling={"type": "linear", "factor": 0}), "factor must be a positive number"),
        (
            llama(rope_scaling={"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}),
            "high_freq_factor 4.0 must exceed",
        ),
        (llama(rope_theta=0), "rope_theta must exceed 1"),
        (gemma(query_pre_attn_scalar=0), "query_pre_attn_scalar must be a positive number"),
        (llama(rope_scaling=[1]), "rope_scaling must be an object"),
        (llama(rope_parameters={"rope_theta": 5.0}), "rope_theta = 10000.0 but rope_parameters"),
        (
            llama(rope_scaling={"type": "linear", "factor": 2}, rope_parameters={"type": "linear", "factor": 4}),
            "rope_parameters and rope_scaling disagree on factor",
        ),
        ({**VARIANTS["mistral"], "layer_types": [SLIDING, FULL]}, "layer_types and sliding_window = None"),
        ({**VARIANTS["qwen2"], "layer_types": [SLIDING, FULL]}, "no sliding_window"),
        ({**VARIANTS["qwen2"], "layer_types": [FULL]}, "1 entries for 2 layers"),
        (gemma(layer_types=[FULL] * 4), "layer_types and sliding_window_pattern = 3 disagree"),
        ({"model_type": "gemma3"}, "needs a text_config"),
    ],
)
def test_contradictions_and_wrong_types_are_refused(config, named):
    with pytest.raises(CheckpointError, match=named):
        config_from_hf(config)


def test_keys_without_effect_are_accepted():
    silent = {
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "temperature": 0.6,
        "auto_map": None,
        "use_cache": False,
    }
    published = {
        "rope_interleaved": False,
        "is_llama_config": True,
        "transformers.js_config": {"dtype": "q4"},
    }
    assert config_from_hf(llama(**silent, **published)) == config_from_hf(llama())


def test_generation_defaults(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama(eos_token_id=[5, 6, 5])))
    assert generation_from_hf(tmp_path).eos_token_ids == (5, 6)
    given = {"eos_token_id": 7, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    got = generation_from_hf(tmp_path)
    assert (got.eos_token_ids, got.temperature, got.top_p, got.top_k, got.min_p) == ((7,), 0.6, 0.9, 20, None)
    (tmp_path / "generation_config.json").write_text(json.dumps({**given, "do_sample": False, "eos_token_id": None}))
    got = generation_from_hf(tmp_path)
    assert (got.eos_token_ids, got.temperature) == ((5, 6), None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match="'</s>'"):
        generation_from_hf(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        generation_from_hf(tmp_path)


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
}
SHAPES = {"token_embd.weight": (300, 64), "output.weight": (300, 64)}


def test_gguf_metadata():
    config = config_from_gguf(GGUF, SHAPES)
    assert (config.kv_heads, config.head_dim, config.vocab_size) == (4, 16, 300)
    assert config.norm_eps == 1e-05 and config.rope == RopeConfig(10_000.0) and not config.tie_word_embeddings
    tied = config_from_gguf(GGUF, {"token_embd.weight": (300, 64)}, rope_factors=(1.0,) * 8)
    assert tied.tie_word_embeddings and tied.rope.kind == "factors" and tied.rope.factors == (1.0,) * 8


def test_gguf_gemma_constants_of_llama_cpp():
    metadata = {key.replace("llama", "gemma3"): value for key, value in GGUF.items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 512}
    config = config_from_gguf({**metadata, "gemma3.block_count": 7}, SHAPES)
    assert config.layer_types == (*(SLIDING,) * 5, FULL, SLIDING)
    assert config.rope_local == RopeConfig(10_000.0) and config.attention_scale == 16**-0.5
    flags = [True, False]
    assert config_from_gguf({**metadata, "gemma3.attention.sliding_window_pattern": flags}, SHAPES).layer_types == (
        SLIDING,
        FULL,
    )
    large = {"gemma3.block_count": 62, "gemma3.attention.key_length": 8}
    assert config_from_gguf({**metadata, **large}, SHAPES).attention_scale == (64 / 4) ** -0.5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "falcon"}, "'falcon' is not supported.*llama, qwen2, qwen3, gemma3"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.attention.sliding_window": 4096}, "attention.sliding_window = 4096"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 differs"),
        ({"llama.attention.head_count": [4, 4]}, "attention.head_count must be"),
        ({"llama.vocab_size": 299}, "vocab_size is 299"),
        ({"split.count": 3}, "merge"),
        ({"general.type": "adapter"}, "'adapter'"),
    ],
)
def test_gguf_metadata_we_cannot_honour_is_refused(changes, named):
    with pytest.raises(CheckpointError, match=named):
        config_from_gguf({**GGUF, **changes}, SHAPES)


def test_gguf_end_of_answer_ids():
    ids = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.ggml.eom_token_id": 2,
    }
    assert generation_from_gguf(ids).eos_token_ids == (2, 9)
    assert generation_from_gguf({}).eos_token_ids == ()
