"""Random ragged batches for the Pallas kernels, full of NaN where nobody may read."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import RaggedBatch
from pallas_kernels.kv_format import KVFormat, Row, plain_format
from pallas_kernels.reference import reference_attention

Lengths = list[tuple[int, int]]  # of each sequence: tokens of this step, tokens of the context
NUM_LAYERS, LAYER = 2, 1
NUM_SEQS = 5


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a batch's arrays depend on; a kernel's own adds all that its program depends on.

    `kv` is never rotated: kernels get their queries rotated, and do not know of it.
    """

    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    platform: str = "cpu"  # whose rows the pool has
    block_size: int = 8
    kv: KVFormat = dataclasses.field(default_factory=lambda: plain_format("float32"))
    soft_cap: float | None = None
    with_sinks: bool = False
    batch_invariant: bool = False
    num_rows: int = 72
    table_width: int = 12
    num_blocks: int = 40

    @property
    def row(self) -> Row:
        return self.kv.row(self.head_dim, self.platform)

    @property
    def sinks(self) -> np.ndarray | None:
        return np.linspace(-1, 2, self.num_heads).astype(np.float32) if self.with_sinks else None

    def scaled(self, q: np.ndarray) -> np.ndarray:
        """f64 of queries as the kernel multiplies them, times the softmax scale."""
        raise NotImplementedError


@dataclasses.dataclass
class Case:
    """A batch of `setup`'s shapes.

    Attributes:
      q: f32[N, H, D]. new: [N, KVH, width].
      before, after: [Lg, P, KVH, T, width], the pool without and with this step's rows.
      scales: u32[Lg, P, KVH, T], this step's already written; or None.
    """

    setup: Setup
    q: np.ndarray
    new: np.ndarray
    before: np.ndarray
    after: np.ndarray
    scales: np.ndarray | None
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    window: int | None

    @property
    def num_rows(self) -> int:
        """Rows that belong to a sequence."""
        return int(self.query_start[-1])

    @property
    def batch(self) -> RaggedBatch:
        arrays = (self.query_start, self.context_lens, self.block_tables)
        return RaggedBatch(*map(jnp.asarray, arrays))

    def oracle(self) -> np.ndarray:
        """f64[rows, H, D] from the queries and values that the kernel multiplies."""
        return reference_attention(
            self.setup.scaled(self.q),
            self.after,
            LAYER,
            self.query_start,
            self.context_lens,
            self.block_tables,
            kv_format=self.setup.kv,
            scales=self.scales,
            sm_scale=1.0,
            soft_cap=self.setup.soft_cap,
            window=self.window,
            sinks=self.setup.sinks,
        )[: self.num_rows]


