"""Offline speed of workloads W1 to W4 beside what this machine's memory and arithmetic allow.

For each workload: the median over the repeats of seconds, time to first token, prompt and output
tokens/s, and the floor. The floor of a run is, for every decode step, the bytes of weights and KV
over the memory bandwidth (the better of a copy and a read), and for the prompts their FLOPs over
the rate of a bf16 (or float32) matrix product, all measured in the same process. A prefix that
several prompts share (W3) counts once. "of floor" is floor seconds over measured seconds.

W1 and W4 are also given as the ratios that the floor is made of: W1's decode as weight bytes a
second over the bandwidths, W4's prefill as FLOP/s over the matrix product's.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS

from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.demo import GEMMA_3_270M, user_cache_dir
from pagedjax.host_memory import keep_freed_memory
from pagedjax.models.config import DecoderConfig
from pagedjax.models.linear import linear


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the machine does at best, measured."""

    copy_bytes_per_s: float  # one host array to another; bytes read plus bytes written
    read_bytes_per_s: float  # of a sum on the device

    @property
    def bytes_per_s(self) -> float:
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)

    product_flops_per_s: float


@dataclasses.dataclass(frozen=True)
class Result:
    """Medians over the repeats of one workload."""

    seconds: float
    first_token_s: float
    decode_tokens_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    floor_s: float
    of_floor: float


def best_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The fastest of several runs, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure_limits(dtype: str) -> Limits:
    """A copy and a sum of 512 MiB, and a 1024 x 640 x 2048 product."""
    source, target = np.ones(1 << 27, np.float32), np.zeros(1 << 27, np.float32)
    copy_rate = 2 * source.nbytes / best_seconds(lambda: np.copyto(target, source))
    on_device = jnp.asarray(source)
    total = jax.jit(jnp.sum)
    read_rate = source.nbytes / best_seconds(lambda: total(on_device))
    x = jax.random.normal(jax.random.key(0), (1024, 640), jnp.float32)
    weight = jax.random.normal(jax.random.key(1), (2048, 640), jnp.float32).astype(dtype)
    product = jax.jit(lambda x, w: linear(x, w, dtype))
    rate = 2 * 1024 * 640 * 2048 / best_seconds(lambda: product(x, weight), repeats=30)
    return Limits(copy_rate, read_rate, rate)


def weight_bytes(params: object) -> int:
    """Bytes read of all weights by a decode step, a tied embedding counted once."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def prompt_flops(model: DecoderConfig, length: int, cached: int = 0) -> float:
    """Products and attention of a prompt behind `cached` tokens, and its last token's logits."""
    heads = (model.num_heads + 2 * model.num_kv_heads + model.num_heads) * model.head_dim
    layer = model.hidden_size * (heads + 3 * model.intermediate_size)
    keys = sum(
        sum(min(position + 1, window) for position in range(cached, length))
        for window in model.windows
    )
    attention = 2 * keys * model.num_heads * model.head_dim
    head = model.vocab_size * model.hidden_size
    return 2.0 * ((length - cached) * model.num_layers * layer + attention + head)


def shared_lengths(prompts: list[list[int]]) -> list[int]:
    """Of each prompt, the longest prefix that an earlier one has, too (but for its last token)."""
    return [
        max((_common(prompt[:-1], earlier) for earlier in prompts[:i]), default=0)
        for i, prompt in enumerate(prompts)
    ]


def _common(a: list[int], b: list[int]) -> int:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in same)


def kv_bytes(model: DecoderConfig, context: int, itemsize: int) -> int:
    """Bytes of KV that a decode at this context length reads."""
    row = 2 * model.num_kv_heads * model.head_dim * itemsize
    return sum(min(context, window) for window in model.windows) * row


