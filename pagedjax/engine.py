"""The engine: requests in, tokens out. schedule -> dispatch -> take what came back, once a step."""

import dataclasses
import functools
import itertools
import logging
import time
from collections import deque

import jax
from jax.sharding import SingleDeviceSharding

from pagedjax.bad_words import bad_word_ids
from pagedjax.beam_search import BeamSearch, BeamSearchParams
from pagedjax.block_hash import private_root, root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.buckets import Buckets
from pagedjax.cache_stats import CacheStats
from pagedjax.compilation_cache import enable_compilation_cache
from pagedjax.compile_log import CompileLog
from pagedjax.config import EngineConfig
from pagedjax.device_state import choose_attention, init_state
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.memory import default_block_size, pool_format, size_pool
from pagedjax.metrics import EngineMetrics, EngineSnapshot
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, check_same_shapes
from pagedjax.models.layout import place_params
from pagedjax.options import RequestOptions
from pagedjax.output_processor import OutputProcessor
from pagedjax.outputs import RequestOutput
from pagedjax.plan import StepPlan
from pagedjax.preemption import PreemptionPolicy
from pagedjax.prompts import Prompt, prompt_token_ids
from pagedjax.request import FinishReason, Request, derived_seed
from pagedjax.runner import Runner
from pagedjax.sampling_params import SamplingParams, check_vocabulary
from pagedjax.scheduler import Scheduler
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.self_check import working_attention
from pagedjax.step import StepOutput
from pagedjax.tokenizer import Tokenizer
from pagedjax.tracker import TrackedRequest
from pallas_kernels import KVFormat

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _StepInFlight:
    """A step that was dispatched and whose results are not on the host.

    `compiled`: it had to be compiled, which took time. `started`: seconds of a monotonic clock.
    """

    plan: StepPlan
    output: StepOutput
    compiled: bool
    started: float


