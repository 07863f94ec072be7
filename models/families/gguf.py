"""GGUF metadata, said in the words of a Hugging Face configuration."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from pagedjax.models.errors import ConfigError
from pagedjax.models.families.fields import Fields

# GGUF architecture -> (model_type, rows of q and k are interleaved).
_ARCHITECTURES = {
    "gemma3": ("gemma3_text", False),
    "llama": ("llama", True),  # also Mistral
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
_HARMLESS = (r"tensor_data_layout|rope\.scaling\.finetuned|vocab_size",)
_ROPE_DIVISORS = "rope_freqs.weight"
_GEMMA3_27B_LAYERS = 62


class _Tensor(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


GGUFTensors = Mapping[str, _Tensor]


class GGUFConfig(NamedTuple):
    """`rope_divisors`: what each rope frequency is divided by (Llama 3.1), if the file says so."""

    config: dict[str, Any]
    interleaved: bool
    rope_divisors: tuple[float, ...] | None


def hf_config_of_gguf(metadata: Mapping[str, Any], tensors: GGUFTensors) -> GGUFConfig:
    """Translate; anything that is not understood is refused by name."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {arch!r} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"this GGUF file holds a {kind!r}, not a model")
    model_type, interleaved = _ARCHITECTURES[arch]
    own = {k.removeprefix(arch + "."): v for k, v in metadata.items() if k.startswith(arch + ".")}
    fields = Fields({k: _plain_value(v) for k, v in own.items()}, f"GGUF architecture {arch!r}")
    config = {"model_type": model_type, **_sizes(fields, tensors), **_rope(fields)}
    if arch == "gemma3":
        config |= _gemma3(fields, config)
    elif arch == "llama":
        window = fields.take("attention.sliding_window", None)
        if window:
            config |= {"model_type": "mistral", "sliding_window": window}
    divisors = _rope_divisors(tensors, config)
    fields.finish(_HARMLESS)
    return GGUFConfig(config, interleaved, divisors)


def _plain_value(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _sizes(fields: Fields, tensors: GGUFTensors) -> dict[str, Any]:
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{fields.where}: there is no tensor 'token_embd.weight'")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    fields.only("attention.value_length", head_dim)
    fields.only("rope.dimension_count", head_dim)
    fields.only("attention.causal", True)
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _rope(fields: Fields) -> dict[str, Any]:
    """Without a type, a factor means linear scaling; a factor of 0 means none."""
    old_factor = fields.optional_number("rope.scale_linear")
    factor = fields.optional_number("rope.scaling.factor") or old_factor or 1.0
    kind = fields.take("rope.scaling.type", "linear" if factor != 1.0 else "none")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "none":
        scaling = {"rope_type": "default"}
    elif kind == "yarn":
        fields.only("rope.scaling.attn_factor", 1.0)
        fields.only("rope.scaling.yarn_attn_factor", 1.0)
        fields.only("rope.scaling.yarn_ext_factor", 1.0)
        scaling["beta_fast"] = fields.take("rope.scaling.yarn_beta_fast", None)
        scaling["beta_slow"] = fields.take("rope.scaling.yarn_beta_slow", None)
    original = fields.take("rope.scaling.original_context_length", None)
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    return {"rope_theta": fields.number("rope.freq_base", 10_000.0), "rope_scaling": scaling}


def _gemma3(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not say the attention scale; it differs in the 27B model alone."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scalar = config["hidden_size"] // heads if layers == _GEMMA3_27B_LAYERS else config["head_dim"]
    pattern = fields.take("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if local else "full_attention" for local in pattern]
        layer_pattern: dict[str, Any] = {"layer_types": kinds}
    else:
        layer_pattern = {"sliding_window_pattern": pattern}
    return {
        **layer_pattern,
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.integer("attention.sliding_window"),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": fields.take("final_logit_softcapping", None),
    }


def _rope_divisors(tensors: GGUFTensors, config: Mapping[str, Any]) -> tuple[float, ...] | None:
    if _ROPE_DIVISORS not in tensors:
        return None
    tensor = tensors[_ROPE_DIVISORS]
    half = config["head_dim"] // 2
    scaling = config["rope_scaling"]["rope_type"]
    if config["model_type"] == "gemma3_text" or scaling != "default" or tensor.shape != (half,):
        raise ConfigError(
            f"GGUF tensor {_ROPE_DIVISORS!r} of shape {tensor.shape} for {config['model_type']} "
            f"with rope scaling {scaling!r}; supported is shape ({half},) without other scaling"
        )
    return tuple(float(x) for x in tensor.read(0, half))
