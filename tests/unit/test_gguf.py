"""GGUF files give the same model as the safetensors they were converted from; damaged ones are refused."""

import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import VARIANTS, llama3_factors, random_weights, write_gguf_checkpoint, write_hf_checkpoint

from oxidize.export.gguf_file import TensorPlace, read_gguf
from oxidize.export.gguf_source import GgufTensor
from oxidize.export.source import open_source
from oxidize.runtime.errors import CheckpointError

QUERY = "model.layers.0.self_attn.q_proj.weight"
EXACT = ("F32", "F16", "BF16")
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# What GGUF cannot say: Mistral is "llama" there, and only Gemma has a window.
COMPARABLE = [name for name in VARIANTS if not name.endswith("_sliding")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf_checkpoint(tmp_path_factory.mktemp("gguf") / "small.gguf", "smollm2", seed=1)


@pytest.mark.parametrize("variant", COMPARABLE)
def test_gguf_and_safetensors_of_one_model_are_equal(tmp_path, variant):
    theirs = open_source(str(write_hf_checkpoint(tmp_path / "hf", variant, seed=4)))
    ours = open_source(str(write_gguf_checkpoint(tmp_path / "model.gguf", variant, seed=4)))
    assert sorted(ours.weights.names()) == sorted(theirs.weights.names())
    for name in theirs.weights.names():
        shape = theirs.weights.shape(name)
        np.testing.assert_array_equal(ours.weights.read(name, shape), theirs.weights.read(name, shape), name)
    assert ours.weights.unread() == []
    expected = theirs.config
    if variant == "mistral":
        expected = replace(expected, architecture="llama")
    if variant == "llama3":
        factors = tuple(llama3_factors(VARIANTS[variant]).tolist())
        assert ours.config.rope.kind == "factors" and ours.config.rope.factors == factors
        expected = replace(expected, rope=ours.config.rope)
    assert ours.config == expected
    assert ours.generation.eos_token_ids == (2, 0)


@pytest.mark.parametrize("quant", [*EXACT, *QUANTISED])
def test_matrices_of_every_type(tmp_path, quant):
    """Our values are gguf's own dequantised values, rows of q and k back in their order."""
    source = open_source(str(write_gguf_checkpoint(tmp_path / "m.gguf", "llama_bias", 2, quant)))
    kind = gguf.GGMLQuantizationType[quant]
    for name, values in random_weights("llama_bias", seed=2).items():
        if values.ndim == 2:
            values = gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(source.weights.read(name, values.shape), values, name)


@pytest.mark.parametrize("quant", K_QUANTS)
def test_k_quants(tmp_path, quant):
    kind = gguf.GGMLQuantizationType[quant]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (24, 2 * block_bytes), np.uint8)  # no byte makes an infinite scale
    (tmp_path / "raw").write_bytes(b"skip" + raw.tobytes())
    place = TensorPlace("t", kind, (24, 2 * block), 4, raw.size)
    order = tuple(np.random.default_rng(1).permutation(24).tolist())
    got = GgufTensor(tmp_path / "raw", place, order).load()
    np.testing.assert_array_equal(got, gguf.dequantize(raw, kind)[list(order)])
    assert GgufTensor(tmp_path / "raw", place).blocks() is None


