"""Random days of a scheduler, with every step of them checked. See `test_scheduler`."""

import dataclasses
from random import Random

import pytest

from pagedjax.batch import targets_of
from pagedjax.beam_search import BeamSearch, BeamSearchParams
from pagedjax.block_hash import private_root, root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.errors import InvalidRequestError
from pagedjax.plan import ScheduledChunk, StepPlan
from pagedjax.request import Request, Sequence, TokenLogprobs
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler, SchedulerConfig
from tests.engine.memory_model import Memory

NO_WINDOW = 2**30
NUM_TOKENS = 2  # of the vocabulary, so that continuations meet by chance


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a simulated day.

    Attributes:
      root: "shared", "private" or None, see `Sequence.root`.
      abort_step, abort_sample_step: when it, or one of its sequences, is aborted.
    """

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    width: int = 1
    is_beam_search: bool = False
    priority: int = 0
    root: str | None = "shared"
    wants_prompt_logprobs: bool = False
    abort_step: int | None = None
    abort_sample_step: int | None = None


@dataclasses.dataclass(frozen=True)
class Workload:
    """A day.

    Attributes:
      swap: "always", "never" or "random".
      update_steps: when the weights change. reset_steps: when the prefix cache is emptied.
    """

    config: SchedulerConfig
    num_blocks: int
    num_host_blocks: int
    arrivals: list[Arrival]
    swap: str = "never"
    seed: int = 0
    update_steps: frozenset[int] = frozenset()
    reset_steps: frozenset[int] = frozenset()


def random_workload(random: Random) -> Workload:
    """Small pools and prompts that begin alike, so that everything happens within a few steps."""
    max_num_seqs = random.choice([1, 2, 4, 6, 8])
    windows = [NO_WINDOW] * (random.random() < 0.85)
    windows += [random.choice([1, 2, 3, 6, 12]) for _ in range(random.randint(0, 2))]
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.choice([0, 0, 1, 3, 10, 30]),
        max_model_len=random.choice([9, 20, 32, 32]),
        block_size=random.choice([1, 1, 2, 3, 4, 5]),
        windows=tuple(windows) or (3,),
        offload_evicted=random.random() < 0.5,
    )
    is_crowd = random.random() < 0.7  # everybody comes at once and stays long
    widths = random.choice([[1], [1, 2], [2], [1, 3], [1, 2, 3, 4]])
    arrivals = [
        _random_arrival(random, config, random.choice(widths), is_crowd)
        for _ in range(random.randint(2, 14))
    ]
    arrivals.sort(key=lambda arrival: arrival.step)
    # Room for the largest and little more: nearly every step has to make some.
    need = max(worst_case(config, len(a.prompt), a.max_tokens, a.width) for a in arrivals)
    rare = random.random() < 0.2
    return Workload(
        config,
        num_blocks=max(2, need + random.choice([0, 1, 1, 1, 2, 3, need // 2, need])),
        num_host_blocks=random.choice([1, 3, 6, 12, 30, 100]),
        arrivals=arrivals,
        swap=random.choice(["always", "never", "random"]),
        seed=random.randrange(2**32),
        update_steps=frozenset([random.randint(0, 40)] * rare),
        reset_steps=frozenset([random.randint(0, 40)] * rare),
    )


def _random_arrival(random: Random, config: SchedulerConfig, width: int, is_crowd: bool) -> Arrival:
    longest = config.max_model_len - 1
    common = random.choice([[0], [1, 0]]) * longest
    prompt = common[: random.randint(0, random.choice([5, longest]))]
    prompt += [random.randrange(NUM_TOKENS) for _ in range(random.randint(0, 6))]
    aborts = [random.choice([None] * 5 + [random.randint(0, 60)]) for _ in range(2)]
    return Arrival(
        step=random.choice([0, 0, 1, 2] if is_crowd else [0, 1, 3, 6, 15]),
        prompt=tuple(prompt[:longest]) or (0,),
        max_tokens=24 if is_crowd else random.randint(1, 24),
        width=width,
        is_beam_search=random.random() < 0.5,
        priority=random.choice([0, 0, 0, 0, 1, -1]),
        root=random.choice(["shared"] * 4 + ["private", "private" if width > 1 else None]),
        wants_prompt_logprobs=random.random() < 0.2,
        abort_step=aborts[0],
        abort_sample_step=aborts[1],
    )


def worst_case(config: SchedulerConfig, prompt_len: int, max_tokens: int, width: int) -> int:
    """Blocks of a request whose sequences all run to the end, by listing them.

    The last token is never stored. Where several sequences run, they share the full blocks of the
    prompt; what no token sees any more is given back.
    """
    size = config.block_size
    stored = range(min(prompt_len + max_tokens, config.max_model_len) - 1)
    shared = {i for i in range(prompt_len // size) if width > 1}
    owned = {
        (i if i in shared else (sequence, i))
        for sequence in range(width)
        for i in {position // size for position in stored}
    }
    need = 0
    for window in config.windows:
        seen = [{p // size for p in range(max(0, q - window + 1), q + 1)} for q in stored]
        need += min(len(owned), width * max(map(len, seen), default=0))
    return need


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
        self.live: dict[Request, Arrival] = {}
        self.version = 0
        self.num_arrivals = 0
        self.ends: dict[Sequence, int] = {}
        self.num_steps = 0
        # What the device keeps in each slot: whose token it sampled last, and how many it has.
        self.sampled: dict[int, tuple[Sequence, int]] = {}

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        assert num_tokens > 0
        assert num_blocks > 0
        return self.swap == "always" or (self.swap == "random" and self.random.random() < 0.5)

    def run(self) -> None:
        to_come = list(self.workload.arrivals)
        bound = 60 + sum(8 * (len(a.prompt) + a.width * a.max_tokens) for a in to_come)
        while to_come or self.live:
            assert self.num_steps < bound, f"{len(self.live)} requests never finish"
            while to_come and to_come[0].step <= self.num_steps:
                self.arrive(to_come.pop(0))
            self.disturb()
            self.step()
        self.check_all_is_free()

    def check_all_is_free(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler) == 0
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
            SamplingParams(max_tokens=arrival.max_tokens, prompt_logprobs=logprobs),
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
            self.update_weights()
        if self.num_steps in self.workload.reset_steps:
            self.reset_prefix_cache()

    def update_weights(self) -> None:
        self.memory.weights += 1
        self.version += 1
        self.reset_prefix_cache()
        for request in self.live:
            self.num_arrivals += 1
            request.begin_anew(private_root(self.num_arrivals))

    def reset_prefix_cache(self) -> None:
        self.scheduler.pool.forget_keys()
        self.scheduler.blocks.host.forget_keys()

    # --- a step ---

    def step(self) -> StepPlan:
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
        self.check_chunks(plan.chunks, stayed, computed)
        self.check_nobody_is_forgotten(plan, stayed)
        self.memory.move(plan.transfers)
        self.memory.compute(plan.chunks)
        scheduler.update(plan)
        self.check_memory()
        for chunk in plan.chunks:
            self.take_prompt_logprobs(chunk)
        for seq in plan.samplers:
            self.take_token(seq)
        self.check_memory()
        self.num_steps += 1
        return plan

    def take_prompt_logprobs(self, chunk: ScheduledChunk) -> None:
        request = chunk.sequence.request
        for position in targets_of(chunk.sequence, chunk.start, chunk.end):
            assert position == len(request.prompt_logprobs) + 1, "each once, in order"
            request.prompt_logprobs.append(TokenLogprobs(0.0, ()))

    def take_token(self, seq: Sequence) -> None:
        request = seq.request
        if request.beam_search is not None:
            assert seq not in request.candidates, "a beam was asked for candidates twice"
            request.candidates[seq] = []
            if len(request.candidates) == len(request.sequences):
                request.candidates.clear()
                self.advance_beams(request)
            return
        if seq not in self.ends:
            self.ends[seq] = self.pick_length(request.params.max_tokens)
        seq.token_ids.append(self.pick_token(seq))
        assert seq.slot is not None
        self.sampled[seq.slot] = seq, seq.num_tokens
        if seq.num_output_tokens >= self.ends[seq] or seq.num_tokens >= self.longest(request):
            self.end_sequence(seq)

    def pick_length(self, most: int) -> int:
        """Tokens after which a sample stops."""
        return self.random.choice([self.random.randint(1, most), most])

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

    def check_limits(self, plan: StepPlan) -> None:
        scheduler, config = self.scheduler, self.workload.config
        assert sum(c.num_tokens for c in plan.chunks) <= config.max_num_batched_tokens
        assert len(plan.samplers) <= config.max_num_seqs
        assert len(plan.transfers.copies) <= config.max_num_seqs * config.num_groups
        slots = [seq.slot for request in scheduler.running for seq in request.sequences]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(config.max_num_seqs))
        assert set(scheduler.running).isdisjoint(scheduler.waiting)
        assert {*scheduler.running, *scheduler.waiting} == set(self.live)

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

    def check_chunks(
        self,
        chunks: list[ScheduledChunk],
        stayed: list[Request],
        computed: dict[Sequence, int],
    ) -> None:
        """Every sequence is computed in order, without gaps and repeats, and to its end."""
        requests = [chunk.sequence.request for chunk in chunks]
        # Running ones go first; a new one of a high priority takes its place in the next step.
        places = [(request not in stayed, request.order) for request in requests]
        assert places == sorted(places)
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        size = self.workload.config.block_size
        being_filled: set[bytes] = set()
        for seq, start, num_tokens, samplers in chunks:
            request, end = seq.request, start + num_tokens
            assert 1 <= num_tokens <= seq.num_tokens - start
            assert start == seq.num_computed_tokens
            if num_tokens == 1 and seq.token_on_device:
                assert seq.slot is not None
                assert self.sampled[seq.slot] == (seq, seq.num_tokens), "the token of another"
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
            assert bool(samplers) == (end == seq.num_tokens)
            assert not samplers or samplers[0] is seq
            assert all(s.token_ids == seq.token_ids for s in samplers)
            if samplers and request.beam_search is None and not seq.num_output_tokens:
                assert samplers == tuple(request.sequences)
                assert len(samplers) == request.width

    def check_nobody_is_forgotten(self, plan: StepPlan, stayed: list[Request]) -> None:
        """A sequence that has one token to compute is put off only if a block is missing."""
        scheduler, samplers = self.scheduler, plan.samplers
        chunks = {chunk.sequence: chunk for chunk in plan.chunks}
        for request in stayed:  # for those that are new, the budget may be spent
            blocked = False
            for seq in request.sequences:
                start = seq.num_computed_tokens
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
        if scheduler.running and not chunks:
            raise AssertionError("requests run, but nothing is computed")
