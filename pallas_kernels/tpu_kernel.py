"""The TPU kernel: ragged paged attention over the whole pool, with this step's K and V written.

What it computes, for a query row at position p of its sequence, over the keys j of that sequence:

    s_j = q . k_j                     (soft_cap * tanh(s_j / soft_cap) where a soft cap is given)
    o   = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j)),   max(0, p - window + 1) <= j <= p

Layout. A tile is `tile` consecutive tokens of one sequence with all their query heads; row
`t * group + g` of KV head h is head `h * group + g` of token t. Queries, outputs and this step's
new rows come in arrays whose every sequence starts on a whole sublane tile (`tpu_layout`), because
a DMA can only start there.

    q    [KVH, M * group, Wk]         pool [Lg, P, KVH, T, width]    (in HBM, in and out)
    new  [KVH, M', width]             out  [KVH, M * group, Wv] f32
         [M, KVH, 1, width] of decodes

`Wk` and `Wv` are D where the pool keeps K and V in 8 bits or more and they can be told apart by
whole lane tiles; otherwise `tpu_columns` says what they are.

Pipeline. One flat sequence of fetches: a tile's pages `pages` at a time, then the next tile's, also
across sequences. While one is worked on, the next is in flight:

    fetch n + 1   pages -> kv[1 - slot], new rows -> new[1 - slot]
    fetch n       wait; put new rows over the old page; start to write it; attend
    tile t        queries of t + 1 in flight, result of t - 1 on its way out

A page is fetched if it holds tokens of earlier steps (or must keep what lies behind a chunk's new
rows); new tokens come from `new`, never from a page that this step writes. A page is written by the
last tile that sees it, so no page is read after it was written, and nothing waits for a write but
the fetch that needs its buffer. Of a decode's page only the sublane tile with the new row is
written, and fetched if there is nothing else in the page.

Sources: PagedAttention (Kwon et al., arXiv:2309.06180), FlashAttention's online softmax (Dao et
al., arXiv:2205.14135), ragged paged attention on TPU (arXiv:2604.15464).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu_copies import (
    fetch,
    out_copy,
    q_copy,
    wait_for_fetch,
    wait_for_writes,
    write_copy,
    written_part,
)
from pallas_kernels.tpu_operands import Operands, Tile
from pallas_kernels.tpu_softmax import attend, finish_softmax, start_softmax


def run(op: Operands) -> None:
    num_tiles = op.num_tiles
    op.scratch.num_writes[0] = 0
    op.scratch.num_writes[1] = 0

    @pl.when(num_tiles > 0)
    def _():
        first = op.tile(0)
        q_copy(op, first, 0).start()
        fetch(op, first, op.first_fetch(first), 0)
        lax.fori_loop(0, num_tiles, functools.partial(run_tile, op), 0)
        out_copy(op, first, (num_tiles - 1) % 2).wait()
        wait_for_writes(op, 0)
        wait_for_writes(op, 1)


def run_tile(op: Operands, t: jax.Array, slot: jax.Array) -> jax.Array:
    """Work on tile t, whose first fetch is on its way to half `slot` of the buffers."""
    num_tiles = op.num_tiles
    tile, half = op.tile(t), t % 2
    following, more = op.tile(jnp.minimum(t + 1, num_tiles - 1)), t + 1 < num_tiles

    @pl.when(more)
    def _():
        q_copy(op, following, 1 - half).start()

    start_softmax(op, half)
    q_copy(op, tile, half).wait()
    last = (tile.end_page - 1) // op.static.pages

    def run_fetch(i: jax.Array, slot: jax.Array) -> jax.Array:
        is_last = i == last

        @pl.when(jnp.logical_not(is_last) | more)
        def _():
            then = jax.tree.map(lambda a, b: jnp.where(is_last, a, b), following, tile)
            index = jnp.where(is_last, op.first_fetch(following), i + 1)
            fetch(op, then, index, 1 - slot)

        wait_for_fetch(op, tile, i, slot)
        if op.hbm.new is not None:
            lay_new_rows(op, tile, i, slot)
        attend(op, tile, i, slot, half)
        return 1 - slot

    slot = lax.fori_loop(op.first_fetch(tile), last + 1, run_fetch, slot)
    finish_softmax(op, half)

    # A tile's result may reach over rows of the next: those are overwritten in order.
    @pl.when(t > 0)
    def _():
        out_copy(op, tile, 1 - half).wait()

    out_copy(op, tile, half).start()
    return slot


def lay_new_rows(op: Operands, tile: Tile, i: jax.Array, slot: jax.Array) -> None:
    """Lay this step's rows over the fetched pages; start to write pages seen for the last time.

    What a page holds behind the context's end stays as it is.
    """
    kv, new = op.scratch.kv, op.scratch.new
    start, end = op.pages_of(tile, i)
    size = op.written_rows
    shape = (kv.shape[1], size, kv.shape[3])

    def of_page(page: jax.Array, carry: int) -> int:
        rows = written_part(op, tile, i, page)
        if op.static.is_decode:
            position = tile.old // size * size
            fresh = jnp.broadcast_to(new[slot], shape)
        else:
            position = page * size
            fresh = new[slot, :, rows]
        positions = position + lax.broadcasted_iota(jnp.int32, shape, 1)
        is_new = (positions >= tile.old) & (positions < tile.context)
        kv[slot, :, rows] = jnp.where(is_new, fresh, kv[slot, :, rows])

        @pl.when(page < tile.kept_from)
        def _():
            write_copy(op, tile, i, page, slot).start()
            op.scratch.num_writes[slot] += 1

        return carry

    lax.fori_loop(jnp.maximum(start, tile.old // op.block_size), end, of_page, 0)
