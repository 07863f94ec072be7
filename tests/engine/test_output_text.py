"""Stop strings end the text where a search through the whole of it would, and nothing is unsaid."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.output_text import OutputText
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizer import Tokenizer
from tests.engine.small_tokenizers import CORES, PIZZA, TOKENIZERS, ids
from tests.engine.tiny import EOS, tiny_tokenizer

BYTES = TOKENIZERS["byte-level"]
TINY = tiny_tokenizer()
families = pytest.mark.parametrize("family", CORES)

# Few characters, so that texts and stop strings meet; stop strings overlap and hold each other.
letters = st.lists(st.sampled_from([*b"aab ", *PIZZA, *"é".encode()]), max_size=25)
stops = st.lists(st.text("ab é🍕\ufffd", min_size=1, max_size=4), max_size=4)


def text_params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **fields)


def feed(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], params: SamplingParams
) -> tuple[list[str], str | None]:
    """The text so far after each token, up to a stop string and then in the end; the stop."""
    text, seen = OutputText(tokenizer, prompt, params), []
    for token_id in output:
        stop = text.append(token_id)
        seen.append(text.so_far)
        if stop is not None:
            break
    else:
        stop = None
    text.finish()
    return [*seen, text.so_far], stop


def naive(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], params: SamplingParams
) -> tuple[list[str], str | None]:
    """What `feed` should give, by searching every prefix of the text from scratch."""
    detokenizer = tokenizer.detokenizer(
        prompt, params.skip_special_tokens, params.spaces_between_special_tokens
    )
    text, seen = "", []
    for index, token_id in enumerate(output):
        for character in detokenizer.append(token_id):
            text += character
            ending = [stop for stop in params.stop if text.endswith(stop)]
            if ending and index >= params.min_tokens:
                stop = max(ending, key=len)
                shown = text if params.include_stop_str_in_output else text.removesuffix(stop)
                return [*seen, shown, shown], stop
        seen.append(text[: len(text) - held(text, params)])
    return [*seen, text + detokenizer.flush()], None


def held(text: str, params: SamplingParams) -> int:
    """Characters at the end of `text` that more of it may make a stop string."""
    if params.include_stop_str_in_output:
        return 0
    beginnings = {stop[:n] for stop in params.stop for n in range(len(stop))}
    return max((n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings), default=0)


@families
@settings(deadline=None, max_examples=300)
@given(
    prompt=ids,
    output=st.one_of(letters, ids),
    stop=stops,
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    skip=st.booleans(),
    spaces=st.booleans(),
)
@example([], [*b"aaab"], ["aab", "ab", "b"], False, 0, True, True)
@example([], [*b"abab"], ["ab", "ba"], True, 2, True, True)
@example([], [*b"ababc"], ["abac", "babc"], False, 0, True, True)
def test_streamed_text_is_that_of_a_search_in_every_prefix(
    family: str,
    prompt: list[int],
    output: list[int],
    stop: list[str],
    include: bool,
    min_tokens: int,
    skip: bool,
    spaces: bool,
):
    params = text_params(
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        skip_special_tokens=skip,
        spaces_between_special_tokens=spaces,
    )
    seen, found = feed(TOKENIZERS[family], prompt, output, params)
    assert (seen, found) == naive(TOKENIZERS[family], prompt, output, params)
    for shown in seen:
        assert seen[-1].startswith(shown)  # nothing is taken back
        shown.encode()  # a lone surrogate would raise


@settings(deadline=None, max_examples=200)
@given(
    output=st.lists(st.sampled_from([1, 2, 11, 12, 21, EOS]), max_size=12),
    stop=st.lists(st.text("w12 ", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_words_stop_like_a_search_in_every_prefix(
    output: list[int], stop: list[str], include: bool
):
    params = text_params(stop=stop, include_stop_str_in_output=include, skip_special_tokens=False)
    assert feed(TINY, [5], output, params) == naive(TINY, [5], output, params)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), include=st.booleans())
def test_a_real_answer_ends_before_any_piece_of_itself(
    data: st.DataObject,
    include: bool,
    gemma_tokenizer: Tokenizer,
    parity_cases: dict[str, Any],
):
    case = parity_cases[data.draw(st.sampled_from(sorted(parity_cases)))]
    text, output = case["continuation_text"], case["continuation_ids"]
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 12))]
    params = text_params(stop=stop, include_stop_str_in_output=include)
    seen, found = feed(gemma_tokenizer, case["prompt_ids"], output, params)
    assert found == stop
    before = text[: text.index(stop)]
    assert seen[-1] == (before + stop if include else before)
    assert all(seen[-1].startswith(shown) for shown in seen)
    assert (seen, found) == naive(gemma_tokenizer, case["prompt_ids"], output, params)


# --- trap 11: stop strings across token borders, while streaming ---


def test_trap_11_a_stop_string_over_several_tokens_is_never_shown_in_part():
    seen, stop = feed(BYTES, [], [*b"x STOP y"], text_params(stop=" STOP"))
    assert stop == " STOP"
    assert seen == ["x"] * 7
    seen, stop = feed(BYTES, [], [*b"x STOP y"], text_params(stop="OP", min_tokens=7))
    assert (seen[-1], stop) == ("x STOP y", None)


def test_trap_11_what_only_looked_like_a_stop_string_is_shown_at_once():
    seen, stop = feed(BYTES, [], [*b"x STAR"], text_params(stop=" STOP"))
    assert stop is None
    assert seen == ["x", "x", "x", "x", "x STA", "x STAR", "x STAR"]
    seen, _ = feed(BYTES, [], [*b"ababac"], text_params(stop="abac"))
    assert seen == ["", "", "", "ab", "ab", "ab", "ab"]


def test_trap_11_the_end_of_the_output_shows_what_was_held_back():
    seen, stop = feed(BYTES, [], [*b"x STO"], text_params(stop=" STOP"))
    assert seen == ["x"] * 5 + ["x STO"]
    assert stop is None


def test_trap_11_text_behind_the_stop_string_in_the_same_token_is_cut():
    output = [1, 23]  # "w1", " w23"
    assert feed(TINY, [], output, text_params(stop="w2")) == (["w1", "w1 ", "w1 "], "w2")
    shown = text_params(stop=["w2"], include_stop_str_in_output=True)
    assert feed(TINY, [], output, shown) == (["w1", "w1 w2", "w1 w2"], "w2")


def test_trap_11_of_several_stop_strings_the_one_that_ends_first_counts():
    output = [*b"xabcd"]
    for stop, text in [
        (["abcd", "bc"], "xa"),
        (["bc", "abcd"], "xa"),
        (["c", "abc"], "x"),  # they end together: the one that begins first
        (["abc", "c"], "x"),
        (["abcde", "cd"], "xab"),
    ]:
        assert feed(BYTES, [], output, text_params(stop=stop))[0][-1] == text


def test_trap_11_a_stop_string_counts_only_behind_min_tokens_but_may_begin_before():
    output = [*b"ab.ab."]
    for min_tokens, text in [(0, "a"), (1, "a"), (2, "ab.a"), (5, None), (6, None)]:
        seen, stop = feed(BYTES, [], output, text_params(stop="b", min_tokens=min_tokens))
        assert (seen[-1], stop) == ((text, "b") if text else ("ab.ab.", None))
    seen, stop = feed(BYTES, [], output, text_params(stop="ab.a", min_tokens=3))
    assert (seen[-1], stop) == ("", "ab.a")


def test_trap_11_the_prompt_is_not_searched():
    seen, stop = feed(BYTES, [*b"END E"], [*b"ND END"], text_params(stop="END"))
    assert (seen[-1], stop) == ("ND ", "END")


def test_trap_11_tokens_behind_the_stop_string_or_the_end_do_not_matter():
    text = OutputText(BYTES, [], text_params(stop="b"))
    assert [text.append(byte) for byte in b"abab"] == [None, "b", None, None]
    text.finish()
    assert text.so_far == "a"
    text = OutputText(BYTES, [], text_params(stop="b"))
    text.finish()
    text.finish()
    assert text.append(0x62) is None
    assert text.so_far == ""


# --- trap 12: characters split over tokens ---


@families
def test_trap_12_a_stop_string_of_split_characters_ends_the_text(family: str):
    tokenizer, a = TOKENIZERS[family], 0x61
    seen, stop = feed(tokenizer, [a], [a, *PIZZA, *PIZZA, a], text_params(stop="🍕🍕"))
    assert stop == "🍕🍕"
    assert seen == ["a"] * 10
    seen, stop = feed(tokenizer, [a], [a, *PIZZA, a], text_params(stop="🍕🍕"))
    assert stop is None
    assert seen == ["a"] * 5 + ["a🍕a"] * 2


@families
def test_trap_12_a_character_begun_in_the_prompt_is_part_of_a_stop_string(family: str):
    tokenizer, a = TOKENIZERS[family], 0x61
    for cut in (1, 2, 3):
        prompt, output = [a, *PIZZA[:cut]], [*PIZZA[cut:], a, a]
        assert feed(tokenizer, prompt, output, text_params())[0][-1] == "🍕aa"
        seen, stop = feed(tokenizer, prompt, output, text_params(stop="🍕a"))
        assert (seen[-1], stop) == ("", "🍕a")


@families
def test_trap_12_an_unfinished_character_shows_at_the_end_behind_what_was_held_back(family: str):
    seen, stop = feed(TOKENIZERS[family], [0x62], [0x61, *PIZZA[:2]], text_params(stop="a!"))
    assert stop is None
    assert seen[:-1] == [""] * 3
    assert seen[-1].rstrip("\ufffd") == "a"
    assert seen[-1] != "a"


def test_trap_12_a_replacement_character_from_the_end_is_no_stop_string():
    seen, stop = feed(BYTES, [], [0x61, *PIZZA[:2]], text_params(stop="\ufffd"))
    assert (seen[-1], stop) == ("a\ufffd", None)
    seen, stop = feed(BYTES, [], [0x61, *PIZZA[:2], 0x62], text_params(stop="\ufffd"))
    assert (seen[-1], stop) == ("a", "\ufffd")


# --- the rest ---


def test_without_detokenize_there_is_no_text():
    text = OutputText(BYTES, [], text_params(detokenize=False))
    assert text.append(0x61) is None
    text.finish()
    assert text.so_far == ""


def test_special_tokens_are_shown_as_the_params_say():
    output = [1, EOS, 2]
    for fields, expected in [
        ({}, "w1 w2"),
        ({"skip_special_tokens": False}, "w1 <eos> w2"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "w1 <eos> w2"),
    ]:
        assert feed(TINY, [], output, text_params(**fields))[0][-1] == expected
    eos = len(CORES["byte-level"][1]) - 1
    for spaces, expected in [(True, "a <eos> b"), (False, "a<eos>b")]:
        params = text_params(
            skip_special_tokens=False, spaces_between_special_tokens=spaces, stop="c"
        )
        assert feed(BYTES, [], [0x61, eos, 0x62], params)[0][-1] == expected


def test_a_hidden_special_token_does_not_break_a_stop_string():
    eos = len(CORES["byte-level"][1]) - 1
    seen, stop = feed(BYTES, [], [0x61, eos, 0x62], text_params(stop="ab"))
    assert (seen[-1], stop) == ("", "ab")


def test_text_that_nobody_asked_for_in_between_is_not_put_together_again():
    text = OutputText(BYTES, [], text_params())
    for byte in b"abc":
        text.append(byte)
    assert text.so_far == "abc"
    assert text.so_far is text.so_far
