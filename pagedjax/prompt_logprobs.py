"""Log-probabilities of prompt tokens, without the logits of a whole prompt in memory."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.sampler import token_logprobs
from pagedjax.sampling_params import MAX_LOGPROBS

_TILE = 32  # rows whose logits exist at a time: 32 MiB at a vocabulary of 262,144


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """What the model thought of N prompt tokens; zero for the entries that nobody asked for.

    Attributes:
      logprobs: f32[N], of the token that the prompt has next.
      top_ids, top_logprobs: i32 and f32 [N, K], the likeliest tokens, best first.
    """

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def prompt_logprobs(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    rows: jax.Array,
    targets: jax.Array,
    count: jax.Array,
) -> PromptLogprobs:
    """Log-probabilities for the first `count` of N entries; the time goes with `count`.

    Args:
      logits_of: f32[M, hidden] -> f32[M, V] (`Decoder.logits`).
      hidden: f32[R, hidden].
      rows: i32[N], the row of `hidden` behind each entry; arbitrary from `count` on.
      targets: i32[N], the token whose log-probability is wanted; arbitrary from `count` on.
      count: i32 scalar, 0 <= count <= N.

    Returns:
      Entry i for `rows[i]` and `targets[i]`, with K = min(MAX_LOGPROBS, V).
    """
    size = len(rows)
    tile = min(_TILE, size)
    vocab = jax.eval_shape(logits_of, hidden[:1]).shape[1]
    width = min(MAX_LOGPROBS, vocab)

    def compute(index: jax.Array, out: PromptLogprobs) -> PromptLogprobs:
        # The last tile starts early enough to be whole, and computes some entries again.
        start = jnp.minimum(index * tile, size - tile)
        row = lax.dynamic_slice_in_dim(rows, start, tile)
        target = lax.dynamic_slice_in_dim(targets, start, tile)
        wanted = start + jnp.arange(tile, dtype=jnp.int32) < count

        def put(into: jax.Array, values: jax.Array) -> jax.Array:
            mask = wanted.reshape(-1, *(1,) * (values.ndim - 1))
            return lax.dynamic_update_slice_in_dim(into, jnp.where(mask, values, 0), start, 0)

        found = token_logprobs(logits_of(hidden[row]), target, width)
        return jax.tree.map(put, out, PromptLogprobs(*found))

    nothing = PromptLogprobs(
        jnp.zeros(size, jnp.float32),
        jnp.zeros((size, width), jnp.int32),
        jnp.zeros((size, width), jnp.float32),
    )
    # Without the condition, XLA for TPU7x rearranges the head's weights for a loop of no turns too.
    return lax.cond(
        count > 0,
        lambda: lax.fori_loop(0, (count + tile - 1) // tile, compute, nothing),
        lambda: nothing,
    )
