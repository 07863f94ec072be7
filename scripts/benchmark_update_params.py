"""What new weights cost an engine: handed over, or moved by way of the host as others have to.

The three ways take turns, each with the same parameters of one model, in an engine that has served
requests:

- handed over: `LLMEngine.update_params` with arrays that lie where the engine's do (nothing is
  copied);
- through host memory: every array to numpy and back to the device, the least that a trainer and an
  engine in two processes with shared memory can do;
- through a file: written as safetensors and read again, as between processes without it (in the
  directory for temporary files, which may be memory as well).

Times are medians, in milliseconds; the last column is the ratio to handing over.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from rich.console import Console
from rich.table import Table

from pagedjax import LLM, EngineConfig, LLMEngine, SamplingParams
from pagedjax.demo import GEMMA_3_270M, user_cache_dir
from pagedjax.host_memory import keep_freed_memory
from pagedjax.loader import load_model
from pagedjax.models.decoder import Params


@dataclasses.dataclass(frozen=True)
class Row:
    """`gb_per_s`: of the parameters' bytes, once; no rate where nothing is moved."""

    way: str
    milliseconds: float
    gb_per_s: float | None
    of_handed_over: float


def hand_over(params: Params) -> Params:
    return params


def through_host_memory(params: Params) -> Params:
    # A copy of its own: on CPU a numpy array may be the device's memory itself.
    on_host = jax.tree.map(lambda x: np.array(x, copy=True), params)
    return jax.device_put(on_host)


def through_a_file(params: Params) -> Params:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        flat = flatten_dict(params, sep="/")
        safetensors.numpy.save_file({name: np.asarray(x) for name, x in flat.items()}, path)
        return jax.device_put(unflatten_dict(safetensors.numpy.load_file(path), sep="/"))


WAYS: dict[str, Callable[[Params], Params]] = {
    "handed over": hand_over,
    "through host memory": through_host_memory,
    "through a file": through_a_file,
}


def measure(llm: LLM, params: Params, repeats: int) -> list[Row]:
    """Median times of `repeats` updates each; between them, the engine serves a request."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(repeats + 1):
        for name, way in WAYS.items():
            llm.generate([[2, 3, 5, 7]], SamplingParams(max_tokens=2, temperature=0.0))
            start = time.perf_counter()
            new = way(params)
            llm.engine.update_params(new)
            jax.block_until_ready(llm.engine.runner.params)
            if repeat:  # the first touches new memory
                found[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in found.items()}
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    return [
        Row(
            name,
            1000 * seconds,
            None if name == "handed over" else num_bytes / seconds / 1e9,
            seconds / medians["handed over"],
        )
        for name, seconds in medians.items()
    ]


def make_table(rows: list[Row], title: str) -> Table:
    table = Table("weights", title=title)
    for name in ("ms", "GB/s", "of handed over"):
        table.add_column(name, justify="right")
    for row in rows:
        rate = "-" if row.gb_per_s is None else f"{row.gb_per_s:.2f}"
        table.add_row(row.way, f"{row.milliseconds:.2f}", rate, f"{row.of_handed_over:.0f}x")
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=GEMMA_3_270M, help="directory, GGUF file or that name")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=10, help="timed updates of each way")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    args = parser.parse_args(argv)
    keep_freed_memory()
    config = EngineConfig(
        dtype=args.dtype,
        max_model_len=256,
        max_num_seqs=4,
        cache_dir=user_cache_dir() / "models",
    )
    loaded = load_model(args.model, config)
    llm = LLM(LLMEngine(loaded.config, loaded.params, loaded.tokenizer, config))
    rows = measure(llm, loaded.params, args.repeats)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(loaded.params))
    title = f"{args.model}, {num_bytes / 1e6:,.0f} MB of {args.dtype} parameters"
    Console(width=100).print(make_table(rows, title))
    if args.json:
        data = {"bytes": num_bytes, "rows": [dataclasses.asdict(row) for row in rows]}
        args.json.write_text(json.dumps(data, indent=2))


if __name__ == "__main__":
    main()
