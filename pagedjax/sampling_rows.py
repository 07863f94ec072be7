"""What running sequences ask of the sampler, kept by slot from step to step."""

from typing import Any

import numpy as np

from pagedjax.logits import LogitsProcessor
from pagedjax.request import Sequence
from pagedjax.sampling_input import SamplingInput

_MAX_INT32 = np.iinfo(np.int32).max
# Beyond these, numbers and their inverses are no normal float32, and nothing changes any more.
_LEAST, _MOST = 1e-30, 1e30

_COLUMNS: dict[str, tuple[Any, ...]] = {
    "temperature": (np.float32,),
    "top_k": (np.int32,),
    "top_p": (np.float32,),
    "min_p": (np.float32,),
    "presence_penalty": (np.float32,),
    "frequency_penalty": (np.float32,),
    "repetition_penalty": (np.float32,),
    "seed": (np.uint32, 2),
    "min_position": (np.int32,),
    "adjusts": (np.bool_,),
    "processor": (np.int32,),
    "wants_logprobs": (np.bool_,),
}


class SamplingRows:
    """Builds `SamplingInput` from arrays that have a row for every slot.

    A slot's row is written when another sequence has it; a step only gathers.

    Args:
      num_slots: slots are numbered from 0; this number stands for none.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._owners: list[Sequence | None] = [None] * num_slots
        # One row more is padding: greedy, and nothing else is asked for.
        self._rows = {
            name: np.zeros((num_slots + 1, *shape), dtype)
            for name, (dtype, *shape) in _COLUMNS.items()
        }
        for name in ("top_p", "repetition_penalty"):
            self._rows[name][num_slots] = 1

    def gather(
        self,
        samplers: list[tuple[int, int, Sequence]],
        size: int,
        processors: tuple[LogitsProcessor, ...],
    ) -> SamplingInput:
        """For `(row of the batch, position to sample, sequence)`, padded to `size`."""
        slots = np.full(size, self.num_slots, np.int32)
        where = np.zeros((2, size), np.int32)
        for i, (row, position, seq) in enumerate(samplers):
            slot = seq.slot
            assert slot is not None
            if self._owners[slot] is not seq:
                self._write(slot, seq, processors)
            slots[i], where[0, i], where[1, i] = slot, row, position
        columns: dict[str, Any] = {name: rows[slots] for name, rows in self._rows.items()}
        places: list[Any] = [where[0], where[1], slots]
        return SamplingInput(row=places[0], position=places[1], slot=places[2], **columns)

    def _write(self, slot: int, seq: Sequence, processors: tuple[LogitsProcessor, ...]) -> None:
        request, params = seq.request, seq.request.params
        own, rows = params.logits_processor, self._rows
        for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty"):
            rows[name][slot] = getattr(params, name)
        rows["temperature"][slot] = _bounded(params.temperature) if params.temperature else 0
        rows["repetition_penalty"][slot] = _bounded(params.repetition_penalty)
        rows["top_k"][slot] = min(params.top_k, _MAX_INT32)
        rows["seed"][slot] = seq.seed & 0xFFFFFFFF, seq.seed >> 32
        rows["min_position"][slot] = request.prompt_len + params.min_tokens
        rows["adjusts"][slot] = params.adjusts_logits
        rows["processor"][slot] = 0 if own is None else 1 + processors.index(own)
        rows["wants_logprobs"][slot] = params.wants_logprobs
        self._owners[slot] = seq


def _bounded(value: float) -> float:
    return min(max(value, _LEAST), _MOST)
