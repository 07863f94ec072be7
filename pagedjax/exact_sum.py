"""Sums of weights that are the same in whatever order and grouping they are added.

A weight is taken as a fixed-point number, rounded down to a multiple of 2**-46, and its integer
parts are added. What depends on such a sum (which tokens belong to the likeliest 90%) then cannot
change with the shape of a batch, the path by which it is computed, or XLA's idea of a fast
reduction, as it could with float32.
"""

import jax
import jax.numpy as jnp

_LIMB = 23  # bits; a chunk of 128 limbs, each at most 2**23, sums to at most 2**30
_DIGIT = 15  # bits of a part of such a sum; up to 2**16 of them can be added
_MASK = (1 << _DIGIT) - 1


def sum_digits(weights: jax.Array) -> jax.Array:
    """The sums of f32[T, N, CHUNK] in [0, 1], N <= 2**15, as digits i32[4, T] (see `to_float`)."""
    high, low = _limbs(weights)
    return _digits(high.sum(-1), low.sum(-1)).sum(-1)


def running_digits(weights: jax.Array) -> jax.Array:
    """The running sums of f32[T, K] in [0, 1], K <= CHUNK, as digits i32[4, T, K]."""
    places = jnp.arange(weights.shape[1], dtype=jnp.int32)
    is_summed = (places[None] <= places[:, None])[None]  # K * K is little, and compiled at once
    high, low = (jnp.where(is_summed, x[:, None, :], 0).sum(-1) for x in _limbs(weights))
    return _digits(high, low)


def to_float(digits: jax.Array) -> jax.Array:
    """f32[...], what i32[4, ...] stands for: digits times 2**-8, 2**-23, 2**-31 and 2**-46.

    A function of that number alone, which never decreases as the number grows. Digits may exceed
    their range: those of several sums can be added first.
    """
    a, b, c, d = digits
    c, d = c + (d >> _DIGIT), d & _MASK
    b, c = b + (c >> (_LIMB - _DIGIT)), c & ((1 << (_LIMB - _DIGIT)) - 1)
    a, b = a + (b >> _DIGIT), b & _MASK
    parts = (
        jnp.ldexp(part.astype(jnp.float32), -at)
        for part, at in zip((a, b, c, d), (8, 23, 31, 46), strict=True)
    )
    first, second, third, fourth = parts
    return first + (second + (third + fourth))


def _limbs(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiples of 2**-23 and, of what remains, of 2**-46: i32 each."""
    scale = float(1 << _LIMB)
    scaled = weights * scale
    high = jnp.floor(scaled)
    low = (scaled - high) * scale
    return high.astype(jnp.int32), low.astype(jnp.int32)


def _digits(high: jax.Array, low: jax.Array) -> jax.Array:
    return jnp.stack([high >> _DIGIT, high & _MASK, low >> _DIGIT, low & _MASK])
