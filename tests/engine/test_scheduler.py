"""The scheduler keeps its limits and serves everybody, whatever comes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.block_pool import BlockPool
from pagedjax.errors import InvalidRequestError
from pagedjax.request import Request
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import ScheduledChunk, Scheduler, SchedulerConfig


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a simulated day: it stops after `num_outputs` or is aborted at a step."""

    step: int
    prompt_len: int
    max_tokens: int
    num_outputs: int
    abort_step: int | None


@dataclasses.dataclass(frozen=True)
class Workload:
    config: SchedulerConfig
    num_blocks: int
    arrivals: list[Arrival]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    max_num_seqs = draw(st.integers(1, 5))
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
        max_model_len=draw(st.integers(2, 40)),
        block_size=draw(st.integers(1, 8)),
        num_groups=draw(st.integers(1, 3)),
    )
    arrivals = []
    for _ in range(draw(st.integers(1, 12))):
        prompt_len = draw(st.integers(1, config.max_model_len - 1))
        max_tokens = draw(st.integers(1, 40))
        most = min(max_tokens, config.max_model_len - prompt_len)
        arrivals.append(
            Arrival(
                step=draw(st.integers(0, 30)),
                prompt_len=prompt_len,
                max_tokens=max_tokens,
                num_outputs=draw(st.integers(1, most)),
                abort_step=draw(st.none() | st.integers(0, 40)),
            )
        )
    arrivals.sort(key=lambda a: a.step)
    return Workload(config, draw(st.integers(2, 60)), arrivals)


