"""Tasks of an event loop get what offline generation gives, and leave nothing behind."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn, TypeVar

import numpy as np
import pytest

from pagedjax.async_llm import AsyncLLM
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError, EngineDeadError, InvalidRequestError, PagedJaxError
from pagedjax.llm import LLM
from pagedjax.outputs import RequestOutput
from pagedjax.request import FinishReason
from pagedjax.sampling_params import SamplingParams
from tests.engine.tiny import (
    UNIFORM,
    in_one_shape,
    oracle_greedy,
    random_prompts,
    tiny_engine,
    tiny_tokenizer,
)

T = TypeVar("T")
LONG = 40  # tokens, for requests that are to be interrupted


@pytest.fixture(scope="module")
def shared_engine() -> LLMEngine:
    engine = tiny_engine(
        tokenizer=tiny_tokenizer(),
        block_size=4,
        max_num_batched_tokens=8,
        swap_space_bytes=0,  # else the invariants of a million host blocks are checked
        check_invariants=True,
    )
    in_one_shape(engine).warmup()
    return engine


@pytest.fixture
def engine(shared_engine: LLMEngine) -> Iterator[LLMEngine]:
    """An engine for 4 requests a step; afterwards it must be idle, and its thread gone."""
    yield shared_engine
    assert_idle(shared_engine)
    assert not any(thread.name == "pagedjax-engine" for thread in threading.enumerate())


@pytest.fixture
def slow_engine(engine: LLMEngine) -> Iterator[LLMEngine]:
    """The same with long steps: what is to be interrupted is not over before, on a busy machine."""
    step = engine.step

    def slow_step() -> list[RequestOutput]:
        time.sleep(0.01)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]
    yield engine
    del engine.step


def assert_idle(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    engine.scheduler.check()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, within a minute; nothing that the loop would only log may happen."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        return await asyncio.wait_for(main, 60)

    result = asyncio.run(watched(), debug=True)
    gc.collect()
    assert complaints == []
    return result


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    output = None
    async for output in outputs:  # noqa: B007 (the last one is wanted)
        pass
    assert output is not None
    assert output.finished
    return output


async def until(condition: Any) -> None:
    """Let other tasks and the engine's thread run until something holds."""
    while not condition():
        await asyncio.sleep(0.001)


async def until_idle(llm: AsyncLLM) -> None:
    await llm.abort("nobody")  # it has its turn behind everything that was sent before
    await until(lambda: not llm.engine.has_unfinished_requests())


@asynccontextmanager
async def failing_step(engine: LLMEngine, after: int) -> AsyncIterator[None]:
    """An engine whose step fails, after some that do not; then it is made idle again."""
    step, steps = engine.step, iter(range(after))

    def fail() -> list[RequestOutput]:
        if next(steps, None) is None:
            raise FloatingPointError("a bad step")
        return step()

    engine.step = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step
        for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.abort(request.request_id)


# --- results ---


def test_many_tasks_get_what_offline_generation_gives(engine: LLMEngine) -> None:
    prompts = random_prompts(1, [3, 9, 1, 17, 30, 5, 8, 2, 12, 21])
    params = [
        SamplingParams(max_tokens=3 + i, temperature=i % 2, seed=i) for i in range(len(prompts))
    ]

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(engine) as llm:
            pairs = zip(prompts, params, strict=True)
            return await asyncio.gather(*(last_of(llm.generate(*pair)) for pair in pairs))

    outputs = run(main())
    for output, expected in zip(outputs, LLM(engine).generate(prompts, params), strict=True):
        assert output.completions == expected.completions
        assert output.prompt_token_ids == expected.prompt_token_ids


def test_outputs_come_as_they_grow_and_the_last_is_finished(slow_engine: LLMEngine) -> None:
    (prompt,) = random_prompts(2, [5])

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(slow_engine) as llm:
            return [output async for output in llm.generate(prompt, greedy(20), request_id="me")]

    outputs = run(main())
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"me"}
    assert outputs[-1].outputs[0].token_ids == oracle_greedy(UNIFORM, prompt, 20)[0]


def test_text_prompts_and_requests_that_come_one_after_the_other(engine: LLMEngine) -> None:
    async def main() -> list[str]:
        async with AsyncLLM(engine) as llm:
            assert llm.engine is engine
            texts = []
            for prompt in ("w1 w2", "w3"):
                output = await last_of(llm.generate(prompt, greedy(4)))
                texts.append(output.outputs[0].text)
                await asyncio.sleep(0.02)  # the engine falls asleep
            return texts

    expected = LLM(engine).generate(["w1 w2", "w3"], greedy(4))
    assert run(main()) == [output.outputs[0].text for output in expected]


