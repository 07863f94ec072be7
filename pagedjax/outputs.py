"""What comes back for a request."""

import dataclasses

from pagedjax.errors import PagedJaxError
from pagedjax.request import FinishReason, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """The generated continuation, as far as it has come.

    Attributes:
      text: detokenized so far; ends between characters. Empty without a tokenizer.
      logprobs: one per token if `SamplingParams.logprobs` was given, else None.
      finish_reason: None while the request runs.
      stop_token_id: the token that ended it, for `FinishReason.STOP`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Seconds of a monotonic clock: when the request arrived, had its first token, was done."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """State of a request after a step.

    Attributes:
      error: why the request was refused; `outputs` then raises it, so it cannot go unnoticed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completion: CompletionOutput | None
    finished: bool
    metrics: RequestMetrics
    error: PagedJaxError | None = None

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The completions; raises `error` if the request was refused."""
        if self.error is not None:
            raise self.error
        return [] if self.completion is None else [self.completion]
