"""Drafts from published file formats, exported beside their target and run: the text is that of plain decoding."""

import json
from pathlib import Path

import onnx
import pytest
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dflash import DFLASH2, write_dflash
from draft_checkpoints_eagle import write_eagle
from draft_checkpoints_mtp import head_weights, write_mtp_checkpoint

from oxidize.cli.main import run
from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.request import Request
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions

OPTIONS = RuntimeOptions(threads=1)
# The targets that the drafts' writers have in mind: width 64, 320 rows of logits, and so many layers.
LAYERS = {"dflash": 9, "dflash2": 9, "eagle3": 8}
PROMPT = "The quick brown fox jumps over the lazy dog. The quick"


def export(tmp_path: Path, kind: str, precision: str = "fp32") -> Path:
    """A bundle of a random target with a random draft of this kind."""
    target, out = tmp_path / "target", tmp_path / "bundle"
    arguments = ["export", str(target), "-o", str(out), "--precision", precision, "--no-eval"]
    if kind == "mtp":
        write_mtp_checkpoint(target, "qwen3", head_weights("qwen3", "mtp"))
    else:
        layers = LAYERS[kind]
        shape = {"num_hidden_layers": layers, "max_window_layers": layers, "vocab_size": 320, "head_dim": 16}
        write_hf_checkpoint(target, {**VARIANTS["qwen3"], **shape})
        variant = {"dflash": "qwen3", "dflash2": DFLASH2, "eagle3": "specforge"}[kind]
        writer = write_eagle if kind == "eagle3" else write_dflash
        arguments += ["--draft-model", str(writer(tmp_path / kind, variant))]
    assert run(arguments) == 0
    return out


@pytest.fixture(scope="module", params=["dflash", "dflash2", "eagle3", "mtp"])
def bundle(request, tmp_path_factory) -> Path:
    return export(tmp_path_factory.mktemp(request.param), request.param)


def texts(bundle: Path, draft: str, k: int, temperature: float, prompts=(PROMPT,)) -> tuple[list[str], Engine]:
    engine = Engine.open(bundle, EngineOptions(OPTIONS, draft=draft, exact=True))
    config = SpeculativeConfig(k, 40, 0.0, strict_mode=True, adaptive=False)
    request = Request(config, SamplingParams(temperature, seed=7))
    answers = ["".join(delta.text for delta in engine.stream(engine.encode(prompt), request)) for prompt in prompts]
    return answers, engine


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_untrained_draft_never_changes_the_text(bundle, temperature):
    """Every k, and a second prompt on the same decoder."""
    name = json.loads((bundle / "manifest.json").read_text())["drafts"][0]["name"]
    prompts = (PROMPT, PROMPT + " brown", "x")
    plain, _ = texts(bundle, "none", 0, temperature, prompts)
    for k in range(1, 8):
        found, engine = texts(bundle, name, k, temperature, prompts)
        assert found == plain, k
        assert engine.stats.draft_tokens > 0
        assert engine.stats.drafter == name


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_dflash2_at_other_precisions(precision, tmp_path):
    bundle = export(tmp_path, "dflash2", precision)
    for temperature in (0.0, 0.9):
        plain, _ = texts(bundle, "none", 0, temperature)
        for k in (1, 4, 7):
            found, engine = texts(bundle, "dflash2", k, temperature)
            assert found == plain, (temperature, k)
            assert engine.stats.draft_tokens > 0


def test_inspect_shows_the_draft(bundle, capsys):
    assert run(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "draft " in shown
    assert "reads " in shown
    (draft,) = json.loads((bundle / "manifest.json").read_text())["drafts"]
    assert all(f"{graph['file']}: {graph['role']}" in shown for graph in draft["graphs"])


def test_a_draft_holds_no_copy_of_the_targets_tables(bundle):
    """Only its own weights, by file size and by initializer names; it runs the target's embed and head sessions."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    (draft,) = manifest["drafts"]
    table = manifest["model"]["vocab_size"] * manifest["model"]["hidden_size"] * 4
    names = [tensor.name for tensor in onnx.load_model(bundle / draft["graphs"][-1]["file"]).graph.initializer]
    assert not any("embed_tokens" in name for name in names)
    if draft["neural"]["draft_vocab_size"] is None:
        assert not any("lm_head" in name for name in names)
    own = sum(manifest["files"][name]["size"] for name in {data for graph in draft["graphs"] for data in graph["data"]})
    tensors = sum(
        tensor.ByteSize()
        for graph in draft["graphs"]
        for tensor in onnx.load_model(bundle / graph["file"]).graph.initializer
    )
    assert own < tensors + table  # both tables would be two more
