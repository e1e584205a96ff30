"""Writing a tokenizer into a bundle, from Hugging Face folders and GGUF metadata, and what is refused."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from oxidize.export.gguf_tokenizer import build_gguf_tokenizer
from oxidize.export.tokenizer import ExportedTokenizer, write_tokenizer
from oxidize.runtime.errors import CheckpointError, UnsupportedModelError
from oxidize.runtime.text import Tokenizer

MARK = "\u2581"
ALPHABET = sorted(ByteLevel.alphabet())
G = "tokenizer.ggml."


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: control and user-defined tokens, the bytes, one merge, padding."""
    tokens = ["<s>", "</s>", "<think>", *ALPHABET, "he", "[PAD260]"]
    kinds = [3, 3, 4, *[1] * 256, 1, 5]
    metadata = {
        G + "model": "gpt2",
        G + "pre": "gpt-2",
        G + "tokens": tokens,
        G + "token_type": kinds,
        G + "merges": ["h e"],
        G + "bos_token_id": 0,
        G + "eos_token_id": 1,
    }
    return changed(metadata, changes)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece tokenizer with a run of spaces as one token."""
    pieces = {MARK: -9.0, "a": -9.0, "b": -9.0, "ab": -1.0, MARK + "a": -2.0, "aba": -3.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "  ", "    "]
    metadata = {
        G + "model": "llama",
        G + "tokens": tokens,
        G + "scores": [0.0] * 259 + [*pieces.values(), -1000.0, -1000.0],
        G + "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4, 4],
    }
    return changed(metadata, changes)


def changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = metadata | {G + key: value for key, value in changes.items()}
    return {key: value for key, value in merged.items() if value is not None}


def from_gguf(metadata: dict[str, Any] | None, out: Path) -> tuple[Tokenizer, ExportedTokenizer]:
    exported = write_tokenizer(SimpleNamespace(kind="gguf", folder=None, gguf_metadata=metadata), out)
    return Tokenizer.load(out, exported.files), exported


def from_folder(folder: Path, out: Path) -> ExportedTokenizer:
    out.mkdir(exist_ok=True)
    return write_tokenizer(SimpleNamespace(kind="safetensors", folder=folder, gguf_metadata=None), out)


def spelled(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token(i) for i in tokenizer.encode(text)]


def test_byte_level_keeps_every_id_and_leaves_padding_out(tmp_path: Path) -> None:
    metadata = byte_level()
    tokenizer, exported = from_gguf(metadata, tmp_path)
    assert tokenizer.table == dict(enumerate(metadata[G + "tokens"][:-1]))
    assert exported.token_count == tokenizer.vocab_size == 260
    assert exported.files.vocab_sha256 == tokenizer.vocab_sha256()
    assert (exported.files.bos_token, exported.files.eos_token) == ("<s>", "</s>")
    assert exported.files.chat_template is None
    assert spelled(tokenizer, "hee</s><think>") == ["he", "e", "</s>", "<think>"]
    assert tokenizer.special_ids == {0, 1}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["a"]),
        ({"add_bos_token": True}, ["<s>", "a"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "a", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "a"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["a"]),
        ({"pre": "llama-bpe", "bos_token_id": None}, ["a"]),
    ],
)
def test_bos_and_eos_follow_the_file(flags: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    tokenizer, _ = from_gguf(byte_level(**flags), tmp_path)
    assert spelled(tokenizer, "a") == expected
    assert [tokenizer.token(i) for i in tokenizer.encode("a", add_special=False)] == ["a"]


SAMPLE = "I'LL pay 12345 Euro!!\n\n  now"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", " Euro", "!!", "\n\n ", " now"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " Euro", "!!", "\n\n ", " now"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", " Euro", "!!\n\n", " ", " now"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " Euro", "!!\n\n", " ", " now"]),
        ("tekken", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " Euro", "!!\n\n", " ", " now"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", " Euro", "!!", "\n\n ", " now"]),
        ("deepseek-coder", ["I", "'", "LL", " pay", " ", *"12345", " Euro", "!!", "\n", "\n", " ", " now"]),
    ],
)
def test_text_is_split_the_way_the_file_names(name: str, pieces: list[str]) -> None:
    backend = build_gguf_tokenizer(byte_level(pre=name))
    assert backend.pre_tokenizer is not None
    found = [SAMPLE[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(SAMPLE)]
    assert found == pieces


def test_qwen_composes_text_and_llama_prefers_whole_words(tmp_path: Path) -> None:
    tokenizer, _ = from_gguf(byte_level(pre="qwen2"), tmp_path)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    no_merge = byte_level(pre="llama-bpe", merges=["a e"], add_bos_token=False)
    no_merge[G + "tokens"][4:6] = ["ae", "hey"]
    tokenizer, _ = from_gguf(no_merge, tmp_path)
    assert spelled(tokenizer, "hey") == ["hey"]
    assert spelled(tokenizer, "heya") != ["hey", "a"]


def test_scores_become_merges_best_first(tmp_path: Path) -> None:
    tokenizer, exported = from_gguf(sentencepiece(add_bos_token=False), tmp_path)
    assert spelled(tokenizer, "ab") == [MARK, "ab"]  # ab scores above ▁a
    assert spelled(tokenizer, "aba") == [MARK, "aba"]
    assert spelled(tokenizer, "a") == [MARK + "a"]
    assert spelled(tokenizer, "é") == [MARK, "<0xC3>", "<0xA9>"]
    assert (exported.files.bos_token, exported.files.eos_token) == ("<s>", "</s>")
    for text in ("ab a", " a", "é b", "a\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_starts_with_bos_unless_told_otherwise(tmp_path: Path) -> None:
    tokenizer, _ = from_gguf(sentencepiece(), tmp_path)
    assert spelled(tokenizer, "a") == ["<s>", MARK + "a"]


def test_without_a_space_prefix_runs_of_spaces_match_longest_first(tmp_path: Path) -> None:
    tokenizer, _ = from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False), tmp_path)
    assert spelled(tokenizer, "a") == ["a"]
    assert spelled(tokenizer, "b       a") == ["b", MARK * 4, MARK * 2, MARK + "a"]
    assert tokenizer.decode(tokenizer.encode(" b       a")) == " b       a"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "no metadata"),
        ({}, "no tokenizer"),
        (byte_level(tokens=None), "tokenizer.ggml.tokens"),
        (byte_level(tokens=[]), "tokenizer.ggml.tokens"),
        (byte_level(merges=None), "tokenizer.ggml.merges"),
        (byte_level(merges=["q zz"]), "do not fit"),
        (byte_level(pre=None), "does not name its pre-tokenizer"),
        (byte_level(token_type=[1, 1]), "261 tokens but 2 token types"),
        (byte_level(tokens=["a"] * 261), "twice"),
        (byte_level(bos_token_id=999), "bos_token_id is 999"),
        (sentencepiece(scores=None), "tokenizer.ggml.scores"),
        (sentencepiece(scores=[1.0]), "1 scores"),
        (byte_level() | {"tokenizer.chat_template": 3}, "chat_template must be text"),
    ],
)
def test_incomplete_gguf_metadata_is_refused(metadata: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        from_gguf(metadata, tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"pre": "klingon"}, "klingon"), ({"model": "bert"}, "bert"), ({"model": "t5"}, "t5")],
)
def test_unknown_tokenizers_are_named(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        from_gguf(byte_level(**changes), tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a tokenizer.json."""
    made = tmp_path / "checkpoint"
    made.mkdir()
    text = json.dumps(json.loads(build_gguf_tokenizer(byte_level()).to_str()), indent=2, ensure_ascii=True)
    (made / "tokenizer.json").write_text(text + "\r\n", newline="")
    return made


