"""Rows of quantized pools: scales, int4 packing, rotation.

Symmetric quantization with one scale a row, as in KIVI's per-token form (Liu et al.,
arXiv:2402.02750):

    scale = max |x| / largest,    element = round(x / scale),    x ~ element * scale

with `largest` 7, 127 or 448 (int4, int8, float8_e4m3fn). The scale is rounded UP to a bfloat16, so
that no element leaves its range; the two scales of a row share a 32-bit word, K's in the high half
and V's in the low one, so that either is a float32 after one shift or mask, on backends that have
no 16-bit arithmetic, too.

A vector with few large elements leaves int4 no steps for the others. Rotated by an orthogonal
matrix it has none (QuaRot, Ashkboos et al., arXiv:2404.00456):

    q . k = (q R) . (k R),        sum_j p_j v_j = (sum_j p_j (v_j R)) R'

so queries are rotated with the keys, and the attention's result is rotated back for the values.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

_INT4 = jnp.dtype(jnp.int4)
_INT4_LARGEST = 7
_HIGH = np.uint32(0xFFFF0000)


def quantize_rows(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Quantize along the last axis with one symmetric scale a row: `x ~ elements * scale`.

    Args:
      dtype: int8, float8_e4m3fn, or int4, whose elements come as int8.

    Returns:
      `(elements, f32 scales without the last axis)`, scales being bfloat16 numbers; a row of zeros
      gets scale 0.
    """
    x, dtype = x.astype(jnp.float32), jnp.dtype(dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if dtype == _INT4:
        largest, dtype = float(_INT4_LARGEST), jnp.dtype(jnp.int8)
    else:
        largest = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    scale = _round_up(jnp.max(jnp.abs(x), axis=-1) / largest)
    x = x / jnp.where(scale > 0, scale, 1.0)[..., None]
    return (jnp.round(x) if is_integer else x).astype(dtype), scale


def _round_up(x: jax.Array) -> jax.Array:
    """The least bfloat16 numbers that are not below `x` f32, x >= 0; as f32."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type((bits + np.uint32(0xFFFF)) & _HIGH, jnp.float32)


def pack_scales(k: jax.Array, v: jax.Array) -> jax.Array:
    """u32 words of f32 scales as `quantize_rows` gives them."""
    k, v = (lax.bitcast_convert_type(x, jnp.uint32) for x in (k, v))
    return k | (v >> np.uint32(16))


def k_scales(words: jax.Array) -> jax.Array:
    """f32 scales of keys from u32 words; for use in kernels, too."""
    return lax.bitcast_convert_type(words & _HIGH, jnp.float32)


def v_scales(words: jax.Array) -> jax.Array:
    """f32 scales of values from u32 words; for use in kernels, too."""
    return lax.bitcast_convert_type(words << np.uint32(16), jnp.float32)


def pack_int4(x: jax.Array) -> jax.Array:
    """i8[..., n] in [-8, 7] -> u8[..., n / 2]: low nibbles are the first half, high the second."""
    low, high = jnp.split(lax.bitcast_convert_type(x, jnp.uint8), 2, axis=-1)
    return (low & np.uint8(15)) | (high << np.uint8(4))


def unpack_int4(x: jax.Array) -> jax.Array:
    """u8[..., n] -> i8[..., 2 n], the inverse of `pack_int4`."""
    x = lax.bitcast_convert_type(x, jnp.int8)
    four = np.int8(4)
    return jnp.concatenate([(x << four) >> four, x >> four], axis=-1)


def rotate(x: jax.Array) -> jax.Array:
    """Multiply the last axis, of size D, by an orthogonal and symmetric matrix: twice is nothing.

    It is the Hadamard matrix of Sylvester's construction over `sqrt(b)`, in blocks of `b`, the
    largest power of two that divides D: element (i, j) of a block is -1 to the number of bits that
    i and j share.

    Args:
      x: [..., D], any float dtype.

    Returns:
      f32[..., D].
    """
    size = x.shape[-1]
    block = size & -size
    i = jnp.arange(block, dtype=jnp.int32)
    odd = lax.population_count(i[:, None] & i[None]) & 1
    matrix = jnp.where(odd == 1, -1.0, 1.0) * (1.0 / math.sqrt(block))
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], size // block, block)
    return jnp.matmul(parts, matrix, precision=lax.Precision.HIGHEST).reshape(x.shape)
