"""An engine with the simulated GPU kernel gives the oracle's tokens, whatever it has to do."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from pagedjax.engine import LLMEngine
from pagedjax.models.config import DecoderConfig
from pagedjax.sampling_params import SamplingParams
from tests.engine.tiny import (
    SLIDING,
    UNIFORM,
    generate,
    in_one_shape,
    oracle_greedy,
    random_prompts,
    tiny_engine,
)
from tests.pallas_kernels.gpu_cases import threads_compiled_once

LAYER = dataclasses.replace(UNIFORM, num_layers=1, windows=UNIFORM.windows[:1], rope_of_layer=(0,))


@pytest.fixture(autouse=True)
def _fast_simulator() -> Iterator[None]:
    with threads_compiled_once():
        yield


def gpu_engine(model: DecoderConfig, **settings: Any) -> LLMEngine:
    """With head size and pool that the kernel knows; the rest of the model is float32."""
    model = dataclasses.replace(model, head_dim=64)
    settings = {"block_size": 16, "attention": "mosaic_gpu_interpret", **settings}
    engine = tiny_engine(model, None, kv_cache_dtype="float16", **settings)
    in_one_shape(engine)
    return engine


@pytest.fixture(scope="module")
def tight() -> LLMEngine:
    """Room for about two of the longest requests: others wait, or give way."""
    return gpu_engine(UNIFORM, num_blocks=9)


def assert_equal_the_oracle(engine: LLMEngine, lengths: list[int], num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    prompts = random_prompts(2, lengths)
    for prompt, output in zip(prompts, generate(engine, prompts, params), strict=True):
        completion = output.outputs[0]
        tokens, rows = oracle_greedy(engine.model, prompt, num_tokens)
        assert completion.token_ids == tokens
        assert completion.logprobs is not None
        for token, row, got in zip(tokens, rows, completion.logprobs, strict=True):
            # Keys and values are rounded to 11 bits.
            assert got.sampled == pytest.approx(row[token], abs=5e-3)
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_usable


def test_requests_in_a_tight_pool_equal_the_oracle(tight: LLMEngine) -> None:
    assert_equal_the_oracle(tight, [33, 1, 17, 40], 4)


@pytest.mark.slow
def test_windows_soft_caps_and_several_decode_steps_equal_the_oracle() -> None:
    assert_equal_the_oracle(gpu_engine(SLIDING, num_decode_steps=3), [3, 33], 7)


@pytest.mark.slow
def test_samples_that_share_blocks_equal_those_of_plain_xla(tight: LLMEngine) -> None:
    """The second prompt finds the first's blocks; samples copy the last block when they write."""
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=3, ignore_eos=True)
    (prompt,) = random_prompts(5, [21])
    plain = gpu_engine(UNIFORM, num_blocks=9, attention="xla")
    for prompts in ([prompt], [[*prompt, 3]]):
        outputs = [generate(engine, prompts, params)[0] for engine in (tight, plain)]
        found, want = ([c.token_ids for c in output.outputs] for output in outputs)
        assert found == want
    assert tight.cache_stats.prefix_hits > 0


@pytest.mark.slow
def test_deterministic_engines_give_the_same_bits_in_any_batch() -> None:
    engine = gpu_engine(LAYER, deterministic=True)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
    prompts = random_prompts(6, [19, 5, 34])
    together = generate(engine, prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        engine.reset_prefix_cache()
        (alone,) = generate(engine, [prompt], params)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
