"""Lets optimum write the graph of a checkpoint this project has no builder for. The door to optimum.

optimum is not installed with the exporter: it needs an older transformers, so it lives in an environment of its own.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from oxidize.runtime.errors import CheckpointError, OxidizeError, UsageError

from .config_hf import CONFIG_NAME
from .source import locate

_TASK = "text-generation-with-past"  # a decoder whose graph takes and gives its cache


@contextmanager
def optimum_folder(source: str, near: Path, offline: bool = False, revision: str | None = None) -> Iterator[Path]:
    """The folder optimum makes of a checkpoint (folder or hub id), in float32; it exists only meanwhile, beside `near`.

    optimum that is not installed is a UsageError, a checkpoint it cannot export a CheckpointError; code that comes with
    a checkpoint is never run.
    """
    export = _load()
    checkpoint, _ = locate(source, offline, revision)
    if not (checkpoint / CONFIG_NAME).is_file():
        raise UsageError(f"{source} has no {CONFIG_NAME}; optimum exports Hugging Face folders only")
    with _scratch(near) as scratch:
        folder = scratch / _name(source)
        _run(export, source, checkpoint, folder)
        yield folder


def _load() -> Callable[..., Any]:
    with _quiet():
        try:
            from optimum.exporters.onnx import main_export  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UsageError(
                f"--exporter optimum needs optimum with its ONNX exporter ({error}); install them in a venv of their "
                "own, for they need transformers below 4.58: pip install 'oxidize-ort[cpu,export,optimum]'"
            ) from None
    return main_export


def _run(export: Callable[..., Any], source: str, checkpoint: Path, folder: Path) -> None:
    try:
        with _quiet():
            export(
                str(checkpoint),
                str(folder),
                task=_TASK,
                dtype="fp32",
                do_validation=False,
                local_files_only=True,
            )
    except Exception as error:  # it raises whatever torch, transformers and its own code run into
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"optimum cannot export {source} ({reason}); see whether it knows the architecture, or take a folder that "
            "somebody else exported"
        ) from error


def _name(source: str) -> str:
    """The last part of a path or hub id."""
    return Path(source).resolve().name if Path(source).exists() else source.rpartition("/")[2]


@contextmanager
def _scratch(near: Path) -> Iterator[Path]:
    """A folder on the disk the bundle will be on."""
    parent = next(path for path in near.absolute().parents if path.exists())
    try:
        made = tempfile.TemporaryDirectory(prefix=".oxidize-", dir=parent)
    except OSError as error:
        raise OxidizeError(f"cannot write beside {near}: {error}; choose another -o") from error
    with made as folder:
        yield Path(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what optimum, transformers and torch say off stdout, and their warnings off altogether."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
