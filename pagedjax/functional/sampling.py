"""What is asked of the sampler, as arrays; and where its random numbers come from."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from pagedjax.errors import ConfigError
from pagedjax.request import derived_seed
from pagedjax.sampler import SamplerOutput
from pagedjax.sampler import sample as sample_rows
from pagedjax.sampling_input import IN_PROMPT, STOPS, SamplingInput, SlotState
from pagedjax.slot_start import empty_slots

_ADJUSTING = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: numbers for all sequences, or arrays [S]. Meanings: `SamplingParams`.

    They can be traced; no value is checked. The last four are None where nobody uses them; else the
    tokens of every sequence are counted, in S * V words.
    """

    temperature: ArrayLike = 1.0
    top_k: ArrayLike = 0
    top_p: ArrayLike = 1.0
    min_p: ArrayLike = 0.0
    presence_penalty: ArrayLike | None = None
    frequency_penalty: ArrayLike | None = None
    repetition_penalty: ArrayLike | None = None
    min_tokens: ArrayLike | None = None

    @property
    def adjusting(self) -> list[str]:
        """The fields in use that need to know a sequence's tokens."""
        return [name for name in _ADJUSTING if getattr(self, name) is not None]


def request_seeds(key: jax.Array, request_ids: jax.Array, n: int = 1) -> jax.Array:
    """u32[R * n, 2]: a seed for every sample of every request, from `key` and its id alone.

    So a sequence's random stream is a function of (key, request, sample, position), whatever else
    is in the batch and wherever the sequence stands in it.

    Args:
      key: of `jax.random`.
      request_ids: i32[R].
      n: samples of a request; they stand together.
    """

    def one(request: jax.Array, sample: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, request), sample)
        return jax.random.bits(own, (2,), jnp.uint32)

    samples = jnp.arange(n, dtype=jnp.int32)
    each = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(request_ids, samples)
    return each.reshape(-1, 2)


def engine_seeds(seeds: Sequence[int], n: int = 1) -> np.ndarray:
    """u32[R * n, 2]: what `SamplingParams(seed=..., n=n)` makes of R seeds in an engine."""
    each = [seed if i == 0 else derived_seed(seed, i) for seed in seeds for i in range(n)]
    return np.array([(seed & 0xFFFFFFFF, seed >> 32) for seed in each], np.uint32)


def sample(
    logits: jax.Array,
    sampling: Sampling,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    logprobs: bool = True,
) -> SamplerOutput:
    """Choose a token for each row of f32[S, V] `logits`.

    Args:
      seeds: u32[S, 2], see `request_seeds`.
      positions: i32[S], of the tokens to be chosen: the sequences' lengths without them.
      logprobs: compute log-probabilities; else they are zero.

    Raises:
      ConfigError: `sampling` has a penalty or `min_tokens`; they need what `generate` keeps.
    """
    if sampling.adjusting:
        raise ConfigError(f"{sampling.adjusting[0]} needs the sequences' tokens; use `generate`")
    rows = sampling_input(sampling, seeds, positions, logprobs=logprobs)
    return sample_rows(logits, rows, start_slots(*logits.shape, adjusts=False))


def sampling_input(
    sampling: Sampling,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    prompt_lens: jax.Array | int = 0,
    adjusts: bool = False,
    processor: bool = False,
    logprobs: bool = True,
) -> SamplingInput:
    """The sampler's view of S sequences, sequence i in slot i and behind row i."""
    num_seqs = len(seeds)

    def column(value: ArrayLike | None, dtype: DTypeLike, absent: float = 0) -> jax.Array:
        value = jnp.asarray(absent if value is None else value).astype(dtype)
        return jnp.broadcast_to(value, num_seqs)

    s, rows = sampling, jnp.arange(num_seqs, dtype=jnp.int32)
    return SamplingInput(
        row=rows,
        slot=rows,
        temperature=column(s.temperature, jnp.float32),
        top_k=column(s.top_k, jnp.int32),
        top_p=column(s.top_p, jnp.float32),
        min_p=column(s.min_p, jnp.float32),
        presence_penalty=column(s.presence_penalty, jnp.float32),
        frequency_penalty=column(s.frequency_penalty, jnp.float32),
        repetition_penalty=column(s.repetition_penalty, jnp.float32, 1),
        seed=jnp.asarray(seeds, jnp.uint32),
        position=positions,
        min_position=prompt_lens + column(s.min_tokens, jnp.int32),
        adjusts=column(adjusts, bool),
        processor=column(processor, jnp.int32),
        wants_logprobs=column(logprobs, bool),
    )


def start_slots(num_seqs: int, vocab_size: int, *, adjusts: bool) -> SlotState:
    """Empty slots; only the last tokens have a row for everyone where nothing else is needed."""
    if adjusts:
        return empty_slots(num_seqs, vocab_size)
    tail = empty_slots(num_seqs, 1).tail
    return dataclasses.replace(empty_slots(1, vocab_size), tail=tail)


def note_prompts(
    slots: SlotState, prompts: jax.Array, lengths: jax.Array, stop_token_ids: jax.Array
) -> SlotState:
    """Mark the tokens of i32[S, L] prompts, and those that stop, in slots that are empty."""
    seqs = jnp.arange(len(prompts), dtype=jnp.int32)[:, None]
    is_token = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    ids = jnp.where(is_token, prompts, slots.tokens.shape[1])
    in_prompt = jnp.zeros(slots.tokens.shape, bool).at[seqs, ids].set(True, mode="drop")
    stops = jnp.zeros(slots.tokens.shape[1], bool).at[stop_token_ids].set(True, mode="drop")
    flags = jnp.where(in_prompt, IN_PROMPT, 0) | jnp.where(stops, STOPS, 0)[None]
    return dataclasses.replace(slots, tokens=slots.tokens | flags)
