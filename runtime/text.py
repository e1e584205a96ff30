"""Text to token ids and back: the tokenizer, incremental detokenizing, stop strings.

The only door to the `tokenizers` package, imported when a tokenizer is loaded. Knows nothing of models.
"""

import codecs
import json
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
_REPLACEMENT = "\ufffd".encode()


class Tokenizer:
    """The tokenizer of a bundle: exactly what its tokenizer.json says, without truncation or padding."""

    def __init__(self, backend: "Backend") -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        steps = _decoder_steps(backend)
        self._byte_level = "ByteLevel" in steps and steps <= {"ByteLevel", "Fuse"}
        self._byte_ids = _byte_ids(backend) if "ByteFallback" in steps else ()

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

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` alone: special tokens spelled in it are ordinary text, and none is added."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_inside(self, text: str) -> list[int] | None:
        """Token ids of `text` in the middle of an answer, where nothing is put before it; None if there are none.

        Special tokens spelled in it are ordinary text.
        """
        wanted = text.encode("utf-8")
        for before in ("", "\n"):  # a tokenizer that begins a text with a space does not do so after a line break
            ids = self.encode_plain(before + text)
            for start in range(min(len(ids), 3)):
                if b"".join(map(self.token_bytes, ids[start:])) == wanted:
                    return ids[start:]
        return None

    @cached_property
    def _plain(self) -> "Backend":
        plain = type(self._backend).from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; ids without a token are skipped, bytes that are no UTF-8 become U+FFFD.

        With byte fallback, the valid characters of a run of byte tokens are kept and each byte outside them becomes
        one U+FFFD, as in SentencePiece. The package itself gives up a whole run for one bad byte, so no character
        of a run would be certain before its last one.
        """
        if not self._byte_ids:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special)
        runs = _ByteRuns(self)
        mended = runs.push(self.shown(ids, frozenset() if skip_special else self.special_ids))
        return self._backend.decode(mended + runs.flush(), skip_special_tokens=False)

    def shown(self, ids: Iterable[int], special: frozenset[int] = frozenset()) -> list[int]:
        """The ids that have text; of the special ones only those in `special`."""
        return [i for i in ids if (i not in self.special_ids or i in special) and self.token(i) is not None]

    def detokenizer(self, show: frozenset[int] = frozenset()) -> "Detokenizer":
        """A fresh incremental detokenizer for one answer; `show` names special tokens not to leave out."""
        return Detokenizer(self, show)

    @property
    def byte_level(self) -> bool:
        """Whether the text is the concatenation of the tokens' bytes (byte-level BPE)."""
        return self._byte_level

    @property
    def byte_ids(self) -> tuple[int, ...]:
        """The ids of the 256 byte tokens of a vocabulary with byte fallback; empty for others."""
        return self._byte_ids

    @cached_property
    def byte_of(self) -> dict[int, int]:
        """The byte of each byte token."""
        return {token_id: byte for byte, token_id in enumerate(self._byte_ids)}

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
        byte = self.byte_of.get(token_id)
        return token.replace(_SPACE_MARK, " ").encode("utf-8") if byte is None else bytes([byte])

    def vocab_sha256(self) -> str:
        """Digest of the id -> token table, to compare two tokenizers by content."""
        return vocab_digest(self.table)


class Detokenizer:
    """Turns the ids of one answer into text, piece by piece; what was returned never changes.

    All pieces joined equal `decode` of all ids, wherever the ids were cut. Never more than the bytes of one
    incomplete character are held back. Special tokens are skipped, but for those in `show`.
    """

    def __init__(self, tokenizer: Tokenizer, show: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._runs = _ByteRuns(tokenizer)
        self._context: list[int] = []  # a token to decode behind: decoders treat the first of all in another way

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` add."""
        tokenizer = self._tokenizer
        shown = tokenizer.shown(ids, self._show)
        if tokenizer.byte_level:
            return self._utf8.decode(b"".join(map(tokenizer.token_bytes, shown)))
        return self._text_of(self._runs.push(shown))

    def flush(self) -> str:
        """The rest, at the end of the answer: an incomplete character becomes U+FFFD."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._text_of(self._runs.flush())

    def _text_of(self, ids: list[int]) -> str:
        """The text of `ids`, whole characters, where they stand."""
        if not ids:
            return ""
        decode = self._tokenizer.decode
        before = decode(self._context, False) if self._context else ""
        text = decode([*self._context, *ids], False)
        # The byte of a full stop is a context that no later byte can spoil.
        self._context = [self._tokenizer.byte_ids[ord(".")]] if self._tokenizer.byte_ids else ids[-1:]
        return text[len(before) :]


class _ByteRuns:
    """Makes runs of byte tokens valid: a byte outside every valid character becomes the three bytes of U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._byte_of, self._ids = tokenizer.byte_of, tokenizer.byte_ids
        self._held = b""  # the beginning of a character

    def push(self, ids: Iterable[int]) -> list[int]:
        """`ids` mended, up to a character whose bytes are still incomplete."""
        ready: list[int] = []
        run = bytearray()
        for token_id in ids:
            byte = self._byte_of.get(token_id)
            if byte is not None:
                run.append(byte)
                continue
            ready += [*self._mend(bytes(run), final=True), token_id]
            run.clear()
        return ready + self._mend(bytes(run), final=False)

    def flush(self) -> list[int]:
        """The rest, at the end."""
        return self._mend(b"", final=True)

    def _mend(self, run: bytes, final: bool) -> list[int]:
        valid, self._held = _valid_utf8(self._held + run, final)
        return [self._ids[byte] for byte in valid]


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
        keep = beginning_of(text, self._stops)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """The text held back, at the end of an answer that did not stop."""
        held, self._held = self._held, ""
        return held


def beginning_of(text: str, words: Sequence[str]) -> int:
    """Where the longest tail of `text` that begins one of `words` starts; len(text) if there is none."""
    return min((_tail_start(text, word) for word in words), default=len(text))


def _tail_start(text: str, word: str) -> int:
    start = text.find(word[0], max(0, len(text) - len(word) + 1))
    while start >= 0:
        if word.startswith(text[start:]):
            return start
        start = text.find(word[0], start + 1)
    return len(text)


def _decoder_steps(backend: "Backend") -> set[str]:
    """The kinds of the steps by which a tokenizer makes text of tokens."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}


def _byte_ids(backend: "Backend") -> tuple[int, ...]:
    """The ids of the byte tokens `<0x00>` to `<0xFF>`; empty if one is missing."""
    found = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    ids = tuple(token_id for token_id in found if token_id is not None)
    return ids if len(ids) == 256 else ()


def _valid_utf8(run: bytes, final: bool) -> tuple[bytes, bytes]:
    """A run of bytes with U+FFFD for each bad byte, and apart from it, unless `final`, an incomplete last character."""
    valid = bytearray()
    while True:
        try:
            run.decode()
        except UnicodeDecodeError as error:
            valid += run[: error.start]
            run = run[error.start :]
            if error.reason == "unexpected end of data" and not final:
                return bytes(valid), run
            valid += _REPLACEMENT
            run = run[1:]
        else:
            return bytes(valid + run), b""


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
