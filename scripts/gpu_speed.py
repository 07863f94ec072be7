"""Speed of the kernel: decodes against the copy bandwidth, prefill chunks against a product."""

import jax
import jax.numpy as jnp
import numpy as np
from gpu_records import Record, Recorder
from gpu_timing import Limits, chain_seconds, num_calls
from gpu_work import Chunk, Decode, Heads, Piece, facts

from pallas_kernels import Implementation, RaggedBatch, paged_attention

_BASE_BLOCKS = 512  # of random values, which a pool repeats


def decodes(toy: bool) -> list[Decode]:
    """In bfloat16 with small blocks, for one pool."""
    if toy:
        return [Decode(2, 64)]
    contexts, batches = (512, 4096, 32768), (1, 16, 64, 256)
    return [Decode(batch, context) for context in contexts for batch in batches]


def chunks(toy: bool) -> list[Chunk]:
    if toy:
        return [Chunk(24, 0)]
    return [Chunk(512, 0), Chunk(2048, 0), Chunk(8192, 0), Chunk(512, 8192), Chunk(512, 32768)]


def other_pools(toy: bool) -> list[Decode]:
    """Decodes over pools of other dtypes and block sizes."""
    if toy:
        return []
    narrow = [Decode(64, 4096, dtype, t) for dtype in ("float8_e4m3fn", "int8") for t in (16, 64)]
    return [Decode(64, 4096, block_size=64), *narrow]


class PagedPool:
    """A pool of one layer and `num_blocks` or a few more, all of random values.

    Attributes:
      pool: [1, P, KVH, T, 2 * D]. scales: f32[1, P, KVH, 2, T] or None.
    """

    def __init__(self, heads: Heads, dtype: str, block_size: int, num_blocks: int):
        self.dtype, self.block_size, self._heads = dtype, block_size, heads
        base = min(_BASE_BLOCKS, num_blocks + 1)  # with the null block
        repeats = -(-(num_blocks + 1) // base)
        rows = (base, heads.kv_heads, block_size, 2 * heads.head_dim)
        values, unit = jax.random.normal(jax.random.key(0), rows, jnp.float32), 1.0
        if dtype == "int8":
            values, unit = jnp.clip(jnp.round(values * 40), -127, 127), 1 / 40
        self.pool, self.scales = _repeat(values.astype(dtype), repeats), None
        if jnp.dtype(dtype).itemsize == 1:
            shape = (base, heads.kv_heads, 2, block_size)
            drawn = jax.random.uniform(jax.random.key(1), shape, jnp.float32, 0.5, 1.0)
            self.scales = _repeat(drawn * unit, repeats)
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
                implementation=implementation,
            )

        batch = RaggedBatch(
            jnp.arange(piece.batch + 1, dtype=jnp.int32) * piece.rows,
            jnp.full(piece.batch, piece.context, jnp.int32),
            self.tables(piece),
        )
        q = queries(self._heads, piece)
        return chain_seconds(step, q, self.pool, self.scales, batch, calls=calls)


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

    def get(self, dtype: str, block_size: int, num_blocks: int) -> PagedPool:
        kept = self._kept
        if kept is None or (kept.dtype, kept.block_size) != (dtype, block_size):
            self._kept = kept = None  # before the next one is made
            self._kept = kept = PagedPool(self._heads, dtype, block_size, num_blocks)
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
        pool = pools.get(piece.dtype, piece.block_size, num_blocks)
        seconds = pool.seconds(piece, implementation, calls)
        return facts(piece) | piece.record(heads, limits, seconds)

    for piece in shared:
        recorder.run(piece.name, lambda piece=piece: work(piece, shared_blocks))
    for piece in other_pools(toy):
        recorder.run(piece.name, lambda piece=piece: work(piece, piece.num_blocks))
