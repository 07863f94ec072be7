"""Blocks that travel to the host and back, against a numpy model of both sides."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from pagedjax import host_blocks
from pagedjax.host_blocks import HostBlocks
from pagedjax.models.decoder import KVCache
from pallas_kernels import FORMATS
from tests.compiles import counted_compiles

NUM_BLOCKS, NUM_HOST_BLOCKS, MAX_COPIES = 300, 350, 40
BLOCK = (3, 2, 4, 8)  # Lg, KVH, T, 2 * D


def random_values(seed: int, num_blocks: int = NUM_BLOCKS, dtype: Any = np.float32) -> np.ndarray:
    """[Lg, P, KVH, T, 2 * D]; a bf16 pool of the CPU is made of bits, NaN among them."""
    rng, shape = np.random.default_rng(seed), (BLOCK[0], num_blocks, *BLOCK[1:])
    values = rng.normal(size=shape).astype(np.float32)
    if dtype == np.uint16:
        values[rng.random(shape) < 0.01] = np.nan
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return values


def make_cache(values: np.ndarray) -> KVCache:
    name = "bfloat16" if values.dtype == np.uint16 else "float32"
    return KVCache(jnp.array(values), None, FORMATS[name], None)


def random_pairs(rng: np.random.Generator, count: int, sources: int, targets: int) -> list:
    """Pairs of ids from 1 on, the targets all different."""
    source = rng.choice(np.arange(1, sources), count, replace=count >= sources)
    target = rng.choice(np.arange(1, targets), count, replace=False)
    return list(zip(source.tolist(), target.tolist(), strict=True))


@pytest.fixture
def values() -> np.ndarray:
    return random_values(0)


@pytest.fixture
def cache(values: np.ndarray) -> KVCache:
    return make_cache(values)


@pytest.fixture
def blocks(cache: KVCache) -> HostBlocks:
    return HostBlocks(cache, NUM_HOST_BLOCKS, MAX_COPIES)


# --- contents ---


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("pending_bytes", [0, 3_000, 1 << 30])
def test_both_sides_hold_what_a_numpy_model_holds(
    dtype: Any, pending_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_blocks, "_PENDING_BYTES", pending_bytes)
    rng = np.random.default_rng(1)
    pool = random_values(2, dtype=dtype)
    host = np.zeros((BLOCK[0], NUM_HOST_BLOCKS, *BLOCK[1:]), dtype)
    written: set[int] = set()
    cache = make_cache(pool)
    blocks = HostBlocks(cache, NUM_HOST_BLOCKS, MAX_COPIES)
    for turn in range(60):
        count = int(rng.choice([0, 1, 3, 7, 8, 9, 30, 33, 100, 200]))
        if turn % 3 == 0:
            pairs = random_pairs(rng, count, NUM_BLOCKS, NUM_HOST_BLOCKS)
            blocks.swap_out(cache, pairs)
            for source, target in pairs:
                host[:, target] = pool[:, source]
            written.update(target for _, target in pairs)
        elif turn % 3 == 1:
            pairs = random_pairs(rng, count, NUM_HOST_BLOCKS, NUM_BLOCKS)
            pairs = [pair for pair in pairs if pair[0] in written]
            cache = blocks.swap_in(cache, pairs)
            for source, target in pairs:
                pool[:, target] = host[:, source]
        else:
            pairs = random_pairs(rng, min(count, MAX_COPIES), NUM_BLOCKS, NUM_BLOCKS)
            cache = blocks.copy(cache, pairs)
            sources, targets = np.array(pairs, int).reshape(-1, 2).T
            pool[:, targets] = pool[:, sources]
        if turn % 7 == 0:
            np.testing.assert_array_equal(cache.pool, pool)
    cache = blocks.swap_in(cache, [(block, block) for block in sorted(written) if block < 300])
    for block in written:
        if block < 300:
            pool[:, block] = host[:, block]
    assert len(written) > 200
    np.testing.assert_array_equal(cache.pool, pool)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 299])
def test_every_number_of_blocks_arrives_and_no_other_block_changes(
    count: int, blocks: HostBlocks, cache: KVCache, values: np.ndarray
) -> None:
    pairs = random_pairs(np.random.default_rng(count), count, NUM_BLOCKS, NUM_HOST_BLOCKS)
    blocks.swap_out(cache, pairs)
    other = random_values(3)
    result = blocks.swap_in(make_cache(other), [(host, device) for device, host in pairs])
    moved = [device for device, _ in pairs]
    other[:, moved] = values[:, moved]
    np.testing.assert_array_equal(result.pool, other)


def test_no_call_moves_twice_as_many_blocks_as_asked_once_they_fill_the_smallest(
    blocks: HostBlocks,
) -> None:
    for count in range(300):
        calls = list(blocks._calls([(i, i) for i in range(count)]))
        assert [pair for _, part in calls for pair in part] == [(i, i) for i in range(count)]
        for size, part in calls:
            assert size in (8, 32, 128)
            assert len(part) <= size
            assert size == 8 or size < 2 * len(part)


def test_large_blocks_travel_in_smaller_calls(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = cache.pool.nbytes // NUM_BLOCKS
    monkeypatch.setattr(host_blocks, "_CALL_BYTES", 33 * block_bytes)
    calls = HostBlocks(cache, 2, 0)._calls([(1, 1)] * 300)
    assert {size for size, _ in calls} == {8, 32}
    monkeypatch.setattr(host_blocks, "_CALL_BYTES", 1)
    calls = HostBlocks(cache, 2, 0)._calls([(1, 1)] * 300)
    assert {size for size, _ in calls} == {8}


# --- order ---


def test_what_leaves_is_what_the_pool_held_between_two_steps_that_overwrite_it(
    blocks: HostBlocks, cache: KVCache, values: np.ndarray
) -> None:
    def slow_step(pool: jax.Array) -> jax.Array:
        """Adds 1; long enough that all that follows is dispatched before it is done."""
        ones = jnp.full((64, 64), 1 / 64)
        return pool + lax.fori_loop(0, 200_000, lambda _, x: x @ ones, jnp.ones((64, 64)))[0, 0]

    def compiled(step: Callable[[jax.Array], jax.Array]) -> Callable[[KVCache], KVCache]:
        run = jax.jit(step, donate_argnums=0).lower(cache.pool).compile()
        return lambda cache: dataclasses.replace(cache, pool=run(cache.pool))

    before, after = compiled(slow_step), compiled(lambda pool: pool * 0 + 7)
    there = [(2 * block, block) for block in range(1, 140)]
    back = [(host, device + 1) for device, host in there]
    cache = jax.block_until_ready(blocks.warmup(cache))

    seen = before(cache)
    blocks.swap_out(seen, there)
    result = after(seen)
    assert seen.pool.is_deleted(), "the pool was donated"
    assert not blocks._pending[-1].values.rows.is_ready(), "nothing waited for the device"
    result = blocks.swap_in(result, back)

    expected = np.full_like(values, 7)
    expected[:, [device + 1 for device, _ in there]] = values[:, [d for d, _ in there]] + 1
    np.testing.assert_allclose(result.pool, expected, rtol=1e-6)


def test_the_later_of_two_pending_transfers_to_a_block_counts(
    blocks: HostBlocks, cache: KVCache, values: np.ndarray
) -> None:
    blocks.swap_out(cache, [(1, 5), (2, 6)])
    blocks.swap_out(cache, [(3, 5), (4, 7)])
    blocks.swap_out(cache, [(8, 9)])
    assert len(blocks._pending) == 3
    cache = blocks.swap_in(cache, [(6, 10)])
    assert len(blocks._pending) == 2, "what nobody reads may stay on its way"
    cache = blocks.swap_in(cache, [(5, 11), (7, 12)])
    assert len(blocks._pending) == 1
    cache = blocks.swap_in(cache, [(6, 13), (9, 14)])
    expected = values.copy()
    expected[:, 10:15] = values[:, [2, 3, 4, 2, 8]]
    np.testing.assert_array_equal(cache.pool, expected)


def test_a_block_goes_out_and_in_and_out_again(
    blocks: HostBlocks, cache: KVCache, values: np.ndarray
) -> None:
    blocks.swap_out(cache, [(1, 5)])
    cache = blocks.swap_in(cache, [(5, 2)])
    blocks.swap_out(cache, [(2, 6), (3, 5)])
    cache = blocks.swap_in(cache, [(6, 3), (5, 1)])
    expected = values.copy()
    expected[:, 1:4] = values[:, [3, 1, 1]]
    np.testing.assert_array_equal(cache.pool, expected)


def test_bytes_on_their_way_are_bounded(
    blocks: HostBlocks, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_bytes = 8 * cache.pool.nbytes // NUM_BLOCKS
    monkeypatch.setattr(host_blocks, "_PENDING_BYTES", 2 * call_bytes)
    for block in range(1, 10):
        blocks.swap_out(cache, [(block, block)])
        assert len(blocks._pending) == min(block, 2)


# --- copies ---


def test_copies_read_every_source_before_they_write_a_target(
    blocks: HostBlocks, cache: KVCache, values: np.ndarray
) -> None:
    cache = blocks.copy(cache, [(1, 2), (2, 1), (2, 3), (3, 4), (4, 5), (1, 6)])
    expected = values.copy()
    expected[:, 1:7] = values[:, [2, 1, 2, 3, 4, 1]]
    np.testing.assert_array_equal(cache.pool, expected)


@pytest.mark.parametrize("max_copies", [1, 3, 8, 9, 100, 200])
def test_one_call_takes_up_to_max_copies(
    max_copies: int, cache: KVCache, values: np.ndarray
) -> None:
    blocks = HostBlocks(cache, 0, max_copies)
    for count in {1, max_copies // 2, max_copies} - {0}:
        result = blocks.copy(make_cache(values), [(i, i + 99) for i in range(1, count + 1)])
        expected = values.copy()
        expected[:, 100 : 100 + count] = values[:, 1 : 1 + count]
        np.testing.assert_array_equal(result.pool, expected)
    with pytest.raises(ValueError, match=f"{max_copies + 1} copies.*at most {max_copies}"):
        blocks.copy(cache, [(1, 2)] * (max_copies + 1))


def test_nothing_to_do_dispatches_nothing(blocks: HostBlocks, cache: KVCache) -> None:
    blocks.swap_out(cache, [])
    assert blocks.swap_in(cache, []) is cache
    assert blocks.copy(cache, []) is cache
    assert not blocks._pending


# --- warm-up and the link ---


@pytest.mark.parametrize("committed", [False, True], ids=["made here", "put on a device"])
def test_after_warm_up_nothing_compiles_and_the_pool_is_as_before(committed: bool) -> None:
    # Its own size, so that no other test has compiled these programs.
    values = random_values(4, num_blocks=250 + committed)
    cache = make_cache(values)
    if committed:
        cache = jax.device_put(cache, jax.devices()[0])
    blocks = HostBlocks(cache, 200, 40)
    with counted_compiles() as compiles:
        cache = blocks.warmup(cache)
    assert len(compiles) == 3 + 3 + 3  # in, out, copy
    np.testing.assert_array_equal(cache.pool, values)
    with counted_compiles() as compiles:
        blocks.link_bytes_per_s(cache)
        for count in range(1, 200, 3):
            blocks.swap_out(cache, [(i, i) for i in range(1, count)])
            cache = blocks.swap_in(cache, [(i, i) for i in range(1, count)])
            cache = blocks.copy(cache, [(i, i) for i in range(1, min(count, 41))])
    assert compiles == []
    np.testing.assert_array_equal(cache.pool, values)
    with counted_compiles() as compiles:  # the control: a new program is seen
        other = make_cache(random_values(5, num_blocks=270 + committed))
        HostBlocks(other, 2, 1).swap_out(other, [(1, 1)])
    assert compiles


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_without_host_blocks_copies_work_and_warm_up_compiles_them_alone(num_blocks: int) -> None:
    values = random_values(6, num_blocks=260 + num_blocks)
    cache = make_cache(values)
    blocks = HostBlocks(cache, num_blocks, 8)
    with counted_compiles() as compiles:
        cache = blocks.warmup(cache)
    assert len(compiles) == 1
    cache = blocks.copy(cache, [(1, 2)])
    np.testing.assert_array_equal(cache.pool[:, 2], values[:, 1])


def test_warm_up_leaves_what_is_on_the_host_and_on_its_way(
    blocks: HostBlocks, cache: KVCache, values: np.ndarray
) -> None:
    blocks.swap_out(cache, [(1, 5)])
    cache = blocks.swap_in(cache, [(5, 2)])
    blocks.swap_out(cache, [(3, 6)])
    cache = blocks.warmup(cache)
    cache = blocks.swap_in(cache, [(5, 7), (6, 8)])
    expected = values.copy()
    expected[:, [2, 7, 8]] = values[:, [1, 1, 3]]
    np.testing.assert_array_equal(cache.pool, expected)


def test_the_link_is_measured_once_and_leaves_the_pool_alone(
    blocks: HostBlocks, cache: KVCache, values: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    measure = host_blocks._round_trip
    monkeypatch.setattr(
        host_blocks, "_round_trip", lambda *args: measured.append(args) or measure(*args)
    )
    speed = blocks.link_bytes_per_s(cache)
    assert 0 < speed < float("inf")
    assert len({id(array) for array, _ in measured}) == len(measured) > 1, "a fresh array each"
    count = len(measured)
    assert blocks.link_bytes_per_s(cache) == speed
    assert len(measured) == count
    np.testing.assert_array_equal(cache.pool, values)


@pytest.mark.parametrize("name", ["int8", "k8v4"])
def test_scales_travel_with_their_rows(name: str) -> None:
    rng, (layers, *block) = np.random.default_rng(5), BLOCK
    element = FORMATS[name].element
    pool = rng.integers(0, 256, (layers, NUM_BLOCKS, *block), np.uint8).view(element)
    scales = rng.integers(0, 2**32, pool.shape[:4], np.uint32)
    cache = KVCache(jnp.array(pool), jnp.array(scales), FORMATS[name], None)
    blocks = HostBlocks(cache, NUM_HOST_BLOCKS, MAX_COPIES)
    assert 0 < blocks.link_bytes_per_s(cache) < float("inf")
    blocks.swap_out(cache, [(3, 2), (5, 1)])
    cache = blocks.copy(cache, [(4, 3), (6, 5)])
    cache = blocks.swap_in(cache, [(2, 7), (1, 8)])
    for x, want in ((cache.pool, pool), (cache.scales, scales)):
        want[:, [3, 5, 7, 8]] = want[:, [4, 6, 3, 5]]
        np.testing.assert_array_equal(x, want)
