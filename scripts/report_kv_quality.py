"""What a smaller KV cache costs in quality: perplexity, KL divergence and greedy tokens, by dtype.

A text is cut in windows, each computed from an empty cache in chunks, once with a float32 cache and
once with each of the others; weights and products are float32, so that the cache is all that
differs. Rows are quantized in the step that writes them, so a chunk reads its own tokens quantized,
too, as in an engine.

  perplexity   exp of the mean negative log-probability of the text's tokens; in brackets, how much
               more than with the float32 cache
  KL           mean over all positions of KL(float32 cache || this cache) of the next token, nats
  top token    share of positions at which the likeliest next token is the same
  greedy       prompts from the text are continued greedily: share of tokens that are those of the
               float32 cache at their place, in which everything behind a first difference counts
               as different unless it happens to agree
  bytes        of a token in all layers, scales included

The text is the beginning of H. G. Wells, "The Time Machine" (1895), which is in the public domain.
"int4, not rotated" is the same without the Hadamard matrix, to show what it is for.

    python scripts/report_kv_quality.py --json quality.json --plot quality.png
"""

import argparse
import dataclasses
import functools
import json
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pagedjax.config import EngineConfig
from pagedjax.demo import GEMMA_3_270M
from pagedjax.device_state import init_state
from pagedjax.host_memory import keep_freed_memory
from pagedjax.loader import load_model
from pagedjax.memory import block_bytes
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache, Params, StepInput, bind
from pagedjax.scheduler_config import SchedulerConfig
from pallas_kernels import FORMATS, KVFormat

TEXT = Path(__file__).parent / "data" / "the_time_machine.txt"
BASE = "float32"
FORMS: dict[str, KVFormat] = {
    name: FORMATS[name] for name in (BASE, "bfloat16", "fp8", "int8", "k8v4", "int4")
} | {"int4, not rotated": dataclasses.replace(FORMATS["int4"], is_rotated=False)}
_BLOCK_SIZE = 16
_CHUNK = 512  # tokens a step
_TILE = 128  # rows whose logits are there at a time


