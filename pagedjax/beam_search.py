"""Beam search: which continuations of a request live on, which have ended, when it is over.

The rules are those of Transformers 5.24 (`GenerationMixin._beam_search` without sampling), so that
the same model gives the same beams and scores. A step ranks the continuations of all live beams by
their cumulative log-probability. Those among the best `beam_width` that end become hypotheses, of
which the best `beam_width` by score are kept; the best `beam_width` that do not end live on.
"""

import dataclasses
from collections.abc import Sequence
from numbers import Real
from typing import Literal

from pagedjax.checked import CheckedFields
from pagedjax.errors import InvalidRequestError
from pagedjax.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0  # keeps `length ** length_penalty` far from the limits of a float


@dataclasses.dataclass(frozen=True)
class BeamSearchParams(CheckedFields):
    """How the beams of one request are searched. Meanings follow Transformers' generation config.

    Attributes:
      beam_width: beams that live at a time, and most hypotheses to keep.
      max_tokens: most tokens to generate, at least 1.
      length_penalty: a hypothesis scores its cumulative log-probability divided by its length to
        this power; above 0 favours long ones, below 0 short ones.
      early_stopping: when to stop once there are `beam_width` hypotheses. True: at once. False:
        when the best live beam, ended now, would not beat the worst of them. "never": when it could
        not beat it at any length up to `max_tokens`.
      num_return_sequences: hypotheses to return, at most `beam_width`; None for all.
      stop_token_ids: tokens that end a beam, besides the model's end-of-sequence tokens.
      ignore_eos: go on behind an end-of-sequence token.

    Raises:
      InvalidRequestError: a field is out of its range.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._normalize()
        in_range = 1 <= self.beam_width <= MAX_BEAM_WIDTH
        self._require("beam_width", in_range, f"in [1, {MAX_BEAM_WIDTH}]")
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        limit = MAX_LENGTH_PENALTY
        in_range = -limit <= self.length_penalty <= limit
        self._require("length_penalty", in_range, f"in [{-limit}, {limit}]")
        object.__setattr__(self, "length_penalty", float(self.length_penalty))
        known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        self._require("early_stopping", known, "True, False or 'never'")
        returned = self.num_return_sequences
        in_range = returned is None or 1 <= returned <= self.beam_width
        self._require(
            "num_return_sequences", in_range, f"in [1, {self.beam_width}], the beam width"
        )

    def _normalize(self) -> None:
        """Refuse values of a wrong type."""
        self._to_ints(("beam_width", "max_tokens"), optional=("num_return_sequences",))
        self._require("length_penalty", isinstance(self.length_penalty, Real), "a number")
        self._to_token_ids("stop_token_ids")


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A beam that has ended.

    Attributes:
      token_ids: generated, the token that ended it included.
      cumulative_logprob: sum of the tokens' (natural) log-probabilities.
      score: `cumulative_logprob / len(token_ids) ** length_penalty`.
      stop_token_id: the token that ended it; None if the length did.
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    stop_token_id: int | None


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A live beam and one more token.

    Attributes:
      parent: index of the beam among the live ones.
      cumulative_logprob: of the beam with the token.
    """

    parent: int
    token_id: int
    cumulative_logprob: float


