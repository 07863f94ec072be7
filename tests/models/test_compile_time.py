"""What stacking the layers buys: few arrays, and a compile time that does not grow with depth."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.decoder import KVCache, StepInput, abstract_params, bind
from pagedjax.models.families import from_hf
from pallas_kernels import plain_format
from tests.models.real_configs import LLAMA_2_7B

ROUNDS = 3


def tiny(num_layers: int) -> DecoderConfig:
    config, _ = from_hf(LLAMA_2_7B, "float32")
    return dataclasses.replace(
        config,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        windows=(NO_WINDOW,) * num_layers,
        rope_of_layer=(0,) * num_layers,
    )


def ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def compile_seconds(config: DecoderConfig) -> float:
    """Trace, lower and compile one step; a new function each time, so nothing is cached."""
    pool = jax.ShapeDtypeStruct((config.num_layers, 9, 2, 4, 16), jnp.float32)

    def step(params, token_ids, inputs, pool):
        cache = KVCache(pool, None, plain_format("float32"), None)
        model = bind(config, params)
        hidden, cache = model(token_ids, inputs, cache)
        return model.logits(hidden), cache.pool

    params = abstract_params(config, "cpu")
    inputs = StepInput(ints(8), ints(3), ints(2), ints(1, 2, 4))
    start = time.perf_counter()
    jax.jit(step, donate_argnums=3).lower(params, ints(8), inputs, pool).compile()
    return time.perf_counter() - start


def test_a_llama_is_under_25_arrays() -> None:
    params = abstract_params(tiny(32), "cpu")
    assert len(jax.tree.leaves(params)) < 25


@pytest.fixture
def _nothing_is_kept() -> Iterator[None]:
    """The persistent cache of the session keeps no program, so every compilation is one."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("_nothing_is_kept")
def test_32_layers_compile_like_4() -> None:
    shallow, deep = tiny(4), tiny(32)
    compile_seconds(shallow)
    # Alternating, so that a busy machine slows both.
    times = [(compile_seconds(shallow), compile_seconds(deep)) for _ in range(ROUNDS)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    assert medians[1] < 1.5 * medians[0]
