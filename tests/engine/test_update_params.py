"""Other weights for an engine at work: no request has tokens of two of them, and none is lost."""

import asyncio
import functools

import jax
import numpy as np
import pytest

from pagedjax.async_llm import AsyncLLM
from pagedjax.beam_search import BeamSearchParams
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError
from pagedjax.llm import LLM
from pagedjax.metrics import take_snapshot
from pagedjax.models.decoder import Params, random_params
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestOutput
from pagedjax.request import FinishReason
from tests.engine.fresh import (
    assert_greedy,
    assert_idle,
    assert_prompt_logprobs,
    fresh_engine,
    greedy,
    seeded,
    step_until_done,
)
from tests.engine.tiny import (
    UNIFORM,
    generate,
    random_prompts,
    tiny_params,
    tiny_tokenizer,
)

GIVES_WAY = RequestOptions(priority=1)
PROMPTS = random_prompts(31, [9, 14, 7, 22, 11, 6])


@functools.cache
def other(seed: int = 1) -> Params:
    """Weights that are not the oracle's, which engines begin with."""
    return random_params(UNIFORM, "cpu", seed)


def other_engine() -> LLMEngine:
    engine = fresh_engine()
    engine.update_params(other())
    return engine


def copied(params: Params, device: int = 0) -> Params:
    """Arrays of their own."""
    target = jax.devices()[device]
    return jax.tree.map(lambda x: jax.device_put(np.array(x), target), params)


def pointers(params: Params) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)]


def same(one: RequestOutput, another: RequestOutput) -> bool:
    """Whether tokens, texts and ends are the same."""
    return [(c.index, c.token_ids, c.text, c.finish_reason) for c in one.completions] == [
        (c.index, c.token_ids, c.text, c.finish_reason) for c in another.completions
    ]


# --- which arrays the engine takes ---


def test_arrays_that_are_in_place_are_taken_as_they_are() -> None:
    engine = fresh_engine()
    shardings = engine.param_shardings()
    assert jax.tree.structure(shardings) == jax.tree.structure(engine.runner.params)
    make = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), out_shardings=shardings)
    for params in (make(other()), copied(other())):
        before = engine.weights_version
        engine.update_params(params)
        assert pointers(engine.runner.params) == pointers(params)
        assert engine.weights_version == before + 1
    (output,) = generate(engine, [PROMPTS[0]], greedy(4))
    assert same(output, generate(other_engine(), [PROMPTS[0]], greedy(4))[0])


def test_arrays_on_another_device_are_brought_here() -> None:
    engine, params = fresh_engine(), copied(other(), device=1)
    assert jax.tree.leaves(params)[0].devices() == {jax.devices()[1]} != {engine.device}
    LLM(engine).update_params(params)
    for x in jax.tree.leaves(engine.runner.params):
        assert (x.devices(), x.committed) == ({engine.device}, True)
    jax.tree.map(np.testing.assert_array_equal, engine.runner.params, params)
    on_host = jax.tree.map(np.asarray, tiny_params(UNIFORM))
    engine.update_params(on_host)
    (output,) = generate(engine, [PROMPTS[0]], greedy(4))
    assert_greedy(UNIFORM, PROMPTS[0], output.outputs[0], 4)


