"""The whole of generation in one loop on the device."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pagedjax.batch import FROM_STATE, Batch, PromptTargets
from pagedjax.errors import ConfigError
from pagedjax.finish_code import FinishCode
from pagedjax.functional.cache import Cache, fork, release
from pagedjax.functional.forward import append, last_rows
from pagedjax.functional.sampling import (
    Sampling,
    note_prompts,
    sampling_input,
    start_slots,
)
from pagedjax.logits import LogitsProcessor
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, StepInput, bind
from pagedjax.sampler import SamplerOutput
from pagedjax.sampling_input import SamplingInput, SlotState
from pagedjax.step import EngineState, step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated for S sequences, padded to M tokens each.

    Attributes:
      token_ids: i32[S, M], the token that ended a sequence included; padding behind it.
      mask: bool[S, M], which are tokens.
      logprobs: f32[S, M], of each token in the model's own distribution; zero in padding.
      processed_logprobs: f32[S, M], in the distribution that it was drawn from (see
        `SamplerOutput`).
      lengths: i32[S], tokens of each.
      finish_reasons: i32[S], a `FinishCode` each: STOP, LENGTH or OVERFLOW.
      overflow: bool[S], the pool had no block left for the sequence; its tokens so far are right.
    """

    token_ids: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    processed_logprobs: jax.Array
    lengths: jax.Array
    finish_reasons: jax.Array
    overflow: jax.Array


@dataclasses.dataclass(frozen=True)
class _Call:
    """What does not change while a call generates."""

    config: DecoderConfig
    params: Params
    processors: tuple[LogitsProcessor, ...]
    sampling: SamplingInput
    stop_token_ids: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Progress:
    """The loop's state: S sequences, M tokens at most.

    `count` i32: tokens that every running sequence has. `finish`: i32[S], 0 for running ones.
    """

    count: jax.Array
    cache: Cache
    slots: SlotState
    token_ids: jax.Array
    logprobs: jax.Array
    processed_logprobs: jax.Array
    lengths: jax.Array
    finish: jax.Array


