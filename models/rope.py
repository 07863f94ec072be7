"""Rotary position embeddings (Su et al., arXiv:2104.09864) and the ways to stretch them."""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.models.errors import ConfigError

Scaling = Literal["none", "linear", "llama3", "yarn", "divided"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Frequencies of one rotary embedding.

    `scaling`:
      * "linear": positions divided by `factor` (Chen et al., arXiv:2306.15595).
      * "llama3": wavelengths over `original_max_position / low_freq_factor` are stretched by
        `factor`, those under `original_max_position / high_freq_factor` are kept, the rest blended
        (Llama 3.1 model card).
      * "yarn": the same idea over dimensions, between `beta_fast` and `beta_slow` rotations, and
        q and k scaled by `attention_factor` (Peng et al., arXiv:2309.00071).
      * "divided": every frequency divided by its own of `divisors` (how GGUF files say "llama3").
    """

    theta: float
    scaling: Scaling = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.scaling not in get_args(Scaling):
            raise ConfigError(f"rope scaling {self.scaling!r}; one of {get_args(Scaling)}")
        if self.theta <= 0 or self.factor <= 0:
            raise ConfigError(f"rope theta {self.theta} and factor {self.factor} must be positive")
        if self.scaling in ("llama3", "yarn") and self.original_max_position < 1:
            raise ConfigError(f"rope scaling {self.scaling!r} needs original_max_position")
        if self.scaling == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}"
            )
        if (self.scaling == "divided") != bool(self.divisors):
            raise ConfigError(f"rope scaling {self.scaling!r} with {len(self.divisors)} divisors")
        if self.divisors and min(self.divisors) <= 0:
            raise ConfigError(f"a rope divisor of {min(self.divisors)}; they must be positive")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RopeConfig":
        return cls(**{**data, "divisors": tuple(data.get("divisors", ()))})

    def divided(self, divisors: tuple[float, ...]) -> "RopeConfig":
        """This unscaled rope with one divisor per frequency."""
        return dataclasses.replace(self, scaling="divided", divisors=divisors)

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """f64[head_dim / 2], radians per position."""
        inv = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling == "linear":
            return inv / self.factor
        if self.scaling == "divided":
            return inv / np.array(self.divisors)
        if self.scaling == "llama3":
            turns = self.original_max_position * inv / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            keep = np.clip((turns - self.low_freq_factor) / span, 0, 1)
            return keep * inv + (1 - keep) * inv / self.factor
        if self.scaling == "yarn":
            keep = self._yarn_kept(head_dim)
            return keep * inv + (1 - keep) * inv / self.factor
        return inv

    def _yarn_kept(self, head_dim: int) -> np.ndarray:
        """f64[head_dim / 2]: 1 where a dimension turns often and is kept, 0 where stretched."""

        def dimension(rotations: float) -> float:
            turn = self.original_max_position / (rotations * 2 * math.pi)
            return head_dim * math.log(turn) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
        return 1 - np.clip(ramp, 0, 1)


def rope_table(
    ropes: tuple[RopeConfig, ...], head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each f32[R, N, head_dim / 2], of every rope at i32[N] positions."""
    inv = np.stack([rope.inverse_frequencies(head_dim) for rope in ropes])
    factor = np.array([rope.attention_factor for rope in ropes], np.float32)[:, None, None]
    angle = positions.astype(jnp.float32)[None, :, None] * inv.astype(np.float32)[:, None, :]
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate f32[N, heads, D]; halves are the pairs (NeoX order). cos, sin f32[N, D / 2]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
