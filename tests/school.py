"""A tiny target, drafts that were taught its texts, and how well each is accepted once exported and run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from distil import Lesson, Loss, Student, dflash_loss, eagle_loss, prepare_lesson, train, write_lively_target
from draft_checkpoints_dflash import VARIANTS, weights_of, write_dflash
from draft_checkpoints_eagle import EAGLE_VARIANTS, eagle_shapes, eagle_tensors, write_config
from safetensors.numpy import save_file

from oxidize.cli.main import run
from oxidize.runtime.decoder import SpeculativeConfig
from oxidize.runtime.drafters.reader import RowReader
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.session import RuntimeOptions

LENGTH, BLOCK, MASK = 80, 5, 310
DFLASH: dict[str, Any] = {
    **VARIANTS["qwen3"],
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4]},
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "max_window_layers": 2,
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
}
DFLASH2: dict[str, Any] = {
    **DFLASH,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        **DFLASH["dflash_config"],
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.7,
        "selector_rank": 12,
        "selector_top_k": 5,
    },
}
EAGLE: dict[str, Any] = {
    **EAGLE_VARIANTS["specforge"].config,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
    "head_dim": 16,
    "rope_theta": 10000.0,
}
Tensors = Mapping[str, np.ndarray]
Damage = Callable[[RowReader], None]


def fixed(k: int, count: int = LENGTH) -> SpeculativeConfig:
    return SpeculativeConfig(k, count, 0.0, strict_mode=True, adaptive=False)


def open_engine(target: Path, draft: Path | None = None, own: str = "none") -> Engine:
    """Export and open the target, with a draft of a published format or one of its `own`."""
    name = draft.name if draft is not None else own
    out = target.parent / f"bundle-{target.name}-{name}"
    arguments = ["export", str(target), "-o", str(out), "--precision", "fp32", "--no-eval"]
    assert run([*arguments, *(["--draft-model", str(draft)] if draft is not None else [])]) == 0
    return Engine.open(out, EngineOptions(RuntimeOptions(threads=1), draft=name, exact=True))


@dataclass(frozen=True)
class School:
    """A target, and its greedy continuations `plain` of a few prompts."""

    root: Path
    target: Path
    prompts: list[list[int]]
    plain: list[list[int]]

    @property
    def texts(self) -> list[list[int]]:
        """Prompts and continuations."""
        return [[*prompt, *text] for prompt, text in zip(self.prompts, self.plain, strict=True)]

    def stages(self, student: Student, taps: Sequence[int], loss: Loss, steps: Sequence[int]) -> list[Tensors]:
        """The student's tensors after so many steps each."""
        lesson, saved, done = self._lesson(taps), [], 0
        for count in steps:
            train(student, lesson, loss, count - done)
            saved.append(student.saved())
            done = count
        return saved

    def _lesson(self, taps: Sequence[int]) -> Lesson:
        return prepare_lesson(self.target, self.texts, taps)


def found_school(root: Path, uneven_norm: bool = False) -> School:
    """The target, and texts of it that do not just repeat themselves: those are learnt without reading the rows.

    uneven_norm: see `write_lively_target`.
    """
    target = write_lively_target(root / "target", uneven_norm=uneven_norm)
    decoder = open_engine(target).decoder
    decoder.config = fixed(0)
    prompts = np.random.default_rng(0).integers(3, 300, (6, 4)).tolist()
    plain = [decoder.generate(prompt) for prompt in prompts]
    assert min(len(set(text)) for text in plain) > 10
    return School(root, target, prompts, plain)


@dataclass(frozen=True)
class Graduate:
    """A draft at the stages of its training; `write` puts config and tensors into a folder as they are published."""

    school: School
    kind: str
    k: int
    config: Mapping[str, Any]
    stages: Sequence[Tensors]
    write: Callable[[Path, Mapping[str, Any], Tensors], object]

    def engine(self, name: str, stage: int = -1, config: Mapping[str, Any] | None = None) -> Engine:
        """Written, exported and opened. config: replaces keys of the draft's config.json."""
        folder = self.school.root / f"{self.kind}-{name}"
        self.write(folder, {**self.config, **(config or {})}, self.stages[stage])
        return open_engine(self.school.target, folder)

    def acceptance(
        self, name: str, stage: int = -1, config: Mapping[str, Any] | None = None, damage: Damage | None = None
    ) -> float:
        """Accepted per proposed over all prompts, none of whose texts may change. damage: done to the drafter."""
        decoder = self.engine(name, stage, config).decoder
        decoder.config = fixed(self.k)
        (drafter,) = decoder.drafters
        assert isinstance(drafter, RowReader)
        if damage is not None:
            damage(drafter)
        drafted = accepted = 0
        for prompt, plain in zip(self.school.prompts, self.school.plain, strict=True):
            assert decoder.generate(prompt) == plain
            drafted += decoder.stats.draft_tokens
            accepted += decoder.stats.accepted_draft_tokens
        assert drafted > LENGTH
        return accepted / drafted


def teach_dflash(school: School, steps: Sequence[int]) -> Graduate:
    """One that uses the target's ends."""
    return _teach_block(school, steps, "dflash", DFLASH)


def teach_dflash2(school: School, steps: Sequence[int]) -> Graduate:
    """The same with convolutions, which let everything pass at first, and a selector of paths."""
    return _teach_block(school, steps, "dflash2", DFLASH2)


def _teach_block(school: School, steps: Sequence[int], kind: str, config: Mapping[str, Any]) -> Graduate:
    def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
        write_dflash(folder, config, tensors=tensors)

    start = weights_of(config, 0)
    for name, values in start.items():
        if name.endswith("base_kernel"):
            values[:, 0] += 1
    stages = school.stages(Student(config, start), config["dflash_config"]["target_layer_ids"], dflash_loss, steps)
    return Graduate(school, kind, BLOCK - 1, config, stages, write)


def teach_eagle(school: School, steps: Sequence[int]) -> Graduate:
    """One whose vocabulary are the tokens of the texts, with a head and a d2t of its own."""
    ids = np.unique(school.texts)
    config = {**EAGLE, "draft_vocab_size": len(ids)}
    names = {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(config["vocab_size"]), ids)}

    def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
        folder.mkdir()
        write_config(folder, config)
        save_file({**tensors, **names}, folder / "model.safetensors", {"format": "pt"})

    variant = replace(EAGLE_VARIANTS["specforge"], config=config)
    start = {name: eagle_tensors(variant)[name] for name in eagle_shapes(variant)}
    taps = EAGLE["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    stages = school.stages(Student({**config, "ids": ids}, start), taps, eagle_loss, steps)
    return Graduate(school, "eagle3", 2, config, stages, write)
