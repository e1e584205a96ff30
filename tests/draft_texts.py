"""A target with drafts of every kind that reads its rows, and texts drafted by them, on any provider."""

from pathlib import Path

from draft_checkpoints_dflash import DFLASH2, write_dflash
from draft_checkpoints_dspark import write_dspark
from draft_checkpoints_medusa import write_medusa
from neural_bundles import DRAFTS, write_neural_bundle

from oxidize.cli.main import run
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import Drafter
from oxidize.runtime.drafts import open_drafters
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Target

KINDS = (*DRAFTS, "dflash2", "dspark", "medusa")
COUNT = 32  # tokens of a text
# The second begins like the first, the third is the shortest there is, and the last fills a wide pass.
PROMPTS = ([5, 6, 7, 8, 9, 10], [5, 6, 7, 30, 31], [4], [3 + 7 * index % 200 for index in range(40)])
PARAMS = (SamplingParams(), SamplingParams(temperature=0.9, seed=7))
# TensorFloat-32 rounds more than a pass's width may matter.
_EXACT = {"cuda": {"use_tf32": "0"}}


def write_bundle_of_all_kinds(folder: Path, profile: str = "std") -> Path:
    """A float32 bundle whose drafts are called as in KINDS."""
    bundle = write_neural_bundle(folder, profile=profile)
    drafts = [
        write_dflash(folder / "dflash2", DFLASH2),
        write_dspark(folder / "dspark"),
        write_medusa(folder / "medusa", "reference"),
    ]
    named = [argument for draft in drafts for argument in ("--draft-model", str(draft))]
    assert run(["export", str(bundle), "-o", str(bundle), *named]) == 0
    return bundle


def open_target_and_drafts(bundle: Path, provider: str, names: tuple[str, ...]) -> tuple[Target, tuple[Drafter, ...]]:
    """The target, in exact mode, and these drafts of it."""
    options = RuntimeOptions(provider, threads=1, provider_options=_EXACT.get(provider, {}))
    opened = open_bundle(bundle)
    target = Target(opened, options, floor=2)
    return target, open_drafters(opened, names, options, None, target)


def assert_texts_are_plain(target: Target, drafter: Drafter, k: int) -> None:
    """One decoder, prompt after prompt, greedy and in strict mode: the texts are those without a draft."""
    for params in PARAMS:
        plain, drafted = (
            SpeculativeDecoder(target, each, SpeculativeConfig(drafts, COUNT, 0.0, strict_mode=True, adaptive=False))
            for each, drafts in ((None, 0), (drafter, k))
        )
        for prompt in PROMPTS:
            expected = _alone(target, plain, prompt, params)
            assert drafted.generate(prompt, params) == expected, (drafter.name, k, params, prompt)
            assert drafted.stats.draft_tokens > 0


def _alone(target: Target, decoder: SpeculativeDecoder, prompt: list[int], params: SamplingParams) -> list[int]:
    target.cache.rewind_to(0, 0)
    return decoder.generate(prompt, params)
