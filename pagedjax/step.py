"""One step of the engine as a pure function: compute a batch, pick the next tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.batch import FROM_STATE, Batch
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache, Params, bind
from pagedjax.prompt_logprobs import PromptLogprobs, prompt_logprobs
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step brings to the host: sampled tokens, and what was asked about prompts."""

    sampled: SamplerOutput
    prompt: PromptLogprobs


def step(
    config: DecoderConfig, params: Params, state: EngineState, batch: Batch
) -> tuple[EngineState, StepOutput]:
    """Compute `batch`, write its keys and values into the pool, and sample a token where wanted.

    Pure; jit it with `config` static and `state` donated.
    """
    model = bind(config, params)
    num_tokens, num_seqs = len(batch.token_ids), len(batch.token_slots)
    sequence = jnp.minimum(row_sequences(batch.step.query_start, num_tokens), num_seqs - 1)
    last = state.last_tokens[batch.token_slots[sequence]]
    token_ids = jnp.where(batch.token_ids == FROM_STATE, last, batch.token_ids)
    hidden, cache = model(token_ids, batch.step, state.cache)
    sampled = sample(model.logits(hidden[batch.sampling.row]), batch.sampling)
    last_tokens = state.last_tokens.at[batch.sampling.slot].set(sampled.token_ids, mode="drop")
    ask = batch.prompt
    prompt = prompt_logprobs(model.logits, hidden, ask.rows, ask.token_ids, ask.count)
    return EngineState(cache, last_tokens), StepOutput(sampled, prompt)
