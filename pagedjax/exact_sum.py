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
    """The sums of f32[T, N, CHUNK] in [0, 1], N <= 2**15, as digits i32[2, 2, T]."""
    return _digits(_limbs(weights).sum(-1)).sum(-1)


def running_digits(weights: jax.Array) -> jax.Array:
    """The running sums of f32[T, K] in [0, 1], K <= CHUNK, as digits i32[2, 2, T, K]."""
    return _digits(jnp.cumsum(_limbs(weights), axis=-1))


def to_float(digits: jax.Array) -> jax.Array:
    """f32[...], what i32[2, 2, ...] stands for: digits times 2**-8 and 2**-31, 2**-23 and 2**-46.

    A function of that number alone, which never decreases as the number grows. Digits may exceed
    their range: those of several sums can be added first.
    """
    (a, c), (b, d) = digits
    c, d = c + (d >> _DIGIT), d & _MASK
    b, c = b + (c >> (_LIMB - _DIGIT)), c & ((1 << (_LIMB - _DIGIT)) - 1)
    a, b = a + (b >> _DIGIT), b & _MASK
    # The products are exact, so that it does not matter which of them become fused multiply-adds.
    first, second, third, fourth = (part.astype(jnp.float32) for part in (a, b, c, d))
    return first * 2.0**-8 + (second * 2.0**-23 + (third * 2.0**-31 + fourth * 2.0**-46))


def _limbs(weights: jax.Array) -> jax.Array:
    """i32[2, ...]: multiples of 2**-23 and, of what remains, of 2**-46."""
    scale = float(1 << _LIMB)
    scaled = weights * scale
    high = jnp.floor(scaled)
    return jnp.stack([high, (scaled - high) * scale]).astype(jnp.int32)


def _digits(limbs: jax.Array) -> jax.Array:
    return jnp.stack([limbs >> _DIGIT, limbs & _MASK])
