"""What the TPU kernel works on, and where the pages of a tile begin and end."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu_columns import Columns

Ref = Any  # to memory on the chip; before there is one, its shape; None where it is not used


class Static(NamedTuple):
    """What the compiled kernel is made for.

    Attributes:
      group: rows of a token and KV head in a tile, padding included.
      tile: tokens of a tile.
      pages: pages of a fetch.
      keys: keys of one matrix product; divides `pages * block_size`.
      is_decode: every sequence has one token, and `new` one row for each.
      alignment: rows of a sublane tile of the pool.
      k, v: columns of both products, Wk and Wv of them.
      masks_all: also products that every row sees whole, so that all go through the same sums.
      table_width: columns of the block table.
      soft_cap: see `tpu_kernel`.
    """

    group: int
    tile: int
    pages: int
    keys: int
    is_decode: bool
    alignment: int
    k: Columns
    v: Columns
    masks_all: bool
    table_width: int
    soft_cap: float | None


class Scalars(NamedTuple):
    """In SMEM.

    Attributes:
      call: i32[3], layer, window, number of tiles.
      tables: i32[S * B].
      tile_seq: sequence of each tile.
      tile_first: index of a tile's first token among the new ones of its sequence.
      q_start: i32[S], first token of a sequence in `q`.
      new_start: i32[S], row of a chunk's first token in `new`, rounded down to a sublane tile.
      query_lens: i32[S].
      context_lens: i32[S].
    """

    call: jax.Array
    tables: jax.Array
    tile_seq: jax.Array
    tile_first: jax.Array
    q_start: jax.Array
    new_start: jax.Array
    query_lens: jax.Array
    context_lens: jax.Array


class Hbm(NamedTuple):
    """Arrays that stay in HBM; `new` is None where nothing is written, `scales` for plain pools."""

    q: Ref
    new: Ref
    scales: Ref
    pool: Ref
    out: Ref


class Scratch(NamedTuple):
    """In VMEM, two of each: one worked on, one in flight; and the semaphores of the copies.

    Attributes:
      q: [2, KVH, R, Wk]. acc: f32[2, KVH, R, Wv], which becomes the result.
      top, total: f32[KVH, R, 1], running maximum and sum of the softmax.
      kv: [2, KVH, pages * T, width]. new: [2, KVH, pages * T, width], or one row of a decode.
      scales: u32[2, pages, KVH, T].
      num_writes: i32[2] in SMEM, pages on their way out of each half of `kv`.
    """

    q: Ref
    acc: Ref
    top: Ref
    total: Ref
    kv: Ref
    new: Ref
    scales: Ref
    num_writes: Ref
    q_sem: Ref
    out_sem: Ref
    fetch_sem: Ref
    write_sem: Ref


class Tile(NamedTuple):
    """Scalars of a tile; positions are those of its sequence.

    Attributes:
      position: of its first token. end: one past its last.
      old: tokens of earlier steps. context: all of them.
      first_page: that some row sees. end_page: one past the last.
      kept_from: pages before this one are seen by no later tile.
      q_row: its first row in `q` and `out`.
    """

    seq: jax.Array
    position: jax.Array
    end: jax.Array
    old: jax.Array
    context: jax.Array
    first_page: jax.Array
    end_page: jax.Array
    kept_from: jax.Array
    q_row: jax.Array


class Operands(NamedTuple):
    """All of them; `sinks` f32[KVH, R, 1] in VMEM, or None."""

    static: Static
    scalars: Scalars
    hbm: Hbm
    scratch: Scratch
    sinks: Ref

    @property
    def block_size(self) -> int:
        return self.hbm.pool.shape[3]

    @property
    def layer(self) -> jax.Array:
        return self.scalars.call[0]

    @property
    def window(self) -> jax.Array:
        return self.scalars.call[1]

    @property
    def num_tiles(self) -> jax.Array:
        return self.scalars.call[2]

    def tile(self, t: jax.Array | int) -> Tile:
        s, size = self.scalars, self.block_size
        seq, first = s.tile_seq[t], s.tile_first[t]
        context = s.context_lens[seq]
        old = context - s.query_lens[seq]
        position = old + first
        behind = position + self.static.tile
        is_last = behind >= context
        end = jnp.minimum(behind, context)
        end_page = pl.cdiv(end, size)
        return Tile(
            seq=seq,
            position=position,
            end=end,
            old=old,
            context=context,
            first_page=self._first_seen(position),
            end_page=end_page,
            kept_from=jnp.where(is_last, end_page, self._first_seen(behind)),
            q_row=(s.q_start[seq] + first) * self.static.group,
        )

    def _first_seen(self, position: jax.Array) -> jax.Array:
        """The page with the first key in the window of a row."""
        return jnp.maximum(position - self.window + 1, 0) // self.block_size

    def first_fetch(self, tile: Tile) -> jax.Array:
        return tile.first_page // self.static.pages

    def pages_of(self, tile: Tile, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and one past the last page of a tile's i-th fetch."""
        start = i * self.static.pages
        return (
            jnp.maximum(start, tile.first_page),
            jnp.minimum(start + self.static.pages, tile.end_page),
        )

    def is_fetched(self, tile: Tile, page: jax.Array) -> jax.Array:
        """Whether a page holds more than this step's tokens, or more than them has to be kept."""
        start = page * self.block_size
        if self.hbm.new is None:
            return start >= 0
        holds_old = start < tile.old
        if self.static.is_decode:  # keeps what lies beside its row by fetching no more than that
            return holds_old
        return holds_old | (start + self.block_size > tile.context)

    def is_touched(self, tile: Tile, page: jax.Array) -> jax.Array:
        """Whether a page gets new tokens; it is none behind the context's end."""
        return (page + 1) * self.block_size > tile.old

    @property
    def written_rows(self) -> int:
        """Rows of a page that go back to the pool: a decode's sublane tile, else all."""
        return self.static.alignment if self.static.is_decode else self.block_size

    def block(self, tile: Tile, page: jax.Array) -> jax.Array:
        """The physical block of a page of the tile's sequence."""
        return self.scalars.tables[tile.seq * self.static.table_width + page]
