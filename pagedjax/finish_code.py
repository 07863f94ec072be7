"""Why a sequence ended, as a number that arrays can hold."""

import enum

from pagedjax.request import FinishReason


class FinishCode(enum.IntEnum):
    """Codes of `finish_reasons` i32[S]; 0 stands for a sequence that has not ended."""

    STOP = 1  # an end-of-sequence token, a stop token or a stop string
    LENGTH = 2  # as many tokens as were asked for
    OVERFLOW = 3  # the pool had no block left; only where nothing can be preempted
    ABORT = 4

    @classmethod
    def of(cls, reason: FinishReason) -> "FinishCode":
        return cls[reason.name]
