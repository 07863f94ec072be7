"""Random ragged batches over a pool whose unused blocks are full of NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVFormat, RaggedBatch, storage_dtype, to_storage, write_kv


@dataclasses.dataclass
class RandomCase:
    q: np.ndarray  # f32[N, H, D]
    pool: np.ndarray  # f32[Lg, P, KVH, T, 2 * D]
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray

    @property
    def batch(self) -> RaggedBatch:
        return RaggedBatch(
            jnp.asarray(self.query_start),
            jnp.asarray(self.context_lens),
            jnp.asarray(self.block_tables),
        )

    @property
    def num_rows(self) -> int:
        """Rows that belong to a sequence."""
        return int(self.query_start[-1])


def random_case(
    seed: int,
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    num_layers: int = 2,
    padding_rows: int = 0,
    padding_seqs: int = 0,
) -> RandomCase:
    """A batch with one sequence per `(query length, context length)` of `lengths`.

    Every block outside the tables, and every slot behind a context's end, holds NaN.
    """
    rng = np.random.default_rng(seed)
    blocks = [-(-context // block_size) for _, context in lengths]
    table_width = max([*blocks, 1]) + 1
    num_blocks = 1 + sum(blocks) + 3
    ids = rng.permutation(np.arange(1, num_blocks))
    pool = np.full((num_layers, num_blocks, kv_heads, block_size, 2 * head_dim), np.nan, np.float32)
    pool[:, 0] = 0.0
    tables = np.zeros((len(lengths) + padding_seqs, table_width), np.int32)
    used = 0
    for s, (_, context) in enumerate(lengths):
        tables[s, : blocks[s]] = ids[used : used + blocks[s]]
        used += blocks[s]
        for key in range(context):
            shape = (num_layers, kv_heads, 2 * head_dim)
            pool[:, tables[s, key // block_size], :, key % block_size] = rng.standard_normal(shape)
    query_lens = [query for query, _ in lengths] + [0] * padding_seqs
    query_start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_rows = int(query_start[-1]) + padding_rows
    return RandomCase(
        q=rng.standard_normal((num_rows, num_heads, head_dim)).astype(np.float32),
        pool=pool,
        query_start=query_start,
        context_lens=np.array([c for _, c in lengths] + [0] * padding_seqs, np.int32),
        block_tables=tables,
    )


def stored(
    case: RandomCase, form: KVFormat, platform: str = "cpu"
) -> tuple[jax.Array, jax.Array | None]:
    """The case's pool with rows as `form` and `platform` want them, and its scales.

    Where the case has NaN, elements or their scales are NaN.
    """
    *shape, both = case.pool.shape
    nothing = 77 if jnp.issubdtype(form.element, jnp.integer) else np.nan
    values = jnp.full((*shape, form.row(both // 2, platform).width), nothing, form.element)
    pool = to_storage(values, form.element, storage_dtype(form.element, "cpu"))
    scales = jnp.full(shape, np.uint32(0x7FC07FC0)) if form.has_scales else None
    for layer, rows in enumerate(case.pool):
        block, slot = np.nonzero(np.isfinite(rows).all((1, 3)))
        k, v = np.split(rows[block, :, slot], 2, axis=-1)
        places = (jnp.asarray(x.astype(np.int32)) for x in (block, slot))
        pool, scales = write_kv(
            *(pool, scales, layer, jnp.asarray(k), jnp.asarray(v), *places), kv_dtype=form
        )
    return pool, scales
