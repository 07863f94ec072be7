"""Log-probabilities of given tokens, with gradients."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, bind

_TILE_LOGITS = 2**25  # logits that exist at a time: 128 MiB


def score(
    config: DecoderConfig,
    params: Params,
    token_ids: jax.Array,
    mask: jax.Array,
    *,
    temperature: ArrayLike = 1.0,
) -> jax.Array:
    """How likely each token is behind those before it; differentiable in `params`.

    Attention over whole sequences, without a pool, of the same decoder that generates: on the same
    tokens, both differ by rounding alone. Neither all logits nor all attention scores exist at a
    time; for the gradient they are computed again, layer by layer and tile by tile.

    Args:
      params: floats (see `models.param_values.as_values`) where a gradient is wanted.
      token_ids: i32[S, L]. mask: bool[S, L], which are tokens; the others are padding, wherever it
        stands, so left-padded prompts in front of right-padded completions are one sequence each.
      temperature: that logits are divided by.

    Returns:
      f32[S, L], natural logarithms; zero for the first token of a sequence and for padding.
    """
    num_seqs, length = token_ids.shape
    model = bind(config, params)
    hidden = model.without_cache(token_ids, mask)
    places = jnp.where(mask, jnp.arange(length, dtype=jnp.int32)[None], -1)
    before = jnp.pad(lax.cummax(places, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    wanted = mask & (before >= 0)
    hidden = jnp.take_along_axis(hidden, jnp.maximum(before, 0)[..., None], axis=1)
    rows = num_seqs * length
    tile = max(1, min(rows, _TILE_LOGITS // config.vocab_size))

    def tiles(x: jax.Array) -> jax.Array:
        x = x.reshape(rows, *x.shape[2:])
        return jnp.pad(x, ((0, -rows % tile), *[(0, 0)] * (x.ndim - 1))).reshape(
            -1, tile, *x.shape[1:]
        )

    @jax.checkpoint
    def one(own: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = model.logits(own[0]) / temperature
        logits -= lax.stop_gradient(logits.max(1, keepdims=True))
        chosen = jnp.take_along_axis(logits, own[1][:, None], axis=1)[:, 0]
        return chosen - jnp.log(jnp.exp(logits).sum(1))

    found = lax.map(one, (tiles(hidden), tiles(jnp.where(wanted, token_ids, 0))))
    return jnp.where(wanted, found.reshape(-1)[:rows].reshape(num_seqs, length), 0.0)
