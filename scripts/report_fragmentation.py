"""How much of the reserved KV memory holds tokens: paged blocks against contiguous reservation.

A fixed, seeded trace is replayed through the engine's own Scheduler and BlockPool; there is no
model, the "device" only counts. Lengths are lognormal with sigma 1 around a median of 100 prompt
and 200 output tokens, means of about 165 and 330, near those of the ShareGPT conversations in Kwon
et al., 2023 (161 and 338); both are cut so that a request fits in `--max-model-len`. All requests
wait from the start, so memory is the limit until the queue is empty.

Both layouts have the same memory, that of 16 requests of full length. Contiguous reservation gives
every running request `max_model_len` slots: the same Scheduler, with one block of that many slots
per request, and 16 requests at most. Paged requests own the blocks that are allocated to them. A
slot is room for one token.

  holds tokens   share of the reserved slots that hold a token: mean over all steps, also those
                 at the end in which the last requests run alone
  at peak        the same, over the steps in which most slots are reserved
  for later      share that a later token of the same request will fill
  never used     share that no token ever fills: internal fragmentation
  running, most  requests at once, mean and maximum
  reserved       share of all memory that is reserved
  preemptions    how often a request lost its blocks to one that came before it
  recomputed     share of all computed tokens that had been computed before a preemption

Nobody knows the lengths in advance: all requests ask for as many tokens as `max_model_len` allows
and end early, as by an end-of-sequence token. Paged requests are admitted by the tokens they have.

Kwon et al., 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention", figure 2: 96.3% paged; 20.4 to 38.2% contiguous, the former with max_model_len.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pagedjax.block_pool import BlockPool
from pagedjax.models.config import NO_WINDOW
from pagedjax.request import Request
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.scheduler_config import SchedulerConfig

BLOCK_SIZES = (8, 16, 32)
_FULL_LENGTH_REQUESTS = 16  # that fit in memory
_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 2048
_TABLE_WIDTH = 142


@dataclasses.dataclass(frozen=True)
class TraceEntry:
    """Lengths of one request, in tokens, at least 1 each."""

    prompt: int
    output: int

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are stored in the end: all but the last one."""
        return self.prompt + self.output - 1


