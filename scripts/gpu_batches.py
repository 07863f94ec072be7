"""Random ragged batches over a pool in which everything that nobody may read is NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NO_WINDOW, RaggedBatch
from pallas_kernels.kv_format import FORMATS, KVFormat, plain_format
from pallas_kernels.reference import reference_attention

POOLS: dict[str, KVFormat] = {
    **{name: kv for name, kv in FORMATS.items() if name != "float32"},
    "fp8 without scales": plain_format(jnp.float8_e4m3fn),
}
Lengths = list[tuple[int, int]]  # of each sequence: rows of this step, tokens of the context
NUM_LAYERS, LAYER = 2, 1


@dataclasses.dataclass(frozen=True)
class Program:
    """What one compiled program serves, with batches and windows of any kind.

    Attributes:
      pool: a name of `POOLS`. q_dtype: of queries and results.
      group: query heads a KV head.
      num_rows, num_seqs, most_tokens: rows, sequences, and tokens of a context at most.
    """

    pool: str
    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    q_dtype: str
    soft_cap: float | None = None
    with_sinks: bool = False
    batch_invariant: bool = False
    num_rows: int = 96
    num_seqs: int = 6
    most_tokens: int = 448
    is_toy: bool = False

    @property
    def name(self) -> str:
        parts = [
            f"{self.pool} q {self.q_dtype}",
            f"D {self.head_dim} group {self.group} T {self.block_size}",
            *(["soft cap"] if self.soft_cap else []),
            *(["sinks"] if self.with_sinks else []),
            *(["invariant"] if self.batch_invariant else []),
            *(["long"] if self.is_long else []),
        ]
        return ", ".join(parts)

    @property
    def kv(self) -> KVFormat:
        return POOLS[self.pool]

    @property
    def is_long(self) -> bool:
        """Whether contexts are so long that several programs of the kernel share one."""
        return self.most_tokens > 4096

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def table_width(self) -> int:
        return -(-self.most_tokens // self.block_size)

    @property
    def sinks(self) -> np.ndarray | None:
        return np.linspace(-1, 2, self.num_heads).astype(np.float32) if self.with_sinks else None

    def new_pool(self) -> np.ndarray:
        """[Lg, P, KVH, T, width], all NaN (of integers, which have none, large numbers)."""
        num_blocks = self.num_seqs * self.table_width + 1
        width = self.kv.row(self.head_dim, "gpu").width
        shape = (NUM_LAYERS, num_blocks, self.kv_heads, self.block_size, width)
        fill = 0x77 if jnp.issubdtype(self.kv.element, jnp.integer) else np.nan
        return np.full(shape, fill, self.kv.element)


@dataclasses.dataclass
class Batch:
    """A batch on the host.

    Attributes:
      q: [N, H, D] of values that bfloat16 and float16 hold, in the queries' dtype.
      pool: [Lg, P, KVH, T, width]. scales: u32[Lg, P, KVH, T] or None.
    """

    program: Program
    q: np.ndarray
    pool: np.ndarray
    scales: np.ndarray | None
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    window: int | None

    @property
    def rows(self) -> int:
        """Rows that belong to a sequence."""
        return int(self.query_start[-1])

    def arguments(self) -> tuple[jax.Array | RaggedBatch | None, ...]:
        """Queries, pool, scales, batch and window on the device."""
        meta = (self.query_start, self.context_lens, self.block_tables)
        return (
            jnp.asarray(self.q),
            jnp.asarray(self.pool),
            None if self.scales is None else jnp.asarray(self.scales),
            RaggedBatch(*map(jnp.asarray, meta)),
            jnp.int32(NO_WINDOW if self.window is None else self.window),
        )

    def oracle(self) -> np.ndarray:
        """f64[rows, H, D] of the same queries and the pool's own values."""
        return reference_attention(
            self.q.astype(np.float64),
            self.pool,
            LAYER,
            self.query_start,
            self.context_lens,
            self.block_tables,
            kv_format=self.program.kv,
            scales=self.scales,
            sm_scale=self.program.head_dim**-0.5,
            soft_cap=self.program.soft_cap,
            window=self.window,
            sinks=self.program.sinks,
        )[: self.rows]

    def only(self, sequence: int, last_rows: int) -> "Batch":
        """The last rows of one sequence alone, over the same pool."""
        start = int(self.query_start[sequence + 1]) - last_rows
        seqs, length = self.program.num_seqs, self.context_lens[sequence]
        q, tables = np.zeros_like(self.q), np.zeros_like(self.block_tables)
        q[:last_rows] = self.q[start : start + last_rows]
        tables[0] = self.block_tables[sequence]
        return dataclasses.replace(
            self,
            q=q,
            query_start=np.array([0] + [last_rows] * seqs, np.int32),
            context_lens=np.array([length] + [0] * (seqs - 1), np.int32),
            block_tables=tables,
        )


def make_batch(
    program: Program, rng: np.random.Generator, lengths: Lengths, window: int | None
) -> Batch:
    """A batch of `lengths`; blocks that lie before every row's window are the null block."""
    padding = [(0, 0)] * (program.num_seqs - len(lengths))
    rows, contexts = (np.array(column) for column in zip(*lengths, *padding, strict=True))
    pool, scales = program.new_pool(), None
    if program.kv.has_scales:
        scales = np.full(pool.shape[:4], 0x7FC07FC0, np.uint32)  # NaN, all of them
    tables = np.zeros((program.num_seqs, program.table_width), np.int32)
    free = iter(rng.permutation(np.arange(1, pool.shape[1])))
    for sequence, (own_rows, context) in enumerate(lengths):
        first = 0 if window is None else max(0, context - own_rows - window + 1)
        for page in range(first // program.block_size, -(-context // program.block_size)):
            tables[sequence, page] = next(free)
        position = np.arange(first // program.block_size * program.block_size, context)
        blocks = tables[sequence, position // program.block_size]
        slots = position % program.block_size
        size = (len(position), program.kv_heads)
        pool[LAYER, blocks, :, slots] = _values(program.kv, rng, (*size, pool.shape[-1]))
        if scales is not None:
            scales[LAYER, blocks, :, slots] = _scale_words(program.kv, rng, size)
    shape = (program.num_rows, program.num_heads, program.head_dim)
    # Rounded to what every product's operands can hold, float16's exponents included.
    q = rng.standard_normal(shape).astype(np.float32).astype(jnp.bfloat16)
    return Batch(
        program,
        q.astype(jnp.dtype(program.q_dtype)),
        pool,
        scales,
        np.cumsum([0, *rows]).astype(np.int32),
        contexts.astype(np.int32),
        tables,
        window,
    )


def _values(kv: KVFormat, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random elements of a pool; of integers all bytes."""
    if jnp.issubdtype(kv.element, jnp.integer):
        return rng.integers(0, 256, shape, np.uint8).view(kv.element)
    return rng.standard_normal(shape).astype(np.float32).astype(kv.element)


def _scale_words(kv: KVFormat, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """u32 words of scales with which a row's numbers are about 1."""
    words = np.zeros(shape, np.uint32)
    for dtype, shift in ((kv.k, 16), (kv.v, 0)):
        unit = {"int8": 0.01, "int4": 0.15}.get(dtype.name, 1.0)
        scale = (rng.uniform(0.5, 2, shape) * unit).astype(np.float32)
        words |= scale.view(np.uint32) >> np.uint32(16) << np.uint32(shift)
    return words
