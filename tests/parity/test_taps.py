"""Taps are the outputs of the layers they are named by: of every layer, as transformers has them, in any order.

Random layers are much alike, so there are also targets whose layers can be told apart by what they add: layer i adds
2**i to one entry of every row and leaves all others alone, so a row says behind which layer it was taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, write_hf_checkpoint
from draft_checkpoints_dflash import VARIANTS as DFLASH_VARIANTS
from draft_checkpoints_dflash import write_dflash
from draft_checkpoints_eagle import write_eagle
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from oxidize.export.bundle import export_bundle
from oxidize.export.drafts.dflash_hf import read_dflash
from oxidize.export.drafts.eagle_hf import open_eagle_hf
from oxidize.export.drafts.write import NeuralSource
from oxidize.export.plan import ExportPlan
from oxidize.export.source import open_source
from oxidize.runtime.bundle import Bundle, open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import DraftContext, Proposal
from oxidize.runtime.drafters.neural import open_neural, row_picker
from oxidize.runtime.drafters.reader import RowReader
from oxidize.runtime.rows import PassRows, Rows
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Target

TOLERANCE = 1e-4
OPTIONS = RuntimeOptions(provider="cpu", threads=1)
PROFILES = ("ort", "std")
FAMILIES = ("llama3", "llama_bias", "mistral_sliding", "qwen2_sliding", "qwen3", "gemma3")
LAYERS, HIDDEN = 7, 64
ANCHOR, NUMBER = 0, 1  # entries of a row: a large value that norms keep in place, and where layers leave their numbers
LARGE = 1e5
END = 28
# (from, to): prefill, single rows, several, then rewinds and replays
SCHEDULE = ((0, 20), (20, 21), (21, 22), (22, 28), (24, 26), (9, 28))


def deep(variant: str, layers: int = LAYERS) -> dict:
    """The variant with more layers, some of them sliding where it has such."""
    return {**VARIANTS[variant], "num_hidden_layers": layers}


def with_profile(bundle: Bundle, profile: str) -> Bundle:
    """The bundle as if only this profile had been exported."""
    graphs = tuple(graph for graph in bundle.manifest.graphs if graph.profile == profile)
    return replace(bundle, manifest=replace(bundle.manifest, graphs=graphs))


def export(source: Path, out: Path, taps: Sequence[int]) -> Bundle:
    export_bundle(open_source(str(source)), ExportPlan("fp32", PROFILES, tuple(taps)), out)
    return open_bundle(out)


def states_of(source: Path, tokens: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """What transformers has behind each layer [n,H], and behind the final norm.

    Its `hidden_states` begin with the embeddings and have the final norm applied to the last, which a hook sees before.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    last = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.no_grad():
        states = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    assert len(states) == len(model.model.layers) + 1 and len(last) == 1
    outputs = [*states[1:-1], last[0]]
    return [output[0].numpy() for output in outputs], states[-1][0].numpy()


# Every layer, beside transformers.


@pytest.mark.parametrize("variant", FAMILIES)
def test_taps_of_every_layer_are_hidden_states_of_transformers(variant: str, tmp_path: Path) -> None:
    source = write_hf_checkpoint(tmp_path / "source", deep(variant))
    tokens = np.random.default_rng(0).integers(3, 300, END).tolist()
    outputs, normed = states_of(source, tokens)
    bundle = export(source, tmp_path / "bundle", range(LAYERS))
    for profile in PROFILES:
        target = Target(with_profile(bundle, profile), OPTIONS)
        assert target.sessions["body"].contract.outputs[1].name == "taps"
        for start, end in SCHEDULE:
            target.cache.rewind_to(0, start)
            target.forward([Rows(0, tokens[start:end], 0)])
            rows = target.rows(0)
            assert rows.taps is not None
            found = rows.taps.reshape(end - start, LAYERS, HIDDEN)
            for layer, output in enumerate(outputs):
                np.testing.assert_allclose(
                    found[:, layer], output[start:end], atol=TOLERANCE, rtol=0, err_msg=f"{profile}, layer {layer}"
                )
            np.testing.assert_allclose(rows.hidden, normed[start:end], atol=TOLERANCE, rtol=0)
        others = [np.abs(a - b).max() for a, b in pairwise(outputs)]
        assert min(others) > 100 * TOLERANCE  # the layers can be told apart


