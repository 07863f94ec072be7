"""Rows of a ragged batch laid out for a kernel's copies, and tiles of them as its work list.

Depends on the batch alone, so that a model computes it once a step for all its layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch


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
    seq = jnp.minimum(segment(end, row), last)
    source = batch.query_start[seq] + row - start[seq] - offset[seq]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    own = jnp.minimum(segment(batch.query_start[1:], rows), last)
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
    seq = jnp.minimum(segment(end, tile), len(chosen) - 1)
    return Tiles(seq, (tile - (end[seq] - count[seq])) * size, end[-1])


def round_up(x: jax.Array, multiple: int) -> jax.Array:
    return (x + multiple - 1) // multiple * multiple


def segment(ends: jax.Array, x: jax.Array) -> jax.Array:
    """i32: the first of the ascending `ends` beyond each x; compared with all, without a loop."""
    return jnp.searchsorted(ends, x, side="right", method="compare_all").astype(jnp.int32)


def decodes_and_chunks(
    batch: RaggedBatch, num_rows: int, *, batch_invariant: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """bool[S] each: sequences of one row, and of more; None where no batch can have any.

    `batch_invariant`: everything is a chunk, so that a row meets one tile shape.
    """
    lengths = jnp.diff(batch.query_start)
    if batch_invariant:
        return None, lengths > 0
    return lengths == 1, lengths > 1 if num_rows > 1 else None


def of_rows(batch: RaggedBatch, num_rows: int, chosen: jax.Array) -> jax.Array:
    """bool[N]: rows of the `chosen` sequences; padding rows are nobody's."""
    own = segment(batch.query_start[1:], jnp.arange(num_rows, dtype=jnp.int32))
    return jnp.pad(chosen, (0, 1))[own]
