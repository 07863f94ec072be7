"""How large the pieces are that the TPU kernel works on: a cost model, not a table.

A fetch must be large enough that the bytes in flight cover the latency of memory:

    bytes of a fetch >= latency * bandwidth

A tile of rows does `4 * rows * D` FLOPs with the K and V of a key. A prefill tile is made so tall
that the products take as long as the fetches (Williams et al., "Roofline", CACM 52(4), 2009):

    rows >= FLOP/s / bandwidth * bytes of a row / (4 * D)

but a tall tile of a causal chunk also multiplies more keys that no row of it sees, and so does a
wide product. Among the tiles whose chunk of 512 tokens costs at most `MOST_PADDING` times its
unmasked products, the shortest that reaches the roofline is taken, else the tallest. Decodes are
tiles of one token: they are bound by memory, and padding costs them nothing. All of it must fit in
half of VMEM.

Facts of the chip (bandwidth, FLOP/s, VMEM, SMEM) are JAX's own, `pltpu.get_tpu_info`.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kernel_shape import AttentionShape
from pallas_kernels.tpu_columns import LANES, Columns, kv_columns

LATENCY_S = 2e-6  # from the start of a DMA to its bytes in VMEM, rounded up
CHUNK = 512
MOST_PADDING = 1.3
_VMEM_SHARE, _SMEM_SHARE = 0.5, 0.5  # of what a core has; the rest is the compiler's


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Sizes of the pieces of one kind of call.

    Attributes:
      tile: tokens of a tile.
      pages: pages of a fetch.
      keys: keys of one matrix product; divides `pages * block_size`, and is a multiple of the block
        size for quantized pools.
    """

    tile: int
    pages: int
    keys: int


@dataclasses.dataclass(frozen=True)
class TpuTiles:
    """Sizes of the pieces that the TPU kernel works on, for decodes and for chunks."""

    decode: TileSizes
    chunk: TileSizes


@dataclasses.dataclass(frozen=True)
class KernelShape(AttentionShape):
    """With what it means for the TPU kernel."""

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Of the operands of both products; sums are float32."""
        return jnp.dtype(jnp.float32 if self.kv.k == jnp.float32 else jnp.bfloat16)

    @property
    def columns(self) -> tuple[Columns, Columns]:
        """Of both products; as wide as q and as the result."""
        return kv_columns(self.kv, self.row)

    @property
    def alignment(self) -> int:
        """Rows of a sublane tile of the pool."""
        return sublanes(self.kv.element)

    def row_group(self, *, is_decode: bool) -> int:
        """Rows of a token and KV head: a decode's fill a sublane tile, others share them."""
        unit = sublanes(self.compute_dtype)
        return -(-self.group // unit) * unit if is_decode else self.group

    @property
    def token_alignment(self) -> int:
        """Tokens after which the rows of a prefill tile reach a whole sublane tile."""
        unit = sublanes(self.compute_dtype)
        return unit // math.gcd(self.group, unit)


def sublanes(dtype: jnp.dtype) -> int:
    """Rows of a tile of VMEM."""
    return 32 // jnp.dtype(dtype).itemsize


def chip() -> pltpu.TpuInfo:
    """The chip that is compiled for; where there is none (interpret mode), a v5e."""
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)


def most_table_entries() -> int:
    """Entries of the block tables of a step that fit in SMEM."""
    return int(chip().smem_capacity_bytes * _SMEM_SHARE) // 4


def best_tiles(shape: KernelShape, info: pltpu.TpuInfo) -> TpuTiles:
    """What the cost model says."""
    return TpuTiles(decode_sizes(shape, info), chunk_sizes(shape, info))


def decode_sizes(shape: KernelShape, info: pltpu.TpuInfo) -> TileSizes:
    return _fit(shape, info, 1, is_decode=True)


def chunk_sizes(shape: KernelShape, info: pltpu.TpuInfo) -> TileSizes:
    """Sizes of prefill tiles, and of all tiles of batch-invariant calls."""
    unit = shape.token_alignment
    keys = _product_keys(shape)
    candidates = [unit << n for n in range(10) if unit << n <= max(unit, CHUNK)]
    padded = {tile: padding(tile, keys, CHUNK) for tile in candidates}
    least = min(padded.values())
    candidates = [t for t in candidates if padded[t] <= max(MOST_PADDING, least)]
    tall = [t for t in candidates if t * shape.group >= _roofline_rows(shape, info)]
    tile = tall[0] if tall else candidates[-1]
    while tile > unit and _vmem(shape, TileSizes(tile, _unit_pages(shape), keys)) > _budget(info):
        tile //= 2
    return _fit(shape, info, tile, is_decode=False)


