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
    start = _Start(limits, vocab_size)
    if seq is not None:
        start.set_tokens(seq)
        start.set_wishes(seq.request)
    return start.arrays()


class _Start:
    """Numpy arrays to be filled in."""

    def __init__(self, limits: SchedulerConfig, vocab_size: int):
        self.slot, self.prompt_len, self.length = limits.max_num_seqs, 0, 0
        self.token_ids = np.zeros(limits.max_model_len, np.int32)
        self.forbidden, self.stops = np.zeros(vocab_size, bool), np.zeros(vocab_size, bool)
        self.bias_ids = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
        self.bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
        self.bad_words = np.full((MAX_BAD_WORDS, TAIL), -1, np.int32)

    def set_tokens(self, seq: Sequence) -> None:
        assert seq.slot is not None
        assert not seq.num_pending
        self.slot = seq.slot
        self.prompt_len, self.length = seq.request.prompt_len, len(seq.token_ids)
        self.token_ids[: self.length] = seq.token_ids

    def set_wishes(self, request: Request) -> None:
        params = request.params
        if params.allowed_token_ids is not None:
            self.forbidden[:] = True
            self.forbidden[list(params.allowed_token_ids)] = False
        self.stops[list(request.stop_token_ids)] = True
        for i, (token_id, value) in enumerate(params.logit_bias.items()):
            self.bias_ids[i], self.bias[i] = token_id, value
        for i, word in enumerate(request.bad_word_ids):
            self.bad_words[i, TAIL - len(word) :] = word

    def arrays(self) -> SlotStart:
        def scalar(value: int) -> Any:
            return np.array(value, np.int32)

        return SlotStart(
            slot=scalar(self.slot),
            token_ids=_device(self.token_ids),
            prompt_len=scalar(self.prompt_len),
            length=scalar(self.length),
            forbidden=_device(self.forbidden),
            stops=_device(self.stops),
            bias_ids=_device(self.bias_ids),
            bias=_device(self.bias),
            bad_words=_device(self.bad_words),
        )


def _device(values: np.ndarray) -> Any:
    """A numpy array; it stands for a `jax.Array` until it is dispatched, hence Any."""
    return values
