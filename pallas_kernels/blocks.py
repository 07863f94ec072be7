"""Block pool operations: write rows, and copy, gather and scatter whole blocks.

Pool layout: `pool[Lg, P, KVH, T, 2 * lanes]` with K in the first half of the lanes and V in the
second, each followed by zeros where a head has fewer (`head_lanes`); `Lg` layers of a KV group, `P`
physical blocks, `T` tokens a block. All functions update a donated or carried pool in
place. Every indexed axis is an explicit index, so that the scattered window is one contiguous row
or block: XLA:TPU keeps the pool's layout only in this form.

`scales[Lg, P, KVH, 2, T]` belongs to quantized pools, one for K and one for V of every token and
head: a value is the element times its scale. It is None for the others.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.storage import to_storage

Scales = jax.Array | None


def write_kv(
    pool: jax.Array,
    scales: Scales,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    block: jax.Array,
    slot: jax.Array,
    *,
    kv_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, Scales]:
    """Write one row of K and V per token and KV head into `pool`.

    Args:
      pool: [Lg, P, KVH, T, 2 * lanes], the values of `kv_dtype` or their bits (see `storage`).
      scales: f32[Lg, P, KVH, 2, T]: rows are quantized; None: they are rounded.
      layer: i32 scalar, index in the group.
      k: [N, KVH, D], any float dtype.
      v: [N, KVH, D].
      block: i32[N], physical block of each row; `block >= P` drops the row.
      slot: i32[N], 0 <= slot < T.
      kv_dtype: what the pool's elements mean; None: the pool's own dtype.

    Returns:
      The updated `(pool, scales)`.

    Raises:
      ValueError: k and v do not fit the pool.
    """
    dtype = jnp.dtype(pool.dtype if kv_dtype is None else kv_dtype)
    rows, row_scales = kv_rows(k, v, pool, dtype, quantize=scales is not None)
    head = jnp.arange(pool.shape[2], dtype=jnp.int32)
    pool = pool.at[layer, block[:, None], head[None], slot[:, None]].set(rows, mode="drop")
    if scales is not None:
        scales = write_scales(scales, layer, row_scales, block, slot)
    return pool, scales


def kv_rows(
    k: jax.Array, v: jax.Array, pool: jax.Array, kv_dtype: jnp.dtype, *, quantize: bool
) -> tuple[jax.Array, jax.Array | None]:
    """K and V of tokens as the pool stores them.

    Returns:
      `(rows [N, KVH, 2 * lanes] in the pool's dtype, f32[N, KVH, 2] scales or None)`.
    """
    lanes = pool.shape[-1] // 2
    if k.shape != v.shape or k.shape[-1] > lanes or k.shape[1] != pool.shape[2]:
        raise ValueError(f"k {k.shape} and v {v.shape} do not fit a pool of shape {pool.shape}")
    both = jnp.stack([k, v], axis=2)
    row_scales = None
    if quantize:
        both, row_scales = quantize_rows(both, kv_dtype)
    both = jnp.pad(both, ((0, 0), (0, 0), (0, 0), (0, lanes - k.shape[-1])))
    rows = both.reshape(*k.shape[:2], 2 * lanes)
    return to_storage(rows, kv_dtype, pool.dtype), row_scales


def quantize_rows(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Quantize along the last axis with one symmetric scale a row: `x ~ elements * scale`.

    Returns:
      `(elements in dtype, f32 scales without the last axis)`; a row of zeros gets scale 0.
    """
    x = x.astype(jnp.float32)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x), axis=-1) / largest
    x = x / jnp.where(scale > 0, scale, 1.0)[..., None]
    return (jnp.round(x) if is_integer else x).astype(dtype), scale


def write_scales(
    scales: jax.Array,
    layer: jax.Array | int,
    row_scales: jax.Array | None,
    block: jax.Array,
    slot: jax.Array,
) -> jax.Array:
    """Write the f32[N, KVH, 2] scales of rows to where `write_kv` puts the rows."""
    head = jnp.arange(scales.shape[2], dtype=jnp.int32)[None, :, None]
    which = jnp.arange(2, dtype=jnp.int32)[None, None]
    at = scales.at[layer, block[:, None, None], head, which, slot[:, None, None]]
    return at.set(row_scales, mode="drop")


def gather_blocks(pool: jax.Array, scales: Scales, blocks: jax.Array) -> tuple[jax.Array, Scales]:
    """Read whole blocks of every layer: `blocks` i32[M] -> [Lg, M, ...] of pool and scales."""

    def gather(x: jax.Array) -> jax.Array:
        return x[jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], blocks[None]]

    return gather(pool), None if scales is None else gather(scales)


def scatter_blocks(
    pool: jax.Array,
    scales: Scales,
    blocks: jax.Array,
    values: jax.Array,
    scale_values: Scales = None,
) -> tuple[jax.Array, Scales]:
    """Write whole blocks of every layer, the inverse of `gather_blocks`.

    Args:
      blocks: i32[M], all different; an id >= P drops its values (padding).
      values: [Lg, M, KVH, T, 2 * lanes] in the pool's dtype.
      scale_values: f32[Lg, M, KVH, 2, T] for quantized pools.
    """

    def scatter(x: jax.Array, values: jax.Array) -> jax.Array:
        layer = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        return x.at[layer, blocks[None]].set(values, mode="drop")

    if scales is not None and scale_values is not None:
        scales = scatter(scales, scale_values)
    return scatter(pool, values), scales


def copy_blocks(
    pool: jax.Array, scales: Scales, source: jax.Array, target: jax.Array
) -> tuple[jax.Array, Scales]:
    """Copy blocks inside the pool (copy-on-write): `target[i] <- source[i]`, all layers.

    All sources are read before any target is written. i32[M] each; `target >= P` is padding.
    """
    return scatter_blocks(pool, scales, target, *gather_blocks(pool, scales, source))
