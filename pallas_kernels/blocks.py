"""Block pool operations: write rows, and copy, gather and scatter whole blocks.

Pool layout: `pool[Lg, P, KVH, T, width]`, a row `[K | V]` as its `KVFormat` says, each followed by
zeros where a backend wants more lanes; `Lg` layers of a KV group, `P` physical blocks, `T` tokens a
block. All functions update a donated or carried pool in place. Every indexed axis is an explicit
index, so that the scattered window is one contiguous row or block: XLA:TPU keeps the pool's layout
only in this form.

`scales` u32[Lg, P, KVH, T] belongs to quantized pools, one word for K and V of every token and head
(see `quantization`). It is None for the others.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.kv_format import KVFormat, plain_format
from pallas_kernels.quantization import pack_int4, pack_scales, quantize_rows, rotate
from pallas_kernels.storage import to_storage

Scales = jax.Array | None


def format_of(kv_dtype: KVFormat | DTypeLike | None, pool: jax.Array, scales: Scales) -> KVFormat:
    """What a pool holds, from what the caller says of it: a format, a plain dtype, or nothing.

    Raises:
      ValueError: that does not fit the pool's dtype, or scales are missing or too many.
    """
    if not isinstance(kv_dtype, KVFormat):
        kv_dtype = plain_format(pool.dtype if kv_dtype is None else kv_dtype)
    if kv_dtype.has_scales != (scales is not None):
        raise ValueError(f"a pool of {kv_dtype} {'without' if scales is None else 'with'} scales")
    if kv_dtype.element.itemsize != pool.dtype.itemsize:
        raise ValueError(f"a pool of {kv_dtype} cannot be stored as {pool.dtype}")
    return kv_dtype


def write_kv(
    pool: jax.Array,
    scales: Scales,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    block: jax.Array,
    slot: jax.Array,
    *,
    kv_dtype: KVFormat | DTypeLike | None = None,
) -> tuple[jax.Array, Scales]:
    """Write one row of K and V per token and KV head into `pool`.

    Args:
      pool: [Lg, P, KVH, T, width], elements of `kv_dtype` or their bits (see `storage`).
      scales: u32[Lg, P, KVH, T] of quantized pools.
      layer: i32 scalar, index in the group.
      k: [N, KVH, D], any float dtype.
      v: [N, KVH, D].
      block: i32[N], physical block of each row; `block >= P` drops the row.
      slot: i32[N], 0 <= slot < T.
      kv_dtype: what the pool's elements mean; a dtype: values; None: of the pool's own dtype.

    Returns:
      The updated `(pool, scales)`.

    Raises:
      ValueError: k and v, or the scales, do not fit the pool.
    """
    rows, words = kv_rows(k, v, pool, format_of(kv_dtype, pool, scales))
    head = jnp.arange(pool.shape[2], dtype=jnp.int32)
    pool = pool.at[layer, block[:, None], head[None], slot[:, None]].set(rows, mode="drop")
    if scales is not None:
        scales = scales.at[layer, block[:, None], head[None], slot[:, None]].set(words, mode="drop")
    return pool, scales


def kv_rows(
    k: jax.Array, v: jax.Array, pool: jax.Array, kv_format: KVFormat
) -> tuple[jax.Array, jax.Array | None]:
    """K and V of tokens as the pool stores them.

    Returns:
      `(rows [N, KVH, width] in the pool's dtype, u32[N, KVH] words of scales or None)`.
    """
    if k.shape != v.shape or k.shape[1] != pool.shape[2]:
        raise ValueError(f"k {k.shape} and v {v.shape} do not fit a pool of shape {pool.shape}")
    row = kv_format.split(pool.shape[-1], k.shape[-1])
    f = kv_format
    k, k_scale = _stored(rotate(k) if f.rotates_k else k, f.k, f.has_scales, row.k, pool.dtype)
    v, v_scale = _stored(rotate(v) if f.rotates_v else v, f.v, f.has_scales, row.v, pool.dtype)
    both = jnp.concatenate([k, v], axis=-1)
    if k_scale is None or v_scale is None:
        return both, None
    return both, pack_scales(k_scale, v_scale)


def _stored(
    x: jax.Array, dtype: jnp.dtype, has_scales: bool, lanes: int, storage: jnp.dtype
) -> tuple[jax.Array, jax.Array | None]:
    """[N, KVH, D] as `lanes` lanes of the pool, zero behind them, and scales f32[N, KVH] if any."""
    scale = None
    if has_scales:
        x, scale = quantize_rows(x, dtype)
    x = pack_int4(x) if dtype == jnp.int4 else to_storage(x, dtype, storage)
    return jnp.pad(x, ((0, 0), (0, 0), (0, lanes - x.shape[-1]))), scale


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
      values: [Lg, M, KVH, T, width] in the pool's dtype.
      scale_values: u32[Lg, M, KVH, T] for quantized pools.
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
