"""Engines as good as new that compile next to nothing, and what tests of them have in common.

How many blocks there are, and who gets them, is the host's matter alone. So all engines of a tiny
model and a block size run the same program, one shape of step over a large pool, and each has a
scheduler of its own that may believe in a smaller one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from pagedjax.block_pool import BlockPool
from pagedjax.engine import LLMEngine
from pagedjax.memory import block_bytes
from pagedjax.models.config import DecoderConfig
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.plan import StepPlan
from pagedjax.request import TokenLogprobs
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler
from pallas_kernels import FORMATS
from tests.engine.tiny import (
    UNIFORM,
    in_one_shape,
    oracle_greedy,
    oracle_logprobs,
    tiny_engine,
)

MAX_NUM_SEQS, MAX_TOKENS = 8, 16
MAX_HOST_BLOCKS = 500
CONFIG: dict[str, Any] = {}
"""Of all engines; tests that are run again with another kind of pool set it."""


def fresh_engine(
    model: DecoderConfig = UNIFORM,
    block_size: int = 4,
    *,
    usable_blocks: int | None = None,
    host_blocks: int = 0,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_TOKENS,
    **config: Any,
) -> LLMEngine:
    """An engine with `check_invariants`, of at most 48 tokens a request.

    `usable_blocks` (None: enough for everybody) and `host_blocks` do not count the unused block 0.
    Unless `async_scheduling` is asked for, every step brings its own results: what happens at which
    step is easier to say then.
    """
    config = {"async_scheduling": False, "check_invariants": True, **CONFIG, **config}
    host_bytes = MAX_HOST_BLOCKS * block_bytes(model, block_size, FORMATS["float32"])
    engine = tiny_engine(
        model,
        block_size=block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        swap_space_bytes=host_bytes,
        **config,
    )
    in_one_shape(engine)
    limits = dataclasses.replace(
        engine.limits, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    num_blocks = engine.scheduler.pool.num_blocks if usable_blocks is None else usable_blocks + 1
    assert num_blocks <= engine.scheduler.pool.num_blocks
    assert host_blocks <= MAX_HOST_BLOCKS
    engine.scheduler = engine._processor.scheduler = Scheduler(
        limits, BlockPool(num_blocks), BlockPool(host_blocks + 1), engine.preemption.prefers_swap
    )
    return engine


def step_until_done(
    engine: LLMEngine, most: int = 3000, before: Callable[[int], None] = lambda step: None
) -> dict[str, RequestOutput]:
    """The finished outputs by request id; `before` is called with the number of every step."""
    finished = {}
    for step in range(most):
        before(step)
        if not engine.has_unfinished_requests():
            return finished
        finished |= {o.request_id: o for o in engine.step() if o.finished}
    raise AssertionError(f"the engine does not come to an end in {most} steps")


def assert_idle(engine: LLMEngine) -> None:
    """Every block and every slot is free."""
    scheduler = engine.scheduler
    assert not engine.has_unfinished_requests()
    assert len(scheduler) == 0
    for pool in (scheduler.pool, scheduler.blocks.host):
        assert pool.num_free == pool.num_usable
    scheduler.check()  # with nobody running: all slots, too


def watch_plans(engine: LLMEngine, watcher: Callable[[StepPlan], None]) -> None:
    """Call `watcher` with every plan right before it is dispatched."""
    dispatch = engine.runner.dispatch

    def watched(plan: StepPlan) -> Any:
        watcher(plan)
        return dispatch(plan)

    engine.runner.dispatch = watched  # type: ignore[method-assign]


def poison(engine: LLMEngine) -> None:
    """Fill every block that nobody owns and nobody can find, but for the null block, with NaN.

    Quantized ones get NaN for scales.
    """
    pool, state = engine.scheduler.pool, engine.runner.state
    unused = np.ones(state.cache.pool.shape[1], bool)
    for block in range(pool.num_blocks):
        unused[block] = not pool.ref_count(block) and pool.key_of(block) is None
    unused[0] = False
    cache = state.cache
    if cache.scales is None:
        cache = dataclasses.replace(cache, pool=_poisoned(cache.pool, unused, np.float32("nan")))
    else:
        scales = _poisoned(cache.scales, unused, np.uint32(0x7FC07FC0))
        cache = dataclasses.replace(cache, scales=scales)
    engine.runner.state = dataclasses.replace(state, cache=cache)


@jax.jit
def _poisoned(x: jax.Array, unused: jax.Array, value: jax.Array) -> jax.Array:
    return jax.numpy.where(unused.reshape(1, -1, *[1] * (x.ndim - 2)), value, x)


# --- what is asked for ---


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **fields}
    )


def seeded(seed: int, max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **fields)


# --- what is to come back ---


def assert_greedy(
    model: DecoderConfig, prompt: list[int], completion: CompletionOutput, max_tokens: int
) -> None:
    """The completion is the oracle's."""
    tokens, rows = oracle_greedy(model, prompt, max_tokens)
    assert completion.token_ids == tokens
    if completion.logprobs is not None:
        assert_logprobs(completion.logprobs, rows, tokens)


def assert_prompt_logprobs(model: DecoderConfig, output: RequestOutput, count: int) -> None:
    """All log-probabilities of the prompt are there, with `count` of the likeliest tokens."""
    prompt = list(output.prompt_token_ids)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt) - 1
    assert all(len(position.top) == count for position in output.prompt_logprobs)
    assert_logprobs(output.prompt_logprobs, oracle_logprobs(model, prompt)[:-1], prompt[1:])


def assert_logprobs(
    found: tuple[TokenLogprobs, ...], rows: np.ndarray, tokens: tuple[int, ...] | list[int]
) -> None:
    for got, row, token in zip(found, rows, tokens, strict=True):
        assert got.sampled == pytest.approx(row[token], abs=1e-4)
        likeliest = np.sort(row)[::-1][: len(got.top)]
        assert [value for _, value in got.top] == pytest.approx(likeliest.tolist(), abs=1e-4)
        for token_id, value in got.top:
            assert value == pytest.approx(row[token_id], abs=1e-4)
