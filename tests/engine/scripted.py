"""A scheduler driven by hand, step by step, with all the checks of a simulation."""

from typing import Any

import numpy as np

from pagedjax.plan import StepPlan
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler_config import SchedulerConfig
from tests.engine.device_model import Stop
from tests.engine.simulation import Simulation
from tests.engine.workloads import NO_WINDOW, Arrival, Workload


class Script(Simulation):
    """A simulation without chance, driven step by step: every sample runs to `max_tokens`, and
    beams part after the prompt. All checks of a simulation hold at every step."""

    def __init__(
        self,
        num_blocks: int,
        *,
        num_host_blocks: int = 1,
        swap: str = "never",
        max_num_seqs: int = 4,
        budget: int = 16,
        max_model_len: int = 32,
        block_size: int = 4,
        windows: tuple[int, ...] = (NO_WINDOW,),
        offload: bool = False,
        num_decode_steps: int = 1,
        num_in_flight: int = 0,
    ):
        config = SchedulerConfig(
            max_num_seqs, budget, max_model_len, block_size, windows, offload, num_decode_steps
        )
        super().__init__(
            Workload(config, num_blocks, num_host_blocks, [], swap, num_in_flight=num_in_flight)
        )
        self.stop_after: dict[Request, Stop] = {}
        self.taken: list[int] = []
        self.stranger = Request("stranger", (1,), SamplingParams(), 0, 0).sequences[0]

    def add(self, *prompt: int, max_tokens: int = 9, **fields: Any) -> Request:
        return self.arrive(Arrival(0, prompt, max_tokens, **fields))

    def take(self, *, free: int) -> None:
        """Let a stranger own blocks, of the only group, so that `free` are left."""
        pool = self.scheduler.pool
        self.taken += pool.allocate(pool.num_free - free)

    def give_back(self, count: int | None = None) -> None:
        self.scheduler.pool.free(self.taken[:count])
        del self.taken[:count]

    def check_memory(self) -> None:
        if not self.taken:
            return super().check_memory()
        scheduler, stranger = self.scheduler, self.stranger
        stranger.block_tables = np.array([self.taken], np.int32)
        stranger.num_blocks = len(self.taken)
        known = [*scheduler.running, *scheduler.waiting, *scheduler.held]
        scheduler.blocks.check([*known, stranger.request])
        self.memory.check(known)

    def check_nobody_is_forgotten(self, plan: StepPlan, stayed: list[Request]) -> None:
        if not self.taken:
            super().check_nobody_is_forgotten(plan, stayed)

    def stop(self, request: Request, num_tokens: int, *, is_seen: bool = False) -> None:
        """Let the sequences of a request end after `num_tokens` tokens; see `Stop`."""
        self.stop_after[request] = Stop(request.prompt_len + num_tokens, is_seen)

    def pick_stop(self, seq: Sequence) -> Stop:
        request = seq.request
        return self.stop_after.get(request, Stop(request.max_length, is_seen=False))

    def pick_token(self, seq: Sequence) -> int:
        return 100 + seq.index

    def pick_beams(self, request: Request) -> list[tuple[Sequence, int]]:
        if len(request.sequences) == 1:
            return [(request.sequences[0], 100 + i) for i in range(request.width)]
        return [(seq, 100) for seq in request.sequences]

    def steps(self, count: int) -> list[StepPlan]:
        return [self.step() for _ in range(count)]

    def run_to_the_end(self) -> None:
        for _ in range(200):
            if not self.live and not self.in_flight:
                return self.check_all_is_free()
            self.step()
        raise AssertionError("requests never finish")


def chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    """`(arrival, start, end)` of each chunk."""
    return [(c.sequence.request.arrival, c.start, c.end) for c in plan.chunks]