class LLMEngine:
    """Continuous batching over a paged KV cache.

    Args:
      model: the decoder's shapes. params: its parameters (see `models.decoder.abstract_params`).
      tokenizer: for text prompts and text output; None works on token ids alone.
      config: settings.

    Attributes:
      pool_size: how much the KV pool holds; logged, too.

    Raises:
      ConfigError: the settings do not fit the model or the memory.
      KernelCheckError: the attention kernel that `config` names fails on this device.
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
        device = jax.devices()[0]
        kv_format = pool_format(config.kv_cache_dtype, model)
        self.limits = _limits(model, config, kv_format, device.platform)
        if config.compilation_cache:
            enable_compilation_cache()
        chosen = choose_attention(config.attention, model, self.limits, kv_format, device.platform)
        # Before the pool takes the memory.
        attention = working_attention(
            config.attention,
            chosen,
            model,
            block_size=self.limits.block_size,
            kv_format=kv_format,
            device=device,
            batch_invariant=config.deterministic,
        )
        self.pool_size = size_pool(
            model, self.limits, kv_format, device, config.num_blocks, config.memory_utilization
        )
        _log.info("KV cache: %s", self.pool_size)
        num_blocks, size = 1 + self.pool_size.num_blocks, self.pool_size.block_bytes
        state = init_state(
            model,
            self.limits,
            num_blocks=num_blocks,
            kv_format=kv_format,
            platform=device.platform,
            attention=attention,
            batch_invariant=config.deterministic,
        )
        num_host_blocks = (config.swap_space_bytes + config.host_cache_bytes) // size + 1
        # Committed to the device as every step's result is: a difference would compile twice.
        here = SingleDeviceSharding(device)
        state, params = jax.device_put(state, here), place_params(params, here)
        self._eos_ids = frozenset(tokenizer.eos_token_ids if tokenizer else ())
        self.compiles = CompileLog()
        self.runner = Runner(
            model,
            params,
            state,
            self.limits,
            Buckets(config.max_num_seqs, self.limits.max_num_batched_tokens, config.deterministic),
            num_host_blocks=num_host_blocks,
            eos_token_ids=tuple(sorted(self._eos_ids)),
            processors=config.logits_processors,
            compiles=self.compiles,
        )
        self.preemption = PreemptionPolicy(
            config.preemption_mode, size, self.runner.link_bytes_per_s
        )
        self.scheduler = Scheduler(
            self.limits,
            BlockPool(num_blocks),
            BlockPool(num_host_blocks),
            self.preemption.prefers_swap,
        )
        self.metrics = EngineMetrics(
            functools.partial(_snapshot, self.scheduler, self.compiles, size, attention != chosen)
        )
        self._processor = OutputProcessor(self.scheduler, self.metrics)
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_taken = 0.0
        self._arrivals = itertools.count()
        self._weights_version = 0

    @property
    def cache_stats(self) -> CacheStats:
        """Prefix hits and block movements so far."""
        return self.scheduler.blocks.stats

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> str:
        """Queue a prompt, text or token ids; returns its id.

        Raises:
          InvalidRequestError: it is empty, too long for `max_model_len` or the pool, wants more
            samples than `max_num_seqs`, it or `params` names a token outside the vocabulary,
            `params` asks for what needs a tokenizer and there is none, or `request_id` is in use.
            Nothing else is affected.
        """
        params = params or SamplingParams()
        return self._add(self._token_ids(prompt), params, request_id, options, params.num_samples)

    def add_beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> str:
        """Queue a prompt whose likeliest continuations are searched; returns its id.

        Raises:
          InvalidRequestError: as for `add_request`.
        """
        token_ids = self._token_ids(prompt)
        stop_ids = frozenset(params.stop_token_ids)
        stop_ids = stop_ids if params.ignore_eos else stop_ids | self._eos_ids
        max_tokens = min(params.max_tokens, self.limits.max_model_len - len(token_ids))
        search = BeamSearch(params, stop_ids, max_tokens)
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, logprobs=search.num_candidates
        )
        return self._add(token_ids, sampling, request_id, options, params.beam_width, search)

    def abort(self, request_id: str, sample: int | None = None) -> RequestOutput | None:
        """End a request, or only one of its samples, early and return its blocks.

        Beams cannot be ended one by one; they are not known.

        Returns:
          The request's state; None if the request or the sample is not known (any more).
        """
        tracked = self._processor.tracked.get(request_id)
        if tracked is None or (sample is not None and tracked.request.beam_search is not None):
            return None
        if sample is not None and tracked.request.num_sequences < tracked.request.width:
            return self._abort_early(tracked, sample)
        chosen = [s for s in tracked.request.sequences if sample is None or s.index == sample]
        if not chosen:
            return None
        for seq in chosen:
            self._processor.finish(tracked, seq, FinishReason.ABORT)
        return self._processor.report(tracked)

    def has_unfinished_requests(self) -> bool:
        return bool(self._processor.tracked)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._processor.tracked

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, then take the results of the one before it.

        Without `async_scheduling`, of the step itself. With nothing to dispatch, of all steps.

        Returns:
          Outputs of the requests that got a token; there may be none yet.
        """
        plan = self.scheduler.schedule()
        num_compiled, started = self.compiles.num_programs, time.monotonic()
        output = self.runner.dispatch(plan)
        self.scheduler.update(plan)
        if output is not None:
            sampled = output.sampled
            for values in jax.tree.leaves(sampled if plan.wants_logprobs else sampled.token_ids):
                values.copy_to_host_async()  # so that it comes while the next step runs
            compiled = self.compiles.num_programs > num_compiled
            self._in_flight.append(_StepInFlight(plan, output, compiled, started))
        num_to_stay = 1 if self.config.async_scheduling and output is not None else 0
        outputs: list[RequestOutput] = []
        while len(self._in_flight) > num_to_stay:
            outputs += self._take(self._in_flight.popleft())
        if self.config.check_invariants:
            self.scheduler.check()
        return outputs

    def warmup(self) -> int:
        """Compile every shape a step can have; returns their number.

        `compiles` tells of each, at once with `compiles.on_compile`, and whether any came later.
        """
        return self.runner.warmup()

    def update_params(self, params: Params) -> None:
        """Go on with other weights of the same shapes. No cached prefix of the old ones is reused.

        Requests that were added before keep the keys and values they have, and share no more.

        Raises:
          ConfigError: names the parameter whose shape or dtype differs.
        """
        check_same_shapes(self.runner.params, params)
        here = jax.tree.leaves(self.runner.params)[0].sharding
        self.runner.params = place_params(params, here)
        self._weights_version += 1
        self.reset_prefix_cache()
        for tracked in self._processor.tracked.values():
            tracked.request.begin_anew(private_root(next(self._arrivals)))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, on the device and on the host; requests go on."""
        self.scheduler.pool.forget_keys()
        self.scheduler.blocks.host.forget_keys()

    def _add(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        options: RequestOptions | None,
        width: int,
        search: BeamSearch | None = None,
    ) -> str:
        arrival = next(self._arrivals)
        options = options or RequestOptions()
        request_id = f"request-{arrival}" if request_id is None else request_id
        if request_id in self._processor.tracked:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a running request")
        check_vocabulary(params, self.model.vocab_size, self._eos_ids)
        request = Request(
            request_id,
            tuple(token_ids),
            params,
            arrival,
            seed=derived_seed(self.config.seed, arrival) if params.seed is None else params.seed,
            priority=options.priority,
            root=self._root(options, arrival, width),
            stop_token_ids=params.ending_token_ids(self._eos_ids),
            bad_word_ids=self._bad_word_ids(params),
            beam_search=search,
            width=width,
        )
        if params.logits_processor is not None:
            self.runner.add_processor(params.logits_processor)
        self.scheduler.add(request)
        tracked = TrackedRequest(request, self.tokenizer, options.output_kind)
        self._processor.tracked[request_id] = tracked
        self.metrics.on_add(len(token_ids))
        return request_id

    def _abort_early(self, tracked: TrackedRequest, sample: int) -> RequestOutput | None:
        """End a sample before the prompt's end, where it would begin; with the last one, all."""
        request = tracked.request
        if sample in request.unwanted or sample not in range(request.width):
            return None
        request.unwanted.add(sample)
        if len(request.unwanted) == request.width:
            self._processor.finish(tracked, request.sequences[0], FinishReason.ABORT)
        return self._processor.report(tracked)

    def _root(self, options: RequestOptions, arrival: int, width: int) -> bytes | None:
        """With whom a request shares blocks: many, its own sequences, or nobody."""
        if self.config.enable_prefix_caching and options.use_prefix_cache:
            return root_hash(self._weights_version, cache_salt=options.cache_salt)
        return private_root(arrival) if width > 1 else None

    def _take(self, step: _StepInFlight) -> list[RequestOutput]:
        outputs = self._processor.take(step.plan, step.output)
        # The device began when the step was there and the one before it was done.
        now, begun = time.monotonic(), max(step.started, self._last_taken)
        self._last_taken = now
        num_tokens = sum(chunk.num_tokens for chunk in step.plan.chunks)
        is_prefill = num_tokens > 2 * len(step.plan.chunks) and step.plan.num_steps == 1
        if is_prefill and not step.compiled:
            self.preemption.observe_prefill(num_tokens, now - begun)
        return outputs

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return prompt_token_ids(
            prompt,
            self.tokenizer,
            vocab_size=self.model.vocab_size,
            max_model_len=self.limits.max_model_len,
        )

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Also makes sure that there is a tokenizer for what needs one."""
        if self.tokenizer is not None:
            return bad_word_ids(params.bad_words, self.tokenizer)
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise InvalidRequestError(f"{name} is text, and there is no tokenizer for it")
        return ()


def _limits(
    model: DecoderConfig, config: EngineConfig, kv_format: KVFormat, platform: str
) -> SchedulerConfig:
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model was made for {model.max_position} tokens"
        )
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size
        or default_block_size(platform, kv_format, config.max_num_seqs, max_model_len),
        windows=model.kv_layout.windows,
        offload_evicted=config.host_cache_bytes > 0,
        num_decode_steps=config.num_decode_steps,
    )


def _snapshot(
    scheduler: Scheduler, compiles: CompileLog, block_size_bytes: int, kernel_disabled: bool
) -> EngineSnapshot:
    pool, stats = scheduler.pool, scheduler.blocks.stats
    return EngineSnapshot(
        num_requests_running=len(scheduler.running),
        num_requests_waiting=len(scheduler.waiting),
        kv_cache_usage=1 - pool.num_free / pool.num_usable,
        prefix_cache_queries=stats.prefix_queries,
        prefix_cache_hits=stats.prefix_hits,
        num_preemptions=scheduler.num_swaps + scheduler.num_recomputes,
        compiles=compiles.num_programs,
        compiles_after_warmup=compiles.num_after_warmup,
        swap_out_bytes=stats.swapped_out * block_size_bytes,
        swap_in_bytes=stats.swapped_in * block_size_bytes,
        attention_kernel_disabled=int(kernel_disabled),
    )
