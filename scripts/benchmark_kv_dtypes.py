"""The same load in the same bytes of KV pool, by `kv_cache_dtype`: requests at once, tokens/s.

The load is W2 (see `workloads.py`) several times over, all of it waiting from the start, and the
pool is so small that memory, not `--requests`, says how many run at once. Every dtype gets as many
blocks as fit in `--pool-mib`, rows and scales counted to the byte; all engines live in one process
and take turns, so that a slow minute of the machine meets all of them.

  tokens fit     in the pool, over all KV groups
  at once        requests that a step computes: mean over the steps, and the most
  preemptions    how often a request lost its blocks, all repeats together
  tokens/s       new ones, of the median run
  ratios         to the first dtype of the list

    python scripts/benchmark_kv_dtypes.py --json kv_dtypes.json
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import get_args

import jax
from rich.console import Console
from rich.table import Table
from workloads import Workload, w2

from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.config import KVCacheDtype
from pagedjax.demo import GEMMA_3_270M, user_cache_dir
from pagedjax.engine import LLMEngine
from pagedjax.host_memory import keep_freed_memory
from pagedjax.loader import LoadedModel, load_model
from pagedjax.memory import block_bytes, pool_format

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 1024


@dataclasses.dataclass(frozen=True)
class Run:
    """One pass over the load."""

    seconds: float
    new_tokens: int
    running_mean: float
    running_max: int
    preemptions: int


@dataclasses.dataclass(frozen=True)
class Result:
    """All runs of a dtype; the fields are explained at the head of this file."""

    kv_cache_dtype: str
    num_blocks: int
    tokens_fit: int
    running_mean: float
    running_max: int
    preemptions: int
    tokens_per_s: float


def load(repeat: int, requests: int) -> Workload:
    """The first so many prompts of W2, repeated with other tokens."""
    prompts: list[list[int]] = []
    new, part = 0, 0
    while len(prompts) < requests:
        more, new = w2(1000 * repeat + part)
        prompts += more
        part += 1
    return prompts[:requests], new


def make_engine(loaded: LoadedModel, dtype: KVCacheDtype, pool_bytes: int, requests: int) -> LLM:
    """An engine whose pool takes at most `pool_bytes`, the null block included."""
    size = block_bytes(loaded.config, _BLOCK_SIZE, pool_format(dtype, loaded.config))
    config = EngineConfig(
        kv_cache_dtype=dtype,
        block_size=_BLOCK_SIZE,
        num_blocks=pool_bytes // size,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=requests,
    )
    return LLM(LLMEngine(loaded.config, loaded.params, loaded.tokenizer, config))


def run_once(llm: LLM, workload: Workload) -> Run:
    prompts, new = workload
    engine, counts = llm.engine, []
    before = engine.scheduler.num_swaps + engine.scheduler.num_recomputes
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt, params)
    start = time.monotonic()
    while engine.has_unfinished_requests():
        engine.step()
        if engine.scheduler.running:
            counts.append(len(engine.scheduler.running))
    seconds = time.monotonic() - start
    preemptions = engine.scheduler.num_swaps + engine.scheduler.num_recomputes - before
    tokens = new * len(prompts)
    return Run(seconds, tokens, statistics.mean(counts), max(counts), preemptions)


def summarize(dtype: str, llm: LLM, runs: list[Run]) -> Result:
    size = llm.engine.pool_size
    seconds = statistics.median(run.seconds for run in runs)
    return Result(
        dtype,
        size.num_blocks,
        size.num_tokens,
        statistics.mean(run.running_mean for run in runs),
        max(run.running_max for run in runs),
        sum(run.preemptions for run in runs),
        runs[0].new_tokens / seconds,
    )


def benchmark(
    loaded: LoadedModel,
    dtypes: list[KVCacheDtype],
    *,
    pool_bytes: int,
    requests: int,
    repeats: int,
) -> list[Result]:
    """Engines of all dtypes in turns, after a pass over the load that compiles."""
    engines = {dtype: make_engine(loaded, dtype, pool_bytes, requests) for dtype in dtypes}
    runs: dict[str, list[Run]] = {dtype: [] for dtype in dtypes}
    for repeat in range(repeats + 1):
        workload = load(repeat, requests)
        for dtype, llm in engines.items():
            run = run_once(llm, workload)
            if repeat:
                runs[dtype].append(run)
    return [summarize(dtype, engines[dtype], runs[dtype]) for dtype in dtypes]


def make_table(results: list[Result], title: str) -> Table:
    table = Table("kv_cache_dtype", title=title)
    for column in ("tokens fit", "at once", "most", "ratio", "preemptions", "tokens/s", "ratio "):
        table.add_column(column, justify="right")
    first = results[0]
    for r in results:
        table.add_row(
            r.kv_cache_dtype,
            f"{r.tokens_fit:,}",
            f"{r.running_mean:.1f}",
            str(r.running_max),
            f"{r.running_mean / first.running_mean:.2f}",
            str(r.preemptions),
            f"{r.tokens_per_s:.0f}",
            f"{r.tokens_per_s / first.tokens_per_s:.2f}",
        )
    return table


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=GEMMA_3_270M, help=f"default: {GEMMA_3_270M}")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights")
    add(
        "--kv-cache-dtypes",
        nargs="+",
        default=["bfloat16", "int8", "int4"],
        choices=get_args(KVCacheDtype),
    )
    add("--pool-mib", type=float, default=64, help="of every pool (default: 64)")
    add("--requests", type=int, default=64, help="of a pass, all at once (default: 64)")
    add("--repeats", type=int, default=3, help="timed passes of each, after one more (default: 3)")
    add("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(argv)
    for name in ("pool_mib", "requests", "repeats"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; above 0")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    keep_freed_memory()
    config = EngineConfig(dtype=args.dtype, cache_dir=user_cache_dir() / "models")
    results = benchmark(
        load_model(args.model, config),
        args.kv_cache_dtypes,
        pool_bytes=int(args.pool_mib * 2**20),
        requests=args.requests,
        repeats=args.repeats,
    )
    console = Console()
    console.width = max(console.width, 100)
    title = f"{args.requests} requests of W2 in a pool of {args.pool_mib:g} MiB"
    console.print(make_table(results, title))
    if args.json is not None:
        data = {
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "model": args.model,
            "pool_mib": args.pool_mib,
            "requests": args.requests,
            "repeats": args.repeats,
            "results": [dataclasses.asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
