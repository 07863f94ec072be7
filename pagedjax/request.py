"""A request on its way through the engine."""

import dataclasses
import enum

import numpy as np

from pagedjax.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural) at one position.

    Attributes:
      sampled: of the token that was chosen.
      top: the likeliest tokens, `(token id, log-probability)`, best first.
    """

    sampled: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(eq=False)
class Request:
    """Host state of one request.

    Attributes:
      arrival: number of requests that came before; the scheduler's order.
      seed: of its random stream.
      num_computed_tokens: tokens whose keys and values are in the pool.
      slot: row of the device state while running, else None.
      block_tables: i32[G, B], physical block of each logical block, per KV group; 0 where unused.
      num_blocks: logical blocks in use, the same in every group.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int
    seed: int
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    slot: int | None = None
    block_tables: np.ndarray | None = None
    num_blocks: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions `start` to `stop`."""
        n = len(self.prompt_token_ids)
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return self.prompt_token_ids[start:stop] + self.output_token_ids[: max(0, stop - n)]
