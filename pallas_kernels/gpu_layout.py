"""What the GPU kernel works on: rows laid out in tiles, and a list of the items of work.

An item is one tile of query rows with one split of the keys that it may see. Depends on the batch
alone, so that a model computes it once a step for all its layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.gpu_tiles import TILE_ROWS, GpuShape, GpuTiles, GpuTileSizes
from pallas_kernels.ragged_rows import (
    AlignedRows,
    Tiles,
    align_rows,
    decodes_and_chunks,
    list_tiles,
    most_rows,
    of_rows,
    segment,
)

ROW, POSITION, END, SPLIT, SEQ = range(5)
"""Columns of an item: first row of the tile, position of its first token, one past that of its
last, number of the split, sequence. Padded to a line of 32 bytes."""
_ITEM_WIDTH = 8


class GpuCallLayout(NamedTuple):
    """What one call of the kernel works on.

    Attributes:
      rows: layout of the tokens; each is `row_group` rows.
      position, end: i32[M] of each token of the layout: those of its tile's first token, and one
        past its last; 0 where there is no token.
      items: i32[most items, 8]; unspecified from `count[0]` on.
      count: i32[1].
      chosen: bool[N], rows of the batch that this call computes.
    """

    rows: AlignedRows
    position: jax.Array
    end: jax.Array
    items: jax.Array
    count: jax.Array
    chosen: jax.Array


class GpuLayout(NamedTuple):
    """Both calls of the kernel; None for one that has nothing to do in any batch."""

    decode: GpuCallLayout | None
    chunk: GpuCallLayout | None


def lay_out(
    batch: RaggedBatch,
    num_rows: int,
    shape: GpuShape,
    tiles: GpuTiles,
    *,
    batch_invariant: bool,
) -> GpuLayout:
    """Lay out a batch of `num_rows` rows; its block tables are not looked at."""
    decodes, chunks = decodes_and_chunks(batch, num_rows, batch_invariant=batch_invariant)
    decode = chunk = None
    if decodes is not None:
        decode = _call(batch, num_rows, decodes, shape, tiles.decode, is_decode=True)
    if chunks is not None:
        chunk = _call(batch, num_rows, chunks, shape, tiles.chunk, is_decode=False)
    return GpuLayout(decode, chunk)


def tile_tokens(shape: GpuShape, sizes: GpuTileSizes, *, is_decode: bool) -> int:
    """Tokens of a tile, such that every tile of a sequence begins at a multiple of 8 rows."""
    if is_decode:
        return 1
    group = shape.row_group(sizes, is_decode=False)
    most = TILE_ROWS * sizes.warpgroups // group
    align = shape.token_alignment if group == shape.group else 1
    return most // align * align


def most_parts(shape: GpuShape, sizes: GpuTileSizes, *, is_decode: bool) -> int:
    """Partial results that a row may have: one a split, of decodes one a warpgroup."""
    return -(-shape.num_keys // sizes.split) * (sizes.warpgroups if is_decode else 1)


def _call(
    batch: RaggedBatch,
    num_rows: int,
    chosen: jax.Array,
    shape: GpuShape,
    sizes: GpuTileSizes,
    *,
    is_decode: bool,
) -> GpuCallLayout:
    most_seqs = min(len(chosen), num_rows)
    tokens = tile_tokens(shape, sizes, is_decode=is_decode)
    group = shape.row_group(sizes, is_decode=is_decode)
    if is_decode:
        align, size, most = 1, most_seqs, most_seqs
    else:  # a tile is read whole, also behind its last row
        align = shape.token_alignment
        behind = -(-TILE_ROWS * sizes.warpgroups // (group * align)) * align
        size = most_rows(num_rows, most_seqs, align, with_offset=False) + behind
        most = num_rows // tokens + most_seqs
    nothing = jnp.zeros_like(batch.context_lens)
    rows = align_rows(batch, num_rows, chosen, nothing, alignment=align, front=0, size=size)
    position, end = _bounds(batch, chosen, rows, tokens, size)
    tiles = list_tiles(batch, chosen, tokens, most)
    most_splits = -(-shape.num_keys // sizes.split)
    items, count = _list_items(batch, tiles, rows, tokens, group, sizes.split, most_splits)
    return GpuCallLayout(rows, position, end, items, count, of_rows(batch, num_rows, chosen))


def _bounds(
    batch: RaggedBatch, chosen: jax.Array, rows: AlignedRows, tokens: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """`position` and `end` of a `GpuCallLayout`."""
    lengths = jnp.where(chosen, jnp.diff(batch.query_start), 0)
    token = jnp.arange(size, dtype=jnp.int32)
    seq = jnp.maximum(segment(rows.start, token) - 1, 0)  # the last that begins here or before
    new = token - rows.start[seq]
    there = new < lengths[seq]
    old = batch.context_lens[seq] - lengths[seq]
    position = old + new // tokens * tokens
    end = jnp.minimum(position + tokens, batch.context_lens[seq])
    return jnp.where(there, position, 0), jnp.where(there, end, 0)


def _list_items(
    batch: RaggedBatch,
    tiles: Tiles,
    rows: AlignedRows,
    tokens: int,
    group: int,
    split: int,
    most_splits: int,
) -> tuple[jax.Array, jax.Array]:
    """`items` and `count` of a `GpuCallLayout`."""
    lengths = jnp.diff(batch.query_start)[tiles.seq]
    context = batch.context_lens[tiles.seq]
    position = context - lengths + tiles.first
    end = jnp.minimum(position + tokens, context)
    is_tile = jnp.arange(len(tiles.seq), dtype=jnp.int32) < tiles.count
    splits = jnp.where(is_tile, (end + split - 1) // split, 0)
    last = jnp.cumsum(splits)
    item = jnp.arange(len(tiles.seq) * most_splits, dtype=jnp.int32)
    tile = jnp.minimum(segment(last, item), len(splits) - 1)
    columns = (
        (rows.start[tiles.seq] + tiles.first) * group,
        position,
        end,
        tiles.seq,
    )
    row, position, end, seq = (column[tile] for column in columns)
    number = item - (last[tile] - splits[tile])
    items = jnp.stack([row, position, end, number, seq], axis=1).astype(jnp.int32)
    return jnp.pad(items, ((0, 0), (0, _ITEM_WIDTH - items.shape[1]))), last[-1:].astype(jnp.int32)
