"""What comes back for a request."""

import dataclasses

from pagedjax.errors import PagedJaxError
from pagedjax.request import FinishReason, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """The generated continuation, as far as it has come.

    Attributes:
      index: number of the sample; of beams, the rank.
      text: detokenized so far; ends between characters, and before what may become a stop string.
        Empty without a tokenizer or with `SamplingParams.detokenize` off.
      logprobs: one per token if `SamplingParams.logprobs` was given, else None.
      finish_reason: None while the request runs.
      stop_reason: for `FinishReason.STOP`, the id of the token or the string that ended it.
      cumulative_logprob: sum over the tokens in the model's own distribution, where it is computed:
        with `SamplingParams.logprobs`, `best_of`, and beam search.
      score: of a beam, `cumulative_logprob` divided by the length to the power of the penalty.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """How a request fared.

    Attributes:
      arrival, first_token, last_token, finished: seconds of a monotonic clock.
      cached_tokens: of the prompt, that were found in the prefix cache.
      preemptions: how often it had to give way to others.
    """

    arrival: float
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """State of a request after a step.

    Attributes:
      completions: one for every sample or beam; see `outputs`.
      prompt_logprobs: of the prompt's second token and on, if they were asked for.
      error: why the request was refused; `outputs` then raises it, so it cannot go unnoticed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: PagedJaxError | None = None

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The completions; raises `error` if the request was refused."""
        if self.error is not None:
            raise self.error
        return list(self.completions)
