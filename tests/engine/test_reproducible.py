"""A seeded request's tokens are its own: whatever is served beside it, and however.

In float32, where rounding differs too little between batches to change a token; `deterministic`
engines give the same bits in every dtype (`test_deterministic`).
"""

from collections.abc import Callable
from typing import Any

import pytest

from pagedjax.engine import LLMEngine
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestOutput
from pagedjax.request import Request
from pagedjax.sampling_params import SamplingParams
from tests.engine.fresh import assert_idle, fresh_engine, step_until_done
from tests.engine.tiny import (
    SLIDING,
    UNIFORM,
    generate,
    in_one_shape,
    random_prompts,
    tiny_engine,
    tiny_tokenizer,
)

MODELS = {"uniform": UNIFORM, "sliding": SLIDING}
PROMPT, *OTHERS = random_prompts(31, [21, *range(1, 32)])
PARAMS = {
    "plain": SamplingParams(seed=11, max_tokens=19, ignore_eos=True),
    "cut": SamplingParams(seed=2**62, max_tokens=19, temperature=1.5, top_k=30, top_p=0.9),
    "samples": SamplingParams(seed=3, max_tokens=12, n=3, min_p=0.01, logprobs=2),
    "adjusted": SamplingParams(
        seed=4,
        max_tokens=19,
        frequency_penalty=0.7,
        presence_penalty=0.3,
        repetition_penalty=1.3,
        logit_bias={5: 2.0, 6: -3.0},
        bad_words=("w1 w2", "w3"),
        min_tokens=4,
        stop_token_ids=(10, 20, 30),
        logprobs=1,
    ),
    "stopped": SamplingParams(seed=6, max_tokens=19, stop=("w1",), stop_token_ids=(40, 41, 42)),
    "greedy": SamplingParams(temperature=0, max_tokens=19, repetition_penalty=1.2),
}
WISHES = pytest.mark.parametrize("wish", PARAMS)


def tokens_of(output: RequestOutput) -> list[Any]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def engine_of(model: str, **config: Any) -> LLMEngine:
    return fresh_engine(MODELS[model], tokenizer=tiny_tokenizer(), **config)


def alone(model: str, wish: str, **config: Any) -> list[Any]:
    engine = engine_of(model, **config)
    (output,) = generate(engine, [PROMPT], PARAMS[wish])
    assert_idle(engine)
    return tokens_of(output)


def two_rivals(engine: LLMEngine, request: Request) -> Callable[[int], None]:
    """Requests that need every slot, each as soon as `request` has got on."""
    rivals: list[str] = []

    def disturb(_: int) -> None:
        if request in engine.scheduler.running and len(rivals) < 2:
            known = request.sequences[0].num_tokens
            if known > request.prompt_len + 2 * len(rivals):
                rivals.append(engine.add_request([1], SamplingParams(n=3, max_tokens=2)))

    return disturb


@WISHES
@pytest.mark.parametrize("model", MODELS)
def test_pipelined_or_not_and_several_steps_at_once(model: str, wish: str) -> None:
    expected = alone(model, wish)
    for config in (
        {"async_scheduling": True},
        {"num_decode_steps": 8},
        {"async_scheduling": True, "num_decode_steps": 8},
        {"async_scheduling": True, "max_num_batched_tokens": 8},
    ):
        assert alone(model, wish, **config) == expected, config


@WISHES
@pytest.mark.parametrize("num_decode_steps", [1, 8])
def test_behind_a_prefix_hit_and_preempted_twice(wish: str, num_decode_steps: int) -> None:
    expected = alone("sliding", wish)
    for mode in ("swap", "recompute"):
        engine = engine_of(
            "sliding",
            host_blocks=99,
            max_num_seqs=3,
            preemption_mode=mode,
            async_scheduling=True,
            num_decode_steps=num_decode_steps,
        )
        generate(engine, [PROMPT], PARAMS["plain"])  # so that its prefix is there
        last = RequestOptions(priority=1)
        request_id = engine.add_request(PROMPT, PARAMS[wish], options=last)
        request = engine._processor.tracked[request_id].request

        finished = step_until_done(engine, before=two_rivals(engine, request))
        assert tokens_of(finished[request_id]) == expected
        assert finished[request_id].metrics.cached_tokens > 0
        if num_decode_steps == 1 or wish != "samples":  # else it may be over too soon
            assert finished[request_id].metrics.preemptions == 2
        assert_idle(engine)


@pytest.mark.parametrize("num_decode_steps", [1, 8])
@pytest.mark.parametrize("overlaps", [False, True])
def test_in_a_batch_of_32(overlaps: bool, num_decode_steps: int) -> None:
    engine = tiny_engine(
        tokenizer=tiny_tokenizer(),
        max_num_seqs=34,
        max_num_batched_tokens=40,
        async_scheduling=overlaps,
        num_decode_steps=num_decode_steps,
    )
    in_one_shape(engine)
    each = [*PARAMS.values()]
    others = [each[i % len(each)] for i in range(31)]
    for place in (0, 16, 31):
        prompts, params = list(OTHERS), list(others)
        prompts.insert(place, PROMPT)
        wish = [*PARAMS][place % len(PARAMS)]
        params.insert(place, PARAMS[wish])
        outputs = generate(engine, prompts, params)
        assert tokens_of(outputs[place]) == alone("uniform", wish)


def test_other_seeds_give_other_tokens() -> None:
    engine = engine_of("uniform")
    streams = [
        tokens_of(generate(engine, [PROMPT], SamplingParams(seed=seed, max_tokens=12))[0])
        for seed in range(8)
    ]
    assert all(streams.count(stream) == 1 for stream in streams)
