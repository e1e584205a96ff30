"""Tokenizer, detokenizer and stop strings: what comes out depends on ids and text, never on the cuts."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import MARK, SAMPLE, byte_level, sentencepiece

from oxidize.runtime.errors import BundleError, UsageError
from oxidize.runtime.manifest import TokenizerFiles
from oxidize.runtime.text import MAX_STOPS, Detokenizer, StopStrings, Tokenizer
from oxidize.runtime.vocab import vocab_digest

FILES = TokenizerFiles("tokenizer.json", None, "<s>", "</s>", "")


KINDS = {
    "byte-level": Tokenizer(byte_level()),
    "prefix": Tokenizer(sentencepiece()),
    "no-prefix": Tokenizer(sentencepiece(prefix=False)),
    "metaspace": Tokenizer(sentencepiece(metaspace=True)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def pieces_of(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Push `ids` in blocks ended by `cuts` (taken modulo the length), then flush."""
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    detokenizer = tokenizer.detokenizer()
    blocks = [ids[start:end] for start, end in pairwise(bounds)]
    return [*(detokenizer.push(block) for block in blocks), detokenizer.flush()]


@kinds
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_joined_are_the_whole_text_for_any_ids_and_any_cuts(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=31))
    assert "".join(pieces_of(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@kinds
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=40))
@example(text=SAMPLE, cuts=list(range(200)))
@settings(max_examples=100, deadline=None)
def test_no_piece_holds_half_a_character(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = KINDS[kind]
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text, add_special=False)
    pieces = pieces_of(tokenizer, ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


@kinds
def test_text_survives_a_round_trip(kind: str) -> None:
    tokenizer = KINDS[kind]
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE


def test_text_is_emitted_as_soon_as_it_is_certain() -> None:
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode("ab", add_special=False)
    assert [tokenizer.detokenizer().push([i]) for i in ids] == ["a", "b"]
    detokenizer = KINDS["prefix"].detokenizer()
    spelled = ["<0xE2>", "<0x82>", "<0xAC>", "a", MARK + "a"]
    ids = [KINDS["prefix"].token_id(token) or -1 for token in spelled]
    assert [detokenizer.push([i]) for i in ids] == ["", "", "€", "a", " a"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    for kind, spelled in (("byte-level", ["â", "Ĥ"]), ("prefix", ["<0xE2>", "<0x82>"])):
        tokenizer = KINDS[kind]
        ids = [tokenizer.token_id(token) or -1 for token in spelled]
        detokenizer = tokenizer.detokenizer()
        assert detokenizer.push(ids) == ""
        assert detokenizer.flush() == tokenizer.decode(ids) != ""


@pytest.mark.parametrize("kind", ["byte-level", "prefix"])
def test_the_work_per_token_does_not_grow(kind: str) -> None:
    tokenizer = KINDS[kind]
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, ids, skip_special=True) -> str:  # type: ignore[no-untyped-def]
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids, skip_special)

    counting = Counting(tokenizer._backend)
    ids = (tokenizer.encode(SAMPLE, add_special=False) * 200)[:16_000]
    detokenizer = Detokenizer(counting)
    text = "".join([detokenizer.push([i]) for i in ids]) + detokenizer.flush()
    assert decoded <= 3 * len(ids)
    assert text == tokenizer.decode(ids)


def test_special_tokens_are_read_from_text_and_left_out_of_it() -> None:
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode("</s>a<think>", add_special=True)
    assert ids == [0, 1, tokenizer.token_id("a"), tokenizer.token_id("<think>")]
    assert tokenizer.encode("a", add_special=False) == [tokenizer.token_id("a")]
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special=False) == "<s></s>a<think>"
    assert tokenizer.special_ids == {0, 1}


@kinds
def test_token_bytes_add_up_to_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(SAMPLE, add_special=False)
    spelled = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    assert spelled.removeprefix(" ") == SAMPLE
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_vocabulary_is_compared_by_content() -> None:
    tokenizer = KINDS["byte-level"]
    assert tokenizer.vocab_size == max(tokenizer.table) + 1 == len(tokenizer.table)
    assert tokenizer.vocab_sha256() == vocab_digest(dict(reversed(tokenizer.table.items())))
    other = dict(tokenizer.table)
    other[5], other[6] = other[6], other[5]
    assert vocab_digest(other) != tokenizer.vocab_sha256()
    assert vocab_digest({0: "a", 1: "b"}) != vocab_digest({0: "a1:1:b"})


def test_saved_truncation_and_padding_do_not_change_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, FILES)
    assert tokenizer.encode(SAMPLE) == KINDS["byte-level"].encode(SAMPLE)


def test_a_broken_tokenizer_file_is_a_bundle_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, FILES)
    for content in ("{", "[]", json.dumps({"version": "1.0", "model": {"type": "Nonsense"}})):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(BundleError, match="export the bundle again") as caught:
            Tokenizer.load(tmp_path, FILES)
        assert "\n" not in str(caught.value)


def test_a_lone_surrogate_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        KINDS["byte-level"].encode("a\udcffb")


def test_importing_the_module_does_not_import_tokenizers() -> None:
    code = "import sys, oxidize.runtime.text, oxidize.runtime.chat\n"
    code += "sys.exit(len({'tokenizers', 'jinja2'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: read character by character; the first stop that is complete cuts before itself."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


texts = st.text("ab", max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 24), max_size=24))
@settings(max_examples=400, deadline=None)
def test_stop_is_the_same_for_any_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    watcher = StopStrings(stops)
    shown, stopped = "", False
    for start, end in pairwise(bounds):
        more, stopped = watcher.push(text[start:end])
        shown += more
    shown += watcher.flush()
    assert (shown, stopped) == first_stop(text, stops)


@given(text=texts, stops=stop_lists)
@settings(max_examples=200, deadline=None)
def test_only_the_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops)
    shown = ""
    for end in range(1, len(text) + 1):
        more, stopped = watcher.push(text[end - 1 : end])
        shown += more
        if stopped:
            break
        begins = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert shown == text[: end - max(begins, default=0)]


def test_nothing_follows_a_stop() -> None:
    watcher = StopStrings(["END"])
    assert watcher.push("one E") == ("one ", False)
    assert watcher.push("ND two") == ("", True)
    assert watcher.push("three") == ("", True)
    assert watcher.flush() == ""


def test_stops_are_checked() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["a", ""])
    with pytest.raises(UsageError, match="at most 16"):
        StopStrings(["x"] * (MAX_STOPS + 1))
    assert StopStrings(["x"] * MAX_STOPS).push("ax") == ("a", True)
