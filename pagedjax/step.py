"""One step of the engine as a pure function: compute a batch, pick the next tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.batch import FROM_STATE, Batch
from pagedjax.logits import LogitsProcessor
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache, Params, bind
from pagedjax.prompt_logprobs import PromptLogprobs, prompt_logprobs
from pagedjax.sampler import SamplerOutput, record, sample
from pagedjax.sampling_input import SlotState
from pallas_kernels import row_sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """What lives on the device between steps; donated to each.

    Attributes:
      cache: the KV pool.
      slots: the last tokens of each slot, and what the sampler keeps for it.
    """

    cache: KVCache
    slots: SlotState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step brings to the host: sampled tokens, and what was asked about prompts, if any."""

    sampled: SamplerOutput
    prompt: PromptLogprobs | None


def step(
    config: DecoderConfig,
    processors: tuple[LogitsProcessor, ...],
    params: Params,
    state: EngineState,
    batch: Batch,
) -> tuple[EngineState, StepOutput]:
    """Compute `batch`, write its keys and values into the pool, and sample a token where wanted.

    Pure; jit it with `config` and `processors` static and `state` donated.
    """
    model = bind(config, params)
    num_tokens, num_seqs = len(batch.token_ids), len(batch.token_slots)
    sequence = jnp.minimum(row_sequences(batch.step.query_start, num_tokens), num_seqs - 1)
    last = state.slots.tail[batch.token_slots[sequence], -1]
    token_ids = jnp.where(batch.token_ids == FROM_STATE, last, batch.token_ids)
    hidden, cache = model(token_ids, batch.step, state.cache)
    logits = model.logits(hidden[batch.sampling.row])
    sampled = sample(logits, batch.sampling, state.slots, processors)
    slots = record(state.slots, batch.sampling, sampled.token_ids)
    ask = batch.prompt
    prompt = prompt_logprobs(model.logits, hidden, ask.rows, ask.token_ids, ask.count)
    return EngineState(cache, slots), StepOutput(sampled, prompt)
