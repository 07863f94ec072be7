"""The engine: requests in, tokens out. schedule -> execute -> update, once a step."""

import itertools
import time
from numbers import Integral

import jax
import jax.numpy as jnp

from pagedjax.batch import targets_of
from pagedjax.beam_search import BeamSearch, BeamSearchParams
from pagedjax.block_hash import private_root, root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError, InvalidRequestError, TokenizerError
from pagedjax.kv_cache_manager import CacheStats
from pagedjax.memory import block_bytes, default_num_blocks
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, check_same_shapes
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestOutput
from pagedjax.plan import StepPlan
from pagedjax.preemption import PreemptionPolicy
from pagedjax.prompt_logprobs import PromptLogprobs
from pagedjax.request import FinishReason, Request, Sequence, TokenLogprobs, derived_seed
from pagedjax.runner import Runner, init_state
from pagedjax.sampler import SamplerOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler, SchedulerConfig
from pagedjax.step import StepOutput
from pagedjax.tokenizer import Tokenizer
from pagedjax.tracker import TrackedRequest


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
        size = block_bytes(model, config.block_size, kv_dtype)
        num_host_blocks = (config.swap_space_bytes + config.host_cache_bytes) // size + 1
        # Committed to the device as every step's result is: a difference would compile twice.
        state, params = jax.device_put((state, params), device)
        self.runner = Runner(model, params, state, self.limits, num_host_blocks)
        self.preemption = PreemptionPolicy(
            config.preemption_mode, size, self.runner.link_bytes_per_s
        )
        self.scheduler = Scheduler(
            self.limits,
            BlockPool(num_blocks),
            BlockPool(num_host_blocks),
            self.preemption.prefers_swap,
        )
        self._tracked: dict[str, TrackedRequest] = {}
        self._arrivals = itertools.count()
        self._weights_version = 0
        self._eos_ids = frozenset(tokenizer.eos_token_ids if tokenizer else ())

    @property
    def cache_stats(self) -> CacheStats:
        """Prefix hits and block movements so far."""
        return self.scheduler.blocks.stats

    def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> str:
        """Queue a prompt, text or token ids; returns its id.

        Raises:
          InvalidRequestError: it is empty, too long for `max_model_len` or the pool, wants more
            samples than `max_num_seqs`, holds a token outside the vocabulary, or `request_id` is in
            use. Nothing else is affected.
        """
        params = params or SamplingParams()
        return self._add(self._token_ids(prompt), params, request_id, options, params.num_samples)

    def add_beam_search(
        self,
        prompt: str | list[int],
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
        tracked = self._tracked.get(request_id)
        if tracked is None or (sample is not None and tracked.request.beam_search is not None):
            return None
        if sample is not None and tracked.request.num_sequences < tracked.request.width:
            return self._abort_early(tracked, sample)
        chosen = [s for s in tracked.request.sequences if sample is None or s.index == sample]
        if not chosen:
            return None
        for seq in chosen:
            self._finish(tracked, seq, FinishReason.ABORT)
        return self._report(tracked)

    def has_unfinished_requests(self) -> bool:
        return bool(self._tracked)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._tracked

    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests that got a token in it."""
        plan = self.scheduler.schedule()
        started, num_programs = time.perf_counter(), self.runner.num_programs
        result = self.runner.dispatch(plan)
        self.scheduler.update(plan)
        outputs = []
        if result is not None:
            sampled = jax.device_get(result.sampled)
            if self.runner.num_programs == num_programs:  # else it was compiled, which takes longer
                self._observe(plan, time.perf_counter() - started)
            self._take_prompt_logprobs(plan, result)
            samplers = plan.samplers
            for row, seq in enumerate(samplers):
                self._take_token(seq, sampled, row)
            touched = dict.fromkeys(seq.request.request_id for seq in samplers)
            outputs = [self._report(self._tracked[request_id]) for request_id in touched]
        if self.config.check_invariants:
            self.scheduler.check()
        return outputs

    def warmup(self) -> int:
        """Compile every shape a step can have; returns their number."""
        return self.runner.warmup()

    def update_params(self, params: Params) -> None:
        """Go on with other weights of the same shapes. No cached prefix of the old ones is reused.

        Requests that were added before keep the keys and values they have, and share no more.

        Raises:
          ConfigError: names the parameter whose shape or dtype differs.
        """
        check_same_shapes(self.runner.params, params)
        self.runner.params = jax.device_put(params, jax.tree.leaves(self.runner.params)[0].sharding)
        self._weights_version += 1
        self.reset_prefix_cache()
        for tracked in self._tracked.values():
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
        if request_id in self._tracked:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a running request")
        request = Request(
            request_id,
            tuple(token_ids),
            params,
            arrival,
            seed=derived_seed(self.config.seed, arrival) if params.seed is None else params.seed,
            priority=options.priority,
            root=self._root(options, arrival, width),
            beam_search=search,
            width=width,
        )
        self.scheduler.add(request)
        self._tracked[request_id] = TrackedRequest(request, self.tokenizer)
        return request_id

    def _abort_early(self, tracked: TrackedRequest, sample: int) -> RequestOutput | None:
        """End a sample before the prompt's end, where it would begin; with the last one, all."""
        request = tracked.request
        if sample in request.unwanted or sample not in range(request.width):
            return None
        request.unwanted.add(sample)
        if len(request.unwanted) == request.width:
            self._finish(tracked, request.sequences[0], FinishReason.ABORT)
        return self._report(tracked)

    def _root(self, options: RequestOptions, arrival: int, width: int) -> bytes | None:
        """With whom a request shares blocks: many, its own sequences, or nobody."""
        if self.config.enable_prefix_caching and options.use_prefix_cache:
            return root_hash(self._weights_version, cache_salt=options.cache_salt)
        return private_root(arrival) if width > 1 else None

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        if num_tokens > 2 * len(plan.chunks):  # most of the work is for prompts
            self.preemption.observe_prefill(num_tokens, seconds)

    def _take_prompt_logprobs(self, plan: StepPlan, result: StepOutput) -> None:
        found = None
        row = 0
        for chunk in plan.chunks:
            request = chunk.sequence.request
            positions = targets_of(chunk.sequence, chunk.start, chunk.end)
            if positions:
                found = found or jax.device_get(result.prompt)
                count = request.params.prompt_logprobs or 0
                for _ in positions:
                    request.prompt_logprobs.append(_token_logprobs(found, row, count))
                    row += 1

    def _take_token(self, seq: Sequence, sampled: SamplerOutput, row: int) -> None:
        """Apply what the device found for a sequence."""
        request = seq.request
        params, tracked = request.params, self._tracked[request.request_id]
        if request.beam_search is not None:
            request.candidates[seq] = _top(sampled, row, request.beam_search.num_candidates)
            if len(request.candidates) == len(request.sequences):
                self._advance_beams(tracked, request.beam_search)
            return
        if seq.index in request.unwanted:
            self._finish(tracked, seq, FinishReason.ABORT)
            return
        token_id = int(sampled.token_ids[row])
        seq.token_ids.append(token_id)
        if params.wants_logprobs:
            seq.cumulative_logprob += float(sampled.logprobs[row])
        if params.logprobs is not None:
            seq.logprobs.append(_token_logprobs(sampled, row, params.logprobs))
        reason = self._finish_reason(seq, token_id)
        if reason is not FinishReason.STOP:
            tracked.append_text(seq, token_id)
        if reason is not None:
            self._finish(tracked, seq, reason)

    def _advance_beams(self, tracked: TrackedRequest, search: BeamSearch) -> None:
        """Let beams die and fork as their candidates say."""
        request = tracked.request
        live = request.sequences
        going = search.advance([request.candidates[seq] for seq in live])
        request.candidates.clear()
        if not going:
            for seq in list(live):
                self._finish(tracked, seq, FinishReason.LENGTH)
            return
        self.scheduler.continue_beams(request, [(live[c.parent], c.token_id) for c in going])

    def _finish_reason(self, seq: Sequence, token_id: int) -> FinishReason | None:
        params = seq.request.params
        is_eos = token_id in self._eos_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            seq.stop_token_id = token_id
            return FinishReason.STOP
        full = seq.num_tokens >= self.limits.max_model_len
        if full or seq.num_output_tokens >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, tracked: TrackedRequest, seq: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish_sequence(seq)
        tracked.end(seq, reason)

    def _report(self, tracked: TrackedRequest) -> RequestOutput:
        if tracked.is_finished:
            del self._tracked[tracked.request.request_id]
        return tracked.output()

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
        windows=model.kv_layout.windows,
        offload_evicted=config.host_cache_bytes > 0,
    )


def _top(found: SamplerOutput | PromptLogprobs, row: int, count: int) -> list[tuple[int, float]]:
    ids, values = found.top_ids[row, :count].tolist(), found.top_logprobs[row, :count].tolist()
    return list(zip(ids, values, strict=True))


def _token_logprobs(found: SamplerOutput | PromptLogprobs, row: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(float(found.logprobs[row]), tuple(_top(found, row, count)))
