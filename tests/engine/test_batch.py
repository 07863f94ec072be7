"""Scheduled chunks become arrays of fixed shapes, padding included."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagedjax.batch import FROM_STATE, Batch, build_batch, targets_of
from pagedjax.plan import ScheduledChunk
from pagedjax.request import Request, Sequence, TokenLogprobs
from pagedjax.sampling_input import SamplingInput
from pagedjax.sampling_params import SamplingParams
from pagedjax.sampling_rows import SamplingRows

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
    """A running sequence, alone in its request, with block tables i32[G, 6]."""
    request = Request("r", tuple(prompt), params or SamplingParams(), arrival=0, seed=seed)
    (sequence,) = request.sequences
    sequence.token_ids += output
    sequence.slot = slot
    sequence.num_blocks = len(tables[0])
    sequence.block_tables = np.zeros((len(tables), 6), np.int32)
    sequence.block_tables[:, : sequence.num_blocks] = tables
    return sequence


def chunk(seq: Sequence, start: int, num_tokens: int) -> ScheduledChunk:
    """Sampled by its own sequence, if it reaches the last known token."""
    samplers = (seq,) if start + num_tokens == seq.num_tokens else ()
    return ScheduledChunk(seq, start, num_tokens, samplers)


def build(chunks: list[ScheduledChunk], num_tokens: int = 8, num_seqs: int = 4) -> Batch:
    return build_batch(
        chunks,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_groups=2,
        table_width=6,
        rows=SamplingRows(NO_SLOT),
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
    decode.token_on_device = True
    first = make_sequence([21, 22, 23, 24], [], slot=0, tables=[[1, 2], [3, 4]], seed=99)
    last = make_sequence([31, 32, 33], [], slot=1, tables=[[7, 9], [8, 10]])
    return build([chunk(decode, 2, 1), chunk(first, 0, 3), chunk(last, 1, 2)])


def test_tokens_lie_in_a_row_and_decodes_come_from_the_device(batch: Batch) -> None:
    assert batch.token_ids.tolist() == [FROM_STATE, 21, 22, 23, 32, 33, 0, 0]
    assert batch.step.positions.tolist() == [2, 0, 1, 2, 1, 2, 0, 0]
    assert batch.step.query_start.tolist() == [0, 1, 4, 6, 6]
    assert batch.step.context_lens.tolist() == [3, 3, 3, 0]
    assert batch.token_slots.tolist() == [2, 0, 1, 0]


def test_only_sequences_that_reach_their_last_token_sample(batch: Batch) -> None:
    assert batch.sampling.row.tolist() == [0, 5, 0, 0]
    assert batch.sampling.slot.tolist() == [2, 1, NO_SLOT, NO_SLOT]
    assert batch.sampling.position.tolist() == [3, 3, 0, 0]


def test_block_tables_stand_per_group_and_sequence_with_null_blocks_behind(batch: Batch) -> None:
    assert batch.step.block_tables.tolist() == [
        [[5, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0], [7, 9, 0, 0, 0, 0], [0] * 6],
        [[6, 0, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0], [8, 10, 0, 0, 0, 0], [0] * 6],
    ]


def test_sampling_parameters_stand_in_the_order_of_those_who_sample_and_padding_is_greedy(
    batch: Batch,
) -> None:
    sampling = batch.sampling
    assert sampling.temperature.tolist() == [0.5, 1.0, 0.0, 0.0]
    assert sampling.top_k.tolist() == [3, 0, 0, 0]
    assert sampling.top_p.tolist() == [0.25, 1.0, 1.0, 1.0]
    assert sampling.seed.tolist() == [[8, 7], [0, 0], [0, 0], [0, 0]]
    assert sampling.wants_logprobs.tolist() == [True, False, False, False]


def test_samples_of_one_prompt_share_its_last_row_and_have_their_own_slots_and_seeds() -> None:
    before = make_sequence([1], [2], slot=8, tables=[[1], [2]], seed=50)
    parent = make_sequence([5, 6, 7], [], slot=0, tables=[[3], [4]], seed=10)
    children = [
        Sequence(parent.request, i, list(parent.token_ids), seed=10 + i, root=None, slot=3 * i)
        for i in (1, 2)
    ]
    chunks = [chunk(before, 1, 1), ScheduledChunk(parent, 0, 3, (parent, *children))]
    batch = build(chunks)
    assert batch.sampling.row.tolist() == [0, 3, 3, 3]
    assert batch.sampling.slot.tolist() == [8, 0, 3, 6]
    assert batch.sampling.seed[:, 0].tolist() == [50, 10, 11, 12]
    assert batch.sampling.position.tolist() == [2, 3, 3, 3]
    assert batch.step.query_start.tolist() == [0, 1, 4, 4, 4]  # only two sequences compute


def test_there_may_be_more_samplers_than_tokens() -> None:
    parent = make_sequence([5], [], slot=0, tables=[[3], [4]])
    children = [Sequence(parent.request, i, [5], seed=i, root=None, slot=i) for i in (1, 2)]
    batch = build([ScheduledChunk(parent, 0, 1, (parent, *children))], num_tokens=2)
    assert batch.sampling.row.tolist() == [0] * 4
    assert batch.sampling.slot.tolist() == [0, 1, 2, NO_SLOT]


def test_no_chunks_give_padding_that_writes_nothing() -> None:
    batch = build([], num_tokens=4, num_seqs=2)
    assert batch.sampling.slot.tolist() == [NO_SLOT] * 2
    assert batch.step.query_start.tolist() == [0, 0, 0]
    assert batch.step.context_lens.tolist() == [0, 0]
    assert not batch.step.block_tables.any()
    assert not batch.sampling.temperature.any()
    assert batch.prompt.count == 0


def test_a_chunk_may_begin_in_the_prompt_and_end_in_the_output() -> None:
    seq = make_sequence([1, 2, 3], [4, 5], slot=0, tables=[[1], [2]])
    batch = build([chunk(seq, 1, 4)])
    assert batch.token_ids.tolist()[:4] == [2, 3, 4, 5]
    assert batch.sampling.slot[0] == 0


def test_a_resumed_sequence_takes_its_tokens_from_the_host() -> None:
    # Its slot may have belonged to another in the meantime.
    swapped = make_sequence([1, 2], [3, 4], slot=0, tables=[[1], [2]])
    recomputed = make_sequence([5, 6], [7], slot=1, tables=[[3], [4]])
    running = make_sequence([8], [9], slot=2, tables=[[5], [6]])
    running.token_on_device = True
    chunks = [chunk(swapped, 3, 1), chunk(recomputed, 0, 3), chunk(running, 1, 1)]
    assert build(chunks).token_ids.tolist()[:5] == [4, 5, 6, 7, FROM_STATE]


def test_blocks_that_left_the_window_are_null_blocks() -> None:
    seq = make_sequence(list(range(9)), [], slot=0, tables=[[0, 0, 3], [4, 5, 6]])
    tables = build([chunk(seq, 8, 1)]).step.block_tables
    assert tables[:, 0].tolist() == [[0, 0, 3, 0, 0, 0], [4, 5, 6, 0, 0, 0]]


# --- prompt log-probabilities ---


def asking(num_known: int = 0, *, output: tuple[int, ...] = ()) -> Sequence:
    """A prompt of six tokens, of which `num_known` log-probabilities are known."""
    params = SamplingParams(prompt_logprobs=2)
    seq = make_sequence(
        [20, 21, 22, 23, 24, 25], [*output], slot=0, tables=[[1], [2]], params=params
    )
    seq.request.prompt_logprobs = [TokenLogprobs(0.0, ())] * num_known
    return seq


@pytest.mark.parametrize(
    ("start", "end", "num_known", "positions"),
    [
        (0, 6, 0, [1, 2, 3, 4, 5]),  # nothing tells of the first, nothing is behind the last
        (0, 3, 0, [1, 2, 3]),  # the last row of a chunk tells of the token behind it
        (3, 6, 3, [4, 5]),
        (3, 5, 3, [4, 5]),
        (5, 6, 5, []),
        (0, 4, 2, [3, 4]),  # computed again, but two are known
        (0, 6, 5, []),
        (2, 4, 4, []),
    ],
)
def test_a_chunk_tells_of_the_tokens_behind_its_rows_unless_they_are_known(
    start: int, end: int, num_known: int, positions: list[int]
) -> None:
    seq = asking(num_known)
    assert list(targets_of(seq, start, end)) == positions
    batch = build([chunk(seq, start, end - start)])
    count = int(batch.prompt.count)
    assert count == len(positions)
    assert batch.prompt.rows[:count].tolist() == [p - 1 - start for p in positions]
    assert batch.prompt.token_ids[:count].tolist() == [20 + p for p in positions]


def test_outputs_are_no_prompt() -> None:
    seq = asking(output=(90, 91))
    assert list(targets_of(seq, 0, 8)) == [1, 2, 3, 4, 5]
    assert list(targets_of(seq, 7, 8)) == []


def test_who_does_not_ask_is_told_nothing() -> None:
    seq = make_sequence([1, 2, 3], [], slot=0, tables=[[1], [2]])
    assert list(targets_of(seq, 0, 3)) == []
    assert build([chunk(seq, 0, 3)]).prompt.count == 0


def test_targets_of_several_chunks_stand_one_behind_the_other_with_rows_of_the_batch() -> None:
    silent = make_sequence([1, 2], [], slot=1, tables=[[1], [2]])
    chunks = [chunk(asking(1), 1, 2), chunk(silent, 0, 2), chunk(asking(2), 2, 4)]
    prompt = build(chunks, num_tokens=8).prompt
    assert prompt.count == 5
    assert prompt.rows.tolist() == [0, 1, 4, 5, 6, 0, 0, 0]
    assert prompt.token_ids.tolist() == [22, 23, 23, 24, 25, 0, 0, 0]


# --- numbers ---


@pytest.mark.parametrize(
    ("params", "name", "stored"),
    [
        (SamplingParams(top_k=2**40), "top_k", 2**31 - 1),
        (SamplingParams(temperature=1e300), "temperature", np.float32(1e30)),
        (SamplingParams(temperature=1e-300), "temperature", np.float32(1e-30)),
        (SamplingParams(repetition_penalty=1e300), "repetition_penalty", np.float32(1e30)),
        (SamplingParams(top_p=1e-300), "top_p", 0.0),
        (SamplingParams(logprobs=0), "wants_logprobs", True),
        (SamplingParams(prompt_logprobs=5), "wants_logprobs", False),
        (SamplingParams(best_of=2), "wants_logprobs", True),  # to tell which are best
    ],
)
def test_parameters_are_stored_as_the_device_can_use_them(
    params: SamplingParams, name: str, stored: float
) -> None:
    seq = make_sequence([1], [], slot=0, tables=[[1], [2]], params=params)
    sampling = build([chunk(seq, 0, 1)]).sampling
    assert getattr(sampling, name)[0] == stored


def test_the_largest_seed_survives_the_split_into_words() -> None:
    seq = make_sequence([1], [], slot=0, tables=[[1], [2]], seed=2**63 - 1)
    seed = build([chunk(seq, 0, 1)]).sampling.seed
    assert seed[0].tolist() == [2**32 - 1, 2**31 - 1]


def test_shapes_and_dtypes_do_not_depend_on_the_chunks(batch: Batch) -> None:
    def kinds(value: Any, name: str = "") -> dict[str, tuple]:
        if not dataclasses.is_dataclass(value):
            return {name: (value.shape, value.dtype)}
        return {k: v for n, x in vars(value).items() for k, v in kinds(x, f"{name}.{n}").items()}

    expected = kinds(build([]))
    assert kinds(batch) == expected
    assert kinds(build([chunk(asking(), 0, 6)])) == expected
    n, s = (8,), (4,)
    assert {name: shape for name, (shape, _) in expected.items()} == {
        ".token_ids": n,
        ".token_slots": s,
        ".step.positions": n,
        ".step.query_start": (5,),
        ".step.context_lens": s,
        ".step.block_tables": (2, 4, 6),
        **{f".sampling.{field.name}": s for field in dataclasses.fields(SamplingInput)},
        ".sampling.seed": (4, 2),
        ".prompt.rows": n,
        ".prompt.token_ids": n,
        ".prompt.count": (),
    }
