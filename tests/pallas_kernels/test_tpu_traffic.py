"""What the TPU kernel reads, writes and multiplies: the model's counts and the kernel's own."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import FORMATS, TileSizes, TpuTiles, tpu_copies, tpu_kernel, tpu_softmax
from pallas_kernels.tpu_tiles import KernelShape, best_tiles
from pallas_kernels.tpu_traffic import Traffic, attention_traffic
from tests.pallas_kernels.ragged_cases import Case, Lengths, bits, make_case, random_lengths
from tests.pallas_kernels.tpu_cases import Setup, arguments, compile_anew, kept_as

SETUPS = [
    Setup(),
    Setup(
        6,
        2,
        128,
        block_size=16,
        kv=kept_as("bfloat16"),
        tiles=TpuTiles(TileSizes(1, 2, 32), TileSizes(16, 3, 16)),
    ),
    Setup(
        2,
        1,
        192,
        block_size=32,
        kv=kept_as("k8v4"),
        tiles=TpuTiles(TileSizes(1, 2, 64), TileSizes(8, 2, 32)),
    ),
]
READS = ("q_copy", "page_copy", "kept_copy", "new_copy", "scales_copy")
COPIES = (*READS, "out_copy", "write_copy")


class Counts:
    """What a simulated kernel does.

    Attributes:
      num_bytes: by kind of copy.
      blocks: read from the pool, with repetitions.
      products: rows times keys of q . k, all KV heads together.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.num_bytes: collections.Counter[str] = collections.Counter()
        self.blocks: list[int] = []
        self.products = 0

    def on_start(self, kind: str, num_bytes: int, block: Any) -> None:
        self.num_bytes[kind] += num_bytes
        if kind == "page_copy":
            self.blocks.append(int(block))

    def on_dot(self, products: int) -> None:
        self.products += products


@dataclasses.dataclass
class CountedCopy:
    """A copy that tells of its start."""

    copy: Any
    on_start: Any

    def start(self) -> None:
        self.on_start()
        self.copy.start()

    def wait(self) -> None:
        self.copy.wait()


