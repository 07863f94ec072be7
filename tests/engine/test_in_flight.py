"""The scheduler goes on before results are known: preemption, ends and sharing meanwhile."""

from typing import Any

import pytest

from pagedjax.request import Sequence
from tests.engine.scripted import Script, chunks

SWAPS = pytest.mark.parametrize("swap", ["always", "never"], ids=["swap", "recompute"])


class InFlight(Script):
    """A script with a step in flight, in which every token of a sequence is another one."""

    def __init__(self, num_blocks: int, **config: Any):
        super().__init__(num_blocks, **{"num_in_flight": 1, **config})

    def pick_token(self, seq: Sequence) -> int:
        return 100 * (seq.index + 1) + len(self.memory.tokens_of(seq))


def tokens(sequence: Sequence) -> tuple[int, int]:
    """How many of its output are on the host, and how many on their way."""
    return sequence.num_output_tokens, sequence.num_pending


# --- preemption ---


@SWAPS
def test_trap_6_a_token_in_flight_comes_to_a_preempted_request_once(swap: str) -> None:
    sim = InFlight(50, num_host_blocks=50, swap=swap, max_num_seqs=1)
    low = sim.add(1, 2, 3, priority=1, max_tokens=5)
    (seq,) = low.sequences
    sim.steps(2)
    assert tokens(seq) == (1, 1)
    sim.add(50, 51, max_tokens=2)
    assert chunks(sim.step()) == [(2, 0, 2)]  # in the slot of the other, whose token comes now
    assert low.is_swapped == (swap == "always")
    assert (seq.slot, tokens(seq)) == (None, (2, 0))
    assert [chunks(plan) for plan in sim.steps(2)] == [[(2, 2, 3)], []]
    # Its last token is on the host alone: the slot has had another one's since.
    assert not seq.token_on_device
    start = 4 if swap == "always" else 0
    assert [chunks(plan) for plan in sim.steps(3)] == [[(1, start, 5)], [(1, 5, 6)], [(1, 6, 7)]]
    assert seq.output_token_ids == [103, 104, 105, 106]
    assert tokens(seq) == (4, 1)
    sim.run_to_the_end()
    assert seq.output_token_ids == [103, 104, 105, 106, 107]


@SWAPS
def test_trap_6_who_makes_way_does_not_come_back_before_its_results(swap: str) -> None:
    sim = InFlight(50, num_host_blocks=50, swap=swap, max_num_seqs=1, num_in_flight=3)
    low = sim.add(1, 2, 3, priority=1)
    sim.steps(2)
    high = sim.add(50, 51)
    sim.step()
    sim.end(high)  # the slot is free at once
    assert (low.num_in_flight, low.sequences[0].num_pending) == (2, 2)
    assert chunks(sim.step()) == []  # nothing to do, so all results are taken
    assert (low.num_in_flight, tokens(low.sequences[0])) == (0, (2, 0))
    assert chunks(sim.step()) == [(1, 4 if swap == "always" else 0, 5)]
    sim.run_to_the_end()


@SWAPS
def test_trap_6_a_request_may_end_by_a_token_that_comes_while_it_waits(swap: str) -> None:
    sim = InFlight(50, num_host_blocks=50, swap=swap, max_num_seqs=1)
    low = sim.add(1, 2, 3, priority=1)
    sim.stop(low, 2)
    sim.steps(2)
    high = sim.add(50, 51)
    sim.step()
    assert low.num_preemptions == 1
    assert list(sim.live) == [high]
    assert not sim.scheduler.waiting
    sim.run_to_the_end()


@SWAPS
def test_trap_6_samples_and_beams_are_preempted_with_their_step_in_flight(swap: str) -> None:
    for is_beam_search in (False, True):
        sim = InFlight(50, num_host_blocks=50, swap=swap, max_num_seqs=3)
        group = sim.add(*range(6), width=3, is_beam_search=is_beam_search, priority=1, max_tokens=4)
        while not (len(group.sequences) == 3 and group.num_in_flight):
            sim.step()
        sim.add(50, max_tokens=2)
        sim.step()
        assert group.num_preemptions == 1
        assert not any(seq.num_pending for seq in group.sequences)
        sim.run_to_the_end()


def test_trap_9_the_last_token_in_a_slot_is_that_of_who_has_it_now() -> None:
    sim = InFlight(50, num_host_blocks=50, swap="always", max_num_seqs=2)
    stays, goes = sim.add(1, 2), sim.add(3, 4, priority=1)
    sim.steps(2)
    slot = goes.sequences[0].slot
    sim.add(50, 51, max_tokens=1)
    sim.step()
    (other,) = sim.scheduler.running[1].sequences
    assert other.slot == slot
    while goes not in sim.scheduler.running:
        sim.step()
    assert goes.sequences[0].slot == slot
    assert sim.device.last[slot or 0] == (goes.sequences[0], 5)  # and not the other's
    assert stays.sequences[0].token_on_device
    sim.run_to_the_end()


