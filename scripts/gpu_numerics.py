"""The kernel against the float64 oracle, for every pool, head size and group; and its bits.

Each program is compiled once and runs several ragged batches, decodes and chunks mixed, with and
without a window, and each twice, for equal bits. Programs come in rounds, each of all pools with
all head sizes and of other groups, so that what there is no time for is missing evenly.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_batches import LAYER, POOLS, Batch, Lengths, Program, make_batch
from gpu_records import Record, Recorder

from pallas_kernels import (
    Implementation,
    RaggedBatch,
    paged_attention,
    paged_attention_and_write,
)
from pallas_kernels.reference import read_rows

TOYS = ("bfloat16", "int4", "k8v4")
HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (4, 1, 8, 5, 16, 64)
BLOCK_SIZES = (16, 64, 8, 32, 128)
TOLERANCE = dict.fromkeys(POOLS, 2e-2) | {"float16": 4e-3}
"""Of |result - oracle| / (1 + |oracle|), by the pool; |v| < 6."""
ROUNDING = {
    "bfloat16": 2**-8,
    "float16": 2**-10,
    "float8_e4m3fn": 2**-3,
    "int8": 2**-6,
    "int4": 2**-2,
}
"""Of a written value's error over the largest value of its row, by the dtype of its elements."""

Check = tuple[str, Callable[[], Record]]


def measure_numerics(recorder: Recorder, implementation: Implementation, toy: bool) -> None:
    """One record a program: `ok`, the `worst` error, its `tolerance`, and what else was wrong."""
    for name, work in checks(implementation, toy):
        recorder.run(name, work)


def checks(implementation: Implementation, toy: bool) -> Iterator[Check]:
    """All of them by name, the most telling first."""
    rounds = 1 if toy else len(GROUPS)
    for turn in range(rounds):
        for program in one_round(turn, toy):
            yield program.name, functools.partial(check_batches, program, implementation)
        if turn == 0:
            yield from _other_checks(implementation, toy)


def one_round(turn: int, toy: bool) -> Iterator[Program]:
    """Every pool with every head size (of toys, few), in turn with all groups."""
    head_dims, pools = (HEAD_DIMS[:1], TOYS) if toy else (HEAD_DIMS, POOLS)
    for i, pool in enumerate(pools):
        for j, head_dim in enumerate(head_dims):
            group = GROUPS[(i + j + turn) % len(GROUPS)]
            # 23, as no cycle of options divides it, nor a sum of it and what picks the group.
            index = 23 * turn + len(head_dims) * i + j
            yield _program(pool, head_dim, min(group, 5) if toy else group, toy, index)


def _other_checks(implementation: Implementation, toy: bool) -> Iterator[Check]:
    for i, pool in enumerate(TOYS[:1] if toy else POOLS):
        head_dim, group = (64, 2) if toy else ((128, 4), (64, 5))[i % 2]
        make = functools.partial(_program, pool, head_dim, group, toy, i)
        long = {"num_rows": 20, "num_seqs": 4, "most_tokens": 5000}
        options = [{"batch_invariant": True}, *([] if toy else [long])]
        if i == 0 and not toy:
            options.append({"batch_invariant": True, **long})
        for program in (make(**own) for own in options):
            check = check_invariance if program.batch_invariant else check_batches
            yield program.name, functools.partial(check, program, implementation)
        yield (
            f"writing: {make().name}",
            functools.partial(check_writing, make(), implementation),
        )


def _program(
    pool: str, head_dim: int, group: int, toy: bool, index: int, **options: Any
) -> Program:
    """Options take turns by `index`, in cycles of different lengths, so that all of them meet."""
    half = "float16" if pool == "float16" else "bfloat16"
    small = {"num_rows": 24, "num_seqs": 4, "most_tokens": 96, "is_toy": True} if toy else {}
    return Program(
        pool,
        head_dim,
        group,
        kv_heads=1 if group >= 16 else 2,
        block_size=BLOCK_SIZES[index % (4 if toy else len(BLOCK_SIZES))],
        q_dtype="float32" if index % 3 == 2 else half,
        soft_cap=20.0 if index % 4 == 1 else None,
        with_sinks=index % 7 in (1, 3, 5),
        **small | options,
    )


