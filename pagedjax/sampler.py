"""Choosing the next token on the device, without sorting the vocabulary."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import likeliest
from pagedjax.cuts import LOWEST, NUM_LIKELIEST, find_thresholds, kept_weights
from pagedjax.exact_sum import sum_digits, to_float
from pagedjax.likeliest import CHUNK, chunked
from pagedjax.logits import LogitsProcessor, adjust
from pagedjax.noise import gumbel
from pagedjax.sampling_input import (
    FORBIDDEN,
    IN_PROMPT,
    STOPS,
    TAIL,
    SamplingInput,
    SlotStart,
    SlotState,
)
from pagedjax.sampling_params import MAX_LOGPROBS

_TILE = 4  # rows that are worked on at a time, of those that want more than the argmax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerOutput:
    """One sampled token for each of S sequences.

    Attributes:
      token_ids: i32[S].
      logprobs: f32[S], of the sampled token in the model's own distribution.
      processed_logprobs: f32[S], in the distribution that it was sampled from: of the adjusted
        logits, divided by the temperature and cut; with temperature 1 for a greedy row.
      top_ids, top_logprobs: i32 and f32 [S, K], the likeliest tokens of the model's own
        distribution, best first.
        All four are zero for rows that do not want log-probabilities.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    processed_logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


class _Choice(NamedTuple):
    """Tokens of T rows: i32[T], and the least value that each row kept, f32[T]."""

    token_ids: jax.Array
    threshold: jax.Array


