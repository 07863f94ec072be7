"""Attention of a tile over fetched pages: the online softmax of the TPU kernel."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.quantization import k_scales, v_scales
from pallas_kernels.tpu_columns import Columns
from pallas_kernels.tpu_operands import Operands, Tile

START = -1e30  # of the running maximum; finite, so that a row without keys stays finite
MASKED = -2e30  # below START: exp(MASKED - START) is 0


def start_softmax(op: Operands, half: jax.Array) -> None:
    """A sink is one more key, with score `sink` and value 0."""
    top, total, acc = op.scratch.top, op.scratch.total, op.scratch.acc

    def head(h: jax.Array, carry: int) -> int:
        acc[half, h] = jnp.zeros(acc.shape[2:], jnp.float32)
        start = jnp.full(top.shape[1:], START, jnp.float32)
        top[h] = start if op.sinks is None else op.sinks[h]
        total[h] = jnp.full(top.shape[1:], 0.0 if op.sinks is None else 1.0, jnp.float32)
        return carry

    lax.fori_loop(0, top.shape[0], head, 0)


def finish_softmax(op: Operands, half: jax.Array) -> None:
    total, acc = op.scratch.total, op.scratch.acc

    def head(h: jax.Array, carry: int) -> int:
        acc[half, h] = acc[half, h] / jnp.where(total[h] > 0, total[h], 1.0)
        return carry

    lax.fori_loop(0, total.shape[0], head, 0)


def attend(op: Operands, tile: Tile, i: jax.Array, slot: jax.Array, half: jax.Array) -> None:
    """All rows of the tile over the keys of its i-th fetch that some row sees."""
    keys, size = op.static.keys, op.static.pages * op.block_size
    first_key, last_row = i * size, tile.position + op.static.tile - 1
    start = jnp.maximum(tile.first_page * op.block_size - first_key, 0) // keys
    end = pl.cdiv(jnp.minimum(tile.end - first_key, size), keys)

    def product(j: jax.Array, carry: int) -> int:
        key = first_key + j * keys
        sees_all = (key + keys <= tile.position + 1) & (key > last_row - op.window)
        if op.static.masks_all:
            sees_all = jnp.zeros_like(sees_all)

        @pl.when(sees_all)
        def _():
            _each_head(op, tile, j, key, slot, half, masked=False)

        @pl.when(jnp.logical_not(sees_all))
        def _():
            _each_head(op, tile, j, key, slot, half, masked=True)

        return carry

    lax.fori_loop(start, end, product, 0)


def _each_head(op: Operands, tile, j, key, slot, half, *, masked: bool) -> None:
    """One product of keys with the rows of each head.

    What is not `masked` all rows see. Of the rest, V and its scales are zero where nothing was
    fetched: 0 * NaN is NaN. Integers are never NaN.
    """
    _, kv_heads, num_rows, _ = op.scratch.q.shape
    keys = op.static.keys
    has_nan = jnp.issubdtype(op.scratch.kv.dtype, jnp.floating)
    visible = _visible(op, tile, key) if masked else None
    rows_written = None
    if masked and has_nan:
        rows_written = _written(op, tile, key, (keys, op.static.v.width), 0)
    scales_written = _written(op, tile, key, (1, keys), 1) if masked else None

    def head(h: jax.Array, carry: int) -> int:
        k, v = _load(op, h, j, slot)
        of_k, of_v = _scales(op, h, j, slot)
        if rows_written is not None:
            v = jnp.where(rows_written, v, jnp.zeros((), v.dtype))
        if scales_written is not None and of_v is not None:
            of_v = jnp.where(scales_written, of_v, 0.0)
        s = _dot(op.scratch.q[half, h], k, 1)
        if of_k is not None:
            s *= of_k
        if op.static.soft_cap is not None:
            s = op.static.soft_cap * jnp.tanh(s / op.static.soft_cap)
        if visible is not None:
            s = jnp.where(visible, s, MASKED)
        _accumulate(op, h, s, v, of_v, half)
        return carry

    # The few rows of a decode leave units idle: all heads side by side.
    lax.fori_loop(0, kv_heads, head, 0, unroll=num_rows <= 32 and kv_heads <= 16)


def _accumulate(op: Operands, h, s: jax.Array, v: jax.Array, of_v, half: jax.Array) -> None:
    """Take scores f32[R, keys] and values [keys, Wv], times scales, into a head's softmax."""
    top, total, acc = op.scratch.top, op.scratch.total, op.scratch.acc
    old_top = top[h]
    new_top = jnp.maximum(old_top, s.max(axis=-1, keepdims=True))
    shrink = jnp.exp(old_top - new_top)
    p = jnp.exp(s - new_top)
    total[h] = total[h] * shrink + p.sum(axis=-1, keepdims=True)
    if of_v is not None:
        p *= of_v
    acc[half, h] = acc[half, h] * shrink + _dot(p.astype(v.dtype), v, 0)
    top[h] = new_top


def _load(op: Operands, h, j, slot) -> tuple[jax.Array, jax.Array]:
    """K [keys, Wk] and V [keys, Wv] of a head in q's dtype."""
    rows = pl.ds(pl.multiple_of(j * op.static.keys, op.static.keys), op.static.keys)
    k, v = op.static.k, op.static.v

    def elements(columns: Columns) -> jax.Array:
        lanes = op.scratch.kv[slot, h, rows, pl.ds(columns.start, columns.lanes)]
        return columns.elements(lanes, op.hbm.q.dtype)

    key = elements(k)
    return key, key if k.is_same(v) else elements(v)


def _visible(op: Operands, tile: Tile, key: jax.Array) -> jax.Array:
    """bool[R, keys]; row r is token r // group, compared without dividing."""
    group, rows = op.static.group, op.scratch.q.shape[2]
    shape = (rows, op.static.keys)
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    ahead = (key - tile.position) + lax.broadcasted_iota(jnp.int32, shape, 1)
    in_window = (ahead + op.window) * group > row
    exists = ahead < tile.end - tile.position
    return (ahead * group <= row) & in_window & exists


def _written(
    op: Operands, tile: Tile, key: jax.Array, shape: tuple[int, ...], axis: int
) -> jax.Array:
    """bool of a shape with keys along `axis`: those fetched, and before the tile's end."""
    position = key + lax.broadcasted_iota(jnp.int32, shape, axis)
    return (position >= tile.first_page * op.block_size) & (position < tile.end)


def _scales(op: Operands, h, j, slot) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """f32[1, keys]: scales of K and of V of a product's keys; None for plain pools."""
    if op.scratch.scales is None:
        return None, None
    pages = op.static.keys // op.block_size
    words = [op.scratch.scales[slot, j * pages + n, pl.ds(h, 1)] for n in range(pages)]
    words = jnp.concatenate(words, axis=-1)
    return k_scales(words), v_scales(words)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """f32 product over a's last axis and `axis` of b; float32 operands keep all their bits."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
