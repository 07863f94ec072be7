"""Host time of a decode step: 256 requests run, 10,000 wait, and nothing is computed.

The engine's own Scheduler, BlockPool and build_batch, driven as `LLMEngine.step` drives them; the
"device" returns random tokens at once. Prompts are random, so no two share a block, but prefix
caching is on: full blocks are hashed and made findable. A block holds 16 tokens.

  schedule      Scheduler.schedule
  update        Scheduler.update
  tokens        the sampled tokens are appended, and every sequence is checked for its end
  bookkeeping   the three together, which are to take less than 0.5 ms: median, 99th percentile
  batch         build_batch: numpy arrays for the device
  outputs       a RequestOutput of every request, for the caller of the engine

Milliseconds a step; all but the percentile are medians. KV groups: 1, or 6 as in Gemma 3 270M, of
which 5 see 512 tokens and give back the blocks that they no longer see. With the phase "mixed",
prompts differ by up to 16 tokens, so that a sixteenth of the requests begins a block in a step.
Else all prompts have the same length: in the steps called "all begin" everybody gets a block, in
those called "all fill" everybody's last block becomes full, which is when it is hashed.

The second table has the first row of the first with other contexts, with and without those who
wait; "ratio" is its bookkeeping over that of the first line. No part of it should grow with the
context or the queue. `max_model_len`, by which block tables are padded, is the same throughout.

The cases of a table take turns, 80 steps each, so that all see the same moods of the machine.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pagedjax.batch import build_batch
from pagedjax.block_hash import root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.models.config import NO_WINDOW
from pagedjax.options import RequestOptions
from pagedjax.plan import StepPlan
from pagedjax.request import Request
from pagedjax.sampling_params import SamplingParams
from pagedjax.sampling_rows import SamplingRows
from pagedjax.scheduler import Scheduler
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.tracker import TrackedRequest

BLOCK_SIZE = 16
WINDOWS = {1: (NO_WINDOW,), 6: (512,) * 5 + (NO_WINDOW,)}
"""Of the KV groups, by their number."""

_VOCAB_SIZE = 262_144
_TURN = 5 * BLOCK_SIZE  # steps
_TABLE_WIDTH = 118


@dataclasses.dataclass(frozen=True)
class Load:
    """Numbers of requests, with prompts of about `context` tokens, and how they are served."""

    running: int
    waiting: int
    context: int
    groups: int = 1
    in_phase: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """Milliseconds of the steps of one kind: medians, and a 99th percentile."""

    load: Load
    phase: str
    schedule: float
    update: float
    tokens: float
    bookkeeping: float
    bookkeeping_p99: float
    batch: float
    outputs: float


def make_requests(first: int, count: int, length: int, spread: int = 0) -> list[Request]:
    """Requests of which no two share a block, `length` tokens long or up to `spread` less.

    `first`: the arrival of the first of them.
    """
    rng = np.random.default_rng(first)
    # Parts of one list share its integers: ten thousand prompts would take gigabytes otherwise.
    tokens = rng.integers(0, _VOCAB_SIZE, length + count).tolist()
    lengths = length - rng.integers(0, spread + 1, count)
    params = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
    root = root_hash(0)
    return [
        Request(str(first + i), tuple(tokens[i : i + n]), params, first + i, seed=i, root=root)
        for i, n in enumerate(lengths.tolist())
    ]


class Simulation:
    """Requests past their prompts, to be decoded up to `max_model_len`.

    Args:
      queue: those who wait. They never run, so other simulations may have them as well.

    Attributes:
      times: of each step: seconds of schedule, update, tokens, batch and outputs.
    """

    def __init__(self, load: Load, queue: list[Request], max_model_len: int):
        self.load = load
        spread = 0 if load.in_phase else BLOCK_SIZE
        requests = make_requests(0, load.running, load.context, spread)
        self.limits = SchedulerConfig(
            max_num_seqs=load.running,
            max_num_batched_tokens=load.running * max_model_len,  # so that all start together
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            windows=WINDOWS[load.groups],
        )
        num_blocks = load.running * load.groups * self.limits.table_width
        self.scheduler = Scheduler(self.limits, BlockPool(num_blocks + 1))
        for request in (*requests, *queue[: load.waiting]):
            self.scheduler.add(request)
        self._tracked = [TrackedRequest(request, None, RequestOptions()) for request in requests]
        self._rows = SamplingRows(load.running)
        self._rng = np.random.default_rng(2)
        self.times: list[tuple[float, ...]] = []
        self._step()  # the prompts

    def run(self, num_steps: int) -> None:
        self.times += [self._step() for _ in range(num_steps)]

    def _step(self) -> tuple[float, ...]:
        sampled = self._rng.integers(0, _VOCAB_SIZE, self.load.running, np.int32)
        plan, schedule = _timed(self.scheduler.schedule)
        assert len(plan.samplers) == self.load.running, "not all that should run do"
        _, batch = _timed(self._build_batch, plan)
        _, update = _timed(self.scheduler.update, plan)
        _, tokens = _timed(self._take_tokens, plan, sampled)
        _, outputs = _timed(lambda: [tracked.output() for tracked in self._tracked])
        return schedule, update, tokens, batch, outputs

    def _build_batch(self, plan: StepPlan) -> None:
        build_batch(
            plan.chunks,
            num_tokens=sum(chunk.num_tokens for chunk in plan.chunks),
            num_seqs=self.load.running,
            num_groups=self.limits.num_groups,
            table_width=self.limits.table_width,
            rows=self._rows,
        )

    def _take_tokens(self, plan: StepPlan, sampled: np.ndarray) -> None:
        """What the engine does with them, where nobody wants text or log-probabilities."""
        self.scheduler.collect(plan)
        for row, seq in enumerate(plan.samplers):
            token_id, params = int(sampled[row]), seq.request.params
            self.scheduler.append(seq, token_id)
            ends = token_id in params.stop_token_ids or seq.num_output_tokens >= params.max_tokens
            assert not ends
            assert seq.num_tokens <= self.limits.max_model_len


def _timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - start


def measure(loads: list[Load], num_steps: int, max_model_len: int) -> list[Row]:
    """Decode `num_steps` steps of every load, in turns, after some that do not count."""
    length = min(load.context for load in loads)
    first, count = max(load.running for load in loads), max(load.waiting for load in loads)
    queue = make_requests(first, count, length)
    simulations = [Simulation(load, queue, max_model_len) for load in loads]
    for _ in range(0, num_steps + _TURN, _TURN):
        for simulation in simulations:
            simulation.run(_TURN)
    return list(itertools.chain.from_iterable(map(rows_of, simulations)))


def rows_of(simulation: Simulation) -> list[Row]:
    load, times = simulation.load, np.array(simulation.times)
    first = _TURN
    if not load.in_phase:
        return [_row(load, "mixed", times[first:])]
    # The step that computes token t, from 0, begins a block or fills it by t modulo its size.
    position = (load.context + np.arange(len(times))) % BLOCK_SIZE
    begins, fills = position == 0, position == BLOCK_SIZE - 1
    begins[:first] = fills[:first] = False
    return [_row(load, "all begin", times[begins]), _row(load, "all fill", times[fills])]


def _row(load: Load, phase: str, times: np.ndarray) -> Row:
    """f64[steps, 5] seconds -> milliseconds."""
    schedule, update, tokens, batch, outputs = np.median(times, axis=0) * 1e3
    bookkeeping = times[:, :3].sum(axis=1) * 1e3
    return Row(
        load=load,
        phase=phase,
        schedule=float(schedule),
        update=float(update),
        tokens=float(tokens),
        bookkeeping=float(np.median(bookkeeping)),
        bookkeeping_p99=float(np.percentile(bookkeeping, 99)),
        batch=float(batch),
        outputs=float(outputs),
    )


def make_table(title: str, rows: list[Row], *, with_ratio: bool) -> Table:
    table = Table(title=title, title_justify="left")
    names = ["context", "waiting", "groups", "phase", "schedule", "update", "tokens"]
    names += ["bookkeeping", "p99", "batch", "outputs", *(["ratio"] if with_ratio else [])]
    for name in names:
        table.add_column(name, justify="left" if name == "phase" else "right")
    for r in rows:
        times = (r.schedule, r.update, r.tokens, r.bookkeeping, r.bookkeeping_p99)
        cells = [f"{ms:.3f}" for ms in (*times, r.batch, r.outputs)]
        if with_ratio:
            cells.append(f"{r.bookkeeping / rows[0].bookkeeping:.2f}")
        load = r.load
        counts = (f"{load.context:,}", f"{load.waiting:,}", str(load.groups))
        table.add_row(*counts, r.phase, *cells)
    return table


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256, help="requests (default: 256)")
    parser.add_argument("--waiting", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument(
        "--context",
        type=int,
        default=4000,
        help="prompt tokens; the second table has a quarter and four times as many (default: 4000)",
    )
    parser.add_argument("--steps", type=int, default=320, help="timed, of a case (default: 320)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(argv)
    if args.running < 1 or args.waiting < 0 or args.context < 8 * BLOCK_SIZE or args.steps < 1:
        parser.error(
            "--running and --steps must be at least 1, --waiting at least 0, and --context at "
            f"least {8 * BLOCK_SIZE}"
        )
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    max_model_len = 4 * args.context + args.steps + 2 * _TURN + 1
    here = Load(args.running, args.waiting, args.context)
    kinds = itertools.product(WINDOWS, (False, True))
    cases = [
        dataclasses.replace(here, groups=groups, in_phase=in_phase) for groups, in_phase in kinds
    ]
    sizes = itertools.product(
        (args.context // 4, args.context, 4 * args.context), (0, args.waiting)
    )
    growth = [dataclasses.replace(here, context=c, waiting=w) for c, w in sizes]
    step_rows = measure(cases, args.steps, max_model_len)
    growth_rows = measure(growth, args.steps, max_model_len)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)  # rather broken lines than cut numbers
    title = f"{args.running} running requests, ms a step"
    console.print(make_table(title, step_rows, with_ratio=False))
    console.print(
        make_table("The same with other contexts and queues", growth_rows, with_ratio=True)
    )
    if args.json is not None:
        record = {
            "steps": [dataclasses.asdict(row) for row in step_rows],
            "growth": [dataclasses.asdict(row) for row in growth_rows],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
