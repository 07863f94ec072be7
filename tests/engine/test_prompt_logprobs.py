"""Log-probabilities computed tile by tile agree with a numpy log-softmax of all rows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models.decoder import bind, random_params
from pagedjax.prompt_logprobs import PromptLogprobs, prompt_logprobs
from pagedjax.sampling_params import MAX_LOGPROBS
from tests.engine.tiny import UNIFORM

HIDDEN = 8


def logits_of(head: jax.Array, hidden: jax.Array) -> jax.Array:
    return jnp.matmul(hidden, head, precision="highest")


@jax.jit
def run(
    head: jax.Array, hidden: jax.Array, rows: jax.Array, targets: jax.Array, count: jax.Array
) -> PromptLogprobs:
    return prompt_logprobs(functools.partial(logits_of, head), hidden, rows, targets, count)


def oracle(logits: np.ndarray, rows: np.ndarray, targets: np.ndarray, count: int) -> PromptLogprobs:
    """Float64, sorted, zero from `count` on."""
    size, width = len(rows), min(MAX_LOGPROBS, logits.shape[1])
    logits = logits[rows[:count]].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :width]
    out = PromptLogprobs(  # type: ignore[arg-type]
        np.zeros(size), np.zeros((size, width), np.int32), np.zeros((size, width))
    )
    out.logprobs[:count] = logprobs[np.arange(count), targets[:count]]
    out.top_ids[:count] = best
    out.top_logprobs[:count] = np.take_along_axis(logprobs, best, axis=-1)
    return out


def assert_close(got: PromptLogprobs, expected: PromptLogprobs) -> None:
    assert got.logprobs.dtype == got.top_logprobs.dtype == np.float32
    assert got.top_ids.dtype == np.int32
    np.testing.assert_array_equal(got.top_ids, expected.top_ids)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=3e-5)
    np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, atol=3e-5)


def random_case(size: int, vocab: int, num_hidden: int) -> tuple[np.ndarray, ...]:
    """head, hidden, rows in no order, targets."""
    rng = np.random.default_rng((size, vocab))
    return (
        rng.normal(size=(HIDDEN, vocab)).astype(np.float32),
        rng.normal(size=(num_hidden, HIDDEN)).astype(np.float32),
        rng.permutation(num_hidden)[:size].astype(np.int32),
        rng.integers(0, vocab, size).astype(np.int32),
    )


@pytest.mark.parametrize("vocab", [1, 7, MAX_LOGPROBS, 97, 1030])
@pytest.mark.parametrize("size", [1, 5, 31, 32, 33, 64, 100])
def test_every_count_gives_what_all_logits_at_once_give(size: int, vocab: int) -> None:
    head, hidden, rows, targets = random_case(size, vocab, num_hidden=size + 3)
    logits = hidden.astype(np.float64) @ head
    for count in sorted({0, 1, size // 2, 31, 32, 33, 63, 64, 65, size - 1, size}):
        if count <= size:
            got = jax.device_get(run(head, hidden, rows, targets, np.int32(count)))
            assert got.top_ids.shape == (size, min(MAX_LOGPROBS, vocab))
            assert_close(got, oracle(logits, rows, targets, count))


@pytest.mark.parametrize("padding", [-1, -(2**31), 2**31 - 1])
def test_what_stands_behind_count_changes_nothing(padding: int) -> None:
    head, hidden, rows, targets = random_case(40, 97, num_hidden=40)
    hidden[rows[35:]] = np.nan  # rows that were not computed
    rows[37:], targets[33:] = padding, padding
    got = jax.device_get(run(head, hidden, rows, targets, np.int32(33)))
    with np.errstate(invalid="ignore"):
        assert_close(got, oracle(hidden.astype(np.float64) @ head, rows, targets, 33))


def test_a_row_may_be_wanted_twice() -> None:
    head, hidden, rows, targets = random_case(6, 97, num_hidden=6)
    rows[:] = [2, 2, 5, 2, 0, 0]
    got = jax.device_get(run(head, hidden, rows, targets, np.int32(6)))
    assert_close(got, oracle(hidden.astype(np.float64) @ head, rows, targets, 6))


def test_impossible_tokens_are_minus_infinity_and_not_nan() -> None:
    table = np.zeros((4, 50), np.float32)
    table[1, 1:] = -np.inf
    table[2, 4:] = -1e38
    table[3] -= 1e3
    same = jax.jit(functools.partial(prompt_logprobs, lambda hidden: hidden))
    targets = np.full(4, 3, np.int32)
    got = jax.device_get(same(table, np.arange(4, dtype=np.int32), targets, np.int32(4)))
    np.testing.assert_allclose(got.logprobs, -np.log([50, np.inf, 4, 50]), atol=1e-4)
    assert not any(np.isnan(x).any() for x in dataclasses.astuple(got))


def test_it_works_with_the_decoder_inside_a_jitted_function() -> None:
    params = random_params(UNIFORM, "cpu")
    hidden = np.random.default_rng(0).normal(size=(70, UNIFORM.hidden_size)).astype(np.float32)
    rows, targets = np.arange(70, dtype=np.int32)[::-1], np.arange(70, dtype=np.int32)

    @jax.jit
    def both(params, hidden, count):
        model = bind(UNIFORM, params)
        return model.logits(hidden), prompt_logprobs(model.logits, hidden, rows, targets, count)

    logits, got = jax.device_get(both(params, hidden, np.int32(50)))
    assert_close(got, oracle(logits, rows, targets, 50))


def test_the_logits_of_all_rows_are_never_in_memory() -> None:
    size, vocab = 512, 4096
    case = random_case(size, vocab, num_hidden=size)
    compiled = run.lower(*case, np.int32(size)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size * vocab * 4 / 3
    assert not re.search(rf"\[{size},{vocab}\]", compiled.as_text())
    # The control: without the tiles they are.
    whole = jax.jit(lambda head, hidden: jax.lax.top_k(logits_of(head, hidden), 2))
    assert re.search(rf"\[{size},{vocab}\]", whole.lower(*case[:2]).compile().as_text())
