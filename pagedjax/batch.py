"""The device's view of one step: fixed shapes, filled in from the scheduled chunks."""

import dataclasses
from typing import Any

import jax
import numpy as np

from pagedjax.models.decoder import StepInput
from pagedjax.scheduler import ScheduledChunk

FROM_STATE = -1  # a token id that the device takes from its own state
_MAX_INT32 = np.iinfo(np.int32).max
_MAX_TEMPERATURE = 1e30  # all tokens alike; the inverse of much larger ones is no normal float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingInput:
    """Sampling parameters of each sequence, [S] each; padding is greedy.

    Attributes:
      temperature: f32, 0 for greedy. top_k: i32, 0 for all. top_p: f32.
      seed: u32[S, 2], low and high word. position: i32, of the token to be sampled.
      wants_logprobs: bool.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    position: jax.Array
    wants_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A ragged mix of prefill chunks and decodes, padded to N tokens and S sequences.

    Attributes:
      token_ids: i32[N]; `FROM_STATE`: the last token sampled in the sequence's slot.
      step: positions, rows, context lengths and block tables (see `StepInput`).
      slots: i32[S], where each sequence's last sampled token is kept; an index out of range for
        sequences that do not sample (padding and unfinished prompts).
      token_slots: i32[S], the slot that `FROM_STATE` reads.
      sampling: see `SamplingInput`.
    """

    token_ids: jax.Array
    step: StepInput
    slots: jax.Array
    token_slots: jax.Array
    sampling: SamplingInput


def build_batch(
    chunks: list[ScheduledChunk],
    *,
    num_tokens: int,
    num_seqs: int,
    num_groups: int,
    table_width: int,
    no_slot: int,
) -> Batch:
    """Lay `chunks` out in a batch of numpy arrays of N = `num_tokens`, S = `num_seqs`.

    `no_slot`: a slot index out of range. No chunks gives a batch of padding, for warm-up.
    """
    lengths = [chunk.num_tokens for chunk in chunks] + [0] * (num_seqs - len(chunks))
    query_start = _full(num_seqs + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    token_ids = _full(num_tokens, np.int32)
    positions = _full(num_tokens, np.int32)
    context_lens = _full(num_seqs, np.int32)
    block_tables = _full((num_groups, num_seqs, table_width), np.int32)
    slots = _full(num_seqs, np.int32, no_slot)
    token_slots = _full(num_seqs, np.int32)
    sampling = SamplingInput(
        temperature=_full(num_seqs, np.float32),
        top_k=_full(num_seqs, np.int32),
        top_p=_full(num_seqs, np.float32, 1),
        seed=_full((num_seqs, 2), np.uint32),
        position=_full(num_seqs, np.int32),
        wants_logprobs=_full(num_seqs, np.bool_),
    )
    for s, chunk in enumerate(chunks):
        request, rows = chunk.request, slice(query_start[s], query_start[s + 1])
        decodes = chunk.start >= len(request.prompt_token_ids)
        token_ids[rows] = FROM_STATE if decodes else request.tokens(chunk.start, chunk.end)
        positions[rows] = np.arange(chunk.start, chunk.end)
        context_lens[s] = chunk.end
        assert request.block_tables is not None
        assert request.slot is not None
        block_tables[:, s, : request.num_blocks] = request.block_tables[:, : request.num_blocks]
        token_slots[s] = request.slot
        if chunk.samples:
            slots[s] = request.slot
            _fill_sampling(sampling, s, chunk)
    step = StepInput(positions, query_start, context_lens, block_tables)
    return Batch(token_ids, step, slots, token_slots, sampling)


def _full(shape: int | tuple[int, ...], dtype: type, value: float = 0) -> Any:
    """A numpy array; it stands for a `jax.Array` until the step is dispatched, hence Any."""
    return np.full(shape, value, dtype)


def _fill_sampling(sampling: Any, s: int, chunk: ScheduledChunk) -> None:
    request = chunk.request
    sampling.temperature[s] = min(request.params.temperature, _MAX_TEMPERATURE)
    sampling.top_k[s] = min(request.params.top_k, _MAX_INT32)
    sampling.top_p[s] = request.params.top_p
    sampling.seed[s] = (request.seed & 0xFFFFFFFF, request.seed >> 32)
    sampling.position[s] = chunk.end
    sampling.wants_logprobs[s] = request.params.logprobs is not None
