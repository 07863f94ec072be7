"""The device's view of one step: fixed shapes, filled in from the scheduled chunks."""

import dataclasses
from typing import Any

import jax
import numpy as np

from pagedjax.logits import LogitsProcessor
from pagedjax.models.decoder import StepInput
from pagedjax.plan import ScheduledChunk
from pagedjax.request import Sequence
from pagedjax.sampling_input import SamplingInput
from pagedjax.sampling_rows import SamplingRows

FROM_STATE = -1  # a token id that the device takes from its own state


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
    rows: SamplingRows,
    processors: tuple[LogitsProcessor, ...] = (),
) -> Batch:
    """Lay `chunks` out in a batch of numpy arrays of N = `num_tokens`, S = `num_seqs`.

    `rows`: what is asked of the sampler. `processors`: all that the step knows. No chunks gives a
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
    samplers = [
        (last, chunk.end, seq)
        for last, chunk in zip((query_start[1:] - 1).tolist(), chunks, strict=False)
        for seq in chunk.samplers
    ]
    return Batch(
        token_ids=_column(token_ids, num_tokens, np.int32),
        step=step,
        token_slots=_column([chunk.sequence.slot for chunk in chunks], num_seqs, np.int32),
        sampling=rows.gather(samplers, num_seqs, processors),
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


def stop_input(chunks: list[ScheduledChunk], num_seqs: int) -> StopInput:
    """When the sequences of decodes several steps ahead stop."""
    params = [chunk.sequence.request.params for chunk in chunks]
    return StopInput(
        num_steps=_column([chunk.num_tokens for chunk in chunks], num_seqs, np.int32),
        at_eos=_column([not p.ignore_eos for p in params], num_seqs, np.bool_),
        at_flagged=_column([bool(p.stop_token_ids) for p in params], num_seqs, np.bool_),
    )


def _column(values: list[Any], size: int, dtype: type, padding: float = 0) -> Any:
    return np.array(values + [padding] * (size - len(values)), dtype)


def _device(values: np.ndarray) -> Any:
    """A numpy array; it stands for a `jax.Array` until the step is dispatched, hence Any."""
    return values
