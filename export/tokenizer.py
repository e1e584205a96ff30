"""Writes a checkpoint's tokenizer into a bundle: tokenizer.json, the chat template, BOS and EOS.

A Hugging Face folder's tokenizer.json is copied; a GGUF file's is built from its metadata.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from oxidize.runtime.errors import CheckpointError
from oxidize.runtime.manifest import TokenizerFiles
from oxidize.runtime.vocab import vocab_digest

from .gguf_tokenizer import build_gguf_tokenizer, named_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"


class TokenizerSource(Protocol):
    """What this module reads of a checkpoint. `gguf_metadata` maps GGUF keys to plain Python values."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def folder(self) -> Path | None: ...  # noqa: D102
    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class ExportedTokenizer:
    """What was written. Ids at or above `token_count` belong to no token."""

    files: TokenizerFiles
    token_count: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tokenizer before it is written."""

    tokenizer: "Tokenizer"
    text: str  # of tokenizer.json
    template: str | None
    bos_token: str | None
    eos_token: str | None


def write_tokenizer(checkpoint: TokenizerSource, out: Path) -> ExportedTokenizer:
    """Write the tokenizer of `checkpoint` into the folder `out`.

    A missing or malformed tokenizer is a CheckpointError, one of an unknown kind an UnsupportedModelError.
    """
    parts = _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_folder(checkpoint)
    (out / TOKENIZER_NAME).write_text(parts.text, encoding="utf-8", newline="")
    if parts.template is not None:
        (out / TEMPLATE_NAME).write_text(parts.template, encoding="utf-8", newline="")
    table = {token_id: token for token, token_id in parts.tokenizer.get_vocab(with_added_tokens=True).items()}
    files = TokenizerFiles(
        tokenizer=TOKENIZER_NAME,
        chat_template=None if parts.template is None else TEMPLATE_NAME,
        bos_token=parts.bos_token,
        eos_token=parts.eos_token,
        vocab_sha256=vocab_digest(table),
    )
    return ExportedTokenizer(files, max(table) + 1)


def _from_gguf(checkpoint: TokenizerSource) -> _Parts:
    metadata = checkpoint.gguf_metadata
    if metadata is None:
        raise CheckpointError("the GGUF file has no metadata, so no tokenizer can be built; download it again")
    tokenizer = build_gguf_tokenizer(metadata)
    names = named_tokens(metadata)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"tokenizer.chat_template must be text, not {type(template).__name__}; convert the file again"
        )
    return _Parts(tokenizer, tokenizer.to_str(), template, names.bos, names.eos)


def _from_folder(checkpoint: TokenizerSource) -> _Parts:
    folder = checkpoint.folder
    if folder is None:
        raise CheckpointError("the checkpoint has no folder, so its tokenizer cannot be found; give its folder")
    config = _read_json(folder / "tokenizer_config.json")
    named = _read_json(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    path = folder / TOKENIZER_NAME
    text = _read_text(path) if path.is_file() else _convert(folder)
    text = _without_cuts(text, path)
    return _Parts(
        tokenizer=_parse(text, path),
        text=text,
        template=_chat_template(folder, config),
        bos_token=_content(named.get("bos_token")),
        eos_token=_content(named.get("eos_token")),
    )


def _parse(text: str, path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not a tokenizer ({reason}); download it again") from None
    if not tokenizer.get_vocab_size():
        raise CheckpointError(f"{path} holds an empty vocabulary; download it again")
    return tokenizer


def _without_cuts(text: str, path: Path) -> str:
    """The tokenizer.json without saved truncation and padding, which would silently change prompts."""
    raw = _decode(text, path)
    if raw.get("truncation") is None and raw.get("padding") is None:
        return text
    return json.dumps(raw | {"truncation": None, "padding": None}, ensure_ascii=False)


def _convert(folder: Path) -> str:
    """A tokenizer.json from older files, by transformers' own converters."""
    has_spm = (folder / "tokenizer.model").is_file()
    has_bpe = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not has_spm and not has_bpe:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, nor a tokenizer.model or vocab.json with merges.txt to make it "
            "from; add the checkpoint's tokenizer files"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise CheckpointError(
            f"{folder} has no tokenizer.json and making it needs transformers; pip install 'oxidize-ort[export]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer.to_str()
    except Exception as error:  # whatever the converter runs into, the remedy is the same
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"transformers cannot convert the tokenizer in {folder} ({reason}); add the checkpoint's tokenizer.json"
        ) from None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: its own file, else the tokenizer's config, else the processor's file."""
    path = folder / TEMPLATE_NAME
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named = template
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
    if isinstance(named, Mapping) and isinstance(named.get("default"), str):
        return named["default"]
    raise CheckpointError(f"{folder} names several chat templates and none is 'default'; put one into {TEMPLATE_NAME}")


def _content(token: Any) -> str | None:
    """A special token is written as text or as an object with its text in "content"."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a file that is not there counts as empty."""
    return _decode(_read_text(path), path) if path.is_file() else {}


def _decode(text: str, path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(raw).__name__}; download it again")
    return raw


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
