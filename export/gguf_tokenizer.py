"""Builds a tokenizer from GGUF metadata, with the `tokenizers` package.

Two families: "gpt2" is byte-level BPE with merges, "llama" is SentencePiece BPE with scores, from which the
merges are recovered. Ids never move: every token of the file keeps its index; padding (type 5) is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

from .pretokenizers import SPLITS, Split

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE

_SPACE_MARK = "\u2581"
_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The tokens with a role, by their text."""

    bos: str | None
    eos: str | None
    unknown: str | None


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens and their types by id, padding left out."""

    ids: dict[str, int]
    types: dict[str, int]

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token in self.ids if self.types[token] in types]


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> "Tokenizer":
    """The tokenizer that GGUF metadata (key -> Python value) describes."""
    model = metadata.get(_PREFIX + "model")
    if model == "gpt2":
        return _byte_level(metadata)
    if model == "llama":
        return _sentencepiece(metadata)
    if model is None:
        raise CheckpointError("the GGUF file has no tokenizer (tokenizer.ggml.model); convert the model again with one")
    raise UnsupportedModelError(f"tokenizer.ggml.model {model!r} is not supported, only 'gpt2' and 'llama' are")


def named_tokens(metadata: Mapping[str, Any]) -> NamedTokens:
    """The texts of BOS, EOS and the unknown token; None where the file names none."""
    llama = metadata.get(_PREFIX + "model") == "llama"  # these have llama.cpp's customary ids if nothing is said
    return NamedTokens(
        bos=_token_at(metadata, "bos_token_id", 1 if llama else None),
        eos=_token_at(metadata, "eos_token_id", 2 if llama else None),
        unknown=_token_at(metadata, "unknown_token_id", 0 if llama else None),
    )


def _byte_level(metadata: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    split = _split_of(metadata)
    vocabulary = _vocabulary(metadata)
    merges = [_pair(merge) for merge in _list_of(metadata, "merges", str)]
    tokenizer = Tokenizer(_bpe(vocabulary.ids, merges, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, vocabulary, normalized=())
    _add_ends(tokenizer, metadata, add_bos=split.add_bos)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> "Tokenizer":
    """SentencePiece spells spaces U+2581, one more before the text, rare characters as bytes."""
    from tokenizers import Tokenizer, decoders, normalizers

    prefix = _flag(metadata, "add_space_prefix", True)
    vocabulary = _vocabulary(metadata, mark_spaces=not prefix)
    merges = _merges_of(vocabulary, _list_of(metadata, "scores", float))
    unknown = named_tokens(metadata).unknown
    tokenizer = Tokenizer(_bpe(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    mark = normalizers.Replace(" ", _SPACE_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark]) if prefix else mark
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    # Runs of spaces match where the text already has marks; with a prefix the token would be given one too.
    marked = () if prefix else [token for token in vocabulary.of_type(TokenType.USER_DEFINED) if _SPACE_MARK in token]
    _add_tokens(tokenizer, vocabulary, normalized=marked)
    _add_ends(tokenizer, metadata, add_bos=True)
    return tokenizer


def _split_of(metadata: Mapping[str, Any]) -> Split:
    name = metadata.get(_PREFIX + "pre")
    if name is None:
        raise CheckpointError(
            "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), as files made "
            "before May 2024; convert the model again"
        )
    if name not in SPLITS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre {name!r} is not supported; supported are {', '.join(sorted(SPLITS))}"
        )
    return SPLITS[name]


def _vocabulary(metadata: Mapping[str, Any], mark_spaces: bool = False) -> _Vocabulary:
    """Read tokens and types. `mark_spaces` writes runs of spaces, which GGUF spells plainly, as marks."""
    tokens = _list_of(metadata, "tokens", str)
    types = (
        _list_of(metadata, "token_type", int)
        if _PREFIX + "token_type" in metadata
        else [TokenType.NORMAL] * len(tokens)
    )
    if len(types) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types; download it again")
    ids: dict[str, int] = {}
    kinds: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == TokenType.UNUSED:
            continue
        spelled = _SPACE_MARK * len(token) if mark_spaces and token and not token.strip(" ") else token
        if spelled in ids:
            raise CheckpointError(f"the GGUF file has the token {token!r} twice (ids {ids[spelled]} and {token_id})")
        ids[spelled], kinds[spelled] = token_id, kind
    return _Vocabulary(ids, kinds)


def _merges_of(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary: every cut of a piece into two pieces, best piece first.

    SentencePiece always joins the neighbours that make the piece of highest score. Control tokens, bytes and
    user-defined tokens never come out of a join.
    """
    pieces = vocabulary.of_type(TokenType.NORMAL)
    if len(scores) <= max(vocabulary.ids.values()):
        raise CheckpointError(f"the GGUF file has {len(scores)} scores, fewer than tokens; download it again")
    ids = {piece: vocabulary.ids[piece] for piece in pieces}
    merges = []
    for piece in sorted(pieces, key=lambda piece: (-scores[ids[piece]], ids[piece])):
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> "BPE":
    from tokenizers.models import BPE

    try:
        return BPE(vocab=ids, merges=merges, **settings)
    except Exception as error:  # the package raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"the GGUF file's merges do not fit its tokens ({reason}); download it again") from None


def _add_tokens(tokenizer: "Tokenizer", vocabulary: _Vocabulary, normalized: Sequence[str]) -> None:
    """Make control and user-defined tokens match whole in text; `normalized` ones after normalising it."""
    late = set(normalized)

    def added(token: str, special: bool) -> "AddedToken":
        from tokenizers import AddedToken

        return AddedToken(token, normalized=token in late, special=special)

    control = vocabulary.of_type(TokenType.UNKNOWN, TokenType.CONTROL)
    tokenizer.add_special_tokens([added(token, True) for token in control if token])
    tokenizer.add_tokens([added(token, False) for token in vocabulary.of_type(TokenType.USER_DEFINED) if token])


def _add_ends(tokenizer: "Tokenizer", metadata: Mapping[str, Any], add_bos: bool) -> None:
    """Put BOS before and EOS after a raw prompt, where the file asks for it."""
    from tokenizers.processors import TemplateProcessing

    names = named_tokens(metadata)
    bos = names.bos if _flag(metadata, "add_bos_token", add_bos) else None
    eos = names.eos if _flag(metadata, "add_eos_token", False) else None
    ends = [token for token in (bos, eos) if token is not None]
    if not ends:
        return
    tokenizer.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ends],
    )


def _token_at(metadata: Mapping[str, Any], key: str, default: int | None) -> str | None:
    token_id = metadata.get(_PREFIX + key, default)
    tokens = _list_of(metadata, "tokens", str)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{_PREFIX}{key} is {token_id!r}, outside the {len(tokens)} tokens; download the file again"
        )
    return tokens[token_id]


def _list_of(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, list) or not value or not isinstance(value[0], kind):
        raise CheckpointError(
            f"the GGUF file needs {_PREFIX}{key}, a list of {kind.__name__}, for its tokenizer; convert the model again"
        )
    return value


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    return bool(metadata.get(_PREFIX + key, default))


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
