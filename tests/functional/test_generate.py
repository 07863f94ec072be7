"""The loop on the device says what the engine says."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import functional
from pagedjax.errors import ConfigError
from pagedjax.finish_code import FinishCode
from pagedjax.functional import Cache, Generation, Sampling
from pagedjax.llm import LLM
from pagedjax.models.config import DecoderConfig
from pagedjax.outputs import CompletionOutput
from pagedjax.sampling_params import SamplingParams
from tests.engine.tiny import EOS, SLIDING, UNIFORM, tiny_engine, tiny_params, tiny_tokenizer

MAX_TOKENS = 12
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [40], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7, 7, 7, 7]]
STOPS = (EOS, 11)


@functools.partial(
    jax.jit,
    static_argnames=("config", "max_tokens", "n", "max_num_batched_tokens", "logits_processor"),
    donate_argnames="cache",
)
def generate(
    config: DecoderConfig, params: Any, cache: Cache, *args: Any, **options: Any
) -> tuple[Cache, Generation]:
    return functional.generate(config, params, cache, *args, **options)


def padded(prompts: list[list[int]], width: int = 11) -> tuple[jax.Array, jax.Array]:
    """Prompts and their lengths; what stands behind a prompt is a token like any other."""
    rows = np.full((len(prompts), width), 17, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(rows), jnp.array([len(p) for p in prompts], jnp.int32)


def cache_of(config: DecoderConfig, num_seqs: int, **options: Any) -> Cache:
    return functional.init_cache(config, num_seqs=num_seqs, max_len=48, block_size=4, **options)


def assert_empty(cache: Cache) -> None:
    num_blocks = cache.kv.pool.shape[1]
    assert not np.asarray(cache.block_tables).any()
    assert not np.asarray(cache.context_lens).any()
    assert sorted(np.asarray(cache.free)[: num_blocks - 1].tolist()) == list(range(1, num_blocks))
    assert int(cache.num_free) == num_blocks - 1


def assert_same(found: Generation, row: int, wanted: CompletionOutput) -> None:
    length = len(wanted.token_ids)
    assert int(found.lengths[row]) == length
    assert tuple(np.asarray(found.token_ids[row, :length]).tolist()) == wanted.token_ids
    assert wanted.finish_reason is not None
    assert int(found.finish_reasons[row]) == FinishCode.of(wanted.finish_reason)
    assert np.asarray(found.mask[row]).tolist() == [i < length for i in range(MAX_TOKENS)]
    assert wanted.logprobs is not None
    for name, values in (
        ("logprobs", [p.sampled for p in wanted.logprobs]),
        ("processed_logprobs", [p.processed for p in wanted.logprobs]),
    ):
        row_values = np.asarray(getattr(found, name)[row])
        np.testing.assert_allclose(row_values[:length], values, atol=1e-5)
        assert not row_values[length:].any()


CASES = {
    "greedy": (Sampling(temperature=0.0), {"temperature": 0.0}, 1),
    "seeded": (Sampling(temperature=1.3), {"temperature": 1.3}, 3),
    "cut": (
        Sampling(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01),
        {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        2,
    ),
    "penalties": (
        Sampling(
            presence_penalty=0.7,
            frequency_penalty=-0.5,
            repetition_penalty=1.4,
            min_tokens=5,
        ),
        {
            "presence_penalty": 0.7,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.4,
            "min_tokens": 5,
        },
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("config", [UNIFORM, SLIDING], ids=["uniform", "sliding"])
def test_tokens_and_logprobs_are_those_of_the_engine(config: DecoderConfig, case: str) -> None:
    sampling, fields, n = CASES[case]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, seed=seed, n=n, stop_token_ids=STOPS, logprobs=0, **fields
        )
        for seed in (3, 2**40 + 5, 11, 12)
    ]
    llm = LLM(tiny_engine(config, tiny_tokenizer()))
    wanted = [c for output in llm.generate(PROMPTS, params) for c in output.outputs]
    seeds = functional.engine_seeds([p.seed or 0 for p in params], n)
    cache, found = generate(
        config,
        tiny_params(config),
        cache_of(config, len(PROMPTS) * n),
        *padded(PROMPTS),
        jnp.asarray(seeds),
        max_tokens=MAX_TOKENS,
        n=n,
        sampling=sampling,
        stop_token_ids=STOPS,
        max_num_batched_tokens=16,
    )
    assert len(wanted) == len(PROMPTS) * n
    for row, completion in enumerate(wanted):
        assert_same(found, row, completion)
    assert not np.asarray(found.overflow).any()
    assert_empty(cache)
