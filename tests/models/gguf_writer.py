"""Write golden checkpoints as GGUF files, with the `gguf` package's own names and writer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

GOLDENS = Path(__file__).parents[1] / "goldens"
_ARCHITECTURES = {
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def gguf_tensors(golden: str) -> dict[str, np.ndarray]:
    """f32 tensors of a golden as a converter would store them."""
    config = _config(golden)
    arch = _ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    out = {}
    for file in sorted((GOLDENS / golden).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            out[stored] = _converted(name, tensor.astype(np.float32), config, arch)
    return out


def _converted(
    name: str, tensor: np.ndarray, config: Mapping[str, Any], arch: gguf.MODEL_ARCH
) -> np.ndarray:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for projection, key in heads.items():
        if arch == gguf.MODEL_ARCH.LLAMA and projection in name:
            halves = tensor.reshape(config[key], 2, -1, *tensor.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    return tensor + 1 if arch == gguf.MODEL_ARCH.GEMMA3 and "norm" in name else tensor


def write_gguf(
    path: Path,
    golden: str,
    tensors: Mapping[str, np.ndarray],
    *,
    encoding: GGMLQuantizationType = GGMLQuantizationType.F32,
    overrides: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `tensors` with the metadata of a golden.

    Args:
      encoding: of matrices; vectors stay float32. u8 arrays are written as they are, as bytes of
        this encoding.
      overrides: fields of the golden's `config.json` to replace.
      extra: metadata to add, with full keys.
    """
    config = {**_config(golden), **(overrides or {})}
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[config["model_type"]]])
    _add_metadata(writer, config)
    for key, value in (extra or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        if tensor.dtype == np.uint8:
            writer.add_tensor(name, tensor, raw_dtype=encoding)
        elif tensor.ndim == 1 or encoding == GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, encoding), raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_token_list(["<pad>", "é", "\N{GRINNING FACE}"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config["layer_types"]])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    elif config["model_type"] == "mistral":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rope["rope_theta"])
    kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
    if rope["rope_type"] in kinds:
        writer.add_rope_scaling_type(kinds[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _config(golden: str) -> dict[str, Any]:
    return json.loads((GOLDENS / golden / "config.json").read_text())
