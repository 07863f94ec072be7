"""Out of blocks: who makes way, what comes back from where, and what is given back in time."""

import itertools

import numpy as np
import pytest

from tests.engine.scripted import Script, chunks
from tests.engine.workloads import NO_WINDOW, worst_case

# --- who is preempted ---


def test_the_latest_is_preempted_first_and_resumes_at_its_place() -> None:
    sim = Script(8, block_size=2)  # 7 usable blocks; the first three take 3 each in the end
    for i in range(3):
        sim.add(10 * i, max_tokens=7)
    sim.step()
    sim.add(*range(70, 77), max_tokens=2)
    computed = []
    while sim.live:
        computed.append([arrival for arrival, _, _ in chunks(sim.step())])
    assert [who for who, _ in itertools.groupby(computed)] == [
        [1, 2, 3],
        [1, 2],  # the third makes way, and the fourth does not overtake it
        [1],
        [2],
        [3],
        [4],
    ]


def test_a_small_request_does_not_overtake_one_that_waits_for_blocks() -> None:
    sim = Script(7)  # 6 usable blocks of 4 tokens
    running, large, small = (
        sim.add(*range(100 * i, 100 * i + length), max_tokens=2)
        for i, length in enumerate([12, 16, 1])
    )
    sim.step()
    assert sim.scheduler.running == [running]
    assert list(sim.scheduler.waiting) == [large, small]
    sim.end(running)
    sim.step()
    assert sim.scheduler.running[0] is large


def test_a_request_of_a_lower_priority_makes_way_and_comes_back() -> None:
    sim = Script(6, block_size=2, max_num_seqs=2)
    low = sim.add(1, 2, 3, priority=1, max_tokens=3)
    sim.step()
    high = sim.add(*range(10, 17), max_tokens=2)
    sim.step()
    assert (sim.scheduler.running, list(sim.scheduler.waiting)) == ([high], [low])
    sim.run_to_the_end()
    assert low.num_preemptions == 1
    assert high.num_preemptions == 0


def test_a_request_of_the_same_priority_does_not_make_way() -> None:
    sim = Script(6, block_size=2, max_num_seqs=2)
    first = sim.add(1, 2, 3, max_tokens=3)
    sim.step()
    sim.add(*range(10, 17), max_tokens=2)
    sim.step()
    assert sim.scheduler.running == [first]


def test_a_lower_priority_makes_way_for_slots_too() -> None:
    sim = Script(50, max_num_seqs=2)
    low = [sim.add(i, priority=1) for i in range(2)]
    sim.step()
    high = sim.add(7)
    sim.step()
    assert sim.scheduler.running == [high, low[0]]


@pytest.mark.parametrize("root", ["shared", "private"])
def test_samples_are_preempted_together_and_share_their_prompt_when_they_resume(root: str) -> None:
    sim = Script(30)
    group = sim.add(*range(10), width=3, root=root)
    sim.steps(3)
    sim.take(free=0)
    first = sim.add(50, priority=-1, max_tokens=2)
    sim.step()
    assert group.num_preemptions == 1
    assert all(seq.block_tables is None and seq.slot is None for seq in group.sequences)
    sim.give_back()
    sim.end(first)
    sim.reset_prefix_cache()  # nothing of the group is left
    plans = sim.steps(2)
    assert chunks(plans[0]) == [(1, 0, 13)]  # the first computes the prompt,
    assert chunks(plans[1]) == [(1, 13, 14), (1, 8, 13), (1, 8, 13)]  # the others take it over
    tables = np.stack([seq.tables[0, :2] for seq in group.sequences])
    assert (tables == tables[0]).all()
    sim.run_to_the_end()


# --- swapping ---


def test_a_swapped_request_shares_the_blocks_that_the_device_still_has() -> None:
    sim = Script(12, num_host_blocks=12, swap="always")
    request = sim.add(*range(10), max_tokens=5)
    sim.steps(2)  # 11 tokens are computed: two blocks are full, and a part of the third
    sim.take(free=0)
    first = sim.add(50, priority=-1, max_tokens=2)
    plan = sim.step()
    assert request.is_swapped
    assert len(plan.transfers.swap_outs) == 3
    sim.end(first)
    sim.give_back()
    plan = sim.step()
    assert len(plan.transfers.swap_ins) == 1
    assert chunks(plan) == [(1, 11, 12)]
    assert sim.scheduler.blocks.stats.swapped_in == 1
    sim.run_to_the_end()


def test_swapped_samples_go_on_sharing() -> None:
    sim = Script(12, num_host_blocks=12, swap="always")
    request = sim.add(*range(6), max_tokens=5, width=3)
    sim.steps(2)
    distinct = len(sim.scheduler.blocks.blocks_of(request))
    sim.take(free=0)
    first = sim.add(50, priority=-1, max_tokens=2)
    plan = sim.step()
    assert request.is_swapped
    assert len(plan.transfers.swap_outs) == distinct == 1 + 3
    sim.end(first)
    sim.give_back()
    sim.step()
    assert len(sim.scheduler.blocks.blocks_of(request)) == distinct
    sim.run_to_the_end()


