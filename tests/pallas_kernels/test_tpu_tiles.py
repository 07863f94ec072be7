"""The cost model of the TPU kernel's sizes, for many shapes and chips."""

import itertools
import math

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import FORMATS, TileSizes
from pallas_kernels.tpu_tiles import (
    LATENCY_S,
    MOST_PADDING,
    KernelShape,
    best_tiles,
    check_sizes,
    chunk_sizes,
    decode_sizes,
    sublanes,
    vmem_limit,
)

VERSIONS = ("TPU_V4", "TPU_V5E", "TPU_V5P", "TPU_V6E", "TPU_7X")
CHIPS = {v: pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[v], 1) for v in VERSIONS}
NAMES = ("float32", "bfloat16", "fp8", "int8", "int4", "k8v4")


def shape_of(
    name: str, kv_heads: int, group: int, head_dim: int, block_size: int, num_keys: int
) -> KernelShape:
    kv = FORMATS[name]
    row = kv.row(head_dim, "tpu")
    return KernelShape(kv_heads, group, row.head_dim(kv.k), block_size, num_keys, kv, row)


def shapes() -> list[KernelShape]:
    """Every combination that the kernel takes."""
    every = itertools.product(
        NAMES, (1, 2, 3, 8, 32), (1, 3, 4, 8), (64, 128, 192, 256), (16, 32, 64, 256)
    )
    return [
        shape_of(name, heads, group, dim, size, keys)
        for name, heads, group, dim, size in every
        if size % sublanes(FORMATS[name].element) == 0
        for keys in (size, 1 << 15)
    ]


def scratch_bytes(shape: KernelShape, sizes: TileSizes) -> int:
    """Bytes of VMEM that the kernel declares, in whole tiles of (sublanes, 128 lanes)."""

    def tiled(dtype: jnp.dtype, *dims: int) -> int:
        *outer, rows, lanes = dims
        rows = -(-rows // sublanes(dtype)) * sublanes(dtype)
        return math.prod(outer) * rows * -(-lanes // 128) * 128 * dtype.itemsize

    f32 = jnp.dtype(jnp.float32)
    is_decode, span = sizes.tile == 1, sizes.pages * shape.block_size
    rows = sizes.tile * shape.row_group(is_decode=is_decode)
    heads, both, element = shape.kv_heads, shape.row.width, shape.kv.element
    k, v = shape.columns
    total = tiled(shape.compute_dtype, 2, heads, rows, k.width)
    total += tiled(f32, 2, heads, rows, v.width) + 2 * tiled(f32, heads, rows, 1)
    total += tiled(element, 2, heads, span, both)
    total += tiled(element, 2, heads, 1 if is_decode else span, both)
    if shape.kv.has_scales:
        total += tiled(jnp.dtype(jnp.uint32), 2, sizes.pages, heads, shape.block_size)
    return total


def is_smallest(shape: KernelShape, sizes: TileSizes) -> bool:
    """Whether nothing smaller is a whole number of products and of sublane tiles."""
    pages = math.lcm(128, shape.block_size) // shape.block_size
    return sizes.pages == pages and sizes.tile in (1, shape.token_alignment)


@pytest.mark.parametrize("chip", CHIPS)
def test_sizes_fit_in_half_of_vmem_and_are_valid(chip):
    info = CHIPS[chip]
    for shape in shapes():
        tiles = best_tiles(shape, info)
        for sizes in (tiles.decode, tiles.chunk):
            check_sizes(shape, sizes)
            needed = scratch_bytes(shape, sizes)
            assert needed <= info.vmem_capacity_bytes / 2 or is_smallest(shape, sizes), shape
            if needed <= 0.9 * info.vmem_capacity_bytes:
                assert needed < vmem_limit(shape, sizes, info) < info.vmem_capacity_bytes, shape
        assert tiles.decode.tile == 1
        assert tiles.chunk.tile % shape.token_alignment == 0


def test_what_does_not_fit_in_vmem_is_refused_with_its_bytes():
    shape = shape_of("float32", 32, 1, 256, 256, 256)
    info = CHIPS["TPU_7X"]
    with pytest.raises(NotImplementedError, match="68419584 bytes of VMEM"):
        vmem_limit(shape, chunk_sizes(shape, info), info)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_fetch_covers_the_latency_unless_the_context_or_vmem_is_smaller(chip):
    info = CHIPS[chip]
    for shape in shapes():
        row_bytes = shape.kv_heads * shape.row.width * shape.kv.element.itemsize
        sizes = decode_sizes(shape, info)
        span = sizes.pages * shape.block_size
        twice = scratch_bytes(shape, TileSizes(1, 2 * sizes.pages, sizes.keys))
        covers = span * row_bytes >= LATENCY_S * info.mem_bw_bytes_per_second
        assert covers or span >= shape.num_keys or twice > info.vmem_capacity_bytes / 2, shape
        # Nor is it larger than that, but for whole products of up to four times as many keys.
        least = math.lcm(128, shape.block_size)
        surplus = (span - 4 * least) * row_bytes
        assert surplus <= LATENCY_S * info.mem_bw_bytes_per_second, shape


@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_taller_where_a_byte_has_to_serve_more_operations(name):
    shape = shape_of(name, 8, 4, 128, 64, 1 << 15)
    chips = [info for name, info in CHIPS.items() if name != "TPU_V4"]  # its VMEM is too small
    chips.sort(key=intensity)
    rows = [chunk_sizes(shape, info).tile * shape.group for info in chips]
    assert rows == sorted(rows)


def intensity(info: pltpu.TpuInfo) -> float:
    """FLOPs in the time of a byte."""
    return info.bf16_ops_per_second / info.mem_bw_bytes_per_second


def test_a_prefill_tile_reaches_the_roofline_where_padding_allows():
    for info, group in itertools.product(CHIPS.values(), (1, 4, 8)):
        shape = shape_of("bfloat16", 8, group, 128, 64, 1 << 15)
        tile = chunk_sizes(shape, info).tile
        reaches = tile * group >= intensity(info)
        assert reaches or chunk_padding(2 * tile) > MOST_PADDING


def chunk_padding(tile: int, chunk: int = 512, keys: int = 128) -> float:
    """Products over those needed, of a prompt in tiles that multiply whole groups of keys."""
    done = sum(tile * -(-(first + tile) // keys) * keys for first in range(0, chunk, tile))
    return done / (chunk * (chunk + 1) / 2)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (TileSizes(16, 2, 48), "must divide pages"),
        (TileSizes(16, 0, 16), "must divide pages"),
        (TileSizes(0, 2, 16), "must divide pages"),
        (TileSizes(10, 2, 32), "tile must be a multiple of 16"),
        (TileSizes(16, 2, 16), "multiple of the block size, 32"),
    ],
)
def test_sizes_that_the_kernel_cannot_work_with_are_refused(sizes, reason):
    shape = shape_of("int8", 2, 3, 128, 32, 256)
    with pytest.raises(ValueError, match=reason):
        check_sizes(shape, sizes)
