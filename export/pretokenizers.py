"""How byte-level vocabularies split text before merging, by the name GGUF files give (`tokenizer.ggml.pre`).

The names and what they stand for are llama.cpp's (src/llama-vocab.cpp). Qwen's tokenizer.json composes text
first, which llama.cpp leaves out; here it is done.
"""

from dataclasses import dataclass

# Patterns that were published with the models. Oniguruma syntax.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}"
_TEKKEN = rf"{_CASED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Split:
    """Patterns that cut text one after the other, each match a piece of its own, and what goes with them."""

    patterns: tuple[str, ...]
    nfc: bool = False  # text is composed (Unicode NFC) first
    whole_words: bool = False  # a piece that is a token is taken as it is, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


_LLAMA3_SPLIT = Split((_LLAMA3,), whole_words=True, add_bos=True)
_GPT2_SPLIT = Split((_GPT2,))
_DIGITS_SPLIT = Split((r"\p{N}", _GPT2))
_QWEN2_SPLIT = Split((_QWEN2,), nfc=True)

SPLITS = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_SPLIT,
    "olmo": _GPT2_SPLIT,
    "smollm": _DIGITS_SPLIT,
    "starcoder": _DIGITS_SPLIT,
    "refact": _DIGITS_SPLIT,
    "command-r": _DIGITS_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "pixtral": _LLAMA3_SPLIT,
    "smaug-bpe": Split((_LLAMA3,)),
    "dbrx": Split((_LLAMA3,)),
    "tekken": Split((_TEKKEN,), whole_words=True, add_bos=True),
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "deepseek-coder": Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
}
