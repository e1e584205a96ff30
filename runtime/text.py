"""Text to token ids and back: the tokenizer, incremental detokenizing, stop strings.

The only door to the `tokenizers` package, imported when a tokenizer is loaded. Knows nothing of models.
"""

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BundleError, UsageError
from .manifest import TokenizerFiles
from .vocab import vocab_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

MAX_STOPS = 16
_SPACE_MARK = "\u2581"  # how SentencePiece vocabularies spell a space


class Tokenizer:
    """The tokenizer of a bundle: exactly what its tokenizer.json says, without truncation or padding."""

    def __init__(self, backend: "Backend") -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._byte_level = type(backend.decoder).__name__ == "ByteLevel"

    @classmethod
    def load(cls, folder: Path, files: TokenizerFiles) -> "Tokenizer":
        """Read the tokenizer of the bundle in `folder`; a missing or malformed file is a BundleError."""
        from tokenizers import Tokenizer as Backend

        path = folder / files.tokenizer
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"cannot read {path}: {error}; export the bundle again") from error
        try:
            return cls(Backend.from_str(text))
        except Exception as error:  # the package raises bare Exception
            raise BundleError(f"{path} is not a tokenizer ({_one_line(error)}); export the bundle again") from error

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled in it become their ids.

        `add_special` applies the tokenizer's own rule for BOS and EOS (a raw prompt). A rendered chat already
        contains them: pass False.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeError):
            raise UsageError("the text holds a lone surrogate, which UTF-8 cannot write; remove it") from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; ids without a token are skipped, bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def detokenizer(self) -> "Detokenizer":
        """A fresh incremental detokenizer for one answer."""
        return Detokenizer(self)

    @property
    def byte_level(self) -> bool:
        """Whether the text is the concatenation of the tokens' bytes (byte-level BPE)."""
        return self._byte_level

    @cached_property
    def table(self) -> dict[int, str]:
        """Every id with its token, spelled as the vocabulary spells it, added tokens included."""
        return {token_id: token for token, token_id in self._backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id the tokenizer knows."""
        return max(self.table, default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def token(self, token_id: int) -> str | None:
        """The token of an id, spelled as the vocabulary spells it; None for an id without one."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_id(self, token: str) -> int | None:
        """The id of a token, spelled as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds in the middle of a text; empty for an id without a token."""
        token = self.token(token_id) or ""
        if self._byte_level:
            return _byte_level_bytes(token)
        byte = _byte_of(token)
        return token.replace(_SPACE_MARK, " ").encode("utf-8") if byte is None else bytes([byte])

    def vocab_sha256(self) -> str:
        """Digest of the id -> token table, to compare two tokenizers by content."""
        return vocab_digest(self.table)


class Detokenizer:
    """Turns the ids of one answer into text, piece by piece; what was returned never changes.

    All pieces joined equal `decode` of all ids, wherever the ids were cut. Half a character is held back, and
    so is a run of byte tokens (`<0xE2>`), because only its end tells whether it is valid. Special tokens are
    skipped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # the last token that was turned into text
        self._held: list[int] = []  # tokens that were not yet

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` add."""
        tokenizer = self._tokenizer
        shown = [i for i in ids if i not in tokenizer.special_ids and tokenizer.token(i) is not None]
        if tokenizer.byte_level:
            return self._utf8.decode(b"".join(map(tokenizer.token_bytes, shown)))
        return self._push_pieces(shown)

    def flush(self) -> str:
        """The rest, at the end of the answer: an incomplete character becomes U+FFFD."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"", final=True)
        held, self._held = self._held, []
        return self._text_of(held) if held else ""

    def _push_pieces(self, ids: list[int]) -> str:
        """Emit up to the last token that is not a single byte."""
        for end in range(len(ids), 0, -1):
            if _byte_of(self._tokenizer.token(ids[end - 1]) or "") is None:
                ready = [*self._held, *ids[:end]]
                self._held = ids[end:]
                return self._text_of(ready)
        self._held += ids
        return ""

    def _text_of(self, ids: list[int]) -> str:
        """The text of `ids` where they stand: decoders treat the first token of all in another way."""
        before = self._tokenizer.decode(self._context) if self._context else ""
        text = self._tokenizer.decode([*self._context, *ids])
        self._context = ids[-1:]
        return text[len(before) :]


class StopStrings:
    """Cuts a growing text before the first stop string in it.

    The stop that is complete first, reading character by character, wins; of two that end together the longer
    one. So the outcome depends on the text alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if len(stops) > MAX_STOPS:
            raise UsageError(f"at most {MAX_STOPS} stop strings are possible, {len(stops)} were given")
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty; give at least one character")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, delta: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop was found; nothing follows a stop."""
        if self._stopped or not self._stops:
            return ("" if self._stopped else delta), self._stopped
        text = self._held + delta
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)[1]], True
        keep = self._beginning_of_stop(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """The text held back, at the end of an answer that did not stop."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_stop(self, text: str) -> int:
        """Where the longest tail of `text` that begins some stop starts; len(text) if there is none."""
        floor = max(0, len(text) - self._longest + 1)
        starts = (_tail_start(text, stop, max(floor, len(text) - len(stop) + 1)) for stop in self._stops)
        return min(starts)


def _tail_start(text: str, stop: str, floor: int) -> int:
    start = text.find(stop[0], floor)
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)


def _byte_of(token: str) -> int | None:
    """The byte of a byte-fallback token such as `<0xE2>`, else None."""
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """The characters that spell bytes in byte-level vocabularies (GPT-2's table).

    Printable Latin-1 characters spell themselves; every other byte, in order, is spelled from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; an added token not spelled in the alphabet stands for itself."""
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
