"""The scheduler keeps its limits, serves everybody, and nobody reads what is not theirs."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import InvalidRequestError
from pagedjax.scheduler_config import SchedulerConfig
from tests.engine.scripted import Script, chunks
from tests.engine.simulation import Simulation
from tests.engine.workloads import NO_WINDOW, Arrival, Workload, random_workload, worst_case

# --- whole days ---


def test_in_many_random_days_everything_happens_and_every_step_is_right() -> None:
    happened: Counter[str] = Counter()
    for seed in range(250):
        sim = Simulation(random_workload(Random(seed)))
        sim.run()
        happened.update(vars(sim.scheduler.blocks.stats))
        happened.update(swaps=sim.scheduler.num_swaps, recomputes=sim.scheduler.num_recomputes)
        happened.update(sim.happened)
    assert all(count > 20 for count in happened.values()), happened


@settings(max_examples=100, deadline=None)
@given(st.randoms())
def test_any_workload_is_served_within_the_limits(random: Random) -> None:
    Simulation(random_workload(random)).run()


@pytest.mark.slow
def test_in_a_thousand_random_days_every_step_is_right() -> None:
    for seed in range(1000, 2000):
        Simulation(random_workload(Random(seed))).run()


def test_a_thousand_aborts_leave_every_block_free() -> None:
    random = Random(0)
    config = SchedulerConfig(12, 20, 32, 2, (3, NO_WINDOW), offload_evicted=True)
    arrivals = [
        Arrival(
            step,
            prompt=tuple(random.choices([0, 1], k=random.randint(1, 8))),
            max_tokens=24,
            width=random.randint(1, 2),
            is_beam_search=random.random() < 0.3,
            abort_step=step + random.randint(0, 80),
            abort_sample_step=step + random.randint(0, 80),
        )
        for step in range(1000)
    ]
    sim = Simulation(Workload(config, 45, 60, arrivals, "random"))
    sim.run()
    assert sim.scheduler.num_swaps > 10
    assert sim.scheduler.num_recomputes > 10


# --- chunks and the budget ---


def test_a_long_prompt_is_chunked_beside_running_decodes() -> None:
    sim = Script(100, budget=6)
    sim.add(1, 2)
    sim.add(*range(15))
    assert [chunks(plan) for plan in sim.steps(5)] == [
        [(1, 0, 2), (2, 0, 4)],
        [(1, 2, 3), (2, 4, 9)],
        [(1, 3, 4), (2, 9, 14)],
        [(1, 4, 5), (2, 14, 15)],
        [(1, 5, 6), (2, 15, 16)],
    ]


def test_only_a_chunk_that_reaches_the_last_token_samples_and_a_prompt_for_all_samples() -> None:
    sim = Script(100, budget=6)
    request = sim.add(*range(8), width=3)
    first, second, third = sim.steps(3)
    assert first.samplers == []
    assert second.samplers == request.sequences
    assert [seq.index for seq in request.sequences] == [0, 1, 2]
    assert [c.samplers for c in third.chunks] == [(seq,) for seq in request.sequences]


def test_samples_have_seeds_of_their_own_and_the_first_that_of_the_request() -> None:
    sim = Script(100)
    request = sim.add(1, 2, width=4)
    sim.step()
    seeds = [seq.seed for seq in request.sequences]
    assert seeds[0] == request.seed
    assert len(set(seeds)) == 4


def test_a_swapped_group_that_comes_back_keeps_to_the_budget() -> None:
    sim = Script(50, num_host_blocks=50, swap="always", budget=4)
    group = sim.add(1, 2, width=3)
    sim.steps(2)
    sim.add(*range(10, 17), priority=-1, max_tokens=2)
    sim.take(free=2)
    assert chunks(sim.step()) == [(2, 0, 4)]
    assert group.is_swapped
    sim.give_back()
    # One token of the budget is left for three sequences that have one each to compute.
    assert chunks(sim.step()) == [(2, 4, 7), (1, 3, 4)]
    sim.run_to_the_end()


def test_no_work_gives_no_chunks() -> None:
    plan = Script(4).step()
    assert plan.chunks == plan.samplers == []


# --- prefixes ---


@pytest.mark.parametrize(("length", "start"), [(7, 4), (8, 4), (9, 8), (10, 8)])
def test_a_full_hit_computes_the_rest_of_the_last_block_and_one_token_at_least(
    length: int, start: int
) -> None:
    sim = Script(20)
    sim.add(*range(10), max_tokens=1)
    sim.run_to_the_end()
    request = sim.add(*range(length))
    assert chunks(sim.step()) == [(2, start, length)]
    assert request.num_cached_tokens == start


def test_a_request_waits_for_blocks_that_another_fills_in_the_same_step() -> None:
    sim = Script(30, budget=6)
    sim.add(*range(14))
    sim.add(*range(12), 99)
    sim.add(7, 7)  # behind it, though it shares nothing: first come, first served
    assert [chunks(plan) for plan in sim.steps(4)] == [
        [(1, 0, 6)],
        [(1, 6, 12)],
        [(1, 12, 14), (2, 12, 13), (3, 0, 2)],
        [(1, 14, 15), (2, 13, 14), (3, 2, 3)],
    ]


def test_requests_with_different_roots_share_nothing() -> None:
    sim = Script(30)
    for root in ("shared", "private", None):
        sim.add(*range(9), max_tokens=1, root=root)
        assert chunks(sim.step())[0][1:] == (0, 9)


def test_prompt_logprobs_are_computed_once_and_hits_begin_where_they_are_known() -> None:
    sim = Script(20)
    sim.add(*range(8), max_tokens=1)
    sim.run_to_the_end()
    request = sim.add(*range(8), wants_prompt_logprobs=True)
    assert chunks(sim.step()) == [(2, 0, 8)]  # nothing is known of the prompt
    sim.steps(2)
    sim.add(50, 51, priority=-1, max_tokens=1)
    sim.take(free=0)
    sim.step()
    assert request.num_preemptions == 1
    sim.give_back()
    assert chunks(sim.step())[-1] == (2, 8, 11)  # all is


def test_before_other_weights_those_who_have_begun_end_and_nobody_else_begins() -> None:
    sim = Script(30, max_num_seqs=1)
    sim.add(*range(9), max_tokens=2, priority=1)
    sim.step()
    waits = sim.add(*range(9), max_tokens=4, priority=1)
    sim.update_weights(restarts=False)
    urgent = sim.add(*range(9), max_tokens=4)
    assert (list(sim.scheduler.held), len(sim.scheduler)) == ([urgent, waits], 3)
    sim.end(sim.add(1, 2))  # one may leave meanwhile
    assert chunks(sim.step()) == [(1, 9, 10)], "nobody makes way for those who may not begin"
    assert not sim.scheduler.held
    assert chunks(sim.step()) == [(3, 0, 9)], "no old block is found"
    sim.run_to_the_end()


def test_all_can_be_preempted_and_go_on() -> None:
    sim = Script(30, num_host_blocks=30, swap="always")
    beams = sim.add(*range(6), width=3, is_beam_search=True, max_tokens=4)
    sim.add(*range(9), max_tokens=4)
    sim.steps(2)
    sim.scheduler.preempt_all()
    sim.reset_prefix_cache()
    assert (sim.scheduler.num_swaps, sim.scheduler.num_recomputes) == (0, 2)
    sim.check_all_blocks_are_free()
    assert [r.arrival for r in sim.scheduler.waiting] == [1, 2]
    assert len(beams.sequences) == 3
    sim.run_to_the_end()


# --- who is refused ---


def test_a_request_that_can_never_fit_is_refused_with_the_numbers_and_the_others_go_on() -> None:
    sim = Script(11, max_model_len=100, windows=(NO_WINDOW,) * 2)  # 5 tables of 4 tokens each
    fits = sim.add(1, 2, 3, max_tokens=2)
    with pytest.raises(InvalidRequestError) as caught:
        sim.scheduler.add(sim.make_request(Arrival(0, tuple(range(19)), max_tokens=3)))
    assert str(caught.value).startswith(
        "19 prompt tokens and max_tokens 3 need 12 blocks of 4 tokens in 2 KV groups for "
        "1 sequences; the pool has 10."
    )
    with pytest.raises(InvalidRequestError, match=r"5 sequences at once .* max_num_seqs is 4\."):
        sim.scheduler.add(sim.make_request(Arrival(0, (1,), max_tokens=1, width=5)))
    assert list(sim.live) == [fits]
    sim.run_to_the_end()


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "width", "windows", "need"),
    [
        (8, 9, 1, (NO_WINDOW,), 4),  # 16 tokens, as the last is not stored
        (8, 9, 3, (NO_WINDOW,), 2 + 3 * 2),  # the prompt is shared
        (7, 10, 3, (NO_WINDOW,), 1 + 3 * 3),  # but for its last block, which is not full
        (8, 9, 1, (5,), 2),  # 5 tokens lie in 2 blocks
        (8, 9, 1, (6,), 3),  # or in 3
        (8, 9, 3, (6, NO_WINDOW), min(3 * 3, 8) + 8),
        (3, 1, 4, (NO_WINDOW,), 4),
        (1, 1000, 1, (NO_WINDOW,), 8),  # the model ends at 32 tokens
    ],
)
def test_the_worst_case_shares_the_prompt_and_gives_windows_back(
    prompt_len: int, max_tokens: int, width: int, windows: tuple[int, ...], need: int
) -> None:
    sim = Script(need + 1, windows=windows)
    assert worst_case(sim.workload.config, prompt_len, max_tokens, width) == need
    sim.add(*range(prompt_len), max_tokens=max_tokens, width=width)
    sim.run_to_the_end()
    small = Script(need, windows=windows)
    request = small.make_request(Arrival(0, tuple(range(prompt_len)), max_tokens, width))
    with pytest.raises(InvalidRequestError, match=f"need {need} blocks"):
        small.scheduler.add(request)


# --- the end ---


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(12, 5), (1, 1000)])
def test_a_request_that_fills_the_pool_to_the_last_slot_is_served(
    prompt_len: int, max_tokens: int
) -> None:
    # The last token is never stored: 17 tokens, by max_tokens or by max_model_len, take 16 slots.
    sim = Script(5, max_model_len=17)
    request = sim.add(*range(prompt_len), max_tokens=max_tokens)
    while request.sequences[0].num_tokens < 16:
        sim.step()
    assert sim.scheduler.pool.num_free == 0
    sim.step()
    sim.check_all_is_free()


def test_a_waiting_request_can_be_finished_before_it_ran() -> None:
    sim = Script(9, max_num_seqs=1, budget=4)
    first, second, third = (sim.add(i, i, max_tokens=2) for i in range(3))
    sim.step()
    sim.end(second)
    assert list(sim.scheduler.waiting) == [third]
    sim.end(first)
    assert chunks(sim.step()) == [(3, 0, 2)]


def test_an_aborted_sample_returns_its_blocks_and_slot_and_its_siblings_go_on() -> None:
    sim = Script(30)
    group = sim.add(*range(6), width=3)
    sim.steps(2)
    free = sim.scheduler.pool.num_free
    sim.end_sequence(group.sequences[1])
    assert sim.scheduler.pool.num_free == free + 1
    assert [seq.index for seq in group.sequences] == [0, 2]
    other, another = sim.add(90), sim.add(91)
    sim.step()
    assert other in sim.scheduler.running
    assert another in sim.scheduler.running
    sim.run_to_the_end()


def test_one_sample_that_is_left_needs_one_slot_to_resume() -> None:
    sim = Script(30, max_num_seqs=3)
    group = sim.add(*range(6), width=3)
    sim.steps(2)
    for _ in range(2):
        sim.end_sequence(group.sequences[0])
    assert group.num_slots == 1
    sim.add(80, width=2)
    sim.step()
    assert len(sim.scheduler.running) == 2
