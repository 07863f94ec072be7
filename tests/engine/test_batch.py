"""Scheduled chunks become arrays of fixed shapes, padding included."""

import dataclasses

import numpy as np
import pytest

from pagedjax.batch import FROM_STATE, Batch, build_batch
from pagedjax.plan import ScheduledChunk
from pagedjax.request import Request, Sequence, TokenLogprobs
from pagedjax.sampling_params import SamplingParams

NO_SLOT = 9


def make_sequence(
    prompt: list[int],
    output: list[int],
    *,
    slot: int,
    tables: list[list[int]],
    params: SamplingParams | None = None,
    seed: int = 0,
) -> Sequence:
    """A running sequence whose last token, if it is sampled, is on the device."""
    request = Request("r", tuple(prompt), params or SamplingParams(), arrival=0, seed=seed)
    (sequence,) = request.sequences
    sequence.token_ids += output
    sequence.slot, sequence.token_on_device = slot, bool(output)
    sequence.num_blocks = len(tables[0])
    sequence.block_tables = np.zeros((len(tables), 6), np.int32)
    sequence.block_tables[:, : sequence.num_blocks] = tables
    return sequence


def sampling(sequence: Sequence, start: int, num_tokens: int) -> ScheduledChunk:
    return ScheduledChunk(sequence, start, num_tokens, (sequence,))


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
    decode = make_sequence(
        [11, 12],
        [13],
        slot=2,
        tables=[[5], [6]],
        params=SamplingParams(temperature=0.5, top_k=3, top_p=0.25, logprobs=0),
        seed=(7 << 32) + 8,
    )
    first = make_sequence([21, 22, 23, 24], [], slot=0, tables=[[1, 2], [3, 4]], seed=99)
    last = make_sequence([31, 32, 33], [], slot=1, tables=[[7, 9], [8, 10]])
    return build([sampling(decode, 2, 1), ScheduledChunk(first, 0, 3), sampling(last, 1, 2)])


def test_tokens_lie_in_a_row_and_decodes_come_from_the_device(batch: Batch) -> None:
    assert batch.token_ids.tolist() == [FROM_STATE, 21, 22, 23, 32, 33, 0, 0]
    assert batch.step.positions.tolist() == [2, 0, 1, 2, 1, 2, 0, 0]
    assert batch.step.query_start.tolist() == [0, 1, 4, 6, 6]
    assert batch.step.context_lens.tolist() == [3, 3, 3, 0]
    assert batch.token_slots.tolist() == [2, 0, 1, 0]


def test_only_sequences_that_sample_have_a_row_a_slot_and_parameters(batch: Batch) -> None:
    assert batch.sampling.row.tolist() == [0, 5, 0, 0]
    assert batch.sampling.slot.tolist() == [2, 1, NO_SLOT, NO_SLOT]


def test_block_tables_stand_per_group_and_sequence_with_null_blocks_behind(batch: Batch) -> None:
    assert batch.step.block_tables.tolist() == [
        [[5, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0], [7, 9, 0, 0, 0, 0], [0] * 6],
        [[6, 0, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0], [8, 10, 0, 0, 0, 0], [0] * 6],
    ]


def test_sampling_parameters_stand_in_the_order_of_those_who_sample_and_padding_is_greedy(
    batch: Batch,
) -> None:
    found = batch.sampling
    assert found.temperature.tolist() == [0.5, 1.0, 0.0, 0.0]
    assert found.top_k.tolist() == [3, 0, 0, 0]
    assert found.top_p.tolist() == [0.25, 1.0, 1.0, 1.0]
    assert found.seed.tolist() == [[8, 7], [0, 0], [0, 0], [0, 0]]
    assert found.position.tolist() == [3, 3, 0, 0]
    assert found.wants_logprobs.tolist() == [True, False, False, False]


def test_all_samples_of_a_prompt_share_its_last_row_and_have_slots_and_seeds_of_their_own() -> None:
    first = make_sequence([5, 6, 7], [], slot=3, tables=[[1], [2]], seed=1)
    second = make_sequence([5, 6, 7], [], slot=0, tables=[[1], [2]], seed=2)
    other = make_sequence([8], [], slot=1, tables=[[3], [4]])
    batch = build([sampling(other, 0, 1), ScheduledChunk(first, 1, 2, (first, second))])
    assert batch.sampling.row.tolist() == [0, 2, 2, 0]
    assert batch.sampling.slot.tolist() == [1, 3, 0, NO_SLOT]
    assert batch.sampling.seed[:, 0].tolist() == [0, 1, 2, 0]
    assert batch.sampling.position.tolist() == [1, 3, 3, 0]