def test_a_request_for_which_the_host_has_no_room_is_recomputed() -> None:
    sim = Script(12, num_host_blocks=3, swap="always")  # 2 usable
    request = sim.add(*range(10), max_tokens=5)
    sim.steps(2)
    sim.take(free=0)
    sim.add(50, priority=-1, max_tokens=2)
    sim.step()
    assert not request.is_swapped
    assert (sim.scheduler.num_swaps, sim.scheduler.num_recomputes) == (0, 1)


@pytest.mark.parametrize("swap", ["always", "never"])
def test_beams_keep_their_candidates_when_swapped_and_find_them_again_otherwise(swap: str) -> None:
    sim = Script(20, num_host_blocks=20, swap=swap, block_size=1, budget=4)
    request = sim.add(1, 2, width=2, is_beam_search=True)
    sim.steps(2)
    sim.take(free=1)  # for one beam of two
    assert len(sim.step().chunks) == 1
    assert len(request.candidates) == 1
    sim.step()
    assert request.num_preemptions == 1
    assert len(request.candidates) == (swap == "always")
    sim.give_back()
    resumed = sim.step()
    assert len(resumed.samplers) == (1 if swap == "always" else 2)
    sim.run_to_the_end()


def test_a_beam_that_stops_as_its_blocks_come_from_the_host_does_not_lose_them() -> None:
    sim = Script(20, num_host_blocks=40, block_size=1, offload=True)
    request = sim.add(1, 2, width=2, is_beam_search=True, max_tokens=8)
    sim.steps(3)
    sim.add(*range(50, 68), priority=-1, max_tokens=1)  # needs the whole pool
    sim.steps(2)
    assert request.num_preemptions == 1
    sim.swap = "always"
    sim.take(free=5)
    # The first beam takes all five, then the second gets room for what is on the host only.
    sim.step()
    sim.give_back(2)
    sim.step()
    assert request.num_preemptions == 2
    sim.give_back()
    sim.run_to_the_end()


# --- windows ---


def test_blocks_that_left_the_window_are_given_back() -> None:
    sim = Script(30, block_size=2, windows=(3, NO_WINDOW))
    request = sim.add(*range(5), max_tokens=8)
    (sequence,) = request.sequences
    owned = []
    for _ in range(7):
        sim.step()
        owned.append([np.flatnonzero(table).tolist() for table in sequence.tables])
    # Behind 5, 6, ... 11 tokens the next one sees two before it. Blocks go when one is full.
    assert owned == [
        [[1, 2], [0, 1, 2]],
        [[2], [0, 1, 2]],
        [[2, 3], [0, 1, 2, 3]],
        [[3], [0, 1, 2, 3]],
        [[3, 4], [0, 1, 2, 3, 4]],
        [[4], [0, 1, 2, 3, 4]],
        [[4, 5], [0, 1, 2, 3, 4, 5]],
    ]
    sim.run_to_the_end()


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_window_runs_in_the_blocks_of_its_worst_case(window: int, block_size: int) -> None:
    sim = Script(2, block_size=block_size, windows=(window,))
    need = worst_case(sim.workload.config, 1, 30, 1)
    sim = Script(need + 1, block_size=block_size, windows=(window,))
    request = sim.add(1, max_tokens=30)
    sim.run_to_the_end()
    assert request.num_preemptions == 0


def test_a_prefix_needs_only_the_blocks_in_its_window() -> None:
    sim = Script(30, block_size=2, windows=(3,))
    sim.add(*range(12), max_tokens=1)
    sim.run_to_the_end()
    # Of the five that left the window the last go first: those of tokens 8 and 6 are reused.
    sim.take(free=4)
    sim.add(*range(12), max_tokens=1)
    assert chunks(sim.step()) == [(2, 6, 12)]


def test_beams_whose_window_blocks_were_reused_share_their_prompt_again_and_end() -> None:
    # The prompt's blocks in the windows are gone when the second beam looks for them, so that it
    # computes the prompt again; both would need more than the pool, did they not share it then.
    windows = (2, 2, 2, NO_WINDOW)
    sim = Script(45, block_size=1, budget=64, max_model_len=40, windows=windows)
    beams = sim.add(*range(10), width=2, is_beam_search=True, max_tokens=12)
    assert worst_case(sim.workload.config, 10, 12, 2) == 44
    sim.steps(10)
    sim.add(*range(50, 78), priority=-1, max_tokens=3)
    sim.run_to_the_end()
    assert beams.num_preemptions == 1
