"""What a step does: the scheduler writes it down, the runner carries it out."""

import dataclasses
import functools
from typing import NamedTuple

from pagedjax.request import Request, Sequence


@dataclasses.dataclass
class BlockTransfers:
    """Block movements before a step, in this order; pairs of (source, target).

    Attributes:
      swap_outs: device to host. swap_ins: host to device. copies: inside the device pool.
    """

    swap_outs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    swap_ins: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class ScheduledChunk(NamedTuple):
    """Tokens `start : start + num_tokens` of a sequence, to be computed in one step.

    Where the plan has several steps, that is one token in each of the first `num_tokens` of them.

    `samplers`: the sequences for which a token is picked behind the chunk. None if it ends inside
    the known tokens; at the end of a prompt all samples of a request.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samplers: tuple[Sequence, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step: what to move first, then what to compute.

    Attributes:
      new: sequences that have a slot for the first time, and ask more of it than a token.
      num_steps: above 1, all chunks are decodes, and so many steps run on the device in one go.
    """

    chunks: list[ScheduledChunk]
    transfers: BlockTransfers
    new: list[Sequence] = dataclasses.field(default_factory=list)
    num_steps: int = 1

    @functools.cached_property
    def samplers(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the step's results."""
        return [sequence for chunk in self.chunks for sequence in chunk.samplers]

    @functools.cached_property
    def wants_logprobs(self) -> bool:
        """Whether any of them wants log-probabilities."""
        return any(seq.request.params.wants_logprobs for seq in self.samplers)

    @functools.cached_property
    def requests(self) -> list[Request]:
        """Whose tokens are computed, each once."""
        return list({chunk.sequence.request: None for chunk in self.chunks})
