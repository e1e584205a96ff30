"""Wrapped graphs whose cache grows: the model's own logits, exact drafting and rewinding over buffers new to them."""

import json
from pathlib import Path

import numpy as np
import pytest
from genai_folders import BareLoop, write_genai_folder
from optimum_folders import STYLES, Model, write_optimum_folder

from oxidize.export.foreign import wrap_onnx_folder
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.errors import BundleError
from oxidize.runtime.manifest import load_manifest
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target

COUNT = 24


def open_target(folder: Path, floor: int = 1) -> Target:
    return Target(open_bundle(folder), RuntimeOptions(threads=1), floor=floor)


def greedy(target: Target, prompt: list[int], drafter: object = None, k: int = 0, count: int = COUNT) -> list[int]:
    config = SpeculativeConfig(draft_tokens_per_step=k, max_new_tokens=count, min_acceptance_rate=0.0, adaptive=False)
    target.cache.rewind_to(0, 0)
    return SpeculativeDecoder(target, drafter, config).generate(prompt)


def text(size: int) -> list[int]:
    return np.random.default_rng(size).integers(3, 300, size).tolist()


def logits_of(target: Target, tokens: list[int], *sizes: int) -> np.ndarray:
    """Every row [S,V] behind what the cache holds, in passes of these sizes, in turn."""
    rows, at = [], 0
    while at < len(tokens):
        part = tokens[at : at + sizes[len(rows) % len(sizes)]]
        (found,) = target.forward([Rows(0, part, len(part))])
        rows.append(found.copy())
        at += len(part)
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle of every style."""
    root = tmp_path_factory.mktemp("growing")
    for index, style in enumerate(STYLES.values()):
        wrap_onnx_folder(write_optimum_folder(root / f"source{index}", style), root / f"bundle{index}")
    return {name: root / f"bundle{index}" for index, name in enumerate(STYLES)}


@pytest.fixture(params=STYLES)
def wrapped(request: pytest.FixtureRequest, bundles: dict[str, Path]) -> tuple[Model, Path]:
    """The model and the bundle of a style."""
    return Model(STYLES[request.param]), bundles[request.param]


@pytest.fixture(params=[name for name, style in STYLES.items() if style.dtype == "float32"])
def exact(request: pytest.FixtureRequest, bundles: dict[str, Path]) -> Path:
    """A bundle of float32: ONNX Runtime takes a float16 Softmax apart on the CPU, and its sums depend on the length."""
    return bundles[request.param]


@pytest.fixture
def plain(bundles: dict[str, Path]) -> Path:
    """The bundle of the plain style."""
    return bundles["plain"]


@pytest.mark.parametrize("sizes", [(300,), (1,), (5, 1, 2)])
def test_logits_are_the_models(wrapped: tuple[Model, Path], sizes: tuple[int, ...]) -> None:
    """In passes of any size; past the first capacity of the buffers, which grow meanwhile; whatever lies behind."""
    model, target = wrapped[0], open_target(wrapped[1])
    target.cache.fill_stale(np.nan)
    tokens, tolerance = text(300), 2e-2 if model.style.dtype == "float16" else 1e-4
    np.testing.assert_allclose(logits_of(target, tokens, *sizes), model.logits(tokens), atol=tolerance)


def test_greedy_tokens_are_the_models(wrapped: tuple[Model, Path]) -> None:
    """Several prompts on one target; float16 may part from a float32 reference."""
    model, target = wrapped[0], open_target(wrapped[1])
    for prompt in (text(1), text(17), text(2)):
        found = greedy(target, prompt)
        assert len(found) == COUNT
        if model.style.dtype == "float32":
            assert found == model.greedy(prompt, COUNT)


def test_drafts_change_no_token(exact: Path, tiny_bundle) -> None:
    """Under the exact floor: lookups, a model that is always right and one that never is, at every length."""
    target = open_target(exact, floor=2)
    drafts = {"ngram": NgramDrafter(min_match=1), "itself": open_target(exact, 2)}
    drafts["random"] = open_target(tiny_bundle("llama2", seed=7))
    prompt = text(17)
    expected = greedy(target, prompt)
    for k in range(1, 9):
        assert {name: greedy(target, prompt, draft, k) for name, draft in drafts.items()} == dict.fromkeys(
            drafts, expected
        )


def test_rows_do_not_depend_on_the_pass(exact: Path) -> None:
    """Bitwise under the exact floor, although the graph's tensors have another length in every pass."""
    target, tokens = open_target(exact, floor=2), text(150)
    expected = logits_of(target, tokens, 1)
    for sizes in ((2,), (3,), (9, 4), (150,)):
        target.cache.rewind_to(0, 0)
        np.testing.assert_array_equal(logits_of(target, tokens, *sizes), expected)


