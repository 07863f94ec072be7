"""How large the pieces are that the GPU kernel works on, from what fits in shared memory.

Two warpgroups share each block of keys that is fetched: in a chunk they have different rows, in a
decode different keys. So much must be in flight that a multiprocessor's share of the bandwidth is
covered during the latency of memory (about 36 KB/us on an H200, for about 1 us), while another
stage is worked on: two stages of 32 KiB do, more is taken where it fits.

Keys are cut in splits of a fixed size, counted from key 0, so that a long context is worked on by
many multiprocessors (Flash-Decoding, Dao et al., 2023). Each leaves float32 partial results, which
are combined afterwards. A split is so long that writing and reading its result is little beside
reading its keys (3% of a decode's, at head size 128 and 16 bits), or shorter where a call has too
few tiles for all multiprocessors; and longer where all results would exceed `PARTIAL_BYTES`.
"""

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.kernel_shape import AttentionShape

TILE_ROWS = 64  # of a warpgroup's matrix product
SMEM_BYTES = 227 * 1024  # of a block, on Hopper
PARTIAL_BYTES = 32 << 20
MOST_STAGES = 4
_SPLIT = {True: 1024, False: 4096}  # keys; of decodes and chunks, if tiles are many
_SHORTEST = 8  # a split may be so many times shorter
MULTIPROCESSORS = 132  # of an H200
_INVARIANT_SPLIT = 4096
_OTHER_BYTES = 4096  # more than barriers and alignment take


@dataclasses.dataclass(frozen=True)
class GpuTileSizes:
    """Sizes of the pieces of one kind of call.

    Attributes:
      warpgroups: that compute, 1 or 2; one more fetches.
      keys: of a warpgroup in a block, 64 or 128.
      stages: blocks of keys in flight or at work.
      split: keys after which another item of work begins; a multiple of what is fetched at once.
    """

    warpgroups: int
    keys: int
    stages: int
    split: int


@dataclasses.dataclass(frozen=True)
class GpuTiles:
    """Sizes of the pieces that the GPU kernel works on, for decodes and for chunks."""

    decode: GpuTileSizes
    chunk: GpuTileSizes


@dataclasses.dataclass(frozen=True)
class GpuShape(AttentionShape):
    """With what it means for the GPU kernel."""

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Of the operands of both products: Hopper converts fp8 to float16 only."""
        half = self.kv.k in (jnp.float16, jnp.float8_e4m3fn)
        return jnp.dtype(jnp.float16 if half else jnp.bfloat16)

    @property
    def is_converted(self) -> bool:
        """The pool's elements become those of `compute_dtype` on the way to the products."""
        return self.kv.element.itemsize == 1

    @property
    def piece(self) -> int:
        """Lanes of a row that pass through registers at once."""
        return math.gcd(self.row.k, self.kv.lanes(self.kv.v, self.head_dim), 64)

    def swizzled(self, sizes: GpuTileSizes) -> int:
        """Columns of a tile of the products' operands, in which both sides are alike.

        The second product takes whole tiles of keys, and what is converted is stored in pieces.
        """
        return math.gcd(self.product_keys(sizes), self.piece)

    def product_keys(self, sizes: GpuTileSizes) -> int:
        """Keys of one product: half a block where a wide accumulator leaves few registers."""
        is_tight = self.is_converted and self.head_dim > 128
        return sizes.keys // 2 if is_tight else sizes.keys

    def fetched_keys(self, sizes: GpuTileSizes, *, is_decode: bool) -> int:
        return sizes.keys * (sizes.warpgroups if is_decode else 1)

    def row_group(self, sizes: GpuTileSizes, *, is_decode: bool) -> int:
        """Rows of a token and KV head: padded where a tile could not begin at a multiple of 8."""
        padded = -(-self.group // 8) * 8
        rows = TILE_ROWS * sizes.warpgroups
        return padded if is_decode or self.token_alignment * self.group > rows else self.group

    @property
    def token_alignment(self) -> int:
        """Tokens after which the rows of a chunk reach a multiple of 8."""
        return 8 // math.gcd(self.group, 8)

    def smem_bytes(self, sizes: GpuTileSizes, *, is_decode: bool) -> int:
        """Shared memory of one program."""
        fetched = self.fetched_keys(sizes, is_decode=is_decode)
        ring = sizes.stages * fetched * (self.row_bytes + self.scale_bytes)
        converted = sizes.keys * 2 * self.head_dim * 2 if self.is_converted else 0
        own = converted + TILE_ROWS * self.head_dim * 4 + TILE_ROWS * 4
        return ring + sizes.warpgroups * own + _OTHER_BYTES


def best_tiles(
    shape: GpuShape, num_rows: int, num_seqs: int, *, batch_invariant: bool = False
) -> GpuTiles:
    """Sizes for calls of `num_rows` rows of `num_seqs` sequences."""

    def sizes(forms: tuple[tuple[int, int], ...], *, is_decode: bool) -> GpuTileSizes:
        warpgroups, keys, stages = _largest(shape, forms, is_decode=is_decode)
        chosen = GpuTileSizes(warpgroups, keys, stages, 0)
        tokens = num_seqs if is_decode else num_rows
        rows = tokens * shape.row_group(chosen, is_decode=is_decode)
        if batch_invariant:  # must not depend on the number of rows
            split = _INVARIANT_SPLIT
        else:
            split = _split(shape, chosen, rows, is_decode=is_decode)
        fetched = shape.fetched_keys(chosen, is_decode=is_decode)
        return dataclasses.replace(chosen, split=-(-split // fetched) * fetched)

    # More keys or rows would not leave enough registers.
    chunk_forms = ((1, 64),) if shape.head_dim > 128 else ((2, 64),)
    if not shape.is_converted and shape.head_dim <= 128:
        chunk_forms = ((2, 128), *chunk_forms)
    return GpuTiles(
        decode=sizes(((2, 64), (1, 64)), is_decode=True),
        chunk=sizes(chunk_forms, is_decode=False),
    )


def _largest(
    shape: GpuShape, forms: tuple[tuple[int, int], ...], *, is_decode: bool
) -> tuple[int, int, int]:
    """Warpgroups and keys of the first form of which two stages fit, and the stages that do."""
    for warpgroups, keys in forms:
        for stages in range(MOST_STAGES, 1, -1):
            sizes = GpuTileSizes(warpgroups, keys, stages, 0)
            if shape.smem_bytes(sizes, is_decode=is_decode) <= SMEM_BYTES:
                return warpgroups, keys, stages
    raise NotImplementedError(f"head size {shape.head_dim} with {shape.kv} does not fit")


def _split(shape: GpuShape, sizes: GpuTileSizes, rows: int, *, is_decode: bool) -> int:
    """Keys of a split for a call of so many rows; see the head of this file."""
    tile = shape.row_group(sizes, is_decode=True) if is_decode else TILE_ROWS * sizes.warpgroups
    programs = max(1, rows // tile) * shape.kv_heads
    split = least = _SPLIT[is_decode]
    while split > least // _SHORTEST and programs * (least // split) < MULTIPROCESSORS:
        split //= 2
    parts = sizes.warpgroups if is_decode else 1
    one = rows * parts * shape.kv_heads * shape.head_dim * 4
    most = max(1, PARTIAL_BYTES // one)
    return max(split, -(-shape.num_keys // most))