def mixes(program: Program, rng: np.random.Generator) -> list[tuple[Lengths, int | None]]:
    """Batches by their sequences' rows and contexts, each with a window or without.

    Block borders, tile borders, single tokens and sequences without rows are among them.
    """
    most, rows = program.most_tokens, program.num_rows
    chunk = rows // 2
    drawn = [(1, int(rng.integers(1, most + 1))) for _ in range(program.num_seqs - 3)]
    mixed = [(1, 1), (chunk, chunk + most // 3), (rows // 4, rows // 4), *drawn]
    decodes = [(1, most), (1, 64), (1, 65), *drawn]
    one_chunk = [(rows - 3, most - 5), (1, most // 2)]
    window = most // 6 + 1
    found = [(mixed, None), (mixed[::-1], window), (decodes, window), (one_chunk, None)]
    return found[:2] if program.is_toy else found


def attend(program: Program, implementation: Implementation) -> Callable[..., jax.Array]:
    """A compiled `paged_attention` of a batch's `arguments`."""

    @jax.jit
    def run(
        q: jax.Array,
        pool: jax.Array,
        scales: jax.Array | None,
        batch: RaggedBatch,
        window: jax.Array,
    ) -> jax.Array:
        return paged_attention(
            q, pool, scales, LAYER, batch, window=window, **_options(program, implementation)
        )

    return run


def _options(program: Program, implementation: Implementation) -> dict[str, Any]:
    return {
        "sm_scale": program.head_dim**-0.5,
        "soft_cap": program.soft_cap,
        "kv_dtype": program.kv,
        "sinks": None if program.sinks is None else jnp.asarray(program.sinks),
        "implementation": implementation,
        "batch_invariant": program.batch_invariant,
    }


def check_batches(program: Program, implementation: Implementation) -> Record:
    """All mixes against the oracle, each run twice for equal bits."""
    run, rng = attend(program, implementation), np.random.default_rng(0)
    worst, faults = 0.0, []
    for number, (lengths, window) in enumerate(mixes(program, rng)):
        batch = make_batch(program, rng, lengths, window)
        arguments = batch.arguments()
        once, again = (np.asarray(run(*arguments)) for _ in range(2))
        error = distance(once[: batch.rows], batch.oracle())
        worst = max(worst, error)
        if not error <= TOLERANCE[program.pool]:
            faults.append(f"batch {number} off by {error:.2g}")
        if not same_bits(once[: batch.rows], again[: batch.rows]):
            faults.append(f"batch {number} differs when run again")
        if not np.isfinite(once.astype(np.float32)).all():
            faults.append(f"batch {number} has rows that are not finite")
    return _record(program, worst, faults)


def check_invariance(program: Program, implementation: Implementation) -> Record:
    """Each sequence alone, and its last row alone, have the bits that they have in the batch."""
    run, rng = attend(program, implementation), np.random.default_rng(0)
    lengths, window = mixes(program, rng)[0]
    batch = make_batch(program, rng, lengths, window)
    together = np.asarray(run(*batch.arguments()))[: batch.rows]
    worst = distance(together, batch.oracle())
    faults = [] if worst <= TOLERANCE[program.pool] else [f"off by {worst:.2g}"]
    for sequence, (rows, context) in enumerate(lengths):
        end = int(batch.query_start[sequence + 1])
        for alone in sorted({rows, 1}):
            got = np.asarray(run(*batch.only(sequence, alone).arguments()))[:alone]
            if not same_bits(got, together[end - alone : end]):
                faults.append(f"{alone} of {rows} rows of a context of {context} differ alone")
    return _record(program, worst, faults)


def check_writing(program: Program, implementation: Implementation) -> Record:
    """`paged_attention_and_write`: the pool it returns, and attention over that."""
    rng = np.random.default_rng(0)
    lengths, window = mixes(program, rng)[0]
    batch = make_batch(program, rng, lengths, window)
    shape = (program.num_rows, program.kv_heads, program.head_dim)
    k, v = rng.standard_normal((2, *shape)).astype(np.float32)
    q, pool, scales, meta, limit = batch.arguments()

    @jax.jit
    def run(q, k, v, pool, scales, meta, limit):
        return paged_attention_and_write(
            q, k, v, pool, scales, LAYER, meta, window=limit, **_options(program, implementation)
        )

    out, pool, scales = run(q, k, v, pool, scales, meta, limit)
    old = batch.pool.copy()
    batch.pool = np.asarray(pool)
    batch.scales = None if scales is None else np.asarray(scales)
    worst, faults = distance(np.asarray(out)[: batch.rows], batch.oracle()), []
    if not worst <= TOLERANCE[program.pool]:
        faults.append(f"off by {worst:.2g}")
    blocks, slots = _places(batch)
    at = (LAYER, blocks, slice(None), slots)
    words = None if batch.scales is None else batch.scales[at]
    written = read_rows(batch.pool[at], words, program.kv, program.head_dim)
    for got, want, dtype in zip(written, (k, v), (program.kv.k, program.kv.v), strict=True):
        want = want[: batch.rows]
        error = (np.abs(got - want).max(-1) / np.abs(want).max(-1)).max()
        if not error <= ROUNDING[dtype.name]:
            faults.append(f"written {dtype.name} values off by {error:.2g}")
    old[LAYER, blocks, :, slots] = batch.pool[LAYER, blocks, :, slots]
    if not same_bits(old, batch.pool):
        faults.append("other slots of the pool changed")
    return _record(program, worst, faults)


def _places(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Block and slot of each row of the batch."""
    blocks, slots = [], []
    for sequence, context in enumerate(batch.context_lens):
        rows = batch.query_start[sequence + 1] - batch.query_start[sequence]
        position = np.arange(context - rows, context)
        blocks.append(batch.block_tables[sequence, position // batch.program.block_size])
        slots.append(position % batch.program.block_size)
    return np.concatenate(blocks), np.concatenate(slots)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """The largest |got - want| / (1 + |want|); infinite where something is not finite."""
    error = np.abs(got.astype(np.float64) - want) / (1 + np.abs(want))
    return float(np.where(np.isfinite(error), error, np.inf).max())


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _record(program: Program, worst: float, faults: list[str]) -> Record:
    tolerance = TOLERANCE[program.pool]
    return {
        "pool": program.pool,
        "head_dim": program.head_dim,
        "group": program.group,
        "worst": worst,
        "tolerance": tolerance,
        "ok": not faults,
        "faults": faults,
    }
