"""The engine gives every request the tokens of a slow oracle, whatever else it computes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError, PagedJaxError
from pagedjax.llm import LLM
from pagedjax.logits import LogitsContext
from pagedjax.options import RequestOptions
from pagedjax.outputs import CompletionOutput
from pagedjax.request import FinishReason
from pagedjax.sampling_params import SamplingParams
from tests.compiles import counted_compiles
from tests.engine.tiny import (
    EOS,
    SLIDING,
    UNIFORM,
    generate,
    in_one_shape,
    oracle_greedy,
    oracle_logprobs,
    random_prompts,
    run_all,
    tiny_engine,
    tiny_tokenizer,
)

MODELS = {"uniform": UNIFORM, "sliding": SLIDING}

# Block sizes 1, 2 and 16; budgets of few and of many chunks; pools with room for all requests
# and for one or two.
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"model": "uniform", "block_size": 16, "max_num_batched_tokens": 32},
    "tight": {"model": "uniform", "block_size": 1, "max_num_batched_tokens": 4, "num_blocks": 50},
    "sliding-roomy": {"model": "sliding", "block_size": 16, "max_num_seqs": 3},
    "sliding-tight": {
        "model": "sliding",
        "block_size": 2,
        "max_num_batched_tokens": 7,
        "num_blocks": 25,
    },
    "tpu-kernel": {
        "model": "uniform",
        "block_size": 8,
        "attention": "mosaic_tpu_interpret",
        "num_blocks": 13,
    },
    "sliding-tpu-kernel": {
        "model": "sliding",
        "block_size": 16,
        "attention": "mosaic_tpu_interpret",
        "num_decode_steps": 3,
    },
}


@pytest.fixture(scope="module")
def engines() -> dict[str, LLMEngine]:
    """One engine of each kind; its programs compile once, in whichever test needs them first."""
    made = {
        name: tiny_engine(
            MODELS[str(settings["model"])],
            tiny_tokenizer() if name == "roomy" else None,
            **{key: value for key, value in settings.items() if key != "model"},
        )
        for name, settings in ENGINES.items()
    }
    for name in ("tight", "sliding-roomy", "tpu-kernel", "sliding-tpu-kernel"):
        in_one_shape(made[name])
    return made


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, engines: dict[str, LLMEngine]) -> Iterator[LLMEngine]:
    """Every kind in turn; afterwards it must be idle, with all blocks back."""
    yield engines[request.param]
    assert_idle(engines[request.param])


@pytest.fixture
def roomy(engines: dict[str, LLMEngine]) -> Iterator[LLMEngine]:
    """The engine with a tokenizer and space for everybody."""
    yield engines["roomy"]
    assert_idle(engines["roomy"])


def assert_idle(engine: LLMEngine) -> None:
    scheduler = engine.scheduler
    assert not engine.has_unfinished_requests()
    assert len(scheduler) == 0
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    scheduler.pool.check()


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0.0, "ignore_eos": True, **fields}
    return SamplingParams(max_tokens=max_tokens, **fields)


def assert_equals_oracle(
    engine: LLMEngine, prompt: list[int], completion: CompletionOutput
) -> None:
    tokens, rows = oracle_greedy(engine.model, prompt, len(completion.token_ids))
    assert completion.token_ids == tokens
    if completion.logprobs is not None:
        for token, row, got in zip(tokens, rows, completion.logprobs, strict=True):
            assert got.sampled == pytest.approx(row[token], abs=1e-4)
            for token_id, value in got.top:
                assert value == pytest.approx(row[token_id], abs=1e-4)


# --- greedy output equals the oracle's ---

LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33]


def test_greedy_prompts_alone_equal_the_oracle(engine: LLMEngine) -> None:
    for prompt in random_prompts(1, LENGTHS):
        (output,) = generate(engine, [prompt], greedy(6, logprobs=2))
        assert_equals_oracle(engine, prompt, output.outputs[0])
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_greedy_prompts_batched_equal_the_oracle(engine: LLMEngine) -> None:
    prompts = random_prompts(2, LENGTHS[::-1])
    params = [greedy(n, logprobs=n % 3) for n in range(1, len(prompts) + 1)]
    for prompt, own, output in zip(prompts, params, generate(engine, prompts, params), strict=True):
        assert output.prompt_token_ids == tuple(prompt)
        assert len(output.outputs[0].token_ids) == own.max_tokens
        assert_equals_oracle(engine, prompt, output.outputs[0])


def test_requests_that_arrive_one_after_the_other_equal_the_oracle(engine: LLMEngine) -> None:
    prompts, finished = random_prompts(3, [9, 21, 4, 13, 2]), {}
    ids = []
    for prompt in prompts:
        ids.append(engine.add_request(prompt, greedy(8)))
        for _ in range(2):
            finished |= {o.request_id: o for o in engine.step() if o.finished}
    finished |= run_all(engine)
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_equals_oracle(engine, prompt, finished[request_id].outputs[0])


def test_requests_wait_when_the_pool_is_full_and_are_served_in_order(
    engines: dict[str, LLMEngine],
) -> None:
    engine = engines["tight"]  # 49 blocks of one token
    prompts = random_prompts(4, [30, 30, 30, 5])
    ids = [engine.add_request(prompt, greedy(5)) for prompt in prompts]
    order, most_running = [], 0
    while engine.has_unfinished_requests():
        order += [o.request_id for o in engine.step() if o.finished]
        most_running = max(most_running, len(engine.scheduler.running))
    assert most_running == 2, "a request of 34 blocks and one of 9 fit, two of 34 do not"
    assert order == ids
    assert_idle(engine)


def test_reused_blocks_do_not_leak_old_tokens(engine: LLMEngine) -> None:
    (prompt,) = random_prompts(5, [20])
    first = generate(engine, [prompt], greedy(8, logprobs=1))[0].outputs[0]
    generate(engine, random_prompts(6, [30, 30, 30, 30]), greedy(3))
    again = generate(engine, [prompt], greedy(8, logprobs=1))[0].outputs[0]
    assert again.token_ids == first.token_ids
    assert_equals_oracle(engine, prompt, again)


def test_a_half_precision_pool_stays_near_the_oracle() -> None:
    engine = tiny_engine(kv_cache_dtype="bfloat16", max_num_seqs=1, max_num_batched_tokens=1)
    (prompt,) = random_prompts(24, [12])
    completion = generate(engine, [prompt], greedy(6, logprobs=0))[0].outputs[0]
    rows = oracle_logprobs(UNIFORM, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
    assert completion.logprobs is not None
    errors = [
        got.sampled - row[token]
        for token, got, row in zip(completion.token_ids, completion.logprobs, rows, strict=True)
    ]
    assert 1e-5 < np.abs(errors).max() < 0.05, "rounded to 8 bits, and no more than that"


# --- sampling ---


def seeded(seed: int, **fields: Any) -> SamplingParams:
    fields = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 8, **fields}
    return SamplingParams(seed=seed, **fields)


SEEDED = [
    seeded(1),
    seeded(2, top_k=5),
    seeded(3, top_p=0.8, temperature=1.5),
    seeded(4, top_k=20, top_p=0.9),
    seeded(2**63 - 1),
    greedy(8),
]


@pytest.mark.parametrize("model", MODELS)
def test_a_seeded_stream_is_the_same_alone_batched_reordered_and_chunked(
    model: str, engines: dict[str, LLMEngine]
) -> None:
    roomy, tight = ("roomy", "tight") if model == "uniform" else ("sliding-roomy", "sliding-tight")
    prompts = random_prompts(7, [5, 17, 1, 30, 8, 12])

    def run(engine_name: str, order: list[int]) -> list[tuple[int, ...]]:
        outputs = generate(
            engines[engine_name], [prompts[i] for i in order], [SEEDED[i] for i in order]
        )
        tokens = {i: o.outputs[0].token_ids for i, o in zip(order, outputs, strict=True)}
        return [tokens[i] for i in sorted(order)]

    alone = [run(roomy, [i])[0] for i in range(6)]
    assert len(set(alone)) == 6
    assert run(roomy, [0, 1, 2, 3, 4, 5]) == alone
    assert run(roomy, [4, 2, 5, 0, 3, 1]) == alone
    assert run(tight, [0, 1, 2, 3, 4, 5]) == alone  # other chunks, other blocks


def test_the_same_prompt_with_other_seeds_gives_other_streams(roomy: LLMEngine) -> None:
    prompts = random_prompts(8, [6]) * 6
    outputs = generate(roomy, prompts, [seeded(seed) for seed in (1, 2, 3, 1, 2, 3)])
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert len(set(tokens)) == 3
    assert tokens[:3] == tokens[3:]


def test_requests_without_a_seed_differ(roomy: LLMEngine) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = generate(roomy, [[5, 6, 7]] * 4, params)
    assert len({output.outputs[0].token_ids for output in outputs}) == 4


def test_default_seeds_follow_from_the_engine_seed_and_the_order_of_arrival() -> None:
    def seeds(engine_seed: int) -> list[int]:
        engine = tiny_engine(seed=engine_seed)
        for prompt in random_prompts(engine_seed, [3, 2, 1]):
            engine.add_request(prompt)
        return [request.seed for request in engine.scheduler.waiting]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 6
    assert all(0 <= seed < 2**63 for seed in seeds(0))


def test_sampled_tokens_come_with_the_models_own_logprobs(roomy: LLMEngine) -> None:
    (prompt,) = random_prompts(9, [7])
    params = seeded(5, temperature=3.0, logprobs=20)
    (output,) = generate(roomy, [prompt], params)
    completion = output.outputs[0]
    rows = oracle_logprobs(UNIFORM, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
    assert completion.logprobs is not None
    for token, got, row in zip(completion.token_ids, completion.logprobs, rows, strict=True):
        assert got.sampled == pytest.approx(row[token], abs=1e-4)
        assert [i for i, _ in got.top] == np.argsort(-row)[:20].tolist()
        assert [v for _, v in got.top] == pytest.approx(np.sort(row)[::-1][:20].tolist(), abs=1e-4)
    assert any(t != row.argmax() for t, row in zip(completion.token_ids, rows, strict=True))


def test_logprobs_are_as_many_as_asked_for_and_none_when_not_asked(roomy: LLMEngine) -> None:
    prompts = random_prompts(10, [4, 4, 4])
    outputs = generate(roomy, prompts, [greedy(3), greedy(3, logprobs=0), greedy(3, logprobs=5)])
    without, only_sampled, five = (output.outputs[0].logprobs for output in outputs)
    assert without is None
    assert [len(position.top) for position in only_sampled or ()] == [0, 0, 0]
    assert [len(position.top) for position in five or ()] == [5, 5, 5]


# --- the end of a request ---


def end_of(engine: LLMEngine, prompt: Any, params: SamplingParams) -> tuple[Any, ...]:
    completion = generate(engine, [prompt], params)[0].outputs[0]
    return completion.finish_reason, len(completion.token_ids), completion.stop_reason


def test_a_stop_token_ends_the_request_at_its_first_occurrence(roomy: LLMEngine) -> None:
    (prompt,) = random_prompts(11, [8])
    tokens, _ = oracle_greedy(UNIFORM, prompt, 10)
    stop = tokens[5]
    count = tokens.index(stop) + 1
    params = greedy(10, stop_token_ids=(stop,))
    assert end_of(roomy, prompt, params) == (FinishReason.STOP, count, stop)


def eos_prompt(roomy: LLMEngine) -> tuple[list[int], SamplingParams, int]:
    """A prompt and a seed for which the sampled stream meets the end-of-sequence token."""
    for seed in range(100):
        params = seeded(seed, temperature=8.0, max_tokens=20)
        tokens = generate(roomy, [[3, 1, 4]], params)[0].outputs[0].token_ids
        if EOS in tokens[1:-1]:
            return [3, 1, 4], params, tokens.index(EOS)
    raise AssertionError("no stream has an end-of-sequence token in it")


def test_ignore_eos_goes_on_behind_the_end_of_sequence_token(roomy: LLMEngine) -> None:
    prompt, params, index = eos_prompt(roomy)
    assert end_of(roomy, prompt, params) == (FinishReason.LENGTH, 20, None)
    heeding = dataclasses.replace(params, ignore_eos=False)
    assert end_of(roomy, prompt, heeding) == (FinishReason.STOP, index + 1, EOS)
    named = dataclasses.replace(params, stop_token_ids=(EOS,))
    assert end_of(roomy, prompt, named) == (FinishReason.STOP, index + 1, EOS)


def test_text_is_that_of_the_tokens_without_the_stop_token(roomy: LLMEngine) -> None:
    prompt, params, index = eos_prompt(roomy)
    params = dataclasses.replace(params, ignore_eos=False)
    completion = generate(roomy, [prompt], params)[0].outputs[0]
    words = [f"w{token}" for token in completion.token_ids[:index]]
    assert completion.text.split() == words
    assert index > 0


def test_a_text_prompt_is_its_tokens(roomy: LLMEngine) -> None:
    text, tokens = generate(roomy, ["w5 w17 w90", [5, 17, 90]], greedy(5))  # type: ignore[list-item]
    assert text.prompt_token_ids == (5, 17, 90)
    assert text.completions == tokens.completions


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_max_tokens_is_exact(engine: LLMEngine, max_tokens: int) -> None:
    (prompt,) = random_prompts(12, [10])
    assert end_of(engine, prompt, greedy(max_tokens)) == (FinishReason.LENGTH, max_tokens, None)


@pytest.mark.parametrize("engine", ["roomy", "tight", "sliding-roomy"], indirect=True)
@pytest.mark.parametrize("prompt_len", [40, 47])
def test_max_model_len_ends_a_request(engine: LLMEngine, prompt_len: int) -> None:
    (prompt,) = random_prompts(13, [prompt_len])
    (output,) = generate(engine, [prompt], greedy(1000))
    completion = output.outputs[0]
    assert completion.finish_reason is FinishReason.LENGTH
    assert prompt_len + len(completion.token_ids) == 48
    assert_equals_oracle(engine, prompt, completion)


def test_every_step_reports_the_tokens_so_far(roomy: LLMEngine) -> None:
    (prompt,) = random_prompts(14, [6])
    request_id = roomy.add_request(prompt, greedy(4))
    seen = []
    assert roomy.step() == []  # results come one step later
    while roomy.has_unfinished_requests():
        (output,) = roomy.step()
        assert output.request_id == request_id
        assert output.finished == (len(output.outputs[0].token_ids) == 4)
        seen.append(output.outputs[0].token_ids)
    assert seen == [seen[-1][:n] for n in (1, 2, 3, 4)]
    assert roomy.step() == []


def test_final_outputs_come_once(roomy: LLMEngine) -> None:
    (prompt,) = random_prompts(14, [6])
    roomy.add_request(prompt, greedy(4), options=RequestOptions(output_kind="final"))
    outputs = []
    while roomy.has_unfinished_requests():
        outputs += roomy.step()
    (output,) = outputs
    assert output.finished
    assert len(output.outputs[0].token_ids) == 4


def test_metrics_are_in_order(roomy: LLMEngine) -> None:
    (output,) = generate(roomy, random_prompts(15, [40]), greedy(3))
    metrics = output.metrics
    assert metrics.first_token is not None
    assert metrics.finished is not None
    assert metrics.arrival <= metrics.first_token <= metrics.finished


# --- abort ---


def test_an_abort_returns_the_blocks_and_leaves_the_others_alone(engine: LLMEngine) -> None:
    prompts = random_prompts(16, [6, 12, 9, 14, 3])
    ids = [engine.add_request(prompt, greedy(9)) for prompt in prompts]
    for _ in range(3):
        engine.step()
    running = engine.scheduler.running[0]
    (sequence,) = running.sequences
    waiting = list(engine.scheduler.waiting)[-1]
    free, held = engine.scheduler.pool.num_free, np.count_nonzero(sequence.block_tables)
    output = engine.abort(running.request_id)
    assert engine.scheduler.pool.num_free == free + held
    assert output is not None
    assert output.finished
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert engine.abort(waiting.request_id) is not None
    finished = run_all(engine)
    aborted = {running.request_id, waiting.request_id}
    assert set(finished) == set(ids) - aborted
    for prompt, request_id in zip(prompts, ids, strict=True):
        if request_id not in aborted:
            assert_equals_oracle(engine, prompt, finished[request_id].outputs[0])


def test_an_unknown_or_finished_request_cannot_be_aborted(roomy: LLMEngine) -> None:
    (output,) = generate(roomy, [[1, 2]], greedy(1))
    assert roomy.abort(output.request_id) is None
    assert roomy.abort("never heard of") is None


# --- refusals ---


def refusals() -> dict[str, tuple[Any, dict[str, Any], list[str]]]:
    """Prompt, sampling parameters, and what the message must hold."""
    return {
        "no tokens": ([], {}, ["empty", "at least 1 token"]),
        "empty text": ("", {}, ["empty", "at least 1 token"]),
        "unencodable text": ("w1 \ud800", {}, ["surrogates"]),
        "as long as max_model_len": ([1] * 48, {}, ["48 tokens", "max_model_len 48", "most 47"]),
        "longer than max_model_len": ([1] * 99, {}, ["99 tokens", "max_model_len 48", "most 47"]),
        "negative token": ([1, -1], {}, ["-1", "[0, 97)"]),
        "token beyond the vocabulary": ([97], {}, ["97", "[0, 97)"]),
        "numpy token beyond it": (np.array([3, 400]), {}, ["400", "[0, 97)"]),
        "fractional token": ([1.5], {}, ["1.5", "integer"]),
        "text as a token": (["w1"], {}, ["'w1'", "integer"]),
        "max_tokens": ([1], {"max_tokens": 0}, ["max_tokens is 0", "at least 1"]),
        "temperature": ([1], {"temperature": -1}, ["temperature is -1", "at least 0"]),
        "nan": ([1], {"temperature": float("nan")}, ["temperature is nan", "at least 0"]),
        "top_p": ([1], {"top_p": 0}, ["top_p is 0", "(0, 1]"]),
        "seed": ([1], {"seed": -5}, ["seed is -5", "[0, 2**63)"]),
        "id in use": ([1], {"request_id": "taken"}, ["'taken'", "in use"]),
    }


@pytest.mark.parametrize("name", refusals())
def test_a_bad_request_is_refused_with_value_and_limit_and_the_others_finish(
    name: str, roomy: LLMEngine
) -> None:
    prompt, fields, parts = refusals()[name]
    prompts = random_prompts(17, [5, 11])
    ids = [roomy.add_request(prompts[0], greedy(4), request_id="taken")]
    roomy.step()
    request_id = fields.pop("request_id", None)
    with pytest.raises(InvalidRequestError) as caught:
        roomy.add_request(prompt, SamplingParams(**fields), request_id)
    for part in parts:
        assert part in str(caught.value)
    ids.append(roomy.add_request(prompts[1], greedy(4)))
    finished = run_all(roomy)
    assert list(finished) == ids
    for own, own_id in zip(prompts, ids, strict=True):
        assert_equals_oracle(roomy, own, finished[own_id].outputs[0])


def test_a_request_that_the_pool_can_never_hold_is_refused_and_the_others_finish(
    engines: dict[str, LLMEngine],
) -> None:
    engine = engines["sliding-tight"]
    prompts = random_prompts(18, [4, 37, 6])
    first = engine.add_request(prompts[0], greedy(3))
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(prompts[1], greedy(12))
    # 24 blocks for the full layers, 3 for those with a window of 5.
    for part in ("37 prompt tokens", "max_tokens 12", "need 27 blocks of 2 tokens", "has 24"):
        assert part in str(caught.value)
    last = engine.add_request(prompts[2], greedy(3))
    finished = run_all(engine)
    assert list(finished) == [first, last]
    for prompt, request_id in zip(prompts[::2], (first, last), strict=True):
        assert_equals_oracle(engine, prompt, finished[request_id].outputs[0])
    assert_idle(engine)


def test_a_text_prompt_without_a_tokenizer_is_refused(engines: dict[str, LLMEngine]) -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer; give token ids"):
        engines["tight"].add_request("w1")


def test_numpy_token_ids_are_as_good_as_ints(roomy: LLMEngine) -> None:
    (prompt,) = random_prompts(19, [6])
    variants = [prompt, np.array(prompt), np.array(prompt, np.uint8), list(np.array(prompt))]
    outputs = generate(roomy, variants, greedy(5))  # type: ignore[arg-type]
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    assert all(type(i) is int for output in outputs for i in output.prompt_token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**40},
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"top_p": 1e-300},
        {"seed": np.int8(3)},
        {"max_tokens": np.int8(2)},
    ],
)
def test_allowed_extremes_do_not_break_the_step(roomy: LLMEngine, fields: dict[str, Any]) -> None:
    prompts = random_prompts(20, [5, 5])
    extreme = SamplingParams(**{"max_tokens": 2, "ignore_eos": True, **fields})
    outputs = generate(roomy, prompts, [extreme, greedy(4)])
    assert len(outputs[0].outputs[0].token_ids) == 2
    assert_equals_oracle(roomy, prompts[1], outputs[1].outputs[0])


def test_an_id_can_be_used_again_when_its_request_is_done(roomy: LLMEngine) -> None:
    for _ in range(2):
        assert roomy.add_request([1, 2], greedy(1), request_id="again") == "again"
        assert list(run_all(roomy)) == ["again"]


# --- compilation ---


def _halve(logits: jax.Array, _: LogitsContext) -> jax.Array:
    return logits / 2


def _double(logits: jax.Array, _: LogitsContext) -> jax.Array:
    return logits * 2


def test_after_warm_up_no_request_compiles_anything() -> None:
    engine = tiny_engine(
        SLIDING,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        num_blocks=60,
        num_decode_steps=3,
        logits_processors=(_halve,),
    )
    jax.clear_caches()  # engines of one model share what they compile
    with counted_compiles() as compiles:
        num_buckets = engine.warmup()
    assert len(compiles) >= num_buckets == len(engine.runner.buckets.all())
    rng = np.random.default_rng(21)
    with counted_compiles() as compiles:
        for prompt in random_prompts(22, rng.integers(1, 47, 30).tolist()):
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 12)),
                temperature=float(rng.choice([0.0, 0.7])),
                top_k=int(rng.choice([0, 5])),
                top_p=float(rng.choice([1.0, 0.9])),
                logprobs=rng.choice([None, 3]),
                prompt_logprobs=rng.choice([None, 2]),
                frequency_penalty=float(rng.choice([0.0, 0.5])),
                logit_bias={3: 2.0} if rng.random() < 0.3 else {},
                stop_token_ids=(7,) if rng.random() < 0.3 else (),
                logits_processor=_halve if rng.random() < 0.3 else None,
            )
            engine.add_request(prompt, params)
            if rng.random() < 0.5:
                engine.step()
        run_all(engine)
    assert compiles == []
    assert engine.compiles.num_after_warmup == 0
    assert "pagedjax_compiles_after_warmup_total 0.0" in engine.metrics.text().decode()
    engine.add_request([1, 2], greedy(1, logits_processor=_double))
    run_all(engine)
    assert engine.compiles.num_after_warmup > 0  # the control: it was not known before
    with counted_compiles() as compiles:  # the control: a new program is seen
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7))
    assert compiles
    assert_idle(engine)


def test_warm_up_leaves_the_pool_as_it_is(engines: dict[str, LLMEngine]) -> None:
    engine = engines["sliding-tight"]
    prompts = random_prompts(23, [9, 5])
    ids = [engine.add_request(prompt, greedy(8)) for prompt in prompts]
    for _ in range(4):
        engine.step()
    engine.warmup()
    finished = run_all(engine)
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_equals_oracle(engine, prompt, finished[request_id].outputs[0])


# --- LLM ---


def test_generate_gives_one_output_a_prompt_in_their_order(roomy: LLMEngine) -> None:
    prompts = random_prompts(25, [20, 1, 9, 30, 2, 5])
    params = [greedy(n) for n in (9, 1, 4, 2, 7, 3)]  # they finish in another order
    outputs = LLM(roomy).generate(prompts, params)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert output.finished
        assert len(output.outputs[0].token_ids) == own.max_tokens
        assert_equals_oracle(roomy, prompt, output.outputs[0])


def test_generate_takes_one_prompt_or_many_and_text_or_tokens(roomy: LLMEngine) -> None:
    llm, params = LLM(roomy), greedy(3)
    (expected,) = llm.generate([[5, 17]], params)
    for prompts in ("w5 w17", ["w5 w17"], [5, 17], np.array([5, 17]), [np.array([5, 17])]):
        (output,) = llm.generate(prompts, params)  # type: ignore[arg-type]
        assert output.completions == expected.completions
    assert llm.generate([], params) == []
    assert len(llm.generate(["w1", [2, 3]])) == 2


def test_a_refused_prompt_carries_its_error_and_the_rest_finish(roomy: LLMEngine) -> None:
    prompts = [[1, 2], [], [5] * 48, [97], "w9", ""]
    outputs = LLM(roomy).generate(prompts, greedy(3))
    assert [output.error is None for output in outputs] == [True, False, False, False, True, False]
    for output, part in zip(
        [o for o in outputs if o.error],
        ["empty", "48 tokens", "token id 97", "empty"],
        strict=True,
    ):
        assert output.finished
        with pytest.raises(InvalidRequestError, match=part) as caught:
            _ = output.outputs
        assert caught.value is output.error
    assert_equals_oracle(roomy, [1, 2], outputs[0].outputs[0])
    assert_equals_oracle(roomy, [9], outputs[4].outputs[0])


def test_params_must_be_one_for_all_or_one_each(roomy: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="1 params for 2 prompts"):
        LLM(roomy).generate([[1], [2]], [greedy(1)])


def test_stream_yields_every_token_once_with_the_index_of_its_prompt(roomy: LLMEngine) -> None:
    prompts = random_prompts(26, [3, 40, 8])
    seen: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}
    for index, output in LLM(roomy).stream(prompts, greedy(4)):
        assert list(output.prompt_token_ids) == prompts[index]
        seen[index].append(output.outputs[0].token_ids)
    for index, prompt in enumerate(prompts):
        tokens, _ = oracle_greedy(UNIFORM, prompt, 4)
        assert seen[index] == [tokens[:n] for n in (1, 2, 3, 4)]


def test_leaving_a_stream_early_aborts_the_rest(roomy: LLMEngine) -> None:
    prompts = random_prompts(27, [3, 4, 5, 6, 7, 8])  # two of them wait
    stream = LLM(roomy).stream(prompts, greedy(30))
    next(stream)
    assert len(roomy.scheduler.running) == 4
    assert len(roomy.scheduler.waiting) == 2
    stream.close()
    assert_idle(roomy)
    (output,) = LLM(roomy).generate([prompts[0]], greedy(5))
    assert_equals_oracle(roomy, prompts[0], output.outputs[0])


def test_streams_read_in_turn_get_all_of_their_own_tokens(roomy: LLMEngine) -> None:
    llm = LLM(roomy)
    prompts = random_prompts(28, [3, 5])
    streams = [llm.stream(prompt, greedy(6)) for prompt in prompts]
    lengths: list[list[int]] = [[], []]
    for _ in range(6):
        for stream, seen in zip(streams, lengths, strict=True):
            _, output = next(stream)
            seen.append(len(output.outputs[0].token_ids))
    assert lengths == [[1, 2, 3, 4, 5, 6]] * 2
    assert [next(stream, None) for stream in streams] == [None, None]
    assert_idle(roomy)


def test_a_request_aborted_behind_a_stream_ends_it_with_an_error(roomy: LLMEngine) -> None:
    stream = LLM(roomy).stream(random_prompts(29, [3]), greedy(6))
    _, output = next(stream)
    roomy.abort(output.request_id)
    with pytest.raises(PagedJaxError, match=output.request_id):
        next(stream)
    assert_idle(roomy)
