"""The yardstick of plain decoding: one fused graph, token ids in and logits out, in the barest loop there is.

The graph is put together from a bundle's own embed, body and head, so it computes the same numbers from the same
weights. The loop writes the token, runs and takes the argmax: no drafter, no policy, no statistics, no text.
Bindings are made once, the KV cache is updated in place, and ONNX Runtime's settings are its defaults but for the
number of threads. What our loop takes longer than this is the price of all it offers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx
import onnxruntime as ort
from common import Timing, next_power_of_two
from onnx import numpy_helper

from oxidize.runtime.bundle import Bundle, open_bundle

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


def fuse(bundle: Bundle) -> onnx.ModelProto:
    """input_ids [1,S] -> logits [S,V]: the bundle's three graphs as one. The weights stay in their file."""
    embed, fused, head = (_load(bundle, role) for role in ("embed", "body", "head"))
    gather = next(node for node in head.graph.node if "rows" in node.input)
    flat = onnx.helper.make_node("Reshape", ["hidden", "flat.shape"], list(gather.output), name="flat")
    head.graph.node.remove(gather)  # every row is scored, so none needs to be picked
    head.graph.node.insert(0, flat)
    width = bundle.manifest.model.hidden_size
    head.graph.initializer.append(numpy_helper.from_array(np.array([-1, width]), "flat.shape"))
    graph, nodes = fused.graph, [*embed.graph.node, *fused.graph.node, *head.graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    known = {tensor.name for tensor in graph.initializer}
    graph.initializer.extend(
        tensor for part in (embed, head) for tensor in part.graph.initializer if tensor.name not in known
    )
    graph.input[0].CopyFrom(embed.graph.input[0])  # in place of inputs_embeds
    shape = ["S", bundle.manifest.model.vocab_size]
    graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, shape))
    return fused


def _load(bundle: Bundle, role: str) -> onnx.ModelProto:
    entry = bundle.manifest.graph(role, "ort")
    if entry is None:
        raise SystemExit(f"{bundle.folder} has no {role} graph of profile ort; export it with --profile ort")
    return onnx.load_model(bundle.folder / entry.file, load_external_data=False)


@dataclass(frozen=True, slots=True)
class _Step:
    """The binding of a pass of one width, and the arrays it reads and writes."""

    binding: ort.IOBinding
    ids: np.ndarray  # [1,S]
    last: np.ndarray  # [1], rows in the cache after the pass, less one
    total: np.ndarray  # []
    logits: np.ndarray  # [S,V]


class FusedLoop:
    """Greedy decoding over the fused graph; `threads` 0 leaves their number to ONNX Runtime."""

    def __init__(self, folder: Path, threads: int) -> None:
        bundle = open_bundle(folder)
        self._facts = bundle.manifest.model
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder.resolve()))
        graph = fuse(bundle).SerializeToString()
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def run(self, prompt: Sequence[int], tokens: int) -> Timing:
        """Decode `tokens` steps after the prompt's pass, which gives the first token and is not timed."""
        cache = self._allocate(next_power_of_two(len(prompt) + tokens + 1))
        token = self._first(cache, prompt)
        step, chosen = self._bind(cache, 1), [token]
        run, binding = self._session.run_with_iobinding, step.binding
        started = perf_counter()
        for past in range(len(prompt), len(prompt) + tokens):
            step.ids[0, 0] = token
            step.last[0], step.total[()] = past, past + 1
            run(binding)
            token = int(step.logits.argmax())
            chosen.append(token)
        return Timing(perf_counter() - started, tokens, tuple(chosen))

    def _first(self, cache: dict[str, ort.OrtValue], prompt: Sequence[int]) -> int:
        step = self._bind(cache, len(prompt))
        step.ids[0] = prompt
        step.last[0], step.total[()] = len(prompt) - 1, len(prompt)
        self._session.run_with_iobinding(step.binding)
        return int(step.logits[-1].argmax())

    def _allocate(self, capacity: int) -> dict[str, ort.OrtValue]:
        """Zeroed keys and values [1, kv_heads, capacity, head_dim], under the names past_key_values.*."""
        shape = (1, self._facts.kv_heads, capacity, self._facts.head_dim)
        names = [value.name for value in self._session.get_inputs() if value.name.startswith("past_")]
        return {name: ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for name in names}

    def _bind(self, cache: dict[str, ort.OrtValue], width: int) -> _Step:
        binding = self._session.io_binding()
        arrays = {
            "input_ids": np.zeros((1, width), np.int64),
            "seqlens_k": np.zeros(1, np.int32),
            "total_sequence_length": np.zeros((), np.int32),
        }
        logits = np.zeros((width, self._facts.vocab_size), np.float32)
        for name, array in arrays.items():  # an OrtValue made from an array on the CPU is a view of it
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        for name, value in cache.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        return _Step(binding, *arrays.values(), logits)
