"""GGUF files: the same decoder as the Hugging Face original, every encoding, and damage."""

import dataclasses
import re
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding

from pagedjax.models.checkpoint import load_gguf, load_hf
from pagedjax.models.errors import CheckpointError, ConfigError, PagedJaxError
from pagedjax.models.gguf_file import read_gguf
from tests.models.gguf_writer import GOLDENS, gguf_tensors, write_gguf

SAME_IN_GGUF = [
    "gemma3",
    "llama_linear_rope",
    "llama_sharded",
    "llama_tied",
    "llama_yarn_rope",
    "mistral",
    "qwen2",
    "qwen3",
]
Q = "blk.1.attn_q.weight"


@pytest.mark.parametrize("golden", SAME_IN_GGUF)
def test_a_converted_model_is_the_same_decoder(golden: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", golden, gguf_tensors(golden))
    config, params = load_gguf(file, "float32")
    expected, expected_params = load_hf(GOLDENS / golden, "float32")
    if golden == "gemma3":  # GGUF knows the attention scales of released models only
        expected = dataclasses.replace(expected, attn_scale=expected.head_dim**-0.5)
    assert config.norm_eps == pytest.approx(expected.norm_eps)
    assert dataclasses.replace(config, norm_eps=expected.norm_eps) == expected
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


def test_llama_3_frequencies_come_as_a_tensor(tmp_path: Path) -> None:
    golden = "llama_llama3_rope"
    expected = load_hf(GOLDENS / golden)[0].ropes[0].inverse_frequencies(16)
    plain = 10_000.0 ** -(np.arange(8) / 8)
    tensors = {**gguf_tensors(golden), "rope_freqs.weight": np.float32(plain / expected)}
    config, _ = load_gguf(write_gguf(tmp_path / "model.gguf", golden, tensors))
    np.testing.assert_allclose(config.ropes[0].inverse_frequencies(16), expected, rtol=1e-6)


# Encoding -> bound on the error of a value, relative to the largest of its block.
QUANTIZABLE = {
    Encoding.F16: 1e-3,
    Encoding.BF16: 5e-3,
    Encoding.Q8_0: 1 / 220,
    Encoding.Q5_0: 1 / 15,
    Encoding.Q4_0: 1 / 7.5,
}


@pytest.mark.parametrize("encoding", QUANTIZABLE, ids=lambda e: e.name)
def test_quantized_values_come_back(encoding: Encoding, tmp_path: Path) -> None:
    golden = "qwen2"
    tensors = gguf_tensors(golden)
    exact = load_gguf(write_gguf(tmp_path / "exact.gguf", golden, tensors), "float32")[1]
    file = write_gguf(tmp_path / "stored.gguf", golden, tensors, encoding=encoding)
    stored = load_gguf(file, "float32")[1]

    def check(exact: jax.Array, stored: jax.Array) -> None:
        blocks = np.asarray(exact).reshape(-1, 32)
        error = np.abs(np.asarray(stored).reshape(blocks.shape) - blocks)
        bound = QUANTIZABLE[encoding] * np.abs(blocks).max(axis=1, keepdims=True)
        assert (error <= bound).all()

    jax.tree.map(check, exact, stored)
    assert (np.asarray(exact["embed"]) != np.asarray(stored["embed"])).mean() > 0.5


K_SIZES = {
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
K_SHAPES = {
    "token_embd": (48, 256),
    "output": (48, 256),
    **{f"blk.0.attn_{part}": (256, 256) for part in ("q", "k", "v", "output")},
    "blk.0.ffn_gate": (512, 256),
    "blk.0.ffn_up": (512, 256),
    "blk.0.ffn_down": (256, 512),
}
# Encoding -> where the float16 scales lie in a block; the rest may be any bytes.
K_SCALES = {Encoding.Q4_K: (0, 2), Encoding.Q5_K: (0, 2), Encoding.Q6_K: (208,)}


@pytest.mark.parametrize("encoding", K_SCALES, ids=lambda e: e.name)
def test_k_quants_are_read_row_by_row(encoding: Encoding, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    block_bytes = gguf.GGML_QUANT_SIZES[encoding][1]
    tensors = {}
    for name, (rows, columns) in K_SHAPES.items():
        blocks = rng.integers(256, size=(rows, columns // 256, block_bytes), dtype=np.uint8)
        for offset in K_SCALES[encoding]:
            blocks[..., offset : offset + 2] = np.array([0.01], np.float16).view(np.uint8)
        tensors[f"{name}.weight"] = blocks.reshape(rows, -1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        tensors[f"{name}.weight"] = np.ones(256, np.float32)
    file = write_gguf(
        tmp_path / "k.gguf", "llama_sharded", tensors, encoding=encoding, overrides=K_SIZES
    )
    _, params = load_gguf(file, "float32")
    layers = params["layers"]
    for name, got in {
        "token_embd": params["embed"],
        "output": params["head"],
        "blk.0.attn_output": layers["out"][0],
        "blk.0.ffn_gate": layers["gate_up"][0, 0],
        "blk.0.ffn_down": layers["down"][0],
    }.items():
        expected = gguf.dequantize(tensors[f"{name}.weight"], encoding)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("encoding", [Encoding.Q4_1, Encoding.TQ2_0], ids=lambda e: e.name)
def test_other_encodings_are_refused_by_name(encoding: Encoding, tmp_path: Path) -> None:
    tensors = {name: np.zeros((2, 256), np.float32) for name in ("token_embd.weight", "other")}
    file = write_gguf(tmp_path / "model.gguf", "llama_tied", tensors, encoding=encoding)
    ref = read_gguf(file).tensors["other"]
    with pytest.raises(CheckpointError, match=f"'other' is stored as {encoding.name}; supported"):
        ref.read(0, 1)


def test_the_encoding_of_a_needed_tensor_is_checked_first(tmp_path: Path) -> None:
    tensors = gguf_tensors("llama_sharded")
    file = write_gguf(tmp_path / "q.gguf", "llama_sharded", tensors, encoding=Encoding.Q4_1)
    message = "'token_embd.weight' is stored as Q4_1; supported are F32, F16, BF16, Q4_0"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_gguf(file)


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "gemma3", gguf_tensors("gemma3"))
    metadata = read_gguf(file).metadata
    reader = gguf.GGUFReader(file)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert metadata.keys() == fields.keys()
    for key, value in fields.items():
        assert np.array_equal(metadata[key], value), key
    assert metadata["tokenizer.ggml.tokens"][1:] == ["é", "\N{GRINNING FACE}"]


TENSOR_EDITS = {
    "missing": (lambda t: t.pop(Q), f"{Q!r} of shape (64, 32) is missing"),
    "extra": (lambda t: t.update(extra=t[Q]), "'extra' has no place in this architecture"),
    "transposed": (
        lambda t: t.update({Q: np.ascontiguousarray(t[Q].T)}),
        f"{Q!r} has shape (32, 64); the configuration wants (64, 32)",
    ),
    "integers": (lambda t: t.update({Q: t[Q].astype(np.int32)}), f"{Q!r} is stored as I32"),
}


@pytest.mark.parametrize("name", TENSOR_EDITS)
def test_tensors_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    edit, message = TENSOR_EDITS[name]
    tensors = gguf_tensors("llama_tied")
    edit(tensors)
    file = write_gguf(tmp_path / "model.gguf", "llama_tied", tensors)
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        load_gguf(file)
    assert str(file) in str(raised.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", "llama_tied", gguf_tensors("llama_tied"))


HEADER_EDITS = [
    (0, b"GGML", "starts with b'GGML', not with b'GGUF'"),
    (4, (1).to_bytes(4, "little"), "GGUF version 1; supported are 2, 3"),
    (4, (3).to_bytes(4, "big"), "a big-endian file"),
    (8, (2**60).to_bytes(8, "little"), "model.gguf"),
    (16, (2**60).to_bytes(8, "little"), "model.gguf"),
    (24, (2**63).to_bytes(8, "little"), "truncated"),
]


@pytest.mark.parametrize(("offset", "replacement", "message"), HEADER_EDITS)
def test_a_damaged_header_is_refused(
    model: Path, offset: int, replacement: bytes, message: str
) -> None:
    content = bytearray(model.read_bytes())
    content[offset : offset + len(replacement)] = replacement
    model.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_gguf(model)


def test_a_file_cut_anywhere_is_refused(model: Path) -> None:
    content = model.read_bytes()
    start = min(ref.offset for ref in read_gguf(model).tensors.values())
    for size in (*range(0, start, 37), start, len(content) // 2, len(content) - 40):
        model.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            load_gguf(model)


def test_flipped_header_bytes_never_crash_the_loader(model: Path) -> None:
    content = model.read_bytes()
    start = min(ref.offset for ref in read_gguf(model).tensors.values())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for position in rng.integers(start, size=2):
            damaged[position] = rng.integers(256)
        model.write_bytes(damaged)
        try:
            load_gguf(model)
        except PagedJaxError:
            refused += 1
    assert refused > 100


def test_missing_and_split_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load_gguf(tmp_path / "nowhere.gguf")
    extra = {"split.count": 3}
    tensors = gguf_tensors("llama_tied")
    file = write_gguf(tmp_path / "part.gguf", "llama_tied", tensors, extra=extra)
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        load_gguf(file)


def test_options_that_change_the_computation_are_refused(tmp_path: Path) -> None:
    extra = {"llama.expert_count": 8}
    tensors = gguf_tensors("llama_tied")
    file = write_gguf(tmp_path / "model.gguf", "llama_tied", tensors, extra=extra)
    with pytest.raises(ConfigError, match="'expert_count' is 8"):
        load_gguf(file)