@pytest.mark.parametrize(("quant", "bits"), [("Q4_0", 4), ("Q8_0", 8)])
@pytest.mark.parametrize("variant", ["llama2", "qwen2"])
def test_blocks_come_without_loss(tmp_path, quant, bits, variant):
    source = open_source(str(write_gguf_checkpoint(tmp_path / "m.gguf", variant, 2, quant)))
    shape = source.weights.shape(QUERY)
    blocks = source.weights.read_quantized(QUERY)
    assert blocks is not None and QUERY not in source.weights.unread()
    assert (blocks.bits, blocks.block, blocks.quants.dtype, blocks.scales.dtype) == (
        bits,
        32,
        np.int8,
        np.float32,
    )
    assert blocks.quants.shape == shape and blocks.scales.shape == (shape[0], shape[1] // 32)
    assert blocks.quants.min() >= -(1 << (bits - 1)) and blocks.quants.max() < 1 << (bits - 1)
    values = blocks.quants.astype(np.float32) * np.repeat(blocks.scales, 32, axis=1)
    np.testing.assert_array_equal(values, source.weights.read(QUERY, shape))
    assert source.weights.read_quantized("model.norm.weight") is None


def test_other_types_have_no_blocks(tmp_path):
    for quant in ("F16", "Q4_1", "Q5_0"):
        source = open_source(str(write_gguf_checkpoint(tmp_path / f"{quant}.gguf", "llama2", 2, quant)))
        assert source.weights.read_quantized(QUERY) is None and QUERY in source.weights.unread()


def test_a_tensor_we_have_no_name_for_stays_unread(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from oxidize.export.gguf_source import map_tensors

    assert list(map_tensors(read_gguf(path))) == ["blk.0.attn_sinks.weight"]


def test_metadata_is_what_gguf_reads(small):
    theirs = gguf.GGUFReader(small)
    ours = read_gguf(small)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert [(place.name, place.start, place.size) for place in ours.tensors] == [
        (tensor.name, tensor.data_offset, tensor.n_bytes) for tensor in theirs.tensors
    ]
    source = open_source(str(small.parent))
    assert (source.kind, source.name, source.files, source.folder) == ("gguf", "small.gguf", (small,), None)
    assert source.gguf_metadata is not None and source.gguf_metadata["tokenizer.ggml.model"] == "gpt2"


def test_a_folder_with_two_gguf_files_is_ambiguous(small, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(small.read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 .gguf files; name the one"):
        open_source(str(tmp_path))


def _patched(good: bytes, position: int, patch: bytes) -> bytes:
    return good[:position] + patch + good[position + len(patch) :]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda good: b"", "is not a GGUF file"),
        (lambda good: b"GGML" + good[4:], "begins with b'GGML'"),
        (lambda good: _patched(good, 4, struct.pack("<I", 1)), "GGUF version 1, this version reads 2 and 3"),
        (lambda good: _patched(good, 4, struct.pack("<I", 9)), "GGUF version 9"),
        (lambda good: _patched(good, 4, struct.pack(">I", 3)), "big-endian"),
        (lambda good: _patched(good, 8, struct.pack("<Q", 1 << 60)), "truncated: its header goes on"),
        (lambda good: _patched(good, 16, struct.pack("<Q", 1 << 60)), "truncated: its header goes on"),
        (lambda good: good[:300], "truncated: its header goes on past byte 300"),
        (lambda good: good[:-40], "truncated: tensor .* ends at byte"),
        (lambda good: good.replace(b"llama.block_count", b"general.file_type", 1), "block_count must be"),
    ],
)
def test_damaged_files_are_refused(small, tmp_path, change, named):
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(small.read_bytes()))
    with pytest.raises(CheckpointError, match=named) as caught:
        open_source(str(path))
    assert "\n" not in str(caught.value)


def test_a_tensor_type_we_cannot_read_is_named(small, tmp_path):
    good = small.read_bytes()
    name = b"output_norm.weight"
    kind_at = good.index(name) + len(name) + 4 + 8  # after one dimension
    path = tmp_path / "bad.gguf"
    for kind, shown in ((gguf.GGMLQuantizationType.IQ4_XS, "IQ4_XS"), (250, "250")):
        path.write_bytes(_patched(good, kind_at, struct.pack("<I", kind)))
        with pytest.raises(CheckpointError, match=f"tensor output_norm.weight has the type {shown}"):
            open_source(str(path))


def test_no_damage_to_the_header_ends_in_a_traceback(small, tmp_path):
    good = small.read_bytes()
    header = min(place.start for place in read_gguf(small).tensors)
    path = tmp_path / "noise.gguf"
    noise = np.random.default_rng(0)
    for position in noise.integers(0, header, 300).tolist():
        path.write_bytes(_patched(good, position, noise.bytes(int(noise.integers(1, 9)))))
        try:
            source = open_source(str(path))
            for name in source.weights.names():
                source.weights.read(name, source.weights.shape(name))
        except CheckpointError:
            pass


def test_dequantising_holds_one_tensor_and_a_bounded_piece(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = np.zeros((8192, 2048 // 32 * 34), np.uint8)
    (tmp_path / "raw").write_bytes(raw.tobytes())
    stored = GgufTensor(tmp_path / "raw", TensorPlace("t", kind, (8192, 2048), 0, raw.size))
    tracemalloc.start()
    try:
        loaded = stored.load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < loaded.nbytes + 2 * raw.nbytes