def watch(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Counts of the copies and products of every kernel that is traced from now on."""
    counts = Counts()

    def counted(kind: str, make: Any, op: Any, tile: Any, *where: Any) -> CountedCopy:
        copy = make(op, tile, *where)
        num_bytes = int(np.prod(copy.src_ref.shape)) * copy.src_ref.dtype.itemsize
        block = op.block(tile, where[1]) if kind == "page_copy" else 0
        on_start = functools.partial(counts.on_start, kind, num_bytes)
        return CountedCopy(copy, lambda: jax.debug.callback(on_start, block))

    def dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        if axis == 1:
            jax.debug.callback(functools.partial(counts.on_dot, a.shape[0] * b.shape[0]))
        return plain_dot(a, b, axis)

    plain_dot = tpu_softmax._dot
    monkeypatch.setattr(tpu_softmax, "_dot", dot)
    for kind in COPIES:
        make = functools.partial(counted, kind, getattr(tpu_copies, kind))
        for module in (tpu_copies, tpu_kernel):
            if hasattr(module, kind):
                monkeypatch.setattr(module, kind, make)
    return counts


def traffic(case: Case) -> Traffic:
    assert case.setup.tiles is not None
    return attention_traffic(
        np.diff(case.query_start).tolist(),
        case.context_lens.tolist(),
        shape=case.setup.shape,
        tiles=case.setup.tiles,
        window=case.window,
    )


def batches(setup: Setup) -> list[tuple[Lengths, int | None]]:
    chunks = [(1, 25), (20, 20), (17, 60), (0, 0), (1, 33)]
    rng = np.random.default_rng(0)
    windows = (None, 1, 13, None, 70)
    at_random = [(random_lengths(rng, setup), window) for window in windows]
    return [(chunks, None), (chunks, 7), ([(1, 1), (33, 64), (1, 64)], None), *at_random]


@pytest.mark.parametrize("setup", SETUPS, ids=[str(setup.kv) for setup in SETUPS])
def test_the_kernel_does_what_the_model_counts(setup, monkeypatch):
    counts = watch(monkeypatch)
    kernel = compile_anew(setup, "plain")
    for seed, (lengths, window) in enumerate(batches(setup)):
        case = make_case(setup, seed, lengths, window)
        counts.forget()
        _, pool = kernel(*arguments(case))
        jax.effects_barrier()
        np.testing.assert_array_equal(bits(np.asarray(pool)), bits(case.after))
        check_counts(counts, case)
        check_blocks(case, counts.blocks)


def check_counts(counts: Counts, case: Case) -> None:
    want = traffic(case)
    assert len(counts.blocks) == want.pages_fetched
    assert counts.num_bytes["new_copy"] == want.new_row_bytes
    assert sum(counts.num_bytes[kind] for kind in READS) == want.bytes_read
    assert counts.num_bytes["out_copy"] + counts.num_bytes["write_copy"] == want.bytes_written
    assert counts.products == want.products * case.setup.kv_heads


def check_blocks(case: Case, blocks: list[int]) -> None:
    """Whatever holds a visible earlier token is read; nothing else is, but what must be kept."""
    size, query_lens = case.setup.block_size, np.diff(case.query_start)
    needed, kept, of_decodes = set(), set(), set()
    for s, (query, context) in enumerate(zip(query_lens, case.context_lens, strict=True)):
        if query == 0:
            continue
        old = context - query
        first = 0 if case.window is None else max(0, old - case.window + 1)
        pages = {position // size for position in range(first, old)}
        needed |= {int(case.block_tables[s, page]) for page in pages}
        # The first and the last block with new tokens are written whole.
        kept |= {int(case.block_tables[s, page]) for page in (old // size, (context - 1) // size)}
        if query == 1:
            of_decodes |= set(case.block_tables[s].tolist())
    assert needed <= set(blocks) <= needed | kept
    repeated = [block for block, times in collections.Counter(blocks).items() if times > 1]
    assert not set(repeated) & of_decodes


CHIPS = {
    "v5e": pltpu.ChipVersion.TPU_V5E,
    "v6e": pltpu.ChipVersion.TPU_V6E,
    "v7x": pltpu.ChipVersion.TPU_7X,
}
MODELS = {"llama-3.1-8b": (8, 4, 128), "qwen3-0.6b": (8, 2, 128), "gemma-3-270m": (1, 4, 256)}
BLOCK = 64


def model_shape(model: str) -> KernelShape:
    kv = FORMATS["bfloat16"]
    kv_heads, group, head_dim = MODELS[model]
    return KernelShape(kv_heads, group, head_dim, BLOCK, 1 << 15, kv, kv.row(head_dim, "tpu"))


def model_traffic(
    chip: str, model: str, query_lens: list[int], context_lens: list[int], window: int | None = None
) -> tuple[Traffic, TpuTiles]:
    """Traffic with the cost model's own sizes, and those."""
    shape = model_shape(model)
    tiles = best_tiles(shape, pltpu.get_tpu_info_for_chip(CHIPS[chip], 1))
    got = attention_traffic(query_lens, context_lens, shape=shape, tiles=tiles, window=window)
    return got, tiles


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("batch_size", [1, 8, 256])
@pytest.mark.parametrize("context", [512, 513, 1000, 2048, 5000, 1 << 15])
def test_decodes_read_every_needed_page_once_and_hardly_more(context, batch_size, chip, model):
    got, _ = model_traffic(chip, model, [1] * batch_size, [context] * batch_size)
    assert got.pages_fetched == got.pages_needed == got.pages_distinct
    assert got.pages_fetched == batch_size * -(-(context - 1) // BLOCK)
    assert got.read_ratio <= 1.05


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_decodes_of_random_contexts_read_hardly_more_than_they_must(chip, model):
    rng = np.random.default_rng(0)
    contexts = np.exp(rng.uniform(np.log(512), np.log(1 << 15), 256)).astype(int).tolist()
    got, _ = model_traffic(chip, model, [1] * 256, contexts)
    assert got.pages_fetched == got.pages_needed
    assert got.read_ratio <= 1.05


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("context", [512, 1024, 4096])
def test_chunks_read_a_page_once_a_tile_and_multiply_little_that_nobody_sees(context, chip, model):
    got, tiles = model_traffic(chip, model, [512], [context])
    num_tiles = -(-512 // tiles.chunk.tile)
    assert got.pages_fetched == got.pages_needed <= num_tiles * got.pages_distinct
    assert got.pages_distinct == (context - 512) // BLOCK
    assert got.padding <= 1.3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("window", [1, 64, 512, 4000])
def test_a_window_reads_only_the_pages_that_it_touches(window, model):
    context = 9000
    got, tiles = model_traffic("v6e", model, [1], [context], window)
    # Where a token sees itself alone, its block is read only to be kept.
    assert got.pages_needed == got.pages_fetched - (window == 1)
    touched = (context - 1) // BLOCK - max(0, context - window) // BLOCK + 1
    assert got.pages_fetched == touched
    chunk, _ = model_traffic("v6e", model, [512], [context], window)
    most = -(-(tiles.chunk.tile + window) // BLOCK) + 1
    assert chunk.pages_fetched <= -(-512 // tiles.chunk.tile) * most


def test_a_tile_that_begins_behind_the_earlier_tokens_reads_only_new_rows():
    got, _ = model_traffic("v5e", "llama-3.1-8b", [1024], [1024])
    assert got.pages_fetched == got.pages_needed == 0
    assert got.new_row_bytes > 0


def test_pages_are_written_once():
    shape = model_shape("llama-3.1-8b")
    page_bytes = shape.kv_heads * BLOCK * 2 * shape.head_dim * 2
    for window in (None, 100):
        got, tiles = model_traffic("v5e", "llama-3.1-8b", [700], [1000], window)
        results = -(-700 // tiles.chunk.tile) * tiles.chunk.tile * shape.group * shape.head_dim * 4
        pages = 999 // BLOCK - 300 // BLOCK + 1
        assert got.bytes_written == pages * page_bytes + results * shape.kv_heads


def test_nothing_to_do_moves_nothing():
    assert model_traffic("v5e", "llama-3.1-8b", [0, 0], [0, 70])[0] == Traffic()
