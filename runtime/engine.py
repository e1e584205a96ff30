"""Prompt in, text deltas out: a bundle with its tokenizer, target, drafters and defaults."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .answer import Answer, Delta
from .bundle import Bundle, HashCheck, open_bundle
from .calibration import load_or_calibrate
from .chat import ChatTemplate
from .decoder import SpeculativeConfig, SpeculativeDecoder, Wishes, check_prompt
from .drafts import open_drafters
from .grammar import GrammarCompiler
from .processors import Controls
from .request import Request
from .session import RuntimeOptions
from .stats import SpeculativeStats
from .target import Target
from .text import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to open a bundle.

    draft: one name or several in order of preference: "auto" (lookup and the bundle's first draft), "none", "ngram",
        drafts inside the bundle, folders of other bundles.
    exact: never run a pass of fewer than two rows, see `Target`.
    cache: a folder for what is worth remembering between runs.
    mtp: whether the checkpoint's own MTP head may draft. force: whether drafts made for another target may.
    """

    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    draft: str | Sequence[str] = "auto"
    exact: bool = False
    cache: Path | None = None
    mtp: bool = True
    force: bool = False


class Engine:
    """Generates text from one bundle, one request at a time."""

    def __init__(self, bundle: Bundle, options: EngineOptions) -> None:
        check = HashCheck(bundle, options.cache)
        self.bundle = bundle
        self.target = Target(bundle, options.runtime, floor=2 if options.exact else 1)
        names = [options.draft] if isinstance(options.draft, str) else options.draft
        drafters = open_drafters(bundle, names, options.runtime, options.cache, self.target, options.mtp, options.force)
        self.tokenizer = Tokenizer.load(bundle.folder, bundle.manifest.tokenizer)
        self.has_template = bundle.manifest.tokenizer.chat_template is not None
        check.result()
        wanted = bool(drafters and options.cache)
        calibration = load_or_calibrate(self.target, drafters, options.runtime, options.cache) if wanted else None
        self.decoder = SpeculativeDecoder(self.target, drafters, calibration=calibration)

    @classmethod
    def open(cls, folder: str | Path, options: EngineOptions | None = None) -> "Engine":
        """Open the bundle in `folder`."""
        return cls(open_bundle(folder), options or EngineOptions())

    @property
    def stats(self) -> SpeculativeStats:
        """Of the last answer."""
        return self.decoder.stats

    @property
    def eos(self) -> frozenset[int]:
        """Every token that ends an answer."""
        return frozenset(self.bundle.manifest.generation.eos_token_ids)

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

    def stream(self, prompt: Sequence[int], request: Request | None = None) -> Iterator[Delta]:
        """The answers as they are made, one after the other, one Delta per round.

        The last Delta of each answer has a finish_reason. Raises UsageError for what cannot be asked for, before
        anything is generated.
        """
        request = request or Request()
        config = self._config(prompt, request.config or self.decoder.config)
        controls = self._controls(request)
        grammar = self._grammars.compile(request.grammar) if request.grammar else None
        for choice in range(request.choices):
            wishes = Wishes(controls, grammar and grammar.fork(), request.logprobs, choice)
            yield from self._answer(prompt, request, config, wishes)

    def _answer(
        self, prompt: Sequence[int], request: Request, config: SpeculativeConfig, wishes: Wishes
    ) -> Iterator[Delta]:
        parsers = request.parsers() if request.parsers is not None else ()
        answer = Answer(
            self.tokenizer,
            self.eos,
            request.stops,
            parsers=parsers,
            prompt_tokens=len(prompt),
            choice=wishes.choice,
        )
        for emission in self.decoder.stream(prompt, request.params, self.eos, config, wishes=wishes):
            delta = answer.push(emission)
            if delta.finish_reason is not None:
                self.stats.end(answer.usage.completion_tokens, delta.finish_reason)
            yield delta
            if delta.finish_reason is not None:
                return

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.eos, self.target.token_count)

    def _config(self, prompt: Sequence[int], config: SpeculativeConfig) -> SpeculativeConfig:
        check_prompt(prompt, self.target.context)
        return replace(config, max_new_tokens=min(config.max_new_tokens, self.target.context - len(prompt)))

    def _controls(self, request: Request) -> Controls:
        forms = [self.tokenizer.encode_inside(start + word) for word in request.bad_words for start in ("", " ")]
        words = [tuple(form) for form in forms if form]
        return replace(request.controls, bad_words=(*request.controls.bad_words, *words))
