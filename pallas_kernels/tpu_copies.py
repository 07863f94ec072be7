"""The asynchronous copies of the TPU kernel, and the sets of them that belong together."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_operands import Operands, Ref, Tile
from pallas_kernels.tpu_tiles import sublanes

Copy = Any  # an asynchronous copy: start(), wait()
Rows = Any  # a slice of rows, at a traced start


def q_copy(op: Operands, tile: Tile, half: jax.Array | int) -> Copy:
    source = op.hbm.q.at[:, _rows(op, tile)]
    return pltpu.make_async_copy(source, op.scratch.q.at[half], op.scratch.q_sem.at[half])


def out_copy(op: Operands, tile: Tile, half: jax.Array | int) -> Copy:
    target = op.hbm.out.at[:, _rows(op, tile)]
    sem = op.scratch.out_sem.at[half]
    return pltpu.make_async_copy(op.scratch.acc.at[half], target, sem)


def _rows(op: Operands, tile: Tile) -> Rows:
    rows = op.scratch.q.shape[2]
    return pl.ds(pl.multiple_of(tile.q_row, sublanes(op.hbm.q.dtype)), rows)


def page_copy(
    op: Operands, tile: Tile, i: jax.Array, page: jax.Array, slot: jax.Array | int
) -> Copy:
    target = op.scratch.kv.at[slot, :, page_rows(op, i, page)]
    return pltpu.make_async_copy(_page(op, tile, page), target, op.scratch.fetch_sem.at[slot])


def write_copy(
    op: Operands, tile: Tile, i: jax.Array, page: jax.Array, slot: jax.Array | int
) -> Copy:
    there, here = _written(op, tile, i, page, slot)
    return pltpu.make_async_copy(here, there, op.scratch.write_sem.at[slot])


def kept_copy(
    op: Operands, tile: Tile, i: jax.Array, page: jax.Array, slot: jax.Array | int
) -> Copy:
    """What lies beside the row of a decode that begins a page."""
    there, here = _written(op, tile, i, page, slot)
    return pltpu.make_async_copy(there, here, op.scratch.fetch_sem.at[slot])


def _written(
    op: Operands, tile: Tile, i: jax.Array, page: jax.Array, slot: jax.Array | int
) -> tuple[Ref, Ref]:
    """The part of a page that is written, in the pool and in `kv`."""
    there = _page(op, tile, page)
    rows = written_part(op, tile, i, page)
    if op.static.is_decode:
        row = tile.old // op.written_rows * op.written_rows - page * op.block_size
        there = there.at[:, pl.ds(pl.multiple_of(row, op.written_rows), op.written_rows)]
    return there, op.scratch.kv.at[slot, :, rows]


def written_part(op: Operands, tile: Tile, i: jax.Array, page: jax.Array) -> Rows:
    """Where the part of a page that is written lies in `kv`."""
    if not op.static.is_decode:
        return page_rows(op, i, page)
    size = op.written_rows
    row = tile.old // size * size - i * op.static.pages * op.block_size
    return pl.ds(pl.multiple_of(row, size), size)


def new_copy(
    op: Operands, tile: Tile, i: jax.Array, page: jax.Array, slot: jax.Array | int
) -> Copy:
    """What goes over a page: a decode's only row, or a page of rows, at their place in it."""
    new, buffer, sem = op.hbm.new, op.scratch.new, op.scratch.fetch_sem.at[slot]
    if op.static.is_decode:
        source, target = new.at[op.scalars.q_start[tile.seq]], buffer.at[slot]
    else:
        align, size = op.static.alignment, op.block_size
        row = op.scalars.new_start[tile.seq] + page * size - tile.old // align * align
        source = new.at[:, pl.ds(pl.multiple_of(row, align), size)]
        target = buffer.at[slot, :, page_rows(op, i, page)]
    return pltpu.make_async_copy(source, target, sem)


def scales_copy(
    op: Operands, tile: Tile, i: jax.Array, page: jax.Array, slot: jax.Array | int
) -> Copy:
    source = op.hbm.scales.at[op.layer, op.block(tile, page)]
    target = op.scratch.scales.at[slot, page - i * op.static.pages]
    return pltpu.make_async_copy(source, target, op.scratch.fetch_sem.at[slot])


def _page(op: Operands, tile: Tile, page: jax.Array) -> Ref:
    return op.hbm.pool.at[op.layer, op.block(tile, page)]


def page_rows(op: Operands, i: jax.Array, page: jax.Array) -> Rows:
    """Where a page lies in `kv`, and a chunk's new rows in `new`."""
    row = (page - i * op.static.pages) * op.block_size
    return pl.ds(pl.multiple_of(row, op.block_size), op.block_size)


def fetch(op: Operands, tile: Tile, i: jax.Array, slot: jax.Array | int) -> None:
    """Start the copies of a tile's i-th fetch into half `slot`, once its writes are done."""
    wait_for_writes(op, slot)
    _each_copy(op, tile, i, slot, lambda copy: copy.start())


def wait_for_fetch(op: Operands, tile: Tile, i: jax.Array, slot: jax.Array) -> None:
    _each_copy(op, tile, i, slot, lambda copy: copy.wait())


def _each_copy(op: Operands, tile, i, slot, act) -> None:
    def of_page(page: jax.Array, carry: int) -> int:
        @pl.when(op.is_fetched(tile, page))
        def _():
            act(page_copy(op, tile, i, page, slot))

        if op.hbm.scales is not None:
            act(scales_copy(op, tile, i, page, slot))
        if op.hbm.new is not None:

            @pl.when(op.is_touched(tile, page))
            def _():
                act(new_copy(op, tile, i, page, slot))

            if op.static.is_decode:

                @pl.when(jnp.logical_not(op.is_fetched(tile, page)))
                def _():
                    act(kept_copy(op, tile, i, page, slot))

        return carry

    lax.fori_loop(*op.pages_of(tile, i), of_page, 0)


def wait_for_writes(op: Operands, slot: jax.Array | int) -> None:
    """Until half `slot` of `kv` may be overwritten. All writes are of one size."""
    rows = pl.ds(0, op.written_rows)
    source, target = op.scratch.kv.at[slot, :, rows], op.hbm.pool.at[0, 0, :, rows]
    copy = pltpu.make_async_copy(source, target, op.scratch.write_sem.at[slot])

    def wait(_: jax.Array, carry: int) -> int:
        copy.wait()
        return carry

    lax.fori_loop(0, op.scratch.num_writes[slot], wait, 0)
    op.scratch.num_writes[slot] = 0