def generate(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    prompt_ids: jax.Array,
    prompt_lens: jax.Array,
    seeds: jax.Array,
    *,
    max_tokens: int,
    n: int = 1,
    sampling: Sampling | None = None,
    stop_token_ids: ArrayLike | Sequence[int] = (),
    logits_processor: LogitsProcessor | None = None,
    logprobs: bool = True,
    pad_token_id: int = 0,
    max_num_batched_tokens: int = 4096,
) -> tuple[Cache, Generation]:
    """Generate `n` continuations of each of R prompts; pure, with one `lax.while_loop`.

    A prompt is computed once, and its blocks are shared by its samples. Blocks are taken as they
    are needed and given back when a sequence ends; the loop ends with the last one. With the seeds
    of `engine_seeds`, the tokens are those of `LLM.generate`.

    Args:
      cache: of S = R * n sequences; what it holds is dropped. Donate it.
      prompt_ids: i32[R, L], from the left. prompt_lens: i32[R], in [1, L].
      seeds: u32[S, 2] (see `request_seeds`).
      max_tokens: M.
      sampling: None: as the model says, at temperature 1. Arrays have one entry a sequence.
      stop_token_ids: i32[K], that end a sequence.
      logits_processor: see `SamplingParams`.
      logprobs: compute log-probabilities; else they are zero.
      max_num_batched_tokens: of prompts computed at once; longer ones are computed in chunks.

    Returns:
      The cache, empty; what was generated, the samples of a prompt together.

    Raises:
      ConfigError: when it is traced, sizes that do not fit the cache or each other.
    """
    num_prompts, width = prompt_ids.shape
    _check(cache, num_prompts, width, n, max_tokens, len(seeds))
    sampling = sampling or Sampling()
    stops = jnp.asarray(stop_token_ids, jnp.int32).reshape(-1)
    lens = jnp.repeat(prompt_lens, n, total_repeat_length=cache.num_seqs)
    adjusts = bool(sampling.adjusting) or logits_processor is not None
    slots = start_slots(cache.num_seqs, config.vocab_size, adjusts=adjusts)
    if adjusts:
        slots = note_prompts(slots, jnp.repeat(prompt_ids, n, axis=0), lens, stops)
    rows = sampling_input(
        sampling,
        seeds,
        lens,
        prompt_lens=lens,
        adjusts=adjusts,
        processor=logits_processor is not None,
        logprobs=logprobs,
    )
    processors = () if logits_processor is None else (logits_processor,)
    call = _Call(config, params, processors, rows, stops)
    cache = release(cache, jnp.ones(cache.num_seqs, bool))
    chunk = max(1, min(width, max_num_batched_tokens // num_prompts))
    cache, tokens, last = _prefill(call, cache, prompt_ids, prompt_lens, chunk)
    progress = _first_tokens(call, cache, slots, tokens, last, n, max_tokens)
    progress = lax.while_loop(
        lambda p: (p.finish == 0).any(), lambda p: _advance(call, p), progress
    )
    return progress.cache, _result(progress, pad_token_id)


def _check(
    cache: Cache, num_prompts: int, width: int, n: int, max_tokens: int, num_seeds: int
) -> None:
    if max_tokens < 1 or n < 1:
        raise ConfigError(f"max_tokens is {max_tokens} and n is {n}; both must be at least 1")
    if num_prompts * n != cache.num_seqs:
        raise ConfigError(
            f"{num_prompts} prompts with n {n} are {num_prompts * n} sequences; the cache is for "
            f"{cache.num_seqs}"
        )
    if num_seeds != cache.num_seqs:
        raise ConfigError(f"{num_seeds} seeds; there are {cache.num_seqs} sequences")
    need = width + max_tokens - 1  # the last token is never stored
    if need > cache.max_len:
        raise ConfigError(
            f"prompts of up to {width} tokens and max_tokens {max_tokens} need room for {need} "
            f"tokens; a sequence of the cache has {cache.max_len}"
        )


def _prefill(
    call: _Call, cache: Cache, prompt_ids: jax.Array, prompt_lens: jax.Array, chunk: int
) -> tuple[Cache, jax.Array, StepInput]:
    """Compute all but the last chunk of every prompt, and lay out the last.

    All prompts end in the last chunk, shorter ones begin in a later one.

    Returns:
      The cache with room for the last chunk; its tokens i32[N], and what the layers need to know.
    """
    num_prompts, width = prompt_ids.shape
    num_chunks = (prompt_lens.max() + chunk - 1) // chunk

    def lay_out(cache: Cache, i: jax.Array) -> tuple[Cache, jax.Array, StepInput]:
        end = prompt_lens - (num_chunks - 1 - i) * chunk
        start = jnp.maximum(end - chunk, 0)
        num_new = jnp.where(cache.overflowed[:num_prompts], 0, jnp.maximum(end, 0) - start)
        columns = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(prompt_ids, jnp.minimum(columns, width - 1), axis=1)
        return append(cache, tokens, num_new)

    def compute(i: jax.Array, cache: Cache) -> Cache:
        cache, tokens, own = lay_out(cache, i)
        _, kv = bind(call.config, call.params)(tokens, own, cache.kv)
        return dataclasses.replace(cache, kv=kv)

    if chunk < width:
        cache = lax.fori_loop(0, num_chunks - 1, compute, cache)
    return lay_out(cache, num_chunks - 1)


def _first_tokens(
    call: _Call,
    cache: Cache,
    slots: SlotState,
    tokens: jax.Array,
    last: StepInput,
    n: int,
    max_tokens: int,
) -> _Progress:
    """Compute the last chunk, sample `n` tokens behind each prompt, and let them share it."""
    num_seqs = cache.num_seqs
    parents = jnp.arange(num_seqs, dtype=jnp.int32) // n
    rows = dataclasses.replace(call.sampling, row=last_rows(last)[parents])
    cache, slots, sampled = _step(call, cache, slots, tokens, last, rows)
    cache = fork(cache, parents)
    nothing = jnp.zeros((num_seqs, max_tokens), jnp.float32)
    none = jnp.zeros(num_seqs, jnp.int32)
    progress = _Progress(
        jnp.int32(0), cache, slots, nothing.astype(jnp.int32), nothing, nothing, none, none
    )
    return _record(call, progress, sampled)


def _advance(call: _Call, p: _Progress) -> _Progress:
    """One more token for every running sequence."""
    alive = p.finish == 0
    from_state = jnp.full((len(alive), 1), FROM_STATE, jnp.int32)
    cache, tokens, own = append(p.cache, from_state, alive.astype(jnp.int32))
    rows = dataclasses.replace(
        call.sampling,
        row=last_rows(own),
        slot=jnp.where(alive, call.sampling.slot, jnp.iinfo(jnp.int32).max),
        position=call.sampling.position + p.count,
    )
    cache, slots, sampled = _step(call, cache, p.slots, tokens, own, rows)
    return _record(call, dataclasses.replace(p, cache=cache, slots=slots), sampled)


def _step(
    call: _Call,
    cache: Cache,
    slots: SlotState,
    tokens: jax.Array,
    own: StepInput,
    rows: SamplingInput,
) -> tuple[Cache, SlotState, SamplerOutput]:
    """The engine's step."""
    nothing = jnp.zeros(1, jnp.int32)
    batch = Batch(
        token_ids=tokens,
        step=own,
        token_slots=jnp.arange(len(own.context_lens), dtype=jnp.int32),
        sampling=rows,
        prompt=PromptTargets(nothing, nothing, jnp.int32(0)),
    )
    state = EngineState(cache.kv, slots)
    state, output = step(call.config, call.processors, call.params, state, batch)
    return dataclasses.replace(cache, kv=state.cache), state.slots, output.sampled


def _record(call: _Call, p: _Progress, sampled: SamplerOutput) -> _Progress:
    """Note what was sampled for running sequences, and give back the blocks of those that end."""
    alive = p.finish == 0
    active = alive & ~p.cache.overflowed
    stops = (sampled.token_ids[:, None] == call.stop_token_ids[None]).any(1)
    is_last = p.count + 1 == p.token_ids.shape[1]
    reason = jnp.where(stops, FinishCode.STOP, jnp.where(is_last, FinishCode.LENGTH, 0))
    reason = jnp.where(active, reason, FinishCode.OVERFLOW)
    finish = jnp.where(alive, reason, p.finish).astype(jnp.int32)

    def put(values: jax.Array, new: jax.Array) -> jax.Array:
        return values.at[:, p.count].set(jnp.where(active, new, 0))

    return _Progress(
        count=p.count + 1,
        cache=_release(p.cache, alive & (finish != 0)),
        slots=p.slots,
        token_ids=put(p.token_ids, sampled.token_ids),
        logprobs=put(p.logprobs, sampled.logprobs),
        processed_logprobs=put(p.processed_logprobs, sampled.processed_logprobs),
        lengths=p.lengths + active.astype(jnp.int32),
        finish=finish,
    )


def _release(cache: Cache, ended: jax.Array) -> Cache:
    """`release`, if there is anybody; the pool stays out of the condition."""
    tables = dataclasses.replace(cache, kv=None)  # type: ignore[arg-type]
    tables = lax.cond(ended.any(), lambda: release(tables, ended), lambda: tables)
    return dataclasses.replace(tables, kv=cache.kv)


def _result(p: _Progress, pad_token_id: int) -> Generation:
    mask = jnp.arange(p.token_ids.shape[1], dtype=jnp.int32)[None] < p.lengths[:, None]
    return Generation(
        token_ids=jnp.where(mask, p.token_ids, pad_token_id),
        mask=mask,
        logprobs=p.logprobs,
        processed_logprobs=p.processed_logprobs,
        lengths=p.lengths,
        finish_reasons=p.finish,
        overflow=p.finish == FinishCode.OVERFLOW,
    )
