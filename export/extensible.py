"""A bundle as a target for more drafts: what it tells of itself, and which drafts fit it."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oxidize.runtime.errors import BundleError, UnsupportedModelError, UsageError
from oxidize.runtime.manifest import GraphEntry, Manifest, load_manifest, sha256_of, verify_hashes

from .bundle import DRAFTS_FOLDER, AnyDraft, check_drafts
from .config import ModelConfig, RopeConfig
from .drafts.base import DraftCheckpoint
from .drafts.mtp import split_mtp
from .drafts.recognise import DraftWishes, open_draft
from .drafts.write import NeuralSource
from .foreign import NO_TAPS, open_model_draft
from .graph import given_values
from .nested import BundleSource, check_vocabulary, vocabulary_of
from .plan import PRECISIONS, ExportPlan
from .source import Checkpoint, open_source

_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class OpenedBundle:
    """A bundle that drafts are to be added to."""

    folder: Path
    manifest: Manifest

    @property
    def bodies(self) -> tuple[GraphEntry, ...]:
        """Its body graphs."""
        return tuple(graph for graph in self.manifest.graphs if graph.role == "body")

    @property
    def dtype(self) -> str:
        """The type of its activations."""
        return next(spec.dtype for spec in self.bodies[0].contract.outputs if spec.name == "hidden")

    @property
    def streams(self) -> tuple[str, ...]:
        """What `roles.body_graph` calls the stream after each layer: the sum that the next layer's norm makes of it."""
        layers = range(1, self.manifest.model.layers)
        return (*(f"layers.{layer}.input_layernorm.sum" for layer in layers), "norm.sum")

    @property
    def wrapped(self) -> bool:
        """Whether its graphs came from elsewhere, so that what happens between their layers is not known."""
        own = all(given_values(self.folder / body.file).issuperset(self.streams) for body in self.bodies)
        return not own or any(name.endswith(".onnx") for name in self.manifest.provenance.files)

    @property
    def shape(self) -> ModelConfig:
        """What readers of drafts ask of the target; what a bundle does not tell, they do not ask."""
        facts = self.manifest.model
        return ModelConfig(
            architecture=facts.architecture,
            hidden_size=facts.hidden_size,
            intermediate_size=0,
            layers=facts.layers,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            vocab_size=facts.vocab_size,
            max_positions=facts.max_positions,
            norm_eps=math.nan,
            rope=RopeConfig(math.nan),
            tie_word_embeddings=False,
            attention_scale=math.nan,
        )

    def plan(self, precision: str | None = None, head_bits: int = 8, context: int | None = None) -> ExportPlan:
        """How drafts are written so that they suit the bundle; None: as the bundle itself."""
        own = self.manifest.precision
        precision = precision or (own if own in PRECISIONS else "int4")
        return ExportPlan(
            precision,
            tuple(dict.fromkeys(body.profile for body in self.bodies)),
            max_positions=context or self.manifest.model.max_positions,
            head_bits=head_bits,
            half_activations=precision == "int4" and self.dtype == "float16",
        )

    def open_draft(
        self, source: str, wishes: DraftWishes, offline: bool = False, mtp: bool = True
    ) -> Checkpoint | DraftCheckpoint:
        """Open a draft as `recognise.open_draft` does; the checkpoint the bundle was made from stands for its MTP head.

        mtp: false takes such a checkpoint as a draft model. Raises UnsupportedModelError where the draft reads what a
        wrapped graph does not give.
        """
        if self.wrapped:
            return open_model_draft(source, offline)
        opened = open_draft(source, self.shape, wishes, offline)
        if isinstance(opened, DraftCheckpoint) or not mtp:
            return opened
        return self._own_head(source, offline) or opened

    def _own_head(self, source: str, offline: bool) -> DraftCheckpoint | None:
        """The MTP head of this bundle's checkpoint; None where there is none, or the model is quite another one."""
        whole, facts = open_source(source, offline), self.manifest.model
        config = whole.config
        theirs = (config.architecture, config.layers, config.hidden_size, config.vocab_size)
        if theirs != (facts.architecture, facts.layers, facts.hidden_size, facts.vocab_size):
            return None
        _, head = split_mtp(whole)
        if head is None:
            return None
        for path in whole.files:
            if path.suffix in _WEIGHTS and self.manifest.provenance.files.get(path.name) != sha256_of(path):
                raise UsageError(
                    f"{source} has an MTP head, but {path.name} is not the file that {self.folder} was made from; "
                    "export that checkpoint again, or pass --no-mtp to add it as a draft model"
                )
        return head

    def check(self, drafts: Sequence[AnyDraft]) -> None:
        """Refuse drafts that cannot be added to this bundle."""
        taken = {draft.name for draft in self.manifest.drafts}
        for draft in drafts:
            if draft.name in taken:
                raise UsageError(
                    f"{self.folder} already has a draft called {draft.name!r}; rename the new one's file or folder, "
                    "or export the target again with the drafts it is to have"
                )
            place = self.folder / DRAFTS_FOLDER / draft.name
            if os.path.lexists(place):
                raise UsageError(f"{place} is in the way and no part of the bundle; move it away first")
            if isinstance(draft, NeuralSource) and draft.plan.dtype != self.dtype:
                raise UsageError(
                    f"draft {draft.name} would compute in {draft.plan.dtype} at precision {draft.plan.precision}, "
                    f"the bundle does in {self.dtype}; leave --precision out"
                )
            if isinstance(draft, BundleSource):
                check_vocabulary(draft.name, vocabulary_of(draft.manifest), vocabulary_of(self.manifest))
            if isinstance(draft, NeuralSource) and self.wrapped:
                raise UnsupportedModelError(f"draft {draft.name} does not fit: {NO_TAPS}")
        check_drafts(drafts)


def open_bundle(folder: Path) -> OpenedBundle:
    """Open a bundle to add drafts to; a BundleError where it is damaged."""
    opened = OpenedBundle(folder, load_manifest(folder))
    if not opened.bodies:
        raise BundleError(f"{folder} has no body graph, so there is nothing to draft for; export the target again")
    verify_hashes(folder, opened.manifest, tuple(body.file for body in opened.bodies))
    return opened
