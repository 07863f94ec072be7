"""A request on its way through the engine, and the sequences of tokens it generates."""

import dataclasses
import enum

import numpy as np

from pagedjax.beam_search import BeamSearch
from pagedjax.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural) at one position.

    Attributes:
      sampled: of the token that was chosen (in a prompt: that stands there), in the model's own
        distribution, before everything that `SamplingParams` changes.
      top: the likeliest tokens of that distribution, `(token id, log-probability)`, best first.
      processed: of the chosen token in the distribution that it was drawn from, behind penalties,
        masks, temperature and cuts (greedy: behind penalties and masks); None in a prompt.
    """

    sampled: float
    top: tuple[tuple[int, float], ...]
    processed: float | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens of a request: a prompt and one continuation of it.

    Attributes:
      index: number of the sample, from 0.
      token_ids: of the prompt and of the output so far, as far as they are on the host.
      num_pending: tokens that were sampled behind those and are on their way from the device.
      seed: of its random stream.
      root: hash of the empty prefix (see `block_hash`); None: its blocks are not to be found.
      num_computed_tokens: tokens whose keys and values are in the pool (or swapped out).
      slot: row of the device state while running, else None.
      token_on_device: the device state has its last token, in its slot.
      block_tables: i32[G, B], physical block of each logical block, per KV group; 0 where unused.
        While the request is swapped out, blocks of the host pool. None: nothing is computed.
      num_blocks: logical blocks in use, the same in every group.
      first_blocks: per KV group, the first logical block that has not left the window.
      block_hashes: of its full blocks, as far as they are known.
      num_published: full blocks that were made findable (if `root` allows it), or shared.
      shares_tail: the last block may belong to others too; it is copied before it is written.
      token_time: when its last tokens came to the host, seconds of a monotonic clock.
      cumulative_logprob: of all sampled tokens, where log-probabilities are computed.
    """

    request: "Request"
    index: int
    token_ids: list[int]
    seed: int
    root: bytes | None
    num_pending: int = 0
    num_computed_tokens: int = 0
    slot: int | None = None
    token_on_device: bool = False
    block_tables: np.ndarray | None = None
    num_blocks: int = 0
    first_blocks: list[int] = dataclasses.field(default_factory=list)
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    num_published: int = 0
    shares_tail: bool = False
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    token_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens there are, those on their way from the device included."""
        return len(self.token_ids) + self.num_pending

    @property
    def tables(self) -> np.ndarray:
        """`block_tables`, which must be there."""
        assert self.block_tables is not None
        return self.block_tables

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.prompt_len :]

    @property
    def num_output_tokens(self) -> int:
        """On the host."""
        return len(self.token_ids) - self.request.prompt_len


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt with what is asked for, and its sequences.

    Scheduled, preempted and resumed as a whole. It begins with one sequence; `width` of them run
    from the prompt's end on (samples), or at most (beams).

    Attributes:
      arrival: number of requests that came before. priority: lower goes first.
      root: see `Sequence.root`.
      stop_token_ids: that end its sequences, end-of-sequence tokens included where they do.
      bad_word_ids: token sequences that must not be sampled.
      beam_search: the search that chooses its tokens; None: they are sampled.
      sequences: that are not finished, in order of their index (beams: best first).
      num_sequences: how many there have been so far.
      candidates: of the beams, the likeliest next tokens, until all have theirs.
      unwanted: samples that were aborted before they began.
      spare_slots: rows of the device state that its next sequences will get.
      is_swapped: its blocks are in the host pool.
      prompt_logprobs: of the prompt's second token and on, as far as they are computed.
      num_cached_tokens: of the prompt, found in the prefix cache.
      num_in_flight: steps with it that were dispatched and whose results are not on the host.
      max_length: tokens, of prompt and output, at which its sequences end; set by the scheduler.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int
    seed: int
    priority: int = 0
    root: bytes | None = None
    stop_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    beam_search: BeamSearch | None = None
    width: int = 1
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    num_sequences: int = 1
    candidates: dict[Sequence, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    unwanted: set[int] = dataclasses.field(default_factory=set)
    spare_slots: list[int] = dataclasses.field(default_factory=list)
    is_swapped: bool = False
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_in_flight: int = 0
    max_length: int = dataclasses.field(init=False)
    prompt_len: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_token_ids)
        self.sequences = [Sequence(self, 0, list(self.prompt_token_ids), self.seed, self.root)]

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first has the smaller one."""
        return self.priority, self.arrival

    @property
    def num_slots(self) -> int:
        """Device rows it needs to run."""
        if self.beam_search is None and self.num_sequences > 1:
            return len(self.sequences)
        return self.width

    def anew(self, root: bytes | None, unwanted: set[int]) -> "Request":
        """The same request before it began, except for its `root` and its `unwanted` samples."""
        return Request(
            self.request_id,
            self.prompt_token_ids,
            self.params,
            self.arrival,
            self.seed,
            priority=self.priority,
            root=root,
            stop_token_ids=self.stop_token_ids,
            bad_word_ids=self.bad_word_ids,
            beam_search=None if self.beam_search is None else self.beam_search.anew(),
            width=self.width,
            unwanted=unwanted,
        )


def derived_seed(seed: int, index: int) -> int:
    """A seed of its own for the `index`-th use of `seed`: a function of both alone."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)
