"""Time that sampling adds to the product with the vocabulary, in one jitted function.

Hidden states times a random head give the logits of every row; what a row then asks of the sampler
is data, so that all cases run the same program. "product" is that of a program which returns the
logits. Cases take turns, and a case's time is compared with the product of the same turn:

  added     milliseconds more than the product alone, median of the turns
  ratio     of that to the product's own time

Logits are normal, "flat" with a standard deviation of 1 and "peaked" with one of 8; the table says
how many of the likeliest tokens hold 95% of the mass at temperature 1, in the median row.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pagedjax.models.linear import linear
from pagedjax.sampler import SamplerOutput, sample
from pagedjax.sampling_input import SamplingInput, SlotState
from pagedjax.slot_start import empty_slots

SHARPNESS = {"peaked": 8.0, "flat": 1.0}
"""Standard deviations of the logits."""

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3}
CASES: dict[str, dict[str, float]] = {
    "greedy": {},
    "greedy, one row random": {"temperature": 1.0},
    "greedy, penalties": {"adjusts": True, **PENALTIES},
    "greedy, log-probabilities": {"wants_logprobs": True},
    "temperature": {"temperature": 1.0},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top-k 50, top-p 0.95": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
    "top-k 50, top-p 0.95, penalties": {
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.95,
        "adjusts": True,
        **PENALTIES,
    },
}
"""Options of all rows, but of the first alone where one row is meant."""

_DEFAULTS: dict[str, float] = {"top_p": 1.0, "repetition_penalty": 1.0}


@dataclasses.dataclass(frozen=True)
class Row:
    """Milliseconds of a case, medians; see the module's docstring."""

    case: str
    logits: str
    nucleus: int
    product: float
    added: float
    ratio: float


def make_input(num_rows: int, options: dict[str, float], *, one_row: bool) -> SamplingInput:
    """Rows with `options`, or one such row among greedy ones."""

    def column(name: str, dtype: type) -> np.ndarray:
        values = np.full(num_rows, _DEFAULTS.get(name, 0), dtype)
        values[: 1 if one_row else num_rows] = options.get(name, values[0])
        return values

    rows = np.arange(num_rows, dtype=np.int32)
    sampling = SamplingInput(
        row=rows,
        slot=rows,
        **{name: column(name, np.int32) for name in ("top_k", "min_position", "processor")},
        **{name: column(name, np.float32) for name in ("temperature", "top_p", "min_p")},
        **{name: column(name, np.float32) for name in PENALTIES},
        **{name: column(name, np.bool_) for name in ("adjusts", "wants_logprobs")},
        seed=np.stack([rows, rows], axis=1).astype(np.uint32),
        position=rows,
    )
    return jax.tree.map(jnp.asarray, sampling)


def make_slots(num_rows: int, vocab: int) -> SlotState:
    """Sequences in which every seventh token has been sampled."""
    counts = (jnp.arange(vocab, dtype=jnp.int32) % 7 == 0).astype(jnp.int32)
    slots = empty_slots(num_rows, vocab)
    return dataclasses.replace(slots, tokens=jnp.tile(counts, (num_rows, 1)))


@jax.jit
def product(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return linear(hidden, head, jnp.bfloat16)


@jax.jit
def product_and_sample(
    hidden: jax.Array, head: jax.Array, sampling: SamplingInput, slots: SlotState
) -> SamplerOutput:
    return sample(linear(hidden, head, jnp.bfloat16), sampling, slots)


def nucleus_of(logits: np.ndarray, top_p: float = 0.95) -> int:
    """How many of the likeliest tokens hold this share of the mass, in the median row."""
    mass = np.sort(np.exp(logits - logits.max(-1, keepdims=True)), axis=-1)[:, ::-1].cumsum(-1)
    return int(np.median((mass < top_p * mass[:, -1:]).sum(-1) + 1))


def measure(num_rows: int, vocab: int, hidden_size: int, turns: int) -> list[Row]:
    """All cases on logits of every sharpness, in turns, after one that does not count."""
    rng = np.random.default_rng(0)
    head = jnp.asarray(rng.standard_normal((vocab, hidden_size), np.float32), jnp.bfloat16)
    unit = rng.standard_normal((num_rows, hidden_size), np.float32) / np.sqrt(hidden_size)
    slots = make_slots(num_rows, vocab)
    inputs = {
        name: make_input(num_rows, options, one_row="one row" in name)
        for name, options in CASES.items()
    }
    rows = []
    for sharpness, deviation in SHARPNESS.items():
        hidden = jnp.asarray(unit * np.float32(deviation))
        nucleus = nucleus_of(np.asarray(product(hidden, head)))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
        for _ in range(turns + 1):
            for name, sampling in inputs.items():
                alone = _milliseconds(product, hidden, head)
                whole = _milliseconds(product_and_sample, hidden, head, sampling, slots)
                times[name].append((alone, whole - alone))
        for name, pairs in times.items():
            alone, added = np.median(pairs[1:], axis=0)
            rows.append(Row(name, sharpness, nucleus, alone, added, added / alone))
    return rows


def _milliseconds(function: Any, *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return (time.perf_counter() - start) * 1e3


def make_table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("case", "logits", "95% in", "product", "added", "ratio"):
        table.add_column(name, justify="left" if name in ("case", "logits") else "right")
    for row in rows:
        times = (f"{row.product:.2f}", f"{row.added:.2f}", f"{row.ratio:.3f}")
        table.add_row(row.case, row.logits, f"{row.nucleus:,}", *times)
    return table


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=262_144, help="tokens (default: 262144)")
    parser.add_argument("--rows", type=int, default=32, help="sequences (default: 32)")
    parser.add_argument("--hidden", type=int, default=640, help="of the head (default: 640)")
    parser.add_argument("--turns", type=int, default=15, help="timed, of a case (default: 15)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(argv)
    if min(args.vocab, args.rows, args.hidden, args.turns) < 1:
        parser.error("--vocab, --rows, --hidden and --turns must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    rows = measure(args.rows, args.vocab, args.hidden, args.turns)
    title = f"{args.rows} rows of {args.vocab:,} tokens on {jax.devices()[0].platform}, ms"
    console = Console()
    console.width = max(console.width, 90)  # rather broken lines than cut numbers
    console.print(make_table(title, rows))
    if args.json is not None:
        args.json.write_text(
            json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
