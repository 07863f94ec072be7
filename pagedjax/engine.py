"""The engine: requests in, tokens out. schedule -> dispatch -> take what came back, once a step."""

import functools
import itertools
import logging
import time
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from pagedjax.bad_words import bad_words_of
from pagedjax.beam_search import BeamSearch, BeamSearchParams, start_search
from pagedjax.block_hash import private_root, root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.buckets import Buckets
from pagedjax.cache_stats import CacheStats
from pagedjax.compilation_cache import enable_compilation_cache
from pagedjax.compile_log import CompileLog
from pagedjax.config import EngineConfig
from pagedjax.device_state import choose_attention, init_state
from pagedjax.errors import EngineAsleepError, InvalidRequestError
from pagedjax.limits import engine_limits
from pagedjax.memory import pool_format, size_pool
from pagedjax.metrics import EngineMetrics, take_snapshot
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params
from pagedjax.models.layout import place_params
from pagedjax.options import RequestOptions
from pagedjax.output_processor import OutputProcessor
from pagedjax.outputs import RequestOutput
from pagedjax.preemption import PreemptionPolicy
from pagedjax.prompts import Prompt, prompt_token_ids
from pagedjax.request import FinishReason, Request, derived_seed
from pagedjax.runner import Runner
from pagedjax.sampling_params import SamplingParams, check_vocabulary
from pagedjax.scheduler import Scheduler
from pagedjax.self_check import working_attention
from pagedjax.steps_in_flight import StepInFlight, StepsInFlight
from pagedjax.tokenizer import Tokenizer
from pagedjax.tracker import TrackedRequest
from pagedjax.weights import InFlight, Weights, check_in_flight

