"""The loop on the device says what the engine says."""

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
from pagedjax.logits import LogitsContext
from pagedjax.models.config import DecoderConfig
from pagedjax.outputs import CompletionOutput
from pagedjax.sampling_params import SamplingParams
from tests.engine.fresh import fresh_engine
from tests.engine.tiny import EOS, SLIDING, UNIFORM, tiny_params, tiny_tokenizer

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


def _processor(logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Of all that it may look at."""
    is_last = jnp.arange(len(logits), dtype=jnp.int32) == context.tail[-1]
    logits = jnp.where(is_last | (context.output_counts > 1), logits - 3, logits)
    return jnp.where(context.in_prompt & (context.position % 2 == 0), -jnp.inf, logits)


CASES: dict[str, tuple[DecoderConfig, Sampling, dict, int]] = {
    "greedy": (UNIFORM, Sampling(temperature=0.0), {"temperature": 0.0}, 3),
    "seeded": (UNIFORM, Sampling(temperature=1.3), {"temperature": 1.3}, 3),
    "cut": (
        SLIDING,
        Sampling(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01),
        {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        2,
    ),
    "penalties": (
        UNIFORM,
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
            "logits_processor": _processor,
        },
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_the_engine(case: str) -> None:
    config, sampling, fields, n = CASES[case]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            seed=seed,
            n=1 if case == "greedy" else n,
            stop_token_ids=STOPS,
            logprobs=0,
            **fields,
        )
        for seed in (3, 2**40 + 5, 11, 12)
    ]
    llm = LLM(fresh_engine(config, tokenizer=tiny_tokenizer()))
    wanted = [c for output in llm.generate(PROMPTS, params) for c in output.outputs]
    if case == "greedy":  # all samples are alike, and the program is the next case's
        wanted = [completion for completion in wanted for _ in range(n)]
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
        logits_processor=fields.get("logits_processor"),
        max_num_batched_tokens=16,
    )
    assert len(wanted) == len(PROMPTS) * n
    for row, completion in enumerate(wanted):
        assert_same(found, row, completion)
    assert not np.asarray(found.overflow).any()
    assert_empty(cache)


@functools.partial(jax.jit, static_argnames="num_blocks")
def sampled(
    params: Any, key: jax.Array, ids: jax.Array, order: jax.Array, num_blocks: int | None = None
) -> tuple[Cache, Generation]:
    """Two samples of each prompt; the prompts in another order."""
    cache = cache_of(UNIFORM, 2 * len(PROMPTS), num_blocks=num_blocks)
    prompts, lens = padded(PROMPTS)
    prompts, lens = prompts[order], lens[order]
    seeds = functional.request_seeds(key, ids, 2)
    return functional.generate(
        UNIFORM, params, cache, prompts, lens, seeds, n=2, max_tokens=MAX_TOKENS
    )


def test_a_random_stream_belongs_to_its_request_wherever_that_stands() -> None:
    ids, order = jnp.array([4, 9, 2, 7], jnp.int32), jnp.array([2, 0, 3, 1], jnp.int32)
    params, key = tiny_params(UNIFORM), jax.random.key(5)
    same = jnp.arange(4, dtype=jnp.int32)
    _, one = sampled(params, key, ids, same)
    _, other = sampled(params, key, ids[order], order)
    assert len({tuple(row) for row in np.asarray(one.token_ids).tolist()}) == 8
    rows = (2 * np.asarray(order)[:, None] + np.arange(2)).ravel()
    assert np.array_equal(np.asarray(one.token_ids)[rows], other.token_ids)
    _, third = sampled(params, jax.random.key(6), ids, same)
    assert not np.array_equal(one.token_ids, third.token_ids)


def test_a_pool_that_is_too_small_is_told_as_data() -> None:
    ids = jnp.arange(4, dtype=jnp.int32)
    args = tiny_params(UNIFORM), jax.random.key(1), ids, ids
    _, whole = sampled(*args)
    cache, found = sampled(*args, num_blocks=19)
    assert_empty(cache)
    overflow = np.asarray(found.overflow)
    assert overflow.any()
    assert not overflow.all()
    for row, is_short in enumerate(overflow.tolist()):
        length = int(found.lengths[row])
        code = FinishCode.OVERFLOW if is_short else FinishCode.LENGTH
        assert int(found.finish_reasons[row]) == code
        assert length < MAX_TOKENS if is_short else length == MAX_TOKENS
        assert np.array_equal(found.token_ids[row, :length], whole.token_ids[row, :length])
        np.testing.assert_allclose(found.logprobs[row, :length], whole.logprobs[row, :length], 1e-5)


def test_a_training_step_around_it_has_no_callback_and_updates_the_pool_in_place() -> None:
    params, cache = tiny_params(SLIDING), cache_of(SLIDING, 4)
    prompts, lens = padded(PROMPTS)

    def loss(params: Any, tokens: jax.Array, mask: jax.Array, weight: jax.Array) -> jax.Array:
        return (functional.score(SLIDING, params, tokens, mask) * weight).sum()

    def train_step(params: Any, cache: Cache, key: jax.Array) -> tuple:
        seeds = functional.request_seeds(key, jnp.arange(4, dtype=jnp.int32))
        cache, out = functional.generate(
            SLIDING, params, cache, prompts, lens, seeds, max_tokens=MAX_TOKENS
        )
        tokens = jnp.concatenate([prompts, out.token_ids], axis=1)
        given = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None] < lens[:, None]
        mask = jnp.concatenate([given, out.mask], axis=1)
        own = jnp.concatenate([jnp.zeros_like(given), out.mask], axis=1)
        logprobs = functional.score(SLIDING, params, tokens, mask)[:, prompts.shape[1] :]
        difference = jnp.abs(jnp.where(out.mask, logprobs - out.logprobs, 0)).max()
        grads = jax.grad(loss)(params, tokens, mask, own.astype(jnp.float32))
        return cache, jax.tree.map(lambda p, g: p + 1e-3 * g, params, grads), difference

    jitted = jax.jit(train_step, donate_argnames="cache")
    traced = jitted.trace(params, cache, jax.random.key(0))
    assert "callback" not in str(traced.jaxpr)
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.kv.pool.nbytes
    new, trained, difference = compiled(params, cache, jax.random.key(0))
    assert cache.kv.pool.is_deleted()
    assert_empty(new)
    assert float(difference) < 1e-5
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, trained)
    assert all(value > 0 for value in jax.tree.leaves(moved))


def test_it_runs_under_scan_and_shard_map() -> None:
    params = tiny_params(UNIFORM)
    prompts, lens = padded(PROMPTS)
    seeds = functional.request_seeds(jax.random.key(3), jnp.arange(4, dtype=jnp.int32))

    def two(cache: Cache, prompts: jax.Array, lens: jax.Array, seeds: jax.Array) -> tuple:
        return functional.generate(UNIFORM, params, cache, prompts, lens, seeds, max_tokens=6)

    @jax.jit
    def by_scan() -> jax.Array:
        pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), (prompts, lens, seeds))
        _, out = jax.lax.scan(lambda c, pair: two(c, *pair), cache_of(UNIFORM, 2), pairs)
        return out.token_ids.reshape(4, -1)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = jax.sharding.PartitionSpec("data")

    def shard(*own: jax.Array) -> jax.Array:
        return two(cache_of(UNIFORM, 2), *own)[1].token_ids

    by_shards = jax.shard_map(shard, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    found = jax.jit(by_shards)(prompts, lens, seeds)
    assert found.shape == (4, 6)
    assert np.array_equal(by_scan(), found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"n": 2}, "4 prompts with n 2 are 8 sequences; the cache is for 4"),
        ({"max_tokens": 39}, "need room for 49 tokens; a sequence of the cache has 48"),
        ({"seeds": jnp.zeros((3, 2), jnp.uint32)}, "3 seeds; there are 4 sequences"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_when_it_is_traced(change: dict, message: str) -> None:
    options = {"max_tokens": 4, "seeds": jnp.zeros((4, 2), jnp.uint32), **change}
    seeds = options.pop("seeds")
    cache = cache_of(UNIFORM, 4)
    with pytest.raises(ConfigError, match=message):
        functional.generate(
            UNIFORM, tiny_params(UNIFORM), cache, *padded(PROMPTS), seeds, **options
        )
