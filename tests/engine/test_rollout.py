"""Rollouts are what `generate` gives, as arrays, and leave nothing behind, however many come."""

import dataclasses
import gc
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.finish_code import FinishCode
from pagedjax.llm import LLM
from pagedjax.models.decoder import random_params
from pagedjax.outputs import RequestOutput
from pagedjax.request import derived_seed
from pagedjax.rollout import Rollout
from pagedjax.sampling_params import SamplingParams
from tests.engine.fresh import assert_idle, fresh_engine, greedy, seeded
from tests.engine.tiny import UNIFORM, random_prompts, tiny_params, tiny_tokenizer

PROMPTS = random_prompts(51, [3, 9, 1])


def assert_holds(rollout: Rollout, outputs: list[RequestOutput], pad: int = 0) -> None:
    """Row by row, what was generated, and padding around it."""
    found = jax.tree.map(np.asarray, rollout)
    rows = [(o.prompt_token_ids, completion) for o in outputs for completion in o.outputs]
    assert len(found.lengths) == len(rows)
    for row, (prompt, completion) in enumerate(rows):
        tokens, n, m = completion.token_ids, len(prompt), len(completion.token_ids)
        left = found.prompt_ids.shape[1] - n
        assert found.prompt_ids[row].tolist() == [pad] * left + list(prompt)
        assert found.prompt_mask[row].tolist() == [False] * left + [True] * n
        right = found.completion_ids.shape[1] - m
        assert found.completion_ids[row].tolist() == [*tokens, *[pad] * right]
        assert found.completion_mask[row].tolist() == [True] * m + [False] * right
        assert completion.logprobs is not None
        for name, values in (
            ("logprobs", [token.sampled for token in completion.logprobs]),
            ("processed_logprobs", [token.processed for token in completion.logprobs]),
        ):
            assert getattr(found, name)[row] == pytest.approx([*values, *[0] * right], abs=1e-6)
        assert found.lengths[row] == m
        assert completion.finish_reason is not None
        assert FinishCode(int(found.finish_reasons[row])) is FinishCode.of(completion.finish_reason)


def of_each(params: SamplingParams, count: int, **fields: Any) -> list[SamplingParams]:
    """What a rollout asks for each of its prompts."""
    assert params.seed is not None
    seeds = [derived_seed(params.seed, index) for index in range(count)]
    return [dataclasses.replace(params, seed=seed, **fields) for seed in seeds]


def test_it_holds_what_generate_gives() -> None:
    llm = LLM(fresh_engine(tokenizer=tiny_tokenizer()))
    params = seeded(3, 7, top_k=20, stop=["w1"], stop_token_ids=[*range(40, 48)])
    outputs = llm.generate(PROMPTS, of_each(params, len(PROMPTS), n=3, logprobs=0))
    rollout = llm.rollout(PROMPTS, 3, params, pad_token_id=5)
    assert_holds(rollout, outputs, pad=5)
    shapes = {name: (x.shape, str(x.dtype)) for name, x in vars(rollout).items()}
    assert shapes == {
        "prompt_ids": ((9, 9), "int32"),
        "prompt_mask": ((9, 9), "bool"),
        "completion_ids": ((9, 7), "int32"),
        "completion_mask": ((9, 7), "bool"),
        "logprobs": ((9, 7), "float32"),
        "processed_logprobs": ((9, 7), "float32"),
        "lengths": ((9,), "int32"),
        "finish_reasons": ((9,), "int32"),
        "weights_version": ((), "int32"),
    }
    assert all(x.devices() == {llm.engine.device} for x in jax.tree.leaves(rollout))
    assert {*np.asarray(rollout.finish_reasons).tolist()} == {FinishCode.STOP, FinishCode.LENGTH}
    assert_idle(llm.engine)


def test_equal_prompts_get_samples_of_their_own() -> None:
    rollout = LLM(fresh_engine()).rollout([[3, 1, 4]] * 3, 2, seeded(5, 7))
    assert len({tuple(row) for row in np.asarray(rollout.completion_ids).tolist()}) == 6


def test_one_text_greedy_and_the_defaults() -> None:
    llm = LLM(fresh_engine(tokenizer=tiny_tokenizer()))
    assert_holds(
        llm.rollout("w3 w4", params=greedy(4)), llm.generate("w3 w4", greedy(4, logprobs=0))
    )
    default = llm.rollout([[1, 2]], 2)
    assert default.completion_ids.shape == (2, SamplingParams().max_tokens)
    assert_idle(llm.engine)


def test_of_fixed_widths_a_training_step_is_compiled_once() -> None:
    llm, traced = LLM(fresh_engine()), []

    @jax.jit
    def mean(rollout: Rollout) -> jax.Array:
        traced.append(rollout)
        return jnp.sum(rollout.logprobs) / jnp.sum(rollout.completion_mask, dtype=jnp.float32)

    for seed, prompts in enumerate((PROMPTS, [[1], [2], [3, 4]])):
        params = seeded(seed, 3 + seed)
        rollout = llm.rollout(prompts, 2, params, prompt_length=12, completion_length=8)
        outputs = llm.generate(prompts, of_each(params, len(prompts), n=2, logprobs=0))
        assert_holds(rollout, outputs)
        expected = np.asarray(rollout.logprobs).sum() / np.asarray(rollout.lengths).sum()
        assert mean(rollout) == pytest.approx(expected, rel=1e-5)
    assert len(traced) == 1