def floor_seconds(llm: LLM, prompts: list[list[int]], new: int, limits: Limits) -> float:
    """The least time that the decode steps' bytes and the prompts' FLOPs take."""
    model = llm.engine.model
    itemsize = jnp.dtype(model.dtype).itemsize
    steps = new - 1
    decode = float(steps * weight_bytes(llm.engine.runner.params))
    for prompt in prompts:
        decode += sum(kv_bytes(model, len(prompt) + step, itemsize) for step in range(1, new))
    flops = sum(
        prompt_flops(model, len(prompt), cached)
        for prompt, cached in zip(prompts, shared_lengths(prompts), strict=True)
    )
    return decode / limits.bytes_per_s + flops / limits.product_flops_per_s


def run_once(llm: LLM, prompts: list[list[int]], new: int) -> tuple[float, float, float]:
    """Seconds of the whole run, to the first token of all, and from there to the end."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    start = time.monotonic()
    outputs = llm.generate(prompts, params)
    end = time.monotonic()
    assert all(len(output.outputs[0].token_ids) == new for output in outputs)
    first = min(output.metrics.first_token or end for output in outputs)
    return end - start, first - start, end - first


def run_workload(llm: LLM, name: str, repeats: int, limits: Limits) -> Result:
    make = WORKLOADS[name]
    run_once(llm, *make(0))
    runs = []
    for repeat in range(1, repeats + 1):
        prompts, new = make(repeat)
        runs.append(run_once(llm, prompts, new))
    seconds, first, rest = (statistics.median(column) for column in zip(*runs, strict=True))
    prompts, new = make(1)
    floor = floor_seconds(llm, prompts, new, limits)
    return Result(
        seconds=seconds,
        first_token_s=first,
        decode_tokens_per_s=(new - 1) * len(prompts) / rest if new > 1 else 0.0,
        output_tokens_per_s=new * len(prompts) / seconds,
        prompt_tokens_per_s=sum(map(len, prompts)) / seconds,
        floor_s=floor,
        of_floor=floor / seconds,
    )


def ratios(llm: LLM, results: dict[str, Result], limits: Limits) -> dict[str, float]:
    """W1's decode against the copy bandwidth, W4's prefill against the matrix product."""
    found = {}
    if "W1" in results:
        rate = results["W1"].decode_tokens_per_s * weight_bytes(llm.engine.runner.params)
        found["W1 decode, weight bytes/s over copy bandwidth"] = rate / limits.copy_bytes_per_s
        found["W1 decode, weight bytes/s over read bandwidth"] = rate / limits.read_bytes_per_s
    if "W4" in results:
        rate = prompt_flops(llm.engine.model, 1024) / results["W4"].seconds
        found["W4 prefill, FLOP/s over matrix product"] = rate / limits.product_flops_per_s
    return found


def show(results: dict[str, Result], found: dict[str, float], limits: Limits) -> None:
    console = Console(width=110)
    console.print(
        f"copy {limits.copy_bytes_per_s / 1e9:.1f} GB/s (read + written), "
        f"read {limits.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"matrix product {limits.product_flops_per_s / 1e9:.0f} GFLOP/s"
    )
    columns = (
        "s",
        "first token s",
        "decode tok/s",
        "output tok/s",
        "prompt tok/s",
        "floor s",
        "of floor",
    )
    table = Table("workload", *columns)
    for name, r in results.items():
        values = dataclasses.astuple(r)
        table.add_row(
            name, *(f"{v:.3f}" if v < 10 else f"{v:.1f}" for v in values[:-1]), f"{values[-1]:.0%}"
        )
    console.print(table)
    for name, value in found.items():
        console.print(f"{name}: {value:.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=GEMMA_3_270M, help="directory, GGUF file or that name")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each, after one more")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    keep_freed_memory()
    config = EngineConfig(
        dtype=args.dtype, max_model_len=2048, cache_dir=user_cache_dir() / "models"
    )
    llm = LLM(args.model, config)
    limits = measure_limits(args.dtype)
    results = {name: run_workload(llm, name, args.repeats, limits) for name in args.workloads}
    found = ratios(llm, results, limits)
    show(results, found, limits)
    if args.json:
        record = {
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "dtype": args.dtype,
            "limits": dataclasses.asdict(limits),
            "results": {name: dataclasses.asdict(result) for name, result in results.items()},
            "ratios": found,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
