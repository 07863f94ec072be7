"""What the GPU kernel computes: an online softmax in base 2 over the blocks of an item.

Online softmax: Milakov and Gimelshein, arXiv:1805.02867; as a loop over blocks of keys with float32
sums: FlashAttention, Dao et al., arXiv:2205.14135.

A maximum of -inf stands for "no key yet", so that masked blocks leave a row's sums as they are, bit
by bit.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_convert import convert
from pallas_kernels.gpu_operands import Item, Refs, Static
from pallas_kernels.gpu_products import KEYS, ROWS, WGMMA, add_product, full, iota, scores
from pallas_kernels.gpu_tiles import TILE_ROWS
from pallas_kernels.quantization import k_scales, v_scales

LOG2E = math.log2(math.e)


class Sums(NamedTuple):
    """What an item has come to so far.

    Attributes:
      acc: f32[64, D], weighted values. top: f32[64], largest score. total: f32[64], weights.
    """

    acc: jax.Array
    top: jax.Array
    total: jax.Array


class _Block(NamedTuple):
    """Keys of one product, in one stage of the ring.

    Attributes:
      key: position of its first. stage, row: where that lies in the ring.
      kv: reference [keys, 2 * D] to operands of the products.
    """

    key: jax.Array
    stage: jax.Array
    row: Any
    kv: Any


def attend(s: Static, r: Refs, warpgroup: int, item: Item) -> Sums:
    """Attend to the item's blocks, whose queries are in `r.q_tiles`."""
    sim = s.is_simulated
    nothing = Sums(
        full((TILE_ROWS, s.shape.head_dim), 0.0, WGMMA, is_simulated=sim),
        full((TILE_ROWS,), -jnp.inf, ROWS, is_simulated=sim),
        full((TILE_ROWS,), 0.0, ROWS, is_simulated=sim),
    )

    def body(number: jax.Array, sums: Sums) -> Sums:
        return _attend_block(s, r, warpgroup, item, number, sums)

    return lax.fori_loop(item.start, item.stop, body, nothing)