# Layers with numbers.


def write_numbered(folder: Path, variant: str, layers: int = LAYERS, vocabulary: int = 300) -> Path:
    """A checkpoint whose layer i adds 2**i to the entry NUMBER of a row.

    Attention adds nothing. The MLP makes a constant of ANCHOR, which outweighs all other entries in any norm, and puts
    it down times the number; in Gemma a norm follows, so its weight has the number instead.
    """
    write_hf_checkpoint(folder, {**deep(variant, layers), "vocab_size": vocabulary})
    weights = {name: values.copy() for name, values in load_file(folder / "model.safetensors").items()}
    gemma = "gemma" in variant
    weights["model.embed_tokens.weight"][:, ANCHOR] = LARGE
    unit = np.float32(0 if gemma else 1)  # a norm's weight that leaves things as they are
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in weights:
            if name.startswith((f"{prefix}.mlp.", f"{prefix}.self_attn.o_proj.")):
                weights[name][...] = 0
            if name.startswith(prefix) and name.endswith("layernorm.weight"):
                weights[name][...] = unit
        weights[f"{prefix}.mlp.gate_proj.weight"][0, ANCHOR] = 5  # an activation of 5 * 8 is the identity
        weights[f"{prefix}.mlp.up_proj.weight"][0, ANCHOR] = 1
        scale = np.sqrt(HIDDEN)  # of ANCHOR behind a norm
        weights[f"{prefix}.mlp.down_proj.weight"][NUMBER, 0] = 1 if gemma else 2**layer / (5 * scale * scale)
        if gemma:
            weights[f"{prefix}.post_feedforward_layernorm.weight"][NUMBER] = 2**layer / scale - 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def layers_of(taps: np.ndarray, target: Target, tokens: Sequence[int]) -> list[int]:
    """The layer behind which each tap was taken, from rows [n,L*H] of these tokens; -1 where it was behind none."""
    embeds = target.embed_tokens(tokens).read()[0]
    added = taps.reshape(len(taps), -1, HIDDEN) - embeds[:, None]  # [n,L,H]
    numbers, others = added[..., NUMBER], np.delete(added, NUMBER, -1)
    assert not others.any(), "these are not the rows of these tokens"
    sums = np.rint(numbers).astype(int)
    assert np.abs(numbers - sums).max() < 0.05
    assert (sums == sums[0]).all(), "rows differ in where they were taken"
    assert all(total & (total + 1) == 0 for total in sums[0].tolist()), "a layer is missing below"
    return [total.bit_length() - 1 for total in sums[0].tolist()]


