"""Scores of continuations equal those of the oracle, however the pairs are given and batched."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import tokenizers

from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError
from pagedjax.llm import LLM
from pagedjax.options import RequestOptions
from pagedjax.prompts import Prompt
from pagedjax.scoring import Score, join
from pagedjax.tokenizer import Tokenizer
from tests.engine.tiny import (
    SLIDING,
    UNIFORM,
    oracle_greedy,
    oracle_logprobs,
    random_prompts,
    tiny_engine,
    tiny_tokenizer,
)

MODELS = {"uniform": UNIFORM, "sliding": SLIDING}


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> LLMEngine:
    return tiny_engine(
        MODELS[request.param], tiny_tokenizer(), block_size=4, max_num_batched_tokens=8
    )


@pytest.fixture
def llm(engine: LLMEngine) -> Iterator[LLM]:
    yield LLM(engine)
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def assert_equals_oracle(llm: LLM, prompt: list[int], continuation: list[int], got: Score) -> None:
    rows = oracle_logprobs(llm.engine.model, [*prompt, *continuation])[len(prompt) - 1 : -1]
    expected = rows[np.arange(len(continuation)), continuation]
    assert got.token_ids == tuple(continuation)
    np.testing.assert_allclose(got.logprobs, expected, atol=1e-4)
    assert got.total == math.fsum(got.logprobs)
    assert got.is_greedy == (rows.argmax(-1) == continuation).all()


def test_scores_equal_the_oracle(llm: LLM) -> None:
    prompts = random_prompts(1, [1, 2, 8, 30, 5, 16])
    continuations = random_prompts(2, [1, 7, 1, 17, 20, 2])  # the fourth pair is the longest
    for pair in zip(prompts, continuations, llm.score(prompts, continuations), strict=True):
        assert_equals_oracle(llm, *pair)


def test_a_greedy_continuation_is_found_to_be_one_and_its_neighbours_are_not(llm: LLM) -> None:
    (prompt,) = random_prompts(3, [6])
    greedy = list(oracle_greedy(llm.engine.model, prompt, 5)[0])
    others = [[*greedy[:i], (greedy[i] + 1) % 97, *greedy[i + 1 :]] for i in (0, 2, 4)]
    scores = llm.score(prompt, [greedy, *others])
    assert [score.is_greedy for score in scores] == [True, False, False, False]
    for continuation, got in zip([greedy, *others], scores, strict=True):
        assert_equals_oracle(llm, prompt, continuation, got)


def test_one_prompt_goes_with_many_choices_with_and_without_the_cache(llm: LLM) -> None:
    (prompt,) = random_prompts(4, [14])
    choices = random_prompts(5, [1, 3, 2, 4])
    first = llm.score(prompt, choices)
    again = llm.score([prompt] * 4, choices)
    alone = llm.score(prompt, choices, RequestOptions(use_prefix_cache=False))
    for continuation, *scores in zip(choices, first, again, alone, strict=True):
        for got in scores:
            assert_equals_oracle(llm, prompt, continuation, got)


def test_text_and_token_ids_score_alike(llm: LLM) -> None:
    texts: list[tuple[Prompt, Prompt]] = [
        ("w3 w4 w5 ", "w6 w7"),
        ("w3 w4 w5", " w6 w7"),
        ("w3 w4 w5", [6, 7]),
        ([3, 4, 5], "w6 w7"),
        ([3, 4, 5], [6, 7]),
    ]
    scores = [llm.score(*pair)[0] for pair in texts]
    for got in scores:
        assert_equals_oracle(llm, [3, 4, 5], [6, 7], got)
    prompts, continuations = ([pair[i] for pair in texts] for i in range(2))
    assert llm.score(prompts, continuations) == scores


def test_numbers_of_prompts_and_continuations(llm: LLM) -> None:
    assert llm.score([], []) == []
    assert llm.score([1], []) == []
    with pytest.raises(InvalidRequestError, match="2 prompts for 3 continuations"):
        llm.score([[1], [2]], [[1], [2], [3]])


@pytest.mark.parametrize(
    ("prompt", "continuation", "part"),
    [
        ([], [1], "no token of the prompt"),
        ("", "w1", "no token of the prompt"),
        ([1], [], "continuation is empty"),
        ("w1", "", "continuation is empty"),
        ([1] * 24, [2] * 24, "48 tokens"),
        ([1], [97], "token id 97"),
        ("\ud800", "w1", "cannot encode"),
    ],
)
def test_a_pair_that_cannot_be_scored_is_named_before_anything_is_computed(
    llm: LLM, prompt: Prompt, continuation: Prompt, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", lambda: pytest.fail("it computes"))
        with pytest.raises(InvalidRequestError, match=part) as caught:
            llm.score([[1], prompt, [3]], [[2], continuation, [4]])
    assert str(caught.value).startswith("prompt 1: ")
    assert len(llm.score([1] * 24, [2] * 23)) == 1  # the longest that can be


def test_text_needs_a_tokenizer() -> None:
    for pair in (("w1", [2]), ([1], "w2")):
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            join(None, *pair)
    assert join(None, [1, 2], [3]) == ([1, 2, 3], 2)


# --- the border ---

A, B, AB, ABB, C, BOS, EOS = range(7)


def merging_tokenizer(*, around: bool) -> Tokenizer:
    """Merges "ab" and "abb"; with `around`, puts tokens before and behind a text."""
    vocab = {"a": A, "b": B, "ab": AB, "abb": ABB, "c": C, "<s>": BOS, "</s>": EOS}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b"), ("ab", "b")]))
    if around:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    return Tokenizer(core)


@pytest.mark.parametrize(
    ("prompt", "continuation", "token_ids", "border"),
    [
        ("ab", "c", [AB, C], 1),
        ("ca", "b", [C, AB], 1),  # the merged token belongs to the continuation
        ("cab", "bc", [C, ABB, C], 1),
        ("ca", "bba", [C, ABB, A], 1),
        ("cc", "ab", [C, C, AB], 2),
    ],
)
def test_a_token_merged_across_the_border_is_scored(
    prompt: str, continuation: str, token_ids: list[int], border: int
) -> None:
    plain, around = merging_tokenizer(around=False), merging_tokenizer(around=True)
    assert join(plain, prompt, continuation) == (token_ids, border)
    assert join(around, prompt, continuation) == ([BOS, *token_ids, EOS], border + 1)


def test_a_prompt_that_merges_as_a_whole_needs_a_token_in_front() -> None:
    with pytest.raises(InvalidRequestError, match="no token of the prompt"):
        join(merging_tokenizer(around=False), "a", "b")
    around = merging_tokenizer(around=True)
    assert join(around, "a", "b") == ([BOS, AB, EOS], 1)
    assert join(around, "", "ab") == ([BOS, AB, EOS], 1)
    assert join(around, [C], "ab") == ([C, AB], 1)
