"""Gemma 3 text: local layers with a window and a rope of their own between global ones."""

import dataclasses
import math
from typing import Any

from pagedjax.models.config import DecoderConfig
from pagedjax.models.families.common import layer_windows, plain
from pagedjax.models.families.fields import Fields
from pagedjax.models.families.ropes import model_rope, rope_config
from pagedjax.models.rope import RopeConfig

# The larger models' files leave out what equals these.
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def gemma3(fields: Fields) -> DecoderConfig:
    max_position = fields.integer("max_position_embeddings")
    ropes = _ropes(fields, max_position)
    config = plain(fields, ropes[0], max_position, act="hidden_activation")
    fields.only("hidden_act", "gelu_pytorch_tanh")  # an older name beside the one in use
    every = fields.integer("sliding_window_pattern")
    kinds = [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(config.num_layers)
    ]
    kinds = fields.names("layer_types", kinds)
    return dataclasses.replace(
        config,
        windows=layer_windows(fields, kinds, fields.optional_integer("sliding_window")),
        ropes=ropes,
        rope_of_layer=tuple(int(kind == "sliding_attention") for kind in kinds),
        attn_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        embed_scale=math.sqrt(config.hidden_size),
        final_soft_cap=fields.optional_number("final_logit_softcapping"),
        qk_norm=True,
        post_norms=True,
    )


def _ropes(fields: Fields, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Of global and local layers. Transformers 5 nests them; before, scaling was global only."""
    local_theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    nested = fields.table("rope_parameters")
    if not nested:
        return model_rope(fields, max_position, _GLOBAL_THETA), RopeConfig(local_theta)
    global_theta = fields.number("rope_theta", _GLOBAL_THETA)
    inner = Fields(nested, f"{fields.where}, rope_parameters")
    ropes = tuple(
        rope_config(inner.table(kind), f"{inner.where}, {kind}", max_position, theta)
        for kind, theta in (("full_attention", global_theta), ("sliding_attention", local_theta))
    )
    inner.finish()
    return ropes[0], ropes[1]
