"""The pool is never copied: read off the compiled programs of every target."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pagedjax import functional, host_blocks
from pagedjax.batch import stop_input
from pagedjax.decode_ahead import decode_ahead
from pagedjax.deviceless import abstract_step, place_like_engine
from pagedjax.memory import block_bytes, pool_shape
from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.decoder import KVCache, abstract_params
from pagedjax.models.rope import RopeConfig
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.step import step
from pallas_kernels import (
    FORMATS,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    storage_dtype,
    write_kv,
)
from tests.deviceless.targets import TARGETS, Compiled, compile_for, platform

KERNELS = dict.fromkeys(("v5e", "v6e", "v7x"), "mosaic_tpu") | {"h200": "mosaic_gpu"}
"""Attention of the targets that have a kernel; others run plain XLA."""

WINDOWS = {"uniform": (NO_WINDOW,) * 4, "windowed": (64, 64, NO_WINDOW, 64, 64, NO_WINDOW)}


def decoder(windows: tuple[int, ...], dtype: str) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_layers=len(windows),
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        max_position=2048,
        windows=windows,
        ropes=(RopeConfig(1e4),),
        rope_of_layer=(0,) * len(windows),
        attn_scale=128**-0.5,
        norm_eps=1e-6,
        dtype=dtype,  # type: ignore[arg-type]
    )


def assert_in_place(compiled: Compiled, pool: jax.ShapeDtypeStruct) -> None:
    size = pool.size * pool.dtype.itemsize
    assert compiled.alias_bytes >= size, "the donated pool is not the result"
    assert compiled.temp_bytes < size / 2, f"{compiled.temp_bytes} temporary bytes beside {size}"
    assert not compiled.copies_of(pool.shape)


STEPS = [("bfloat16", "uniform", 64, "kernel", "k8v4"), ("float32", "windowed", 8, "xla", "int8")]
PLAIN_STEP = ("bfloat16", "windowed", 256, "kernel", "auto")


@pytest.mark.parametrize(
    ("target", "dtype", "windows", "rows", "attention", "kv_cache_dtype"),
    [
        *((target, *case) for target in TARGETS for case in STEPS),
        # The others compile it in the test of a whole generation.
        *((target, *PLAIN_STEP) for target in ("v5e", "v7x")),
    ],
)
def test_a_step_updates_the_pool_in_place(target, dtype, windows, rows, attention, kv_cache_dtype):
    model = decoder(WINDOWS[windows], dtype)
    kernel = KERNELS.get(target, "xla") if attention == "kernel" else "xla"
    if kernel == "xla" and platform(target) == "tpu":
        kv_cache_dtype = "auto"  # with elements of 8 bits XLA would copy it, and is refused
    inputs = inputs_of_a_step(model, rows, platform(target), kernel, kv_cache_dtype)
    params, state, batch = inputs
    run = functools.partial(step, model, ())
    place = place_like_engine
    compiled = compile_for(target, run, params, state, batch, donate=(1,), place=place)
    assert_in_place(compiled, state.cache.pool)
    assert not compiled.copies_of(state.cache.pool.shape[:-1]), "scales are copied"
    assert compiled.alias_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


# The others compile much the same loop in the test of a whole generation.
@pytest.mark.parametrize("target", ["h200", "v7x"])
def test_several_decode_steps_in_one_go_update_the_pool_in_place(target):
    model = decoder(WINDOWS["windowed"], "bfloat16")
    kernel = KERNELS.get(target, "xla")
    params, state, batch = inputs_of_a_step(model, 8, platform(target), kernel, "int4")
    run = functools.partial(decode_ahead, model, (), (1, 2), 4)
    args, place = (params, state, batch, stop_input([], 8)), place_like_engine
    compiled = compile_for(target, run, *args, donate=(1,), place=place)
    assert_in_place(compiled, state.cache.pool)
    assert not compiled.copies_of(state.cache.pool.shape[:-1]), "scales are copied"
    assert compiled.alias_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def inputs_of_a_step(model, rows, backend, attention, kv_cache_dtype):
    """Abstract parameters and state, and a batch of padding for 8 sequences."""
    limits = SchedulerConfig(8, 256, 2048, 128, model.kv_layout.windows)
    return abstract_step(
        model,
        limits,
        num_tokens=rows,
        num_blocks=8192,  # scales so large that XLA does not keep all of them in VMEM
        platform=backend,
        attention=attention,
        kv_cache_dtype=kv_cache_dtype,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("target", TARGETS)
def test_block_operations_work_in_place(target, dtype):
    stored = storage_dtype(dtype, platform(target))
    pool = jax.ShapeDtypeStruct((4, 4096, 2, 16, 256), stored)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = jax.ShapeDtypeStruct((8, 2, 128), jnp.float32)
    blocks = jax.ShapeDtypeStruct((4, 8, 2, 16, 256), stored)

    def write(pool, k, v, block, slot):
        return write_kv(pool, None, 1, k, v, block, slot, kv_dtype=dtype)

    def copy(pool, source, target):
        return copy_blocks(pool, None, source, target)

    def scatter(pool, ids, values):
        return scatter_blocks(pool, None, ids, values)

    for run, args in (
        (write, (rows, rows, ids, ids)),
        (copy, (ids, ids)),
        (scatter, (ids, blocks)),
    ):
        assert_in_place(compile_for(target, run, pool, *args, donate=(0,)), pool)
    gathered = compile_for(target, lambda pool, ids: gather_blocks(pool, None, ids), pool, ids)
    assert not gathered.copies_of(pool.shape)


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_move_to_the_host_and_back_without_copying_the_pool(target):
    """Nor its scales; a plain pool is moved in the same way."""
    name, backend, count = "int4", platform(target), 4096
    model = decoder(WINDOWS["uniform"], "bfloat16")
    shape = pool_shape(model, 128, count, FORMATS[name], backend)
    cache = abstract_cache(shape, name, backend)
    ids = jax.ShapeDtypeStruct((24,), jnp.int32)
    layers, _, *block = shape
    moved = abstract_cache((24, layers, *block), name, backend)
    blocks = host_blocks.Blocks(moved.pool, moved.scales)
    for run, args in ((host_blocks._scatter, (ids, blocks)), (host_blocks._copy, (ids, ids))):
        compiled = compile_for(target, run, cache, *args, donate=(0,))
        assert_in_place(compiled, cache.pool)
        assert not compiled.copies_of(shape[:-1])
    size = count * block_bytes(model, 128, FORMATS[name], backend)
    # That of the last, `_copy`, with no more than its ids.
    assert compiled.alias_bytes == size
    assert size <= compiled.argument_bytes <= size + 4096
    gathered = compile_for(target, host_blocks._gather, cache, ids)
    assert not gathered.copies_of(cache.pool.shape)
    assert gathered.temp_bytes < size / 2


def abstract_cache(shape, name, backend):
    stored = storage_dtype(FORMATS[name].element, backend)
    scales = jax.ShapeDtypeStruct(shape[:-1], jnp.uint32) if FORMATS[name].has_scales else None
    return KVCache(jax.ShapeDtypeStruct(shape, stored), scales, FORMATS[name], None)


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_that_copies_the_pool_is_caught(target):
    """Negative control: two different pools as results need a second one in memory."""
    pool = jax.ShapeDtypeStruct((4, 4096, 2, 16, 256), storage_dtype("bfloat16", platform(target)))
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = jax.ShapeDtypeStruct((8, 2, 128), jnp.float32)

    def write_twice(pool, k, block, slot):
        first, _ = write_kv(pool, None, 1, k, k, block, slot, kv_dtype="bfloat16")
        return first, write_kv(first, None, 2, k, k, block, slot, kv_dtype="bfloat16")

    compiled = compile_for(target, write_twice, pool, rows, ids, ids, donate=(0,))
    with pytest.raises(AssertionError):
        assert_in_place(compiled, pool)


@pytest.mark.parametrize("target", ["v6e", "h200", "cpu"])
def test_the_loop_of_a_whole_generation_updates_the_pool_in_place(target):
    backend = platform(target)
    model = decoder(WINDOWS["windowed"], "bfloat16")
    init = functools.partial(
        functional.init_cache,
        model,
        num_seqs=8,
        max_len=2048,
        num_blocks=8192,
        block_size=128,
        attention=KERNELS.get(target, "xla"),
        platform=backend,
    )
    cache = jax.eval_shape(init)
    ids, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 100), (2,)))
    seeds = jax.ShapeDtypeStruct((8, 2), jnp.uint32)

    def run(params, cache, ids, lens, seeds):
        return functional.generate(
            model, params, cache, ids, lens, seeds, n=4, max_tokens=16, max_num_batched_tokens=64
        )

    args = (abstract_params(model, backend), cache, ids, lens, seeds)
    compiled = compile_for(target, run, *args, donate=(1,), place=place_like_engine)
    assert_in_place(compiled, cache.kv.pool)
