"""A device without arrays: what its memory and its slots hold, and the tokens it picks."""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from pagedjax.batch import targets_of
from pagedjax.plan import ScheduledChunk, StepPlan
from pagedjax.request import Sequence
from tests.engine.memory_model import Memory

WORTHLESS = -1  # a token behind the one at which the device saw its sequence stop


@dataclasses.dataclass(frozen=True)
class Stop:
    """How a sequence ends: with `length` tokens, the prompt included.

    `is_seen`: by the device too, so that it computes nothing more of it in the same plan.
    """

    length: int
    is_seen: bool


class Chance(Protocol):
    """What the model would decide."""

    def pick_token(self, seq: Sequence) -> int: ...

    def pick_stop(self, seq: Sequence) -> Stop: ...


@dataclasses.dataclass(frozen=True)
class Result:
    """The token picked for a position of a sequence; None: candidates, behind a beam.

    `num_preemptions`: of its request, at the dispatch.
    """

    seq: Sequence
    position: int
    token: int | None
    num_preemptions: int


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A step whose results are not on the host.

    `targets`: positions in prompts whose log-probabilities it brings, as the step was told them.
    """

    plan: StepPlan
    results: list[Result]
    targets: list[range]


class Device:
    """Carries plans out in the order of their dispatch; each picks its tokens at once.

    Attributes:
      stops: how each sequence that was given a token ends.
      last: the sequence whose token each slot got last, and how many tokens it has with it.
      told: the sequence that each slot was set up for; none if another one has used it since.
    """

    def __init__(self, memory: Memory, chance: Chance):
        self.memory, self.chance = memory, chance
        self.stops: dict[Sequence, Stop] = {}
        self.last: dict[int, tuple[Sequence, int]] = {}
        self.told: dict[int, Sequence] = {}

    def dispatch(self, plan: StepPlan) -> InFlight:
        self.memory.move(plan.transfers)
        for seq in plan.new:
            assert seq.slot is not None
            assert not seq.num_pending, "the host does not know what the slot is to be told"
            self.told[seq.slot] = seq
        for chunk in plan.chunks:
            self._check_input(chunk, plan.num_steps)
        results: list[Result] = []
        stopped: dict[Sequence, int] = {}  # in this plan: not computed from that position on
        for chunk in plan.chunks:
            for seq in chunk.samplers:
                results += self._sample(seq, chunk, plan.num_steps, stopped)
        self.memory.compute(plan.chunks, stopped)
        targets = [targets_of(c.sequence, c.start, c.end) for c in plan.chunks]
        return InFlight(plan, results, targets)

    def _check_input(self, chunk: ScheduledChunk, num_steps: int) -> None:
        """Its tokens are known to the host, or the last one is in its slot."""
        seq = chunk.sequence
        num_tokens = 1 if num_steps > 1 else chunk.num_tokens
        if num_tokens == 1 and seq.token_on_device:
            if seq not in self.memory.stopped:
                assert seq.slot is not None
                assert self.last[seq.slot] == (seq, chunk.start + 1), "the token of another"
        else:
            assert chunk.start + num_tokens <= len(seq.token_ids), "a token is not on the host"

    def _sample(
        self, seq: Sequence, chunk: ScheduledChunk, num_steps: int, stopped: dict[Sequence, int]
    ) -> Iterator[Result]:
        request, memory = seq.request, self.memory
        self._use_slot(seq)
        if request.beam_search is not None:
            yield Result(seq, chunk.end, None, request.num_preemptions)
            return
        stop = self.stops.get(seq) or self.stops.setdefault(seq, self.chance.pick_stop(seq))
        first = chunk.start + 1 if num_steps > 1 else chunk.end
        for position in range(first, chunk.end + 1):
            assert position == len(memory.tokens_of(seq)), "a position is sampled once"
            token = WORTHLESS if seq in memory.stopped else self.chance.pick_token(seq)
            memory.pending.setdefault(seq, []).append(token)
            if num_steps > 1 and stop.is_seen and stop.length == position + 1:
                memory.stopped[seq] = stopped[seq] = position
            yield Result(seq, position, token, request.num_preemptions)
        assert seq.slot is not None
        self.last[seq.slot] = seq, chunk.end + 1

    def _use_slot(self, seq: Sequence) -> None:
        assert seq.slot is not None
        if seq.request.params.stop_token_ids:
            assert self.told.get(seq.slot) is seq, "the slot was not set up"
        else:
            self.told.pop(seq.slot, None)
