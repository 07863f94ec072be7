"""Adjusting logits before a token is chosen: processors, bias, penalties and masks."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.errors import InvalidRequestError
from pagedjax.sampling_input import (
    COUNT_MASK,
    FORBIDDEN,
    IN_PROMPT,
    STOPS,
    TAIL,
    SamplingInput,
    SlotState,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsContext:
    """What a logits processor may know of its sequence, besides the logits.

    Attributes:
      output_counts: i32[V], how often each token was sampled.
      in_prompt: bool[V], whether the prompt has it.
      tail: i32[TAIL], the last sampled tokens, the newest last; -1 before the first.
      position: i32 scalar, of the token to be sampled.
    """

    output_counts: jax.Array
    in_prompt: jax.Array
    tail: jax.Array
    position: jax.Array


LogitsProcessor = Callable[[jax.Array, LogitsContext], jax.Array]
"""A pure, traceable function: f32[V] logits of one sequence -> f32[V]; -inf excludes a token."""


def check_processor(processor: LogitsProcessor, vocab_size: int) -> None:
    """Trace a logits processor, so that it cannot fail inside a step.

    Raises:
      InvalidRequestError: it raises an error, or returns something else than f32[V].
    """
    row, scalar = (vocab_size,), ()
    kinds = ((row, jnp.int32), (row, jnp.bool_), ((TAIL,), jnp.int32), (scalar, jnp.int32))
    context = LogitsContext(*(jax.ShapeDtypeStruct(*kind) for kind in kinds))  # type: ignore[arg-type]
    try:
        out = jax.eval_shape(processor, jax.ShapeDtypeStruct(row, jnp.float32), context)
    except Exception as error:  # whatever a user's function may raise
        raise InvalidRequestError(
            f"logits_processor {processor!r:.200} cannot be traced: {error}"
        ) from error
    found = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(out))
    wanted = f"float32[{vocab_size}]"
    if found != wanted:
        raise InvalidRequestError(
            f"logits_processor {processor!r:.200} returns {found or 'nothing'}; "
            f"it must return {wanted}"
        )


def adjust(
    logits: jax.Array,
    sampling: SamplingInput,
    slots: SlotState,
    processors: tuple[LogitsProcessor, ...],
) -> jax.Array:
    """What `adjusts` rows make of their logits: processor, bias, penalties, masks, in this order.

    Args:
      logits: f32[T, V].
      sampling: of T rows.
      slots: all of them.

    Returns:
      f32[T, V]; minus infinity for excluded tokens, the others finite. Some token is left, and one
      that is not `FORBIDDEN`: what would exclude all of these is disregarded.
    """
    return lax.cond(
        sampling.adjusts.any(),
        lambda: _adjust(logits, sampling, slots, processors),
        lambda: logits,
    )


def _adjust(
    logits: jax.Array,
    sampling: SamplingInput,
    slots: SlotState,
    processors: tuple[LogitsProcessor, ...],
) -> jax.Array:
    state = jax.tree.map(lambda values: values.at[sampling.slot].get(mode="clip"), slots)
    x = _process(logits, sampling, state, processors) if processors else logits
    x = _add_bias(x, state)
    x = _penalize(x, sampling, state)
    x = jnp.where(x > -jnp.inf, jnp.minimum(x, jnp.finfo(jnp.float32).max), -jnp.inf)
    x = _mask(x, sampling, state)
    return jnp.where(sampling.adjusts[:, None], x, logits)


def _process(
    x: jax.Array,
    sampling: SamplingInput,
    state: SlotState,
    processors: tuple[LogitsProcessor, ...],
) -> jax.Array:
    """Row by row, so that a processor runs for its own rows only."""
    contexts = LogitsContext(
        output_counts=state.tokens & COUNT_MASK,
        in_prompt=(state.tokens & IN_PROMPT) > 0,
        tail=state.tail,
        position=sampling.position,
    )
    branches = (lambda row, _: row, *processors)
    return lax.cond(
        (sampling.processor > 0).any(),
        lambda: lax.map(
            lambda row: lax.switch(row[0], branches, *row[1:]), (sampling.processor, x, contexts)
        ),
        lambda: x,
    )


def _add_bias(x: jax.Array, state: SlotState) -> jax.Array:
    rows = jnp.arange(len(x), dtype=jnp.int32)[:, None]
    return lax.cond(
        (state.bias_ids < x.shape[1]).any(),
        lambda: x.at[rows, state.bias_ids].add(state.bias, mode="drop"),
        lambda: x,
    )


def _penalize(x: jax.Array, sampling: SamplingInput, state: SlotState) -> jax.Array:
    """Repetition (Keskar et al., arXiv:1909.05858), frequency and presence penalties."""
    counts = state.tokens & COUNT_MASK
    is_output = counts > 0
    is_known = is_output | ((state.tokens & IN_PROMPT) > 0)
    factor = sampling.repetition_penalty[:, None]
    x = jnp.where(is_known, jnp.where(x > 0, x / factor, x * factor), x)
    x -= sampling.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return x - jnp.where(is_output, sampling.presence_penalty[:, None], 0.0)


def _mask(x: jax.Array, sampling: SamplingInput, state: SlotState) -> jax.Array:
    """Exclude tokens that are never allowed, then those that are not allowed now."""
    is_allowed = (state.tokens & FORBIDDEN) == 0
    x = _unless_empty(
        jnp.where(is_allowed, x, -jnp.inf), jnp.where(is_allowed, jnp.zeros_like(x), -jnp.inf)
    )
    is_early = sampling.position < sampling.min_position
    banned = _banned(state, x.shape[1])

    def exclude() -> jax.Array:
        stops = is_early[:, None] & ((state.tokens & STOPS) > 0)
        rows = jnp.arange(len(x), dtype=jnp.int32)[:, None]
        left = jnp.where(stops, -jnp.inf, x).at[rows, banned].set(-jnp.inf, mode="drop")
        return _unless_empty(left, x)

    return lax.cond(is_early.any() | (banned < x.shape[1]).any(), exclude, lambda: x)


def _banned(state: SlotState, vocab: int) -> jax.Array:
    """i32[T, MAX_BAD_WORDS], the tokens that would complete a bad word; `vocab` for the others."""
    begun, last = state.bad_words[..., :-1], state.bad_words[..., -1]
    is_begun = (begun < 0) | (begun == state.tail[:, None, 1:])
    return jnp.where(is_begun.all(-1) & (last >= 0), last, vocab)


def _unless_empty(x: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Rows of `x` that leave some token; others are replaced."""
    return jnp.where((x > -jnp.inf).any(-1, keepdims=True), x, otherwise)
