"""Paged attention in plain XLA: runs on every backend, and fast on CPU.

For a query row at position p of its sequence, over the keys j of the same sequence:

    s_j = sm_scale * q . k_j          (soft_cap * tanh(s_j / soft_cap) where a soft cap is given)
    o   = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j)),   max(0, p - window + 1) <= j <= p

The work is cut in query tiles of ONE sequence: a tile of `R` rows loops over that sequence's own
blocks, `pages` at a time, from the first inside its window to the one that holds its last position,
with the running maximum and sum of an online softmax (Milakov and Gimelshein, arXiv:1805.02867;
Dao et al., arXiv:2205.14135). Decodes are tiles of one row. No tokens-by-keys matrix exists, no
sequence pays for another's length, and trip counts are dynamic, so one compiled program serves
every mix of chunks and decodes.

`batch_invariant`: every sequence, decodes too, goes through tiles of one shape and loop steps of
one number of keys, counted from key 0. A row then meets the same keys in the same order of sums
whatever the length of its chunk, its place in the tile and the batch around it: loop steps that
are masked for it multiply its sums by exp(0) = 1 and add zeros.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.quantization import k_scales, unpack_int4, v_scales
from pallas_kernels.storage import from_storage

_NEG_INF = -1e30  # finite: a row without keys gives exp(0) * 0, never NaN
_TILE_ROWS = 512  # rows times query heads per KV head of a prefill tile
_SHORT_TILE_ROWS = 64  # the same for chunks that are no longer, as behind a cached prefix
_PREFILL_KEYS = 256  # keys a tile meets in one step of its loop
_DECODE_KEYS = 128
_INVARIANT_TILE_ROWS = 32  # of the one tile shape of batch-invariant calls; costs decodes twofold,
_INVARIANT_KEYS = 128  # long prefills half as much again, and is fast for short chunks


class _Call(NamedTuple):
    """What is the same for every tile of one call."""

    pool: jax.Array
    scales: jax.Array | None
    layer: jax.Array | int
    kv_format: KVFormat
    sm_scale: float
    soft_cap: float | None
    window: jax.Array | int
    sinks: jax.Array | None

    @property
    def compute_dtype(self) -> jnp.dtype:
        """dtype of the operands of both products; sums are float32."""
        dtype = self.kv_format.k
        return dtype if dtype in (jnp.bfloat16, jnp.float16) else jnp.dtype(jnp.float32)

    def dot(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        dtype = self.compute_dtype
        return jnp.einsum(
            spec,
            a.astype(dtype),
            b.astype(dtype),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )


def xla_attention(
    q: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    kv_format: KVFormat,
    sm_scale: float,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    batch_invariant: bool = False,
) -> jax.Array:
    """`paged_attention` (see `attention`) without a kernel; returns f32[N, H, D]."""
    call = _Call(pool, scales, layer, kv_format, sm_scale, soft_cap, window, sinks)
    attend = _one_tile_shape if batch_invariant else _tiles_by_length
    return attend(call, q.astype(jnp.float32), batch)


def _one_tile_shape(call: _Call, q: jax.Array, batch: RaggedBatch) -> jax.Array:
    """f32[N, H, D]: every sequence in tiles of one shape, whatever N.

    Groups of query heads are padded to a power of two, so that a tile fills `_INVARIANT_TILE_ROWS`:
    rows at the edge of a vector or of a product's block may be rounded in another way.
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads = call.pool.shape[2]
    group = num_heads // kv_heads
    padded_group = 1 << (group - 1).bit_length()
    tile_rows = max(1, _INVARIANT_TILE_ROWS // padded_group)
    more_heads = (0, padded_group - group)
    q = q.reshape(num_rows, kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, tile_rows), (0, 0), more_heads, (0, 0)))
    q = q.reshape(num_rows + tile_rows, kv_heads * padded_group, head_dim)
    if call.sinks is not None:
        sinks = jnp.pad(call.sinks.reshape(kv_heads, group), ((0, 0), more_heads))
        call = call._replace(sinks=sinks.reshape(-1))
    everyone = jnp.diff(batch.query_start) > 0
    out = _loop_over_tiles(call, q, jnp.zeros_like(q), batch, everyone, tile_rows, _INVARIANT_KEYS)
    out = out[:num_rows].reshape(num_rows, kv_heads, padded_group, head_dim)
    return out[:, :, :group].reshape(num_rows, num_heads, head_dim)