def test_what_does_not_fit_or_is_gone_is_refused_by_name_and_changes_nothing() -> None:
    engine = fresh_engine()
    donated = copied(other())
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated["layers"]["down"])
    wide = {**other(), "embed": np.zeros((97, 33), np.float32)}
    half = {**other(), "embed": np.zeros((97, 32), np.float16)}
    engine.add_request(PROMPTS[0], greedy(4))
    engine.step()
    for params, message in (
        (donated, r"\['layers'\]\['down'\] was deleted"),
        (wide, r"\['embed'\] is float32\[97, 33\]; it must be float32\[97, 32\]"),
        (half, r"\['embed'\] is float16"),
        ({}, "is absent"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.update_params(params)
    with pytest.raises(ConfigError, match=r"in_flight is 'later'; it must be one of .*finish"):
        engine.update_params(other(), in_flight="later")  # type: ignore[arg-type]
    assert engine.weights_version == 0
    engine.add_request(PROMPTS[1], greedy(4))
    for output in step_until_done(engine).values():
        assert_greedy(UNIFORM, list(output.prompt_token_ids), output.outputs[0], 4)


def test_weights_that_were_given_up_may_be_replaced() -> None:
    engine = fresh_engine()
    params = copied(tiny_params(UNIFORM))
    engine.update_params(params)
    train = jax.jit(lambda p: jax.tree.map(lambda x: x * 1, p), donate_argnums=0)
    engine.update_params(train(params))  # which gave those of the engine up as well
    (output,) = generate(engine, [PROMPTS[0]], greedy(4))
    assert_greedy(UNIFORM, PROMPTS[0], output.outputs[0], 4)


# --- "finish" ---


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_those_who_have_begun_finish_and_the_others_begin_with_the_new(
    async_scheduling: bool, mode: str
) -> None:
    engine = fresh_engine(
        host_blocks=99,
        max_num_seqs=2,
        preemption_mode=mode,
        async_scheduling=async_scheduling,
    )
    preempted, running, urgent, waiting, added, latest = (list(prompt) for prompt in PROMPTS)
    ids = {"preempted": engine.add_request(preempted, seeded(1, 6, n=2), options=GIVES_WAY)}
    for _ in range(3):
        engine.step()
    ids["running"] = engine.add_request(running, greedy(9))
    ids["urgent"] = engine.add_request(urgent, greedy(2))
    for _ in range(2):
        engine.step()
    assert list(engine.scheduler.waiting)[-1].num_preemptions == 1
    ids["waiting"] = engine.add_request(waiting, greedy(4), options=RequestOptions(priority=-1))
    engine.update_params(other(2))
    engine.update_params(other())  # instead of the former
    ids["added"] = engine.add_request(added, seeded(2, 4, n=2))
    assert engine.weights_version == 0
    held = [tracked.request_id for tracked in engine.scheduler.held]
    assert held == [ids["waiting"], ids["added"]]
    snapshot = take_snapshot(engine.scheduler, engine.compiles, 0, False)
    assert (snapshot.num_requests_waiting, snapshot.num_requests_running) == (3, 2)
    finished: dict[str, RequestOutput] = {}
    while engine.weights_version == 0:
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert finished.keys() == {ids[name] for name in ("preempted", "running", "urgent")}
    ids["latest"] = engine.add_request(latest, greedy(3))
    finished |= step_until_done(engine)
    assert engine.weights_version == 1
    assert_idle(engine)
    old, new = fresh_engine(), other_engine()
    for key, prompt, params, reference in (
        ("preempted", preempted, seeded(1, 6, n=2), old),
        ("running", running, greedy(9), old),
        ("urgent", urgent, greedy(2), old),
        ("waiting", waiting, greedy(4), new),
        ("added", added, seeded(2, 4, n=2), new),
        ("latest", latest, greedy(3), new),
    ):
        assert same(finished[ids[key]], generate(reference, [prompt], params)[0]), key


def test_the_weights_change_at_once_when_the_last_who_has_begun_is_aborted() -> None:
    engine = fresh_engine()
    begun = [engine.add_request(prompt, greedy(9)) for prompt in PROMPTS[:2]]
    engine.step()
    engine.update_params(other())
    waits = engine.add_request(PROMPTS[2], greedy(4))
    gone = engine.add_request(PROMPTS[3], seeded(1, n=2))
    assert engine.abort(gone, 0) is not None
    assert engine.abort(gone, 1) is not None
    for request_id, version in zip(begun, (0, 1), strict=True):
        engine.abort(request_id)
        assert engine.weights_version == version
    expected = generate(other_engine(), [PROMPTS[2]], greedy(4))[0]
    assert same(step_until_done(engine)[waits], expected)
    assert_idle(engine)


def test_a_restart_does_not_wait_for_an_update_that_does() -> None:
    engine = fresh_engine()
    begun = engine.add_request(PROMPTS[0], greedy(6))
    engine.step()
    engine.update_params(other(2))
    waits = engine.add_request(PROMPTS[1], greedy(6))
    engine.update_params(other(), in_flight="restart")
    assert engine.weights_version == 1
    finished = step_until_done(engine)
    expected = generate(other_engine(), PROMPTS[:2], greedy(6))
    assert same(finished[begun], expected[0])
    assert same(finished[waits], expected[1])
    assert engine.weights_version == 1


def test_blocks_of_other_weights_make_room_when_it_is_needed() -> None:
    engine = fresh_engine(usable_blocks=14, host_blocks=8, host_cache_bytes=1)
    for seed in range(4):
        engine.update_params(other(seed))
        prompt = PROMPTS[3]
        first, again = (generate(engine, [prompt], greedy(4))[0] for _ in range(2))
        assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 20)
        assert same(first, again)
    assert engine.scheduler.pool.num_cached > 2 * 6, "those of two versions"
    assert engine.cache_stats.offloaded > 0
    assert_idle(engine)


# --- "restart" ---


def add_one_of_each(engine: LLMEngine, stop: str) -> list[str]:
    """Requests of all kinds, whose tokens do not depend on each other."""
    add = engine.add_request
    return [
        add(PROMPTS[0], seeded(3, 9, n=3), "samples"),
        engine.add_beam_search(PROMPTS[1], BeamSearchParams(3, max_tokens=7), "beams"),
        add(PROMPTS[2], greedy(12, stop=[stop]), "stop", RequestOptions(output_kind="final")),
        add(PROMPTS[3], greedy(6, prompt_logprobs=2, logprobs=1), "logprobs"),
        add(PROMPTS[4], seeded(4, 9, repetition_penalty=1.3, min_tokens=3), "penalties"),
        add(PROMPTS[5], seeded(5, 9, n=2, best_of=3), "best", GIVES_WAY),
    ]


@pytest.fixture(scope="module")
def expected() -> tuple[str, dict[str, RequestOutput]]:
    """What all kinds give with the oracle's weights, and a stop string that comes up."""
    engine = fresh_engine(tokenizer=tiny_tokenizer())
    text = generate(engine, [PROMPTS[2]], greedy(12))[0].outputs[0].text.split()
    stop = text[6]
    add_one_of_each(engine, stop)
    return stop, step_until_done(engine)


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 11])
def test_those_who_have_begun_begin_again(
    expected: tuple[str, dict[str, RequestOutput]], async_scheduling: bool, mode: str, steps: int
) -> None:
    engine = fresh_engine(
        tokenizer=tiny_tokenizer(),
        usable_blocks=26,
        host_blocks=99,
        preemption_mode=mode,
        async_scheduling=async_scheduling,
    )
    engine.update_params(other())
    stop, outputs = expected
    add_one_of_each(engine, stop)
    early = {o.request_id for _ in range(steps) for o in engine.step() if o.finished}
    order = [r.request_id for r in engine.scheduler.running]
    engine.update_params(tiny_params(UNIFORM), in_flight="restart")
    assert engine.weights_version == 2
    assert not engine.scheduler.running
    assert [r.request_id for r in engine.scheduler.waiting][: len(order)] == order
    finished = step_until_done(engine)
    assert finished.keys() == outputs.keys() - early
    for request_id, output in finished.items():
        assert same(output, outputs[request_id]), request_id
        assert output.metrics.cached_tokens == 0
    if "logprobs" in finished:
        assert_prompt_logprobs(UNIFORM, finished["logprobs"], 2)
        assert_greedy(UNIFORM, PROMPTS[3], finished["logprobs"].outputs[0], 6)
    assert_idle(engine)


