"""What the TPU kernel works on: rows laid out for its DMAs, and its work list."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.ragged_rows import (
    AlignedRows,
    Tiles,
    align_rows,
    decodes_and_chunks,
    list_tiles,
    most_rows,
    of_rows,
)
from pallas_kernels.scale_pages import ScalePages, touched_pages
from pallas_kernels.tpu_tiles import KernelShape, TileSizes, TpuTiles


class CallLayout(NamedTuple):
    """What one call of the kernel works on.

    Attributes:
      rows: of queries and results. new: of this step's keys and values; None for decodes, whose
        only rows lie like their queries.
      tiles: the work list.
      chosen: bool[N], rows of the batch that this call computes.
    """

    rows: AlignedRows
    new: AlignedRows | None
    tiles: Tiles
    chosen: jax.Array


class TpuLayout(NamedTuple):
    """Both calls of the kernel; None for one that has nothing to do in any batch.

    `pages`: that get scales of this step, of quantized pools.
    """

    decode: CallLayout | None
    chunk: CallLayout | None
    pages: ScalePages | None


def lay_out(
    batch: RaggedBatch,
    num_rows: int,
    shape: KernelShape,
    tiles: TpuTiles,
    *,
    batch_invariant: bool,
) -> TpuLayout:
    """Lay out a batch of `num_rows` rows; its block tables are not looked at."""
    decodes, chunks = decodes_and_chunks(batch, num_rows, batch_invariant=batch_invariant)
    decode = chunk = None
    if decodes is not None:
        decode = _decode_layout(batch, num_rows, decodes)
    if chunks is not None:
        chunk = _chunk_layout(batch, num_rows, chunks, shape, tiles.chunk, batch_invariant)
    has_scales = shape.kv.has_scales
    pages = touched_pages(batch, num_rows, shape.block_size) if has_scales else None
    return TpuLayout(decode, chunk, pages)


def _decode_layout(batch: RaggedBatch, num_rows: int, chosen: jax.Array) -> CallLayout:
    seqs = min(len(chosen), num_rows)
    nothing = jnp.zeros_like(batch.context_lens)
    rows = align_rows(batch, num_rows, chosen, nothing, alignment=1, front=0, size=seqs)
    return CallLayout(
        rows, None, list_tiles(batch, chosen, 1, seqs), of_rows(batch, num_rows, chosen)
    )


def _chunk_layout(
    batch: RaggedBatch,
    num_rows: int,
    chosen: jax.Array,
    shape: KernelShape,
    sizes: TileSizes,
    batch_invariant: bool,
) -> CallLayout:
    """A page of `new` is free before and behind all, so that its ends are read as whole pages."""
    seqs = min(len(chosen), num_rows if batch_invariant else num_rows // 2)
    align, page = shape.token_alignment, shape.block_size
    old = batch.context_lens - jnp.diff(batch.query_start)
    rows = align_rows(
        batch,
        num_rows,
        chosen,
        jnp.zeros_like(old),
        alignment=align,
        front=0,
        size=most_rows(num_rows, seqs, align, with_offset=False) + sizes.tile,
    )
    new = align_rows(
        batch,
        num_rows,
        chosen,
        old % shape.alignment,
        alignment=shape.alignment,
        front=page,
        size=2 * page + most_rows(num_rows, seqs, shape.alignment, with_offset=True),
    )
    work = list_tiles(batch, chosen, sizes.tile, num_rows // sizes.tile + seqs)
    return CallLayout(rows, new, work, of_rows(batch, num_rows, chosen))
