"""Paged attention on TPU: a batch laid out for the kernel, its calls, the result put back."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.tpu_call import call_kernel
from pallas_kernels.tpu_columns import LANES
from pallas_kernels.tpu_layout import TpuLayout, lay_out
from pallas_kernels.tpu_tiles import (
    KernelShape,
    TpuTiles,
    best_tiles,
    chip,
    most_table_entries,
    sublanes,
)

ELEMENTS = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4")


def unsupported(
    kv_format: KVFormat,
    storage: jnp.dtype,
    block_size: int,
    num_seqs: int,
    table_width: int,
) -> str | None:
    """Why the kernel cannot serve such calls, with what to change; None if it can."""
    if not {kv_format.k.name, kv_format.v.name} <= set(ELEMENTS) or storage != kv_format.element:
        return f"a pool of {kv_format} stored as {storage}: it reads {', '.join(ELEMENTS)}"
    need = sublanes(kv_format.element)
    if block_size % need:
        return f"block_size {block_size}: with {kv_format} it must be a multiple of {need}"
    most = most_table_entries()
    if num_seqs * table_width > most:
        return (
            f"block tables of {num_seqs} sequences and {table_width} blocks: {most} entries fit in "
            f"the chip's scalar memory; raise block_size ({block_size}), or lower the most "
            f"sequences or their length (now {table_width * block_size} tokens)"
        )
    return None


def unsupported_layout(kv_format: KVFormat, block_size: int) -> str | None:
    """Why XLA would keep the pool in another layout than the kernel reads; None if it does not.

    Copying all scales into another layout and back would be part of every step.
    """
    if kv_format.has_scales and block_size % LANES:
        return f"block_size {block_size}: with scales it must be a multiple of {LANES}"
    return None


def plan_tpu_attention(
    batch: RaggedBatch,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    pool: jax.Array,
    kv_format: KVFormat,
    *,
    batch_invariant: bool = False,
    tiles: TpuTiles | None = None,
) -> TpuLayout:
    """What `tpu_attention` needs to know of a batch; the same for all layers of a model."""
    shape = KernelShape.of(num_heads, head_dim, pool, kv_format, batch)
    tiles = tiles or best_tiles(shape, chip())
    return lay_out(batch, num_rows, shape, tiles, batch_invariant=batch_invariant)


def tpu_attention(
    q: jax.Array,
    new: jax.Array | None,
    pool: jax.Array,
    scales: jax.Array | None,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    kv_format: KVFormat,
    sm_scale: float,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    batch_invariant: bool = False,
    layout: TpuLayout | None = None,
    tiles: TpuTiles | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of a ragged batch; with `new` it also writes this step's keys and values.

    Two calls of one kernel: decodes as tiles of one token, chunks as taller ones. Batch-invariant
    calls take everything as chunks, so that a row meets one tile shape.

    Args:
      q: [N, H, D]. pool: [Lg, P, KVH, T, width], rows as `kv_format` says.
      new: [N, KVH, width] in the pool's dtype, or None where the pool has them already.
      scales: u32[Lg, P, KVH, T] of quantized pools, this step's already written.
      window: see `paged_attention`. sinks: [H].
      layout: `plan_tpu_attention` of the batch; None: it is made here.
      tiles: None takes what the cost model says (`tpu_tiles`).
      interpret: what `pallas_call` takes.

    Returns:
      f32[N, H, D], zero in padding rows, and the pool.
    """
    num_rows, num_heads, head_dim = q.shape
    shape = KernelShape.of(num_heads, head_dim, pool, kv_format, batch)
    tiles = tiles or best_tiles(shape, chip())
    if layout is None:
        layout = lay_out(batch, num_rows, shape, tiles, batch_invariant=batch_invariant)
    parts = (num_rows, shape.kv_heads, shape.group, head_dim)
    q = (q.astype(jnp.float32) * sm_scale).astype(shape.compute_dtype).reshape(parts)
    out = jnp.zeros(parts, jnp.float32)
    for part, sizes in ((layout.decode, tiles.decode), (layout.chunk, tiles.chunk)):
        if part is None:
            continue

        def compute(pool: jax.Array, part=part, sizes=sizes) -> tuple[jax.Array, jax.Array | None]:
            found, written = call_kernel(
                q,
                new,
                pool,
                scales,
                layer,
                batch,
                part,
                shape,
                sizes,
                is_decode=part is layout.decode,
                batch_invariant=batch_invariant,
                soft_cap=soft_cap,
                window=window,
                sinks=sinks,
                interpret=interpret,
            )
            return found, None if new is None else written

        def skip(pool: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            return jnp.zeros(parts, jnp.float32), None if new is None else pool

        found, written = lax.cond(part.tiles.count > 0, compute, skip, pool)
        pool = pool if written is None else written
        out = jnp.where(part.chosen[:, None, None, None], found, out)
    return out.reshape(num_rows, num_heads, head_dim), pool
