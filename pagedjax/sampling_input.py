"""What the sampler sees: the rows that get a token, and what the device keeps of their requests."""

import dataclasses

import jax

from pagedjax.sampling_params import MAX_BAD_WORD_TOKENS

TAIL = MAX_BAD_WORD_TOKENS
"""Last sampled tokens kept of a slot."""

# An entry of `SlotState.tokens`: how often the token was sampled, and three flags.
COUNT_MASK = (1 << 28) - 1
FORBIDDEN = 1 << 28
IN_PROMPT = 1 << 29
STOPS = 1 << 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingInput:
    """Who gets a token, [S] each: the sequences that sample, not those that compute.

    At the end of a prompt several sequences sample behind the same row. Padding is greedy.

    Attributes:
      row: i32, of the batch, behind which the token is picked.
      slot: i32, where the state keeps the token; out of range for padding.
      temperature: f32, 0 for greedy.
      top_k: i32, 0 for all. top_p: f32, 1 for all. min_p: f32, 0 for all.
      presence_penalty, frequency_penalty: f32, 0 for none.
      repetition_penalty: f32, 1 for none.
      seed: u32[S, 2], low and high word.
      position: i32, of the token to be sampled.
      min_position: i32, below which tokens marked `STOPS` are not sampled.
      adjusts: bool, whether the slot's counts, flags, bias and bad words matter.
      processor: i32, 0 for none, else 1 + the index of a logits processor.
      wants_logprobs: bool.
    """

    row: jax.Array
    slot: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    seed: jax.Array
    position: jax.Array
    min_position: jax.Array
    adjusts: jax.Array
    processor: jax.Array
    wants_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """What the sampler remembers of the sequences in R slots; lives on the device.

    All but `tail` holds for the slots of rows that have `adjusts`, and is arbitrary for others.

    Attributes:
      tail: i32[R, TAIL], the last sampled tokens, the newest last; -1 before the first.
      tokens: i32[R, V], how often each token was sampled, under `COUNT_MASK`, and its flags:
        `FORBIDDEN` always, `IN_PROMPT`, or `STOPS` the request and is too early to do so.
      bias_ids, bias: i32 and f32 [R, MAX_LOGIT_BIAS], added to logits; V where unused.
      bad_words: i32[R, MAX_BAD_WORDS, TAIL], token sequences that must not be sampled,
        right-aligned behind -1; all -1 where unused.
    """

    tail: jax.Array
    tokens: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    bad_words: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotStart:
    """A sequence with `adjusts` as it gets its slot, anew or after a preemption.

    Attributes:
      slot: i32 scalar.
      token_ids: i32[L], of the prompt and then of the output; arbitrary from `length` on.
      prompt_len, length: i32 scalars, prompt_len <= length <= L.
      forbidden: bool[V], tokens that may never be sampled.
      stops: bool[V], tokens that must not be sampled too early (see `min_position`).
      bias_ids, bias, bad_words: the slot's rows of `SlotState`.
    """

    slot: jax.Array
    token_ids: jax.Array
    prompt_len: jax.Array
    length: jax.Array
    forbidden: jax.Array
    stops: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    bad_words: jax.Array
