"""Qwen 2 and 2.5 (biased q, k, v) and dense Qwen 3 (normed q and k)."""

import dataclasses
from typing import Any

from pagedjax.models.config import DecoderConfig
from pagedjax.models.families.common import layer_windows, plain
from pagedjax.models.families.fields import Fields
from pagedjax.models.families.ropes import model_rope

QWEN2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3_DEFAULTS: dict[str, Any] = {**QWEN2_DEFAULTS, "head_dim": 128}


def qwen2(fields: Fields) -> DecoderConfig:
    return dataclasses.replace(_qwen(fields), qkv_bias=True)


def qwen3(fields: Fields) -> DecoderConfig:
    return dataclasses.replace(_qwen(fields), qk_norm=True)


def _qwen(fields: Fields) -> DecoderConfig:
    max_position = fields.integer("max_position_embeddings")
    config = plain(fields, model_rope(fields, max_position), max_position)
    windowed = fields.switch("use_sliding_window")
    window = fields.optional_integer("sliding_window")
    first = fields.optional_integer("max_window_layers") or 0
    kinds = [
        "sliding_attention" if windowed and i >= first else "full_attention"
        for i in range(config.num_layers)
    ]
    layer_types = fields.names("layer_types", kinds)
    windows = layer_windows(fields, layer_types, window if windowed else None)
    return dataclasses.replace(config, windows=windows)
