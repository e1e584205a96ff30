"""The true optimum, where it is installed: checkpoints this project has no builder for, against transformers."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, write_tokenizer

from oxidize.cli.main import run
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.ngram import NgramDrafter
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("optimum") is None,
    reason="optimum is not installed: it needs transformers < 4.58, so this file runs in a venv of its own, with "
    "pip install -e '.[cpu,export,optimum]' pytest",
)
COUNT = 24
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, "hidden_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neox": {**_SMALL, "intermediate_size": 96},  # rotary on a quarter of each head
    "opt": {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64},  # learned positions, ids reshaped before the lookup
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},  # its head reads a reshaped value, tied
    "gemma2": {**_SMALL, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model and the bundle that `oxidize export --exporter optimum` made of its checkpoint."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("optimum")
    ids = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = CONFIG_MAPPING[request.param](**CONFIGS[request.param], **ids)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            torch.nn.init.normal_(weight, 1.0 if "norm" in name or ".ln_" in name else 0.0, 0.1)
    model.save_pretrained(root / "source")
    write_tokenizer(root / "source")
    assert run(["export", str(root / "source"), "-o", str(root / "bundle"), "--exporter", "optimum"]) == 0
    assert sorted(path.name for path in root.iterdir()) == ["bundle", "source"]
    return model, root / "bundle"


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def greedy(target: Target, prompt: list[int], drafter: Any = None, k: int = 0) -> list[int]:
    config = SpeculativeConfig(draft_tokens_per_step=k, max_new_tokens=COUNT, min_acceptance_rate=0.0, adaptive=False)
    target.cache.rewind_to(0, 0)
    return SpeculativeDecoder(target, drafter, config).generate(prompt)


def test_logits_and_drafted_tokens_are_transformers(pair: tuple[Any, Path]) -> None:
    model, bundle = pair
    target = Target(open_bundle(bundle), RuntimeOptions(threads=1), floor=2)
    for size in (1, 2, 17, 70):
        prompt = np.random.default_rng(size).integers(3, VOCAB, size).tolist()
        target.cache.rewind_to(0, 0)
        (logits,) = target.forward([Rows(0, prompt, size)])
        np.testing.assert_allclose(logits, logits_of(model, prompt), atol=1e-4)
        expected = list(prompt)
        for _ in range(COUNT):
            expected.append(int(logits_of(model, expected)[-1].argmax()))
        for k in range(9):
            assert greedy(target, prompt, NgramDrafter(min_match=1) if k else None, k) == expected[size:]


def test_run(pair: tuple[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Plain text and drafted text, by the command."""
    texts = []
    for draft in ("none", "ngram"):
        assert run(["run", str(pair[1]), "the dog", "-n", "24", "--draft-model", draft, "--raw"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()


def test_an_architecture_optimum_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    config = Starcoder2Config(**_SMALL, intermediate_size=96, num_key_value_heads=2, vocab_size=VOCAB)
    Starcoder2ForCausalLM(config).save_pretrained(tmp_path / "source")
    write_tokenizer(tmp_path / "source")
    assert run(["export", str(tmp_path / "source"), "-o", str(tmp_path / "out"), "--exporter", "optimum"]) == 1
    assert "optimum cannot export" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
