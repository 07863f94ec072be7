"""Which rows belong to which sequence, and where each row's key and value live in the pool."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedBatch:
    """A ragged mix of prefill chunks and decodes, as the attention functions see it.

    Rows of sequence `s` are `query_start[s] : query_start[s + 1]`; they are the LAST tokens of its
    context. Sequences without rows (padding) come last and have a context length of 0.

    Attributes:
      query_start: i32[S + 1], ascending from 0; rows from `query_start[S]` on are padding.
      context_lens: i32[S], tokens of each sequence in the pool, this step's rows included.
      block_tables: i32[S, B], physical block of each logical block; the null block 0 where unused.
    """

    query_start: jax.Array
    context_lens: jax.Array
    block_tables: jax.Array


def row_sequences(query_start: jax.Array, num_rows: int) -> jax.Array:
    """i32[N]: the sequence of each row; S for padding rows."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.searchsorted(query_start[1:], rows, side="right").astype(jnp.int32)


def slot_mapping(
    batch: RaggedBatch, num_rows: int, *, block_size: int, num_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """Physical block and slot of every row, for `write_kv`.

    Returns:
      `(block i32[N], slot i32[N])`; padding rows get `block == num_blocks`, which a write drops.
    """
    num_seqs, table_width = batch.block_tables.shape
    sequence = row_sequences(batch.query_start, num_rows)
    padding = sequence == num_seqs
    sequence = jnp.minimum(sequence, num_seqs - 1)
    # A row's position: counted back from the end of its sequence's context.
    rows_after = batch.query_start[sequence + 1] - jnp.arange(num_rows, dtype=jnp.int32)
    position = jnp.where(padding, 0, batch.context_lens[sequence] - rows_after)
    logical = jnp.clip(position // block_size, 0, table_width - 1)
    block = jnp.where(padding, num_blocks, batch.block_tables[sequence, logical])
    return block, position % block_size
