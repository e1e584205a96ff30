"""What a checkpoint says about its model, in our own words.

Only `config_hf` and `config_gguf` know the keys of the two source formats; the rest of the exporter
reads this.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, after Hugging Face's `rope_parameters`.

    `kind` is "default", "linear", "llama3", "yarn", or "factors" for GGUF files that store no formula but one
    divisor per frequency: inv_freq[i] / factors[i], with head_dim / 2 of them.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn's mscale when the checkpoint gives it
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only language model. Sizes are counts, not bytes; ids are token ids."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3", "gemma3_text"
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding table; may exceed the tokenizer's
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_scale: float  # multiplies q.k, usually head_dim ** -0.5
    activation: str = "silu"  # or "gelu_tanh"
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k
    sandwich_norms: bool = False  # Gemma: norms after attention and after the MLP too
    norm_offset: float = 0.0  # Gemma: RMSNorm multiplies by (1 + weight)
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size), unrounded (transformers rounds it to its own dtype)
    rope_local: RopeConfig | None = None  # for sliding layers, where it differs
    sliding_window: int | None = None  # tokens a sliding layer sees, the current one included
    layer_types: tuple[str, ...] = ()  # "full_attention" | "sliding_attention", one per layer

    def is_sliding(self, layer: int) -> bool:
        """Whether this layer attends to the window only."""
        return self.layer_types[layer] == "sliding_attention"