def test_who_resumes_takes_its_last_token_from_the_host_and_not_from_its_slot() -> None:
    sequence = make_sequence([11, 12], [13], slot=2, tables=[[5], [6]])
    sequence.token_on_device = False
    assert build([sampling(sequence, 2, 1)]).token_ids[0] == 13


@pytest.mark.parametrize(
    ("start", "length", "num_known", "rows", "targets"),
    [
        (0, 3, 0, [1, 2, 3], [22, 23, 24]),  # the token behind the chunk belongs to the prompt
        (3, 2, 3, [1], [25]),  # the token behind the last one does not
        (0, 5, 2, [3, 4], [24, 25]),  # the first two were found before a preemption
        (4, 1, 4, [], []),
        (0, 5, 4, [], []),
    ],
)
def test_prompt_tokens_whose_logprobs_are_wanted_stand_by_the_row_before_them(
    start: int, length: int, num_known: int, rows: list[int], targets: list[int]
) -> None:
    params = SamplingParams(prompt_logprobs=0)
    asking = make_sequence([21, 22, 23, 24, 25], [], slot=1, tables=[[1, 2], [3, 4]], params=params)
    asking.request.prompt_logprobs = [TokenLogprobs(-1.0, ())] * num_known
    other = make_sequence([8], [], slot=0, tables=[[5], [6]])
    prompt = build([sampling(other, 0, 1), ScheduledChunk(asking, start, length)]).prompt
    assert prompt.count == len(rows)
    assert prompt.rows[: len(rows)].tolist() == rows
    assert prompt.token_ids[: len(rows)].tolist() == targets


def test_no_chunks_give_padding_that_writes_nothing() -> None:
    batch = build([], num_tokens=4, num_seqs=2)
    assert batch.sampling.slot.tolist() == [NO_SLOT] * 2
    assert batch.prompt.count == 0
    assert batch.step.query_start.tolist() == [0, 0, 0]
    assert batch.step.context_lens.tolist() == [0, 0]
    assert not batch.step.block_tables.any()
    assert not batch.sampling.temperature.any()


def test_a_chunk_may_begin_in_the_prompt_and_end_in_the_output() -> None:
    sequence = make_sequence([1, 2, 3], [4, 5], slot=0, tables=[[1], [2]])
    batch = build([sampling(sequence, 1, 4)])
    assert batch.token_ids.tolist()[:4] == [2, 3, 4, 5]
    assert batch.sampling.slot[0] == 0


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
    sequence = make_sequence([1], [], slot=0, tables=[[1], [2]], params=params)
    assert getattr(build([sampling(sequence, 0, 1)]).sampling, name)[0] == stored


def test_the_largest_seed_survives_the_split_into_words() -> None:
    sequence = make_sequence([1], [], slot=0, tables=[[1], [2]], seed=2**63 - 1)
    seed = build([sampling(sequence, 0, 1)]).sampling.seed
    assert seed[0].tolist() == [2**32 - 1, 2**31 - 1]


def test_shapes_and_dtypes_do_not_depend_on_the_chunks(batch: Batch) -> None:
    def kinds(b: Batch) -> dict[str, tuple]:
        prompt = {f"prompt {name}": value for name, value in vars(b.prompt).items()}
        fields = {**vars(b), **vars(b.step), **vars(b.sampling), **prompt}
        return {
            name: (value.shape, value.dtype)
            for name, value in fields.items()
            if not dataclasses.is_dataclass(value)
        }

    assert kinds(batch) == kinds(build([]))
    assert set(kinds(batch)) == {
        *("token_ids", "token_slots", "positions", "query_start", "context_lens", "block_tables"),
        *(
            "prompt rows",
            "prompt token_ids",
            "prompt count",
            "row",
            "slot",
            "temperature",
            "top_k",
            "top_p",
            "seed",
            "position",
            "wants_logprobs",
        ),
    }