def make_request(index: int, prompt_len: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(f"r{index}", list(range(prompt_len)), params, arrival=index, seed=0)


def make_scheduler(
    num_blocks: int,
    *,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 32,
    block_size: int = 4,
    num_groups: int = 1,
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, budget, max_model_len, block_size, num_groups)
    return Scheduler(config, BlockPool(num_blocks))


def apply(chunks: list[ScheduledChunk], token: int = 0) -> None:
    """What the engine does with a step's results."""
    for chunk in chunks:
        samples = chunk.samples
        chunk.request.num_computed_tokens = chunk.end
        if samples:
            chunk.request.output_token_ids.append(token)


def worst_case(config: SchedulerConfig, request: Request) -> int:
    """Blocks of a request whose last token ends at `max_tokens` or `max_model_len`."""
    total = min(len(request.prompt_token_ids) + request.params.max_tokens, config.max_model_len)
    return config.num_groups * len(range(0, total - 1, config.block_size))


class Simulation:
    """Runs a workload and checks every step of it."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.pool = BlockPool(workload.num_blocks)
        self.scheduler = Scheduler(workload.config, self.pool)
        self.live: dict[Request, Arrival] = {}
        self.computed: dict[Request, int] = {}
        self.admitted: list[int] = []

    def run(self) -> None:
        arrivals = dict(enumerate(self.workload.arrivals))
        # Steps in which anything happens: one for every chunk, and up to the last arrival or abort.
        for step in range(3000):
            for index in [i for i, a in arrivals.items() if a.step <= step]:
                self.arrive(index, arrivals.pop(index))
            for request in [r for r, a in self.live.items() if a.abort_step == step]:
                self.end(request)
            if not arrivals and not self.live:
                break
            self.step()
        else:
            raise AssertionError(f"{len(self.live)} requests never finish")
        assert len(self.scheduler) == 0
        assert self.pool.num_free == self.pool.num_usable
        assert self.admitted == sorted(self.admitted), "first come, first served"

    def arrive(self, index: int, arrival: Arrival) -> None:
        request = make_request(index, arrival.prompt_len, arrival.max_tokens)
        need = worst_case(self.workload.config, request)
        if need > self.pool.num_usable:
            with pytest.raises(InvalidRequestError) as caught:
                self.scheduler.add(request)
            for number in (arrival.prompt_len, arrival.max_tokens, need, self.pool.num_usable):
                assert f" {number}" in f" {caught.value}"
        else:
            self.scheduler.add(request)
            self.live[request] = arrival
            self.computed[request] = 0

    def step(self) -> None:
        scheduler, config = self.scheduler, self.workload.config
        before = list(scheduler.running)
        chunks = scheduler.schedule()
        self.admitted += [r.arrival for r in scheduler.running if r not in before]
        total = sum(chunk.num_tokens for chunk in chunks)
        assert total <= config.max_num_batched_tokens
        assert len(scheduler.running) <= config.max_num_seqs
        # Nobody who runs goes without a token, and one step's work is never put off.
        assert [chunk.request for chunk in chunks] == scheduler.running
        assert all(chunk.num_tokens >= 1 for chunk in chunks)
        self.check_admission(total)
        self.check_slots_and_blocks(chunks)
        for chunk in chunks:
            self.check_progress(chunk)
        apply(chunks)
        for chunk in chunks:
            arrival = self.live[chunk.request]
            if len(chunk.request.output_token_ids) == arrival.num_outputs:
                # The prompt and all outputs but the last were computed, each exactly once.
                expected = arrival.prompt_len + arrival.num_outputs - 1
                assert self.computed[chunk.request] == expected
                self.end(chunk.request)

    def check_progress(self, chunk: ScheduledChunk) -> None:
        request = chunk.request
        assert chunk.start == self.computed[request], "in order, without gaps or repeats"
        assert chunk.end <= request.num_tokens
        assert chunk.samples == (chunk.end == request.num_tokens)
        if request.output_token_ids:
            assert chunk.num_tokens == 1
        self.computed[request] = chunk.end

    def check_slots_and_blocks(self, chunks: list[ScheduledChunk]) -> None:
        config, running = self.workload.config, self.scheduler.running
        slots = [request.slot for request in running]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(config.max_num_seqs))
        owned: list[int] = []
        for chunk in chunks:
            tables, used = chunk.request.block_tables, len(range(0, chunk.end, config.block_size))
            assert tables is not None
            assert tables.shape[0] == config.num_groups
            assert (tables[:, used:] == 0).all()
            owned += tables[:, :used].ravel().tolist()
        assert 0 not in owned
        assert len(set(owned)) == len(owned), "no block has two owners"
        assert self.pool.num_free == self.pool.num_usable - len(owned)
        self.pool.check()

    def check_admission(self, total: int) -> None:
        """Whoever runs can run to the end, and nobody waits without need."""
        scheduler, config = self.scheduler, self.workload.config
        promised = sum(worst_case(config, request) for request in scheduler.running)
        assert promised <= self.pool.num_usable
        if not scheduler.waiting:
            return
        need = worst_case(config, scheduler.waiting[0])
        assert (
            total == config.max_num_batched_tokens
            or len(scheduler.running) == config.max_num_seqs
            or need > self.pool.num_usable - promised
        )

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        assert request.slot is None
        assert request.block_tables is None
        del self.live[request]


@settings(max_examples=200, deadline=None)
@given(workloads())
def test_any_workload_is_served_within_the_limits(workload: Workload) -> None:
    Simulation(workload).run()


def test_a_long_prompt_is_chunked_beside_running_decodes() -> None:
    scheduler = make_scheduler(100, budget=6)
    for index, prompt_len in enumerate([2, 15]):
        scheduler.add(make_request(index, prompt_len, max_tokens=9))
    steps = []
    for _ in range(5):
        chunks = scheduler.schedule()
        steps.append([(c.start, c.num_tokens, c.samples) for c in chunks])
        apply(chunks)
    assert steps == [
        [(0, 2, True), (0, 4, False)],
        [(2, 1, True), (4, 5, False)],
        [(3, 1, True), (9, 5, False)],
        [(4, 1, True), (14, 1, True)],
        [(5, 1, True), (15, 1, True)],
    ]


def test_a_small_request_does_not_overtake_one_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(7)  # 6 usable blocks of 4 tokens
    running, large, small = (
        make_request(index, prompt_len, max_tokens=2)
        for index, prompt_len in enumerate([12, 16, 1])
    )
    for request in (running, large, small):
        scheduler.add(request)
    assert [c.request for c in scheduler.schedule()] == [running]
    assert list(scheduler.waiting) == [large, small]
    scheduler.finish(running)
    assert [c.request for c in scheduler.schedule()] == [large]


def test_blocks_promised_to_running_requests_are_not_given_to_others() -> None:
    scheduler = make_scheduler(5)  # 4 usable blocks of 4 tokens
    first = make_request(0, prompt_len=1, max_tokens=12)  # 1 block now, 3 in the end
    second = make_request(1, prompt_len=5, max_tokens=1)  # 2 blocks
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(12):
        chunks = scheduler.schedule()
        assert [c.request for c in chunks] == [first]
        apply(chunks)
    scheduler.finish(first)
    assert [c.request for c in scheduler.schedule()] == [second]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers_and_the_others_go_on() -> None:
    scheduler = make_scheduler(11, max_model_len=100, num_groups=2)  # 5 tables of 4 tokens each
    fits = make_request(0, prompt_len=3, max_tokens=2)
    scheduler.add(fits)
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add(make_request(1, prompt_len=19, max_tokens=3))
    assert str(caught.value).startswith(
        "19 prompt tokens and max_tokens 3 need 12 blocks of 4 tokens in 2 KV groups; "
        "the pool has 10."
    )
    assert len(scheduler) == 1
    assert [c.request for c in scheduler.schedule()] == [fits]


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(12, 5), (1, 1000)])
def test_a_request_that_fills_the_pool_to_the_last_slot_is_served(
    prompt_len: int, max_tokens: int
) -> None:
    # The last token is never stored: 17 tokens, by max_tokens or by max_model_len, take 16 slots.
    scheduler = make_scheduler(5, max_model_len=17)
    request = make_request(0, prompt_len, max_tokens)
    scheduler.add(request)
    while request.num_tokens < 17:
        apply(scheduler.schedule())
    assert scheduler.pool.num_free == 0
    assert np.count_nonzero(request.block_tables) == 4
    scheduler.finish(request)
    assert scheduler.pool.num_free == 4


def test_a_waiting_request_can_be_finished_before_it_ran() -> None:
    scheduler = make_scheduler(9, max_num_seqs=1, budget=4)
    requests = [make_request(index, prompt_len=2, max_tokens=2) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    scheduler.finish(requests[1])
    assert list(scheduler.waiting) == [requests[2]]
    scheduler.finish(requests[0])
    assert [c.request for c in scheduler.schedule()] == [requests[2]]


def test_no_work_gives_no_chunks() -> None:
    assert make_scheduler(4).schedule() == []
