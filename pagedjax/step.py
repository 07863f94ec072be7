"""One step of the engine as a pure function: compute a batch, pick the next tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.batch import FROM_STATE, Batch
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache, Params, bind
from pagedjax.sampler import SamplerOutput, sample
from pallas_kernels import row_sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """What lives on the device between steps; donated to each.

    Attributes:
      cache: the KV pool.
      last_tokens: i32[max_num_seqs], the last sampled token of each slot.
    """

    cache: KVCache
    last_tokens: jax.Array


def step(
    config: DecoderConfig, params: Params, state: EngineState, batch: Batch
) -> tuple[EngineState, SamplerOutput]:
    """Compute `batch`, write its keys and values into the pool, and sample a token per sequence.

    Pure; jit it with `config` static and `state` donated.
    """
    model = bind(config, params)
    num_tokens, num_seqs = len(batch.token_ids), len(batch.slots)
    sequence = jnp.minimum(row_sequences(batch.step.query_start, num_tokens), num_seqs - 1)
    last = state.last_tokens[batch.token_slots[sequence]]
    token_ids = jnp.where(batch.token_ids == FROM_STATE, last, batch.token_ids)
    hidden, cache = model(token_ids, batch.step, state.cache)
    last_rows = jnp.maximum(batch.step.query_start[1:] - 1, 0)
    output = sample(model.logits(hidden[last_rows]), batch.sampling)
    last_tokens = state.last_tokens.at[batch.slots].set(output.token_ids, mode="drop")
    return EngineState(cache, last_tokens), output