# --- errors at the door ---


def test_a_refused_request_raises_in_its_task_and_disturbs_nobody(engine: LLMEngine) -> None:
    good, long = random_prompts(3, [6, 48])

    async def main() -> list[Any]:
        async with AsyncLLM(engine, max_waiting=3) as llm:
            calls = [
                llm.generate(good, greedy(9)),
                llm.generate([], greedy(9)),
                llm.generate(long, greedy(9)),
                llm.generate([1], SamplingParams(n=5, max_tokens=2)),
                llm.generate(good, greedy(9), request_id="mine"),
                llm.generate(good, greedy(9), request_id="mine"),
            ]
            return await asyncio.gather(*map(last_of, calls), return_exceptions=True)

    results = run(main())
    for result, part in zip(
        [*results[1:4], results[5]], ["empty", "48 tokens", "max_num_seqs", "in use"], strict=True
    ):
        assert isinstance(result, InvalidRequestError)
        assert part in str(result)
    for result in (results[0], results[4]):
        assert result.outputs[0].token_ids == oracle_greedy(UNIFORM, good, 9)[0]


def test_max_waiting_must_be_positive(engine: LLMEngine) -> None:
    with pytest.raises(ConfigError, match="max_waiting is 0"):
        AsyncLLM(engine, max_waiting=0)


# --- leaving early ---


def test_cancelling_the_reader_returns_every_block(slow_engine: LLMEngine) -> None:
    prompts = random_prompts(4, [5, 9, 13, 4, 8, 20])  # two of them wait

    async def main() -> None:
        async with AsyncLLM(slow_engine) as llm:
            tasks = [
                asyncio.create_task(last_of(llm.generate(prompt, greedy(LONG - 14))))
                for prompt in prompts
            ]
            await until(lambda: len(slow_engine.scheduler) == len(prompts))
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            await until_idle(llm)
            assert slow_engine.scheduler.pool.num_free == slow_engine.scheduler.pool.num_usable
            # It still serves.
            await last_of(llm.generate(prompts[0], greedy(2)))

    run(main())


