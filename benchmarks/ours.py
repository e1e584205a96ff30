"""This project's side of a comparison: engines from command-line options, and one timed decode."""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter

from common import Timing

from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.sampling import SamplingParams
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.stats import SpeculativeStats


@dataclass(frozen=True, slots=True)
class OurRun:
    """One timed decode of ours. `total_s` is the whole call: what was left of the prompt and the first round too."""

    timing: Timing
    total_s: float
    stats: SpeculativeStats

    @property
    def host_share(self) -> float:
        """The part of the decode time that was spent outside ONNX Runtime."""
        return self.stats.host_ms * 1e6 / self.stats.decode_ns


def runtime_options(arguments: argparse.Namespace) -> RuntimeOptions:
    """How sessions run; on the CPU, where the yardsticks run too."""
    return RuntimeOptions("cpu", arguments.threads, arguments.spin)


def open_engine(arguments: argparse.Namespace, draft: str = "none", exact: bool = False) -> Engine:
    """The engine of --bundle."""
    return Engine.open(arguments.bundle, EngineOptions(runtime_options(arguments), draft, exact))


def encode(engine: Engine, prompt: str, answer: str = "") -> list[int]:
    """Tokens of a prompt as `oxidize run` would read it (in the chat template, if any), and of the answer begun."""
    messages = [{"role": "user", "content": prompt}]
    tokens = engine.encode_chat(messages) if engine.has_template else engine.encode(prompt)
    return tokens + (engine.tokenizer.encode(answer, add_special=False) if answer else [])


def decode(
    decoder: SpeculativeDecoder,
    prompt: Sequence[int],
    config: SpeculativeConfig,
    params: SamplingParams | None = None,
    eos: Collection[int] = (),
) -> OurRun:
    """Generate once; timed are the rounds after the first, which belongs to the prompt."""
    began = perf_counter()
    emissions = decoder.stream(prompt, params, eos, config)
    first = next(emissions)
    started = perf_counter()
    rest = [emission.tokens for emission in emissions]
    ended = perf_counter()
    ids = tuple(chain(first.tokens, *rest))
    timing = Timing(ended - started, len(ids) - len(first.tokens), ids)
    return OurRun(timing, ended - began, decoder.stats)
