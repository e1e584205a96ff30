"""Tokenizers built from GGUF metadata against llama.cpp, transformers and SentencePiece."""

import io
import json
import random
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oxidize.export.source import open_source
from oxidize.export.tokenizer import ExportedTokenizer, write_tokenizer
from oxidize.runtime.chat import ChatTemplate
from oxidize.runtime.text import Tokenizer

DATA = Path(__file__).parents[1] / "data"
ESCAPE = re.compile(r"\\(U[0-9a-f]{8}|u[0-9a-f]{4}|x[0-9a-f]{2}|.)")
PLAIN = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"'}


def corpus() -> list[str]:
    lines = (DATA / "tokenizer_corpus.txt").read_text(encoding="utf-8").split("\n")[1:-1]

    def expand(match: re.Match[str]) -> str:
        return PLAIN[match[1]] if match[1] in PLAIN else chr(int(match[1][1:], 16))

    return [ESCAPE.sub(expand, line) for line in lines]


CORPUS = corpus()


def build(metadata: dict[str, Any], out: Path) -> tuple[Tokenizer, ExportedTokenizer]:
    source = SimpleNamespace(kind="gguf", folder=None, gguf_metadata=metadata)
    exported = write_tokenizer(source, out)
    return Tokenizer.load(out, exported.files), exported


@pytest.fixture(scope="module")
def exported_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2-tokenizer")


@pytest.fixture(scope="module")
def exported(smollm2_gguf: Path, exported_folder: Path) -> ExportedTokenizer:
    return write_tokenizer(open_source(str(smollm2_gguf)), exported_folder)


@pytest.fixture(scope="module")
def smollm2(exported: ExportedTokenizer, exported_folder: Path) -> Tokenizer:
    return Tokenizer.load(exported_folder, exported.files)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


def test_smollm2_ids_equal_those_of_llama_cpp(smollm2: Tokenizer) -> None:
    golden = json.loads((DATA / "smollm2_token_ids.json").read_text())["ids"]
    assert len(golden) == len(CORPUS)
    for text, ids in zip(CORPUS, golden, strict=True):
        assert smollm2.encode(text) == ids, text


def test_smollm2_ids_equal_those_of_transformers(smollm2: Tokenizer, reference: Any) -> None:
    # transformers splits GPT-2's way, without taking digits one by one, so numbers are left out
    texts = [text for text in CORPUS if not any(unicodedata.category(c).startswith("N") for c in text)]
    assert len(texts) > len(CORPUS) / 2
    for text in texts:
        assert smollm2.encode(text) == reference(text).input_ids, text


def test_smollm2_texts_survive_a_round_trip_whole_and_piece_by_piece(smollm2: Tokenizer) -> None:
    for text in CORPUS:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special=False) == text
        detokenizer = smollm2.detokenizer()
        assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == smollm2.decode(ids)


def test_smollm2_facts(smollm2: Tokenizer, exported: ExportedTokenizer, smollm2_gguf: Path) -> None:
    tokens = (open_source(str(smollm2_gguf)).gguf_metadata or {})["tokenizer.ggml.tokens"]
    assert smollm2.table == dict(enumerate(tokens))
    assert exported.token_count == smollm2.vocab_size == 49152
    assert exported.files.vocab_sha256 == smollm2.vocab_sha256()
    assert (exported.files.bos_token, exported.files.eos_token) == ("<|im_start|>", "<|im_end|>")
    for token_id in smollm2.special_ids:
        assert smollm2.encode(f"a{tokens[token_id]}b")[1:-1] == [token_id]


def test_smollm2_chat_equals_that_of_transformers(
    smollm2: Tokenizer, exported: ExportedTokenizer, exported_folder: Path, reference: Any
) -> None:
    template = ChatTemplate.load(exported_folder, exported.files)
    messages = [{"role": "user", "content": "Grüße 👋🏽"}, {"role": "assistant", "content": " Hi "}]
    prompt = template.render(messages)
    assert prompt == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = smollm2.encode(prompt, add_special=False)
    assert ids == reference(prompt, add_special_tokens=False).input_ids
    assert ids[0] == 1


def sentencepiece_metadata(train: Callable[..., Any], texts: list[str]) -> tuple[bytes, dict[str, Any]]:
    """Train a small SentencePiece BPE model; its bytes and what a GGUF file would say about it."""
    import sentencepiece

    writer = io.BytesIO()
    train(
        sentence_iterator=iter(texts),
        model_writer=writer,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=writer.getvalue())
    ids = range(model.get_piece_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_bos_token": False,
    }
    return writer.getvalue(), metadata


def test_scores_give_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the reference, sentencepiece, is not installed")
    plain = [text for text in CORPUS if "\0" not in text and "<s>" not in text and "<unk>" not in text]
    train = sentencepiece.SentencePieceTrainer.train
    proto, metadata = sentencepiece_metadata(train, [line for text in plain for line in text.split("\n")] * 3)
    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    tokenizer, exported = build(metadata, tmp_path)
    assert exported.token_count == model.get_piece_size()
    whole, chooser = "".join(plain), random.Random(0)
    starts = [chooser.randrange(len(whole)) for _ in range(500)]
    for text in [*plain, *(whole[start : start + chooser.randrange(1, 40)] for start in starts)]:
        ids = model.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == model.decode(ids).replace("\u2047", "<unk>")
