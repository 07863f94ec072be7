"""Tokens a second of a whole engine: the shape of Llama 3.1 8B with random weights.

  prefill  all prompts at once, one new token each: prompt tokens a second; the floor is the FLOPs
           of the prompts over the rate of a matrix product
  decode   steps in which all requests decode: new tokens a second; the floor is, a step, the bytes
           of the weights and of the contexts' K and V over the copy bandwidth

Everything is run once before, as it is timed, so that nothing is compiled in between.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_offline import kv_bytes, prompt_flops
from benchmark_overlap import small_model
from gpu_records import Record, Recorder
from gpu_timing import Limits
from real_models import real_model

from pagedjax.buckets import Buckets
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, random_params
from pagedjax.options import RequestOptions
from pagedjax.sampling_params import SamplingParams
from pallas_kernels import Implementation

_BLOCK_SIZE = 16
_WARM_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Load:
    """What the engine serves: prompts and new tokens of a request, and its tokens a step."""

    requests: tuple[int, ...] = (1, 32, 128)
    prompt: int = 512
    new: int = 128
    tokens_per_step: int = 2048

    @classmethod
    def of(cls, toy: bool) -> "Load":
        return cls((2,), 20, 3, 32) if toy else cls()

    @property
    def max_model_len(self) -> int:
        """Tokens of a request that still decodes when the last one has been timed."""
        steps = -(-max(self.requests) * self.prompt // self.tokens_per_step) + 1
        # Steps with prompts in them have a few rows fewer for these, as others decode already.
        return self.prompt + 2 * steps + 2 * _WARM_STEPS + self.new


class FewBuckets(Buckets):
    """Steps with prompts have the largest shape, or their own where there is one sequence."""

    def pick(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        if num_tokens == num_seqs or num_seqs == 1:
            return super().pick(num_tokens, num_seqs)
        return self.max_num_batched_tokens, self.max_num_seqs


def measure_engine(
    recorder: Recorder, implementation: Implementation, limits: Limits, toy: bool
) -> None:
    """One record for each number of requests, of prefill and decode, behind one of the start."""
    load = Load.of(toy)

    @functools.cache
    def engine() -> LLMEngine:
        return make_engine(model_of(toy), load, implementation)

    def work(kind: str, run: Callable[..., Record], requests: int) -> Record:
        run(engine(), load, requests, limits)
        compiled = engine().compiles.num_programs
        record = run(engine(), load, requests, limits)
        return {
            "kind": kind,
            "requests": requests,
            **record,
            "tokens_per_s": record["tokens"] / record["seconds"],
            "of_floor": record["floor_s"] / record["seconds"],
            "compiled_meanwhile": engine().compiles.num_programs - compiled,
        }

    recorder.run("start", lambda: {"blocks": engine().config.num_blocks})
    for requests in load.requests:
        for kind, run in (("prefill", time_prefill), ("decode", time_decode)):
            recorder.run(
                f"{kind} of {requests}",
                lambda kind=kind, run=run, requests=requests: work(kind, run, requests),
            )


def model_of(toy: bool) -> DecoderConfig:
    if toy:
        return dataclasses.replace(small_model(1, 128), dtype="bfloat16")
    return real_model("llama-3.1-8b")


def make_engine(model: DecoderConfig, load: Load, implementation: Implementation) -> LLMEngine:
    """With random weights, made on the device, and a pool for all requests at full length."""
    most = max(load.requests)
    config = EngineConfig(
        max_num_seqs=most,
        max_num_batched_tokens=load.tokens_per_step,
        max_model_len=load.max_model_len,
        block_size=_BLOCK_SIZE,
        num_blocks=most * -(-load.max_model_len // _BLOCK_SIZE) + 1,
        enable_prefix_caching=False,
        swap_space_bytes=0,
        compilation_cache=False,
        attention=implementation,
    )
    platform = jax.default_backend()
    # In one program, so that no weight is there in float32.
    params = jax.jit(lambda: random_params(model, platform))()
    engine = LLMEngine(model, params, config=config)
    engine.runner.buckets = FewBuckets(most, load.tokens_per_step)
    return engine


def time_prefill(engine: LLMEngine, load: Load, requests: int, limits: Limits) -> Record:
    """All prompts, until every request has its first token and ends with it."""
    _add_requests(engine, load, requests, new=1)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    seconds = time.perf_counter() - start
    flops = requests * prompt_flops(engine.model, load.prompt)
    return {
        "seconds": seconds,
        "tokens": requests * load.prompt,
        "floor_s": flops / limits.product_flops_per_s,
    }


def time_decode(engine: LLMEngine, load: Load, requests: int, limits: Limits) -> Record:
    """`load.new` steps in which all requests decode."""
    ids = _add_requests(engine, load, requests, new=load.max_model_len - load.prompt)
    while min(_contexts(engine, ids)) <= load.prompt:
        engine.step()
    for _ in range(_WARM_STEPS):
        engine.step()
    before = _contexts(engine, ids)
    start = time.perf_counter()
    for _ in range(load.new):
        engine.step()
    seconds = time.perf_counter() - start
    after = _contexts(engine, ids)
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_unfinished_requests():
        engine.step()
    tokens = sum(after) - sum(before)
    if tokens != requests * load.new:
        raise AssertionError(f"{tokens} tokens in {load.new} steps of {requests} requests")
    halfway = [(first + last) // 2 for first, last in zip(before, after, strict=True)]
    num_bytes = load.new * decode_step_bytes(engine.model, engine.runner.params, halfway)
    return {"seconds": seconds, "tokens": tokens, "floor_s": num_bytes / limits.copy_bytes_per_s}


def decode_step_bytes(model: DecoderConfig, params: Params, contexts: list[int]) -> int:
    """Bytes that a decode step reads: weights, of an embedding only if it is the head; K and V."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not model.tie_embeddings:
        weights -= params["embed"].nbytes
    itemsize = jnp.dtype(model.dtype).itemsize
    return weights + sum(kv_bytes(model, context, itemsize) for context in contexts)


def _add_requests(engine: LLMEngine, load: Load, requests: int, new: int) -> list[str]:
    rng = np.random.default_rng(0)
    asked = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    final = RequestOptions(output_kind="final")
    prompts = rng.integers(0, engine.model.vocab_size, (requests, load.prompt)).tolist()
    return [engine.add_request(prompt, asked, options=final) for prompt in prompts]


def _contexts(engine: LLMEngine, ids: list[str]) -> list[int]:
    """Tokens of each request that are on the host."""
    tracked = engine._processor.tracked
    return [len(tracked[request_id].request.sequences[0].token_ids) for request_id in ids]
