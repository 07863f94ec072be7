"""Which tokens min-p, top-k and top-p keep: those above a threshold, found without sorting.

Most thresholds lie among the likeliest few tokens of a row, and are found there. For the others
the row is halved until few enough tokens are in question.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.exact_sum import running_digits, sum_digits, to_float
from pagedjax.likeliest import CHUNK, top_k
from pagedjax.sampling_input import SamplingInput

NUM_LIKELIEST = CHUNK
"""Tokens of a row that are looked at one by one."""

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The threshold that keeps every token but those of minus infinity."""

_HALVINGS = 14  # of 2**25 possible thresholds at 262k tokens, most rows are left with 100 tokens

_Weigh = Callable[[jax.Array], jax.Array]  # values f32[T, ...] -> weights in [0, 1]


def find_thresholds(x: jax.Array, top: jax.Array, sampling: SamplingInput) -> jax.Array:
    """The least value of each row that is kept; so are all that equal it.

    Args:
      x: f32[T, N, CHUNK], logits over temperature, the largest of a row being 0.
      top: f32[T, NUM_LIKELIEST], the largest of each row, in order.
      sampling: of T rows.

    Returns:
      f32[T], at least `LOWEST`.
    """
    min_p = jnp.where(sampling.min_p > 0, jnp.log(sampling.min_p), LOWEST)

    def cut(index: jax.Array, threshold: jax.Array) -> jax.Array:
        is_top_p = index == 1
        is_wanted = jnp.where(is_top_p, sampling.top_p < 1, sampling.top_k > 0)
        mass = _kept_mass(x, top, threshold, is_wanted & is_top_p)
        k = sampling.top_k.astype(jnp.float32)
        goal = jnp.where(is_top_p, sampling.top_p * mass, k)

        def weigh(values: jax.Array) -> jax.Array:
            return jnp.where(is_top_p, kept_weights(values, threshold), 1.0)

        return jnp.maximum(threshold, _search(x, top, weigh, goal, is_wanted))

    # A loop, so that the search is compiled once.
    return lax.fori_loop(0, 2, cut, min_p)


def kept_weights(x: jax.Array, threshold: jax.Array) -> jax.Array:
    """f32[T, ...], exp of `x`, or 0 for what is less than the row's `threshold` f32[T]."""
    return jnp.where(x >= _like(threshold, x), jnp.exp(x), 0.0)


def _kept_mass(
    x: jax.Array, top: jax.Array, threshold: jax.Array, is_wanted: jax.Array
) -> jax.Array:
    """f32[T], the sum of the kept weights; arbitrary where it is not wanted."""
    few = to_float(running_digits(kept_weights(top, threshold))[..., -1])
    is_few = threshold > top[:, -1]  # all that are kept are in `top`
    return lax.cond(
        (is_wanted & ~is_few).any(),
        lambda: to_float(sum_digits(kept_weights(x, threshold))),
        lambda: few,
    )


def _search(
    x: jax.Array, top: jax.Array, weigh: _Weigh, goal: jax.Array, is_wanted: jax.Array
) -> jax.Array:
    """f32[T]: the largest value whose tokens, with all larger ones, weigh at least `goal`.

    Minus infinity where all finite ones together do not, and where no search is wanted.
    """
    found, is_found = _look(top, jnp.zeros((2, 2, len(x)), jnp.int32), weigh, goal)
    found, is_done = jnp.where(is_wanted, found, -jnp.inf), is_found | ~is_wanted
    return lax.cond(
        is_done.all(),
        lambda: found,
        lambda: jnp.where(is_done, found, _search_rows(x, top[:, -1], weigh, goal, is_done)),
    )


def _search_rows(
    x: jax.Array, limit: jax.Array, weigh: _Weigh, goal: jax.Array, is_done: jax.Array
) -> jax.Array:
    """`_search` where the values above `limit`, f32[T], do not reach the goal.

    Sums of float32 say where to look, and exact ones whether that was right.
    """
    keys, weights = ordered_bits(x), weigh(x)

    def weights_from(bound: jax.Array) -> jax.Array:
        return jnp.where(keys >= _like(bound, x), weights, 0.0)

    def halve(_: int, bounds: tuple) -> tuple:
        low, high = bounds
        middle = low + (high - low) // 2
        is_reached = weights_from(middle).sum(-1).sum(-1) >= goal
        return jnp.where(is_reached, middle, low), jnp.where(is_reached, high, middle)

    def refine(state: tuple) -> tuple:
        low, high, threshold, is_done = state  # `low` reaches the goal, `high` does not
        lower, upper = lax.fori_loop(0, _HALVINGS, halve, (low, high))
        above = sum_digits(weights_from(upper))
        is_above = to_float(above) >= goal
        is_below = to_float(sum_digits(weights_from(lower))) < goal
        rest, _ = top_k(jnp.where(keys < _like(upper, x), x, -jnp.inf), NUM_LIKELIEST)
        found, is_found = _look(rest, above, weigh, goal)
        low = jnp.where(is_above, upper, jnp.where(is_below, low, lower))
        high = jnp.where(is_above, high, jnp.where(is_below, lower, upper))
        is_last = high - low <= 1
        found = jnp.where(is_last, from_ordered_bits(low), found)
        threshold = jnp.where(is_done, threshold, found)
        return low, high, threshold, is_done | is_last | (is_found & ~is_above)

    low = ordered_bits(jnp.where(x > -jnp.inf, x, 0.0).min((1, 2)))
    state = (low, ordered_bits(limit) + 1, jnp.zeros_like(limit), is_done)
    return lax.while_loop(lambda state: ~state[-1].all(), refine, state)[2]


def _look(
    top: jax.Array, above: jax.Array, weigh: _Weigh, goal: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Search the largest tokens of each row that are not `above`, f32[T, K] in order.

    Returns:
      f32[T], the value at which the goal is reached, or minus infinity; bool[T], whether it is
      known: either reached, or not reached by any of the finite ones.
    """
    weights = to_float(above[..., None] + running_digits(weigh(top)))
    is_reached = weights >= goal[:, None]
    first = jnp.argmax(is_reached, axis=-1)
    value = jnp.take_along_axis(top, first[:, None], axis=1)[:, 0]
    is_any = is_reached.any(-1)
    return jnp.where(is_any, value, -jnp.inf), is_any | (top[:, -1] == -jnp.inf)


def ordered_bits(x: jax.Array) -> jax.Array:
    """i32 keys in the order of the float32 values (a sign-magnitude number as two's complement)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def from_ordered_bits(keys: jax.Array) -> jax.Array:
    """The float32 values of `ordered_bits`."""
    bits = keys ^ ((keys >> 31) & jnp.int32(0x7FFFFFFF))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _like(rows: jax.Array, x: jax.Array) -> jax.Array:
    """[T] -> [T, 1, ...] of the rank of `x`."""
    return rows.reshape(-1, *(1,) * (x.ndim - 1))
