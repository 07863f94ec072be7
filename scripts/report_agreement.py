"""How far the log-probabilities of sampling and of training are apart, on the same tokens.

Samples from prompts of several lengths at temperature 1, in one `functional.generate`, then scores
the same tokens with the same parameters by `functional.score`, whose attention has no pool. A
policy gradient that takes the ratio of both sees their difference as a change of the policy. The
prompts are random tokens, which is hard on a model: its numbers are larger than in text.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pagedjax import EngineConfig, functional
from pagedjax.demo import GEMMA_3_270M, user_cache_dir
from pagedjax.host_memory import keep_freed_memory
from pagedjax.loader import load_model
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params


@dataclasses.dataclass(frozen=True)
class Row:
    """Differences of natural logarithms; `ratio`: the largest of |exp(difference) - 1|."""

    dtype: str
    tokens: int
    mean: float
    most: float
    ratio: float


def compare(config: DecoderConfig, params: Params, prompts: list[list[int]], new: int) -> Row:
    width = max(map(len, prompts))
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)

    @jax.jit
    def run(params: Params, prompts: jax.Array, lengths: jax.Array) -> tuple[Any, jax.Array]:
        cache = functional.init_cache(config, num_seqs=len(prompts), max_len=width + new)
        ids = jnp.arange(len(prompts), dtype=jnp.int32)
        seeds = functional.request_seeds(jax.random.key(0), ids)
        _, out = functional.generate(config, params, cache, prompts, lengths, seeds, max_tokens=new)
        given = jnp.arange(width, dtype=jnp.int32)[None] < lengths[:, None]
        tokens = jnp.concatenate([prompts, out.token_ids], axis=1)
        mask = jnp.concatenate([given, out.mask], axis=1)
        return out, functional.score(config, params, tokens, mask)[:, width:]

    out, scores = jax.device_get(run(params, jnp.asarray(padded), jnp.asarray(lengths)))
    difference = (out.logprobs - scores)[out.mask]
    return Row(
        config.dtype,
        len(difference),
        float(np.abs(difference).mean()),
        float(np.abs(difference).max()),
        float(np.abs(np.expm1(difference)).max()),
    )


def make_table(rows: list[Row], title: str) -> Table:
    table = Table("dtype", title=title)
    for name in ("tokens", "mean difference", "largest", "largest |ratio - 1|"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (f"{value:.1e}" for value in (row.mean, row.most, row.ratio))
        table.add_row(row.dtype, str(row.tokens), *cells)
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=GEMMA_3_270M, help="directory, GGUF file or that name")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    args = parser.parse_args(argv)
    keep_freed_memory()
    rows = []
    for dtype in args.dtypes:
        loaded = load_model(
            args.model, EngineConfig(dtype=dtype, cache_dir=user_cache_dir() / "models")
        )
        rng = np.random.default_rng(0)
        vocab = loaded.config.vocab_size
        prompts = [rng.integers(3, vocab, length).tolist() for length in args.prompt_lens]
        rows.append(compare(loaded.config, loaded.params, prompts, args.new_tokens))
    Console(width=100).print(make_table(rows, f"{args.model}, sampled and scored"))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