def _tiles_by_length(call: _Call, q: jax.Array, batch: RaggedBatch) -> jax.Array:
    """f32[N, H, D]: tiles as large as each chunk fills, decodes on their own."""
    num_rows, num_heads, _ = q.shape
    short, long = (
        max(1, min(num_rows, rows * call.pool.shape[2] // num_heads))
        for rows in (_SHORT_TILE_ROWS, _TILE_ROWS)
    )
    q = jnp.pad(q, ((0, long), (0, 0), (0, 0)))
    out = jnp.zeros_like(q)
    lengths = jnp.diff(batch.query_start)
    is_decode = lengths == 1
    if long > short:
        out = _loop_over_tiles(call, q, out, batch, lengths > short, long, _PREFILL_KEYS)
    if long > 1:
        chosen = ~is_decode & ((lengths <= short) | (long == short))
        out = _loop_over_tiles(call, q, out, batch, chosen, short, _PREFILL_KEYS)
    # One loop over sequences is best where a loop step is cheap; elsewhere all of them at once.
    out = lax.platform_dependent(
        q,
        out,
        batch,
        is_decode,
        cpu=functools.partial(_loop_over_tiles, call, tile_rows=1, keys_per_step=_DECODE_KEYS),
        default=functools.partial(_decode_together, call),
    )
    return out[:num_rows]


def _loop_over_tiles(
    call: _Call,
    q: jax.Array,
    out: jax.Array,
    batch: RaggedBatch,
    chosen: jax.Array,
    tile_rows: int,
    keys_per_step: int,
) -> jax.Array:
    """Fill `out` f32[N + R, H, D] with the rows of the `chosen` bool[S] sequences, tile by tile.

    Where a sequence's last tile reaches over the rows behind it, they keep what they have.
    """
    tiles = jnp.where(chosen, _cdiv(jnp.diff(batch.query_start), tile_rows), 0)
    last = jnp.cumsum(tiles)
    pages, tables = _pages_per_step(call, batch.block_tables, keys_per_step)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        s = jnp.searchsorted(last, i, side="right")
        row = batch.query_start[s] + (i - (last[s] - tiles[s])) * tile_rows
        rows_after = batch.query_start[s + 1] - row
        position = batch.context_lens[s] - rows_after
        end = position + jnp.minimum(rows_after, tile_rows)
        tile = lax.dynamic_slice_in_dim(q, row, tile_rows)
        tile = _attend_tile(call, pages, tile, position, end, tables[s])
        if tile_rows > 1:
            own = jnp.arange(tile_rows, dtype=jnp.int32) < rows_after
            there = lax.dynamic_slice_in_dim(out, row, tile_rows)
            tile = jnp.where(own[:, None, None], tile, there)
        return lax.dynamic_update_slice_in_dim(out, tile, row, 0)

    return lax.fori_loop(0, last[-1], body, out)


def _decode_together(
    call: _Call, q: jax.Array, out: jax.Array, batch: RaggedBatch, is_decode: jax.Array
) -> jax.Array:
    """Fill in the rows of the sequences that have one row, all of them in one batched loop."""
    pages, tables = _pages_per_step(call, batch.block_tables, _DECODE_KEYS)
    row = jnp.where(is_decode, batch.query_start[:-1], len(out))
    end = jnp.where(is_decode, batch.context_lens, 0)
    tile = q.at[row].get(mode="fill", fill_value=0)[:, None]
    attend = functools.partial(_attend_tile, call, pages)
    tile = jax.vmap(attend)(tile, jnp.maximum(end - 1, 0), end, tables)
    return out.at[row].set(tile[:, 0], mode="drop")


def _attend_tile(
    call: _Call, pages: int, q: jax.Array, position: jax.Array, end: jax.Array, table: jax.Array
) -> jax.Array:
    """Attention of one tile of one sequence.

    Args:
      pages: blocks a loop step reads.
      q: f32[R, H, D], rows at positions `position, position + 1, ...`; from `end` on, padding.
      end: i32, one past the tile's last position; 0 for an empty tile, whose result is zero.
      table: i32[B], B a multiple of `pages`.

    Returns:
      f32[R, H, D].
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads, block_size = call.pool.shape[2:4]
    group = num_heads // kv_heads
    step = pages * block_size
    flat = (kv_heads, num_rows * group)
    q = (q * call.sm_scale).reshape(num_rows, kv_heads, group, head_dim)
    q = q.transpose(1, 0, 2, 3).reshape(*flat, head_dim)
    row_position = position + jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), group)
    first_key = jnp.maximum(position - call.window + 1, 0)

    def body(i: jax.Array, carry: tuple) -> tuple:
        acc, top, total = carry
        key = i * step + jnp.arange(step, dtype=jnp.int32)
        written = (key >= first_key) & (key < end)
        blocks = lax.dynamic_slice_in_dim(table, i * pages, pages)
        k, v = _load(call, blocks, written, head_dim)
        k_scale, v_scale = _load_scales(call, blocks, written)
        distance = row_position[:, None] - key[None]
        visible = (distance >= 0) & (distance < call.window) & written[None]
        s = call.dot("hrd,hkd->hrk", q, k)
        if k_scale is not None:
            s = s * k_scale[:, None]
        if call.soft_cap is not None:
            s = call.soft_cap * jnp.tanh(s / call.soft_cap)
        s = jnp.where(visible, s, _NEG_INF)
        new_top = jnp.maximum(top, s.max(-1))
        shrink = jnp.exp(top - new_top)
        p = jnp.where(visible, jnp.exp(s - new_top[..., None]), 0.0)
        total = total * shrink + p.sum(-1)
        if v_scale is not None:
            p = p * v_scale[:, None]
        return acc * shrink[..., None] + call.dot("hrk,hkd->hrd", p, v), new_top, total

    if call.sinks is None:
        top, total = jnp.full(flat, _NEG_INF), jnp.zeros(flat)
    else:  # a sink is one more key, with score `sink` and value 0
        sinks = call.sinks.astype(jnp.float32).reshape(kv_heads, 1, group)
        top = jnp.broadcast_to(sinks, (kv_heads, num_rows, group)).reshape(flat)
        total = jnp.ones(flat)
    carry = (jnp.zeros((*flat, head_dim)), top, total)
    acc, _, total = lax.fori_loop(first_key // step, _cdiv(end, step), body, carry)
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(kv_heads, num_rows, group, head_dim).transpose(1, 0, 2, 3)
    return out.reshape(num_rows, num_heads, head_dim)


def _load(
    call: _Call, blocks: jax.Array, written: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """K and V, [KVH, keys, D] each. V is zero where not `written`: a recycled block may hold NaN,

    and 0 * NaN is NaN. K needs no mask, as its scores are replaced.
    """
    kv_heads, block_size, width = call.pool.shape[2:]
    form = call.kv_format
    kv = call.pool[call.layer, blocks].transpose(1, 0, 2, 3)
    kv = kv.reshape(kv_heads, len(blocks) * block_size, width)
    row = form.split(width, head_dim)
    k = _elements(kv[..., : row.k], form.k, head_dim)
    v = _elements(kv[..., row.k :], form.v, head_dim)
    return k, jnp.where(written[None, :, None], v, jnp.zeros((), v.dtype))


def _elements(lanes: jax.Array, dtype: jnp.dtype, head_dim: int) -> jax.Array:
    """[..., D] from the lanes of a pool, whatever lies behind them."""
    if dtype == jnp.int4:
        return unpack_int4(lanes[..., : head_dim // 2])
    return from_storage(lanes[..., :head_dim], dtype)


def _load_scales(
    call: _Call, blocks: jax.Array, written: jax.Array
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """Scales of K and V, f32[KVH, keys] each; V's are zero where V is."""
    if call.scales is None:
        return None, None
    words = call.scales[call.layer, blocks].transpose(1, 0, 2)  # [KVH, pages, T]
    words = words.reshape(words.shape[0], -1)
    return k_scales(words), jnp.where(written[None], v_scales(words), 0.0)


def _pages_per_step(call: _Call, tables: jax.Array, keys: int) -> tuple[int, jax.Array]:
    """Blocks a loop step, and the block tables padded to a multiple of it with the null block."""
    width = tables.shape[1]
    pages = min(max(1, keys // call.pool.shape[3]), width)
    return pages, jnp.pad(tables, ((0, 0), (0, -width % pages)))


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b