def test_tokenizer_json_is_copied_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    exported = from_folder(folder, tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert exported.token_count == 260
    assert exported.files.bos_token is exported.files.eos_token is exported.files.chat_template is None
    _, built = from_gguf(byte_level(), tmp_path / "out")
    assert built.files.vocab_sha256 == exported.files.vocab_sha256


def test_saved_truncation_and_padding_are_left_out(folder: Path, tmp_path: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    from_folder(folder, tmp_path / "out")
    written = Backend.from_file(str(tmp_path / "out/tokenizer.json"))
    assert written.truncation is written.padding is None
    assert written.get_vocab() == backend.get_vocab()


def test_special_tokens_come_from_either_file_and_form(folder: Path, tmp_path: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "old"}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": {"content": "</s>"}}')
    files = from_folder(folder, tmp_path / "out").files
    assert (files.bos_token, files.eos_token) == ("<s>", "</s>")


def test_the_chat_template_is_found_wherever_it_is_kept(folder: Path, tmp_path: Path) -> None:
    def written() -> str:
        exported = from_folder(folder, tmp_path / "out")
        assert exported.files.chat_template == "chat_template.jinja"
        return (tmp_path / "out/chat_template.jinja").read_text(encoding="utf-8")

    (folder / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert written() == "processor"
    config = folder / "tokenizer_config.json"
    config.write_text(
        '{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "é"}]}'
    )
    assert written() == "é"
    config.write_text('{"chat_template": "config"}')
    assert written() == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert written() == "file"


def test_several_templates_need_a_default(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": [{"name": "rag", "template": "t"}]}')
    with pytest.raises(CheckpointError, match="none is 'default'"):
        from_folder(folder, tmp_path / "out")


def test_older_files_are_converted(tmp_path: Path) -> None:
    vocab = {token: i for i, token in enumerate([*ALPHABET, "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}'
    )
    exported = from_folder(tmp_path, tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out", exported.files)
    assert spelled(tokenizer, "hee é") == ["he", "e", "Ġ", "Ã", "©"]
    assert exported.token_count == 258


def test_conversion_without_transformers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'oxidize-ort\[export\]'"):
        from_folder(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "\xff"])
def test_a_broken_tokenizer_json_is_refused(content: str, folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        from_folder(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json, nor a tokenizer\.model or vocab\.json"):
        from_folder(tmp_path, tmp_path / "out")


def test_a_broken_tokenizer_model_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"add the checkpoint's tokenizer\.json"):
        from_folder(tmp_path, tmp_path / "out")
