"""What it brings to share, cache, swap and give back blocks, on a real model.

  blocks      The most blocks in use, sampled after every step, by one request for 8 samples and by
              a beam search of width 4, against as many requests of the same length that share
              nothing; 512 prompt tokens, 64 new ones. Kwon et al., 2023 (PagedAttention): sharing
              saves up to 55%.
  prefix      Time to first token of the 16 requests of W3, which come at once and have 1,024 tokens
              in common. "off": each has a salt of its own, so they share nothing; "cold": one salt
              and an empty cache, so the first computes the prefix and the others wait for it;
              "warm": the same requests once more. Ratios are to "warm".
  preemption  Output tokens/s of W2, 32 requests with 64 new tokens each, where all of them fit and
              with a quarter of the blocks they need, by preemption mode.
  windows     Blocks of requests with 8,192 prompt tokens where groups of sliding-window layers give
              back what left the window, over those if none did: at most (a chunk of the prompt has
              its blocks, and none were given back for it yet) and while decoding, with one and four
              requests and 512 and 1,024 tokens a step. Only the scheduler runs.

Prompts are random tokens, decoding is greedy but for the samples, and no end-of-sequence token ends
it. Times are medians over the repeats, whose cases take turns, after a run that is not counted.
"equal" is the share of requests with the same tokens as in the first row; in bfloat16 it need not
be all, as sums depend on what else is in the step.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from workloads import Workload, w2, w3

from pagedjax import BeamSearchParams, EngineConfig, LLMEngine, RequestOptions, SamplingParams
from pagedjax.block_pool import BlockPool
from pagedjax.demo import GEMMA_3_270M, user_cache_dir
from pagedjax.host_memory import keep_freed_memory
from pagedjax.loader import LoadedModel, load_model
from pagedjax.models.config import NO_WINDOW
from pagedjax.outputs import RequestOutput
from pagedjax.preemption import PreemptionMode
from pagedjax.request import Request
from pagedjax.scheduler import Scheduler
from pagedjax.scheduler_config import SchedulerConfig

EXPERIMENTS = ("blocks", "prefix", "preemption", "windows")
EngineOf = Callable[[int], LLMEngine]
"""Gives the engine whose pool has a number of blocks."""

_AMPLE_BLOCKS = 8192  # all that W2 or W3 need, without sharing, on Gemma 3 270M
_ALONE = RequestOptions(use_prefix_cache=False)


def _shown_as(format_spec: str) -> Any:
    """A field of a row of a table."""
    return dataclasses.field(metadata={"format": format_spec})


@dataclasses.dataclass(frozen=True)
class SharedBlocks:
    """Most blocks in use by sequences that share, and by as many that do not."""

    sequences: str
    shared: int
    separate: int
    saved: float = _shown_as(".1%")


@dataclasses.dataclass(frozen=True)
class FirstTokens:
    """Seconds from arrival to first token, and until all are done; ratios to the warm cache."""

    cache: str
    median_s: float = _shown_as(".3f")
    mean_s: float = _shown_as(".3f")
    all_done_s: float = _shown_as(".3f")
    median_ratio: float = _shown_as(".1f")
    mean_ratio: float = _shown_as(".1f")
    all_done_ratio: float = _shown_as(".1f")
    equal: float = _shown_as(".1%")


@dataclasses.dataclass(frozen=True)
class Throughput:
    """A load in a pool; counts are of the last repeat, `moved` blocks both ways together."""

    mode: str
    blocks: int
    output_tokens_per_s: float = _shown_as(".1f")
    of_ample: float = _shown_as(".0%")
    swaps: int
    recomputes: int
    moved: int
    equal: float = _shown_as(".1%")


@dataclasses.dataclass(frozen=True)
class WindowedBlocks:
    """Blocks in use by long requests, and with windows that keep all."""

    requests: int
    tokens_a_step: int
    peak: int
    peak_all_kept: int
    peak_share: float = _shown_as(".1%")
    decoding: int
    decoding_all_kept: int
    decoding_share: float = _shown_as(".1%")


@dataclasses.dataclass(frozen=True)
class Run:
    """Outputs of finished requests in the order in which they were added."""

    outputs: list[RequestOutput]
    seconds: float
    peak_blocks: int

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids for output in self.outputs]


def run(engine: LLMEngine, adds: Iterable[Callable[[], str]]) -> Run:
    """Add requests and step until all are finished."""
    start, pool, peak = time.perf_counter(), engine.scheduler.pool, 0
    request_ids = [add() for add in adds]
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        peak = max(peak, pool.num_usable - pool.num_free)
    seconds = time.perf_counter() - start
    return Run([finished[request_id] for request_id in request_ids], seconds, peak)


def run_greedy(engine: LLMEngine, workload: Workload, options: list[RequestOptions]) -> Run:
    prompts, new = workload
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    return run(
        engine,
        [
            lambda p=prompt, o=own: engine.add_request(p, params, options=o)
            for prompt, own in zip(prompts, options, strict=True)
        ],
    )


def share_of_equal(runs: list[Run], others: list[Run]) -> float:
    """How many requests have the same tokens in both."""
    pairs = [
        (a, b)
        for one, other in zip(runs, others, strict=True)
        for a, b in zip(one.token_ids, other.token_ids, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


# --- the experiments ---


def shared_blocks(
    engine: LLMEngine, prompt: list[int], new: int, samples: int, beam_width: int
) -> list[SharedBlocks]:
    """Parallel sampling, then beam search."""
    single = SamplingParams(max_tokens=new, ignore_eos=True)
    sampling = dataclasses.replace(single, n=samples, seed=0)
    beams = BeamSearchParams(beam_width, max_tokens=new, ignore_eos=True)

    def separate(count: int) -> int:
        add = lambda: engine.add_request(prompt, single, options=_ALONE)  # noqa: E731
        return run(engine, [add] * count).peak_blocks

    sampled = run(engine, [lambda: engine.add_request(prompt, sampling, options=_ALONE)])
    searched = run(engine, [lambda: engine.add_beam_search(prompt, beams, options=_ALONE)])
    found = []
    for name, count, one in (("samples", samples, sampled), ("beams", beam_width, searched)):
        shared, own = one.peak_blocks, separate(count)
        found.append(SharedBlocks(f"{count} {name}", shared, own, 1 - shared / own))
    return found


def first_tokens(
    engine: LLMEngine, make: Callable[[int], Workload], repeats: int
) -> list[FirstTokens]:
    """The requests of `make(repeat)` with nothing shared, with a cold and with a warm cache."""
    runs: dict[str, list[Run]] = {"off": [], "cold": [], "warm": []}
    for repeat in range(repeats + 1):  # the first is not counted
        workload = make(repeat)
        count = len(workload[0])
        own = [RequestOptions(cache_salt=f"{repeat} {i}") for i in range(count)]
        common = [RequestOptions(cache_salt=f"{repeat}")] * count
        engine.reset_prefix_cache()
        for cache, options in zip(runs, (own, common, common), strict=True):
            runs[cache].append(run_greedy(engine, workload, options))
    times = {cache: np.array(_first_token_s(found[1:])) for cache, found in runs.items()}
    return [
        FirstTokens(
            cache,
            *times[cache],
            *(times[cache] / times["warm"]),
            equal=share_of_equal(found[1:], runs["off"][1:]),
        )
        for cache, found in runs.items()
    ]


def _first_token_s(runs: list[Run]) -> tuple[float, float, float]:
    """Median and mean over the requests, and all of the run; medians over the runs."""
    seconds = [
        [(o.metrics.first_token or 0.0) - o.metrics.arrival for o in one.outputs] for one in runs
    ]
    return (
        statistics.median(statistics.median(each) for each in seconds),
        statistics.median(statistics.mean(each) for each in seconds),
        statistics.median(one.seconds for one in runs),
    )


def quarter_of_need(engine: LLMEngine, workload: Workload) -> int:
    """A quarter of the blocks of all requests at full length, and the null block."""
    prompts, new = workload
    limits = engine.limits
    blocks = sum(-(-(len(prompt) + new - 1) // limits.block_size) for prompt in prompts)
    return blocks * limits.num_groups // 4 + 1


def preemption(
    ample: LLMEngine, tight: LLMEngine, make: Callable[[int], Workload], repeats: int
) -> list[Throughput]:
    """The requests of `make(repeat)` in both pools, in the tight one with every preemption mode."""
    cases = [("none", ample), *((mode, tight) for mode in get_args(PreemptionMode))]
    runs: dict[str, list[Run]] = {mode: [] for mode, _ in cases}
    counts: dict[str, list[int]] = {}
    for repeat in range(repeats + 1):  # the first is not counted
        workload = make(repeat)
        for mode, engine in cases:
            engine.reset_prefix_cache()
            before = _counts(engine)
            if mode != "none":
                engine.preemption.mode = mode
            options = [RequestOptions()] * len(workload[0])
            runs[mode].append(run_greedy(engine, workload, options))
            counts[mode] = [b - a for a, b in zip(before, _counts(engine), strict=True)]
    speed = {
        mode: statistics.median(sum(map(len, one.token_ids)) / one.seconds for one in found[1:])
        for mode, found in runs.items()
    }
    return [
        Throughput(
            mode,
            engine.scheduler.pool.num_usable,
            speed[mode],
            speed[mode] / speed["none"],
            *counts[mode],
            equal=share_of_equal(runs[mode][1:], runs["none"][1:]),
        )
        for mode, engine in cases
    ]


def _counts(engine: LLMEngine) -> list[int]:
    scheduler = engine.scheduler
    stats = scheduler.blocks.stats
    return [scheduler.num_swaps, scheduler.num_recomputes, stats.swapped_out + stats.swapped_in]


def windowed_blocks(
    windows: tuple[int, ...],
    num_requests: int,
    max_num_batched_tokens: int,
    *,
    prompt_len: int = 8192,
    new: int = 64,
    block_size: int = 16,
) -> WindowedBlocks:
    """Long requests through the scheduler, with `windows` of KV groups and with none."""
    numbers: list[tuple[int, int]] = []
    for each in (windows, (NO_WINDOW,) * len(windows)):
        limits = SchedulerConfig(
            max_num_seqs=num_requests,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=prompt_len + new,
            block_size=block_size,
            windows=each,
        )
        used = _blocks_by_step(limits, num_requests, prompt_len, new)
        numbers.append((max(used), statistics.median_high(used[-block_size:])))
    (peak, decoding), (peak_kept, decoding_kept) = numbers
    return WindowedBlocks(
        num_requests,
        max_num_batched_tokens,
        peak,
        peak_kept,
        peak / peak_kept,
        decoding,
        decoding_kept,
        decoding / decoding_kept,
    )


def _blocks_by_step(limits: SchedulerConfig, count: int, prompt_len: int, new: int) -> list[int]:
    """Blocks in use while each step computes, until the first request is done."""
    pool = BlockPool(2 * count * limits.num_groups * limits.table_width + 1)
    scheduler = Scheduler(limits, pool)
    params = SamplingParams(max_tokens=new)
    for i in range(count):
        scheduler.add(Request(str(i), (0,) * prompt_len, params, arrival=i, seed=0))
    used = []
    while all(request.sequences[0].num_output_tokens < new for request in scheduler.running):
        plan = scheduler.schedule()
        used.append(pool.num_usable - pool.num_free)
        scheduler.update(plan)
        scheduler.collect(plan)
        for seq in plan.samplers:
            scheduler.append(seq, 0)
    return used


# --- the command ---


def make_table(title: str, rows: list[Any]) -> Table:
    """A column for each field of the rows."""
    table = Table(title=title, title_justify="left")
    fields = dataclasses.fields(rows[0])
    for i, field in enumerate(fields):
        table.add_column(field.name.replace("_", " "), justify="right" if i else "left")
    for row in rows:
        table.add_row(*(_cell(field, getattr(row, field.name)) for field in fields))
    return table


def _cell(field: dataclasses.Field, value: Any) -> str:
    return format(value, field.metadata.get("format", "," if isinstance(value, int) else ""))


def measure(name: str, model: LoadedModel, engine: EngineOf, repeats: int) -> tuple[str, list[Any]]:
    """One experiment: a title and the rows."""
    if name == "windows":
        windows = model.config.kv_layout.windows
        sizes = itertools.product((1, 4), (512, 1024))
        rows = [windowed_blocks(windows, count, budget) for count, budget in sizes]
        return "Blocks of 8,192-token contexts", rows
    ample = engine(_AMPLE_BLOCKS)
    if name == "blocks":
        prompt = np.random.default_rng(0).integers(1000, 100_000, 512).tolist()
        rows = shared_blocks(ample, prompt, new=64, samples=8, beam_width=4)
        return "Most blocks in use", rows
    if name == "prefix":
        rows = first_tokens(ample, w3, repeats)
        return "Time to first token with a common prefix", rows
    tight = engine(quarter_of_need(ample, w2(0)))
    return "A pool of a quarter of the need", preemption(ample, tight, w2, repeats)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=GEMMA_3_270M, help="directory, GGUF file or that name")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--experiments", nargs="+", default=EXPERIMENTS, choices=EXPERIMENTS)
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each, after one more")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(argv)
    keep_freed_memory()
    config = EngineConfig(
        dtype=args.dtype, max_model_len=2048, cache_dir=user_cache_dir() / "models"
    )
    model = load_model(args.model, config)

    @functools.cache
    def engine(num_blocks: int) -> LLMEngine:
        sized = dataclasses.replace(config, num_blocks=num_blocks)
        return LLMEngine(model.config, model.params, None, sized)

    record: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    console = Console(width=110)
    for name in args.experiments:
        title, rows = measure(name, model, engine, args.repeats)
        record[name] = [dataclasses.asdict(row) for row in rows]
        console.print(make_table(title, rows))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