def padding(tile: int, keys: int, chunk: int) -> float:
    """Products done over products needed, for a prompt of `chunk` tokens from an empty cache."""
    done = sum(
        tile * -(-min(first + tile, chunk) // keys) * keys for first in range(0, chunk, tile)
    )
    return done / (chunk * (chunk + 1) / 2)


def vmem_limit(shape: KernelShape, sizes: TileSizes, info: pltpu.TpuInfo) -> int:
    """Bytes of VMEM to ask for: what the kernel declares, and as much again for its temporaries.

    Raises:
      NotImplementedError: it does not fit.
    """
    scores = 8 * max(sizes.tile * shape.group, 16) * sizes.keys * 4
    most = int(info.vmem_capacity_bytes * 0.9)
    need = _vmem(shape, sizes)
    if need > most:
        raise NotImplementedError(
            f"{sizes} for {shape} takes {need} bytes of VMEM and the chip has {most} for it; lower "
            "the block size, or give smaller tpu_tiles"
        )
    return min(most, 2 * need + scores + (4 << 20))


def _roofline_rows(shape: KernelShape, info: pltpu.TpuInfo) -> float:
    flops_per_byte = info.bf16_ops_per_second / info.mem_bw_bytes_per_second
    return flops_per_byte * shape.row_bytes / (4 * shape.head_dim)


def _product_keys(shape: KernelShape) -> int:
    return math.lcm(LANES, shape.block_size) if shape.kv.has_scales else LANES


def _unit_pages(shape: KernelShape) -> int:
    """Fewest pages that are a whole number of products."""
    return math.lcm(LANES, shape.block_size) // shape.block_size


def _fit(shape: KernelShape, info: pltpu.TpuInfo, tile: int, *, is_decode: bool) -> TileSizes:
    """As many pages a fetch as cover the latency, exist and fit."""
    unit, keys = _unit_pages(shape), _product_keys(shape)
    page_bytes = shape.kv_heads * shape.block_size * shape.row_bytes
    wanted = LATENCY_S * info.mem_bw_bytes_per_second / page_bytes
    existing = -(-shape.num_keys // (unit * shape.block_size))
    units = max(1, min(math.ceil(wanted / unit), existing))
    if is_decode and units > 2:
        units = -(-units // 4) * 4  # so that a product can take four
    while units > 1 and _vmem(shape, TileSizes(tile, units * unit, keys)) > _budget(info):
        units -= 1
    if is_decode:  # wide products: few rows are cheap, and each product costs its latency
        span = units * unit * shape.block_size
        keys *= max(n for n in (1, 2, 4) if span % (n * keys) == 0)
    return TileSizes(tile, units * unit, keys)


def _budget(info: pltpu.TpuInfo) -> int:
    return int(info.vmem_capacity_bytes * _VMEM_SHARE)


def _vmem(shape: KernelShape, sizes: TileSizes) -> int:
    """Bytes of the kernel's scratch (see `tpu_kernel.Scratch`), lanes and sublanes padded."""
    rows = shape.row_group(is_decode=sizes.tile == 1) * sizes.tile
    k, v = shape.columns
    span = sizes.pages * shape.block_size
    of_rows = rows * (2 * (k.width * shape.compute_dtype.itemsize + v.width * 4) + 2 * LANES * 4)
    of_keys = (2 if sizes.tile == 1 else 4) * span * shape.row_bytes
    scale_rows = -(-shape.kv_heads // 8) * 8
    of_scales = 2 * sizes.pages * scale_rows * max(LANES, shape.block_size) * shape.scale_bytes
    return shape.kv_heads * (of_rows + of_keys) + of_scales


def check_sizes(shape: KernelShape, sizes: TileSizes) -> None:
    """Raises ValueError for sizes that the kernel cannot work with."""
    span = sizes.pages * shape.block_size
    if sizes.tile < 1 or sizes.pages < 1 or sizes.keys < 1 or span % sizes.keys:
        raise ValueError(f"{sizes}: keys must divide pages * block_size, {span}")
    if sizes.keys % shape.block_size and shape.kv.has_scales:
        raise ValueError(f"{sizes}: keys must be a multiple of the block size, {shape.block_size}")
    if sizes.tile > 1 and sizes.tile % shape.token_alignment:
        raise ValueError(f"{sizes}: tile must be a multiple of {shape.token_alignment}")
