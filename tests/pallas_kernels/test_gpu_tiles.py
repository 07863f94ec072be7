"""The sizes of the GPU kernel's pieces, for many shapes."""

import dataclasses
import itertools

import pytest

from pallas_kernels.gpu_attention import HEAD_DIMS
from pallas_kernels.gpu_layout import most_parts
from pallas_kernels.gpu_tiles import (
    PARTIAL_BYTES,
    SMEM_BYTES,
    TILE_ROWS,
    GpuShape,
    GpuTileSizes,
    best_tiles,
)
from pallas_kernels.kv_format import FORMATS, KVFormat, plain_format

KV_FORMATS = {name: FORMATS[name] for name in FORMATS if name != "float32"} | {
    "fp8 without scales": plain_format("float8_e4m3fn")
}
BATCHES = [(1, 1), (64, 64), (256, 256), (2048, 8), (8192, 256)]  # rows, sequences


def shape_of(
    kv: KVFormat, heads: int, group: int, dim: int, block_size: int, num_keys: int
) -> GpuShape:
    return GpuShape(heads, group, dim, block_size, num_keys, kv, kv.row(dim, "gpu"))


def shapes(kv: KVFormat) -> list[GpuShape]:
    every = itertools.product(
        (1, 8), (1, 2, 3, 4, 7, 8, 16, 17, 64), HEAD_DIMS, (16, 128), (1 << 9, 1 << 17)
    )
    return [shape_of(kv, *sizes) for sizes in every]


def kinds(shape: GpuShape, rows: int, seqs: int) -> list[tuple[bool, GpuTileSizes]]:
    """(is_decode, sizes) of both calls."""
    tiles = best_tiles(shape, rows, seqs)
    return [(True, tiles.decode), (False, tiles.chunk)]


def scratch_bytes(shape: GpuShape, sizes: GpuTileSizes, *, is_decode: bool) -> int:
    """Bytes of the buffers that `gpu_call` declares, without barriers."""
    keys = sizes.keys * (sizes.warpgroups if is_decode else 1)
    total = sizes.stages * keys * shape.row.width * shape.kv.element.itemsize
    total += sizes.stages * keys * 4 * shape.kv.has_scales
    total += sizes.warpgroups * TILE_ROWS * (shape.head_dim * 4 + 4)
    if shape.kv.element.itemsize == 1:
        total += sizes.warpgroups * sizes.keys * 2 * shape.head_dim * 2
    return total


@pytest.mark.parametrize("kv", KV_FORMATS.values(), ids=KV_FORMATS)
def test_sizes_fit_in_shared_memory_and_are_whole(kv):
    for shape, batch in itertools.product(shapes(kv), BATCHES):
        for is_decode, sizes in kinds(shape, *batch):
            needed = scratch_bytes(shape, sizes, is_decode=is_decode)
            assert needed + 1024 <= SMEM_BYTES, (shape, sizes)
            assert sizes.stages >= 2
            assert sizes.keys in (64, 128)
            assert sizes.split % shape.fetched_keys(sizes, is_decode=is_decode) == 0


@pytest.mark.parametrize("kv", KV_FORMATS.values(), ids=KV_FORMATS)
def test_another_stage_does_not_fit_or_is_not_needed(kv):
    for shape in shapes(kv):
        for is_decode, sizes in kinds(shape, 256, 64):
            more = dataclasses.replace(sizes, stages=sizes.stages + 1)
            assert sizes.stages == 4 or scratch_bytes(shape, more, is_decode=is_decode) > (
                SMEM_BYTES - 8192
            )


@pytest.mark.parametrize("kv", KV_FORMATS.values(), ids=KV_FORMATS)
def test_partial_results_stay_small_unless_each_row_has_only_one(kv):
    for shape, (rows, seqs) in itertools.product(shapes(kv), BATCHES):
        for is_decode, sizes in kinds(shape, rows, seqs):
            group = shape.row_group(sizes, is_decode=is_decode)
            parts = most_parts(shape, sizes, is_decode=is_decode)
            one = (seqs if is_decode else rows) * group * shape.kv_heads * shape.head_dim * 4
            least = sizes.warpgroups if is_decode else 1
            assert parts * one <= PARTIAL_BYTES or parts == least, (shape, sizes, rows)


def test_a_long_context_of_few_rows_is_split_for_many_multiprocessors():
    shape = shape_of(FORMATS["bfloat16"], 8, 4, 128, 16, 1 << 17)
    tiles = best_tiles(shape, 1, 1)
    assert shape.kv_heads * (shape.num_keys // tiles.decode.split) >= 132


@pytest.mark.parametrize("kv", KV_FORMATS.values(), ids=KV_FORMATS)
def test_invariant_sizes_do_not_depend_on_the_batch(kv):
    for shape in shapes(kv):
        found = {best_tiles(shape, *batch, batch_invariant=True).chunk for batch in BATCHES}
        assert len(found) == 1
        longer = dataclasses.replace(shape, num_keys=2 * shape.num_keys)
        assert best_tiles(longer, 8, 8, batch_invariant=True).chunk in found


def test_a_head_that_does_not_fit_is_refused():
    shape = shape_of(FORMATS["bfloat16"], 1, 1, 1024, 16, 512)
    with pytest.raises(NotImplementedError, match="head size 1024 with bfloat16 does not fit"):
        best_tiles(shape, 8, 8)
