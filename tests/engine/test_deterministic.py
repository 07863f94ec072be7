"""`deterministic=True`: a request's tokens and log-probabilities are the same bits always."""

import dataclasses
from random import Random
from typing import Any

import pytest

from pagedjax.buckets import Buckets
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError
from pagedjax.models.config import DecoderConfig
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from tests.engine.fresh import assert_idle, fresh_engine, step_until_done
from tests.engine.tiny import SLIDING, UNIFORM, generate, random_prompts, tiny_engine

MODELS = {"uniform": UNIFORM, "sliding": SLIDING}
KINDS = [("uniform", "float32", "auto"), ("sliding", "bfloat16", "auto")]
KINDS += [("uniform", "bfloat16", "int8"), ("sliding", "float32", "k8v4")]
LONG, *REST = random_prompts(41, [24, *range(1, 20)])


def _requests() -> list[tuple[list[int], SamplingParams]]:
    """20 requests, many of which begin alike, that ask for all kinds of things."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"seed": 1, "top_p": 0.9, "top_k": 40},
        {"seed": 2, "n": 2, "temperature": 1.3},
        {"seed": 3, "frequency_penalty": 0.5, "logit_bias": {4: 1.5}, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.2, "stop_token_ids": (9, 19, 29)},
    ]
    random = Random(5)
    return [
        (
            [*LONG[: random.choice([0, 8, 12, 24])], *prompt][:30],
            SamplingParams(
                max_tokens=random.randint(4, 14), logprobs=2, ignore_eos=True, **kinds[i % 5]
            ),
        )
        for i, prompt in enumerate([LONG, *REST])
    ]


REQUESTS = _requests()


def bits_of(output: RequestOutput) -> tuple[Any, ...]:
    """Everything that is to be the same, floats included."""
    streams = [(c.token_ids, c.logprobs, c.cumulative_logprob) for c in output.outputs]
    return tuple(streams), output.prompt_logprobs


def expected(model: DecoderConfig, kv_cache_dtype: str) -> list[tuple[Any, ...]]:
    """Every request alone in an engine without a prefix cache."""
    engine = fresh_engine(
        model, deterministic=True, enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype
    )
    return [bits_of(generate(engine, [prompt], params)[0]) for prompt, params in REQUESTS]


def random_engine(model: DecoderConfig, kv_cache_dtype: str, random: Random) -> LLMEngine:
    """Any block pool, budget and policy; the compiled program is the same for all."""
    worst_case = fresh_engine(model).scheduler.blocks.worst_case
    need = max(worst_case(len(p), len(p) + q.max_tokens - 1, q.num_samples) for p, q in REQUESTS)
    usable = need + random.choice([0, 0, 8, 30])
    return fresh_engine(
        model,
        deterministic=True,
        kv_cache_dtype=kv_cache_dtype,
        check_invariants=False,  # other tests do, and it takes longer than all else
        usable_blocks=usable,
        host_blocks=random.choice([0, 10, 100]),
        host_cache_bytes=random.choice([0, 1]),
        max_num_seqs=random.choice([2, 5, 8]),
        max_num_batched_tokens=random.randint(8, 16),
        preemption_mode=random.choice(["swap", "recompute"]),
        enable_prefix_caching=random.random() < 0.8,
        async_scheduling=random.random() < 0.5,
    )


def serve_at_random(engine: LLMEngine, random: Random) -> dict[int, RequestOutput]:
    """All requests in any order, at any time, with any priority."""
    order = random.sample(range(len(REQUESTS)), len(REQUESTS))
    steps = sorted(random.choice([0, random.randint(0, 60)]) for _ in order)
    to_come = list(zip(steps, order, strict=True))
    number_of: dict[str, int] = {}

    def arrive(step: int) -> None:
        idle = not engine.has_unfinished_requests()
        while to_come and (idle or to_come[0][0] <= step):
            _, number = to_come.pop(0)
            prompt, params = REQUESTS[number]
            options = RequestOptions(priority=random.choice([0, 0, 1]))
            number_of[engine.add_request(prompt, params, options=options)] = number
            idle = False

    finished: dict[str, RequestOutput] = {}
    while to_come or engine.has_unfinished_requests():
        finished |= step_until_done(engine, before=arrive)
    return {number_of[request_id]: output for request_id, output in finished.items()}


def check_schedules(kind: tuple[str, str, str], count: int, first: int = 0) -> None:
    """Rows come from hits, forks and the host, or are computed and quantized once more."""
    name, dtype, kv_cache_dtype = kind
    model = dataclasses.replace(MODELS[name], dtype=dtype)
    bits = expected(model, kv_cache_dtype)
    preemptions = hits = 0
    for seed in range(first, first + count):
        random = Random(seed)
        engine = random_engine(model, kv_cache_dtype, random)
        outputs = serve_at_random(engine, random)
        assert_idle(engine)
        for number, output in outputs.items():
            assert bits_of(output) == bits[number], f"schedule {seed}, request {number}"
            preemptions += output.metrics.preemptions
            hits += output.metrics.cached_tokens > 0
    assert preemptions > count
    assert hits > count


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_few_random_schedules_give_the_same_bits(kind: tuple[str, str, str]) -> None:
    check_schedules(kind, 6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_40_random_schedules_give_the_same_bits(kind: tuple[str, str, str]) -> None:
    check_schedules(kind, 40, first=100)


def test_every_step_has_the_largest_shape_rounded_up() -> None:
    for seqs, tokens, shape in ((4, 16, (16, 4)), (3, 17, (32, 4)), (5, 5, (16, 8))):
        engine = tiny_engine(deterministic=True, max_num_seqs=seqs, max_num_batched_tokens=tokens)
        assert engine.runner.buckets.all() == [shape]
        assert engine.runner.buckets.pick(1, 1) == shape
    assert Buckets(34, 100, is_single=True).all() == [(112, 48)]
    assert Buckets(17, 1024, is_single=True).all() == [(1024, 32)]


def test_several_steps_at_once_are_another_program_and_refused() -> None:
    with pytest.raises(ConfigError, match="num_decode_steps is 2; it must be 1 with determin"):
        tiny_engine(deterministic=True, num_decode_steps=2)
