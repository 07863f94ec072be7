"""Traps of sampling with steps in flight (their numbers are those of the list of known traps).

11 and 12, stop strings and characters across tokens, are in `test_output_text`; 16, that greedy
rows do not pay for their neighbours, in `test_sampler`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.errors import InvalidRequestError
from pagedjax.logits import LogitsContext, LogitsProcessor
from pagedjax.request import FinishReason
from pagedjax.runner import MAX_PROCESSORS
from pagedjax.sampling_params import SamplingParams
from tests.engine.fresh import assert_idle, fresh_engine, step_until_done
from tests.engine.tiny import (
    EOS,
    SLIDING,
    UNIFORM,
    VOCAB,
    generate,
    oracle_logprobs,
    random_prompts,
    tiny_tokenizer,
)

PIPELINES: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"async_scheduling": True, "num_decode_steps": 4},
]
EACH_PIPELINE = pytest.mark.parametrize("pipeline", PIPELINES, ids=["in turn", "overlap", "ahead"])


def penalized(prompt: list[int], count: int, presence: float, frequency: float) -> list[int]:
    """Greedy tokens by the float64 oracle; log-probabilities are logits but for a constant."""
    output: list[int] = []
    for _ in range(count):
        row = oracle_logprobs(UNIFORM, [*prompt, *output])[-1].copy()
        counts = np.bincount(output, minlength=VOCAB)
        output.append(int((row - presence * (counts > 0) - frequency * counts).argmax()))
    return output


@EACH_PIPELINE
def test_trap_9_penalties_count_the_token_that_is_still_on_its_way(
    pipeline: dict[str, Any],
) -> None:
    prompts = random_prompts(51, [3, 9, 17])
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, presence_penalty=1.5, frequency_penalty=0.8
    )
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine = fresh_engine(UNIFORM, **pipeline)
    for prompt, output in zip(prompts, generate(engine, prompts, params), strict=True):
        assert list(output.outputs[0].token_ids) == penalized(prompt, 12, 1.5, 0.8)
    without = generate(engine, prompts, plain)
    assert any(len({*output.outputs[0].token_ids}) < 12 for output in without)  # it matters


@EACH_PIPELINE
def test_trap_14_masks_and_parameters_go_with_the_request_not_with_its_row(
    pipeline: dict[str, Any],
) -> None:
    # Requests of different lengths: rows move up as others end, and slots are taken over.
    engine = fresh_engine(SLIDING, max_num_seqs=4, **pipeline)
    prompts = random_prompts(52, [5, 11, 2, 8, 3, 14, 7, 9, 4, 6])
    each = [
        SamplingParams(
            max_tokens=3 + 4 * (i % 4),
            seed=i,
            temperature=[0.0, 1.0, 2.0][i % 3],
            ignore_eos=True,
            allowed_token_ids=range(8 * i, 8 * i + 8) if i % 2 else None,
            logit_bias={90 - i: 3.0} if not i % 2 else {},
            logprobs=i % 3,
        )
        for i in range(len(prompts))
    ]
    together = generate(engine, prompts, each)
    assert_idle(engine)
    for i, (prompt, params, output) in enumerate(zip(prompts, each, together, strict=True)):
        (completion,) = output.outputs
        (alone,) = generate(fresh_engine(SLIDING), [prompt], params)
        assert completion.token_ids == alone.outputs[0].token_ids
        assert completion.logprobs is not None
        assert all(len(position.top) == i % 3 for position in completion.logprobs)
        if i % 2:
            assert {token // 8 for token in completion.token_ids} == {i}


@EACH_PIPELINE
def test_min_tokens_forbids_to_stop_and_stop_tokens_stop(pipeline: dict[str, Any]) -> None:
    engine = fresh_engine(UNIFORM, tokenizer=tiny_tokenizer(), **pipeline)
    (prompt,) = random_prompts(53, [6])
    wanted = {EOS: 100.0, 7: 80.0, 8: 60.0}
    for params, tokens, reason in (
        ({}, (EOS,), EOS),
        ({"min_tokens": 2}, (7, 7, EOS), EOS),
        ({"min_tokens": 2, "stop_token_ids": (7,)}, (8, 8, EOS), EOS),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, (EOS,), EOS),
        ({"ignore_eos": True, "max_tokens": 3}, (EOS,) * 3, None),
        ({"bad_words": ("<eos>",), "stop_token_ids": (7,)}, (7,), 7),
    ):
        common = {"temperature": 0, "max_tokens": 9, "logit_bias": wanted}
        asked = SamplingParams(**{**common, **params})
        completion = generate(engine, [prompt], asked)[0].outputs[0]
        assert (completion.token_ids, completion.stop_reason) == (tokens, reason)
        stopped = reason is not None
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@EACH_PIPELINE
def test_a_stop_string_ends_the_request_and_nothing_of_it_is_shown(
    pipeline: dict[str, Any],
) -> None:
    engine = fresh_engine(UNIFORM, tokenizer=tiny_tokenizer(), **pipeline)
    (prompt,) = random_prompts(54, [6])
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (whole,) = generate(engine, [prompt], plain)
    text = whole.outputs[0].text
    words = text.split()
    stop = f"{words[4]} {words[5]}"
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=12, stop=stop))
    seen = []
    while engine.has_unfinished_requests():
        seen += [output.outputs[0] for output in engine.step()]
    assert seen[-1].text == text[: text.index(stop)]
    assert seen[-1].stop_reason == stop
    assert len(seen[-1].token_ids) == 6
    assert all(seen[-1].text.startswith(completion.text) for completion in seen)
    assert_idle(engine)


@EACH_PIPELINE
def test_bad_words_are_not_sampled_whatever_comes_before_them(pipeline: dict[str, Any]) -> None:
    engine = fresh_engine(UNIFORM, tokenizer=tiny_tokenizer(), **pipeline)
    (prompt,) = random_prompts(55, [6])
    bias = {20: 100.0, 21: 80.0, 22: 60.0}
    asked = SamplingParams(
        temperature=0, max_tokens=8, logit_bias=bias, bad_words=("w20 w20", "w20 w21 w20")
    )
    (completion,) = generate(engine, [prompt], asked)[0].outputs
    # Behind "w20", "w20" is bad; then "w20" again completes the other, so "w21" it is; and so on.
    assert completion.token_ids == (20, 21, 21, 20, 21, 21, 20, 21)


@EACH_PIPELINE
def test_a_logits_processor_sees_counts_tail_and_position(pipeline: dict[str, Any]) -> None:
    def count_up(logits: jax.Array, context: LogitsContext) -> jax.Array:
        """The position, but never a token of the prompt or one that was sampled before."""
        wanted = jnp.arange(VOCAB, dtype=jnp.int32) == context.position
        used = context.in_prompt | (context.output_counts > 0)
        follows = jnp.arange(VOCAB, dtype=jnp.int32) == context.tail[-1] + 1
        favoured = jnp.where(wanted, 2.0, jnp.where(follows, 1.0, 0.0))
        return jnp.where(used, -jnp.inf, favoured).astype(logits.dtype)

    engine = fresh_engine(UNIFORM, **pipeline)
    prompt = [5, 6, 7, 1]
    asked = SamplingParams(temperature=0, max_tokens=6, logits_processor=count_up)
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    first, second = generate(engine, [prompt, prompt], [asked, plain])
    # By position 4, then the first unused (5 is in the prompt), again, behind 2, by position 8, 9.
    assert first.outputs[0].token_ids == (4, 0, 2, 3, 8, 9)
    alone = generate(fresh_engine(UNIFORM), [prompt], plain)[0]
    assert second.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_logits_processor_that_cannot_be_traced_is_refused_at_the_door() -> None:
    engine = fresh_engine(UNIFORM)

    def raises(logits: jax.Array, _: LogitsContext) -> jax.Array:
        return logits + jnp.ones(5)

    def shrinks(logits: jax.Array, _: LogitsContext) -> jax.Array:
        return logits[:5]

    def halves(logits: jax.Array, _: LogitsContext) -> jax.Array:
        return logits.astype(jnp.bfloat16)

    for processor, message in (
        (raises, "raises.* cannot be traced"),
        (shrinks, r"shrinks.* returns float32\[5\]; it must return float32\[97\]"),
        (halves, r"halves.* returns bfloat16\[97\]; it must return float32\[97\]"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.add_request([1, 2], SamplingParams(logits_processor=processor))
    for _ in range(MAX_PROCESSORS):
        engine.add_request([1, 2], SamplingParams(max_tokens=1, logits_processor=_another()))
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_PROCESSORS} different"):
        engine.add_request([1, 2], SamplingParams(logits_processor=_another()))


def _another() -> LogitsProcessor:
    return lambda logits, _: logits


def test_logprobs_of_the_model_and_of_what_was_sampled_from() -> None:
    engine = fresh_engine(UNIFORM)
    (prompt,) = random_prompts(56, [6])
    asked = SamplingParams(seed=1, max_tokens=6, temperature=0.5, top_k=4, logprobs=4)
    (completion,) = generate(engine, [prompt], asked)[0].outputs
    assert completion.logprobs is not None
    tokens = list(prompt)
    for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
        row = oracle_logprobs(UNIFORM, tokens)[-1]
        assert found.sampled == pytest.approx(row[token], abs=1e-4)
        kept = np.sort(row)[::-1][:4] / 0.5
        assert found.processed == pytest.approx(
            row[token] / 0.5 - np.log(np.exp(kept).sum()), abs=1e-4
        )
        tokens.append(token)


def test_what_the_vocabulary_or_a_missing_tokenizer_forbids_is_refused_at_the_door() -> None:
    engine = fresh_engine(UNIFORM)
    for params, message in (
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias is 97; it must be in \[0, 97\)"),
        ({"allowed_token_ids": (5, -1)}, "allowed_token_ids is -1; it must be in"),
        ({"stop_token_ids": (1000,)}, "stop_token_ids is 1000; it must be in"),
        ({"stop": "x"}, "stop is text, and there is no tokenizer"),
        ({"bad_words": "x"}, "bad_words is text, and there is no tokenizer"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.add_request([1, 2], SamplingParams(**params))
    assert step_until_done(engine) == {}
    assert_idle(engine)
