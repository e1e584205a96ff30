"""The vocabulary of a tokenizer as a grammar reads it: bytes, special tokens, EOS, masks as bits."""

import json
from collections.abc import Collection
from functools import cached_property

import numpy as np

from .errors import UsageError
from .text import Tokenizer

WORD = 32  # bits of a mask word
_GAP = r"/[ \n]{1,2}/"  # between the tag and JSON


class GrammarVocabulary:
    """The tokens as bytes, as llguidance asks for them: it calls this object to tokenize what a grammar forces."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos: frozenset[int], size: int) -> None:
        self.eos = frozenset(token for token in eos if 0 <= token < size)
        if not self.eos:
            raise UsageError(f"structured output needs an EOS token below {size}, the model's are {sorted(eos)}")
        self.size = size
        self.special = self.eos | {token for token in tokenizer.special_ids if token < size}
        self.special_token_ids = sorted(self.special)
        self.eos_token_id = min(self.eos)
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.allowed = packed(self.eos | {token for token, spelled in enumerate(self.tokens) if spelled}, size)
        self.eos_row = packed(self.eos, size)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text from the middle of an answer; what spells a special token is ordinary text here."""
        ids = self._tokenizer.encode_inside(text.decode())
        return self._greedy(text) if ids is None or max(ids, default=0) >= self.size else ids

    def free_until(self, tag: str, gap: bool) -> str:
        """Lark: free text, the tag, white space if `gap` says so, then the grammar named `answer`."""
        tag_id = self._tag_token(tag)
        others = _ranges(self.special - self.eos - {tag_id})
        return "\n".join(
            [
                f"start: {'free*' if others else ''} tag {'GAP?' if gap else ''} @answer",
                *([f"free: TEXT? <[{others}]>"] if others else []),
                f"tag: spelled{'' if tag_id is None else f' | TEXT? <[{tag_id}]>'}",
                f"spelled[lazy]: ANY {_quoted(tag)}",
                f"TEXT: ANY & ~(ANY {_quoted(tag)} ANY)",
                "ANY: /(?s:.*)/",
                f"GAP: {_GAP}",
            ]
        )

    def _tag_token(self, tag: str) -> int | None:
        """The id of a tag that is one special token; None if it is ordinary text."""
        if not tag:
            raise UsageError("the text after which a grammar begins is empty; leave it out instead")
        ids = self._tokenizer.encode(tag, add_special=False)  # also refuses what is no Unicode
        token = self._tokenizer.token_id(tag)
        if token is not None and token in self.special - self.eos:
            return token
        if self.special.intersection(ids):
            raise UsageError(f"a grammar begins after ordinary text or one special token other than EOS, not {tag!r}")
        return None

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self.tokens) if text and token not in self.special}

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token first; a byte no token begins with ends it, since a callback must not raise."""
        ids: list[int] = []
        while text:
            length = next((n for n in range(min(len(text), 64), 0, -1) if text[:n] in self._by_bytes), 0)
            if not length:
                break
            ids.append(self._by_bytes[text[:length]])
            text = text[length:]
        return ids


def packed(tokens: Collection[int], size: int) -> np.ndarray:
    """A set of token ids as bits, uint32 [words]."""
    bits = np.zeros(-(-size // WORD) * WORD, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _ranges(tokens: Collection[int]) -> str:
    """Token ids as Lark lists them: "3-5,9-9"."""
    ordered = sorted(tokens)
    first = [token for token in ordered if token - 1 not in tokens]
    last = [token for token in ordered if token + 1 not in tokens]
    return ",".join(f"{low}-{high}" for low, high in zip(first, last, strict=True))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
