"""The GPU kernel: one warpgroup fetches blocks of keys, one or two others attend to them.

All programs go through the same list of items, each taking every n-th, so that as many programs as
the chip has multiprocessors serve any batch. The fetching warpgroup runs ahead of the others, also
from one item to the next: a stage of the ring is `filled` by its copies and `free` again when every
warpgroup has done with it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_layout import END, POSITION, ROW, SEQ, SPLIT
from pallas_kernels.gpu_operands import Item, Refs, Static, tile_and_head
from pallas_kernels.gpu_softmax import Sums, attend
from pallas_kernels.gpu_tiles import TILE_ROWS

# Of the 168 that 384 threads have each: fetching needs few, and attending all it can get.
_FETCH_REGISTERS, _ATTEND_REGISTERS = 24, 240


def kernel(s: Static, r: Refs) -> None:
    warpgroup = lax.axis_index("warpgroup")
    attending = s.sizes.warpgroups
    moves_registers = attending == 2

    for own in range(attending):

        @pl.when(warpgroup == own)
        def _(own: int = own) -> None:
            if moves_registers:
                plgpu.set_max_registers(_ATTEND_REGISTERS, action="increase")
            _for_items(s, r, lambda item: _attend_item(s, r, own, item))

    @pl.when(warpgroup == attending)
    def _() -> None:
        if moves_registers:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")
        num_blocks = _for_items(s, r, lambda item: _fetch_item(s, r, item))

        @pl.loop(jnp.maximum(num_blocks - s.sizes.stages, 0), num_blocks)
        def _(number: jax.Array) -> None:  # leave no barrier in a phase that nobody has seen
            plgpu.barrier_wait(r.free.at[lax.rem(number, jnp.int32(s.sizes.stages))])


def _for_items(s: Static, r: Refs, work: Callable[[Item], None]) -> jax.Array:
    """Call `work` for every item of this program; returns the number of its blocks."""
    program = lax.axis_index("program")
    count = r.count[0] * s.shape.kv_heads
    mine = lax.div(count - program + (s.programs - 1), jnp.int32(s.programs))

    def body(i: jax.Array, done: jax.Array) -> jax.Array:
        item = _item(s, r, program + i * s.programs, done)
        work(item)
        return item.stop

    return lax.fori_loop(jnp.int32(0), mine, body, jnp.int32(0))


def _item(s: Static, r: Refs, number: jax.Array, done: jax.Array) -> Item:
    """The item, whose blocks follow the `done` ones that this program has had before."""
    record = r.items.at[tile_and_head(s, number)[0]]
    position, end, split = record[POSITION], record[END], record[SPLIT]
    first = jnp.maximum(position - r.window[0] + 1, 0)
    begin = jnp.maximum(split * s.sizes.split, first)
    stop = jnp.minimum((split + 1) * s.sizes.split, end)
    low = lax.div(begin, jnp.int32(s.fetched))
    high = lax.div(stop + (s.fetched - 1), jnp.int32(s.fetched))
    # A window may leave nothing of a split.
    blocks = jnp.maximum(high - low, 0)
    return Item(number, position, end, first, done, done + blocks, low - done)


def _fetch_item(s: Static, r: Refs, item: Item) -> None:
    stages = jnp.int32(s.sizes.stages)
    index, head = tile_and_head(s, item.number)
    seq = r.items[index, SEQ]

    @pl.loop(item.start, item.stop)
    def _(number: jax.Array) -> None:
        stage = lax.rem(number, stages)

        @pl.when(number >= stages)
        def _() -> None:
            plgpu.barrier_wait(r.free.at[stage])

        for piece in range(s.fetched // s.piece):
            _fetch(s, r, seq, head, number + item.offset, piece, stage)


def _fetch(
    s: Static,
    r: Refs,
    seq: jax.Array,
    head: jax.Array,
    block: jax.Array,
    piece: int,
    stage: jax.Array,
) -> None:
    size, page_size = s.piece, s.shape.block_size
    key = block * s.fetched + piece * size
    # Behind the context's end a page may be any: its keys are masked. But it must be one.
    index = jnp.minimum(lax.div(key, jnp.int32(page_size)), r.tables.shape[1] - 1)
    page = r.tables[seq, index]
    rows = pl.ds(piece * size, size)
    part = pl.ds(pl.multiple_of(lax.rem(key, jnp.int32(page_size)), size), size)
    if size == page_size:
        part = pl.ds(0, size)
    here = (r.layer[0], page, head)
    plgpu.copy_gmem_to_smem(r.pool.at[(*here, part)], r.ring.at[stage, rows], r.filled.at[stage])
    if r.words is not None:
        source = r.scales.at[(*here, part)]
        plgpu.copy_gmem_to_smem(source, r.words.at[stage, rows], r.filled.at[stage])


def _attend_item(s: Static, r: Refs, warpgroup: int, item: Item) -> None:
    @pl.when(item.stop > item.start)
    def _() -> None:
        index, head = tile_and_head(s, item.number)
        rows = 0 if s.is_decode else warpgroup * TILE_ROWS
        num_rows = s.group if s.is_decode else TILE_ROWS
        plgpu.copy_gmem_to_smem(
            r.q.at[head, pl.ds(pl.multiple_of(r.items[index, ROW] + rows, 8), num_rows)],
            r.q_tiles[warpgroup].at[pl.ds(0, num_rows)],
            r.q_there.at[warpgroup],
        )
        plgpu.barrier_wait(r.q_there.at[warpgroup])
        _store(s, r, warpgroup, item, attend(s, r, warpgroup, item))


def _store(s: Static, r: Refs, warpgroup: int, item: Item, sums: Sums) -> None:
    """Write the normalized sums and their logarithms; rows of other tiles stay as they are."""
    index, head = tile_and_head(s, item.number)
    target, part = r.items[index, ROW], r.items[index, SPLIT]
    if s.is_decode:
        part, first, num_rows = part * s.sizes.warpgroups + warpgroup, 0, s.group
    else:
        first = warpgroup * TILE_ROWS
        num_rows = jnp.clip((item.end - item.position) * s.group - first, 0, TILE_ROWS)
    any_key = sums.total > 0
    total = jnp.where(any_key, sums.total, 1.0)
    log = sums.top - s.shift + jnp.log2(total)
    r.lse_tile[warpgroup] = jnp.where(any_key, log, -jnp.inf)
    plgpu.commit_smem()  # no warp reads queries from here any more
    mean = sums.acc * lax.broadcast_in_dim(1.0 / total, sums.acc.shape, [0])
    r.out_tiles[warpgroup][...] = mean
    plgpu.commit_smem()

    @pl.loop(0, (num_rows + 7) // 8)
    def _(index: jax.Array) -> None:
        row = pl.multiple_of(index * 8, 8)
        here = (part, head, pl.ds(pl.multiple_of(target + first + row, 8), 8))
        source = pl.ds(row, 8)
        plgpu.copy_smem_to_gmem(r.out_tiles[warpgroup].at[source], r.out.at[here])
        plgpu.copy_smem_to_gmem(r.lse_tile.at[warpgroup, source], r.lse.at[here])

    plgpu.wait_smem_to_gmem(0)