@dataclasses.dataclass(frozen=True)
class Step:
    """Slots at the end of one step, before finished requests give theirs back.

    `computed`: tokens in this step. `preemptions`: up to it.
    """

    running: int
    reserved: int
    held: int
    never_used: int
    computed: int
    preemptions: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report; shares are in [0, 1], means over the steps."""

    layout: str
    holds_tokens: float
    holds_tokens_at_peak: float
    for_later: float
    never_used: float
    running_mean: float
    running_max: int
    reserved: float
    preemptions: int
    recomputed: float
    steps: int


def make_trace(seed: int, num_requests: int, max_model_len: int) -> list[TraceEntry]:
    """Lognormal lengths: medians 100 and 200, sigma 1."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(100), 1.0, num_requests), 1, max_model_len - 1)
    outputs = np.maximum(rng.lognormal(np.log(200), 1.0, num_requests), 1)
    return [
        TraceEntry(int(prompt), min(int(output), max_model_len - int(prompt)))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def replay(
    trace: list[TraceEntry],
    *,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int = _MAX_NUM_SEQS,
) -> Iterator[Step]:
    """Run the trace to its end, with `num_blocks` that requests can own."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        max_model_len=max_model_len,
        block_size=block_size,
        windows=(NO_WINDOW,),
    )
    scheduler = Scheduler(config, BlockPool(num_blocks + 1))
    params = SamplingParams(max_tokens=max_model_len)
    for index, entry in enumerate(trace):
        prompt = (0,) * entry.prompt
        scheduler.add(Request(str(index), prompt, params, arrival=index, seed=0))
    while len(scheduler):
        plan = scheduler.schedule()
        scheduler.update(plan)
        scheduler.collect(plan)
        for seq in plan.samplers:
            scheduler.append(seq, 0)
        yield _measure(scheduler, trace, computed=sum(chunk.num_tokens for chunk in plan.chunks))
        for request in list(scheduler.running):
            if request.sequences[0].num_output_tokens == trace[request.arrival].output:
                scheduler.finish(request)


def _measure(scheduler: Scheduler, trace: list[TraceEntry], computed: int) -> Step:
    size = scheduler.config.block_size
    reserved = held = never_used = 0
    for request in scheduler.running:
        (seq,) = request.sequences
        own = seq.num_blocks * size
        reserved += own
        held += seq.num_computed_tokens
        never_used += max(0, own - trace[request.arrival].stored)
    assert reserved == (scheduler.pool.num_usable - scheduler.pool.num_free) * size
    running, preemptions = len(scheduler.running), scheduler.num_recomputes
    return Step(running, reserved, held, never_used, computed, preemptions)


def replay_contiguous(trace: list[TraceEntry], max_model_len: int) -> Iterator[Step]:
    """The same with one block of `max_model_len` slots a request."""
    return replay(
        trace,
        block_size=max_model_len,
        # Twice what can be used: the scheduler keeps a block free for each request to grow.
        num_blocks=2 * _FULL_LENGTH_REQUESTS,
        max_model_len=max_model_len,
        max_num_seqs=_FULL_LENGTH_REQUESTS,
    )


def summarize(layout: str, steps: list[Step], trace: list[TraceEntry], num_slots: int) -> Row:
    """Means over the steps, one step counting like another."""
    computed = sum(s.computed for s in steps)
    reserved = np.array([s.reserved for s in steps])
    held = np.array([s.held for s in steps]) / reserved
    never_used = np.array([s.never_used for s in steps]) / reserved
    return Row(
        layout=layout,
        holds_tokens=float(held.mean()),
        holds_tokens_at_peak=float(held[reserved == reserved.max()].mean()),
        for_later=float((1 - held - never_used).mean()),
        never_used=float(never_used.mean()),
        running_mean=float(np.mean([s.running for s in steps])),
        running_max=max(s.running for s in steps),
        reserved=float(reserved.mean()) / num_slots,
        preemptions=steps[-1].preemptions,
        recomputed=1 - sum(entry.stored for entry in trace) / computed,
        steps=len(steps),
    )


def report(
    trace: list[TraceEntry], max_model_len: int, block_sizes: tuple[int, ...] = BLOCK_SIZES
) -> list[Row]:
    """Contiguous reservation first, then every block size."""
    num_slots = _FULL_LENGTH_REQUESTS * max_model_len
    steps = list(replay_contiguous(trace, max_model_len))
    rows = [summarize(f"contiguous, {max_model_len} slots", steps, trace, num_slots)]
    for size in block_sizes:
        num_blocks = num_slots // size
        steps = list(
            replay(trace, block_size=size, num_blocks=num_blocks, max_model_len=max_model_len)
        )
        rows.append(summarize(f"paged, blocks of {size}", steps, trace, num_slots))
    return rows


def make_table(rows: list[Row]) -> Table:
    table = Table("layout", title="Reserved KV memory")
    columns = ["holds tokens", "at peak", "for later", "never used", "running", "most"]
    for column in [*columns, "reserved", "preemptions", "recomputed", "steps"]:
        table.add_column(column, justify="right")
    for r in rows:
        shares = (r.holds_tokens, r.holds_tokens_at_peak, r.for_later, r.never_used)
        table.add_row(
            r.layout,
            *(f"{share:.1%}" for share in shares),
            f"{r.running_mean:.1f}",
            str(r.running_max),
            f"{r.reserved:.1%}",
            f"{r.preemptions:,}",
            f"{r.recomputed:.1%}",
            f"{r.steps:,}",
        )
    return table


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the trace (default: 0)")
    parser.add_argument("--requests", type=int, default=500, help="default: 500")
    parser.add_argument("--max-model-len", type=int, default=2048, help="default: 2048")
    args = parser.parse_args(argv)
    if args.seed < 0 or args.requests < 1 or args.max_model_len < 2:
        parser.error("--seed must be at least 0, --requests 1 and --max-model-len 2")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    trace = make_trace(args.seed, args.requests, args.max_model_len)
    rows = report(trace, args.max_model_len)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)  # rather broken lines than cut numbers
    console.print(make_table(rows))
    if args.json is not None:
        data = {
            "seed": args.seed,
            "requests": args.requests,
            "max_model_len": args.max_model_len,
            "memory_slots": _FULL_LENGTH_REQUESTS * args.max_model_len,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
