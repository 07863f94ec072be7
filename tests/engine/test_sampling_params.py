"""Sampling parameters are checked where they are made."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagedjax.errors import InvalidRequestError, PagedJaxError
from pagedjax.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    SamplingParams,
    check_vocabulary,
)

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
        ("min_p", -0.01, r"in \[0, 1\]"),
        ("min_p", 1.01, r"in \[0, 1\]"),
        ("min_p", NAN, r"in \[0, 1\]"),
        ("min_p", "0.1", "a number"),
        ("presence_penalty", -2.01, r"in \[-2.0, 2.0\]"),
        ("presence_penalty", 2.01, r"in \[-2.0, 2.0\]"),
        ("presence_penalty", NAN, r"in \[-2.0, 2.0\]"),
        ("presence_penalty", None, "a number"),
        ("frequency_penalty", -2.01, r"in \[-2.0, 2.0\]"),
        ("frequency_penalty", 2.01, r"in \[-2.0, 2.0\]"),
        ("frequency_penalty", INF, r"in \[-2.0, 2.0\]"),
        ("frequency_penalty", "1", "a number"),
        ("repetition_penalty", 0.0, "finite and above 0"),
        ("repetition_penalty", -1.0, "finite and above 0"),
        ("repetition_penalty", INF, "finite and above 0"),
        ("repetition_penalty", NAN, "finite and above 0"),
        ("repetition_penalty", [1.2], "a number"),
        ("stop", 5, "a string or strings, none of them empty"),
        ("stop", None, "a string or strings"),
        ("stop", ("a", ""), "none of them empty"),
        ("stop", ("a", b"b"), "a string or strings"),
        ("min_tokens", -1, r"in \[0, 16\], up to max_tokens"),
        ("min_tokens", 17, r"in \[0, 16\], up to max_tokens"),
        ("min_tokens", 1.5, "an integer"),
        ("min_tokens", None, "an integer"),
        ("logit_bias", [1, 2], "a mapping from token ids to numbers"),
        ("logit_bias", None, "a mapping from token ids to numbers"),
        ("logit_bias", {"7": 1.0}, "a mapping from token ids to numbers"),
        ("allowed_token_ids", (), "None or not empty"),
        ("allowed_token_ids", 5, "integers"),
        ("allowed_token_ids", (1, "2"), "integers"),
        ("bad_words", 5, "a string or strings, none of them empty"),
        ("bad_words", ("a", ""), "none of them empty"),
        ("bad_words", (1,), "a string or strings"),
        ("logits_processor", "top", "None or a function, and hashable"),
        ("ignore_eos", 1, "True or False"),
        ("ignore_eos", None, "True or False"),
        ("skip_special_tokens", "yes", "True or False"),
        ("spaces_between_special_tokens", 0, "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
        ("detokenize", 1.0, "True or False"),
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
        ("min_p", 0),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
        ("frequency_penalty", 2),
        ("repetition_penalty", 1e-9),
        ("repetition_penalty", 1e9),
        ("stop", ()),
        ("stop", ("a", "b c", "\n")),
        ("min_tokens", 0),
        ("min_tokens", 16),
        ("logit_bias", {}),
        ("logit_bias", {0: -100, 5: 100.0}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), 0.0)),
        ("allowed_token_ids", None),
        ("allowed_token_ids", (0,)),
        ("bad_words", ()),
        ("bad_words", ("a",) * MAX_BAD_WORDS),
        ("logits_processor", None),
        ("logits_processor", max),
        ("ignore_eos", True),
        ("skip_special_tokens", False),
        ("spaces_between_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("detokenize", False),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_a_bias_out_of_range_is_refused_with_its_token() -> None:
    for bias in (-100.1, 100.1, NAN, INF):
        with pytest.raises(InvalidRequestError, match=r"logit_bias\[7\] is .*in \[-100.0, 100.0\]"):
            SamplingParams(logit_bias={3: 1.0, 7: bias})
    with pytest.raises(InvalidRequestError, match=r"logit_bias\[7\] is 'a'; it must be a number"):
        SamplingParams(logit_bias={7: "a"})  # type: ignore[dict-item]


def test_too_many_entries_are_refused_in_a_message_of_bounded_length() -> None:
    many = dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)
    with pytest.raises(InvalidRequestError, match=f"of at most {MAX_LOGIT_BIAS} tokens") as caught:
        SamplingParams(logit_bias=many)
    assert len(str(caught.value)) < 600
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_BAD_WORDS} words"):
        SamplingParams(bad_words=("a",) * (MAX_BAD_WORDS + 1))


def test_a_number_that_no_float_can_hold_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="temperature has 401 digits"):
        SamplingParams(temperature=10**400)


def test_a_logits_processor_must_be_hashable() -> None:
    class Scale:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, logits: Any, _: Any) -> Any:
            return logits

    with pytest.raises(InvalidRequestError, match="None or a function, and hashable"):
        SamplingParams(logits_processor=Scale())


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n", "best_of"],
)
def test_numpy_integers_become_plain_ones(name: str) -> None:
    # A numpy int8 of 100 would overflow in the first sum with a prompt's length.
    value = getattr(SamplingParams(**{name: np.int8(9)}), name)
    assert value == 9
    assert type(value) is int


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
def test_numpy_numbers_become_plain_floats(name: str) -> None:
    for value in (np.float32(0.5), np.int8(1)):
        plain = getattr(SamplingParams(**{name: value}), name)
        assert plain == value
        assert type(plain) is float


def test_numpy_bools_become_plain_ones() -> None:
    assert SamplingParams(ignore_eos=np.True_).ignore_eos is True


def test_a_lone_string_is_taken_as_one_and_lists_become_tuples() -> None:
    params: Any = SamplingParams(stop="\n\n", bad_words="cat")
    assert (params.stop, params.bad_words) == (("\n\n",), ("cat",))
    params = SamplingParams(stop=["a", "b"], bad_words=["c"])
    assert (params.stop, params.bad_words) == (("a", "b"), ("c",))


def test_a_bias_keeps_plain_values_whatever_it_came_from() -> None:
    given = {np.int64(5): np.float32(1.5), 2: 1}
    params = SamplingParams(logit_bias=given, allowed_token_ids=np.array([3, 1]))  # type: ignore
    assert params.logit_bias == {2: 1.0, 5: 1.5}
    assert list(params.logit_bias.items()) == [(2, 1.0), (5, 1.5)]
    assert {type(x) for pair in params.logit_bias.items() for x in pair} == {int, float}
    assert params.allowed_token_ids == (3, 1)
    given[7] = 3  # the params do not change with what they were made of
    assert len(params.logit_bias) == 2
    assert params == SamplingParams(logit_bias={5: 1.5, 2: 1.0}, allowed_token_ids=(3, 1))
    assert params != SamplingParams(logit_bias={5: 1.5}, allowed_token_ids=(3, 1))


def test_stop_tokens_of_any_iterable_become_a_tuple_of_plain_ints() -> None:
    for ids in ([3, 4], np.array([3, 4]), {3: 0, 4: 0}, (i for i in (3, 4))):
        params = SamplingParams(stop_token_ids=ids)
        assert params.stop_token_ids == (3, 4)
        assert all(type(i) is int for i in params.stop_token_ids)


def _defaults(params: SamplingParams) -> dict[str, Any]:
    plain = SamplingParams()
    return {f.name: getattr(plain, f.name) for f in dataclasses.fields(params)}


def test_params_are_frozen_hashable_and_checked_again_when_replaced() -> None:
    fields: dict[str, Any] = {"stop": ["a"], "bad_words": ["b"], "logit_bias": {3: 1, 2: 1}}
    params = SamplingParams(stop_token_ids=[1], **fields)
    fields = {"stop": "a", "bad_words": "b", "logit_bias": {2: 1, 3: 1}}
    assert hash(params) == hash(SamplingParams(stop_token_ids=(1,), **fields))
    assert hash(SamplingParams()) == hash(dataclasses.replace(params, **_defaults(params)))
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


def test_min_tokens_is_at_most_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 5; it must be in \[0, 4\]"):
        SamplingParams(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=4, max_tokens=4)


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match=r"stop is .* empty with detokenize=False"):
        SamplingParams(stop="a", detokenize=False)
    SamplingParams(bad_words="a", stop_token_ids=(1,), detokenize=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 0.9},
        {"logit_bias": {1: 0.5}},
        {"allowed_token_ids": (1,)},
        {"bad_words": "a"},
        {"min_tokens": 1},
        {"logits_processor": max},
    ],
)
def test_logits_are_adjusted_by_each_of_these(fields: dict[str, Any]) -> None:
    assert SamplingParams(**fields).adjusts_logits is True


def test_logits_are_not_adjusted_by_the_rest() -> None:
    rest: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    rest |= {"stop": "a", "stop_token_ids": (1,), "logprobs": 3, "n": 2, "seed": 1}
    assert SamplingParams(**rest).adjusts_logits is False


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stop_token_ids": (3, 10)}, "a token of stop_token_ids is 10"),
        ({"stop_token_ids": (-1,)}, "a token of stop_token_ids is -1"),
        ({"logit_bias": {2: 0.0, 10: 0.0}}, "a token of logit_bias is 10"),
        ({"logit_bias": {-1: 0.0}}, "a token of logit_bias is -1"),
        ({"allowed_token_ids": (9, 11)}, "a token of allowed_token_ids is 11"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{name}; it must be in \[0, 10\)"):
        check_vocabulary(SamplingParams(**fields), 10, (1,))
    if "-1" not in name:
        check_vocabulary(SamplingParams(**fields), 12, (1,))


def test_allowed_tokens_must_not_all_be_forbidden_by_min_tokens() -> None:
    ending: dict[str, Any] = {"allowed_token_ids": (1, 2), "stop_token_ids": (2,)}
    check_vocabulary(SamplingParams(**ending), 10, (1,))
    check_vocabulary(SamplingParams(**ending, min_tokens=1, ignore_eos=True), 10, (1,))
    check_vocabulary(SamplingParams(**ending, min_tokens=1), 10, (3,))
    with pytest.raises(InvalidRequestError, match=r"allowed_token_ids is \(1, 2\); .* more"):
        check_vocabulary(SamplingParams(**ending, min_tokens=1), 10, (1,))


def test_ending_tokens_are_the_request_s_and_the_model_s() -> None:
    params = SamplingParams(stop_token_ids=(2, 3))
    assert params.ending_token_ids([1, 3]) == {1, 2, 3}
    assert dataclasses.replace(params, ignore_eos=True).ending_token_ids([1, 3]) == {2, 3}