# --- ends that the scheduler learns of late ---


def test_a_sequence_that_has_stopped_is_computed_once_more_in_blocks_that_are_its_own() -> None:
    sim = InFlight(6, block_size=2, max_num_seqs=1)
    first = sim.add(1, 2, 3, max_tokens=7)
    sim.stop(first, 2)
    sim.add(*range(50, 57), max_tokens=2)  # needs blocks of the first
    assert [chunks(plan) for plan in sim.steps(4)] == [
        [(1, 0, 3)],
        [(1, 3, 4)],
        [(1, 4, 5)],  # while the token that ends it is on its way
        [(2, 0, 7)],
    ]
    sim.run_to_the_end()


def test_nothing_is_computed_behind_the_last_of_max_tokens() -> None:
    sim = InFlight(20)
    request = sim.add(1, 2, 3, max_tokens=3)
    assert [chunks(plan) for plan in sim.steps(4)] == [
        [(1, 0, 3)],
        [(1, 3, 4)],
        [(1, 4, 5)],
        [],  # the third token comes
    ]
    assert request not in sim.live
    sim.check_all_is_free()


@pytest.mark.parametrize("num_decode_steps", [1, 4])
def test_what_is_in_flight_of_an_aborted_request_is_dropped(num_decode_steps: int) -> None:
    sim = InFlight(9, max_num_seqs=1, num_decode_steps=num_decode_steps)
    aborted = sim.add(1, 2, 3, max_tokens=20)
    sim.steps(3)
    (seq,) = aborted.sequences
    length = len(seq.token_ids)
    assert seq.num_pending == num_decode_steps
    sim.end(aborted)
    sim.add(*range(50, 65), max_tokens=3)  # in its slot and its blocks
    assert chunks(sim.step()) == [(2, 0, 15)]
    assert len(seq.token_ids) == length
    sim.run_to_the_end()


def test_an_aborted_sample_leaves_those_in_flight_with_it_their_tokens() -> None:
    sim = InFlight(30)
    group = sim.add(*range(6), width=3)
    sim.steps(2)
    assert [tokens(seq) for seq in group.sequences] == [(1, 1)] * 3
    sim.end_sequence(group.sequences[1])
    sim.step()
    assert [tokens(seq) for seq in group.sequences] == [(2, 1)] * 2
    sim.run_to_the_end()


# --- several decodes in one plan ---


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("is_seen", [False, True])
def test_a_sequence_may_stop_in_the_middle_of_a_plan(num_in_flight: int, is_seen: bool) -> None:
    sim = InFlight(30, block_size=2, num_decode_steps=4, num_in_flight=num_in_flight)
    stops, goes_on = sim.add(1, 2, 3), sim.add(*range(50, 54))
    sim.stop(stops, 3, is_seen=is_seen)
    (seq,) = stops.sequences
    sim.step()
    plan = sim.step()
    assert (plan.num_steps, chunks(plan)) == (4, [(1, 3, 7), (2, 4, 8)])
    sim.steps(num_in_flight)
    assert seq.output_token_ids == [103, 104, 105]
    assert list(sim.live) == [goes_on]
    sim.run_to_the_end()


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_a_block_that_ends_with_the_token_that_stopped_a_sequence_is_not_found(
    num_in_flight: int,
) -> None:
    # The device saw it stop, so it did not compute that token, though the plan said so.
    sim = InFlight(30, num_decode_steps=8, num_in_flight=num_in_flight)
    first = sim.add(1, 2, 3)
    sim.stop(first, 5, is_seen=True)
    (seq,) = first.sequences
    sim.run_to_the_end()
    assert len(seq.token_ids) == 8
    sim.add(*seq.token_ids, 9)
    assert chunks(sim.step()) == [(2, 4, 9)]
    sim.run_to_the_end()


def test_a_plan_of_several_decodes_ends_at_max_tokens() -> None:
    sim = InFlight(30, num_decode_steps=4)
    sim.add(1, 2, 3, max_tokens=7)
    sim.add(50, max_tokens=20)
    plans = sim.steps(4)
    assert [plan.num_steps for plan in plans] == [1, 4, 4, 4]
    assert [chunks(plan) for plan in plans] == [
        [(1, 0, 3), (2, 0, 1)],
        [(1, 3, 7), (2, 1, 5)],
        [(1, 7, 9), (2, 5, 9)],
        [(2, 9, 13)],
    ]
    sim.run_to_the_end()


def test_without_blocks_for_several_decodes_there_is_one_and_nobody_is_preempted_for_more() -> None:
    sim = InFlight(7, block_size=2, num_decode_steps=4)
    requests = [sim.add(i, i + 1, max_tokens=4) for i in (1, 50)]
    assert sim.step().num_steps == 1
    sim.take(free=3)  # four are needed
    assert [(plan.num_steps, chunks(plan)) for plan in sim.steps(2)] == [
        (1, [(1, 2, 3), (2, 2, 3)]),
        (1, [(1, 3, 4), (2, 3, 4)]),
    ]
    sim.give_back()
    assert not any(request.num_preemptions for request in requests)
    sim.run_to_the_end()


