"""The engine: requests in, tokens out. schedule -> execute -> update, once a step."""

import dataclasses
import itertools
import time
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.block_pool import BlockPool
from pagedjax.config import EngineConfig
from pagedjax.detokenizer import IncrementalDetokenizer
from pagedjax.errors import ConfigError, InvalidRequestError, TokenizerError
from pagedjax.memory import default_num_blocks
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params
from pagedjax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedjax.request import FinishReason, Request, TokenLogprobs
from pagedjax.runner import Runner, init_state
from pagedjax.sampler import SamplerOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import ScheduledChunk, Scheduler, SchedulerConfig
from pagedjax.tokenizer import Tokenizer


@dataclasses.dataclass
class _Tracked:
    """A request with what the engine adds to it."""

    request: Request
    prompt: tuple[int, ...]
    detokenizer: IncrementalDetokenizer | None
    metrics: RequestMetrics
    text: str = ""


class LLMEngine:
    """Continuous batching over a paged KV cache.

    Args:
      model: the decoder's shapes. params: its parameters (see `models.decoder.abstract_params`).
      tokenizer: for text prompts and text output; None works on token ids alone.
      config: settings.

    Raises:
      ConfigError: the settings do not fit the model or the memory.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: Params,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.config = config = config or EngineConfig()
        self.limits = _limits(model, config)
        device = jax.devices()[0]
        kv_dtype = jnp.dtype(
            model.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        )
        num_blocks = config.num_blocks or default_num_blocks(
            model, self.limits, kv_dtype, device.memory_stats(), config.memory_utilization
        )
        state = init_state(
            model,
            self.limits,
            num_blocks=num_blocks,
            kv_dtype=kv_dtype,
            platform=device.platform,
            attention=config.attention,
        )
        # Committed to the device as every step's result is: a difference would compile twice.
        self.runner = Runner(model, params, jax.device_put(state, device), self.limits)
        self.scheduler = Scheduler(self.limits, BlockPool(num_blocks))
        self._tracked: dict[str, _Tracked] = {}
        self._arrivals = itertools.count()
        self._stop_ids = frozenset(tokenizer.eos_token_ids if tokenizer else ())

    def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt, text or token ids; returns its id.

        Raises:
          InvalidRequestError: it is empty, too long for `max_model_len` or the pool, holds a token
            outside the vocabulary, or `request_id` is in use. Nothing else is affected.
        """
        params = params or SamplingParams()
        token_ids = self._token_ids(prompt)
        arrival = next(self._arrivals)
        request_id = f"request-{arrival}" if request_id is None else request_id
        if request_id in self._tracked:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a running request")
        seed = _default_seed(self.config.seed, arrival) if params.seed is None else params.seed
        request = Request(request_id, token_ids, params, arrival, seed)
        self.scheduler.add(request)
        detokenizer = self.tokenizer and self.tokenizer.detokenizer(token_ids)
        metrics = RequestMetrics(arrival=time.monotonic())
        self._tracked[request_id] = _Tracked(
            request, tuple(token_ids), detokenizer or None, metrics
        )
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request early and return its blocks; None if it is not known (any more)."""
        tracked = self._tracked.get(request_id)
        return None if tracked is None else self._finish(tracked, FinishReason.ABORT)

    def has_unfinished_requests(self) -> bool:
        return bool(self._tracked)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._tracked

    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests that got a token in it."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        sampled = self.runner.execute(chunks)
        outputs = []
        for row, chunk in enumerate(chunks):
            samples = chunk.samples
            chunk.request.num_computed_tokens = chunk.end
            if samples:
                outputs.append(self._append(chunk, sampled, row))
        return outputs

    def warmup(self) -> int:
        """Compile every shape a step can have; returns their number."""
        return self.runner.warmup()

    def _append(self, chunk: ScheduledChunk, sampled: SamplerOutput, row: int) -> RequestOutput:
        """Apply a sampled token to its request."""
        tracked, request = self._tracked[chunk.request.request_id], chunk.request
        token_id = int(sampled.token_ids[row])
        request.output_token_ids.append(token_id)
        count = request.params.logprobs
        if count is not None:
            request.logprobs.append(_token_logprobs(sampled, row, count))
        if tracked.metrics.first_token is None:
            tracked.metrics = dataclasses.replace(tracked.metrics, first_token=time.monotonic())
        reason = self._finish_reason(request, token_id)
        if tracked.detokenizer is not None and reason is not FinishReason.STOP:
            tracked.text += tracked.detokenizer.append(token_id)
        return self._output(tracked) if reason is None else self._finish(tracked, reason)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        is_eos = token_id in self._stop_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            request.stop_token_id = token_id
            return FinishReason.STOP
        full = request.num_tokens >= self.limits.max_model_len
        if full or len(request.output_token_ids) >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, tracked: _Tracked, reason: FinishReason) -> RequestOutput:
        tracked.request.finish_reason = reason
        if tracked.detokenizer is not None:
            tracked.text += tracked.detokenizer.flush()
        tracked.metrics = dataclasses.replace(tracked.metrics, finished=time.monotonic())
        self.scheduler.finish(tracked.request)
        del self._tracked[tracked.request.request_id]
        return self._output(tracked)

    def _output(self, tracked: _Tracked) -> RequestOutput:
        request = tracked.request
        wants_logprobs = request.params.logprobs is not None
        completion = CompletionOutput(
            text=tracked.text,
            token_ids=tuple(request.output_token_ids),
            logprobs=tuple(request.logprobs) if wants_logprobs else None,
            finish_reason=request.finish_reason,
            stop_token_id=request.stop_token_id,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tracked.prompt,
            completion=completion,
            finished=request.finish_reason is not None,
            metrics=tracked.metrics,
        )

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        """Tokens of a prompt, checked."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("a text prompt needs a tokenizer; give token ids")
            if not prompt:
                raise InvalidRequestError("the prompt is empty; it must have at least 1 token")
            try:
                prompt = self.tokenizer.encode(prompt)
            except TokenizerError as error:
                raise InvalidRequestError(str(error)) from error
        if not len(prompt):
            raise InvalidRequestError("the prompt is empty; it must have at least 1 token")
        limit = self.limits.max_model_len
        if len(prompt) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; with max_model_len {limit} it can have at "
                f"most {limit - 1}, so that one more fits"
            )
        vocab = self.model.vocab_size
        for token_id in prompt:
            if not isinstance(token_id, Integral):
                raise InvalidRequestError(f"token id {token_id!r} is not an integer")
            if not 0 <= token_id < vocab:
                raise InvalidRequestError(f"token id {token_id} is not in [0, {vocab})")
        return [int(token_id) for token_id in prompt]


def _limits(model: DecoderConfig, config: EngineConfig) -> SchedulerConfig:
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model was made for {model.max_position} tokens"
        )
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_groups=model.kv_layout.num_groups,
    )


def _default_seed(engine_seed: int, arrival: int) -> int:
    """A seed for a request that brings none: a function of the request stream alone."""
    return int(np.random.SeedSequence([engine_seed, arrival]).generate_state(1, np.uint64)[0] >> 1)


def _token_logprobs(sampled: SamplerOutput, row: int, count: int) -> TokenLogprobs:
    ids, values = sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    return TokenLogprobs(float(sampled.logprobs[row]), tuple(zip(ids, values, strict=True)))
