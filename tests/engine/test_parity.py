"""Gemma 3 270M, real weights, against what transformers computed from the same file in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import functional
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.llm import LLM
from pagedjax.loader import LoadedModel, load_model
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams

NEW_TOKENS = 32
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def gemma(gemma_gguf) -> LoadedModel:
    return load_model(gemma_gguf, EngineConfig(dtype="float32"))


def llm_of(gemma: LoadedModel, block_size: int, chunk: int) -> LLM:
    config = EngineConfig(
        dtype="float32",
        max_model_len=WHOLE,
        block_size=block_size,
        max_num_seqs=min(8, chunk),
        max_num_batched_tokens=chunk,
    )
    return LLM(LLMEngine(gemma.config, gemma.params, gemma.tokenizer, config))


def assert_as_recorded(output: RequestOutput, case: dict) -> None:
    completion = output.outputs[0]
    assert list(output.prompt_token_ids) == case["prompt_ids"], case["name"]
    assert list(completion.token_ids) == case["continuation_ids"][:NEW_TOKENS], case["name"]
    assert completion.text == case["continuation_text"], case["name"]
    first = completion.logprobs[0]
    want = dict(map(tuple, case["top5_first"]))
    got = dict(first.top)
    assert got.keys() == want.keys(), case["name"]
    np.testing.assert_allclose(
        [got[token] for token in want], list(want.values()), atol=2e-3, err_msg=case["name"]
    )
    sampled = [logprobs.sampled for logprobs in completion.logprobs]
    np.testing.assert_allclose(sampled, case["step_logprobs"][:NEW_TOKENS], atol=2e-3)


WHOLE = 1024
PAIRS = [(8, 7), (64, WHOLE)]
OTHERS = [(16, 64)]  # in the second stage


def test_every_prompt_alone_as_recorded(gemma, parity_cases):
    llm = llm_of(gemma, 16, 64)
    for case in parity_cases.values():
        assert_as_recorded(llm.generate(case["prompt"], PARAMS)[0], case)


@pytest.mark.parametrize(
    ("block_size", "chunk"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)],
)
def test_every_prompt_batched_as_recorded(gemma, parity_cases, block_size, chunk):
    llm, cases = llm_of(gemma, block_size, chunk), list(parity_cases.values())
    outputs = llm.generate([case["prompt"] for case in cases], PARAMS)
    for output, case in zip(outputs, cases, strict=True):
        assert_as_recorded(output, case)
    llm.engine.scheduler.pool.check()
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_usable
    jax.clear_caches()


def test_the_loop_on_the_device_as_recorded(gemma, parity_cases):
    """`functional.generate` gives what `LLM.generate` does, and `score` agrees with it."""
    cases, config = list(parity_cases.values()), gemma.config
    lens = np.array([len(case["prompt_ids"]) for case in cases], np.int32)
    prompts = np.zeros((len(cases), lens.max()), np.int32)
    for row, case in zip(prompts, cases, strict=True):
        row[: case["n_prompt"]] = case["prompt_ids"]

    @jax.jit
    def run(params, prompts, lens):
        cache = functional.init_cache(config, num_seqs=len(cases), max_len=WHOLE)
        seeds, greedy = jnp.zeros((len(cases), 2), jnp.uint32), functional.Sampling(temperature=0)
        _, out = functional.generate(
            config, params, cache, prompts, lens, seeds, max_tokens=NEW_TOKENS, sampling=greedy
        )
        given = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None] < lens[:, None]
        tokens = jnp.concatenate([prompts, out.token_ids], axis=1)
        mask = jnp.concatenate([given, out.mask], axis=1)
        return out, functional.score(config, params, tokens, mask)[:, prompts.shape[1] :]

    out, scores = run(gemma.params, prompts, lens)
    for row, case in enumerate(cases):
        assert np.asarray(out.token_ids[row]).tolist() == case["continuation_ids"][:NEW_TOKENS]
        wanted = case["step_logprobs"][:NEW_TOKENS]
        np.testing.assert_allclose(out.logprobs[row], wanted, atol=2e-3, err_msg=case["name"])
    np.testing.assert_allclose(scores, out.logprobs, atol=2e-5)
    jax.clear_caches()