def bits(x: np.ndarray) -> np.ndarray:
    """The array as unsigned integers: NaNs compare by their patterns."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def make_case(setup: Setup, seed: int, lengths: Lengths, window: int | None = None) -> Case:
    """A random batch of `lengths`; whatever nobody may read is NaN, in many patterns.

    That is: other layers, other blocks (the null block, too), slots behind a context's end, lanes
    of new rows that are padding rows, blocks that lie before every window, and in `before` the
    slots of this step.
    """
    rng = np.random.default_rng(seed)
    size = setup.block_size
    tables = _tables(rng, setup, lengths, window)
    pool_shape = (NUM_LAYERS, setup.num_blocks, setup.kv_heads, size, setup.row.width)
    before, after = (_poison(rng, pool_shape, setup) for _ in range(2))
    after[:] = before
    new = _poison(rng, (setup.num_rows, setup.kv_heads, setup.row.width), setup)
    scales = None
    if setup.kv.has_scales:
        scales = np.full(pool_shape[:4], 0x7FC07FC0, np.uint32)  # both of them NaN
    row = 0
    for s, (query, context) in enumerate(lengths):
        for position in range(context):
            block, slot = tables[s, position // size], position % size
            if block == 0:
                continue
            values = _values(rng, setup)
            after[LAYER, block, :, slot] = values
            if scales is not None:
                scales[LAYER, block, :, slot] = _scale_words(rng, setup)
            if position < context - query:
                before[LAYER, block, :, slot] = values
            else:
                new[row] = values
                row += 1
    query_lens = [query for query, _ in lengths] + [0] * (NUM_SEQS - len(lengths))
    contexts = [context for _, context in lengths] + [0] * (NUM_SEQS - len(lengths))
    return Case(
        setup,
        rng.standard_normal((setup.num_rows, setup.num_heads, setup.head_dim)).astype(np.float32),
        new,
        before,
        after,
        scales,
        np.cumsum([0, *query_lens]).astype(np.int32),
        np.array(contexts, np.int32),
        tables,
        window,
    )


def random_lengths(rng: np.random.Generator, setup: Setup) -> Lengths:
    """Up to five sequences within the limits of the programs on rows, pages and blocks."""
    rows, blocks, lengths = setup.num_rows, setup.num_blocks - 1, []
    for _ in range(rng.integers(1, NUM_SEQS + 1)):
        most = min(blocks, setup.table_width) * setup.block_size
        longest = min(rows, most, setup.num_rows * 5 // 9)
        query = int(rng.choice([0, 1, 1, rng.integers(0, longest + 1)]))
        query = min(query, rows, most)
        old = int(rng.choice([0, rng.integers(0, most - query + 1)])) if query else 0
        lengths.append((query, query + old))
        rows -= query
        blocks -= -(-(query + old) // setup.block_size)
    return lengths


def chunked(
    whole: Case,
    queries: list[np.ndarray],
    chunks: list[tuple[int, int, int]],
    window: int | None,
) -> Case:
    """A step that takes `chunks` (sequence, first position, one past the last) of `whole`.

    `queries`: [context, H, D] of each sequence.
    """
    size = whole.setup.block_size
    padding = [0] * (NUM_SEQS - len(chunks))
    lengths = [end - start for _, start, end in chunks]
    q, new, row = np.zeros_like(whole.q), np.zeros_like(whole.new), 0
    for s, start, end in chunks:
        positions = np.arange(start, end)
        rows = slice(row, row + end - start)
        q[rows] = queries[s][start:end]
        blocks = whole.block_tables[s, positions // size]
        new[rows] = whole.after[LAYER, blocks, :, positions % size]
        row += end - start
    return dataclasses.replace(
        whole,
        q=q,
        new=new,
        before=whole.after,
        query_start=np.cumsum([0, *lengths, *padding]).astype(np.int32),
        context_lens=np.array([*(end for _, _, end in chunks), *padding], np.int32),
        block_tables=whole.block_tables[[*(s for s, _, _ in chunks), *padding]],
        window=window,
    )


def _tables(
    rng: np.random.Generator, setup: Setup, lengths: Lengths, window: int | None
) -> np.ndarray:
    """i32[S, B]: random blocks for the pages that some row sees, the null block for others."""
    ids = iter(rng.permutation(np.arange(1, setup.num_blocks)))
    tables = np.zeros((NUM_SEQS, setup.table_width), np.int32)
    for s, (query, context) in enumerate(lengths):
        first = 0 if window is None else max(0, context - query - window + 1)
        for page in range(first // setup.block_size, -(-context // setup.block_size)):
            tables[s, page] = next(ids)
    return tables


def _poison(rng: np.random.Generator, shape: tuple[int, ...], setup: Setup) -> np.ndarray:
    """NaNs of random patterns; of integers, which have none, random ones (their scales are NaN)."""
    dtype = setup.kv.element
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.integers(0, 256, shape, np.uint8).view(dtype)
    base = bits(np.full((), np.nan, dtype))
    sign = np.array(1 << (8 * dtype.itemsize - 1), base.dtype)
    # On CPU, a bfloat16 that is moved keeps the sign of a NaN, but not the rest of its pattern.
    payload = rng.integers(0, 8, shape).astype(base.dtype) if dtype.itemsize == 4 else 0
    flipped = np.where(rng.random(shape) < 0.5, sign, 0)
    return (base | payload | flipped).astype(base.dtype).view(dtype)


def _values(rng: np.random.Generator, setup: Setup) -> np.ndarray:
    """[KVH, width], K and V of a token, zero behind what D elements take."""
    form, row = setup.kv, setup.row
    values = np.zeros((setup.kv_heads, row.width), form.element)
    for first, dtype in ((0, form.k), (row.k, form.v)):
        lanes = form.lanes(dtype, setup.head_dim)
        shape = (setup.kv_heads, lanes)
        if jnp.issubdtype(form.element, jnp.integer):
            elements = rng.integers(0, 256, shape, np.uint8).view(form.element)
        else:
            elements = rng.standard_normal(shape).astype(np.float32).astype(form.element)
        values[:, first : first + lanes] = elements
    return values


def _scale_words(rng: np.random.Generator, setup: Setup) -> np.ndarray:
    """u32[KVH]: scales with which a row's numbers are about 1."""
    words = np.zeros(setup.kv_heads, np.uint32)
    for dtype, shift in ((setup.kv.k, 16), (setup.kv.v, 0)):
        unit = {"int8": 0.01, "int4": 0.2}.get(dtype.name, 1.0)
        scale = (rng.uniform(0.5, 2, setup.kv_heads) * unit).astype(np.float32)
        words |= scale.view(np.uint32) >> np.uint32(16) << np.uint32(shift)
    return words
