"""An engine that sleeps holds no memory but its weights, and forgets nothing that was asked."""

import asyncio
import gc
from typing import Any

import jax
import pytest

from pagedjax.async_llm import AsyncLLM
from pagedjax.beam_search import BeamSearchParams
from pagedjax.engine import LLMEngine
from pagedjax.errors import EngineAsleepError
from pagedjax.llm import LLM
from pagedjax.models.decoder import random_params
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestOutput
from pagedjax.request import FinishReason
from tests.engine.fresh import (
    assert_greedy,
    assert_idle,
    fresh_engine,
    greedy,
    seeded,
    step_until_done,
    watch_plans,
)
from tests.engine.tiny import UNIFORM, generate, random_prompts

GIVES_WAY = RequestOptions(priority=1)
PROMPTS = random_prompts(41, [9, 14, 7, 22, 11])


def live_bytes() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def add_one_of_each(engine: LLMEngine) -> list[str]:
    add = engine.add_request
    return [
        add(PROMPTS[0], seeded(3, 9, n=3), "samples", GIVES_WAY),
        engine.add_beam_search(PROMPTS[1], BeamSearchParams(3, max_tokens=7), "beams"),
        add(PROMPTS[2], greedy(12, frequency_penalty=1.5, logit_bias={3: 2.0}), "penalties"),
        add(PROMPTS[3], seeded(4, 6, prompt_logprobs=1, bad_words=()), "prompt"),
        add(PROMPTS[4], seeded(5, 9, repetition_penalty=1.4, min_tokens=2), "late"),
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, RequestOutput]:
    """What all kinds give if nobody sleeps."""
    engine = fresh_engine()
    add_one_of_each(engine)
    return step_until_done(engine)


def assert_same(output: RequestOutput, other: RequestOutput) -> None:
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in other.completions]
    assert [c.finish_reason for c in output.completions] == [
        c.finish_reason for c in other.completions
    ]
    for name in ("sampled", "processed"):
        found, wanted = (
            [getattr(position, name) for position in o.prompt_logprobs or ()]
            for o in (output, other)
        )
        assert found == pytest.approx(wanted, abs=1e-5)


def test_the_device_state_is_gone_and_comes_again() -> None:
    engine = fresh_engine()
    generate(engine, PROMPTS[:2], greedy(3))
    awake, state = live_bytes(), engine.runner.state
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    pool = state.cache.pool.nbytes
    engine.sleep()
    engine.sleep()
    assert engine.is_sleeping
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.nbytes == pool for x in jax.live_arrays())
    assert live_bytes() == awake - size
    assert not any(x.is_deleted() for x in jax.tree.leaves(engine.runner.params))
    engine.wake()
    state = engine.runner.state
    engine.wake()
    assert engine.runner.state is state, "who is awake has nothing to make"
    assert not engine.is_sleeping
    assert live_bytes() == awake
    compiled = engine.compiles.num_programs
    for prompt, output in zip(PROMPTS, generate(engine, PROMPTS, greedy(4)), strict=True):
        assert output.metrics.cached_tokens == 0
        assert_greedy(UNIFORM, prompt, output.outputs[0], 4)
    assert engine.compiles.num_programs == compiled
    assert_idle(engine)


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_whenever_it_sleeps_the_tokens_are_the_same(
    expected: dict[str, RequestOutput], async_scheduling: bool, mode: str, every: int
) -> None:
    engine = fresh_engine(
        usable_blocks=26,
        host_blocks=99,
        host_cache_bytes=1,
        preemption_mode=mode,
        async_scheduling=async_scheduling,
    )
    add_one_of_each(engine)
    seen: dict[str, list[int]] = {}
    finished: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished_requests():
        if steps % every == every - 1 and steps < 30:
            engine.sleep()
            engine.scheduler.check()
            assert not engine.scheduler.running
            assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
            engine.wake()
        for output in engine.step():
            if output.completions and output.request_id != "beams":
                counts = seen.setdefault(output.request_id, [])
                counts.append(sum(len(c.token_ids) for c in output.completions))
            if output.finished:
                finished[output.request_id] = output
        steps += 1
    assert finished.keys() == expected.keys()
    for request_id, output in finished.items():
        assert_same(output, expected[request_id])
    assert all(counts == sorted(counts) for counts in seen.values()), "no token was lost"
    assert_idle(engine)


def test_what_is_in_host_memory_stays_there() -> None:
    engine = fresh_engine(
        host_blocks=99, max_num_seqs=1, preemption_mode="swap", host_cache_bytes=1
    )
    prompt, rival = PROMPTS[1], PROMPTS[0]
    params = seeded(5, 8, repetition_penalty=1.4)
    swapped = engine.add_request(prompt, params, options=GIVES_WAY)
    for _ in range(4):
        engine.step()
    engine.add_request(rival, greedy(3))
    engine.step()
    (request,) = engine.scheduler.waiting
    on_host = engine.scheduler.blocks.blocks_of(request)
    assert request.is_swapped
    engine.sleep()
    assert engine.scheduler.blocks.blocks_of(request) == on_host
    engine.wake()
    starts: list[tuple[str, int]] = []

    def watch(plan: Any) -> None:
        starts.extend((c.sequence.request.request_id, c.start) for c in plan.chunks)

    watch_plans(engine, watch)
    output = step_until_done(engine)[swapped]
    assert min(start for request_id, start in starts if request_id == swapped) > len(prompt)
    assert_same(output, generate(fresh_engine(), [prompt], params)[0])
    assert_idle(engine)