def test_weights_come_first_and_their_version_is_told() -> None:
    engine = fresh_engine()
    llm, params = LLM(engine), seeded(1, 5)
    other = random_params(UNIFORM, "cpu", 1)
    old = llm.rollout(PROMPTS, 2, params)
    new = llm.rollout(PROMPTS, 2, params, weights=other)
    again = llm.rollout(PROMPTS, 2, params, weights=tiny_params(UNIFORM))
    assert [int(r.weights_version) for r in (old, new, again)] == [0, 1, 2]
    same = [np.array_equal(old.completion_ids, r.completion_ids) for r in (new, again)]
    assert same == [False, True]
    # Beside a stream that has begun: its samples wait for their weights.
    stream = llm.stream([PROMPTS[0]], greedy(20))
    next(stream)
    waited = llm.rollout(PROMPTS, 2, params, weights=other)
    assert int(waited.weights_version) == 3
    np.testing.assert_array_equal(waited.completion_ids, new.completion_ids)
    assert list(stream)[-1][1].finished
    assert_idle(engine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], [2, 3, 4]], "prompt_length": 2}, "prompt 1: it has 3 tokens; .* is 2"),
        ({"prompts": [[1], []]}, "prompt 1: the prompt is empty"),
        ({"prompts": [[1], [2], [97]]}, r"prompt 2: token id 97 is not in \[0, 97\)"),
        ({"prompts": ["text"]}, "prompt 0: a text prompt needs a tokenizer"),
        ({"prompts": []}, "no prompts"),
        ({"completion_length": 15}, "max_tokens is 16; it must be at most completion_length, 15"),
        ({"pad_token_id": 97}, r"pad_token_id is 97; it must be in \[0, 97\)"),
        ({"n": 2, "params": seeded(1, n=3)}, "n of params is 3; it must be .* 2"),
        ({"n": 2, "params": seeded(1, best_of=3)}, "best_of of params is 3"),
        ({"n": 2, "params": greedy(3)}, "n is 2; .* temperature 0"),
        ({"n": 0}, "n is 0"),
        ({"n": 9}, "prompt 0: 9 sequences at once"),
        ({"params": seeded(1, stop=["x"])}, "prompt 0: stop is text"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(arguments: dict[str, Any], message: str) -> None:
    llm = LLM(fresh_engine())
    with pytest.raises(InvalidRequestError, match=message):
        llm.rollout(**{"prompts": [[1, 2], [3]], **arguments})
    assert_idle(llm.engine)
    assert llm._streamed == set()


def test_weights_that_do_not_fit_are_refused_before_anything_is_computed() -> None:
    llm = LLM(fresh_engine())
    with pytest.raises(ConfigError, match="absent"):
        llm.rollout(PROMPTS, weights={})
    assert_idle(llm.engine)
    assert llm.engine.weights_version == 0


# --- a thousand of them ---


def python_state(engine: LLMEngine) -> tuple[int, ...]:
    """Sizes of what could grow."""
    blocks = engine.scheduler.blocks
    sizes = (engine._processor.tracked, blocks._being_filled, engine.scheduler.waiting._heap)
    indexes = [pool._index for pool in (blocks.pool, blocks.host)]
    for pool, index in zip((blocks.pool, blocks.host), indexes, strict=True):
        assert len(index) <= pool.num_usable
    logged = (engine.compiles.entries, engine._kept, engine._in_flight)
    return tuple(map(len, (*sizes, *logged)))


def test_a_thousand_updates_and_rollouts_leave_nothing_behind() -> None:
    engine = fresh_engine(async_scheduling=True, check_invariants=False, usable_blocks=12)
    llm, params = LLM(engine), tiny_params(UNIFORM)
    scale = jax.jit(lambda tree, by: jax.tree.map(lambda x: x * by, tree))
    prompts = itertools.cycle(random_prompts(52, [5, 4, 5, 3]))
    counts: list[tuple[int, int, tuple[int, ...]]] = []
    for round_number in range(1000):
        weights = scale(params, np.float32(1 + round_number / 1000))
        in_flight = llm.stream([next(prompts)], seeded(0, 9)) if round_number % 50 == 7 else None
        if in_flight is not None:
            next(in_flight)
            llm.update_params(weights, in_flight="restart")
            in_flight.close()
        rollout = llm.rollout([next(prompts)], 2, seeded(round_number, 2), weights=weights)
        assert int(rollout.weights_version) == engine.weights_version
        del rollout, weights
        if round_number % 100 == 20 or round_number == 999:
            gc.collect()
            sizes = [x.nbytes for x in jax.live_arrays()]
            counts.append((len(sizes), sum(sizes), python_state(engine)))
            assert llm._streamed == set()
            assert llm._undelivered == []
    assert engine.weights_version == 1020
    assert engine.scheduler.pool.num_cached > 6, "old blocks stay where there is room"
    assert all(count == counts[0] for count in counts), counts
    assert_idle(engine)