def test_cancelling_before_the_engine_knows_of_it(slow_engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLM(slow_engine) as llm:
            for num_turns in range(4):
                task = asyncio.create_task(last_of(llm.generate([1, 2], greedy(LONG))))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until_idle(llm)

    run(main())


def test_breaking_out_of_the_loop_and_closing_the_generator_abort(slow_engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLM(slow_engine) as llm:
            async for output in llm.generate([1], greedy(LONG)):
                assert not output.finished
                break
            async with aclosing(llm.generate([2], greedy(LONG))) as outputs:
                await anext(outputs)
                assert slow_engine.has_unfinished_requests()
            await until_idle(llm)
            unstarted = llm.generate([3], greedy(LONG))
            await unstarted.aclose()
            assert not slow_engine.has_unfinished_requests()

    run(main())


def test_abort_by_name_ends_the_output_and_frees_the_blocks_at_once(slow_engine: LLMEngine) -> None:
    async def main() -> RequestOutput:
        async with AsyncLLM(slow_engine) as llm:
            task = asyncio.create_task(last_of(llm.generate([1, 2, 3], greedy(LONG), None, "it")))
            await until(lambda: len(slow_engine.scheduler) == 1)
            assert await llm.abort("it")
            assert_idle(slow_engine)
            assert not await llm.abort("it")
            return await task

    output = run(main())
    assert output.outputs[0].finish_reason is FinishReason.ABORT


def test_an_abandoned_loop_aborts_what_ran_in_it(slow_engine: LLMEngine) -> None:
    llm = AsyncLLM(slow_engine)

    async def main() -> None:
        outputs = llm.generate([1], greedy(LONG))
        await anext(outputs)
        asyncio.get_running_loop()._keeps = outputs  # type: ignore[attr-defined]

    run(main())  # it closes the generator when it ends

    async def later() -> None:
        with pytest.raises(PagedJaxError, match="another event loop"):
            await anext(llm.generate([1]))
        with pytest.raises(PagedJaxError, match="another event loop"):
            await llm.abort("any")
        await llm.close()

    run(later())


def test_another_loop_is_refused_while_the_first_one_runs(engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLM(engine) as llm:

            async def elsewhere() -> None:
                for call in (anext(llm.generate([1])), llm.abort("any"), llm.close()):
                    with pytest.raises(PagedJaxError, match="another event loop"):
                        await call

            await asyncio.to_thread(asyncio.run, elsewhere())
            await last_of(llm.generate([1], greedy(2)))

    run(main())


# --- slow readers, and room ---


def test_a_slow_reader_finds_only_the_newest_output(slow_engine: LLMEngine) -> None:
    async def main() -> list[int]:
        async with AsyncLLM(slow_engine) as llm:
            outputs = llm.generate([1, 2], greedy(LONG))
            lengths = [len((await anext(outputs)).outputs[0].token_ids)]
            await until(lambda: not slow_engine.has_unfinished_requests())
            await llm.abort("nobody")  # whatever was delivered is delivered now
            lengths += [len(output.outputs[0].token_ids) async for output in outputs]
            return lengths

    lengths = run(main())
    assert lengths[-1] == LONG
    assert len(lengths) == 2


def test_a_loop_that_is_busy_gathers_no_outputs(slow_engine: LLMEngine) -> None:
    async def main() -> list[int]:
        async with AsyncLLM(slow_engine) as llm:
            wakes: list[float] = []
            wake = llm._worker._wake
            llm._worker._wake = lambda: (wakes.append(time.monotonic()), wake())[1]
            outputs = llm.generate([1, 2], greedy(LONG))
            await anext(outputs)
            wakes.clear()
            while slow_engine.has_unfinished_requests():
                time.sleep(0.001)  # the loop does nothing else
            assert len(wakes) <= 1
            assert len(llm._worker._values) <= 1
            return [len(output.outputs[0].token_ids) async for output in outputs]

    assert run(main())[-1] == LONG


def test_no_more_than_max_waiting_requests_reach_the_engine(slow_engine: LLMEngine) -> None:
    prompts = random_prompts(5, [4] * 12)
    most = 0

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(slow_engine, max_waiting=3) as llm:

            async def watched(prompt: list[int]) -> RequestOutput:
                nonlocal most
                async for output in llm.generate(prompt, greedy(6)):
                    most = max(most, len(slow_engine.scheduler))
                    if output.finished:
                        return output
                raise AssertionError("it ended without an end")

            return await asyncio.gather(*map(watched, prompts))

    outputs = run(main())
    assert most == 3
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle_greedy(UNIFORM, prompt, 6)[0]


def test_tasks_that_wait_for_room_can_be_cancelled(slow_engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLM(slow_engine, max_waiting=1) as llm:
            async with aclosing(llm.generate([1], greedy(LONG))) as first:
                await anext(first)
                tasks = [
                    asyncio.create_task(last_of(llm.generate([i], greedy(2)))) for i in range(5)
                ]
                await asyncio.sleep(0.01)
                assert len(slow_engine.scheduler) <= 1
                for task in tasks[:4]:
                    task.cancel()
            output = await tasks[4]
            assert output.outputs[0].token_ids == oracle_greedy(UNIFORM, [4], 2)[0]
            await asyncio.gather(*tasks[:4], return_exceptions=True)

    run(main())


# --- the end ---


def test_closing_ends_every_task_with_an_error(slow_engine: LLMEngine) -> None:
    async def main() -> None:
        llm = AsyncLLM(slow_engine, max_waiting=5)
        tasks = [
            asyncio.create_task(last_of(llm.generate([i], greedy(LONG)))) for i in range(8)
        ]  # 4 run, 1 waits in the slow_engine, 3 for room
        await until(lambda: len(slow_engine.scheduler) == 5)
        await asyncio.gather(llm.close(), llm.close())
        assert_idle(slow_engine)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "closed" in str(result)
        for call in (anext(llm.generate([1])), llm.abort("any")):
            with pytest.raises(EngineDeadError, match="closed"):
                await call
        await llm.close()

    run(main())


def test_closing_does_not_wait_for_readers_that_never_come_back(slow_engine: LLMEngine) -> None:
    async def main() -> None:
        llm = AsyncLLM(slow_engine, max_waiting=1)
        outputs = llm.generate([1], greedy(LONG))
        await anext(outputs)
        waiting = asyncio.create_task(last_of(llm.generate([2], greedy(2))))
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(EngineDeadError):
            await waiting
        with pytest.raises(EngineDeadError):
            await last_of(outputs)

    run(main())


def test_an_output_that_was_there_before_the_end_is_still_read(slow_engine: LLMEngine) -> None:
    async def main() -> RequestOutput:
        llm = AsyncLLM(slow_engine)
        outputs = llm.generate([1], greedy(4))
        await anext(outputs)
        await until(lambda: not slow_engine.has_unfinished_requests())
        await llm.close()
        return await last_of(outputs)

    assert run(main()).outputs[0].token_ids == oracle_greedy(UNIFORM, [1], 4)[0]


def test_closing_what_never_served(engine: LLMEngine) -> None:
    async def main() -> None:
        llm = AsyncLLM(engine)
        await llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(llm.generate([1]))

    run(main())


def test_an_engine_that_was_closed_over_serves_again(slow_engine: LLMEngine) -> None:
    async def main() -> RequestOutput:
        async with AsyncLLM(slow_engine) as llm:
            await anext(llm.generate([1], greedy(LONG)))
        async with AsyncLLM(slow_engine) as llm:
            return await last_of(llm.generate([1], greedy(4)))

    assert run(main()).outputs[0].token_ids == oracle_greedy(UNIFORM, [1], 4)[0]


def test_a_failing_step_fails_every_task_and_later_calls(slow_engine: LLMEngine) -> None:
    async def main() -> None:
        async with failing_step(slow_engine, after=5):
            llm = AsyncLLM(slow_engine, max_waiting=5)
            tasks = [
                asyncio.create_task(last_of(llm.generate([i], greedy(LONG)))) for i in range(8)
            ]
            suspended = llm.generate([9], greedy(LONG))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for error in results:
                assert isinstance(error, EngineDeadError)
                assert isinstance(error.__cause__, FloatingPointError)
                assert "a bad step" in str(error)
            assert len(set(map(id, results))) == len(results)
            for call in (anext(suspended), llm.abort("any")):
                with pytest.raises(EngineDeadError, match="a bad step"):
                    await call
            await llm.close()
            await llm.close()

    run(main())


def test_a_failing_abort_fails_every_task_too(
    slow_engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request_id: str) -> NoReturn:
        raise FloatingPointError(f"cannot abort {request_id}")

    async def main() -> None:
        async with failing_step(slow_engine, after=1000):
            llm = AsyncLLM(slow_engine)
            task = asyncio.create_task(last_of(llm.generate([1], greedy(LONG), None, "it")))
            await until(slow_engine.has_unfinished_requests)
            with monkeypatch.context() as patch:
                patch.setattr(slow_engine, "abort", fail)
                for call in (llm.abort("it"), task):
                    with pytest.raises(EngineDeadError, match="cannot abort it"):
                        await call
                await llm.close()

    run(main())


def test_an_idle_engine_is_not_stepped(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncLLM(engine) as llm:
            await last_of(llm.generate([1], greedy(2)))
            with monkeypatch.context() as patch:
                patch.setattr(engine, "step", lambda: pytest.fail("stepped without work"))
                used = time.process_time()
                await asyncio.sleep(0.2)
                assert time.process_time() - used < 0.1
            await last_of(llm.generate([1], greedy(2)))

    run(main())


# --- everything at once ---


@pytest.mark.parametrize("seed", [0, 1])
def test_random_cancels_aborts_and_readers_leave_every_block_free(
    seed: int, engine: LLMEngine
) -> None:
    rng = np.random.default_rng(seed)
    prompts = random_prompts(seed, rng.integers(1, 20, 60).tolist())
    fates = rng.choice(["read", "cancel", "break", "abort"], 60, p=[0.4, 0.3, 0.15, 0.15])
    delays = rng.uniform(0, 0.1, 60).tolist()
    lengths = rng.integers(1, 24, 60).tolist()

    async def one(llm: AsyncLLM, i: int) -> RequestOutput | None:
        outputs = llm.generate(prompts[i], greedy(lengths[i]), request_id=f"number-{i}")
        await asyncio.sleep(delays[i])
        if fates[i] == "break":
            async with aclosing(outputs):
                return await anext(outputs)
        task = asyncio.create_task(last_of(outputs))
        await asyncio.sleep(delays[-i])
        if fates[i] == "abort":
            await llm.abort(f"number-{i}")
        if fates[i] == "cancel":
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if fates[i] == "cancel" and isinstance(result, asyncio.CancelledError):
            return None
        assert isinstance(result, RequestOutput), result
        return result

    async def main() -> list[RequestOutput | None]:
        async with AsyncLLM(engine, max_waiting=20) as llm:
            results = await asyncio.gather(*(one(llm, i) for i in range(60)))
            await until_idle(llm)
            assert_idle(engine)
            return results

    results = run(main())
    for i, result in enumerate(results):
        if result is not None:
            tokens = result.outputs[0].token_ids
            expected, _ = oracle_greedy(UNIFORM, prompts[i], lengths[i])
            assert tokens == expected[: len(tokens)]
            assert fates[i] != "read" or len(tokens) == lengths[i]