def _attend_block(
    s: Static, r: Refs, warpgroup: int, item: Item, number: jax.Array, sums: Sums
) -> Sums:
    """One block of keys, the `number`-th that this program fetched."""
    stage = lax.rem(number, jnp.int32(s.sizes.stages))
    own = warpgroup * s.sizes.keys if s.is_decode else 0  # a decode's warpgroups share the keys
    key = (number + item.offset) * s.fetched
    plgpu.barrier_wait(r.filled.at[stage])
    kv = _operands(s, r, warpgroup, item, key, stage, own)
    block = _Block(key + own, stage, own, kv)
    size = s.shape.product_keys(s.sizes)
    if size == s.sizes.keys:
        sums = _attend_keys(s, r, warpgroup, item, block, sums)
    else:

        def body(part: jax.Array, sums: Sums) -> Sums:
            row = pl.multiple_of(part * size, size)
            own_part = _Block(block.key + row, stage, own + row, kv.at[pl.ds(row, size)])
            return _attend_keys(s, r, warpgroup, item, own_part, sums)

        sums = lax.fori_loop(0, s.sizes.keys // size, body, sums)
    # Between reading in another way than wgmma does and the next copy to the same place. Also, no
    # warp converts the next block while another multiplies this one.
    if s.shape.is_converted or s.is_simulated:
        plgpu.commit_smem()
    plgpu.barrier_arrive(r.free.at[stage])
    return sums


def _attend_keys(s: Static, r: Refs, warpgroup: int, item: Item, block: _Block, sums: Sums) -> Sums:
    """Both products of a block."""
    sim, shape = s.is_simulated, s.shape
    acc, top, total = sums
    key, kv, size = block.key, block.kv, shape.product_keys(s.sizes)
    rows = pl.ds(block.row, size)
    found = scores(r.q_tiles[warpgroup], kv.at[:, pl.ds(0, shape.head_dim)], is_simulated=sim)
    if r.words is not None:
        k_scale = k_scales(r.words[block.stage, rows])
        found = found * lax.broadcast_in_dim(k_scale, found.shape, [1])
    found = _in_base_2(s, found)
    last = item.position if s.is_decode else item.end - 1
    some_masked = (key + size > item.position + 1) | (key <= last - r.window[0])
    found = lax.cond(
        some_masked, lambda x: _mask(s, r, warpgroup, item, key, x), lambda x: x, found
    )
    new_top = jnp.maximum(top, found.max(axis=1))
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    shrink = jnp.exp2(top - base)
    p = jnp.exp2(found - lax.broadcast_in_dim(base - s.shift, found.shape, [0]))
    total = total * shrink + p.sum(axis=1)
    if r.words is not None:
        v_scale = v_scales(r.words[block.stage, rows])
        p = p * lax.broadcast_in_dim(v_scale, p.shape, [1])
    p = p.astype(shape.compute_dtype)
    # Operands of the second product need not be in registers while the first goes on.
    acc, new_top, total, p = lax.optimization_barrier((acc, new_top, total, p))
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
    v = kv.at[:, pl.ds(shape.head_dim, shape.head_dim)]
    return Sums(add_product(acc, p, v, is_simulated=sim), new_top, total)


def _operands(
    s: Static,
    r: Refs,
    warpgroup: int,
    item: Item,
    key: jax.Array,
    stage: jax.Array,
    own: int,
) -> Any:
    """A reference [keys, 2 * D] to the warpgroup's keys of a stage, in the dtype of the products.

    Values, and their scales, of keys that no row may see are zero: a recycled page may hold NaN
    there, and 0 * NaN is NaN. Scores are replaced, so keys can stay.
    """
    kv = r.ring.at[stage, pl.ds(own, s.sizes.keys)]
    if s.shape.is_converted:
        raw, kv = kv, r.converted[warpgroup]
        convert(s.shape, raw, kv)

    @pl.when((key < item.first) | (key + s.fetched > item.end))
    def _() -> None:
        _clean(s, r, warpgroup, item, key + own, stage, own, kv)

    if s.shape.is_converted:
        plgpu.commit_smem()
    return kv


def _clean(
    s: Static,
    r: Refs,
    warpgroup: int,
    item: Item,
    key: jax.Array,
    stage: jax.Array,
    own: int,
    kv: Any,
) -> None:
    """Zero what the tile does not see of a warpgroup's keys, the first of them at `key`.

    What the warpgroups of a chunk share, each cleans a part of, and they wait for each other.
    """
    is_shared = s.sizes.warpgroups > 1 and not s.is_decode

    def seen(shape: tuple[int, ...], layout: Any, first: int = 0) -> jax.Array:
        position = key + first + iota(shape, 0, layout, is_simulated=s.is_simulated)
        return (position >= item.first) & (position < item.end)

    width = s.shape.piece
    for part in range(s.sizes.keys // TILE_ROWS):
        if is_shared and not s.shape.is_converted and warpgroup != part % s.sizes.warpgroups:
            continue
        rows = pl.ds(part * TILE_ROWS, TILE_ROWS)
        mask = seen((TILE_ROWS, width), WGMMA, part * TILE_ROWS)
        for column in range(s.shape.head_dim, 2 * s.shape.head_dim, width):
            piece = rows, pl.ds(column, width)
            x = kv[piece]
            kv[piece] = jnp.where(mask, x, jnp.zeros((), x.dtype))
    if r.words is not None and not (is_shared and warpgroup > 0):
        keys = pl.ds(own, s.sizes.keys)
        x = r.words[stage, keys]
        r.words[stage, keys] = jnp.where(seen(x.shape, KEYS), x, jnp.zeros((), x.dtype))
    plgpu.commit_smem()
    if is_shared:
        plgpu.barrier_arrive(r.cleaned)
        plgpu.barrier_wait(r.cleaned)


def _in_base_2(s: Static, found: jax.Array) -> jax.Array:
    """Scores from products of queries and keys."""
    if s.soft_cap is None:
        return found * (s.sm_scale * LOG2E)
    # tanh from exp2: the hardware's own has 11 bits, too few for a cap of 50.
    twice = jnp.exp2(found * (2 * LOG2E * s.sm_scale / s.soft_cap))
    return (s.soft_cap * LOG2E) * (1.0 - 2.0 / (1.0 + twice))


def _mask(
    s: Static, r: Refs, warpgroup: int, item: Item, key: jax.Array, found: jax.Array
) -> jax.Array:
    """-inf where a row sees no key. Row `token * group + g` is head g of a token of the tile."""
    ahead = iota(found.shape, 1, WGMMA, is_simulated=s.is_simulated) + (key - item.position)
    if s.is_decode:
        return jnp.where((ahead <= 0) & (ahead > -r.window[0]), found, -jnp.inf)
    row = iota((TILE_ROWS,), 0, ROWS, is_simulated=s.is_simulated) + warpgroup * TILE_ROWS
    token = lax.div(row, jnp.full_like(row, s.group))
    behind = lax.broadcast_in_dim(token - r.window[0], found.shape, [0])
    token = lax.broadcast_in_dim(token, found.shape, [0])
    return jnp.where((ahead <= token) & (ahead > behind), found, -jnp.inf)
