"""Scales written by whole pages, as TPU wants it.

XLA:TPU keeps an array's layout when whole tiles of it are scattered. For single words it prefers
another one, and copies all scales of the pool into it and back, in every layer. So the pages that
get rows of this step are read, changed and written as wholes. No page belongs to two sequences.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.ragged_rows import segment


class ScalePages(NamedTuple):
    """Pages with rows of this step; the same for all layers and KV groups.

    Attributes:
      seq, page: i32[M], sequence, and page of its block table.
      exists: bool[M]; the others are padding.
      source: i32[M, T], the row of the batch that each slot gets.
      is_new: bool[M, T], whether it gets one.
    """

    seq: jax.Array
    page: jax.Array
    exists: jax.Array
    source: jax.Array
    is_new: jax.Array


def touched_pages(batch: RaggedBatch, num_rows: int, block_size: int) -> ScalePages:
    """The pages that `num_rows` rows of `batch` are written to."""
    num_seqs = len(batch.context_lens)
    query_lens = jnp.diff(batch.query_start)
    old = batch.context_lens - query_lens
    first = old // block_size
    count = jnp.where(query_lens > 0, (batch.context_lens - 1) // block_size - first + 1, 0)
    end = jnp.cumsum(count)
    # A sequence's first and last page may each have a single row.
    most = min(num_rows, num_rows // block_size + 2 * min(num_seqs, num_rows))
    number = jnp.arange(most, dtype=jnp.int32)
    seq = jnp.minimum(segment(end, number), num_seqs - 1)
    page = number - (end - count)[seq] + first[seq]
    slots = jnp.arange(block_size, dtype=jnp.int32)
    position = page[:, None] * block_size + slots[None]
    index = position - old[seq][:, None]
    exists = number < end[-1]
    is_new = (index >= 0) & (index < query_lens[seq][:, None]) & exists[:, None]
    source = jnp.clip(index + batch.query_start[seq][:, None], 0, num_rows - 1)
    return ScalePages(seq, page, exists, source, is_new)


def write_scale_pages(
    scales: jax.Array,
    layer: jax.Array | int,
    words: jax.Array,
    batch: RaggedBatch,
    pages: ScalePages,
) -> jax.Array:
    """Write the u32[N, KVH] words of rows into `scales` u32[Lg, P, KVH, T]."""
    page = jnp.clip(pages.page, 0, batch.block_tables.shape[1] - 1)
    block = batch.block_tables[pages.seq, page]
    old = scales[layer, block]
    new = words[pages.source].transpose(0, 2, 1)
    merged = jnp.where(pages.is_new[:, None], new, old)
    target = jnp.where(pages.exists, block, scales.shape[1])
    return scales.at[layer, target].set(merged, mode="drop")
