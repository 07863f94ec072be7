"""Causal attention over whole sequences, without a pool: differentiable, in plain XLA.

For what is computed once and needs gradients (scores, losses): the function of `xla_attention`
with the same operands and sums in float32, so that both agree to rounding.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

_TILE_ROWS = 256  # query positions whose scores exist at a time


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: jax.Array | int,
    dtype: DTypeLike,
) -> jax.Array:
    """Attention of every token to those of its sequence up to itself.

    The scores of a tile of queries exist at a time, f32[S, H, tile, L], and are computed again for
    the gradient.

    Args:
      q: [S, L, H, D]. k, v: [S, L, KVH, D]. Any float dtype.
      positions: i32[S, L], of each token in its sequence, ascending along L.
      mask: bool[S, L], which are tokens; the others are padding, wherever it stands.
      sm_scale: factor on q . k. soft_cap: `soft_cap * tanh(scores / soft_cap)`, if given.
      window: how many last positions a token sees.
      dtype: of the products' operands, as K and V would have it in a pool.

    Returns:
      f32[S, L, H, D]; zero for padding.
    """
    num_seqs, length, num_heads, head_dim = q.shape
    kv_heads, tile = k.shape[2], min(_TILE_ROWS, length)
    k, v = k.astype(dtype), v.astype(dtype)
    q = (q.astype(jnp.float32) * sm_scale).astype(dtype)
    q = q.reshape(num_seqs, length, kv_heads, num_heads // kv_heads, head_dim)
    attend = functools.partial(_attend, k, v, positions, mask, soft_cap, window)
    if tile == length:
        out = attend(q, positions, mask)
    else:
        more = -length % tile

        def tiles(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(num_seqs, -1, tile, *x.shape[2:]), 1, 0)

        each = lax.map(
            lambda own: jax.checkpoint(attend)(*own), tuple(map(tiles, (q, positions, mask)))
        )
        out = jnp.moveaxis(each, 0, 1).reshape(num_seqs, length + more, *q.shape[2:])[:, :length]
    return out.reshape(num_seqs, length, num_heads, head_dim)


def _attend(
    k: jax.Array,
    v: jax.Array,
    key_positions: jax.Array,
    is_key: jax.Array,
    soft_cap: float | None,
    window: jax.Array | int,
    q: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """f32[S, R, KVH, G, D] for queries of that shape, scaled already."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    s = dot("srhgd,skhd->shgrk", q, k)
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    distance = positions[:, :, None] - key_positions[:, None]
    visible = (distance >= 0) & (distance < window) & is_key[:, None] & mask[:, :, None]
    visible = visible[:, None, None]
    top = lax.stop_gradient(jnp.where(visible, s, -jnp.inf).max(-1, keepdims=True))
    top = jnp.where(top > -jnp.inf, top, 0.0)  # padding sees nothing
    p = jnp.exp(jnp.where(visible, s - top, -jnp.inf))
    total = p.sum(-1)
    out = dot("shgrk,skhd->srhgd", p.astype(v.dtype), v)
    return out / jnp.moveaxis(jnp.where(total > 0, total, 1.0), 3, 1)[..., None]
