"""Tokens through the decoder, into the pool."""

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.functional.cache import Cache, reserve
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import INVARIANT_ROWS, Params, StepInput, bind
from pallas_kernels import row_sequences


def prefill(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    token_ids: jax.Array,
    lengths: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Append tokens to sequences.

    A long prompt can be given in several calls.

    Args:
      token_ids: i32[S, L], of each sequence its next tokens, from the left.
      lengths: i32[S], how many they are; 0 leaves a sequence as it is.

    Returns:
      The cache, and f32[S, V] logits behind each sequence's last new token; arbitrary for those
      without a token and those that overflowed.
    """
    cache, tokens, step = append(cache, token_ids, lengths)
    model = bind(config, params)
    hidden, kv = model(tokens, step, cache.kv)
    return dataclasses.replace(cache, kv=kv), model.logits(hidden[last_rows(step)])


def decode_step(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    token_ids: jax.Array,
    active: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Append one token to each sequence, or to those of bool[S] `active`.

    Args:
      token_ids: i32[S].

    Returns:
      The cache, and f32[S, V] logits behind these tokens; arbitrary where there is none.
    """
    if active is None:
        active = jnp.ones(len(token_ids), bool)
    return prefill(config, params, cache, token_ids[:, None], active.astype(jnp.int32))


def append(
    cache: Cache, token_ids: jax.Array, num_new: jax.Array
) -> tuple[Cache, jax.Array, StepInput]:
    """Lay out the first `num_new` i32[R] of i32[R, L] tokens, for the first R <= S sequences.

    Returns:
      The cache as it will be; i32[N] the tokens one sequence behind the other, N >= R * L; what the
      layers need to know of these R sequences. Those that overflow get no row.
    """
    num_seqs, length = token_ids.shape
    num_rows = num_seqs * length
    if cache.kv.batch_invariant:
        num_rows += -num_rows % INVARIANT_ROWS
    cache, fits = reserve(cache, jnp.pad(num_new, (0, cache.num_seqs - num_seqs)))
    num_new = jnp.where(fits[:num_seqs], num_new, 0)
    start = cache.context_lens[:num_seqs]
    end = start + num_new
    cache = dataclasses.replace(cache, context_lens=cache.context_lens.at[:num_seqs].set(end))
    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_new, dtype=jnp.int32)])
    sequence = jnp.minimum(row_sequences(query_start, num_rows), num_seqs - 1)
    place = jnp.arange(num_rows, dtype=jnp.int32) - query_start[sequence]
    step = StepInput(
        positions=start[sequence] + place,
        query_start=query_start,
        context_lens=jnp.where(num_new > 0, end, 0),
        block_tables=cache.block_tables[:, :num_seqs],
    )
    tokens = token_ids.at[sequence, place].get(mode="clip")
    return cache, tokens, step


def last_rows(step: StepInput) -> jax.Array:
    """i32[R], the row of each sequence's last token; some row of another's where it has none."""
    return jnp.maximum(step.query_start[1:] - 1, 0)
