"""Several decode steps in one call: the device feeds its own tokens back, the host waits once."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.batch import FROM_STATE, Batch, StopInput
from pagedjax.logits import LogitsProcessor
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params
from pagedjax.sampler import SamplerOutput, nothing_sampled
from pagedjax.sampling_input import STOPS
from pagedjax.step import EngineState, step
from pallas_kernels import row_sequences


def decode_ahead(
    config: DecoderConfig,
    processors: tuple[LogitsProcessor, ...],
    eos_token_ids: tuple[int, ...],
    max_steps: int,
    params: Params,
    state: EngineState,
    batch: Batch,
    stop: StopInput,
) -> tuple[EngineState, SamplerOutput]:
    """Up to `max_steps` steps of a batch of S decodes, until all of its sequences have stopped.

    Pure; jit it with the first four arguments static and `state` donated. Row i of the batch is
    sequence i and its sampler.

    Returns:
      The results of all steps, stacked: arrays [max_steps, S, ...]. What stands behind the token
      that stopped a sequence means nothing.
    """
    one_step = nothing_sampled(len(stop.num_steps), config.vocab_size)
    results = jax.tree.map(lambda x: jnp.broadcast_to(x, (max_steps, *x.shape)), one_step)

    def is_going(carry: tuple) -> jax.Array:
        i, _, alive, _ = carry
        return (alive & (i < stop.num_steps)).any()

    def advance(carry: tuple) -> tuple:
        i, state, alive, results = carry
        going = alive & (i < stop.num_steps)
        now = _at_step(batch, i, going)
        state, output = step(config, processors, params, state, now)
        sampled = output.sampled
        results = jax.tree.map(lambda all_steps, x: all_steps.at[i].set(x), results, sampled)
        stopped = _stopped(state, now, stop, eos_token_ids, sampled.token_ids)
        return i + 1, state, alive & ~stopped, results

    alive = jnp.ones(len(stop.num_steps), jnp.bool_)
    carry = (jnp.int32(0), state, alive, results)
    _, state, _, results = lax.while_loop(is_going, advance, carry)
    return state, results


def _at_step(batch: Batch, i: jax.Array, going: jax.Array) -> Batch:
    """The batch of step `i`: only sequences that are `going` have a row, one behind the other."""
    num_seqs, num_slots = len(going), jnp.iinfo(jnp.int32).max
    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(going, dtype=jnp.int32)])
    context_lens = jnp.where(going, batch.step.context_lens + i, 0)
    sequence = jnp.minimum(row_sequences(query_start, num_seqs), num_seqs - 1)
    sampling = dataclasses.replace(
        batch.sampling,
        row=jnp.minimum(query_start[:-1], num_seqs - 1),
        slot=jnp.where(going, batch.sampling.slot, num_slots),
        position=batch.sampling.position + i,
    )
    step_input = dataclasses.replace(
        batch.step,
        positions=jnp.maximum(context_lens[sequence] - 1, 0),
        query_start=query_start,
        context_lens=context_lens,
    )
    # The first token of a sequence that has just come back is known to the host alone.
    token_ids = jnp.where(i == 0, batch.token_ids, FROM_STATE)
    return dataclasses.replace(batch, token_ids=token_ids, step=step_input, sampling=sampling)


def _stopped(
    state: EngineState,
    batch: Batch,
    stop: StopInput,
    eos_token_ids: tuple[int, ...],
    token_ids: jax.Array,
) -> jax.Array:
    """bool[S]: the token just sampled ends its sequence."""
    eos = jnp.array(eos_token_ids, jnp.int32)
    is_eos = (token_ids[:, None] == eos[None]).any(1)
    flags = state.slots.tokens.at[batch.sampling.slot, token_ids].get(mode="fill", fill_value=0)
    return (is_eos & stop.at_eos) | ((flags & STOPS != 0) & stop.at_flagged)
