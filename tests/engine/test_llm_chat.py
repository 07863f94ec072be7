"""A conversation becomes the prompt of the tokenizer's template, and is answered as one."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError
from pagedjax.llm import LLM
from pagedjax.options import RequestOptions
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizer import Tokenizer
from tests.engine.tiny import in_one_shape, tiny_engine, tiny_tokenizer

TEMPLATES = {
    # Words of the tiny vocabulary: a role's word, then the content.
    "default": "{% for m in messages %}{{ 'w1' if m['role'] == 'user' else 'w2' }} "
    "{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}",
    "strict": "{% for m in messages %}{% if m['role'] != 'user' %}"
    "{{ raise_exception('users only') }}{% endif %}{{ m['content'] }}{% endfor %}",
    "tool_use": "{% for t in tools %}{{ t['name'] }} {% endfor %}{{ messages[-1]['content'] }} "
    "{{ style }}",
}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "w10 w11"}]
FOLLOW_UP: list[dict[str, Any]] = [
    *ASK,
    {"role": "assistant", "content": "w12"},
    {"role": "user", "content": "w13"},
]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    plain = tiny_tokenizer()
    tokenizer = Tokenizer(
        plain._core,
        special_tokens=plain.special_tokens,
        eos_token_ids=plain.eos_token_ids,
        chat_templates=TEMPLATES,
    )
    return in_one_shape(tiny_engine(tokenizer=tokenizer, max_num_seqs=2, max_num_batched_tokens=8))


@pytest.fixture
def llm(engine: LLMEngine) -> Iterator[LLM]:
    yield LLM(engine)
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def prompts_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.prompt_token_ids) for output in outputs]


def test_one_conversation_and_many(llm: LLM) -> None:
    many = llm.chat([ASK, FOLLOW_UP], GREEDY)
    assert prompts_of(many) == [[1, 10, 11, 2], [1, 10, 11, 2, 12, 1, 13, 2]]
    for output, expected in zip(many, llm.generate(prompts_of(many), GREEDY), strict=True):
        assert output.finished
        assert output.completions == expected.completions
    (one,) = llm.chat(FOLLOW_UP, GREEDY)
    assert one.completions == many[1].completions
    assert llm.chat([], GREEDY) == []


def test_params_and_options_reach_the_requests(llm: LLM) -> None:
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (1, 3)]
    outputs = llm.chat([ASK, ASK], params, RequestOptions(use_prefix_cache=False))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    assert [output.metrics.cached_tokens for output in outputs] == [0, 0]
    with pytest.raises(InvalidRequestError, match="2 params for 1 prompts"):
        llm.chat(ASK, params)


def test_options_of_the_template(llm: LLM) -> None:
    outputs = [
        *llm.chat(ASK, GREEDY, add_generation_prompt=False),
        *llm.chat(ASK, GREEDY, template_name="strict"),
        *llm.chat(ASK, GREEDY, template_variables={"tools": [{"name": "w7"}], "style": "w8"}),
    ]
    assert prompts_of(outputs) == [[1, 10, 11], [10, 11], [7, 10, 11, 8]]


def test_a_conversation_that_is_refused_carries_its_error_and_the_rest_finish(llm: LLM) -> None:
    long = [{"role": "user", "content": "w5 " * 60}]
    wrong: Any = [ASK, FOLLOW_UP, long, [{"content": "w1"}], "w1"]
    outputs = llm.chat(wrong, GREEDY, template_name="strict")
    assert outputs[0].completions == llm.generate([10, 11], GREEDY)[0].completions
    for output, part in zip(
        outputs[1:], ["users only", "60 tokens", "role", "messages is a str"], strict=True
    ):
        with pytest.raises(InvalidRequestError, match=part):
            _ = output.outputs
    (output,) = llm.chat(ASK, GREEDY, template_name="unknown")
    with pytest.raises(InvalidRequestError, match="unknown"):
        _ = output.outputs


def test_without_a_tokenizer_there_is_no_chat() -> None:
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        LLM(tiny_engine()).chat(ASK)