@pytest.mark.parametrize("taps", [tuple(range(LAYERS)), (5, 0, 3, 3, 6, 1)], ids=["all", "unordered"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_a_tap_is_behind_its_own_layer(variant: str, taps: tuple[int, ...], tmp_path: Path) -> None:
    bundle = export(write_numbered(tmp_path / "source", variant), tmp_path / "bundle", taps)
    tokens = np.random.default_rng(1).integers(3, 300, END).tolist()
    for profile in PROFILES:
        for floor in (1, 2):
            target = Target(with_profile(bundle, profile), OPTIONS, floor=floor)
            for start, end in SCHEDULE:
                target.cache.rewind_to(0, start)
                target.forward([Rows(0, tokens[start:end], 0)])
                found = target.rows(0).taps
                assert found is not None
                assert layers_of(found, target, tokens[start:end]) == list(taps), (profile, floor, start, end)


@pytest.mark.parametrize("profile", PROFILES)
def test_rows_of_several_requests(profile: str, tmp_path: Path) -> None:
    """Of a pass over many slots each request gets its own rows, without those that fill up."""
    taps = (4, 0, 6)
    bundle = export(write_numbered(tmp_path / "source", "llama2"), tmp_path / "bundle", taps)
    target = Target(with_profile(bundle, profile), OPTIONS, slots=4)
    random = np.random.default_rng(2)
    for lengths in ({0: 5, 1: 9, 3: 1}, {1: 2, 2: 7}, {3: 4}, {0: 1, 1: 1, 2: 1, 3: 1}):
        requests = [Rows(slot, random.integers(3, 300, count).tolist(), 1) for slot, count in lengths.items()]
        target.forward(requests)
        for index, request in enumerate(requests):
            found = target.rows(index).taps
            assert found is not None
            assert layers_of(found, target, request.tokens) == list(taps), (lengths, request.slot)


def test_picked_taps_are_in_the_order_wanted() -> None:
    tapped = (1, 3, 5, 8)
    rows = PassRows(np.zeros((2, 1), np.float32), np.tile(np.repeat(np.array(tapped, np.float32), 3), (2, 1)))
    for wanted in ((1, 3, 5, 8), (8,), (5, 1), (3, 5, 3, 5), (8, 8, 1)):
        picked = np.concatenate(row_picker(wanted, tapped)(rows), 1)
        np.testing.assert_array_equal(picked, np.tile(np.repeat(wanted, 3), (2, 1)))


# Drafts of one bundle.

# Names and taps. All of them together are not all layers, and no draft reads what the target gives as it is.
DRAFTS = {"backwards": (8, 6, 0), "twice": (2, 2, 5, 2), "one": (5,), "eagle3": (1, 4, 6), "edges": (0, 8)}


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A numbered target with drafts of many tap sets."""
    root = tmp_path_factory.mktemp("drafted")
    checkpoint = open_source(str(write_numbered(root / "target", "llama2", 9, 320)))
    plan, drafts = ExportPlan("fp32", PROFILES), []
    for name, taps in DRAFTS.items():
        if name == "eagle3":
            draft = open_eagle_hf(write_eagle(root / name, "specforge"), checkpoint.config)
        else:
            own = {"mask_token_id": 310, "target_layer_ids": list(taps)}
            config = {**DFLASH_VARIANTS["qwen3"], "dflash_config": own}
            draft = read_dflash(write_dflash(root / name, config), checkpoint.config)
        assert draft.config.taps == taps
        drafts.append(NeuralSource(name, draft, plan))
    export_bundle(checkpoint, plan, root / "bundle", drafts)
    return open_bundle(root / "bundle")


class Looked:
    """A drafter whose waiting rows are looked at whenever it is told what is committed."""

    def __init__(self, drafter: RowReader, target: Target, taps: tuple[int, ...]) -> None:
        self._drafter, self._target, self._taps = drafter, target, taps
        self.seen = self.proposed = 0

    def observe(self, committed: Sequence[int]) -> None:
        self._drafter.observe(committed)
        pending, count = self._drafter._pending, len(self._drafter._pending)
        if count == 0:
            return
        width = pending.tensor.shape[1]
        rows = pending.tensor.read().reshape(-1)[pending.offset : pending.offset + count * width].reshape(count, width)
        tokens = committed[pending.position : pending.position + count]
        assert layers_of(rows, self._target, tokens) == list(self._taps), self._drafter.name
        self.seen += count

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        proposal = self._drafter.propose(committed, k, context)
        self.proposed += bool(proposal.tokens)
        return proposal

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("first", DRAFTS)
def test_every_draft_reads_its_own_taps(first: str, profile: str, drafted: Bundle) -> None:
    """Over rounds of real decoding: the draft that proposes, and those whose rows wait all the while."""
    bundle = with_profile(drafted, profile)
    assert bundle.manifest.taps == (0, 1, 2, 4, 5, 6, 8)
    target = Target(bundle, OPTIONS)
    entries = {entry.name: entry for entry in bundle.manifest.drafts}
    drafters = []
    for name in sorted(DRAFTS, key=lambda name: name != first):
        drafters.append(Looked(open_neural(bundle, entries[name], target, OPTIONS), target, DRAFTS[name]))
    config = SpeculativeConfig(4, 24, 0.0, strict_mode=True, adaptive=False)
    decoder = SpeculativeDecoder(target, drafters, config)
    proposed = accepted = 0
    for prompt in ([7], list(range(5, 60)), list(range(5, 40)), [9] * 70):
        decoder.generate(prompt, SamplingParams(temperature=1.0, seed=3))
        proposed, accepted = proposed + decoder.stats.draft_tokens, accepted + decoder.stats.accepted_draft_tokens
    assert drafters[0].proposed > 10
    assert 0 < accepted < proposed
    assert min(drafter.seen for drafter in drafters) > 100
