"""Inputs of the sampler with a default for whatever a test does not care about."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.logits import LogitsProcessor
from pagedjax.sampler import SamplerOutput, begin, sample
from pagedjax.sampling_input import TAIL, SamplingInput, SlotStart, SlotState
from pagedjax.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS
from pagedjax.slot_start import empty_slots
from tests.engine.sampling_oracle import Options

jitted_sample = jax.jit(sample, static_argnums=3)
jitted_begin = jax.jit(begin)

COLUMNS: Mapping[str, tuple[float, type]] = {
    "slot": (0, np.int32),
    "temperature": (0.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "presence_penalty": (0.0, np.float32),
    "frequency_penalty": (0.0, np.float32),
    "repetition_penalty": (1.0, np.float32),
    "seed": (0, np.uint64),
    "position": (0, np.int32),
    "min_position": (0, np.int32),
    "adjusts": (False, np.bool_),
    "processor": (0, np.int32),
    "wants_logprobs": (False, np.bool_),
}
"""The default and the type of each."""


def make_input(num_seqs: int, **columns: Any) -> SamplingInput:
    """Columns of one value for all rows or one each; `seed` as Python integers."""
    assert columns.keys() <= COLUMNS.keys()
    c = {
        name: np.broadcast_to(np.asarray(columns.get(name, default)).astype(dtype), num_seqs)
        for name, (default, dtype) in COLUMNS.items()
    }
    seed = c.pop("seed")
    words = np.stack([seed & 0xFFFFFFFF, seed >> 32], axis=1).astype(np.uint32)
    rows = np.arange(num_seqs, dtype=np.int32)  # for the step; the sampler does not look at them
    return jax.tree.map(jnp.asarray, SamplingInput(row=rows, seed=words, **c))


def make_start(
    slot: int,
    vocab: int,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    length: int = 32,
    allowed: Sequence[int] | None = None,
    stops: Sequence[int] = (),
    bias: Mapping[int, float] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
) -> SlotStart:
    """As the host would lay it out; the padding of `token_ids` is a token that counts nowhere."""
    token_ids = np.full(length, vocab - 1, np.int32)
    tokens = [*prompt, *output]
    token_ids[: len(tokens)] = tokens
    every = np.arange(vocab)
    bias_ids = np.full(MAX_LOGIT_BIAS, vocab, np.int32)
    biases = np.zeros(MAX_LOGIT_BIAS, np.float32)
    for i, (token, value) in enumerate((bias or {}).items()):
        bias_ids[i], biases[i] = token, value
    words = np.full((MAX_BAD_WORDS, TAIL), -1, np.int32)
    for i, word in enumerate(bad_words):
        words[i, -len(word) :] = word
    start = SlotStart(
        slot=np.int32(slot),
        token_ids=token_ids,
        prompt_len=np.int32(len(prompt)),
        length=np.int32(len(tokens)),
        forbidden=np.zeros(vocab, bool) if allowed is None else ~np.isin(every, allowed),
        stops=np.isin(every, stops),
        bias_ids=bias_ids,
        bias=biases,
        bad_words=words,
    )
    return jax.tree.map(jnp.asarray, start)


def begun_as(options: Options, vocab: int) -> SlotState:
    """`begun` with what the options say of the slot."""
    return begun(
        vocab,
        prompt=options.prompt,
        output=options.output,
        allowed=options.allowed,
        stops=options.stops,
        bias=options.bias,
        bad_words=options.bad_words,
    )


def begun(vocab: int, **start: Any) -> SlotState:
    """One slot, which starts with `make_start(0, vocab, **start)`."""
    return jitted_begin(empty_slots(1, vocab), make_start(0, vocab, **start))


def draw(
    logits: np.ndarray,
    slots: SlotState | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
    **columns: Any,
) -> SamplerOutput:
    """`sample`, fetched; one row of logits is repeated for every row of the columns."""
    num_seqs = max([len(logits) if logits.ndim == 2 else 1, *map(np.size, columns.values())])
    vocab = logits.shape[-1]
    rows = np.broadcast_to(logits, (num_seqs, vocab)).astype(np.float32)
    slots = _idle_slot(vocab) if slots is None else slots
    sampling = make_input(num_seqs, **columns)
    return jax.device_get(jitted_sample(rows, sampling, slots, processors))


@functools.cache
def _idle_slot(vocab: int) -> SlotState:
    return empty_slots(1, vocab)
