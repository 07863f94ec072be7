"""Llama 2 and 3, and Mistral: the plain decoder, with one window in early Mistrals."""

import dataclasses
from typing import Any

from pagedjax.models.config import DecoderConfig
from pagedjax.models.families.common import plain
from pagedjax.models.families.fields import Fields
from pagedjax.models.families.ropes import model_rope

LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
MISTRAL_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def llama(fields: Fields) -> DecoderConfig:
    max_position = fields.integer("max_position_embeddings")
    return plain(fields, model_rope(fields, max_position), max_position)


def mistral(fields: Fields) -> DecoderConfig:
    config = llama(fields)
    window = fields.optional_integer("sliding_window")
    if window is None:
        return config
    return dataclasses.replace(config, windows=(window,) * config.num_layers)