@dataclasses.dataclass(frozen=True)
class _Beam:
    """A live beam: its generated tokens and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float


class BeamSearch:
    """State of one request's search; at first one beam lives, the prompt.

    Args:
      stop_token_ids: all tokens that end a beam: the model's and the request's.
      max_tokens: most tokens a beam may have, at least 1: the request's `max_tokens`, or less if
        the model leaves less.

    Attributes:
      num_candidates: how many of every live beam's likeliest tokens `advance` needs. Enough that
        `beam_width` are left even if all stop tokens are among them.

    Raises:
      InvalidRequestError: that is more than the device returns.
    """

    def __init__(self, params: BeamSearchParams, stop_token_ids: frozenset[int], max_tokens: int):
        self.num_candidates = params.beam_width + len(stop_token_ids)
        if self.num_candidates > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"beam_width is {params.beam_width} with {len(stop_token_ids)} stop and "
                f"end-of-sequence tokens; the sum must be at most {MAX_LOGPROBS}"
            )
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._max_tokens = max_tokens
        self._live = [_Beam((), 0.0)]
        self._finished: list[Hypothesis] = []  # best first, at most `beam_width`

    @property
    def sampling(self) -> SamplingParams:
        """What the device is asked for each beam."""
        return SamplingParams(
            max_tokens=self._max_tokens, temperature=0.0, logprobs=self.num_candidates
        )

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to advance."""
        return not self._live

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Continuation]:
        """Take the next token of every live beam; the new live beams, best first.

        Args:
          candidates: for each live beam, in the order in which the last call returned them, its
            likeliest `(token id, log-probability)`: `num_candidates` or more, or the whole
            vocabulary if that is smaller.

        Returns:
          At most `beam_width` continuations; none when the search is over.

        Raises:
          ValueError: there are not as many candidate lists as live beams.
        """
        if len(candidates) != len(self._live):
            raise ValueError(f"candidates of {len(candidates)} beams; {len(self._live)} live")
        width = self._params.beam_width
        length = len(self._live[0].token_ids) + 1 if self._live else 0
        ranked = self._rank(candidates)
        self._keep([c for c in ranked[:width] if self._ends(c, length)])
        going = [c for c in ranked if not self._ends(c, length)][:width]
        if going and self._is_settled(going[0], length):
            going = []
        self._live = [_Beam(self._tokens(c), c.cumulative_logprob) for c in going]
        return going

    def anew(self) -> "BeamSearch":
        """The same search before its first step."""
        return BeamSearch(self._params, self._stop_token_ids, self._max_tokens)

    def best(self) -> list[Hypothesis]:
        """The `num_return_sequences` best hypotheses, best first.

        Fewer before the search is over, or if the vocabulary has too few sequences.
        """
        return self._finished[: self._params.num_return_sequences]

    def _rank(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Continuation]:
        """All continuations, likeliest first; equal ones in the order of beams and candidates."""
        found = [
            Continuation(parent, token_id, beam.cumulative_logprob + logprob)
            for parent, (beam, own) in enumerate(zip(self._live, candidates, strict=True))
            for token_id, logprob in own[: self.num_candidates]
        ]
        return sorted(found, key=lambda c: -c.cumulative_logprob)

    def _ends(self, continuation: Continuation, length: int) -> bool:
        return continuation.token_id in self._stop_token_ids or length >= self._max_tokens

    def _keep(self, ended: Sequence[Continuation]) -> None:
        """Add to the hypotheses; of more than `beam_width` the worst are dropped."""
        for c in ended:
            tokens, logprob = self._tokens(c), c.cumulative_logprob
            stop_token_id = c.token_id if c.token_id in self._stop_token_ids else None
            score = self._score(logprob, len(tokens))
            self._finished.append(Hypothesis(tokens, logprob, score, stop_token_id))
        self._finished.sort(key=lambda h: -h.score)
        del self._finished[self._params.beam_width :]

    def _is_settled(self, best: Continuation, length: int) -> bool:
        """Whether to stop: there are `beam_width` hypotheses, and `best` is not to join them.

        A live beam's log-probability can only fall. So the bound of "never" is exact: it divides by
        the length that makes the score highest. That of False is not when the penalty is above 0.
        """
        if len(self._finished) < self._params.beam_width:
            return False
        rule = self._params.early_stopping
        if rule is True:
            return True
        if rule == "never" and self._params.length_penalty > 0:
            length = self._max_tokens
        return self._score(best.cumulative_logprob, length) <= self._finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length) ** self._params.length_penalty

    def _tokens(self, continuation: Continuation) -> tuple[int, ...]:
        return (*self._live[continuation.parent].token_ids, continuation.token_id)


def start_search(params: BeamSearchParams, eos_ids: frozenset[int], room: int) -> BeamSearch:
    """The search of a request, for a model with these end-of-sequence tokens.

    Args:
      room: tokens that the model leaves behind the prompt.

    Raises:
      InvalidRequestError: as for `BeamSearch`.
    """
    stop_ids = frozenset(params.stop_token_ids)
    stop_ids = stop_ids if params.ignore_eos else stop_ids | eos_ids
    return BeamSearch(params, stop_ids, min(params.max_tokens, room))
