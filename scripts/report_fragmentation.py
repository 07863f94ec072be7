"""How much of the reserved KV memory holds tokens: paged blocks against contiguous reservation.

A fixed, seeded trace is replayed through the engine's own Scheduler and BlockPool; there is no
model, the "device" only counts. Lengths are lognormal with sigma 1 around a median of 100 prompt
and 200 output tokens, means of about 165 and 330, near those of the ShareGPT conversations in Kwon
et al., 2023 (161 and 338); both are cut so that a request fits in `--max-model-len`. All requests
wait from the start, so memory is the limit until the queue is empty.

Both layouts have the same memory, that of 16 requests of full length. Contiguous reservation gives
every running request `max_model_len` slots: the same Scheduler, with one block of that many slots
per request. Paged requests own the blocks that are allocated to them. A slot is room for one token.

  holds tokens   share of the reserved slots that hold a token: mean over all steps, also those
                 at the end in which the last requests run alone
  at peak        the same, over the steps in which most slots are reserved
  for later      share that a later token of the same request will fill
  never used     share that no token ever fills: internal fragmentation
  running, most  requests at once, mean and maximum
  reserved       share of all memory that is reserved
  promised       share of all memory that is not reserved but held back: the scheduler admits a
                 request only if its worst case, `max_tokens`, fits beside those of all others

Promised blocks cost no memory but limit how many requests run. That depends on what the requests
ask for, so the paged rows come twice: with `max_tokens` as the output really is ("exact"), and
with `max_tokens` up to `max_model_len`, ended early by an end-of-sequence token ("open").

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
from pagedjax.request import Request
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZES = (8, 16, 32)
_FULL_LENGTH_REQUESTS = 16  # that fit in memory
_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 2048
_TABLE_WIDTH = 138


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
    """Slots at the end of one step, before finished requests give theirs back."""

    running: int
    reserved: int
    held: int
    never_used: int
    promised: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report; shares are in [0, 1], means over the steps."""

    layout: str
    max_tokens: str
    holds_tokens: float
    holds_tokens_at_peak: float
    for_later: float
    never_used: float
    running_mean: float
    running_max: int
    reserved: float
    promised: float
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
    trace: list[TraceEntry], *, block_size: int, max_model_len: int, exact: bool
) -> Iterator[Step]:
    """Run the trace to its end. `exact`: requests ask for as many tokens as they will get."""
    config = SchedulerConfig(
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        max_model_len=max_model_len,
        block_size=block_size,
        num_groups=1,
    )
    num_slots = _FULL_LENGTH_REQUESTS * max_model_len
    pool = BlockPool(num_slots // block_size + 1)
    scheduler = Scheduler(config, pool)
    for index, entry in enumerate(trace):
        params = SamplingParams(max_tokens=entry.output if exact else max_model_len)
        scheduler.add(Request(str(index), [0] * entry.prompt, params, arrival=index, seed=0))
    while len(scheduler):
        for chunk in scheduler.schedule():
            samples = chunk.samples
            chunk.request.num_computed_tokens = chunk.end
            if samples:
                chunk.request.output_token_ids.append(0)
        yield _measure(scheduler, trace)
        for request in list(scheduler.running):
            if len(request.output_token_ids) == trace[request.arrival].output:
                scheduler.finish(request)


def _measure(scheduler: Scheduler, trace: list[TraceEntry]) -> Step:
    size, max_model_len = scheduler.config.block_size, scheduler.config.max_model_len
    reserved = held = never_used = promised = 0
    for request in scheduler.running:
        own, entry = request.num_blocks * size, trace[request.arrival]
        reserved += own
        held += request.num_computed_tokens
        never_used += max(0, own - entry.stored)
        worst = min(entry.prompt + request.params.max_tokens, max_model_len) - 1
        promised += -(-worst // size) * size - own
    assert reserved == (scheduler.pool.num_usable - scheduler.pool.num_free) * size
    return Step(len(scheduler.running), reserved, held, never_used, promised)


def summarize(layout: str, max_tokens: str, steps: list[Step], num_slots: int) -> Row:
    """Means over the steps, one step counting like another."""

    reserved = np.array([s.reserved for s in steps])
    held = np.array([s.held for s in steps]) / reserved
    never_used = np.array([s.never_used for s in steps]) / reserved
    return Row(
        layout=layout,
        max_tokens=max_tokens,
        holds_tokens=float(held.mean()),
        holds_tokens_at_peak=float(held[reserved == reserved.max()].mean()),
        for_later=float((1 - held - never_used).mean()),
        never_used=float(never_used.mean()),
        running_mean=float(np.mean([s.running for s in steps])),
        running_max=max(s.running for s in steps),
        reserved=float(reserved.mean()) / num_slots,
        promised=float(np.mean([s.promised for s in steps])) / num_slots,
        steps=len(steps),
    )


def report(
    trace: list[TraceEntry], max_model_len: int, block_sizes: tuple[int, ...] = BLOCK_SIZES
) -> list[Row]:
    """Contiguous reservation first, then every block size with exact and open `max_tokens`."""
    num_slots = _FULL_LENGTH_REQUESTS * max_model_len

    def row(layout: str, block_size: int, exact: bool, max_tokens: str) -> Row:
        steps = replay(trace, block_size=block_size, max_model_len=max_model_len, exact=exact)
        return summarize(layout, max_tokens, list(steps), num_slots)

    rows = [row(f"contiguous, {max_model_len} slots", max_model_len, True, "any")]
    for exact, max_tokens in ((True, "exact"), (False, "open")):
        rows += [row(f"paged, blocks of {size}", size, exact, max_tokens) for size in block_sizes]
    return rows


def make_table(rows: list[Row]) -> Table:
    table = Table("layout", "max_tokens", title="Reserved KV memory")
    columns = ["holds tokens", "at peak", "for later", "never used", "running", "most"]
    for column in [*columns, "reserved", "promised", "steps"]:
        table.add_column(column, justify="right")
    for r in rows:
        shares = (r.holds_tokens, r.holds_tokens_at_peak, r.for_later, r.never_used)
        table.add_row(
            r.layout,
            r.max_tokens,
            *(f"{share:.1%}" for share in shares),
            f"{r.running_mean:.1f}",
            str(r.running_max),
            f"{r.reserved:.1%}",
            f"{r.promised:.1%}",
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
