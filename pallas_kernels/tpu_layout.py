"""Rows of a ragged batch laid out for DMAs: every sequence starts on a whole sublane tile."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch, row_sequences


class AlignedRows(NamedTuple):
    """A layout of M rows that holds the rows of some sequences of a batch.

    Attributes:
      start: i32[S], a multiple of the alignment. The sequence's first row is `offset` behind it.
      source: i32[M], row of the batch for each row of the layout; some row where there is none.
      target: i32[N], row of the layout for each row of the batch; in [0, M) for all of them.
    """

    start: jax.Array
    source: jax.Array
    target: jax.Array


def align_rows(
    batch: RaggedBatch,
    num_rows: int,
    chosen: jax.Array,
    offset: jax.Array,
    *,
    alignment: int,
    front: int,
    size: int,
) -> AlignedRows:
    """Lay out the rows of the `chosen` bool[S] sequences.

    Args:
      num_rows: N, rows of the batch.
      offset: i32[S] in [0, alignment), rows to leave free before a sequence.
      front: rows to leave free before all; a multiple of the alignment.
      size: M; `front` and what `most_rows` says.
    """
    query_lens = jnp.diff(batch.query_start)
    taken = jnp.where(chosen, round_up(offset + query_lens, alignment), 0)
    end = front + jnp.cumsum(taken)
    start = end - taken
    last = len(chosen) - 1
    row = jnp.arange(size, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(end, row, side="right"), last)
    source = batch.query_start[seq] + row - start[seq] - offset[seq]
    own = jnp.minimum(row_sequences(batch.query_start, num_rows), last)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    target = start[own] + offset[own] + rows - batch.query_start[own]
    return AlignedRows(
        start, jnp.clip(source, 0, num_rows - 1), jnp.clip(target, 0, max(size - 1, 0))
    )


def most_rows(num_rows: int, num_seqs: int, alignment: int, *, with_offset: bool) -> int:
    """Most rows that `num_seqs` sequences of together `num_rows` rows can take when aligned."""
    lost = (2 if with_offset else 1) * (alignment - 1)
    most = min(num_rows * alignment, num_rows + lost * min(num_seqs, num_rows))
    return -(-most // alignment) * alignment


class Tiles(NamedTuple):
    """The work list: sequence and first token (among the sequence's new ones) of every tile.

    Attributes:
      seq, first: i32[most tiles]; unspecified from `count` on.
      count: i32.
    """

    seq: jax.Array
    first: jax.Array
    count: jax.Array


def list_tiles(batch: RaggedBatch, chosen: jax.Array, size: int, most: int) -> Tiles:
    """Tiles of at most `size` rows of one sequence each, in the order of the batch."""
    count = jnp.where(chosen, (jnp.diff(batch.query_start) + size - 1) // size, 0)
    end = jnp.cumsum(count)
    tile = jnp.arange(most, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(end, tile, side="right"), len(chosen) - 1).astype(jnp.int32)
    return Tiles(seq, (tile - (end[seq] - count[seq])) * size, end[-1])


def round_up(x: jax.Array, multiple: int) -> jax.Array:
    return (x + multiple - 1) // multiple * multiple