def test_rewinding_to_every_length(exact: Path) -> None:
    """What comes after it is what it was, and what was forgotten never shows."""
    target, tokens = open_target(exact, floor=2), text(20)
    expected = logits_of(target, tokens, len(tokens))
    for length in reversed(range(len(tokens))):
        logits_of(target, [299] * 5, 5)
        target.cache.rewind_to(0, length)
        target.cache.fill_stale(np.nan)
        np.testing.assert_array_equal(logits_of(target, tokens[length:], 3), expected[length:])


def test_the_context_ends_alike_with_and_without_drafts(tmp_path: Path) -> None:
    """Less room than k + 1 rows is left at the end."""
    wrap_onnx_folder(write_optimum_folder(tmp_path / "source"), tmp_path / "out", context=40)
    target, prompt = open_target(tmp_path / "out"), text(17)
    expected = greedy(target, prompt, count=40 - 17)
    assert len(expected) == 40 - 17
    for k in (1, 4, 8):
        assert greedy(target, prompt, NgramDrafter(min_match=1), k, 40 - 17) == expected


def test_keys_and_values_are_written_in_place(plain: Path) -> None:
    """Nothing but the pass's rows changes in the buffers, and the buffers stay where they are."""
    target = open_target(plain)
    logits_of(target, text(9), 9)
    pointers = [tensor.pointer for tensor in target.cache.tensors]
    target.cache.fill_stale(7.0)
    before = [tensor.read().copy() for tensor in target.cache.tensors]
    logits_of(target, text(3), 3)
    assert [tensor.pointer for tensor in target.cache.tensors] == pointers
    for tensor, old in zip(target.cache.tensors, before, strict=True):
        new = tensor.read()
        assert (new[:, :, 9:12] != 7.0).all()
        new = new.copy()
        new[:, :, 9:12] = old[:, :, 9:12]
        np.testing.assert_array_equal(new, old)


def test_there_is_one_slot(plain: Path) -> None:
    with pytest.raises(BundleError, match="no graphs for 2 slots"):
        Target(open_bundle(plain), RuntimeOptions(threads=1), slots=2)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_fused_attention_over_a_growing_cache(tiny_bundle, tmp_path: Path, precision: str) -> None:
    """As transformers.js has it: GroupQueryAttention, but no buffer that past and present share."""
    source = write_genai_folder(tiny_bundle("llama2", precision), tmp_path / "source")
    bare, facts = BareLoop(source), load_manifest(tiny_bundle("llama2", precision)).model
    (source / "genai_config.json").unlink()
    config = {"model_type": "llama", "hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512, "eos_token_id": 2}))
    wrap_onnx_folder(source, tmp_path / "out")
    target, tokens = open_target(tmp_path / "out"), text(40)
    np.testing.assert_allclose(logits_of(target, tokens, 40), bare.logits(tokens, 0), atol=1e-4)
    prompt = text(17)
    assert greedy(target, prompt) == bare.greedy(prompt, COUNT) == greedy(target, prompt, NgramDrafter(min_match=1), 4)


def test_a_genai_folder_whose_cache_grows(tmp_path: Path) -> None:
    """The other config beside the same kind of graph."""
    source = write_optimum_folder(tmp_path / "source", STYLES["fused"])
    (source / "config.json").unlink()
    decoder = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_size": 16}
    inputs = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    config = {"type": "phi", "vocab_size": 300, "context_length": 90, "eos_token_id": 2}
    config["decoder"] = {**decoder, "num_hidden_layers": 2, "inputs": inputs}
    (source / "genai_config.json").write_text(json.dumps({"model": config}))
    manifest = wrap_onnx_folder(source, tmp_path / "out")
    assert (manifest.model.architecture, manifest.model.max_positions) == ("phi", 90)
    prompt = text(17)
    assert greedy(open_target(tmp_path / "out"), prompt) == Model(STYLES["fused"]).greedy(prompt, COUNT)
