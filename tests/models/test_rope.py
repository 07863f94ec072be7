"""Rotary frequencies against their definitions, dimension by dimension, and the rotation itself."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models.errors import ConfigError
from pagedjax.models.rope import RopeConfig, apply_rope, rope_table

HEAD_DIM = 32


def plain(theta: float) -> list[float]:
    return [1.0 / theta ** (2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def test_plain_and_linear() -> None:
    got = RopeConfig(1e4).inverse_frequencies(HEAD_DIM)
    np.testing.assert_allclose(got, plain(1e4))
    got = RopeConfig(1e4, "linear", 4.0).inverse_frequencies(HEAD_DIM)
    np.testing.assert_allclose(got, np.array(plain(1e4)) / 4)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    rope = RopeConfig(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    expected, bands = [], set()
    for frequency in plain(5e5):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            band, stretched = "kept", frequency
        elif wavelength > 8192 / 1:
            band, stretched = "stretched", frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            band, stretched = "blended", (1 - smooth) * frequency / 8 + smooth * frequency
        bands.add(band)
        expected.append(stretched)
    assert bands == {"kept", "stretched", "blended"}
    np.testing.assert_allclose(rope.inverse_frequencies(HEAD_DIM), expected)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_by_rotations_over_the_original_context(truncate: bool) -> None:
    rope = RopeConfig(1e4, "yarn", 4.0, 4096, beta_fast=32, beta_slow=1, truncate=truncate)

    def dimension_that_turns(times: float) -> float:
        # Dimension d turns 4096 / (2 pi theta^(2d/D)) times over the context; solved for d.
        return HEAD_DIM / 2 * math.log(4096 / (times * 2 * math.pi)) / math.log(1e4)

    low, high = dimension_that_turns(32), dimension_that_turns(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, frequency in enumerate(plain(1e4)):
        stretched = min(max((i - low) / (high - low), 0), 1)
        expected.append(frequency / 4 * stretched + frequency * (1 - stretched))
    np.testing.assert_allclose(rope.inverse_frequencies(HEAD_DIM), expected)


def test_yarn_of_a_short_context_stretches_everything_but_the_first_dimension() -> None:
    got = RopeConfig(1e4, "yarn", 4.0, 4).inverse_frequencies(HEAD_DIM)
    np.testing.assert_allclose(got[1:], np.array(plain(1e4))[1:] / 4)


def test_divisors_apply_one_by_one() -> None:
    divisors = tuple(float(i + 1) for i in range(HEAD_DIM // 2))
    got = RopeConfig(1e4).divided(divisors).inverse_frequencies(HEAD_DIM)
    np.testing.assert_allclose(got * np.array(divisors), plain(1e4))


def test_table_has_every_rope_and_the_attention_factor() -> None:
    ropes = (RopeConfig(1e4), RopeConfig(1e4, "yarn", 4.0, 4096, attention_factor=1.5))
    positions = jnp.array([0, 3, 70], jnp.int32)
    cos, sin = rope_table(ropes, HEAD_DIM, positions)
    assert cos.shape == sin.shape == (2, 3, HEAD_DIM // 2)
    angles = np.outer([0, 3, 70], plain(1e4))
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-5)
    np.testing.assert_allclose(cos[1] ** 2 + sin[1] ** 2, np.full((3, 16), 1.5**2), rtol=1e-5)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 2, HEAD_DIM)), jnp.float32) for _ in range(2))

    def product(q_position: int, k_position: int) -> np.ndarray:
        positions = jnp.array([q_position, k_position], jnp.int32)
        cos, sin = rope_table((RopeConfig(1e4),), HEAD_DIM, positions)
        rotated_q = apply_rope(q, cos[0, :1], sin[0, :1])
        rotated_k = apply_rope(k, cos[0, 1:], sin[0, 1:])
        return np.asarray((rotated_q * rotated_k).sum(-1))

    np.testing.assert_allclose(product(9, 4), product(105, 100), rtol=1e-3)
    assert np.abs(product(9, 4) - product(9, 5)).max() > 1e-2


def test_halves_are_the_pairs() -> None:
    x = jnp.zeros((1, 1, 4), jnp.float32).at[0, 0, 1].set(1.0)
    cos, sin = jnp.array([[1.0, 0.6]]), jnp.array([[0.0, 0.8]])
    np.testing.assert_allclose(apply_rope(x, cos, sin)[0, 0], [0.0, 0.6, 0.0, 0.8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"theta": 0.0}, "theta 0.0"),
        ({"scaling": "ntk"}, "'ntk'"),
        ({"scaling": "linear", "factor": 0.0}, "factor 0.0"),
        ({"scaling": "yarn", "factor": 2.0}, "needs original_max_position"),
        ({"scaling": "llama3", "original_max_position": 8, "low_freq_factor": 4.0}, "not below"),
        ({"scaling": "divided"}, "0 divisors"),
        ({"divisors": (1.0,)}, "1 divisors"),
        ({"scaling": "divided", "divisors": (1.0, 0.0)}, "a rope divisor of 0.0"),
    ],
)
def test_impossible_ropes_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeConfig(**{"theta": 1e4, **arguments})
