"""The exact floor on ONNX Runtime: bits do not depend on drafter, k, prefill chunks, batch neighbours or threads."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint

from oxidize.export.build import ExportPlan
from oxidize.export.bundle import export_bundle
from oxidize.export.source import open_source
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeDecoder
from oxidize.runtime.drafters.draft_model import DraftModel
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.errors import UsageError
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target
from oxidize.runtime.text import Tokenizer
from oxidize.runtime.trials import RandomDrafter, fixed, play_together

TOKENS, PROMPT_COUNT = 256, 20
CHUNKS = (1, 2, 7, 33, 64, 65, 129, 512)
PROMPTS = json.loads((Path(__file__).parent.parent / "data/prompts.json").read_text())
BODIES = [("llama2", "ort"), ("gemma3", "ort"), ("mistral_sliding", "ort"), ("llama2", "std"), ("gemma3", "std")]


def open_target(folder, slots=1, floor=2, threads=1):
    return Target(open_bundle(folder), RuntimeOptions("cpu", threads), slots, floor)


def tokens_of(length, seed=0):
    return np.random.default_rng(seed).integers(3, 200, length).tolist()


def prompt_of(index):
    """From 1 to 200 tokens, some of which repeat, so that lookup finds something."""
    length = 1 + (index * 67) % 200
    return (tokens_of(1 + length // 2, seed=index) * 2)[:length]


def read(target, tokens, widths, slot=0):
    """Logits [n,V] of all tokens, read in passes of these widths in turn."""
    target.cache.rewind_to(slot, 0)
    rows, start = [], 0
    for index in range(len(tokens)):
        if start >= len(tokens):
            break
        chunk = tokens[start : start + widths[index % len(widths)]]
        (logits,) = target.forward([Rows(slot, chunk, len(chunk))])
        rows.append(logits.copy())
        start += len(chunk)
    return np.concatenate(rows)


def decode(target, drafter, prompt, k, count=TOKENS, chunk=512, params=None):
    target.cache.rewind_to(0, 0)
    decoder = SpeculativeDecoder(target, drafter, fixed(k if drafter else 0, count))
    stream = decoder.stream(prompt, params, chunk=chunk)
    return [token for emission in stream for token in emission.tokens], decoder.stats


class Bench:
    """A tiny target with every kind of drafter: lookup, itself, another random model, tokens without sense."""

    def __init__(self, folder, other):
        self.folder, self.target = folder, open_target(folder)
        self.drafters = {
            "ngram": NgramDrafter(min_match=1),
            "itself": DraftModel(open_target(folder)),
            "other": DraftModel(open_target(other, floor=1)),
            "random": RandomDrafter(self.target.token_count),
        }
        self.plain = [decode(self.target, None, prompt_of(index), 0)[0] for index in range(PROMPT_COUNT)]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def bench(request, tiny_bundle):
    return Bench(tiny_bundle("llama2", request.param), tiny_bundle("llama2", "fp32", seed=7))


@pytest.mark.parametrize("kind", ["ngram", "itself", "other", "random"])
def test_text_does_not_depend_on_the_draft(bench, kind):
    """Twenty prompts, 256 tokens each, over the growth of the cache; k is 1 to 8 in turn."""
    for index in range(PROMPT_COUNT):
        text, stats = decode(bench.target, bench.drafters[kind], prompt_of(index), 1 + index % 8)
        assert text == bench.plain[index], index
        assert stats.draft_tokens > 0
        assert kind != "itself" or stats.acceptance_rate == 1.0


def test_text_does_not_depend_on_prefill_chunks(bench):
    for index in range(PROMPT_COUNT):
        drafter = bench.drafters["ngram"] if index % 2 else None
        text, _ = decode(bench.target, drafter, prompt_of(index), 3, chunk=CHUNKS[index % len(CHUNKS)])
        assert text == bench.plain[index], index


@pytest.mark.parametrize("k", [1, 3, 8])
def test_text_does_not_depend_on_batch_neighbours(bench, k):
    """Four texts in the same passes, drafted by lookup, by tokens without sense, not at all, by itself."""
    batch, model = open_target(bench.folder, slots=4), open_target(bench.folder, slots=4, floor=1)
    for start in range(0, PROMPT_COUNT, 4):
        prompts = [prompt_of(index) for index in range(start, start + 4)]
        drafters = [NgramDrafter(1), RandomDrafter(batch.token_count, seed=k), None, DraftModel(model, slot=3)]
        texts = play_together(batch, prompts, drafters, k, [TOKENS - 40 * slot for slot in range(4)])
        for text, plain in zip(texts, bench.plain[start:], strict=False):
            assert text == plain[: len(text)], (start, len(text))


def test_sampled_text_does_not_depend_on_the_draft(bench):
    for index in range(0, PROMPT_COUNT, 4):
        params = SamplingParams(0.9, top_p=0.9, seed=index)
        texts = {
            tuple(decode(bench.target, drafter, prompt_of(index), k, 64, params=params)[0])
            for drafter in (None, *bench.drafters.values())
            for k in (1, 8)
        }
        assert len(texts) == 1, index


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize(("variant", "profile"), BODIES)
def test_logits_do_not_depend_on_the_width_of_passes(tiny_bundle, variant, profile, precision):
    """Widths just over the blocks in which kernels take rows, over two growths of the cache."""
    target = open_target(tiny_bundle(variant, precision, (profile,)))
    tokens = tokens_of(500)
    expected = read(target, tokens, [2])
    for widths in ([1], [3], [8], [17], [33, 2], [65], [129], [257], [1, 65, 4, 33, 2], [500]):
        assert np.array_equal(read(target, tokens, widths), expected), widths


@pytest.mark.parametrize("profile", ["ort", "std"])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_logits_do_not_depend_on_batch_neighbours(tiny_bundle, precision, profile):
    """Slots of other lengths and widths, idle ones among them, in one pass; widths over a block included."""
    folder = tiny_bundle("llama2", precision, (profile,))
    batch, single = open_target(folder, slots=4), open_target(folder)
    texts = [tokens_of(300, seed=slot) for slot in range(4)]
    found = [[] for _ in texts]
    ends = [0] * 4
    plans = [(30, 65, 9, 14), (1, 4, 0, 2), (0, 33, 3, 0), (5, 1, 1, 1), (0, 0, 7, 0), (2, 9, 43, 0), (43, 1, 43, 0)]
    for plan in plans:
        ends = [end + width for end, width in zip(ends, plan, strict=True)]
        requests = [
            Rows(slot, texts[slot][ends[slot] - width : ends[slot]], width) for slot, width in enumerate(plan) if width
        ]
        for request, logits in zip(requests, batch.forward(requests), strict=True):
            found[request.slot].append(logits.copy())
    for slot, rows in enumerate(found):
        assert np.array_equal(np.concatenate(rows), read(single, texts[slot][: ends[slot]], [6])), slot


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_logits_do_not_depend_on_the_number_of_threads(tiny_bundle, precision):
    folder, tokens = tiny_bundle("llama2", precision), tokens_of(140)
    one, two, three = (read(open_target(folder, threads=count), tokens, [5, 40]) for count in (1, 2, 3))
    assert np.array_equal(one, two)
    assert np.array_equal(one, three)


@pytest.fixture(scope="module")
def broad_heads(tmp_path_factory):
    """make(profile): a tiny model with heads of 256, as Gemma 3 has them."""
    root = tmp_path_factory.mktemp("broad")
    config = {**VARIANTS["qwen3"], "head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    source = open_source(str(write_hf_checkpoint(root / "source", config)))

    def make(profile):
        if not (root / profile).exists():
            export_bundle(source, ExportPlan("fp32", (profile,)), root / profile)
        return root / profile

    return make


def test_broad_heads_are_exact_in_the_standard_profile(broad_heads):
    target, tokens = open_target(broad_heads("std")), tokens_of(200)
    expected = read(target, tokens, [2])
    for widths in ([1], [3], [60, 10], [129]):
        assert np.array_equal(read(target, tokens, widths), expected), widths


def test_exact_floor_is_refused_where_it_would_not_hold(broad_heads):
    """GroupQueryAttention sums heads above 128 in an order that depends on where a pass ends."""
    with pytest.raises(UsageError, match="std"):
        open_target(broad_heads("ort"))
    open_target(broad_heads("ort"), floor=1)


@pytest.mark.checkpoint
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_smollm2(precision, request):
    """Widths of passes, and four chats in one batch against the same chats alone."""
    folder = request.getfixturevalue(f"smollm2_{precision}")
    tokenizer = Tokenizer.load(folder, open_bundle(folder).manifest.tokenizer)
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(template.format(prompt)) for prompt in PROMPTS[10:14]]
    single, batch = open_target(folder, threads=2), open_target(folder, slots=4, threads=2)
    text = tokenizer.encode(" ".join(PROMPTS))[:129]
    expected = read(single, text, [16])
    for widths in ([129], [65, 2, 33]):
        assert np.array_equal(read(single, text, widths), expected), widths
    drafters = [NgramDrafter(1), RandomDrafter(batch.token_count), None, NgramDrafter(1)]
    answers = play_together(batch, prompts, drafters, 4, [10, 8, 10, 6])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert decode(single, None, prompt, 0, len(answer))[0] == answer
        assert decode(single, RandomDrafter(single.token_count), prompt, 3, len(answer), chunk=17)[0] == answer
