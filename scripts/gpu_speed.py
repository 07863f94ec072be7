"""Speed of the kernel: decodes against the copy bandwidth, prefill chunks against a product."""

import jax
import jax.numpy as jnp
import numpy as np
from gpu_records import Record, Recorder
from gpu_timing import Limits, chain_seconds, num_calls
from gpu_work import Chunk, Decode, Heads, Piece, facts

from pallas_kernels import Implementation, RaggedBatch, paged_attention
from pallas_kernels.blocks import kv_rows
from pallas_kernels.kv_format import FORMATS, KVFormat

_BASE_BLOCKS = 512  # of random values, which a pool repeats


def decodes(toy: bool) -> list[Decode]:
    """In bfloat16 (a toy in another format) with small blocks, for one pool."""
    if toy:
        return [Decode(2, 64, "k8v4")]
    contexts, batches = (512, 4096, 32768), (1, 16, 64, 256)
    return [Decode(batch, context) for context in contexts for batch in batches]


def chunks(toy: bool) -> list[Chunk]:
    if toy:
        return [Chunk(24, 0)]
    return [Chunk(512, 0), Chunk(2048, 0), Chunk(8192, 0), Chunk(512, 8192), Chunk(512, 32768)]


def other_pools(toy: bool) -> list[Decode]:
    """Decodes over pools of other formats and block sizes."""
    if toy:
        return []
    formats = ("int8", "int4", "k8v4", "fp8")
    narrow = [Decode(64, 4096, kv) for kv in formats]
    large = [Decode(64, 4096, kv, 64) for kv in ("bfloat16", "int8", "int4")]
    return narrow + large


class PagedPool:
    """A pool of one layer and `num_blocks` or a few more, all of random values.

    Attributes:
      pool: [1, P, KVH, T, width]. scales: u32[1, P, KVH, T] or None.
    """

    def __init__(self, heads: Heads, kv: str, block_size: int, num_blocks: int):
        self.kv, self.block_size, self._heads = kv, block_size, heads
        base = min(_BASE_BLOCKS, num_blocks + 1)  # with the null block
        repeats = -(-(num_blocks + 1) // base)
        rows, words = _random_blocks(heads, FORMATS[kv], base, block_size)
        self.pool = _repeat(rows, repeats)
        self.scales = None if words is None else _repeat(words, repeats)
        shuffled = np.random.default_rng(0).permutation(np.arange(1, self.pool.shape[1]))
        self._blocks = shuffled.astype(np.int32)

    def tables(self, piece: Piece) -> jax.Array:
        """i32[S, B]: blocks of its own for each sequence, in random order from all of the pool."""
        width = -(-piece.context // self.block_size)
        return jnp.asarray(self._blocks[: piece.batch * width].reshape(piece.batch, width))

    def seconds(self, piece: Piece, implementation: Implementation, calls: int) -> float:
        """Of one `paged_attention`, in a chain of `calls`."""

        def step(
            q: jax.Array, pool: jax.Array, scales: jax.Array | None, batch: RaggedBatch
        ) -> jax.Array:
            return paged_attention(
                q,
                pool,
                scales,
                0,
                batch,
                sm_scale=self._heads.sm_scale,
                kv_dtype=FORMATS[self.kv],
                implementation=implementation,
            )

        batch = RaggedBatch(
            jnp.arange(piece.batch + 1, dtype=jnp.int32) * piece.rows,
            jnp.full(piece.batch, piece.context, jnp.int32),
            self.tables(piece),
        )
        q = queries(self._heads, piece)
        return chain_seconds(step, q, self.pool, self.scales, batch, calls=calls)


def _random_blocks(
    heads: Heads, kv: KVFormat, num_blocks: int, block_size: int
) -> tuple[jax.Array, jax.Array | None]:
    """Rows [P, KVH, T, width] of normal numbers as the pool has them, and their u32[P, KVH, T]."""
    shape = (num_blocks * block_size, heads.kv_heads, heads.head_dim)
    k, v = (jax.random.normal(jax.random.key(seed), shape, jnp.float32) for seed in (0, 1))
    width = kv.row(heads.head_dim, "gpu").width
    pool = jnp.zeros((1, 1, heads.kv_heads, block_size, width), kv.element)

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(num_blocks, block_size, *x.shape[1:]).swapaxes(1, 2)

    rows, words = kv_rows(k, v, pool, kv)
    return blocks(rows), None if words is None else blocks(words)


def _repeat(values: jax.Array, repeats: int) -> jax.Array:
    """[1, repeats * P, ...]: on the device, without a second array of that size."""

    @jax.jit
    def tile(values: jax.Array) -> jax.Array:
        many = jnp.broadcast_to(values[None], (repeats, *values.shape))
        return many.reshape(1, repeats * values.shape[0], *values.shape[1:])

    return tile(values)


def queries(heads: Heads, piece: Piece) -> jax.Array:
    """bf16[N, H, D]"""
    shape = (piece.batch * piece.rows, heads.num_heads, heads.head_dim)
    return jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)


class Pools:
    """Keeps one pool at a time: the largest leaves no room for another."""

    def __init__(self, heads: Heads):
        self._heads = heads
        self._kept: PagedPool | None = None

    def get(self, kv: str, block_size: int, num_blocks: int) -> PagedPool:
        kept = self._kept
        if kept is None or (kept.kv, kept.block_size) != (kv, block_size):
            self._kept = kept = None  # before the next one is made
            self._kept = kept = PagedPool(self._heads, kv, block_size, num_blocks)
        return kept


def measure_speed(
    recorder: Recorder, implementation: Implementation, limits: Limits, toy: bool
) -> None:
    """One record for each `Decode` and `Chunk`."""
    heads = Heads.of(toy)
    pools = Pools(heads)
    shared = [*decodes(toy), *chunks(toy)]
    shared_blocks = max(piece.num_blocks for piece in shared)

    def work(piece: Piece, num_blocks: int) -> Record:
        calls = num_calls(piece.floor_s(heads, limits), heads.chain_s)
        pool = pools.get(piece.kv, piece.block_size, num_blocks)
        seconds = pool.seconds(piece, implementation, calls)
        return facts(piece) | piece.record(heads, limits, seconds)

    for piece in shared:
        recorder.run(piece.name, lambda piece=piece: work(piece, shared_blocks))
    for piece in other_pools(toy):
        recorder.run(piece.name, lambda piece=piece: work(piece, piece.num_blocks))
