"""Hugging Face directories: what lands where, and what is refused."""

import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedjax.models.checkpoint import load_hf
from pagedjax.models.decoder import abstract_params
from pagedjax.models.errors import CheckpointError
from tests.models.real_configs import LLAMA_2_7B

GOLDENS = Path(__file__).parents[1] / "goldens"
Tensors = dict[str, np.ndarray]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of a golden with an untied head and one file."""
    return copy_golden("llama_linear_rope", tmp_path)


def copy_golden(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDENS / name, tmp_path / name))


def edit_tensors(directory: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["gemma3", "llama_sharded", "qwen2", "qwen3"])
def test_parameters_are_those_the_decoder_expects(name: str, platform: str) -> None:
    config, params = load_hf(GOLDENS / name, "bfloat16", platform)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    expected = jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract_params(config, platform)
    )
    assert described == expected


def test_dtype_is_the_configurations_unless_asked() -> None:
    assert load_hf(GOLDENS / "qwen3")[0].dtype == "bfloat16"
    assert load_hf(GOLDENS / "mistral")[0].dtype == "float16"
    assert load_hf(GOLDENS / "mistral", "float32")[0].dtype == "float32"


def test_projections_are_fused_by_kv_head(llama: Path) -> None:
    config, params = load_hf(llama)
    stored = load_file(llama / "model.safetensors")
    prefix, d = "model.layers.1.", config.head_dim
    q, k, v = (stored[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
    expected = np.concatenate([q[: 2 * d], k[:d], v[:d], q[2 * d :], k[d:], v[d:]])
    np.testing.assert_array_equal(params["layers"]["qkv"][1], expected)
    for i, name in enumerate(("gate", "up")):
        expected = stored[f"{prefix}mlp.{name}_proj.weight"]
        np.testing.assert_array_equal(params["layers"]["gate_up"][1, i], expected)


def test_gemma_norms_are_stored_less_one() -> None:
    _, params = load_hf(GOLDENS / "gemma3")
    stored = load_file(GOLDENS / "gemma3" / "model.safetensors")
    name = "model.layers.2.pre_feedforward_layernorm.weight"
    np.testing.assert_array_equal(params["layers"]["mlp_norm"][2], 1 + stored[name])
    np.testing.assert_array_equal(params["final_norm"], 1 + stored["model.norm.weight"])


def test_on_cpu_stacks_hold_the_bits_of_the_rounded_values(llama: Path) -> None:
    exact, rounded = load_hf(llama, "float32")[1], load_hf(llama, "bfloat16", "cpu")[1]
    expected = np.asarray(exact["layers"]["down"].astype(jnp.bfloat16)).view(np.uint16)
    np.testing.assert_array_equal(rounded["layers"]["down"], expected)
    assert rounded["embed"].dtype == jnp.bfloat16


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    directory = copy_golden("llama_tied", tmp_path)
    embed = "model.embed_tokens.weight"
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t[embed].copy()}))
    assert "head" not in load_hf(directory)[1]
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t[embed] + 1}))
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs"):
        load_hf(directory)


def test_rotary_buffers_of_old_files_are_ignored(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(llama, lambda t: t.update({name: np.ones(8, np.float32)}))
    load_hf(llama)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_gemma_that_sees(tmp_path: Path, prefix: str) -> None:
    directory = copy_golden("gemma3", tmp_path)
    expected = load_hf(directory)
    text = json.loads((directory / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    renamed["model.multi_modal_projector.norm.weight"] = np.ones(2, np.float32)
    save_file(renamed, directory / "model.safetensors")
    config, params = load_hf(directory)
    assert config == expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])


Q = "model.layers.1.self_attn.q_proj.weight"
BAD_TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(Q), f"{Q!r} of shape (64, 32) is missing"),
    "extra": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}),
        "'model.layers.0.self_attn.q_proj.bias' has no place in this architecture",
    ),
    "extra layer": (
        lambda t: t.update({Q.replace("1", "2"): t[Q]}),
        "'model.layers.2.self_attn.q_proj.weight' has no place",
    ),
    "transposed": (
        lambda t: t.update({Q: np.ascontiguousarray(t[Q].T)}),
        f"{Q!r} has shape (32, 64); the configuration wants (64, 32)",
    ),
    "integers": (
        lambda t: t.update({Q: t[Q].astype(np.int32)}),
        f"{Q!r} is stored as I32; supported are F32, F16, BF16",
    ),
    "doubles": (lambda t: t.update({Q: t[Q].astype(np.float64)}), f"{Q!r} is stored as F64"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(llama: Path, name: str) -> None:
    edit, message = BAD_TENSORS[name]
    edit_tensors(llama, edit)
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        load_hf(llama)
    assert str(llama) in str(raised.value)


def test_values_that_are_not_finite_are_refused(llama: Path) -> None:
    edit_tensors(llama, lambda t: t.update({Q: t[Q] * np.float32(1e6)}))
    load_hf(llama, "bfloat16")
    with pytest.raises(CheckpointError, match=f"{Q}.*not finite in float16"):
        load_hf(llama, "float16")
    edit_tensors(llama, lambda t: t.update({Q: t[Q] * np.float32(np.nan)}))
    with pytest.raises(CheckpointError, match=f"{Q}.*not finite in bfloat16"):
        load_hf(llama, "bfloat16")


def test_missing_and_damaged_files_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json: no such file"):
        load_hf(tmp_path / "nowhere")
    config = (llama / "config.json").read_text()
    for text, message in (("{", "not JSON"), ("[]", "not a JSON object")):
        (llama / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            load_hf(llama)
    (llama / "config.json").write_text(config)
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        load_hf(llama)


def test_a_safetensors_file_cut_anywhere_is_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 8, 100, 2000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
            load_hf(llama)


def test_a_damaged_safetensors_header_is_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    entries = {
        "not JSON": b"{]",
        "not a JSON object": b"[]",
        "malformed entry of tensor 'a'": b'{"a": {"dtype": "F32", "shape": [1]}}',
        "'a' of shape": b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}',
        "data offsets 4, 0": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    }
    for message, header in entries.items():
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
        with pytest.raises(CheckpointError, match=message):
            load_hf(llama)


def test_missing_and_wrong_shards_are_named(tmp_path: Path) -> None:
    directory = copy_golden("llama_sharded", tmp_path)
    shards = sorted(directory.glob("*.safetensors"))
    assert len(shards) == 2
    load_hf(directory)
    content = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name}: no such file"):
        load_hf(directory)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(CheckpointError, match=rf"{shards[1].name}: tensor '.*' is missing"):
        load_hf(directory)
    shards[1].write_bytes(content)
    index = directory / "model.safetensors.index.json"
    for text, message in (
        ('{"weight_map": []}', "'weight_map' is"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "is not a file name"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            load_hf(directory)


def test_loading_needs_little_memory_beside_the_parameters(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 16_000}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_2_7B, **sizes, **heads}))
    layer = {f"self_attn.{x}_proj": (512, 512) for x in "qkvo"}
    layer |= {
        "mlp.gate_proj": (1024, 512),
        "mlp.up_proj": (1024, 512),
        "mlp.down_proj": (512, 1024),
    }
    layer |= {"input_layernorm": (512,), "post_attention_layernorm": (512,)}
    shapes = {f"model.layers.{i}.{name}": layer[name] for i in range(4) for name in layer}
    shapes |= {"model.embed_tokens": (16_000, 512), "lm_head": (16_000, 512), "model.norm": (512,)}
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    load_hf(tmp_path)  # imports and traces
    tracemalloc.start()
    try:
        _, params = load_hf(tmp_path, platform="cpu")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert held > 48e6
    assert peak < held + 12e6
