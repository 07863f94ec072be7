"""Choosing the next token on the device, without sorting the vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.batch import SamplingInput
from pagedjax.sampling_params import MAX_LOGPROBS

_ARGMAX_BLOCK = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerOutput:
    """One sampled token for each of S sequences.

    Attributes:
      token_ids: i32[S].
      logprobs: f32[S], of the sampled token in the model's own distribution.
      top_ids, top_logprobs: i32 and f32 [S, K], the likeliest tokens, best first.
        All three are zero unless some sequence of the batch wants log-probabilities.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(logits: jax.Array, sampling: SamplingInput) -> SamplerOutput:
    """Choose a token for each row of f32[S, V] `logits`.

    What no row asks for is not computed: a greedy batch draws no noise and searches no threshold.
    The random stream of a row depends on its seed and position alone, not on its batch.
    """
    greedy = _argmax(logits)
    is_random = sampling.temperature > 0
    token_ids = lax.cond(
        is_random.any(),
        lambda: jnp.where(is_random, _sample_randomly(logits, sampling), greedy),
        lambda: greedy,
    )
    width = min(MAX_LOGPROBS, logits.shape[1])
    num_seqs = len(logits)
    logprobs = lax.cond(
        sampling.wants_logprobs.any(),
        lambda: token_logprobs(logits, token_ids, width),
        lambda: (
            jnp.zeros(num_seqs),
            jnp.zeros((num_seqs, width), jnp.int32),
            jnp.zeros((num_seqs, width)),
        ),
    )
    return SamplerOutput(token_ids, *logprobs)


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, width: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities in the model's own distribution, in float32.

    Args:
      logits: f32[S, V].
      token_ids: i32[S], one token of each row.
      width: K <= V, how many of the likeliest tokens are wanted.

    Returns:
      f32[S], of `token_ids`; then i32[S, K] and f32[S, K], the likeliest tokens, best first.
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, top_ids = lax.top_k(logits, width)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    return (chosen - total)[:, 0], top_ids.astype(jnp.int32), top - total


def _argmax(x: jax.Array) -> jax.Array:
    """i32[S], the first largest of f32[S, V]: over maxima of blocks, then inside one block.

    A plain argmax carries two operands and is not vectorized by XLA:CPU: 40 times slower at 262k.
    """
    num_seqs, vocab = x.shape
    pad = -vocab % _ARGMAX_BLOCK
    x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=-jnp.inf)
    x = x.reshape(num_seqs, -1, _ARGMAX_BLOCK)
    block = jnp.argmax(x.max(-1), axis=-1)
    inside = jnp.take_along_axis(x, block[:, None, None], axis=1)[:, 0]
    return (block * _ARGMAX_BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _sample_randomly(logits: jax.Array, sampling: SamplingInput) -> jax.Array:
    """Gumbel-max sampling (Gumbel, 1954) from the scaled and cut distribution; i32[S]."""
    # The largest becomes 0 first, so that no temperature, however small, makes it infinite.
    scaled = logits - logits.max(-1, keepdims=True)
    scaled = scaled / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    cuts = (sampling.top_k > 0) | (sampling.top_p < 1)
    scaled = lax.cond(cuts.any(), _cut, lambda x, _: x, scaled, sampling)
    noise = jax.vmap(_gumbel, (0, 0, None))(sampling.seed, sampling.position, logits.shape[1])
    return _argmax(scaled + noise)


def _gumbel(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (size,), jnp.float32)


def _cut(scaled: jax.Array, sampling: SamplingInput) -> jax.Array:
    """Minus infinity for the tokens that top-k and then top-p leave out."""
    vocab = scaled.shape[1]
    keys = _ordered_bits(scaled)
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)
    ones = jnp.ones((), jnp.float32)
    keep = keys >= _threshold(keys, ones[None, None], k.astype(jnp.float32))[:, None]
    weights = jnp.where(keep, jnp.exp(scaled - scaled.max(-1, keepdims=True)), 0.0)
    mass = sampling.top_p * weights.sum(-1)
    # A mass that rounds to 0 is reached by no token at all; the likeliest one always stays.
    nucleus = keys >= jnp.minimum(_threshold(keys, weights, mass), keys.max(-1))[:, None]
    keep &= nucleus | (sampling.top_p >= 1)[:, None]
    return jnp.where(keep, scaled, -jnp.inf)


def _threshold(keys: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """i32[S]: the largest t for which the weights of `keys >= t` sum to at least `goal`.

    A bisection over the 2**32 possible keys: 32 passes over the row, whatever its order.
    """

    def halve(_: int, bounds: tuple) -> tuple:
        low, high = bounds  # low reaches the goal, high does not
        middle = (low & high) + ((low ^ high) >> 1)
        reached = jnp.where(keys >= middle[:, None], weights, 0.0).sum(-1) >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    info = jnp.iinfo(jnp.int32)
    low = jnp.full(len(keys), info.min, jnp.int32)
    high = jnp.full(len(keys), info.max, jnp.int32)
    return lax.fori_loop(0, 32, halve, (low, high))[0]


def _ordered_bits(x: jax.Array) -> jax.Array:
    """i32 keys in the order of the float32 values (a sign-magnitude number as two's complement)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
