"""Block pool operations: write rows, and copy, gather and scatter whole blocks.

Pool layout: `pool[Lg, P, KVH, T, 2 * D]` with K in lanes `:D` and V in lanes `D:`; `Lg` layers of a
KV group, `P` physical blocks, `T` tokens a block. All functions update a donated or carried pool in
place. Every indexed axis is an explicit index, so that the scattered window is one contiguous row
or block: XLA:TPU keeps the pool's layout only in this form.

`scales` belongs to quantized pools and passes through as None for the others.
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
      pool: [Lg, P, KVH, T, 2 * D], the values of `kv_dtype` or their bits (see `storage`).
      scales: None (unquantized pools).
      layer: i32 scalar, index in the group.
      k: [N, KVH, D], any float dtype; rounded to `kv_dtype`.
      v: [N, KVH, D].
      block: i32[N], physical block of each row; `block >= P` drops the row.
      slot: i32[N], 0 <= slot < T.
      kv_dtype: what the pool's elements mean; None: the pool's own dtype.

    Returns:
      The updated `(pool, scales)`.
    """
    if k.shape != v.shape or 2 * k.shape[-1] != pool.shape[-1] or k.shape[1] != pool.shape[2]:
        raise ValueError(f"k {k.shape} and v {v.shape} do not fit a pool of shape {pool.shape}")
    rows = jnp.concatenate([k, v], axis=-1)
    rows = to_storage(rows, pool.dtype if kv_dtype is None else kv_dtype, pool.dtype)
    head = jnp.arange(pool.shape[2], dtype=jnp.int32)
    return pool.at[layer, block[:, None], head[None], slot[:, None]].set(rows, mode="drop"), scales


def gather_blocks(pool: jax.Array, scales: Scales, blocks: jax.Array) -> tuple[jax.Array, Scales]:
    """Read whole blocks of every layer: `blocks` i32[M] -> ([Lg, M, KVH, T, 2 * D], scales)."""
    layer = jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None]
    return pool[layer, blocks[None]], scales


def scatter_blocks(
    pool: jax.Array, scales: Scales, blocks: jax.Array, values: jax.Array
) -> tuple[jax.Array, Scales]:
    """Write whole blocks of every layer, the inverse of `gather_blocks`.

    Args:
      blocks: i32[M], all different; an id >= P drops its values (padding).
      values: [Lg, M, KVH, T, 2 * D] in the pool's dtype.
    """
    layer = jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None]
    return pool.at[layer, blocks[None]].set(values, mode="drop"), scales


def copy_blocks(
    pool: jax.Array, scales: Scales, source: jax.Array, target: jax.Array
) -> tuple[jax.Array, Scales]:
    """Copy blocks inside the pool (copy-on-write): `target[i] <- source[i]`, all layers.

    All sources are read before any target is written. i32[M] each; `target >= P` is padding.
    """
    return scatter_blocks(pool, scales, target, gather_blocks(pool, scales, source)[0])
