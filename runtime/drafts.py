"""From the names of drafts to drafters: lookup, the bundle's own drafts, other bundles; tokenizers are compared."""

from collections.abc import Sequence
from pathlib import Path

from .bundle import Bundle, HashCheck, open_bundle, open_draft
from .drafters.base import Drafter
from .drafters.draft_model import DraftModel
from .drafters.ngram import NgramDrafter
from .errors import UsageError
from .manifest import DraftEntry
from .session import RuntimeOptions
from .target import Target


def open_drafters(
    bundle: Bundle,
    names: Sequence[str],
    options: RuntimeOptions,
    cache: Path | None,
    target: Target | None = None,
    mtp: bool = True,
    force: bool = False,
) -> tuple[Drafter, ...]:
    """The drafters of these names, in order: "ngram", names of drafts inside the bundle, folders of other bundles.

    "auto" stands for lookup and the bundle's first draft, "none" for nothing; `mtp` false leaves MTP heads out of
    "auto", and `force` brings in drafts that were made for another target, which are refused otherwise. Drafts that
    read the target's rows share the embed and head of `target`; without one they open their own.
    Raises UsageError for an unknown name and for a draft with another vocabulary.
    """
    usable = [draft for draft in bundle.manifest.drafts if mtp or draft.kind != "mtp"]
    drafts = [draft.name for draft in usable if force or mismatch(draft) is None]
    standing = {"none": [], "auto": ["ngram", *drafts[:1]]}
    wanted = [each for name in names for each in standing.get(name, [name])]
    for draft in bundle.manifest.drafts:
        if draft.name in wanted and draft.kind == "mtp" and not mtp:
            raise UsageError(f"--no-mtp and --draft-model {draft.name} contradict each other; leave one of them out")
        if draft.name in wanted and mismatch(draft) and not force:
            raise UsageError(f"draft {draft.name!r} was {mismatch(draft)}; --force-dflash uses it all the same")
    return tuple(_open(bundle, name, options, cache, target) for name in dict.fromkeys(wanted))


def mismatch(draft: DraftEntry) -> str | None:
    """For what other target a draft of a bundle was made, if it was forced upon this one."""
    return draft.neural.mismatch if draft.neural is not None else None


def _open(bundle: Bundle, name: str, options: RuntimeOptions, cache: Path | None, target: Target | None) -> Drafter:
    if name == "ngram":
        return NgramDrafter()
    inside = {draft.name: draft for draft in bundle.manifest.drafts}
    folder = Path(name)
    if name not in inside and not (name and folder.exists()):
        known = ", ".join(["none", "ngram", *inside])
        raise UsageError(f"no draft called {name!r} in the bundle and no folder of that name; known here: {known}")
    if name in inside and inside[name].neural is not None:
        from .drafters.neural import open_neural

        return open_neural(bundle, inside[name], target or Target(bundle, options), options)
    draft = open_draft(bundle, inside[name]) if name in inside else open_bundle(folder)
    check_same_tokenizer(bundle, draft)
    check = HashCheck(draft, cache)
    model = Target(draft, options)
    check.result()
    return DraftModel(model, name=name if name in inside else folder.resolve().name)


def check_same_tokenizer(target: Bundle, draft: Bundle) -> None:
    """A draft model must speak the target's vocabulary, id for id; names prove nothing."""
    ours, theirs = target.manifest, draft.manifest
    if (ours.tokenizer.vocab_sha256, ours.model.token_count) == (
        theirs.tokenizer.vocab_sha256,
        theirs.model.token_count,
    ):
        return
    raise UsageError(
        f"the draft's vocabulary ({theirs.model.token_count} tokens, {theirs.tokenizer.vocab_sha256[:8]}) is not the "
        f"target's ({ours.model.token_count} tokens, {ours.tokenizer.vocab_sha256[:8]}); "
        "use a draft with the same tokenizer, or --draft-model none"
    )