@pytest.mark.parametrize("use_prefix_cache", [True, False])
def test_who_begins_again_again_does_not_find_its_own_blocks(use_prefix_cache: bool) -> None:
    engine, params = fresh_engine(), seeded(6, 8, n=3)
    options = RequestOptions(use_prefix_cache=use_prefix_cache)
    request_id = engine.add_request(PROMPTS[3], params, options=options)
    for seed in (2, 3, 1):
        for _ in range(seed + 1):
            engine.step()
        engine.update_params(other(seed), in_flight="restart")
    output = step_until_done(engine)[request_id]
    assert same(output, generate(other_engine(), [PROMPTS[3]], params)[0])
    assert_idle(engine)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_sample_that_was_aborted_stays_so_and_a_finished_one_comes_again(steps: int) -> None:
    engine = fresh_engine()
    (prompt,) = random_prompts(32, [6])
    alone = generate(other_engine(), [prompt], seeded(7, 8, n=3))[0]
    request_id = engine.add_request(prompt, seeded(7, 8, n=3))
    for _ in range(steps):
        engine.step()
    engine.abort(request_id, 1)
    engine.update_params(other(), in_flight="restart")
    output = step_until_done(engine)[request_id]
    first, second, third = output.outputs
    assert (second.finish_reason, second.token_ids) == (FinishReason.ABORT, ())
    assert [first.token_ids, third.token_ids] == [alone.outputs[i].token_ids for i in (0, 2)]
    assert_idle(engine)


def test_a_sample_that_has_stopped_comes_again_with_those_that_have_not() -> None:
    engine = fresh_engine()
    params = seeded(7, 12, n=2)
    tokens = [c.token_ids for c in generate(engine, [PROMPTS[0]], params)[0].outputs]
    stop = next(t for t in tokens[0][1:4] if t not in tokens[1])
    params = seeded(7, 12, n=2, stop_token_ids=(stop,))
    request_id = engine.add_request(PROMPTS[0], params)
    while all(o.finish_reason is None for out in engine.step() for o in out.outputs):
        pass
    assert engine.is_unfinished(request_id)
    engine.update_params(other(), in_flight="restart")
    output = step_until_done(engine)[request_id]
    assert same(output, generate(other_engine(), [PROMPTS[0]], params)[0])


# --- beside an event loop ---


def test_tasks_get_tokens_of_one_version_while_the_weights_change() -> None:
    engine = fresh_engine(async_scheduling=True)
    old, new = fresh_engine(), other_engine()

    async def one(llm: AsyncLLM, prompt: list[int]) -> RequestOutput:
        return [output async for output in llm.generate(prompt, greedy(30))][-1]

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(engine) as llm:
            first = asyncio.create_task(one(llm, PROMPTS[0]))
            await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match="absent"):
                await llm.update_params({})
            await llm.update_params(other())
            second = await one(llm, PROMPTS[1])
            assert engine.weights_version == 1
            third = asyncio.create_task(one(llm, PROMPTS[2]))
            await asyncio.sleep(0.01)
            await llm.update_params(tiny_params(UNIFORM), in_flight="restart")
            return [await first, second, await third]

    outputs = asyncio.run(main())
    for output, prompt, references in zip(
        outputs, PROMPTS[:3], ([old, new], [new], [old]), strict=True
    ):
        assert any(same(output, generate(e, [prompt], greedy(30))[0]) for e in references)
    assert engine.weights_version == 2
    assert_idle(engine)
