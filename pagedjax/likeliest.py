"""The largest entries of long rows, found by way of the maxima of their chunks.

A row is looked at once, in a pass that is no more than a maximum; what follows is small.
"""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 128
"""Neighbouring tokens that share a maximum; the lanes of a TPU's vector."""


def chunked(rows: jax.Array) -> jax.Array:
    """f32[S, V] -> f32[S, N, CHUNK], filled up with minus infinity."""
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % CHUNK)), constant_values=-jnp.inf)
    return padded.reshape(len(rows), -1, CHUNK)


def argmax(x: jax.Array) -> jax.Array:
    """i32[S], the first of the largest entries of each row of f32[S, N, CHUNK].

    A plain argmax carries two operands and is not vectorized by XLA:CPU: 40 times slower at 262k.
    Hence the maxima of the chunks are chunked as well where they are many.
    """
    maxima = x.max(-1)
    is_few = maxima.shape[1] <= CHUNK
    chunk = jnp.argmax(maxima, axis=-1) if is_few else argmax(chunked(maxima))
    inside = jnp.take_along_axis(x, chunk[:, None, None], axis=1)[:, 0]
    return (chunk * CHUNK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The `k` largest of each row of f32[S, N, CHUNK], as `lax.top_k` of f32[S, N * CHUNK].

    They lie in the `k` chunks with the largest maxima: behind an entry of another chunk come `k`
    maxima that are larger, or as large and earlier in the row.

    Args:
      k: at most N * CHUNK.

    Returns:
      f32[S, k], the largest first, equal ones in the order of the row; i32[S, k], where they are.
    """
    num_seqs, num_chunks, _ = x.shape
    _, chunks = lax.top_k(x.max(-1), min(k, num_chunks))
    chunks = jnp.sort(chunks, axis=-1)
    candidates = jnp.take_along_axis(x, chunks[:, :, None], axis=1)
    values, where = lax.top_k(candidates.reshape(num_seqs, -1), k)
    # Where only the values are used, XLA:CPU would sort all candidates: 40 times slower. Of these
    # two alone the barrier would be of the operation itself, which XLA cannot compile in a
    # `shard_map` (jax 0.10).
    values, where, chunks = lax.optimization_barrier((values, where, chunks))
    ids = jnp.take_along_axis(chunks, where // CHUNK, axis=1) * CHUNK + where % CHUNK
    return values, ids.astype(jnp.int32)