def test_nobody_who_could_join_waits_for_several_decodes() -> None:
    sim = InFlight(30, num_decode_steps=4, max_num_seqs=2)
    sim.add(1, 2, 3, max_tokens=20)
    sim.steps(2)
    sim.add(50, 51, max_tokens=20)
    sim.add(60, 61)  # has no slot, so nothing is lost for it
    plans = sim.steps(2)
    assert [plan.num_steps for plan in plans] == [1, 4]
    assert [chunks(plan) for plan in plans] == [
        [(1, 7, 8), (2, 0, 2)],
        [(1, 8, 12), (2, 2, 6)],
    ]
    sim.run_to_the_end()


def test_prompts_and_beams_are_not_computed_several_tokens_ahead() -> None:
    sim = InFlight(30, num_decode_steps=4, budget=4)
    sim.add(1, 2, max_tokens=20)
    prompt = sim.add(*range(50, 59), max_tokens=3)
    assert [plan.num_steps for plan in sim.steps(4)] == [1, 1, 1, 1]
    assert prompt.sequences[0].num_computed_tokens == 9
    assert sim.step().num_steps == 4
    beams = InFlight(30, num_decode_steps=4, num_in_flight=0)
    beams.add(1, 2, width=2, is_beam_search=True)
    assert {plan.num_steps for plan in beams.steps(5)} == {1}


# --- sharing ---


@pytest.mark.parametrize("num_decode_steps", [1, 2, 3])
def test_a_block_is_found_once_its_last_token_has_come_and_another_behind(
    num_decode_steps: int,
) -> None:
    sim = InFlight(30, num_decode_steps=num_decode_steps)
    (seq,) = sim.add(1, 2, max_tokens=20).sequences
    pool = sim.scheduler.pool
    sim.step()
    while len(seq.token_ids) < 5:
        assert pool.key_of(int(seq.tables[0, 0])) is None
        sim.step()
    assert pool.key_of(int(seq.tables[0, 0])) is not None
    sim.add(*seq.token_ids[:5], 9)
    assert chunks(sim.step())[-1] == (2, 4, 6)
    sim.run_to_the_end()


def test_no_block_is_lost_for_sharing_when_a_request_ends_at_max_tokens() -> None:
    sim = InFlight(30, num_decode_steps=8)
    (seq,) = sim.add(1, 2, 3, max_tokens=10).sequences
    sim.run_to_the_end()
    assert len(seq.token_ids) == 13
    sim.add(*seq.token_ids, 9)
    assert chunks(sim.step()) == [(2, 12, 14)]


@pytest.mark.parametrize("num_decode_steps", [1, 3])
def test_samples_part_at_the_end_of_their_prompt_while_its_step_is_in_flight(
    num_decode_steps: int,
) -> None:
    sim = InFlight(30, num_decode_steps=num_decode_steps)
    group = sim.add(*range(6), width=3)
    prompt, decode = sim.steps(2)
    assert prompt.samplers == group.sequences
    assert [c.start for c in decode.chunks] == [6, 6, 6]
    assert all(seq.token_on_device for seq in group.sequences)
    # The last block is half full: two of three get a copy of it before they write.
    assert len(decode.transfers.copies) == 2
    assert [seq.output_token_ids for seq in group.sequences] == [[106], [206], [306]]
    sim.run_to_the_end()


# --- the world outside ---


def test_other_weights_and_an_emptied_cache_meet_a_step_in_flight() -> None:
    sim = InFlight(30, block_size=2, num_decode_steps=2)
    (seq,) = sim.add(1, 2, 3, max_tokens=12).sequences
    sim.steps(2)
    sim.update_weights(restarts=False)
    prompt = [1, 2, 3, *seq.output_token_ids, 9]
    later = sim.add(*prompt)
    while not sim.version:
        assert later in sim.scheduler.held
        sim.step()
    assert seq.num_output_tokens == 12
    assert chunks(sim.step())[-1][1:] == (0, len(prompt)), "old blocks are not found"
    sim.reset_prefix_cache()
    sim.run_to_the_end()


def test_who_begins_again_is_computed_while_its_old_step_is_in_flight() -> None:
    sim = InFlight(30, block_size=2)
    old = sim.add(1, 2, 3, max_tokens=5, priority=1)
    sim.steps(2)
    sim.add(50, 51)
    sim.update_weights(restarts=True)
    assert old.num_in_flight == 1
    assert chunks(sim.step()) == [(2, 0, 2), (1, 0, 3)]
    assert old.num_in_flight == sum(seq.num_output_tokens for seq in old.sequences) == 0
    _, again = sim.scheduler.running
    assert (again.order, again.params, again.seed) == (old.order, old.params, old.seed)
    sim.run_to_the_end()
