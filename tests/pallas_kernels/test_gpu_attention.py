"""The GPU kernel, simulated with race detection, against the float64 oracle."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels.kv_format import plain_format
from tests.pallas_kernels.gpu_cases import (
    Setup,
    check,
    kernel_format,
    paged,
    simulate,
    small_tiles,
)
from tests.pallas_kernels.ragged_cases import (
    Case,
    Lengths,
    bits,
    chunked,
    make_case,
    random_lengths,
)

ONE = (1, 64, 2)  # one warpgroup
FAST_SETUPS = {
    "bf16, groups of 3, chunks of 128 keys": paged(
        16, num_heads=6, kv_heads=2, tiles=small_tiles(chunk=(2, 128, 2))
    ),
    "f16, 7 heads of 96, one warpgroup, several stages, sinks": paged(
        64,
        num_heads=7,
        kv_heads=1,
        head_dim=96,
        kv=kernel_format("float16"),
        with_sinks=True,
        tiles=small_tiles((1, 64, 3), (1, 64, 4)),
    ),
    "int4, padded lanes, soft cap": paged(
        32,
        num_heads=4,
        kv_heads=1,
        head_dim=40,
        platform="tpu",
        kv=kernel_format("int4"),
        soft_cap=2.0,
    ),
    "k8v4": paged(128, num_heads=1, kv_heads=1, kv=kernel_format("k8v4")),
}
SLOW_SETUPS = {
    "bf16, 17 heads of 128, small blocks, sinks and soft cap": paged(
        8,
        num_heads=17,
        kv_heads=1,
        head_dim=128,
        with_sinks=True,
        soft_cap=5.0,
        num_rows=72,
        tiles=small_tiles((2, 64, 3), (2, 128, 2)),
    ),
    "fp8 with scales, blocks larger than what is fetched": paged(
        256,
        num_heads=3,
        kv_heads=3,
        kv=kernel_format("fp8"),
        tiles=small_tiles(ONE, (2, 64, 3)),
    ),
    "fp8 without scales, heads of 256, one warpgroup": paged(
        64,
        num_heads=4,
        kv_heads=1,
        head_dim=256,
        kv=plain_format("float8_e4m3fn"),
        tiles=small_tiles(ONE, ONE),
    ),
    "int8, 9 heads": paged(128, num_heads=9, kv_heads=1, kv=kernel_format("int8"), num_rows=72),
    "k8v4, padded lanes": paged(
        32, num_heads=2, kv_heads=2, head_dim=40, platform="tpu", kv=kernel_format("k8v4")
    ),
    "int4, heads of 96, the sizes that are best": paged(
        16, num_heads=8, kv_heads=2, head_dim=96, kv=kernel_format("int4"), tiles=None
    ),
    "k8v4, heads of 128, invariant, sinks": paged(
        16,
        num_heads=8,
        kv_heads=2,
        head_dim=128,
        kv=kernel_format("k8v4"),
        batch_invariant=True,
        with_sinks=True,
    ),
}
SETUPS = FAST_SETUPS | SLOW_SETUPS
ONE_ROW = paged(16, num_rows=1)


FAST_BATCHES = ("decodes at borders", "chunks and a decode", "window of five")


def batches(size: int) -> dict[str, tuple[Lengths, int | None]]:
    """Lengths and window by name, for blocks of `size` tokens, splits of 128 and 136 rows."""
    return {
        "decodes at borders": ([(1, 1), (1, size), (1, size + 1), (1, 128), (1, 129)], None),
        "chunks and a decode": ([(7, 20), (9, 265), (1, 384), (50, 150)], None),
        "window of five": ([(1, size), (40, 40), (9, 3 * size), (1, 129)], 5),
        "decodes of several splits": ([(1, 384), (1, 257), (1, 256), (1, 64)], None),
        "prompts": ([(1, 1), (64, 64), (2, 2), (65, 65)], None),
        "one chunk of several splits": ([(70, 300)], None),
        "no rows first, amid and last": (
            [(0, 0), (1, 9), (0, 2 * size + 3), (12, 12), (0, size)],
            None,
        ),
        "nothing": ([], None),
        "window of one": ([(7, 20), (1, 384), (66, 200)], 1),
        "window of a block of keys": ([(12, 286), (1, 384)], 64),
        "window over all": ([(12, 286), (1, 384)], 1000),
    }


def cases() -> list[pytest.param]:
    """Every batch with the first setups, few with others; both first is fast."""
    return [
        pytest.param(
            setup,
            batch,
            id=f"{setup}: {batch}",
            marks=() if setup in FAST_SETUPS and batch in FAST_BATCHES else pytest.mark.slow,
        )
        for setup in SETUPS
        for batch in (batches(8) if setup in FAST_SETUPS else FAST_BATCHES[1:])
    ]


@pytest.mark.parametrize(("setup", "batch"), cases())
def test_result(setup, batch):
    lengths, window = batches(SETUPS[setup].block_size)[batch]
    check(make_case(SETUPS[setup], 0, lengths, window))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_random_batches_and_windows(name):
    rng = np.random.default_rng(0)
    setup, window = SETUPS[name], int(rng.integers(1, 150))
    check(make_case(setup, 0, random_lengths(rng, setup), window))


@pytest.mark.parametrize("context", [1, 128, 129, 384])
def test_a_batch_of_one_row_is_one_decode(context):
    check(make_case(ONE_ROW, context, [(1, context)]))


@pytest.mark.slow
def test_sequences_read_the_blocks_of_a_prefix_that_they_share():
    case = make_case(
        SETUPS["bf16, groups of 3, chunks of 128 keys"], 3, [(5, 90), (1, 60), (9, 99)]
    )
    case.block_tables[1:3, :3] = case.block_tables[0, :3]
    check(case)


# Splits of 4096 keys, so that the first sequence has two.
CONTEXTS = (4200, 1, 33, 150)
FIRST = (4080, 0, 10, 90)  # positions whose queries are asked for
INVARIANT = Setup(
    num_heads=4,
    kv_heads=1,
    block_size=256,
    table_width=17,
    num_blocks=21,
    batch_invariant=True,
    tiles=None,
)
Chunk = tuple[int, int, int]  # sequence, first position, one past the last


class Invariance:
    """The rows of `CONTEXTS` in any batches."""

    def __init__(self, setup: Setup, window: int | None):
        rng = np.random.default_rng(0)
        self.whole: Case = make_case(setup, 4, [(0, n) for n in CONTEXTS])
        heads = (setup.num_heads, setup.head_dim)
        self.queries = [rng.standard_normal((n, *heads)).astype(np.float32) for n in CONTEXTS]
        self.window = window

    def step(self, chunks: list[Chunk]) -> list[np.ndarray]:
        """Bits of the rows of chunks."""
        case = chunked(self.whole, self.queries, chunks, self.window)
        found = bits(simulate(case))
        return np.split(found, np.cumsum([end - start for _, start, end in chunks])[:-1])

    def alone(self, s: int) -> np.ndarray:
        return self.step([(s, FIRST[s], CONTEXTS[s])])[0]


def test_invariant_rows_have_the_same_bits_alone_and_in_another_chunk_and_place():
    rows = Invariance(INVARIANT, None)
    alone = [rows.alone(s) for s in (0, 3)]
    for chunks in ([(3, 95, 150), (0, 4093, 4100), (2, 5, 6)], [(1, 0, 1), (0, 4099, 4100)]):
        for (s, start, end), found in zip(chunks, rows.step(chunks), strict=True):
            if s in (0, 3):
                want = alone[s // 3][start - FIRST[s] : end - FIRST[s]]
                np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(rows.alone(0), alone[0])  # and a second time


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window"), [("bfloat16", None), ("int4", 21)])
def test_invariant_rows_have_the_same_bits_whole_and_in_random_chunks(name, window):
    setup = dataclasses.replace(INVARIANT, kv=kernel_format(name))
    rows = Invariance(setup, window)
    alone = [rows.alone(s) for s in range(4)]
    rng, done = np.random.default_rng(0), list(FIRST)
    while ready := [s for s, n in enumerate(CONTEXTS) if done[s] < n]:
        chunks = []
        for s in rng.permutation(ready).tolist():
            most = min(CONTEXTS[s] - done[s], 45)
            length = 1 if rng.random() < 0.3 else int(rng.integers(1, most + 1))
            chunks.append((s, done[s], done[s] + length))
            done[s] += length
        for (s, start, end), found in zip(chunks, rows.step(chunks), strict=True):
            np.testing.assert_array_equal(found, alone[s][start - FIRST[s] : end - FIRST[s]])
