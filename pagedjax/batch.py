"""The device's view of one step: fixed shapes, filled in from the scheduled chunks."""

import dataclasses
from collections.abc import Sequence as Sequence_
from typing import Any

import jax
import numpy as np

from pagedjax.logits import LogitsProcessor
from pagedjax.models.decoder import StepInput
from pagedjax.plan import ScheduledChunk
from pagedjax.request import Sequence
from pagedjax.sampling_input import SamplingInput
from pagedjax.sampling_params import SamplingParams

FROM_STATE = -1  # a token id that the device takes from its own state
_MAX_INT32 = np.iinfo(np.int32).max
_MAX_TEMPERATURE = 1e30  # all tokens alike; the inverse of much larger ones is no normal float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptTargets:
    """Prompt tokens whose log-probabilities are wanted.

    Attributes:
      rows: i32[N], rows of the batch; arbitrary from `count` on.
      token_ids: i32[N], the token behind each. count: i32 scalar.
    """

    rows: jax.Array
    token_ids: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A ragged mix of prefill chunks and decodes, padded to N tokens and S sequences.

    Attributes:
      token_ids: i32[N]; `FROM_STATE`: the last token sampled in the sequence's slot.
      step: positions, rows, context lengths and block tables (see `StepInput`).
      token_slots: i32[S], the slot that `FROM_STATE` reads.
      sampling: see `SamplingInput`. prompt: see `PromptTargets`.
    """

    token_ids: jax.Array
    step: StepInput
    token_slots: jax.Array
    sampling: SamplingInput
    prompt: PromptTargets


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopInput:
    """When each of S sequences stops; padding at once.

    Attributes:
      num_steps: i32[S], tokens that it is to have at most.
      at_eos: bool[S], at an end-of-sequence token. at_flagged: bool[S], at a token that its slot
        marks as one that stops.
    """

    num_steps: jax.Array
    at_eos: jax.Array
    at_flagged: jax.Array


def build_batch(
    chunks: list[ScheduledChunk],
    *,
    num_tokens: int,
    num_seqs: int,
    num_groups: int,
    table_width: int,
    no_slot: int,
    processors: Sequence_[LogitsProcessor] = (),
) -> Batch:
    """Lay `chunks` out in a batch of numpy arrays of N = `num_tokens`, S = `num_seqs`.

    `no_slot`: a slot index out of range. `processors`: all that the step knows. No chunks gives a
    batch of padding, for warm-up.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    prompt_rows: list[int] = []
    prompt_targets: list[int] = []
    for seq, start, length, _ in chunks:
        if length == 1:
            token_ids.append(FROM_STATE if seq.token_on_device else seq.token_ids[start])
            positions.append(start)
        else:
            token_ids += seq.token_ids[start : start + length]
            positions += range(start, start + length)
        if seq.request.params.prompt_logprobs is not None:
            known, shift = targets_of(seq, start, start + length), len(token_ids) - start - length
            prompt_rows += range(known.start - 1 + shift, known.stop - 1 + shift)
            prompt_targets += seq.token_ids[known.start : known.stop]
    lengths = [chunk.num_tokens for chunk in chunks] + [0] * (num_seqs - len(chunks))
    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    block_tables = np.zeros((num_groups, num_seqs, table_width), np.int32)
    if chunks:
        tables = [chunk.sequence.tables for chunk in chunks]
        np.stack(tables, axis=1, out=block_tables[:, : len(chunks)])
    step = StepInput(
        positions=_column(positions, num_tokens, np.int32),
        query_start=_device(query_start),
        context_lens=_column([chunk.end for chunk in chunks], num_seqs, np.int32),
        block_tables=_device(block_tables),
    )
    return Batch(
        token_ids=_column(token_ids, num_tokens, np.int32),
        step=step,
        token_slots=_column([chunk.sequence.slot for chunk in chunks], num_seqs, np.int32),
        sampling=_sampling_input(chunks, query_start, num_seqs, no_slot, processors),
        prompt=PromptTargets(
            rows=_column(prompt_rows, num_tokens, np.int32),
            token_ids=_column(prompt_targets, num_tokens, np.int32),
            count=_device(np.array(len(prompt_rows), np.int32)),
        ),
    )


