"""What the device is told when a sequence with special wishes gets its slot."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pagedjax.request import Request, Sequence
from pagedjax.sampling_input import TAIL, SlotStart, SlotState
from pagedjax.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS
from pagedjax.scheduler_config import SchedulerConfig


def empty_slots(num_slots: int, vocab_size: int) -> SlotState:
    """The slots of an engine that has not sampled anything."""
    return SlotState(
        tail=jnp.full((num_slots, TAIL), -1, jnp.int32),
        tokens=jnp.zeros((num_slots, vocab_size), jnp.int32),
        bias_ids=jnp.full((num_slots, MAX_LOGIT_BIAS), vocab_size, jnp.int32),
        bias=jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.float32),
        bad_words=jnp.full((num_slots, MAX_BAD_WORDS, TAIL), -1, jnp.int32),
    )


def slot_start(seq: Sequence | None, limits: SchedulerConfig, vocab_size: int) -> SlotStart:
    """The wishes of a sequence's request, and its tokens, all of which are on the host.

    Without a sequence, for warm-up: nothing, of a slot that does not exist.
    """
    arrays: dict[str, Any] = {  # of numpy; they stand for `jax.Array`s until they are dispatched
        "slot": np.array(limits.max_num_seqs, np.int32),
        "token_ids": np.zeros(limits.max_model_len, np.int32),
        "prompt_len": np.array(0, np.int32),
        "length": np.array(0, np.int32),
        "forbidden": np.zeros(vocab_size, bool),
        "stops": np.zeros(vocab_size, bool),
        "bias_ids": np.full(MAX_LOGIT_BIAS, vocab_size, np.int32),
        "bias": np.zeros(MAX_LOGIT_BIAS, np.float32),
        "bad_words": np.full((MAX_BAD_WORDS, TAIL), -1, np.int32),
    }
    if seq is not None:
        _set_tokens(arrays, seq)
        _set_wishes(arrays, seq.request)
    return SlotStart(**arrays)


def _set_tokens(arrays: dict[str, Any], seq: Sequence) -> None:
    assert seq.slot is not None
    assert not seq.num_pending
    length = len(seq.token_ids)
    arrays["slot"][...] = seq.slot
    arrays["token_ids"][:length] = seq.token_ids
    arrays["prompt_len"][...] = seq.request.prompt_len
    arrays["length"][...] = length


def _set_wishes(arrays: dict[str, Any], request: Request) -> None:
    params = request.params
    if params.allowed_token_ids is not None:
        arrays["forbidden"][:] = True
        arrays["forbidden"][list(params.allowed_token_ids)] = False
    arrays["stops"][list(request.stop_token_ids)] = True
    for i, (token_id, value) in enumerate(params.logit_bias.items()):
        arrays["bias_ids"][i], arrays["bias"][i] = token_id, value
    for i, word in enumerate(request.bad_word_ids):
        arrays["bad_words"][i, TAIL - len(word) :] = word
