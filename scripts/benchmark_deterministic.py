"""What `deterministic=True` costs, and what it gives: the same bits whatever else is served.

Workloads W1 (one stream), W2 (32 requests) and W4 (one prompt of 1,024 tokens) of one model in an
ordinary engine and in deterministic ones with several `max_num_batched_tokens`, which there is the
size of every step: small steps waste less on decodes, large ones less on prompts. The engines take
turns; tokens/s (of prompts for W4, else of output) are medians, "of ordinary" their ratio.

"same bits" is the share of W2's requests whose tokens and log-probabilities are the same bits when
the requests come in the opposite order.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS

from pagedjax import LLM, EngineConfig, LLMEngine, SamplingParams
from pagedjax.demo import GEMMA_3_270M, user_cache_dir
from pagedjax.host_memory import keep_freed_memory
from pagedjax.loader import load_model

_WORKLOADS = ("W1", "W2", "W4")


@dataclasses.dataclass(frozen=True)
class Row:
    """Of one engine; `step_tokens` is None for the ordinary one."""

    step_tokens: int | None
    same_bits: float
    tokens_per_s: dict[str, float]
    of_ordinary: dict[str, float]


def tokens_per_s(llm: LLM, name: str, repeat: int) -> float:
    prompts, new = WORKLOADS[name](repeat)
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    return (sum(map(len, prompts)) if new == 1 else new * len(prompts)) / seconds


def same_bits(llm: LLM) -> float:
    """The share of W2's requests that come out alike in both orders."""
    prompts, new = WORKLOADS["W2"](1)
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, logprobs=0)
    first = llm.generate(prompts, params)
    llm.engine.reset_prefix_cache()
    second = llm.generate(prompts[::-1], params)[::-1]
    alike = [
        a.outputs[0].token_ids == b.outputs[0].token_ids
        and a.outputs[0].logprobs == b.outputs[0].logprobs
        for a, b in zip(first, second, strict=True)
    ]
    return sum(alike) / len(alike)


def measure(engines: dict[int | None, LLM], repeats: int) -> list[Row]:
    found: dict[tuple[int | None, str], list[float]] = {}
    for repeat in range(repeats + 1):
        for name in _WORKLOADS:
            for size, llm in engines.items():
                rate = tokens_per_s(llm, name, repeat)
                if repeat:  # the first compiles
                    found.setdefault((size, name), []).append(rate)
    medians = {key: statistics.median(rates) for key, rates in found.items()}
    return [
        Row(
            size,
            same_bits(llm),
            {name: medians[size, name] for name in _WORKLOADS},
            {name: medians[size, name] / medians[None, name] for name in _WORKLOADS},
        )
        for size, llm in engines.items()
    ]


def make_table(rows: list[Row]) -> Table:
    table = Table("engine", "tokens a step", "same bits")
    for name in _WORKLOADS:
        table.add_column(f"{name} tok/s", justify="right")
        table.add_column("of ordinary", justify="right")
    for row in rows:
        kind = "ordinary" if row.step_tokens is None else "deterministic"
        cells = []
        for name in _WORKLOADS:
            cells += [f"{row.tokens_per_s[name]:.1f}", f"{row.of_ordinary[name]:.0%}"]
        table.add_row(kind, str(row.step_tokens or ""), f"{row.same_bits:.0%}", *cells)
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=GEMMA_3_270M, help="directory, GGUF file or that name")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each, after one more")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    args = parser.parse_args(argv)
    keep_freed_memory()
    ordinary = EngineConfig(
        dtype=args.dtype,
        max_model_len=2048,
        num_blocks=6 * 1024,
        swap_space_bytes=0,
        cache_dir=user_cache_dir() / "models",
    )
    loaded = load_model(args.model, ordinary)

    def engine(config: EngineConfig) -> LLM:
        return LLM(LLMEngine(loaded.config, loaded.params, loaded.tokenizer, config))

    engines: dict[int | None, LLM] = {None: engine(ordinary)}
    for size in args.step_tokens:
        config = dataclasses.replace(ordinary, deterministic=True, max_num_batched_tokens=size)
        engines[size] = engine(config)
    rows = measure(engines, args.repeats)
    Console(width=110).print(make_table(rows))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