def targets_of(seq: Sequence, start: int, end: int) -> range:
    """Positions of the prompt tokens whose log-probabilities the chunk `start:end` brings.

    Row `i` tells of the token at `i + 1`. Those that are known already are left out.
    """
    request = seq.request
    if request.params.prompt_logprobs is None:
        return range(0)
    first = max(start, len(request.prompt_logprobs)) + 1
    return range(first, max(first, min(end + 1, request.prompt_len)))


def _sampling_input(
    chunks: list[ScheduledChunk],
    query_start: np.ndarray,
    num_seqs: int,
    no_slot: int,
    processors: Sequence_[LogitsProcessor],
) -> SamplingInput:
    samplers = [(s, chunk.end, seq) for s, chunk in enumerate(chunks) for seq in chunk.samplers]
    params = [seq.request.params for _, _, seq in samplers]
    seeds = [(seq.seed & 0xFFFFFFFF, seq.seed >> 32) for _, _, seq in samplers]
    seeds += [(0, 0)] * (num_seqs - len(seeds))

    def floats(name: str, padding: float = 0) -> Any:
        return _column([getattr(p, name) for p in params], num_seqs, np.float32, padding)

    return SamplingInput(
        row=_column([query_start[s + 1] - 1 for s, _, _ in samplers], num_seqs, np.int32),
        slot=_column([seq.slot for _, _, seq in samplers], num_seqs, np.int32, no_slot),
        temperature=_column(
            [min(p.temperature, _MAX_TEMPERATURE) for p in params], num_seqs, np.float32
        ),
        top_k=_column([min(p.top_k, _MAX_INT32) for p in params], num_seqs, np.int32),
        top_p=floats("top_p", 1),
        min_p=floats("min_p"),
        presence_penalty=floats("presence_penalty"),
        frequency_penalty=floats("frequency_penalty"),
        repetition_penalty=floats("repetition_penalty", 1),
        seed=_device(np.array(seeds, np.uint32)),
        position=_column([end for _, end, _ in samplers], num_seqs, np.int32),
        min_position=_column(
            [seq.request.prompt_len + seq.request.params.min_tokens for _, _, seq in samplers],
            num_seqs,
            np.int32,
        ),
        adjusts=_column([p.adjusts_logits for p in params], num_seqs, np.bool_),
        processor=_column([_processor_number(p, processors) for p in params], num_seqs, np.int32),
        wants_logprobs=_column([p.wants_logprobs for p in params], num_seqs, np.bool_),
    )


def stop_input(chunks: list[ScheduledChunk], num_seqs: int) -> StopInput:
    """When the sequences of decodes several steps ahead stop."""
    params = [chunk.sequence.request.params for chunk in chunks]
    return StopInput(
        num_steps=_column([chunk.num_tokens for chunk in chunks], num_seqs, np.int32),
        at_eos=_column([not p.ignore_eos for p in params], num_seqs, np.bool_),
        at_flagged=_column([bool(p.stop_token_ids) for p in params], num_seqs, np.bool_),
    )


def _processor_number(params: SamplingParams, processors: Sequence_[LogitsProcessor]) -> int:
    """0: none."""
    return 0 if params.logits_processor is None else 1 + processors.index(params.logits_processor)


def _column(values: list[Any], size: int, dtype: type, padding: float = 0) -> Any:
    return np.array(values + [padding] * (size - len(values)), dtype)


def _device(values: np.ndarray) -> Any:
    """A numpy array; it stands for a `jax.Array` until the step is dispatched, hence Any."""
    return values
