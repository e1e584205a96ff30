"""Prompt in, text deltas out: a bundle with its tokenizer, target, drafters and defaults."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .bundle import Bundle, HashCheck, open_bundle, open_draft
from .chat import ChatTemplate
from .decoder import SpeculativeConfig, SpeculativeDecoder, check_prompt
from .drafters.base import Drafter
from .drafters.ngram import NgramDrafter
from .errors import UsageError
from .loop import Emission
from .sampling import SamplingParams
from .session import RuntimeOptions
from .stats import SpeculativeStats
from .target import Target
from .text import Detokenizer, StopStrings, Tokenizer


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to open a bundle.

    draft: "auto" (the bundle's own draft, else n-gram), "ngram", "none", a draft's name inside the bundle, or the
        path of another bundle.
    exact: never run a pass of fewer than two rows, see `Target`.
    cache: a folder for what is worth remembering between runs.
    """

    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    draft: str = "auto"
    exact: bool = False
    cache: Path | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer: new text, the tokens behind it, how many were drafted, and at the end the reason."""

    text: str
    tokens: tuple[int, ...]
    accepted: int
    finish_reason: str | None


class Engine:
    """Generates text from one bundle, one request at a time."""

    def __init__(self, bundle: Bundle, options: EngineOptions) -> None:
        check = HashCheck(bundle, options.cache)
        self.bundle = bundle
        self.target = Target(bundle, options.runtime, floor=2 if options.exact else 1)
        drafter = open_drafter(bundle, options)
        self.tokenizer = Tokenizer.load(bundle.folder, bundle.manifest.tokenizer)
        self.has_template = bundle.manifest.tokenizer.chat_template is not None
        self.decoder = SpeculativeDecoder(self.target, drafter)
        check.result()

    @classmethod
    def open(cls, folder: str | Path, options: EngineOptions | None = None) -> "Engine":
        """Open the bundle in `folder`."""
        return cls(open_bundle(folder), options or EngineOptions())

    @property
    def stats(self) -> SpeculativeStats:
        """Of the last request."""
        return self.decoder.stats

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a raw prompt."""
        return self.tokenizer.encode(prompt)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Tokens of a conversation, rendered with the checkpoint's template, the answer's beginning included."""
        template = ChatTemplate.load(self.bundle.folder, self.bundle.manifest.tokenizer)
        text = template.render(messages, add_generation_prompt=True, tools=tools)
        return self.tokenizer.encode(text, add_special=False)

    def stream(
        self,
        prompt: Sequence[int],
        config: SpeculativeConfig | None = None,
        params: SamplingParams | None = None,
        stops: Sequence[str] = (),
    ) -> Iterator[Delta]:
        """The answer as it is made, one Delta per round; the last one has a finish_reason."""
        config = config or self.decoder.config
        config = replace(config, max_new_tokens=self._room(prompt, config.max_new_tokens))
        eos = self.bundle.manifest.generation.eos_token_ids
        text = _TextState(Detokenizer(self.tokenizer), StopStrings(stops), frozenset(eos))
        for emission in self.decoder.stream(prompt, params, eos, config):
            delta = text.push(emission)
            yield delta
            if delta.finish_reason is not None:
                return

    def _room(self, prompt: Sequence[int], wanted: int) -> int:
        check_prompt(prompt, self.target.context)
        return min(wanted, self.target.context - len(prompt))


class _TextState:
    """Turns token blocks into text deltas; how the tokens were cut into blocks leaves no trace in the text."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, eos: frozenset[int]) -> None:
        self._detokenizer, self._stops, self._eos = detokenizer, stops, eos

    def push(self, emission: Emission) -> Delta:
        pieces: list[str] = []
        for index, token in enumerate(emission.tokens):
            if token in self._eos:
                break
            text, stopped = self._stops.push(self._detokenizer.push([token]))
            pieces.append(text)
            if stopped:
                tokens = emission.tokens[: index + 1]
                return Delta("".join(pieces), tokens, min(emission.accepted, len(tokens)), "stop")
        reason = emission.finish_reason
        if reason is not None:
            last, stopped = self._stops.push(self._detokenizer.flush())
            pieces.append(last if stopped else last + self._stops.flush())
            reason = "stop" if stopped else reason
        return Delta("".join(pieces), emission.tokens, emission.accepted, reason)


def open_drafter(bundle: Bundle, options: EngineOptions) -> Drafter | Target | None:
    """The drafter that `options.draft` names."""
    named = {draft.name: draft for draft in bundle.manifest.drafts}
    choice = options.draft
    if choice == "none":
        return None
    if choice == "auto":
        choice = next(iter(named), "ngram")
    if choice == "ngram":
        return NgramDrafter()
    folder = Path(choice)
    if choice not in named and not folder.exists():
        known = ", ".join(["none", "ngram", *named])
        raise UsageError(f"no draft called {choice!r} in the bundle and no folder of that name; known here: {known}")
    draft = open_draft(bundle, named[choice]) if choice in named else open_bundle(folder)
    check_same_tokenizer(bundle, draft)
    check = HashCheck(draft, options.cache)
    model = Target(draft, options.runtime)
    check.result()
    return model


def check_same_tokenizer(target: Bundle, draft: Bundle) -> None:
    """A draft model must speak the target's vocabulary, id for id; names prove nothing."""
    ours, theirs = target.manifest, draft.manifest
    if ours.tokenizer.vocab_sha256 == theirs.tokenizer.vocab_sha256:
        return
    raise UsageError(
        f"the draft's vocabulary ({theirs.model.token_count} tokens, {theirs.tokenizer.vocab_sha256[:8]}) is not the "
        f"target's ({ours.model.token_count} tokens, {ours.tokenizer.vocab_sha256[:8]}); "
        "use a draft with the same tokenizer, or --draft-model none"
    )