@dataclasses.dataclass(frozen=True)
class Quality:
    """One row of the report; `greedy` is None where nothing was generated."""

    name: str
    token_bytes: int
    perplexity: float
    kl: float
    same_top: float
    greedy: float | None


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder, its parameters, and the tokens of the text, the first of each window's included.

    Attributes:
      bos: the token that begins a window and a prompt.
    """

    config: DecoderConfig
    params: Params
    bos: int
    text: np.ndarray


class Cache:
    """A pool for `num_seqs` sequences of at most `max_len` tokens, and the next positions."""

    def __init__(self, config: DecoderConfig, form: KVFormat, num_seqs: int, max_len: int):
        groups, width = config.kv_layout.num_groups, -(-max_len // _BLOCK_SIZE)
        limits = SchedulerConfig(num_seqs, max_len, max_len, _BLOCK_SIZE, config.kv_layout.windows)
        self.config = config
        self.tables = jnp.arange(1, 1 + groups * num_seqs * width, dtype=jnp.int32).reshape(
            groups, num_seqs, width
        )
        self.pool: KVCache = init_state(
            config,
            limits,
            num_blocks=1 + self.tables.size,
            kv_format=form,
            platform=jax.default_backend(),
        ).cache
        self.num_seqs, self.length = num_seqs, 0

    def compute(self, params: Params, token_ids: np.ndarray) -> jax.Array:
        """Take the next tokens [S, n] of all sequences: f32[S, n, hidden]."""
        count, start = token_ids.shape[1], self.length
        self.length += count
        positions = np.tile(np.arange(start, self.length, dtype=np.int32), self.num_seqs)
        step = StepInput(
            jnp.asarray(positions),
            jnp.arange(self.num_seqs + 1, dtype=jnp.int32) * count,
            jnp.full(self.num_seqs, self.length, jnp.int32),
            self.tables,
        )
        flat = jnp.asarray(token_ids.reshape(-1).astype(np.int32))
        hidden, self.pool = _forward(self.config, params, flat, step, self.pool)
        return hidden.reshape(self.num_seqs, count, -1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _forward(
    config: DecoderConfig, params: Params, token_ids: jax.Array, step: StepInput, pool: KVCache
) -> tuple[jax.Array, KVCache]:
    return bind(config, params)(token_ids, step, pool)


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(bind(config, params).logits(hidden))


@jax.jit
def _compare(base: jax.Array, other: jax.Array, targets: jax.Array) -> jax.Array:
    """f32[3, rows]: KL(base || other), log-probability of the target, whether the top agrees."""
    kl = (jnp.exp(base) * (base - other)).sum(-1)
    target = jnp.take_along_axis(other, targets[:, None], axis=1)[:, 0]
    same_top = (base.argmax(-1) == other.argmax(-1)).astype(jnp.float32)
    return jnp.stack([kl, target, same_top])


def compare_text(model: Model, forms: dict[str, KVFormat], window: int) -> dict[str, np.ndarray]:
    """By form f64[3]: means of what `_compare` gives, over all positions with a next token."""
    sums = {name: np.zeros(3) for name in forms}
    count = 0
    for first in range(0, len(model.text), window):
        tokens = model.text[first : first + window]
        caches = {name: Cache(model.config, form, 1, window) for name, form in forms.items()}
        for start in range(0, len(tokens), _CHUNK):
            chunk = np.append(model.bos, tokens)[start : min(start + _CHUNK, len(tokens))]
            hidden = {n: c.compute(model.params, chunk[None])[0] for n, c in caches.items()}
            for row in range(0, len(chunk), _TILE):
                rows = slice(row, row + _TILE)
                targets = jnp.asarray(tokens[start : start + len(chunk)][rows].astype(np.int32))
                base = _logprobs(model.config, model.params, hidden[BASE][rows])
                for name in forms:
                    other = _logprobs(model.config, model.params, hidden[name][rows])
                    found = _compare(base, other, targets)
                    sums[name] += np.asarray(found, np.float64).sum(-1)
        count += len(tokens)
    return {name: total / count for name, total in sums.items()}


def continue_greedily(
    model: Model, form: KVFormat, prompts: np.ndarray, num_tokens: int
) -> np.ndarray:
    """[S, num_tokens] continuations of prompts [S, n], all of them at once."""
    cache = Cache(model.config, form, len(prompts), prompts.shape[1] + num_tokens)
    tokens, out = prompts, []
    for _ in range(num_tokens):
        hidden = cache.compute(model.params, tokens)[:, -1]
        best = _logprobs(model.config, model.params, hidden).argmax(-1)
        tokens = np.asarray(best)[:, None]
        out.append(tokens)
    return np.concatenate(out, axis=1)


def token_bytes(config: DecoderConfig, form: KVFormat) -> int:
    """Of K, V and scales of a token in all layers."""
    groups = config.kv_layout.num_groups
    return groups * block_bytes(config, _BLOCK_SIZE, form) // _BLOCK_SIZE


def report(
    model: Model,
    forms: dict[str, KVFormat],
    *,
    window: int,
    num_prompts: int,
    prompt_len: int,
    num_tokens: int,
) -> list[Quality]:
    """Every form beside the float32 cache; `num_prompts` 0 generates nothing."""
    means = compare_text(model, {BASE: FORMATS[BASE]} | forms, window)
    greedy: dict[str, np.ndarray] = {}
    if num_prompts:
        starts = np.linspace(0, len(model.text) - prompt_len, num_prompts).astype(int)
        rows = model.text[starts[:, None] + np.arange(prompt_len - 1)[None]]
        prompts = np.pad(rows, ((0, 0), (1, 0)), constant_values=model.bos)
        for name, form in ({BASE: FORMATS[BASE]} | forms).items():
            greedy[name] = continue_greedily(model, form, prompts, num_tokens)
    return [
        Quality(
            name,
            token_bytes(model.config, form),
            perplexity=math.exp(-means[name][1]),
            kl=float(means[name][0]),
            same_top=float(means[name][2]),
            greedy=float((greedy[name] == greedy[BASE]).mean()) if num_prompts else None,
        )
        for name, form in forms.items()
    ]


def make_table(rows: list[Quality], title: str) -> Table:
    table = Table("KV cache", title=title)
    for column in ("bytes", "perplexity", "", "KL", "top token", "greedy"):
        table.add_column(column, justify="right")
    base = next((r.perplexity for r in rows if r.name == BASE), math.nan)
    for r in rows:
        table.add_row(
            r.name,
            f"{r.token_bytes:,}",
            f"{r.perplexity:.3f}",
            f"({r.perplexity / base - 1:+.2%})",
            f"{r.kl:.5f}",
            f"{r.same_top:.1%}",
            "" if r.greedy is None else f"{r.greedy:.1%}",
        )
    return table


def plot(rows: list[Quality], path: Path) -> None:
    """Bytes of a token against KL, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for r in rows:
        if r.kl > 0:
            axes.scatter(r.token_bytes, r.kl)
            axes.annotate(r.name, (r.token_bytes, r.kl), xytext=(5, 5), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="bytes of a token", ylabel="KL divergence, nats")
    axes.grid(alpha=0.3, which="both")
    axes.margins(0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=GEMMA_3_270M, help=f"default: {GEMMA_3_270M}")
    add("--text", type=Path, default=TEXT, help="default: the text that comes with this script")
    add("--tokens", type=int, default=20_000, help="of the text (default: 20000)")
    add("--window", type=int, default=2048, help="tokens of a window (default: 2048)")
    add("--prompts", type=int, default=20, help="to continue; 0: none (default: 20)")
    add("--prompt-len", type=int, default=64, help="tokens of a prompt (default: 64)")
    add("--new-tokens", type=int, default=128, help="greedy tokens a prompt (default: 128)")
    add("--kv-cache-dtypes", nargs="+", choices=FORMS, default=list(FORMS), metavar="NAME")
    add("--json", type=Path, help="also write the numbers to this file")
    add("--plot", type=Path, help="also draw bytes against KL, a PNG (needs matplotlib)")
    args = parser.parse_args(argv)
    for name, least in (("tokens", 2), ("window", 2), ("prompt_len", 2), ("new_tokens", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; at least {least}")
    if args.prompts < 0:
        parser.error(f"--prompts is {args.prompts}; at least 0")
    return args


def load(name: str, text: Path, num_tokens: int) -> Model:
    loaded = load_model(name, EngineConfig(dtype="float32"))
    if loaded.tokenizer is None:
        raise SystemExit(f"{name} has no tokenizer to read {text} with")
    bos, *tokens = loaded.tokenizer.encode(text.read_text("utf-8"))
    return Model(loaded.config, loaded.params, bos, np.array(tokens[:num_tokens]))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    keep_freed_memory()
    model = load(args.model, args.text, args.tokens)
    started = time.perf_counter()
    rows = report(
        model,
        {name: FORMS[name] for name in args.kv_cache_dtypes},
        window=args.window,
        num_prompts=args.prompts,
        prompt_len=args.prompt_len,
        num_tokens=args.new_tokens,
    )
    title = f"{args.model}, {len(model.text):,} tokens in windows of {args.window:,}"
    console = Console()
    console.width = max(console.width, 100)
    console.print(make_table(rows, title))
    console.print(f"{time.perf_counter() - started:.0f} s")
    if args.json is not None:
        data = {
            "model": args.model,
            "tokens": len(model.text),
            "window": args.window,
            "prompts": args.prompts,
            "new_tokens": args.new_tokens,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
