"""What drafts that read the target cost: one proposal of DFlash, EAGLE-3 and MTP against one step of the target.

The drafts are random, of the target's shape, written in their published formats and exported with it, so that nearly
every round is rejected and the same work is done each time: k draft tokens, one pass of the target over k + 1 rows. All
sides take turns; a proposal is the whole time of a round's `propose`, with the target's embed and head that it uses; a
step is the target's own in plain decoding in the same repeat. Host share is the part of the decode time spent outside
ONNX Runtime.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from common import Json, Record, Spread, benchmark_parser, interleave, ratios, table
from ours import OurRun, decode
from random_drafts import write_dflash, write_eagle, write_with_mtp

from oxidize.cli.main import run
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import Drafter, Proposal
from oxidize.runtime.engine import Engine, EngineOptions
from oxidize.runtime.session import RuntimeOptions

_PLAIN = "plain"
_MOST = {"dflash": 7}  # draft tokens; a block of eight has no more
_BLOCK = 8


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the target")
    parser.add_argument("--precision", default="int4", choices=("int4", "fp32"))
    parser.add_argument("--threads", type=int, default=0, help="0 (default): one per physical core")
    parser.add_argument("--spin", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 2, 4, 7])
    parser.add_argument("--tokens", type=int, default=32, help="tokens per run (default 32)")
    return parser.parse_args()


def make_bundle(arguments: argparse.Namespace, folder: Path) -> Path:
    """The target with all three drafts."""
    config = json.loads((arguments.target / "config.json").read_text(encoding="utf-8"))
    target = write_with_mtp(folder / "target", arguments.target)
    drafts = [write_dflash(folder / "dflash", config, block=_BLOCK), write_eagle(folder / "eagle3", config)]
    options = ["-o", str(folder / "bundle"), "--precision", arguments.precision, "--no-eval"]
    named = [option for draft in drafts for option in ("--draft-model", str(draft))]
    if run(["export", str(target), *options, *named]) != 0:
        raise SystemExit("the export failed, see above")
    return folder / "bundle"


class Stopwatch:
    """Times the proposals of a drafter until it is stopped; seconds a proposal."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._seconds, self._count = drafter, 0.0, 0
        self._propose = drafter.propose
        drafter.propose = self._timed

    def _timed(self, *arguments: Any) -> Proposal:
        start = perf_counter()
        proposal = self._propose(*arguments)
        if proposal.tokens:
            self._seconds, self._count = self._seconds + perf_counter() - start, self._count + 1
        return proposal

    def stop(self) -> float:
        self._drafter.propose = self._propose
        return self._seconds / max(1, self._count)


def measure(engine: Engine, arguments: argparse.Namespace) -> dict[str, list[tuple[OurRun, float]]]:
    """Runs of plain decoding and of every draft at every k, taking turns, with the seconds of a proposal."""
    prompt = engine.encode_chat([{"role": "user", "content": "Write a long story about a lighthouse."}])
    sides = {_PLAIN: (SpeculativeDecoder(engine.target), SpeculativeConfig(0, arguments.tokens))}
    for drafter in engine.decoder.drafters:
        decoder = SpeculativeDecoder(engine.target, drafter)
        for k in arguments.draft_tokens:
            if k <= _MOST.get(drafter.name, k):
                config = SpeculativeConfig(k, arguments.tokens, 0.0, adaptive=False)
                sides[f"{drafter.name}, k={k}"] = (decoder, config)

    def once(decoder: SpeculativeDecoder, config: SpeculativeConfig) -> tuple[OurRun, float]:
        engine.target.cache.rewind_to(0, 0)
        watches = [Stopwatch(drafter) for drafter in decoder.drafters]
        run = decode(decoder, prompt, config)
        return run, sum(watch.stop() for watch in watches)

    runs = {name: lambda side=side: once(*side) for name, side in sides.items()}
    interleave(runs, 1, "warm-up")
    return interleave(runs, arguments.repeats)


def report(runs: dict[str, list[tuple[OurRun, float]]]) -> Json:
    """Print the table; return what goes into the result line."""
    steps = [found.timing.seconds / found.timing.tokens for found, _ in runs.pop(_PLAIN)]
    rows, results = [("draft", "proposal / step", "host share of a round %", "accepted")], {}
    for name, found in runs.items():
        cost = Spread.of(ratios([seconds for _, seconds in found], steps))
        host = Spread.of([run.host_share for run, _ in found])
        accepted = found[0][0].stats.acceptance_rate
        rows.append((name, cost.text(), host.text(1, 100), f"{accepted:.2f}"))
        results[name] = {"proposal_per_step": cost, "host_share": host, "acceptance_rate": accepted}
    print(f"one step {Spread.of(steps).text(2, 1e3)} ms\n{table(rows)}")
    return {"step_seconds": Spread.of(steps), "drafts": results}


def main() -> None:
    arguments = parse_arguments()
    record = Record(arguments)
    with tempfile.TemporaryDirectory() as folder:
        arguments.bundle = make_bundle(arguments, Path(folder))
        options = RuntimeOptions("cpu", arguments.threads, arguments.spin)
        engine = Engine.open(arguments.bundle, EngineOptions(options, draft=("dflash", "eagle3", "mtp")))
        results = report(measure(engine, arguments))
        print(f"written to {record.write('drafts', results)}")


if __name__ == "__main__":
    main()
