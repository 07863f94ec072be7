"""The model families: each a mapping of configurations and a map of tensor names.

To add one: a function from `Fields` to `DecoderConfig`, an entry in `_FAMILIES` (and in
`gguf._ARCHITECTURES`), and a golden test.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args

from pagedjax.models.config import DecoderConfig, Dtype
from pagedjax.models.errors import ConfigError
from pagedjax.models.families.common import HARMLESS
from pagedjax.models.families.fields import Fields
from pagedjax.models.families.gemma3 import GEMMA3_DEFAULTS, gemma3
from pagedjax.models.families.gguf import GGUFTensors, hf_config_of_gguf
from pagedjax.models.families.llama import LLAMA_DEFAULTS, MISTRAL_DEFAULTS, llama, mistral
from pagedjax.models.families.names import (
    FUSED_PARTS,
    GGUF_NAMES,
    HF_GEMMA_NAMES,
    HF_NAMES,
    TensorNames,
)
from pagedjax.models.families.qwen import QWEN2_DEFAULTS, QWEN3_DEFAULTS, qwen2, qwen3

__all__ = [
    "FUSED_PARTS",
    "HF_GEMMA_NAMES",
    "HF_NAMES",
    "TensorNames",
    "from_gguf",
    "from_hf",
]


@dataclasses.dataclass(frozen=True)
class _Family:
    """`defaults`: what a configuration may leave out."""

    architecture: str
    build: Callable[[Fields], DecoderConfig]
    defaults: Mapping[str, Any]
    names: TensorNames = HF_NAMES


_FAMILIES = {
    "gemma3_text": _Family("Gemma3ForCausalLM", gemma3, GEMMA3_DEFAULTS, HF_GEMMA_NAMES),
    "llama": _Family("LlamaForCausalLM", llama, LLAMA_DEFAULTS),
    "mistral": _Family("MistralForCausalLM", mistral, MISTRAL_DEFAULTS),
    "qwen2": _Family("Qwen2ForCausalLM", qwen2, QWEN2_DEFAULTS),
    "qwen3": _Family("Qwen3ForCausalLM", qwen3, QWEN3_DEFAULTS),
}

# A Gemma 3 that also sees: its decoder is that of `gemma3_text`, under a prefix.
_GEMMA3_VISION = "gemma3"
_GEMMA3_VISION_NAMES = dataclasses.replace(
    HF_GEMMA_NAMES,
    prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    ignored=(*HF_GEMMA_NAMES.ignored, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
)


def from_hf(
    config: Mapping[str, Any], dtype: str | None = None
) -> tuple[DecoderConfig, TensorNames]:
    """The decoder that a Hugging Face `config.json` describes, old or new style.

    Args:
      config: the parsed JSON.
      dtype: of the weights; None: what the configuration says, float32 if it says nothing.

    Raises:
      ConfigError: an architecture, option or value that is not supported, by name.
    """
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    names = None
    if config.get("model_type") == _GEMMA3_VISION:
        config, names = _text_part(config), _GEMMA3_VISION_NAMES
        dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported are "
            f"{', '.join([*_FAMILIES, _GEMMA3_VISION])}"
        )
    where = f"config of model_type {model_type!r}"
    architectures = config.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or family.architecture not in architectures:
        raise ConfigError(
            f"{where}: architectures {architectures}; only {family.architecture} is supported"
        )
    _refuse_quantized(config, where)
    fields = Fields({**family.defaults, **config}, where)
    decoder = family.build(fields)
    fields.finish(HARMLESS)
    dtype = dtype or "float32"
    if dtype not in get_args(Dtype):
        raise ConfigError(f"{where}: dtype {dtype!r}; supported are {', '.join(get_args(Dtype))}")
    return dataclasses.replace(decoder, dtype=dtype), names or family.names


def from_gguf(
    metadata: Mapping[str, Any], tensors: GGUFTensors, dtype: str | None = None
) -> tuple[DecoderConfig, TensorNames]:
    """The decoder that a GGUF file describes; see `pagedjax.models.gguf_file`.

    Args:
      metadata: the file's key-value pairs.
      tensors: the file's tensors by name.
      dtype: of the weights in memory; None: bfloat16.

    Raises:
      ConfigError: an architecture, option or value that is not supported, by name.
    """
    found = hf_config_of_gguf(metadata, tensors)
    decoder, _ = from_hf(found.config, dtype or "bfloat16")
    if found.rope_divisors is not None:
        decoder = dataclasses.replace(
            decoder, ropes=(decoder.ropes[0].divided(found.rope_divisors),)
        )
    return decoder, dataclasses.replace(
        GGUF_NAMES, interleaved=found.interleaved, ignored=(r"rope_freqs\.weight",)
    )


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config of model_type {_GEMMA3_VISION!r}: 'text_config' is {text!r}")
    shared = ("quantization_config", "compression_config", "tie_word_embeddings")
    inherited = {key: config[key] for key in shared if config.get(key) is not None}
    return {**inherited, **text, "model_type": "gemma3_text", "architectures": None}


def _refuse_quantized(config: Mapping[str, Any], where: str) -> None:
    for key in ("quantization_config", "compression_config"):
        quantization = config.get(key)
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise ConfigError(
                f"{where}: {key} with quant_method {method!r} is not supported; use an "
                "unquantized checkpoint, or a GGUF file"
            )
