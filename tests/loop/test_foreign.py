"""A wrapped onnxruntime-genai folder gives the tokens of its own graph, plain and drafted."""

from pathlib import Path

import numpy as np
import pytest
from genai_folders import BareLoop, with_rotary_nodes, write_genai_folder

from oxidize.export.foreign import wrap_onnx_folder
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target

COUNT = 24


def open_target(folder: Path, floor: int = 1) -> Target:
    return Target(open_bundle(folder), RuntimeOptions(threads=1), floor=floor)


def greedy(target: Target, prompt: list[int], drafter: object = None, k: int = 0) -> list[int]:
    config = SpeculativeConfig(draft_tokens_per_step=k, max_new_tokens=COUNT, min_acceptance_rate=0.0, adaptive=False)
    target.cache.rewind_to(0, 0)
    return SpeculativeDecoder(target, drafter, config).generate(prompt)


def prompts() -> list[list[int]]:
    return [np.random.default_rng(size).integers(3, 300, size).tolist() for size in (1, 2, 17, 70)]


@pytest.fixture(
    scope="module",
    params=[
        "llama2-fp32",
        "llama2-int4",
        "smollm2-int4",
        "mistral_sliding-fp32",
        "gemma3-int4",
        "llama2-fp16",
        "rotary",
    ],
)
def wrapped(request, tiny_bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder and the bundle made of it."""
    variant, precision = ("llama2", "fp32") if request.param == "rotary" else request.param.split("-")
    root = tmp_path_factory.mktemp("genai")
    change = with_rotary_nodes if request.param == "rotary" else None
    source = write_genai_folder(tiny_bundle(variant, precision), root / "source", change)
    wrap_onnx_folder(source, root / "bundle")
    return source, root / "bundle"


def test_tokens_and_logits_of_its_own_graph(wrapped: tuple[Path, Path]) -> None:
    bare, target = BareLoop(wrapped[0]), open_target(wrapped[1])
    for prompt in prompts():
        assert greedy(target, prompt) == bare.greedy(prompt, COUNT)
        target.cache.rewind_to(0, 0)
        (logits,) = target.forward([Rows(0, prompt, len(prompt))])
        np.testing.assert_array_equal(logits, bare.logits(prompt, 0)[:, : target.token_count])


def test_drafts_change_no_token(wrapped: tuple[Path, Path], tiny_bundle) -> None:
    """Under the exact floor, with lookups, with itself and with a random model."""
    target = open_target(wrapped[1], floor=2)
    drafts = {"ngram": NgramDrafter(min_match=1), "itself": open_target(wrapped[1], 2)}
    drafts["random"] = open_target(tiny_bundle("llama2", seed=7))
    for k, prompt in enumerate(prompts(), start=2):
        plain = greedy(target, prompt)
        assert all(greedy(target, prompt, draft, k) == plain for draft in drafts.values())
