"""One onnxruntime-genai model behind a line protocol, so that its decoding can be interleaved with ours.

Start this file with the Python of an environment that has onnxruntime-genai; of this project it imports only the
standard-library helpers in common.py beside it:

    peer-env/bin/python benchmarks/peers_genai.py GENAI_FOLDER --prompt prompt.json

Requests come one a line on stdin, answers go one JSON object a line on stdout:

| request | answer |
|---|---|
| (start) | `{"ready": true, "genai": version, "load_s": seconds, "threads": n or null, "prompt_tokens": n}` |
| `run N` | `{"decode_s": seconds, "tokens": N, "prefill_s": seconds, "cpu_s": seconds, "token_ids": [...]}` |
| `prompt [1, 2, 3]` | `{"prompt_tokens": n}`: the ids that later runs start from |
| `quit`, end of input | (none: the process ends) |

A request that cannot be served is answered with `{"error": reason}` and the process goes on.

What is timed: greedy, batch 1, N decode steps, each one forward pass of one row and one choice. The prompt's
pass and the choice of the first token are `prefill_s`. Session settings are those in the folder's
genai_config.json unless `--threads` or `--spin off` says otherwise; its default is half of the logical
processors, so 1 thread on 2. An answer is sent only when the process has stopped using the processor (a pool
of two or more threads spins on for a while after a run), so whoever is timed next has the machine to itself.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime_genai as genai
from common import wait_until_idle


class RequestError(Exception):
    """A request that cannot be served; the text says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed decode: seconds of wall time, processor seconds of all threads, and the N + 1 chosen ids."""

    decode_s: float
    tokens: int
    prefill_s: float
    cpu_s: float
    token_ids: list[int]


class GenaiDecoder:
    """A loaded genai model and the prompt that each run starts from."""

    def __init__(self, folder: Path, prompt: list[int], max_length: int, session_options: dict[str, object]) -> None:
        config = genai.Config(str(folder))
        if session_options:
            config.overlay(json.dumps({"model": {"decoder": {"session_options": session_options}}}))
        self._model = genai.Model(config)
        self._max_length = max_length
        self.prompt = prompt

    def run(self, tokens: int) -> Run:
        """Decode `tokens` steps after the prompt, greedily; RequestError when they do not fit."""
        generator = self._new_generator(tokens)
        started = time.perf_counter()
        generator.append_tokens(self.prompt)
        generator.generate_next_token()
        prefilled, cpu = time.perf_counter(), time.process_time()
        for _ in range(tokens):
            generator.generate_next_token()
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        chosen = [int(token) for token in generator.get_sequence(0)[len(self.prompt) :]]
        if len(chosen) != tokens + 1:
            raise RequestError(f"genai made {len(chosen)} tokens where {tokens + 1} were asked")
        return Run(ended - prefilled, tokens, prefilled - started, cpu, chosen)

    def _new_generator(self, tokens: int) -> genai.Generator:
        length = len(self.prompt) + tokens + 1
        if length > self._max_length:
            raise RequestError(f"prompt and output need {length} tokens, --max-length is {self._max_length}")
        params = genai.GeneratorParams(self._model)
        # min_length keeps the end token out until the last timed step; it costs one write a step.
        params.set_search_options(do_sample=False, max_length=self._max_length, min_length=length + 1)
        return genai.Generator(self._model, params)


def parse_ids(text: str) -> list[int]:
    """Token ids from JSON: a list, or an object with the list under "token_ids"."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"expected token ids as JSON, got {text[:40]!r} ({error.msg})") from error
    ids = value.get("token_ids") if isinstance(value, dict) else value
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise RequestError("expected a JSON list of token ids, or an object with one under 'token_ids'")
    return ids


def answer(decoder: GenaiDecoder, request: str) -> dict[str, object]:
    """Serve one request line; RequestError when it is not one of the protocol's."""
    verb, _, rest = request.partition(" ")
    if verb == "prompt":
        decoder.prompt = parse_ids(rest)
        return {"prompt_tokens": len(decoder.prompt)}
    if verb == "run" and rest.strip().isdecimal() and int(rest) > 0:
        return asdict(decoder.run(int(rest)))
    raise RequestError(f"expected 'run N', 'prompt [ids]' or 'quit', got {request!r}")


def serve(decoder: GenaiDecoder, requests: Iterable[str]) -> None:
    """Answer each request line on stdout until `quit` or the end of input."""
    for line in requests:
        request = line.strip()
        if request == "quit":
            return
        if not request:
            continue
        try:
            reply = answer(decoder, request)
        except (RequestError, RuntimeError) as error:  # genai raises RuntimeError subclasses
            reply = {"error": str(error)}
        wait_until_idle()
        send(reply)


def send(reply: dict[str, object]) -> None:
    print(json.dumps(reply), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time onnxruntime-genai, one request line at a time.")
    parser.add_argument("folder", type=Path, help="folder written by onnxruntime_genai.models.builder")
    parser.add_argument("--prompt", type=Path, required=True, help="JSON file with the prompt's token ids")
    parser.add_argument("--max-length", type=int, default=1024, help="KV capacity in tokens (default 1024)")
    parser.add_argument("--threads", type=int, help="intra-op threads (default: what genai chooses)")
    parser.add_argument("--spin", choices=("default", "off"), default="default", help="thread pool spinning")
    return parser.parse_args()


def session_options(arguments: argparse.Namespace) -> dict[str, object]:
    options: dict[str, object] = {}
    if arguments.threads is not None:
        options["intra_op_num_threads"] = arguments.threads
    if arguments.spin == "off":
        options["session.intra_op.allow_spinning"] = "0"
    return options


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    try:
        prompt = parse_ids(arguments.prompt.read_text(encoding="utf-8"))
        decoder = GenaiDecoder(arguments.folder, prompt, arguments.max_length, session_options(arguments))
    except (OSError, RequestError, RuntimeError) as error:
        sys.exit(f"peers_genai: {error}")
    load_s = time.perf_counter() - started
    ready = {"ready": True, "genai": genai.__version__, "load_s": load_s, "threads": arguments.threads}
    send(ready | {"prompt_tokens": len(prompt)})
    serve(decoder, sys.stdin)


if __name__ == "__main__":
    main()
