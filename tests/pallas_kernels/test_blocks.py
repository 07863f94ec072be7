"""Pool operations against plain numpy indexing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    FORMATS,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    storage_dtype,
    write_kv,
)
from pallas_kernels.reference import read_rows

LAYERS, BLOCKS, HEADS, SIZE, DIM = 2, 7, 3, 4, 6
QUANTIZED = ("fp8", "int8", "int4", "k8v4")


def random_pool(rng: np.random.Generator, lanes: int = DIM) -> tuple[np.ndarray, np.ndarray]:
    """A float32 pool, and words of scales as if it were quantized."""
    pool = rng.standard_normal((LAYERS, BLOCKS, HEADS, SIZE, 2 * lanes)).astype(np.float32)
    return pool, rng.integers(0, 2**32, pool.shape[:4], np.uint32)


def random_rows(rng: np.random.Generator, count: int = 5) -> tuple[np.ndarray, ...]:
    """K and V of tokens, their blocks (of which the second is dropped) and slots."""
    k, v = rng.standard_normal((2, count, HEADS, DIM)).astype(np.float32)
    places = rng.permutation(BLOCKS * SIZE)[:count].astype(np.int32)
    block, slot = np.divmod(places, np.int32(SIZE))
    block[1] = BLOCKS
    return k, v, block, slot


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


@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_quantized_rows_are_written_with_their_scales_and_stand_for_k_and_v(
    platform, name, is_rotated
):
    rng = np.random.default_rng(2)
    form = dataclasses.replace(FORMATS[name], is_rotated=is_rotated)
    shape = (LAYERS, BLOCKS, HEADS, SIZE, form.row(DIM, platform).width)
    storage = storage_dtype(form.element, platform)
    before = rng.integers(0, 256, shape, np.uint8).view(storage)
    _, scales = random_pool(rng)
    k, v, block, slot = random_rows(rng)
    k[3, 1] = v[2, 2] = 0
    got = jax.jit(write_kv, static_argnames="kv_dtype")(
        before, scales, jnp.int32(1), k, v, block, slot, kv_dtype=form
    )
    pool, words = (np.array(x) for x in got)
    is_written = np.zeros(shape[:4], bool)
    for row in (0, 2, 3, 4):
        at = (1, block[row], slice(None), slot[row])
        is_written[at] = True
        stands_for = read_rows(pool[at], words[at], form, DIM)
        for x, found, dtype in zip((k, v), stands_for, (form.k, form.v), strict=True):
            # Half a step of an integer; three bits of mantissa. A rotated vector is no longer than
            # its elements together, and its error is turned back.
            largest = {"int8": 127, "int4": 7}.get(dtype.name, 16)
            length = np.linalg.norm(x[row], axis=-1, keepdims=True)
            assert (np.abs(found - x[row]) <= 1.01 * length / largest).all()
            assert not found[length[:, 0] == 0].any()
    unwritten = ~is_written
    np.testing.assert_array_equal(pool.view(np.uint8)[unwritten], before.view(np.uint8)[unwritten])
    np.testing.assert_array_equal(words[unwritten], scales[unwritten])


def test_rows_that_do_not_fit_the_pool_are_refused():
    pool, _ = random_pool(np.random.default_rng(0))
    k, at = jnp.zeros((2, HEADS, DIM + 1)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="heads of 7"):
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