def test_prefixes_on_the_host_are_found_again_and_those_of_the_device_are_not() -> None:
    engine = fresh_engine(usable_blocks=14, host_blocks=99, host_cache_bytes=1)
    prompt, another, other = random_prompts(42, [24, 30, 30])
    for fill in (prompt, another, other):
        generate(engine, [fill], greedy(2))
    assert engine.cache_stats.offloaded > 0
    engine.sleep()
    assert engine.scheduler.pool.num_cached == 0
    engine.wake()
    found = [generate(engine, [fill], greedy(4))[0] for fill in (other, prompt)]
    assert found[0].metrics.cached_tokens == 0
    assert found[1].metrics.cached_tokens == engine.cache_stats.host_hits > 0
    for fill, output in zip((other, prompt), found, strict=True):
        assert_greedy(UNIFORM, fill, output.outputs[0], 4)


def test_while_it_sleeps_it_takes_requests_aborts_and_weights_but_no_step() -> None:
    engine = fresh_engine(async_scheduling=True)
    llm = LLM(engine)
    begun = engine.add_request(PROMPTS[0], greedy(6))
    gone = engine.add_request(PROMPTS[1], greedy(6))
    for _ in range(3):
        engine.step()
    llm.sleep()
    for call in (engine.step, engine.warmup, lambda: llm.generate(PROMPTS[2])):
        with pytest.raises(EngineAsleepError, match="wake it"):
            call()
    engine.update_params(random_params(UNIFORM, "cpu", 1))
    assert engine.weights_version == 0, "one has begun, and finishes with what it has"
    added = engine.add_request(PROMPTS[2], seeded(1, 5, n=2))
    output = engine.abort(gone)
    assert output is not None
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    llm.wake()
    finished = step_until_done(engine)
    assert finished.keys() == {begun, added}
    assert_greedy(UNIFORM, PROMPTS[0], finished[begun].outputs[0], 6)
    assert engine.weights_version == 1
    other = fresh_engine()
    other.update_params(random_params(UNIFORM, "cpu", 1))
    assert_same(finished[added], generate(other, [PROMPTS[2]], seeded(1, 5, n=2))[0])
    assert_idle(engine)


@pytest.mark.parametrize("swaps", [True, False])
def test_weights_that_restart_all_may_come_while_it_sleeps(swaps: bool) -> None:
    engine = fresh_engine(
        host_blocks=99, max_num_seqs=1, preemption_mode="swap" if swaps else "recompute"
    )
    ids = [engine.add_request(PROMPTS[0], seeded(1, 6), options=GIVES_WAY)]
    for _ in range(3):
        engine.step()
    ids.append(engine.add_request(PROMPTS[1], seeded(2, 6)))
    engine.step()
    engine.sleep()
    engine.update_params(random_params(UNIFORM, "cpu", 1), in_flight="restart")
    host = engine.scheduler.blocks.host
    assert host.num_free == host.num_usable
    engine.wake()
    finished = step_until_done(engine)
    other = fresh_engine()
    other.update_params(random_params(UNIFORM, "cpu", 1))
    for request_id, prompt, params in zip(ids, PROMPTS, (seeded(1, 6), seeded(2, 6)), strict=False):
        assert_same(finished[request_id], generate(other, [prompt], params)[0])


def test_the_last_output_of_a_request_that_ends_as_it_falls_asleep_is_kept() -> None:
    engine = fresh_engine(async_scheduling=True)
    llm = LLM(engine)
    with_llm = llm.stream([PROMPTS[0]], greedy(2))
    next(with_llm)  # the last token is on its way
    engine.sleep()
    assert engine.has_unfinished_requests()
    assert len(engine.scheduler) == 0
    engine.wake()
    ((_, output),) = with_llm
    assert output.finished
    assert_greedy(UNIFORM, PROMPTS[0], output.outputs[0], 2)
    assert not engine.has_unfinished_requests()
    assert_idle(engine)


def test_outputs_of_old_weights_that_were_kept_are_dropped_with_their_tokens() -> None:
    engine = fresh_engine(async_scheduling=True)
    request_id = engine.add_request(PROMPTS[0], greedy(6))
    for _ in range(3):
        engine.step()
    engine.sleep()
    engine.update_params(random_params(UNIFORM, "cpu", 1), in_flight="restart")
    engine.wake()
    counts = []
    while engine.is_unfinished(request_id):
        counts += [len(output.outputs[0].token_ids) for output in engine.step()]
    assert counts == [1, 2, 3, 4, 5, 6]


def test_tasks_wait_while_it_sleeps() -> None:
    engine = fresh_engine(async_scheduling=True)

    async def one(llm: AsyncLLM, prompt: list[int]) -> RequestOutput:
        return [output async for output in llm.generate(prompt, greedy(30))][-1]

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(engine) as llm:
            first = asyncio.create_task(one(llm, PROMPTS[0]))
            await asyncio.sleep(0.01)
            await llm.sleep()
            second = asyncio.create_task(one(llm, PROMPTS[1]))
            await asyncio.sleep(0.05)
            assert not second.done()
            assert engine.is_sleeping
            await llm.wake()
            outputs = [await first, await second]
            await llm.sleep()
            return outputs

    for output, prompt in zip(asyncio.run(main()), PROMPTS, strict=False):
        assert_greedy(UNIFORM, prompt, output.outputs[0], 30)
    assert engine.is_sleeping
    engine.wake()
    assert_idle(engine)
