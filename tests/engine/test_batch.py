"""Scheduled chunks become arrays of fixed shapes, padding included."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagedjax.batch import FROM_STATE, Batch, build_batch
from pagedjax.request import Request
from pagedjax.sampling_params import SamplingParams
from pagedjax.plan import ScheduledChunk

NO_SLOT = 9


def make_request(
    prompt: list[int], output: list[int], *, slot: int, tables: list[list[int]], **fields: Any
) -> Request:
    num_blocks = len(tables[0])
    padded = np.zeros((len(tables), 6), np.int32)
    padded[:, :num_blocks] = tables
    fields = {"params": SamplingParams(), "seed": 0, **fields}
    return Request(
        "r",
        prompt,
        arrival=0,
        output_token_ids=output,
        slot=slot,
        block_tables=padded,
        num_blocks=num_blocks,
        **fields,
    )


def build(chunks: list[ScheduledChunk], num_tokens: int = 8, num_seqs: int = 4) -> Batch:
    return build_batch(
        chunks,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_groups=2,
        table_width=6,
        no_slot=NO_SLOT,
    )


@pytest.fixture
def batch() -> Batch:
    """A decode, the first chunk of a long prompt, and the last chunk of a prompt."""
    decode = make_request(
        [11, 12],
        [13],
        slot=2,
        tables=[[5], [6]],
        params=SamplingParams(temperature=0.5, top_k=3, top_p=0.25, logprobs=0),
        seed=(7 << 32) + 8,
    )
    first = make_request([21, 22, 23, 24], [], slot=0, tables=[[1, 2], [3, 4]], seed=99)
    last = make_request([31, 32, 33], [], slot=1, tables=[[7, 9], [8, 10]])
    return build(
        [ScheduledChunk(decode, 2, 1), ScheduledChunk(first, 0, 3), ScheduledChunk(last, 1, 2)]
    )


def test_tokens_lie_in_a_row_and_decodes_come_from_the_device(batch: Batch) -> None:
    assert batch.token_ids.tolist() == [FROM_STATE, 21, 22, 23, 32, 33, 0, 0]
    assert batch.step.positions.tolist() == [2, 0, 1, 2, 1, 2, 0, 0]
    assert batch.step.query_start.tolist() == [0, 1, 4, 6, 6]
    assert batch.step.context_lens.tolist() == [3, 3, 3, 0]
    assert batch.token_slots.tolist() == [2, 0, 1, 0]


def test_only_chunks_that_reach_the_last_token_keep_a_sample(batch: Batch) -> None:
    assert batch.slots.tolist() == [2, NO_SLOT, 1, NO_SLOT]


def test_block_tables_stand_per_group_and_sequence_with_null_blocks_behind(batch: Batch) -> None:
    assert batch.step.block_tables.tolist() == [
        [[5, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0], [7, 9, 0, 0, 0, 0], [0] * 6],
        [[6, 0, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0], [8, 10, 0, 0, 0, 0], [0] * 6],
    ]


def test_sampling_parameters_stand_beside_their_sequence_and_padding_is_greedy(
    batch: Batch,
) -> None:
    sampling = batch.sampling
    assert sampling.temperature.tolist() == [0.5, 0.0, 1.0, 0.0]
    assert sampling.top_k.tolist() == [3, 0, 0, 0]
    assert sampling.top_p.tolist() == [0.25, 1.0, 1.0, 1.0]
    assert sampling.seed.tolist() == [[8, 7], [0, 0], [0, 0], [0, 0]]
    assert sampling.position.tolist() == [3, 0, 3, 0]
    assert sampling.wants_logprobs.tolist() == [True, False, False, False]


def test_no_chunks_give_padding_that_writes_nothing() -> None:
    batch = build([], num_tokens=4, num_seqs=2)
    assert batch.slots.tolist() == [NO_SLOT] * 2
    assert batch.step.query_start.tolist() == [0, 0, 0]
    assert batch.step.context_lens.tolist() == [0, 0]
    assert not batch.step.block_tables.any()
    assert not batch.sampling.temperature.any()


def test_blocks_behind_the_ones_in_use_are_left_out() -> None:
    request = make_request([1, 2], [], slot=0, tables=[[3], [4]])
    assert request.block_tables is not None
    request.block_tables[:, 1:] = 77  # stale
    tables = build([ScheduledChunk(request, 0, 2)]).step.block_tables
    assert tables[:, 0].tolist() == [[3, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]]


def test_a_chunk_may_begin_in_the_prompt_and_end_in_the_output() -> None:
    request = make_request([1, 2, 3], [4, 5], slot=0, tables=[[1], [2]])
    batch = build([ScheduledChunk(request, 1, 4)])
    assert batch.token_ids.tolist()[:4] == [2, 3, 4, 5]
    assert batch.slots[0] == 0


@pytest.mark.parametrize(
    ("params", "name", "stored"),
    [
        (SamplingParams(top_k=2**40), "top_k", 2**31 - 1),
        (SamplingParams(temperature=1e300), "temperature", np.float32(1e30)),
        (SamplingParams(temperature=1e-300), "temperature", 0.0),
        (SamplingParams(top_p=1e-300), "top_p", 0.0),
    ],
)
def test_parameters_beyond_what_the_device_can_compute_are_clamped(
    params: SamplingParams, name: str, stored: float
) -> None:
    request = make_request([1], [], slot=0, tables=[[1], [2]], params=params)
    sampling = build([ScheduledChunk(request, 0, 1)]).sampling
    assert getattr(sampling, name)[0] == stored


def test_the_largest_seed_survives_the_split_into_words() -> None:
    request = make_request([1], [], slot=0, tables=[[1], [2]], seed=2**63 - 1)
    seed = build([ScheduledChunk(request, 0, 1)]).sampling.seed
    assert seed[0].tolist() == [2**32 - 1, 2**31 - 1]


def test_shapes_and_dtypes_do_not_depend_on_the_chunks(batch: Batch) -> None:
    def kinds(b: Batch) -> dict[str, tuple]:
        fields = {**vars(b), **vars(b.step), **vars(b.sampling)}
        return {
            name: (value.shape, value.dtype)
            for name, value in fields.items()
            if not dataclasses.is_dataclass(value)
        }

    assert kinds(batch) == kinds(build([]))
    assert set(kinds(batch)) == {
        *("token_ids", "slots", "token_slots", "positions", "query_start", "context_lens"),
        *("block_tables", "temperature", "top_k", "top_p", "seed", "position", "wants_logprobs"),
    }