def sample(
    logits: jax.Array,
    sampling: SamplingInput,
    slots: SlotState,
    processors: tuple[LogitsProcessor, ...] = (),
) -> SamplerOutput:
    """Choose a token for each row of f32[S, V] `logits`.

    All rows get their argmax. Those that want anything else are gathered, and computed a few at a
    time, so that a row does not pay for the options of its neighbours. What a row gets depends
    bit for bit on its own logits, parameters and slot alone.
    """
    num_seqs, vocab = logits.shape
    order, count = rows_with_options(sampling)
    tile = min(_TILE, num_seqs)
    order = jnp.pad(order, (0, -num_seqs % tile), mode="edge")
    places = jnp.arange(len(order), dtype=jnp.int32)
    targets = jnp.where(places < count, order, num_seqs)  # the rest of the last tile is dropped

    def compute(index: jax.Array, out: SamplerOutput) -> SamplerOutput:
        rows, into = (lax.dynamic_slice_in_dim(x, index * tile, tile) for x in (order, targets))
        own = jax.tree.map(lambda values: values[rows], sampling)
        found = _sample_tile(logits[rows], own, slots, processors)
        return jax.tree.map(lambda all, some: all.at[into].set(some, mode="drop"), out, found)

    greedy = likeliest.argmax(chunked(logits))
    start = dataclasses.replace(nothing_sampled(num_seqs, vocab), token_ids=greedy)
    return lax.fori_loop(0, (count + tile - 1) // tile, compute, start)


def nothing_sampled(num_seqs: int, vocab: int) -> SamplerOutput:
    """All zero."""
    no_logprobs = _no_logprobs(num_seqs, min(MAX_LOGPROBS, vocab))
    return SamplerOutput(jnp.zeros(num_seqs, jnp.int32), *no_logprobs)


def rows_with_options(sampling: SamplingInput) -> tuple[jax.Array, jax.Array]:
    """i32[S], the rows that want more than the argmax, then the others; i32, how many do."""
    wants_more = (sampling.temperature > 0) | (sampling.processor > 0)
    wants_more |= sampling.adjusts | sampling.wants_logprobs
    order = jnp.argsort(~wants_more, stable=True)
    return order.astype(jnp.int32), wants_more.sum(dtype=jnp.int32)


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
    x = chunked(logits)
    top, top_ids = likeliest.top_k(x, width)
    largest = top[:, :1]
    mass = _log_mass(x - largest[:, None], LOWEST)[:, None]
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    # The difference of logits first: it is small where the logarithm has to be precise.
    return (chosen - largest - mass)[:, 0], top_ids, top - largest - mass


def _sample_tile(
    logits: jax.Array,
    sampling: SamplingInput,
    slots: SlotState,
    processors: tuple[LogitsProcessor, ...],
) -> SamplerOutput:
    adjusted = chunked(adjust(logits, sampling, slots, processors))
    is_random = sampling.temperature > 0
    # The largest becomes 0 first, so that no temperature, however small, makes it infinite.
    largest = jnp.maximum(adjusted.max((1, 2)), LOWEST)
    temperature = jnp.where(is_random, sampling.temperature, 1.0)
    x = (adjusted - largest[:, None, None]) / temperature[:, None, None]
    greedy = _Choice(likeliest.argmax(adjusted), jnp.full(len(x), LOWEST))
    drawn = lax.cond(is_random.any(), lambda: _draw(x, sampling), lambda: greedy)
    chosen = jax.tree.map(lambda a, b: jnp.where(is_random, a, b), drawn, greedy)
    wants = sampling.wants_logprobs
    logprobs = lax.cond(
        wants.any(),
        lambda: _logprobs(logits, x, chosen),
        lambda: _no_logprobs(len(x), min(MAX_LOGPROBS, logits.shape[1])),
    )
    return SamplerOutput(
        chosen.token_ids,
        *(jnp.where(wants.reshape(-1, *(1,) * (y.ndim - 1)), y, 0) for y in logprobs),
    )


def _draw(x: jax.Array, sampling: SamplingInput) -> _Choice:
    """Gumbel-max sampling (Gumbel, 1954) from what the cuts keep of f32[T, N, CHUNK] `x`."""
    is_cut = (sampling.min_p > 0) | (sampling.top_k > 0) | (sampling.top_p < 1)

    def cut() -> tuple[jax.Array, ...]:
        top, ids = likeliest.top_k(x, NUM_LIKELIEST)
        return find_thresholds(x, top, sampling), top, ids

    def keep() -> tuple[jax.Array, ...]:
        shape = (len(x), NUM_LIKELIEST)
        return jnp.full(len(x), LOWEST), jnp.zeros(shape), jnp.zeros(shape, jnp.int32)

    threshold, top, ids = lax.cond(is_cut.any(), cut, keep)
    is_few = threshold > top[:, -1]  # all that are kept are in `top`
    few = _draw_among(top, ids, threshold, sampling)
    token_ids = lax.cond(
        (is_few | (sampling.temperature <= 0)).all(),
        lambda: few,
        lambda: jnp.where(is_few, few, _draw_among_all(x, threshold, sampling)),
    )
    return _Choice(token_ids, threshold)


def _draw_among(
    values: jax.Array, ids: jax.Array, threshold: jax.Array, sampling: SamplingInput
) -> jax.Array:
    """i32[T], one of the tokens `ids` i32[T, K] with `values` f32[T, K]."""
    noise = gumbel(sampling.seed, sampling.position, ids)
    values = jnp.where(values >= threshold[:, None], values + noise, -jnp.inf)
    # Of equal ones the first of the row, as in `_draw_among_all`.
    is_best = values == values.max(-1, keepdims=True)
    return jnp.where(is_best, ids, jnp.iinfo(jnp.int32).max).min(-1)


def _draw_among_all(x: jax.Array, threshold: jax.Array, sampling: SamplingInput) -> jax.Array:
    ids = jnp.arange(x.shape[1] * CHUNK, dtype=jnp.int32)[None]
    noise = gumbel(sampling.seed, sampling.position, ids).reshape(x.shape)
    return likeliest.argmax(jnp.where(x >= threshold[:, None, None], x + noise, -jnp.inf))


def _logprobs(logits: jax.Array, x: jax.Array, chosen: _Choice) -> tuple[jax.Array, ...]:
    """The fields of `SamplerOutput` behind the first."""
    raw, *top = token_logprobs(logits, chosen.token_ids, min(MAX_LOGPROBS, logits.shape[1]))
    flat = x.reshape(len(x), -1)
    value = jnp.take_along_axis(flat, chosen.token_ids[:, None], axis=1)[:, 0]
    return raw, value - _log_mass(x, chosen.threshold), *top


def _no_logprobs(num_seqs: int, width: int) -> tuple[jax.Array, ...]:
    shape = (num_seqs, width)
    nothing = jnp.zeros(num_seqs)
    return nothing, nothing, jnp.zeros(shape, jnp.int32), jnp.zeros(shape)


def _log_mass(x: jax.Array, threshold: jax.Array | float) -> jax.Array:
    """f32[T], log of the sum of exp(x) of what is kept of f32[T, N, CHUNK] <= 0."""
    threshold = jnp.broadcast_to(threshold, len(x))
    return jnp.log(to_float(sum_digits(kept_weights(x, threshold))))


def begin(slots: SlotState, start: SlotStart) -> SlotState:
    """Set a slot's row from scratch, from all the tokens that its sequence has."""
    ids, vocab = start.token_ids, slots.tokens.shape[1]
    places = jnp.arange(len(ids), dtype=jnp.int32)
    is_prompt = places < start.prompt_len
    is_output = ~is_prompt & (places < start.length)
    flags = jnp.where(start.forbidden, FORBIDDEN, 0) | jnp.where(start.stops, STOPS, 0)
    in_prompt = jnp.zeros(vocab, bool).at[jnp.where(is_prompt, ids, vocab)].set(True, mode="drop")
    tokens = flags | jnp.where(in_prompt, IN_PROMPT, 0)
    tokens = tokens.at[jnp.where(is_output, ids, vocab)].add(1, mode="drop")
    last = start.length - TAIL + jnp.arange(TAIL, dtype=jnp.int32)
    tail = jnp.where(last >= start.prompt_len, ids.at[last].get(mode="clip"), -1)
    row = SlotState(tail, tokens, start.bias_ids, start.bias, start.bad_words)
    return jax.tree.map(lambda all, one: all.at[start.slot].set(one, mode="drop"), slots, row)


def record(slots: SlotState, sampling: SamplingInput, token_ids: jax.Array) -> SlotState:
    """Append a sampled token, i32[S], to each row's slot."""
    slot = sampling.slot
    tail = slots.tail.at[slot].get(mode="clip")
    tail = jnp.concatenate([tail[:, 1:], token_ids[:, None]], axis=1)
    return dataclasses.replace(
        slots,
        tail=slots.tail.at[slot].set(tail, mode="drop"),
        tokens=slots.tokens.at[slot, token_ids].add(
            sampling.adjusts.astype(jnp.int32), mode="drop"
        ),
    )
