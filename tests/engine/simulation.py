"""Random days of a scheduler, with every step of them checked. See `test_scheduler`."""

from collections import Counter, deque
from random import Random

import pytest

from pagedjax.batch import targets_of
from pagedjax.beam_search import BeamSearch, BeamSearchParams
from pagedjax.block_hash import private_root, root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.errors import InvalidRequestError
from pagedjax.plan import StepPlan
from pagedjax.request import Request, Sequence, TokenLogprobs
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler
from tests.engine.device_model import WORTHLESS, Device, InFlight, Result, Stop
from tests.engine.memory_model import Memory
from tests.engine.workloads import NUM_TOKENS, Arrival, Workload, worst_case


class Simulation:
    """Runs a workload as the engine does, with made-up tokens, and checks every step of it."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.random = Random(workload.seed)
        self.swap = workload.swap
        self.scheduler = Scheduler(
            workload.config,
            BlockPool(workload.num_blocks),
            BlockPool(workload.num_host_blocks),
            self.prefers_swap,
        )
        self.memory = Memory(self.scheduler.blocks)
        self.device = Device(self.memory, self)
        self.in_flight: deque[InFlight] = deque()
        self.happened: Counter[str] = Counter()
        self.live: dict[Request, Arrival] = {}
        self.version = 0
        self.is_update_pending = False
        self.num_arrivals = 0
        self.num_steps = 0

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        assert num_tokens > 0
        assert num_blocks > 0
        return self.swap == "always" or (self.swap == "random" and self.random.random() < 0.5)

    def run(self) -> None:
        to_come = list(self.workload.arrivals)
        bound = 60 + sum(8 * (len(a.prompt) + a.width * a.max_tokens) for a in to_come)
        bound *= 1 + len(self.workload.update_steps)
        while to_come or self.live or self.in_flight:
            assert self.num_steps < bound, f"{len(self.live)} requests never finish"
            while to_come and to_come[0].step <= self.num_steps:
                self.arrive(to_come.pop(0))
            self.disturb()
            self.step()
        self.check_all_is_free()

    def check_all_is_free(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler) == len(self.in_flight) == 0
        self.check_all_blocks_are_free()

    def check_all_blocks_are_free(self) -> None:
        scheduler = self.scheduler
        for pool in (scheduler.pool, scheduler.blocks.host):
            assert pool.num_free == pool.num_usable
        scheduler.check()

    # --- what comes from outside ---

    def arrive(self, arrival: Arrival) -> Request:
        request = self.make_request(arrival)
        config, pool = self.workload.config, self.scheduler.pool
        need = worst_case(config, len(arrival.prompt), arrival.max_tokens, arrival.width)
        if arrival.width > config.max_num_seqs:
            with pytest.raises(InvalidRequestError, match=f"{arrival.width} sequences at once"):
                self.scheduler.add(request)
        elif need > pool.num_usable:
            with pytest.raises(InvalidRequestError) as caught:
                self.scheduler.add(request)
            for number in (len(arrival.prompt), arrival.max_tokens, need, pool.num_usable):
                assert f" {number}" in f" {caught.value}"
        else:
            self.scheduler.add(request)
            self.live[request] = arrival
        return request

    def make_request(self, arrival: Arrival) -> Request:
        root = self.root(arrival.root)
        if root is not None:
            self.memory.versions[root] = self.memory.weights
        search = None
        if arrival.is_beam_search:
            params = BeamSearchParams(beam_width=arrival.width, max_tokens=arrival.max_tokens)
            search = BeamSearch(params, frozenset(), arrival.max_tokens)
        logprobs = 0 if arrival.wants_prompt_logprobs and search is None else None
        self.num_arrivals += 1
        return Request(
            f"request-{self.num_arrivals}",
            arrival.prompt,
            SamplingParams(
                max_tokens=arrival.max_tokens,
                prompt_logprobs=logprobs,
                stop_token_ids=(NUM_TOKENS,) if arrival.sets_slot_up and search is None else (),
            ),
            arrival=self.num_arrivals,
            seed=self.num_arrivals,
            priority=arrival.priority,
            root=root,
            beam_search=search,
            width=arrival.width,
        )

    def root(self, kind: str | None) -> bytes | None:
        if kind == "shared":
            return root_hash(self.version)
        return private_root(self.num_arrivals + 1) if kind == "private" else None

    def disturb(self) -> None:
        """Aborts, other weights, an emptied prefix cache."""
        for request, arrival in list(self.live.items()):
            if arrival.abort_step == self.num_steps:
                self.end(request)
            elif arrival.abort_sample_step == self.num_steps and not arrival.is_beam_search:
                self.end_sequence(self.random.choice(request.sequences))
        if self.num_steps in self.workload.update_steps:
            self.update_weights(restarts=self.random.random() < 0.5)
        if self.num_steps in self.workload.reset_steps:
            self.reset_prefix_cache()
        self.switch_when_free()

    def update_weights(self, *, restarts: bool) -> None:
        """Those who have begun begin again, or come to their end before anybody else begins."""
        self.is_update_pending = True
        if restarts:
            self.switch_weights()
        else:
            self.scheduler.hold()
            self.switch_when_free()

    def switch_when_free(self) -> None:
        if self.is_update_pending and not self.scheduler.has_begun:
            self.switch_weights()

    def switch_weights(self) -> None:
        self.is_update_pending = False
        self.memory.weights += 1
        self.version += 1
        self.scheduler.unhold()
        for request, arrival in list(self.live.items()):
            begun = bool(request.num_preemptions or request in self.scheduler.running)
            self.happened["restarted"] += begun
            self.end(request)
            root = self.root(arrival.root)
            self.num_arrivals += 1
            if root is not None:
                self.memory.versions[root] = self.memory.weights
            again = request.anew(root, set())
            self.scheduler.add(again)
            self.live[again] = arrival

    def reset_prefix_cache(self) -> None:
        self.scheduler.pool.forget_keys()
        self.scheduler.blocks.host.forget_keys()

    # --- a step ---

    def step(self) -> StepPlan:
        """Dispatch a step, then take results, as the engine does."""
        scheduler = self.scheduler
        before = {request: request.num_preemptions for request in scheduler.running}
        waiting = list(scheduler.waiting)
        sequences = [seq for request in self.live for seq in request.sequences]
        computed = {s: s.num_computed_tokens for s in sequences if s.block_tables is not None}
        plan = scheduler.schedule()
        stayed = [r for r in scheduler.running if before.get(r) == r.num_preemptions]
        preempted = [r for r, count in before.items() if count != r.num_preemptions]
        self.check_limits(plan)
        self.check_order(stayed, preempted, waiting)
        self.check_chunks(plan, stayed, computed)
        self.check_nobody_is_forgotten(plan, stayed)
        if plan.num_steps > 1:
            self.check_ahead(plan)
        self.happened["preempted in flight"] += sum(bool(r.num_in_flight) for r in preempted)
        self.happened["plans ahead"] += plan.num_steps > 1
        step = self.device.dispatch(plan)
        scheduler.update(plan)
        if plan.chunks:
            self.in_flight.append(step)
        self.check_memory()
        while len(self.in_flight) > (self.workload.num_in_flight if plan.chunks else 0):
            self.collect(self.in_flight.popleft())
        self.switch_when_free()
        self.num_steps += 1
        return plan

    def collect(self, step: InFlight) -> None:
        self.scheduler.collect(step.plan)
        for chunk, targets in zip(step.plan.chunks, step.targets, strict=True):
            assert targets == targets_of(chunk.sequence, chunk.start, chunk.end)
            self.take_prompt_logprobs(chunk.sequence.request, targets)
        for result in step.results:
            if result.seq not in result.seq.request.sequences:
                self.happened["results dropped"] += 1
                is_beam = result.token is None
                assert not is_beam or result.seq.request not in self.live, "a beam died in flight"
            elif result.token is None:
                self.take_candidates(result)
            else:
                self.take_token(result.seq, result.position, result.token)
        self.check_memory()

    def take_prompt_logprobs(self, request: Request, targets: range) -> None:
        for position in targets:
            assert position == len(request.prompt_logprobs) + 1, "each once, in order"
            request.prompt_logprobs.append(TokenLogprobs(0.0, ()))

    def take_candidates(self, result: Result) -> None:
        seq, request = result.seq, result.seq.request
        if seq.num_computed_tokens < seq.num_tokens:  # they will be computed again
            assert request.num_preemptions != result.num_preemptions
            return
        assert seq not in request.candidates, "a beam was asked for candidates twice"
        request.candidates[seq] = []
        if len(request.candidates) == len(request.sequences):
            request.candidates.clear()
            assert request in self.scheduler.running
            self.advance_beams(request)

    def take_token(self, seq: Sequence, position: int, token: int) -> None:
        assert token != WORTHLESS, "it should have ended"
        assert position == len(seq.token_ids), "a token is lost, or there twice"
        self.scheduler.append(seq, token)
        assert seq.token_ids[position] == self.memory.pending[seq].pop(0) == token
        self.memory.learn(seq)
        length = position + 1
        if length >= self.device.stops[seq].length or length >= self.longest(seq.request):
            self.happened["ended with tokens pending"] += bool(seq.num_pending)
            self.end_sequence(seq)

    def pick_stop(self, seq: Sequence) -> Stop:
        most = seq.request.params.max_tokens
        num_tokens = self.random.choice([self.random.randint(1, most), most])
        return Stop(seq.request.prompt_len + num_tokens, self.random.random() < 0.5)

    def pick_token(self, seq: Sequence) -> int:
        return self.random.randrange(NUM_TOKENS)

    def pick_beams(self, request: Request) -> list[tuple[Sequence, int]]:
        """Parents and next tokens of the beams that live on."""
        parents = self.random.choices(request.sequences, k=self.random.randint(1, request.width))
        return [(parent, self.random.randrange(NUM_TOKENS)) for parent in parents]

    def advance_beams(self, request: Request) -> None:
        chosen = self.pick_beams(request)
        expected = [[*parent.token_ids, token] for parent, token in chosen]
        if len(expected[0]) >= self.longest(request):
            self.end(request)
        else:
            self.scheduler.continue_beams(request, chosen)
            assert [seq.token_ids for seq in request.sequences] == expected

    def longest(self, request: Request) -> int:
        length = request.prompt_len + request.params.max_tokens
        return min(length, self.workload.config.max_model_len)

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self.live[request]
        assert not request.sequences
        assert request not in self.scheduler.waiting
        assert request not in self.scheduler.held
        assert not request.spare_slots

    def end_sequence(self, seq: Sequence) -> None:
        self.scheduler.finish_sequence(seq)
        assert seq.slot is None
        assert seq.block_tables is None
        if not seq.request.sequences:
            del self.live[seq.request]

    # --- what is checked ---

    def check_memory(self) -> None:
        self.scheduler.check()
        self.memory.check(self.live)
        for request in self.live:
            in_flight = sum(request in step.plan.requests for step in self.in_flight)
            assert request.num_in_flight == in_flight
            for seq in request.sequences:
                assert seq.num_pending == len(self.memory.pending.get(seq, []))

    def check_limits(self, plan: StepPlan) -> None:
        scheduler, config = self.scheduler, self.workload.config
        if plan.num_steps == 1:
            assert sum(c.num_tokens for c in plan.chunks) <= config.max_num_batched_tokens
        assert len(plan.samplers) <= config.max_num_seqs
        assert len(plan.transfers.copies) <= config.max_num_seqs * config.num_groups
        slots = [seq.slot for request in scheduler.running for seq in request.sequences]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(config.max_num_seqs))
        queues = (scheduler.running, scheduler.waiting, scheduler.held)
        assert sum(map(len, queues)) == len(self.live)
        assert {request for queue in queues for request in queue} == set(self.live)
        assert scheduler.is_holding == self.is_update_pending

    def check_order(
        self, stayed: list[Request], preempted: list[Request], waiting: list[Request]
    ) -> None:
        """First come, first served, in every class of priority."""
        running, left = self.scheduler.running, list(self.scheduler.waiting)
        orders = [request.order for request in running]
        assert orders == sorted(orders)
        admitted = [r for r in running if r not in stayed]
        for request in preempted:
            assert all(r.order < request.order for r in stayed), "the last makes way"
            if request not in running:
                assert all(r.order < request.order for r in admitted), "nobody overtakes"
        assert not admitted or not left or admitted[-1].order < left[0].order
        assert all(r in waiting or r in preempted for r in admitted)
        busy = {request for step in self.in_flight for request in step.plan.requests}
        assert busy.isdisjoint(admitted), "it was admitted while a step with it is in flight"

    def check_chunks(
        self,
        plan: StepPlan,
        stayed: list[Request],
        computed: dict[Sequence, int],
    ) -> None:
        """Every sequence is computed in order, without gaps and repeats, and to its end."""
        chunks = plan.chunks
        requests = [chunk.sequence.request for chunk in chunks]
        # Running ones go first; a new one of a high priority takes its place in the next step.
        places = [(request not in stayed, request.order) for request in requests]
        assert places == sorted(places)
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        size = self.workload.config.block_size
        being_filled: set[bytes] = set()
        for seq, start, num_tokens, samplers in chunks:
            request, end = seq.request, start + num_tokens
            assert start == seq.num_computed_tokens
            assert end < self.longest(request), "the last token is never stored"
            if plan.num_steps == 1:
                assert 1 <= num_tokens <= seq.num_tokens - start
                assert bool(samplers) == (end == seq.num_tokens)
            if seq in computed and request in stayed:
                assert start == computed[seq], "it goes on where it was"
            else:
                assert seq in computed or start % size == 0, "hits are whole blocks"
                has_to = (
                    request.params.prompt_logprobs is not None or start + size >= seq.num_tokens
                )
                if seq not in computed and seq.root is not None and not has_to:
                    coming = seq.block_hashes[start // size] in being_filled
                    assert not coming, "a block is computed twice in one step"
            if num_tokens > 1:
                being_filled.update(seq.block_hashes[start // size : end // size])
            assert not samplers or samplers[0] is seq
            assert all(s.token_ids == seq.token_ids for s in samplers)
            if samplers and request.beam_search is None and seq.num_tokens == request.prompt_len:
                assert samplers == tuple(request.sequences)
                assert len(samplers) == request.width

    def check_ahead(self, plan: StepPlan) -> None:
        """Every sequence that is not at its end is decoded, to its end or as far as all are."""
        most = self.workload.config.num_decode_steps
        assert plan.num_steps == most
        expected = []
        for request in self.scheduler.running:
            assert request.beam_search is None
            for seq in request.sequences:
                num_tokens = min(most, self.longest(request) - seq.num_tokens)
                if num_tokens:
                    expected.append((seq, seq.num_tokens - 1, num_tokens, (seq,)))
        assert plan.chunks == expected

    def check_nobody_is_forgotten(self, plan: StepPlan, stayed: list[Request]) -> None:
        """A sequence that has one token to compute is put off only if a block is missing."""
        scheduler, samplers = self.scheduler, plan.samplers
        chunks = {chunk.sequence: chunk for chunk in plan.chunks}
        for request in stayed:  # for those that are new, the budget may be spent
            blocked = False
            for seq in request.sequences:
                start = seq.num_computed_tokens
                if seq.num_tokens == self.longest(request):
                    continue  # its last token is on the way
                if seq in chunks:
                    blocked = blocked or chunks[seq].num_tokens > 1
                    continue
                if seq in samplers:
                    continue
                if seq.block_tables is None or seq.num_tokens - start != 1:
                    blocked = True  # waits for its prefix, or has all it needs
                    continue
                blocked = blocked or scheduler.blocks.need(seq, start + 1) > scheduler.pool.num_free
                assert blocked, "a decode was put off"
        if scheduler.running and not chunks and not self.in_flight:
            raise AssertionError("requests run, but nothing is computed")
