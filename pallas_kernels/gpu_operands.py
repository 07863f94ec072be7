"""Names for what the GPU kernel is compiled for and works with."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu_tiles import GpuShape, GpuTileSizes


@dataclasses.dataclass(frozen=True)
class Static:
    """What is the same for all items of a call.

    Attributes:
      group: rows of a token and KV head.
      programs: that share the work.
      is_simulated: in interpret mode, which has no tensor cores and no register layouts.
    """

    shape: GpuShape
    sizes: GpuTileSizes
    is_decode: bool
    group: int
    sm_scale: float
    soft_cap: float | None
    programs: int
    is_simulated: bool

    @property
    def fetched(self) -> int:
        """Keys of a block."""
        return self.shape.fetched_keys(self.sizes, is_decode=self.is_decode)

    @property
    def shift(self) -> float:
        """Probabilities are multiplied by 2**shift, and so are their sums.

        float16 has few small numbers, which products with the scales of values would be.
        """
        return 8.0 if self.shape.compute_dtype == jnp.float16 else 0.0

    @property
    def piece(self) -> int:
        """Keys that one copy brings: a page, or the part of it that belongs to the block."""
        return min(self.shape.block_size, self.fetched)

    @property
    def copies(self) -> int:
        """Copies of a block, words of scales included."""
        return self.fetched // self.piece * (2 if self.shape.kv.has_scales else 1)


class Refs(NamedTuple):
    """Arguments of the kernel: inputs, outputs, buffers, barriers.

    Attributes:
      items: i32[most items, 8]. count, window, layer: i32[1]. tables: i32[S, B].
      q: [KVH, rows, D], compute dtype. pool: [Lg, P, KVH, T, width].
      scales: u32[Lg, P, KVH, T], or None.
      out: f32[parts, KVH, rows, D]. lse: f32[parts, KVH, rows], base 2; see `gpu_attention`.
      q_tiles: [64, D], compute dtype, and out_tiles: f32[64, D], in the same memory: one of a
        warpgroup each.
      lse_tile: f32[warpgroups, 64].
      ring: [stages, keys, width], pool dtype. words: u32[stages, keys], scales; or None.
      converted: [keys, 2 * D], compute dtype, one a warpgroup; or None.
      q_there: barriers, one a warpgroup. filled, free: one a stage.
      cleaned: barrier of all warpgroups that compute.
    """

    items: Any
    count: Any
    window: Any
    layer: Any
    tables: Any
    q: Any
    pool: Any
    scales: Any
    out: Any
    lse: Any
    q_tiles: Any
    out_tiles: Any
    lse_tile: Any
    ring: Any
    words: Any
    converted: Any
    q_there: Any
    filled: Any
    free: Any
    cleaned: Any


class Item(NamedTuple):
    """An item of work: scalars. The rest of its record is read when needed: registers are few.

    Attributes:
      number: among all items, heads counted.
      position, end: see `gpu_layout`. first: first key that some row of the tile sees.
      start, stop: numbers of its blocks of keys among all that the program has.
      offset: from such a number to the block's place in the sequence.
    """

    number: Any
    position: Any
    end: Any
    first: Any
    start: Any
    stop: Any
    offset: Any


def tile_and_head(s: Static, number: Any) -> tuple[Any, Any]:
    """Row of `items`, and KV head. Heads of a row follow each other, as their pages do."""
    heads = jnp.int32(s.shape.kv_heads)
    return lax.div(number, heads), lax.rem(number, heads)
