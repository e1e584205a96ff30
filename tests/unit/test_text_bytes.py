"""Bytes to characters: nothing is held longer than half a character, and bad bytes spoil only themselves."""

import io
import random
import re
from pathlib import Path

import pytest
from tiny_tokenizers import MARK, byte_level, sentencepiece

from oxidize.runtime.text import Tokenizer

EMOJI = "👩🏽‍💻🇩🇪👨‍👩‍👧‍👦é你好สวัสดี"
KINDS = {
    "byte-level": Tokenizer(byte_level()),
    "prefix": Tokenizer(sentencepiece()),
    "no-prefix": Tokenizer(sentencepiece(prefix=False)),
    "metaspace": Tokenizer(sentencepiece(metaspace=True)),
}
kinds = pytest.mark.parametrize("kind", KINDS)
fallback_kinds = pytest.mark.parametrize("kind", ["prefix", "no-prefix", "metaspace"])


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    if tokenizer.byte_ids:
        return [tokenizer.byte_ids[byte] for byte in data]
    single = {tokenizer.token_bytes(i): i for i in tokenizer.table if len(tokenizer.token_bytes(i)) == 1}
    return [single[bytes([byte])] for byte in data]


def random_ids(chooser: random.Random, tokenizer: Tokenizer) -> list[int]:
    return [chooser.randrange(tokenizer.vocab_size + 2) for _ in range(chooser.randrange(24))]


def stream(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join([detokenizer.push([i]) for i in ids]) + detokenizer.flush()


@pytest.mark.parametrize(("kind", "lists"), [("prefix", 10_000), ("no-prefix", 2000), ("metaspace", 2000)])
def test_random_id_lists(kind: str, lists: int) -> None:
    tokenizer, chooser = KINDS[kind], random.Random(kind)
    for _ in range(lists):
        ids = random_ids(chooser, tokenizer)
        assert stream(tokenizer, ids) == tokenizer.decode(ids), ids


def test_ten_thousand_random_id_lists_of_a_real_tokenizer(smollm2_gguf: Path, tmp_path: Path) -> None:
    from oxidize.export.source import open_source
    from oxidize.export.tokenizer import write_tokenizer

    files = write_tokenizer(open_source(str(smollm2_gguf)), tmp_path).files
    tokenizer, chooser = Tokenizer.load(tmp_path, files), random.Random(0)
    for _ in range(10_000):
        ids = random_ids(chooser, tokenizer)
        assert stream(tokenizer, ids) == tokenizer.decode(ids), ids


@fallback_kinds
def test_byte_fallback_differs_from_the_package_only_where_a_run_has_good_and_bad_bytes(kind: str) -> None:
    tokenizer, chooser = KINDS[kind], random.Random(kind)
    same = 0
    for _ in range(4000):
        ids = random_ids(chooser, tokenizer)
        if any(mixed(run) for run in runs(tokenizer, ids)):
            continue
        same += 1
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids), ids
    assert same > 400


def runs(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    found = [b""]
    for i in tokenizer.shown(ids):
        if i in tokenizer.byte_of:
            found[-1] += bytes([tokenizer.byte_of[i]])
        else:
            found.append(b"")
    return found


def mixed(run: bytes) -> bool:
    return "\ufffd" in (text := run.decode("utf-8", "replace")) and bool(text.strip("\ufffd"))


@fallback_kinds
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (b"\xe2\x82\xac\xff", "€�"),
        (b"\xff\xe2\x82\xac", "�€"),
        (b"\xe2\x82A", "��A"),
        (b"\xe2\x82", "��"),
        (b"\xed\xa0\x80", "���"),
        (b"\xc0\x80\xf4\x90\x80\x80!", "������!"),
        (b"\xf0\x9f\x98\x80\xf0\x9f\x98", "😀���"),
    ],
)
def test_each_bad_byte_becomes_one_replacement(kind: str, run: bytes, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = byte_tokens(tokenizer, run)
    assert tokenizer.decode(ids) == stream(tokenizer, ids) == text
    behind = [*ids, tokenizer.token_id(MARK + "a") or -1]
    assert tokenizer.decode(behind) == stream(tokenizer, behind) == text + " a"


def test_byte_fallback_decodes_as_sentencepiece_does() -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the reference, sentencepiece, is not installed")
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat and ate"] * 20),
        model_writer=writer,
        vocab_size=280,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=writer.getvalue())
    ours, chooser = KINDS["prefix"], random.Random(1)
    for _ in range(3000):
        data = [chooser.choice([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x41, 0x20, 0xFF]) for _ in range(9)]
        theirs = model.decode([model.piece_to_id(f"<0x{byte:02X}>") for byte in [0x2E, *data]])
        assert ours.decode(byte_tokens(ours, bytes([0x2E, *data]))) == theirs, data


@kinds
def test_all_one_and_two_byte_texts(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = byte_tokens(tokenizer, bytes(range(256)))
    for first in range(256):
        assert stream(tokenizer, [ids[first]]) == tokenizer.decode([ids[first]])
    for first in range(0x7E, 256):
        for second in range(0x7E, 256, 3):
            pair = [ids[first], ids[second]]
            text = stream(tokenizer, pair)
            assert text == tokenizer.decode(pair)
            assert text.encode()


@kinds
def test_a_character_is_shown_with_its_last_byte_however_long_the_run(kind: str) -> None:
    tokenizer = KINDS[kind]
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(byte_tokens(tokenizer, b"."))
    for character in EMOJI * 20:
        *first, last = [detokenizer.push([i]) for i in byte_tokens(tokenizer, character.encode())]
        assert (set(first) <= {""}, last) == (True, character)


@fallback_kinds
def test_bad_bytes_are_not_held_back(kind: str) -> None:
    tokenizer = KINDS[kind]
    detokenizer = tokenizer.detokenizer()
    shown = "".join(detokenizer.push([i]) for i in byte_tokens(tokenizer, b"\xf0\x9f" * 100))
    assert len(shown) == 198


def test_work_in_a_long_run_of_bytes_does_not_grow() -> None:
    handed = 0

    class Counting(Tokenizer):
        def decode(self, ids, skip_special=True) -> str:  # type: ignore[no-untyped-def]
            nonlocal handed
            handed += len(ids)
            return super().decode(ids, skip_special)

    tokenizer = Counting(sentencepiece())
    ids = byte_tokens(tokenizer, ("你" * 5334).encode())
    assert stream(tokenizer, ids) == "你" * 5334
    assert handed <= 3 * len(ids)


@kinds
def test_special_tokens_can_be_shown(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = [tokenizer.token_id(token) or 0 for token in ("a", "</s>", "<s>", "b")]
    detokenizer = tokenizer.detokenizer(frozenset({ids[1]}))
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == "a</s>b"


def test_a_vocabulary_that_only_looks_like_byte_fallback_is_taken_as_it_is() -> None:
    backend = sentencepiece()
    backend.decoder = type(backend.decoder)([])  # spells tokens one after the other
    tokenizer = Tokenizer(backend)
    assert tokenizer.byte_ids == ()
    assert re.sub(" ", "", tokenizer.decode([3, 4])) == "<0x00><0x01>"
