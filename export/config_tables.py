"""Hugging Face config keys as data: transformers 5.24's defaults, harmless keys, keys with one value."""

from typing import Any


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int | None, positions: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


_QWEN = {
    **_sizes(151936, 4096, 22016, 32, 32, 32, 32768),
    "hidden_act": "silu",
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_sizes(32000, 4096, 11008, 32, 32, None, 2048), "hidden_act": "silu"},
    "mistral": {
        **_sizes(32000, 4096, 14336, 32, 32, 8, 131072),
        "hidden_act": "silu",
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma3_text": {
        **_sizes(262208, 2304, 9216, 26, 8, 4, 131072),
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
}

# Of a multimodal Gemma 3: where images go in the prompt. Text alone never gets there.
IMAGE_KEYS = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "boi_token_id",
    "eoi_token_index",
    "eoi_token_id",
    "image_token_index",
    "image_token_id",
)

_NAMES = """
_name_or_path _model_name_or_path name_or_path architectures model_type transformers_version transformers.js_config
torch_dtype dtype is_llama_config unsloth_version unsloth_fixed _commit_hash task_specific_params
problem_type finetuning_task id2label label2id num_labels
"""
_TRAINING = """
initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop classifier_dropout
pretraining_tp chunk_size_feed_forward is_decoder output_attentions output_hidden_states return_dict
return_dict_in_generate output_scores torchscript use_bfloat16 use_cache cache_implementation
_attn_implementation _attn_implementation_autoset attn_implementation
"""
_TOKENS = """
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
decoder_start_token_id forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens
bad_words_ids prefix tokenizer_class
"""
_GENERATION = """
temperature top_k top_p min_p typical_p do_sample max_length min_length max_new_tokens num_beams
num_beam_groups num_return_sequences repetition_penalty length_penalty diversity_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size early_stopping exponential_decay_length_penalty
remove_invalid_values
"""
# Of an MTP head: `drafts.mtp` checks them where there is one; the target's own maths is the same.
_MTP = "num_nextn_predict_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings"
HARMLESS = frozenset(f"{_NAMES} {_TRAINING} {_TOKENS} {_GENERATION} {_MTP}".split())

# Keys that change the maths, with the one value we implement where the architecture's reader leaves them.
ONLY: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
}
