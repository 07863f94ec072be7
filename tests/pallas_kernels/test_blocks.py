"""Pool operations against plain numpy indexing."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import (
    copy_blocks,
    gather_blocks,
    head_lanes,
    scatter_blocks,
    storage_dtype,
    to_storage,
    write_kv,
)
from pallas_kernels.blocks import quantize_rows

LAYERS, BLOCKS, HEADS, SIZE, DIM = 2, 7, 3, 4, 6
QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")


def random_pool(rng: np.random.Generator, lanes: int = DIM) -> tuple[np.ndarray, np.ndarray]:
    """A float32 pool and scales for it."""
    pool = rng.standard_normal((LAYERS, BLOCKS, HEADS, SIZE, 2 * lanes)).astype(np.float32)
    scales = rng.uniform(0.1, 1, (LAYERS, BLOCKS, HEADS, 2, SIZE)).astype(np.float32)
    return pool, scales


def random_rows(rng: np.random.Generator, count: int = 5) -> tuple[np.ndarray, ...]:
    """K and V of tokens, their blocks (of which the second is dropped) and slots."""
    k, v = rng.standard_normal((2, count, HEADS, DIM)).astype(np.float32)
    places = rng.permutation(BLOCKS * SIZE)[:count].astype(np.int32)
    block, slot = np.divmod(places, np.int32(SIZE))
    block[1] = BLOCKS
    return k, v, block, slot


def numpy_quantize(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    largest = 127 if dtype == "int8" else float(ml_dtypes.finfo(dtype).max)
    scale = np.abs(x).max(-1) / np.float32(largest)
    x = x / np.where(scale > 0, scale, np.float32(1))[..., None]
    return (np.round(x) if dtype == "int8" else x).astype(dtype), scale


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_rows_span_the_whole_range_of_the_dtype(dtype):
    x = np.random.default_rng(0).standard_normal((9, 4, 32)).astype(np.float32) * 30
    x[3, 2] = 0
    elements, scale = map(np.asarray, quantize_rows(jnp.asarray(x), dtype))
    want, want_scale = numpy_quantize(x, dtype)
    np.testing.assert_allclose(scale, want_scale, rtol=1e-6)
    elements, want = elements.astype(np.float32), want.astype(np.float32)
    # A quotient may be rounded the other way; a step is 1, or a part of the value.
    step = 1 if dtype == "int8" else np.abs(want) * 2.0 ** -(3 if "e4m3" in dtype else 2) + 1e-3
    assert (np.abs(elements - want) <= step).all()
    assert (elements == want).mean() > 0.99
    assert scale[3, 2] == 0
    assert not elements[3, 2].any()
    error = np.abs(elements * scale[..., None] - x) / np.abs(x).max(-1, keepdims=True).clip(1e-9)
    assert error.max() < {"int8": 0.5 / 127, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}[dtype]


@pytest.mark.parametrize("lanes", [DIM, DIM + 2])
def test_rows_are_written_where_block_and_slot_say_with_zeros_in_the_padding_lanes(lanes):
    rng = np.random.default_rng(1)
    pool, _ = random_pool(rng, lanes)
    k, v, block, slot = random_rows(rng)
    got, no_scales = write_kv(jnp.asarray(pool), None, 1, *map(jnp.asarray, (k, v, block, slot)))
    assert no_scales is None
    for row in (0, 2, 3, 4):
        at = pool[1, block[row], :, slot[row]]
        at[:] = 0
        at[:, :DIM], at[:, lanes : lanes + DIM] = k[row], v[row]
        pool[1, block[row], :, slot[row]] = at
    np.testing.assert_array_equal(got, pool)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_quantized_rows_are_written_with_their_scales(platform, dtype):
    rng = np.random.default_rng(2)
    values, scales = random_pool(rng, lanes=8)
    storage = storage_dtype(dtype, platform)
    pool = np.array(to_storage(jnp.asarray(values), dtype, storage))
    k, v, block, slot = random_rows(rng)
    got, got_scales = jax.jit(write_kv, static_argnames="kv_dtype")(
        pool, scales, jnp.int32(1), k, v, block, slot, kv_dtype=dtype
    )
    for row in (0, 2, 3, 4):
        for which, x in enumerate((k, v)):
            elements, scale = map(np.asarray, quantize_rows(jnp.asarray(x[row]), dtype))
            padded = np.zeros((HEADS, 8), elements.dtype)
            padded[:, :DIM] = elements
            lanes = slice(which * 8, which * 8 + 8)
            pool[1, block[row], :, slot[row], lanes] = padded.view(pool.dtype)
            scales[1, block[row], :, which, slot[row]] = scale
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), pool.view(np.uint8))
    np.testing.assert_allclose(got_scales, scales, rtol=1e-6)


def test_rows_that_do_not_fit_the_pool_are_refused():
    pool, _ = random_pool(np.random.default_rng(0))
    k, at = jnp.zeros((2, HEADS, DIM + 1)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"k \(2, 3, 7\)"):
        write_kv(jnp.asarray(pool), None, 0, k, k, at, at)
    with pytest.raises(ValueError, match=r"v \(2, 2, 6\)"):
        write_kv(jnp.asarray(pool), None, 0, k[..., :DIM], k[:, :2, :DIM], at, at)


@pytest.mark.parametrize("with_scales", [False, True])
def test_gathered_blocks_can_be_scattered_and_padding_is_dropped(with_scales):
    rng = np.random.default_rng(3)
    pool, scales = random_pool(rng)
    given = jnp.asarray(scales) if with_scales else None
    blocks = jnp.asarray([5, 0, 3], jnp.int32)
    values, scale_values = gather_blocks(jnp.asarray(pool), given, blocks)
    np.testing.assert_array_equal(values, pool[:, [5, 0, 3]])
    targets = jnp.asarray([1, BLOCKS, 6], jnp.int32)
    got, got_scales = scatter_blocks(jnp.asarray(pool), given, targets, values, scale_values)
    pool[:, [1, 6]] = pool[:, [5, 3]]
    np.testing.assert_array_equal(got, pool)
    if not with_scales:
        assert scale_values is got_scales is None
        return
    np.testing.assert_array_equal(scale_values, scales[:, [5, 0, 3]])
    scales[:, [1, 6]] = scales[:, [5, 3]]
    np.testing.assert_array_equal(got_scales, scales)


@pytest.mark.parametrize("with_scales", [False, True])
def test_a_copy_reads_all_sources_before_it_writes(with_scales):
    pool, scales = random_pool(np.random.default_rng(4))
    source, target = jnp.asarray([1, 2, 3], jnp.int32), jnp.asarray([2, 1, BLOCKS], jnp.int32)
    given = jnp.asarray(scales) if with_scales else None
    got, got_scales = copy_blocks(jnp.asarray(pool), given, source, target)
    pool[:, [2, 1]] = pool[:, [1, 2]]
    scales[:, [2, 1]] = scales[:, [1, 2]]
    np.testing.assert_array_equal(got, pool)
    if with_scales:
        np.testing.assert_array_equal(got_scales, scales)
    else:
        assert got_scales is None


@pytest.mark.parametrize(("head_dim", "lanes"), [(32, 64), (64, 64), (80, 128), (128, 128)])
def test_heads_are_padded_to_half_a_lane_tile_on_tpu_only(head_dim, lanes):
    assert head_lanes(head_dim, "tpu") == lanes
    assert head_lanes(head_dim, "cpu") == head_lanes(head_dim, "gpu") == head_dim
