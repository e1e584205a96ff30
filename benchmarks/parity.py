"""Logits and greedy text of a float32 bundle against transformers on the same dequantised weights.

    python benchmarks/parity.py SOURCE [--tokens 64] [--profile ort]

Needs torch and transformers. Prints, and appends to results/parity.jsonl, per prompt: the largest absolute difference
of all logits, and whether the greedy texts agree; where they do not, the reference's logit gap at the first difference.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import Record, benchmark_parser

from oxidize.export.build import ExportPlan
from oxidize.export.bundle import export_bundle
from oxidize.export.reference import reference_model
from oxidize.export.source import open_source
from oxidize.runtime.bundle import open_bundle
from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.session import RuntimeOptions
from oxidize.runtime.target import Rows, Target
from oxidize.runtime.text import Tokenizer

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "Translate to German: good morning, how are you today?",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
]


def reference_greedy(model, tokens: list[int], count: int) -> tuple[list[int], list[np.ndarray]]:
    """The reference's own greedy continuation and the logits [V] behind each token."""
    past, inputs, answer, rows = None, tokens, [], []
    for _ in range(count):
        with torch.no_grad():
            output = model(torch.tensor([inputs]), past_key_values=past)
        past, row = output.past_key_values, output.logits[0, -1].numpy()
        rows.append(row)
        answer.append(int(row.argmax()))
        inputs = answer[-1:]
    return answer, rows


def compare(model, target: Target, tokens: list[int], count: int) -> dict[str, object]:
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()[:, : target.token_count]
    target.cache.rewind_to(0, 0)
    worst, start = 0.0, 0
    while start < len(tokens):
        chunk = tokens[start : start + 256]
        (logits,) = target.forward([Rows(0, chunk, len(chunk))])
        worst = max(worst, float(np.abs(logits - expected[start : start + len(chunk)]).max()))
        start += len(chunk)
    answer, rows = reference_greedy(model, tokens, count)
    decoder = SpeculativeDecoder(target, None, SpeculativeConfig(0, count))
    target.cache.rewind_to(0, 0)
    ours = decoder.generate(tokens)
    at = next((i for i, (a, b) in enumerate(zip(answer, ours, strict=True)) if a != b), None)
    gap = None if at is None else float(abs(rows[at][answer[at]] - rows[at][ours[at]]))
    return {"prompt_tokens": len(tokens), "max_abs_logits": worst, "greedy_differs_at": at, "logit_gap": gap}


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=1)
    parser.add_argument("source", help="what `oxidize export` takes")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens to compare (default 64)")
    parser.add_argument("--profile", default="ort", choices=("ort", "std"))
    arguments = parser.parse_args()
    record = Record(arguments)
    checkpoint = open_source(arguments.source)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        bundle = Path(folder) / "fp32"
        export_bundle(checkpoint, ExportPlan("fp32", (arguments.profile,)), bundle)
        opened = open_bundle(bundle)
        target = Target(opened, RuntimeOptions(threads=2))
        tokenizer = Tokenizer.load(bundle, opened.manifest.tokenizer)
        model = reference_model(checkpoint)
        long = " ".join(PROMPTS * 30)
        results = [compare(model, target, tokenizer.encode(text), arguments.tokens) for text in (*PROMPTS, long)]
    for result in results:
        print(result, file=sys.stderr)
    found = {"source": Path(arguments.source).name, "profile": arguments.profile, "prompts": results}
    print(f"written to {record.write('parity', found)}")


if __name__ == "__main__":
    main()
