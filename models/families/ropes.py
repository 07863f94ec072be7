"""Rotary embeddings of Hugging Face configurations."""

import math
from collections.abc import Mapping
from typing import Any

from pagedjax.models.errors import ConfigError
from pagedjax.models.families.fields import Fields
from pagedjax.models.rope import RopeConfig

_HARMLESS = (r"finetuned", r"rope_type", r"type")


def model_rope(fields: Fields, max_position: int, theta: float = 10_000.0) -> RopeConfig:
    """The one rope of a model.

    Transformers 5 puts everything into `rope_parameters`; before, `rope_theta` stood beside
    `rope_scaling`. `theta` is the family's default.
    """
    parameters, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    theta = fields.number("rope_theta", theta)
    return rope_config(scaling or parameters, f"{fields.where}, rope", max_position, theta)


def rope_config(
    parameters: Mapping[str, Any], where: str, max_position: int, theta: float
) -> RopeConfig:
    """One rope from its dictionary; `theta` is for a dictionary that has none."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ConfigError(f"{where}: type {kind!r}; supported are {', '.join(_SCALINGS)}")
    fields = Fields(parameters, where)
    theta = fields.number("rope_theta", theta)
    fields.only("partial_rotary_factor", 1.0)
    rope = _SCALINGS[kind](fields, theta, max_position)
    fields.finish(_HARMLESS)
    return rope


def _default(fields: Fields, theta: float, max_position: int) -> RopeConfig:
    return RopeConfig(theta)


def _linear(fields: Fields, theta: float, max_position: int) -> RopeConfig:
    return RopeConfig(theta, "linear", fields.number("factor"))


def _llama3(fields: Fields, theta: float, max_position: int) -> RopeConfig:
    return RopeConfig(
        theta,
        "llama3",
        fields.number("factor"),
        original_max_position=fields.integer("original_max_position_embeddings", max_position),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
    )


def _yarn(fields: Fields, theta: float, max_position: int) -> RopeConfig:
    original = fields.integer("original_max_position_embeddings", max_position)
    factor = fields.number("factor", max_position / original)
    attention_factor = fields.number("attention_factor", _yarn_attention_factor(fields, factor))
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=fields.switch("truncate", True),
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """The paper's 0.1 ln(factor) + 1, or a ratio of two such terms (DeepSeek)."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale = fields.optional_number("mscale")
    mscale_all_dim = fields.optional_number("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