_log = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over a paged KV cache.

    Args:
      model: the decoder's shapes. params: its parameters (see `models.decoder.abstract_params`).
      tokenizer: for text prompts and text output; None works on token ids alone.
      config: settings.

    Attributes:
      pool_size: how much the KV pool holds; logged, too.
      device: where it computes.
      is_sleeping: see `sleep`.

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
        device = self.device = jax.devices()[0]
        kv_format = pool_format(config.kv_cache_dtype, model)
        self.limits = engine_limits(model, config, kv_format, device.platform)
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
        # Committed to the device as every step's result is: a difference would compile twice.
        here = SingleDeviceSharding(device)
        self._init_state = functools.partial(
            init_state,
            model,
            self.limits,
            num_blocks=num_blocks,
            kv_format=kv_format,
            platform=device.platform,
            attention=attention,
            batch_invariant=config.deterministic,
        )
        num_host_blocks = (config.swap_space_bytes + config.host_cache_bytes) // size + 1
        self._eos_ids = frozenset(tokenizer.eos_token_ids if tokenizer else ())
        self.compiles = CompileLog()
        self.runner = Runner(
            model,
            place_params(params, here),
            jax.device_put(self._init_state(), here),
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
        snapshot = functools.partial(take_snapshot, self.scheduler, self.compiles, size)
        self.metrics = EngineMetrics(functools.partial(snapshot, attention != chosen))
        self._processor = OutputProcessor(self.scheduler, self.metrics)
        self._in_flight = StepsInFlight(self.preemption)
        self._kept: list[RequestOutput] = []  # for the next step, when one could not return them
        self._arrivals = itertools.count()
        self._private_roots = itertools.count()
        self._weights = Weights(self.runner, here)
        self.is_sleeping = False

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
        return self._add(
            self.encode_prompt(prompt), params, request_id, options, params.num_samples
        )

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
        token_ids = self.encode_prompt(prompt)
        search = start_search(params, self._eos_ids, self.limits.max_model_len - len(token_ids))
        return self._add(token_ids, search.sampling, request_id, options, params.beam_width, search)

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
        return self._report_abort(tracked)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do, or to return."""
        return bool(self._processor.tracked or self._kept)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether an output of a request is yet to come."""
        kept = any(output.request_id == request_id for output in self._kept)
        return kept or request_id in self._processor.tracked

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, then take the results of the one before it.

        Without `async_scheduling`, of the step itself. With nothing to dispatch, of all steps.

        Returns:
          Outputs of the requests that got a token; there may be none yet.

        Raises:
          EngineAsleepError: the engine sleeps.
        """
        self._check_awake()
        plan = self.scheduler.schedule()
        num_compiled, started = self.compiles.num_programs, time.monotonic()
        output = self.runner.dispatch(plan)
        self.scheduler.update(plan)
        if output is not None:
            compiled = self.compiles.num_programs > num_compiled
            self._in_flight.add(StepInFlight(plan, output, compiled, started))
        return self._take(1 if self.config.async_scheduling and output is not None else 0)

    def warmup(self) -> int:
        """Compile every shape a step can have; returns their number.

        `compiles` tells of each, at once with `compiles.on_compile`, and whether any came later.

        Raises:
          EngineAsleepError: the engine sleeps.
        """
        self._check_awake()
        return self.runner.warmup()

    @property
    def weights_version(self) -> int:
        """How many times other weights took effect; requests that begin now get these."""
        return self._weights.version

    def param_shardings(self) -> Any:
        """Where each parameter is to be so that `update_params` need not copy it.

        A tree like the parameters, of shardings or formats, as `jax.jit` takes for `out_shardings`.
        """
        return self._weights.shardings()

    def update_params(self, params: Params, *, in_flight: InFlight = "finish") -> None:
        """Go on with other weights of the same shapes. No request has tokens from both.

        Parameters that are where `param_shardings` says are not copied: the engine reads the same
        buffers, so they must live as long as it computes with them. Others are copied to there.
        Blocks of the old weights are never found again, and make room when it is needed.

        Args:
          in_flight: "finish" lets requests that have begun come to their end with the weights that
            they have, while all others wait for that, also new ones; so both are there meanwhile,
            and of several updates the latest counts. "restart" has those that have begun begin
            again from their prompt, with the same seed and place in the queue: their tokens are
            dropped, those of finished samples too. Aborted samples stay so.

        Raises:
          ConfigError: names the parameter whose shape or dtype differs, or that was deleted.
        """
        check_in_flight(in_flight)
        self._weights.propose(params)
        if in_flight == "restart":
            self._switch_weights()
        else:
            self.scheduler.hold()
            self._switch_when_free()

    def sleep(self) -> None:
        """Free the KV pool and all other device state but the weights, until `wake`.

        Running requests go on later with the same tokens; they compute their keys and values again.
        What they have in host memory stays, as do prefixes there; those on the device are
        forgotten. Meanwhile everything but `step` and `warmup` works. Sleeping twice does nothing.
        """
        if self.is_sleeping:
            return
        self._kept = self._take(0)
        self.scheduler.preempt_all()
        self.scheduler.pool.forget_keys()
        self.runner.sleep()
        self.is_sleeping = True

    def wake(self) -> None:
        """Make the device state anew, as large as it was. Nothing to do if nobody sleeps."""
        if self.is_sleeping:
            self.runner.state = jax.device_put(self._init_state(), self.device)
            self.is_sleeping = False

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
            root=self._root(options, width),
            stop_token_ids=params.ending_token_ids(self._eos_ids),
            bad_word_ids=bad_words_of(params, self.tokenizer),
            beam_search=search,
            width=width,
        )
        if params.logits_processor is not None:
            self.runner.add_processor(params.logits_processor)
        self.scheduler.add(request)
        tracked = TrackedRequest(request, self.tokenizer, options)
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
        return self._report_abort(tracked)

    def _report_abort(self, tracked: TrackedRequest) -> RequestOutput:
        output = self._processor.report(tracked)
        self._switch_when_free()
        return output

    def _root(self, options: RequestOptions, width: int) -> bytes | None:
        """With whom a request shares blocks: many, its own sequences, or nobody."""
        if self.config.enable_prefix_caching and options.use_prefix_cache:
            return root_hash(self._weights.version, cache_salt=options.cache_salt)
        return private_root(next(self._private_roots)) if width > 1 else None

    def _take(self, num_to_stay: int) -> list[RequestOutput]:
        """The outputs that were kept, and those of all steps in flight but so many."""
        outputs, self._kept = self._kept, []
        while len(self._in_flight) > num_to_stay:
            outputs += self._in_flight.take(self._processor)
        self._switch_when_free()
        if self.config.check_invariants:
            self.scheduler.check()
        return outputs

    def _switch_when_free(self) -> None:
        """Take the weights that come next, if nobody needs the old ones any more."""
        if self._weights.is_pending and not self.scheduler.has_begun:
            self._switch_weights()

    def _switch_weights(self) -> None:
        """Take the weights that come next; all requests begin with them, again if need be."""
        self._weights.switch()
        self.scheduler.unhold()
        self._kept = [output for output in self._kept if output.finished]
        for tracked in self._processor.tracked.values():
            root = self._root(tracked.options, tracked.request.width)
            self._processor.restart(tracked, root)

    def _check_awake(self) -> None:
        if self.is_sleeping:
            raise EngineAsleepError("the engine sleeps; wake it before it computes")

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; InvalidRequestError where `add_request` would refuse them."""
        return prompt_token_ids(
            prompt,
            self.tokenizer,
            vocab_size=self.model.vocab_size,
            max_model_len=self.limits.max_model_len,
        )
