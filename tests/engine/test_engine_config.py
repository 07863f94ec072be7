"""Engine settings are checked where they are made, and against the model."""

import dataclasses
import logging
from typing import Any

import jax
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError
from pagedjax.memory import block_bytes, default_num_blocks, slot_bytes
from pagedjax.models.config import NO_WINDOW
from pallas_kernels import FORMATS
from tests.engine.tiny import MAX_POSITION, SLIDING, UNIFORM, tiny_engine, tiny_params


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("block_size", 0, r"in \[1, 1024\]"),
        ("block_size", 1025, r"in \[1, 1024\]"),
        ("num_blocks", 1, "at least 2"),
        ("num_blocks", 0, "at least 2"),
        ("max_model_len", 1, "at least 2"),
        ("max_model_len", 0, "at least 2"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_batched_tokens", 31, "at least max_num_seqs, 32"),
        ("memory_utilization", 0.0, r"in \(0, 1\]"),
        ("memory_utilization", 1.5, r"in \(0, 1\]"),
        ("memory_utilization", float("nan"), r"in \(0, 1\]"),
        ("seed", -1, "at least 0"),
        ("dtype", "float64", "one of .*'bfloat16'"),
        ("kv_cache_dtype", "int3", "one of .*'bfloat16'"),
        ("preemption_mode", "drop", "one of .*'recompute'"),
        ("swap_space_bytes", -1, "at least 0"),
        ("host_cache_bytes", -1, "at least 0"),
        ("num_decode_steps", 0, "at least 1"),
        ("logits_processors", [len], "a tuple of functions"),
        ("attention", "magic", "one of .*'xla'"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_value_and_the_limit(
    name: str, value: Any, limit: str
) -> None:
    with pytest.raises(ConfigError, match=limit) as caught:
        EngineConfig(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}; it must be ")


def test_the_ends_of_the_ranges_are_allowed() -> None:
    EngineConfig(
        block_size=1, num_blocks=2, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1
    )
    EngineConfig(block_size=1024, memory_utilization=1.0, seed=2**70)
    EngineConfig(swap_space_bytes=0, host_cache_bytes=0)
    for mode in ("auto", "swap", "recompute"):
        assert EngineConfig(preemption_mode=mode).preemption_mode == mode


def test_max_model_len_may_not_exceed_the_model_and_defaults_to_it() -> None:
    assert tiny_engine(max_model_len=None).limits.max_model_len == MAX_POSITION
    assert tiny_engine(max_model_len=MAX_POSITION).limits.max_model_len == MAX_POSITION
    with pytest.raises(ConfigError, match=f"is {MAX_POSITION + 1}; .* for {MAX_POSITION} tokens"):
        tiny_engine(max_model_len=MAX_POSITION + 1)


def test_the_pool_of_an_accelerator_leaves_room_for_weights_and_slots() -> None:
    limits = tiny_engine(max_num_seqs=4).limits
    form = FORMATS["float32"]
    size = block_bytes(UNIFORM, limits.block_size, form)
    slots = slot_bytes(UNIFORM, limits)
    assert slots >= 4 * UNIFORM.vocab_size * 4
    stats = {"bytes_limit": 2 * (slots + 5 * size) + 1000, "bytes_in_use": 1000 // 2}
    assert default_num_blocks(UNIFORM, limits, form, stats, 0.5) == 5 + 1
    stats["bytes_in_use"] += size
    assert default_num_blocks(UNIFORM, limits, form, stats, 0.5) == 4 + 1


def test_without_num_blocks_the_pool_holds_all_requests_at_full_length() -> None:
    engine = tiny_engine(SLIDING, max_model_len=33, block_size=16, max_num_seqs=3)
    assert engine.scheduler.pool.num_usable == 3 * 2 * 3  # requests, groups, blocks a table
    assert engine.runner.state.cache.pool.shape[1] == 18 + 1


@pytest.mark.parametrize(
    ("kv_cache_dtype", "meant", "token_bytes"),
    [
        *(("auto", "float32", 64), ("bfloat16", "bfloat16", 32), ("fp8", "fp8", 20)),
        *(("int8", "int8", 20), ("k8v4", "k8v4", 16), ("int4", "int4", 12)),
    ],
)
def test_the_pool_has_the_dtype_that_was_asked_for(
    kv_cache_dtype: Any, meant: str, token_bytes: int
) -> None:
    """Bytes of K and V of 8 elements, and of their scales."""
    engine = tiny_engine(kv_cache_dtype=kv_cache_dtype)
    cache, size = engine.runner.state.cache, engine.pool_size
    assert cache.kv_format == size.kv_format == FORMATS[meant]
    blocks = size.num_blocks + 1
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == blocks * size.block_bytes
    assert size.block_bytes == token_bytes * np.prod(cache.pool.shape[2:4]) * cache.pool.shape[0]
    assert f"{size.num_tokens} tokens fit" in str(size)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize(
    ("name", "most"), [("fp8", 0.52), ("int8", 0.52), ("k8v4", 0.39), ("int4", 0.27)]
)
def test_a_quantized_pool_takes_a_half_or_a_quarter_of_bfloat16(
    name: str, most: float, head_dim: int
) -> None:
    model = dataclasses.replace(UNIFORM, head_dim=head_dim)
    for block_size in (16, 64):
        plain = block_bytes(model, block_size, FORMATS["bfloat16"])
        assert block_bytes(model, block_size, FORMATS[name]) <= most * plain


def test_the_engine_says_how_much_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagedjax.engine"):
        engine = tiny_engine(SLIDING, kv_cache_dtype="int4", num_blocks=8, block_size=4)
    assert engine.pool_size.num_tokens == 3 * 4, "seven blocks for two KV groups"
    assert "7 blocks of 4 tokens: 12 tokens fit" in caplog.text


def test_the_host_pool_holds_the_blocks_of_both_its_uses() -> None:
    # 2 layers a group, 2 KV heads, 4 tokens, K and V of 8 float32 each.
    size = 2 * 2 * 4 * 2 * 8 * 4
    for swap, cache, usable in [(0, 0, 0), (size - 1, 0, 0), (3 * size, 0, 3), (size, 2 * size, 3)]:
        engine = tiny_engine(block_size=4, swap_space_bytes=swap, host_cache_bytes=cache)
        assert engine.scheduler.blocks.host.num_usable == usable
        assert (engine.scheduler.pool.on_evict is not None) == (cache > 0)


def test_the_scheduler_gets_the_windows_of_the_model() -> None:
    assert tiny_engine(SLIDING).limits.windows == SLIDING.kv_layout.windows == (5, NO_WINDOW)
    assert tiny_engine(UNIFORM).limits.windows == (NO_WINDOW,)


def test_an_engine_without_settings_takes_the_defaults() -> None:
    engine = LLMEngine(UNIFORM, tiny_params(UNIFORM))
    assert engine.config == EngineConfig()
    assert engine.limits.max_model_len == MAX_POSITION
