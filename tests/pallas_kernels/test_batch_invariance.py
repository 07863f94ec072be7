"""Batch-invariant attention: a row's bits in random batches, against those of the row alone."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import RaggedBatch, paged_attention, storage_dtype, to_storage
from tests.pallas_kernels.random_batch import RandomCase, random_case

Chunk = tuple[int, int, int]  # sequence, first position, rows
NUM_ROWS = 64
CONTEXTS = (300, 1, 33, 150)


def one_by_one() -> Iterator[list[Chunk]]:
    for s, context in enumerate(CONTEXTS):
        yield from ([(s, position, 1)] for position in range(context))


def at_random(rng: np.random.Generator) -> Iterator[list[Chunk]]:
    """Steps of random chunks of some sequences in random order; every third is a decode."""
    done = [0] * len(CONTEXTS)
    while ready := [s for s, context in enumerate(CONTEXTS) if done[s] < context]:
        chosen = rng.permutation(ready)[: rng.integers(1, len(ready) + 1)].tolist()
        chunks = []
        for s in chosen:
            most = min(CONTEXTS[s] - done[s], NUM_ROWS // len(chosen))
            chunks.append((s, done[s], 1 if rng.random() < 1 / 3 else int(rng.integers(most)) + 1))
            done[s] += chunks[-1][2]
        yield chunks


def batch_of(case: RandomCase, chunks: list[Chunk]) -> tuple[np.ndarray, RaggedBatch]:
    """Rows of `case` in the batch, and the batch, padded to all sequences."""
    rows = [case.query_start[s] + start + np.arange(length) for s, start, length in chunks]
    padding = len(CONTEXTS) - len(chunks)
    lengths = [length for _, _, length in chunks] + [0] * padding
    ends = [start + length for _, start, length in chunks] + [0] * padding
    tables = case.block_tables[[s for s, _, _ in chunks] + [0] * padding]
    batch = RaggedBatch(
        jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        jnp.asarray(ends, jnp.int32),
        jnp.asarray(tables),
    )
    return np.concatenate(rows), batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("window", "soft_cap", "with_sinks"), [(None, None, False), (37, None, True), (130, 5.0, False)]
)
@pytest.mark.parametrize("heads", [(4, 1), (9, 3), (40, 1)])
def test_rows_have_the_same_bits_in_every_batch(heads, window, soft_cap, with_sinks, dtype):
    case = random_case(
        1, [(n, n) for n in CONTEXTS], num_heads=heads[0], kv_heads=heads[1], block_size=16
    )
    pool = to_storage(jnp.asarray(case.pool), dtype, storage_dtype(dtype, "cpu"))
    sinks = np.linspace(-1, 2, heads[0]).astype(np.float32) if with_sinks else None
    attend = jax.jit(
        functools.partial(
            paged_attention,
            sm_scale=0.5,
            soft_cap=soft_cap,
            window=window,
            sinks=sinks,
            kv_dtype=dtype,
            batch_invariant=True,
        )
    )

    def bits(schedule: Iterator[list[Chunk]]) -> np.ndarray:
        out = np.zeros(case.q.shape, np.uint32)
        for chunks in schedule:
            rows, batch = batch_of(case, chunks)
            q = np.resize(case.q[rows], (NUM_ROWS, *case.q.shape[1:]))
            result = attend(jnp.asarray(q), pool, None, 1, batch)
            out[rows] = np.asarray(result)[: len(rows)].view(np.uint32)
        return out

    alone = bits(one_by_one())
    assert alone.any((1, 2)).all()
    for seed in range(3):
        np.testing.assert_array_equal(bits(at_random(np.random.default_rng(seed))), alone)
