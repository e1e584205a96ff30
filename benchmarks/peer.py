"""The client of peers_genai.py: onnxruntime-genai in a process and an environment of its own."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import Json, Timing


class GenaiPeer:
    """A running peer. `threads` None leaves their number to genai."""

    def __init__(self, python: Path, model: Path, prompt: Sequence[int], threads: int | None) -> None:
        self._prompt = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115 (closed by `close`)
        json.dump(list(prompt), self._prompt)
        self._prompt.flush()
        script = Path(__file__).with_name("peers_genai.py")
        command = [str(python), str(script), str(model), "--prompt", self._prompt.name]
        if threads is not None:
            command += ["--threads", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = str(self._read()["genai"])

    def run(self, tokens: int) -> Timing:
        """Decode `tokens` steps after the prompt."""
        reply = self._ask(f"run {tokens}")
        return Timing(reply["decode_s"], reply["tokens"], tuple(reply["token_ids"]))

    def close(self) -> None:
        """End the process."""
        self._process.communicate("quit\n")
        self._prompt.close()

    def _ask(self, request: str) -> Json:
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Json:
        line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"error": "it ended without an answer, see its message above"}
        if "error" in reply:
            raise SystemExit(f"the genai peer failed: {reply['error']}")
        return reply
