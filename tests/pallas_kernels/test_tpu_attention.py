"""The TPU kernel, simulated with and without race detection, against the float64 oracle."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels import TileSizes, TpuTiles
from tests.pallas_kernels.ragged_cases import Lengths, bits, chunked, make_case, random_lengths
from tests.pallas_kernels.tpu_cases import Setup, check, kept_as, simulate


def tiles(pages: int, keys: int, tile: int, chunk_keys: int) -> TpuTiles:
    return TpuTiles(TileSizes(1, pages, keys), TileSizes(tile, pages, chunk_keys))


def bytes_of(
    name: str, num_heads: int, kv_heads: int, head_dim: int, sizes: TpuTiles | None, **options
) -> Setup:
    """Of a pool of bytes."""
    heads = (num_heads, kv_heads, head_dim)
    return Setup(*heads, block_size=32, kv=kept_as(name), tiles=sizes, **options)


FLOAT = Setup()
BFLOAT = Setup(  # groups of 3
    6, 2, 128, block_size=16, kv=kept_as("bfloat16"), tiles=tiles(2, 32, 16, 16)
)
SETUPS = {
    "f32": FLOAT,
    "f32 with sinks and soft cap": Setup(
        3, 3, 128, tiles=tiles(3, 8, 16, 24), soft_cap=2.0, with_sinks=True
    ),
    "f32 invariant": Setup(6, 2, batch_invariant=True, with_sinks=True, soft_cap=3.0),
    "f32 of one row": dataclasses.replace(FLOAT, num_rows=1),
    "bf16": BFLOAT,
    "bf16 invariant, five heads, padded lanes": Setup(
        5,
        1,
        40,
        block_size=16,
        kv=kept_as("bfloat16"),
        tiles=tiles(2, 16, 16, 32),
        batch_invariant=True,
    ),
    "fp8 with scales, five heads, padded lanes": bytes_of("fp8", 5, 1, 32, tiles(2, 32, 16, 64)),
    "int8": bytes_of("int8", 2, 1, 64, tiles(2, 32, 16, 64)),
    "int4 with sinks, already written": bytes_of(
        "int4", 4, 2, 256, tiles(2, 64, 8, 32), writes=False, with_sinks=True
    ),
    "int4, folded, five heads, padded halves": bytes_of("int4", 5, 1, 80, tiles(2, 32, 16, 64)),
    "k8v4 in whole rows": bytes_of("k8v4", 2, 2, 64, tiles(2, 32, 16, 64)),
    "k8v4 and the cost model's sizes": bytes_of("k8v4", 2, 1, 128, None),
}


def batches(size: int) -> dict[str, tuple[Lengths, int | None]]:
    """Lengths and window by name, for blocks of `size` tokens and at most 72 rows."""
    chunks = [(7, 20), (30, 30 + 2 * size), (1, 3 * size), (size + 1, 2 * size)]
    return {
        "decodes": ([(1, 1), (1, size), (1, size + 1), (1, 5 * size), (1, 5 * size - 1)], None),
        "prompts": ([(1, 1), (size, size), (2, 2), (size + 3, size + 3)], None),
        "chunks and a decode": (chunks, None),
        "a chunk over many borders": ([(70, 70 + size)], None),
        "no rows first, amid and last": (
            [(0, 0), (1, 9), (0, 2 * size + 3), (12, 12), (0, size)],
            None,
        ),
        "nothing": ([], None),
        "window of one": (chunks, 1),
        "window of five": ([(1, size), (40, 40), (9, 3 * size), (1, 4 * size + 1)], 5),
        "window of a block": (chunks, size),
        "window over all": (chunks, 1000),
    }


def cases() -> list[pytest.param]:
    """Every setup with every batch that has its rows."""
    names = [
        (setup, batch)
        for setup in SETUPS
        for batch, (lengths, _) in batches(SETUPS[setup].block_size).items()
        if sum(query for query, _ in lengths) <= SETUPS[setup].num_rows
    ]
    return [pytest.param(*name, id=", ".join(name)) for name in names]


@pytest.mark.parametrize("mode", ["races", "plain"])
@pytest.mark.parametrize(("setup", "batch"), cases())
def test_result_and_every_bit_of_the_pool(setup, batch, mode):
    lengths, window = batches(SETUPS[setup].block_size)[batch]
    check(make_case(SETUPS[setup], 0, lengths, window), mode)


@pytest.mark.parametrize("mode", ["races", "plain"])
@pytest.mark.parametrize("context", [1, 8, 9, 16, 90])
def test_a_batch_of_one_row_is_one_decode(context, mode):
    check(make_case(SETUPS["f32 of one row"], context, [(1, context)]), mode)


@pytest.mark.parametrize("mode", ["races", "plain"])
def test_sequences_read_the_blocks_of_a_prefix_that_they_share(mode):
    case = make_case(FLOAT, 3, [(5, 40), (1, 60), (20, 44), (1, 33)])
    case.block_tables[1:4, :3] = case.block_tables[0, :3]
    check(case, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["races", "plain"])
@pytest.mark.parametrize("name", [name for name in SETUPS if SETUPS[name].num_rows > 1])
def test_random_batches_and_windows(name, mode):
    setup = SETUPS[name]
    for seed in range(12 if mode == "races" else 24):
        rng = np.random.default_rng(seed)
        window = [None, int(rng.integers(1, 80))][seed % 2]
        check(make_case(setup, seed, random_lengths(rng, setup), window), mode)


@pytest.mark.parametrize("name", ["f32 invariant", "bf16 invariant, five heads, padded lanes"])
@pytest.mark.parametrize("window", [None, 21])
def test_invariant_rows_have_the_same_bits_alone_and_batched_whole_and_in_chunks(name, window):
    contexts = (70, 1, 33, 19)
    whole = make_case(SETUPS[name], 4, [(0, n) for n in contexts], window=None)
    rng = np.random.default_rng(0)
    heads = (whole.setup.num_heads, whole.setup.head_dim)
    queries = [rng.standard_normal((n, *heads)).astype(np.float32) for n in contexts]

    def step(chunks: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """Bits of the rows of chunks (sequence, first position, one past the last)."""
        case = chunked(whole, queries, chunks, window)
        out, _ = simulate(case, "plain")
        return np.split(bits(out), np.cumsum([end - start for _, start, end in chunks])[:-1])

    alone = [np.concatenate(step([(s, 0, n)])) for s, n in enumerate(contexts)]
    done = [0] * len(contexts)
    while ready := [s for s, n in enumerate(contexts) if done[s] < n]:
        chunks = []
        for s in rng.permutation(ready).tolist():
            most = min(contexts[s] - done[s], 18)
            length = 1 if rng.random() < 0.5 else int(rng.integers(1, most + 1))
            chunks.append((s, done[s], done[s] + length))
            done[s] += length
        for (s, start, end), rows in zip(chunks, step(chunks), strict=True):
            np.testing.assert_array_equal(rows, alone[s][start:end])
