"""Sampling parameters are checked where they are made."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagedjax.errors import InvalidRequestError, PagedJaxError
from pagedjax.sampling_params import MAX_LOGPROBS, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -3, "at least 1"),
        ("max_tokens", 1.5, "an integer"),
        ("max_tokens", "16", "an integer"),
        ("max_tokens", None, "an integer"),
        ("temperature", -0.5, "finite and at least 0"),
        ("temperature", NAN, "finite and at least 0"),
        ("temperature", INF, "finite and at least 0"),
        ("temperature", "hot", "a number"),
        ("temperature", None, "a number"),
        ("top_k", -1, r"at least 0 \(0: all\)"),
        ("top_k", 2.5, "an integer"),
        ("top_k", None, "an integer"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", -0.1, r"in \(0, 1\]"),
        ("top_p", 1.01, r"in \(0, 1\]"),
        ("top_p", NAN, r"in \(0, 1\]"),
        ("top_p", "0.9", "a number"),
        ("seed", -1, r"in \[0, 2\*\*63\)"),
        ("seed", 2**63, r"in \[0, 2\*\*63\)"),
        ("seed", 1.5, "an integer"),
        ("logprobs", -1, rf"in \[0, {MAX_LOGPROBS}\]"),
        ("logprobs", MAX_LOGPROBS + 1, rf"in \[0, {MAX_LOGPROBS}\]"),
        ("logprobs", "5", "an integer"),
        ("prompt_logprobs", -1, rf"in \[0, {MAX_LOGPROBS}\]"),
        ("prompt_logprobs", MAX_LOGPROBS + 1, rf"in \[0, {MAX_LOGPROBS}\]"),
        ("prompt_logprobs", 1.0, "an integer"),
        ("n", 0, "at least 1"),
        ("n", None, "an integer"),
        ("n", 1.5, "an integer"),
        ("best_of", 0, "at least n, 1"),
        ("best_of", "2", "an integer"),
        ("stop_token_ids", 5, "integers"),
        ("stop_token_ids", "12", "integers"),
        ("stop_token_ids", (1, 2.5), "integers"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_value_and_the_limit(
    name: str, value: Any, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=limit) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}; it must be ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", 10**9),
        ("temperature", 0),
        ("temperature", 100.0),
        ("temperature", np.float32(0.5)),
        ("top_k", 0),
        ("top_k", 10**12),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("seed", None),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("logprobs", None),
        ("logprobs", 0),
        ("logprobs", MAX_LOGPROBS),
        ("prompt_logprobs", None),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", MAX_LOGPROBS),
        ("n", 1),
        ("n", 1000),
        ("best_of", None),
        ("best_of", 1),
        ("best_of", 1000),
        ("stop_token_ids", ()),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    "name", ["max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n", "best_of"]
)
def test_numpy_integers_become_plain_ones(name: str) -> None:
    # A numpy int8 of 100 would overflow in the first sum with a prompt's length.
    value = getattr(SamplingParams(**{name: np.int8(9)}), name)
    assert value == 9
    assert type(value) is int


def test_stop_tokens_of_any_iterable_become_a_tuple_of_plain_ints() -> None:
    for ids in ([3, 4], np.array([3, 4]), {3: 0, 4: 0}, (i for i in (3, 4))):
        params = SamplingParams(stop_token_ids=ids)  # type: ignore[arg-type]
        assert params.stop_token_ids == (3, 4)
        assert all(type(i) is int for i in params.stop_token_ids)


def test_params_are_frozen_hashable_and_checked_again_when_replaced() -> None:
    params = SamplingParams(stop_token_ids=[1])  # type: ignore[arg-type]
    assert hash(params) == hash(SamplingParams(stop_token_ids=(1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    with pytest.raises(InvalidRequestError, match="top_k is -3"):
        dataclasses.replace(params, top_k=-3)


def test_the_error_is_a_pagedjax_error_and_a_value_error() -> None:
    assert issubclass(InvalidRequestError, PagedJaxError)
    assert issubclass(InvalidRequestError, ValueError)


def test_best_of_is_at_least_n() -> None:
    with pytest.raises(InvalidRequestError, match="best_of is 2; it must be at least n, 3"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=3, best_of=3).num_samples == 3
    assert SamplingParams(n=3, best_of=5).num_samples == 5
    assert SamplingParams(n=3).num_samples == 3


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 2}, "n is 2"),
        ({"best_of": 4}, "best_of is 4"),
        ({"n": 2, "best_of": 2}, "best_of is 2"),
    ],
)
def test_several_samples_that_would_all_be_alike_are_refused(
    fields: dict[str, int], name: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}; it must be 1 with temperature 0"):
        SamplingParams(temperature=0.0, **fields)
    SamplingParams(temperature=0.1, **fields)
    SamplingParams(temperature=0.0, n=1, best_of=1)


def test_logprobs_are_computed_where_the_best_samples_are_chosen_by_them() -> None:
    assert not SamplingParams(n=2).wants_logprobs
    assert not SamplingParams(n=2, best_of=2).wants_logprobs
    assert SamplingParams(n=2, best_of=3).wants_logprobs
    assert SamplingParams(logprobs=0).wants_logprobs
    assert not SamplingParams(prompt_logprobs=0).wants_logprobs
