"""A request as its user sees it: text, log-probabilities and metrics, gathered token by token."""

import time

from pagedjax.beam_search import Hypothesis
from pagedjax.options import RequestOptions
from pagedjax.output_text import OutputText
from pagedjax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedjax.request import FinishReason, Request, Sequence
from pagedjax.tokenizer import Tokenizer


class TrackedRequest:
    """A request with what the engine adds to it.

    Attributes:
      options: how it is treated.
      arrival: seconds of a monotonic clock.
      ended: its sequences that are finished.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        options: RequestOptions,
    ):
        self.request = request
        self.options = options
        self.arrival = time.monotonic()
        self.ended: list[Sequence] = []
        self._tokenizer = tokenizer
        self._texts: dict[Sequence, OutputText] = {}
        self._first_token: float | None = None
        self._last_token: float | None = None

    @property
    def is_finished(self) -> bool:
        return not self.request.sequences

    @property
    def is_reported(self) -> bool:
        """Whether its user wants to know how it stands now."""
        return self.is_finished or self.options.output_kind == "cumulative"

    def begin_anew(self, root: bytes | None) -> Request:
        """Forget what was generated; returns the request that takes the place of the one so far.

        Samples that were aborted stay so, without the tokens that they had.
        """
        aborted = {seq.index for seq in self.ended if seq.finish_reason is FinishReason.ABORT}
        self.request = self.request.anew(root, self.request.unwanted | aborted)
        self.ended = []
        self._texts = {}
        self._first_token = self._last_token = None
        return self.request

    def note_tokens(self, now: float) -> bool:
        """Tokens came; returns whether they are the first."""
        is_first = self._first_token is None
        self._first_token = now if is_first else self._first_token
        self._last_token = now
        return is_first

    def append_text(self, sequence: Sequence, token_id: int) -> str | None:
        """Take in a token that is part of the text; the stop string that it completes."""
        if self._tokenizer is None:
            return None
        if sequence not in self._texts:
            self._texts[sequence] = self._new_text(self._tokenizer)
        return self._texts[sequence].append(token_id)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Note that a sequence, no longer among the request's running ones, is finished."""
        sequence.finish_reason = reason
        self.ended.append(sequence)
        if sequence in self._texts:
            self._texts[sequence].finish()

    def output(self) -> RequestOutput:
        """State of the request now."""
        request = self.request
        wants_prompt = request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            completions=self._completions(),
            finished=self.is_finished,
            metrics=RequestMetrics(
                arrival=self.arrival,
                first_token=self._first_token,
                last_token=self._last_token,
                finished=time.monotonic() if self.is_finished else None,
                cached_tokens=request.num_cached_tokens,
                preemptions=request.num_preemptions,
            ),
            prompt_logprobs=tuple(request.prompt_logprobs) if wants_prompt else None,
        )

    def _completions(self) -> tuple[CompletionOutput, ...]:
        """Of all samples; where the best are to be chosen, only in the end."""
        request, params = self.request, self.request.params
        if request.beam_search is not None:
            best = request.beam_search.best() if self.is_finished else []
            return tuple(self._of_hypothesis(i, found) for i, found in enumerate(best))
        sequences = [*request.sequences, *self.ended]
        if len(sequences) > 1:
            sequences.sort(key=lambda seq: seq.index)
        if params.num_samples > params.n:
            if not self.is_finished:
                return ()
            sequences = sorted(sequences, key=_from_best_to_worst)[: params.n]
        return tuple(self._of_sequence(seq) for seq in sequences)

    def _of_sequence(self, seq: Sequence) -> CompletionOutput:
        params = self.request.params
        return CompletionOutput(
            index=seq.index,
            text=self._texts[seq].so_far if seq in self._texts else "",
            token_ids=tuple(seq.output_token_ids),
            logprobs=tuple(seq.logprobs) if params.logprobs is not None else None,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            cumulative_logprob=seq.cumulative_logprob if params.wants_logprobs else None,
        )

    def _of_hypothesis(self, index: int, found: Hypothesis) -> CompletionOutput:
        stopped = found.stop_token_id is not None
        text = ""
        if self._tokenizer is not None:
            whole = self._new_text(self._tokenizer)
            for token_id in found.token_ids[:-1] if stopped else found.token_ids:
                whole.append(token_id)
            whole.finish()
            text = whole.so_far
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=found.token_ids,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_reason=found.stop_token_id,
            cumulative_logprob=found.cumulative_logprob,
            score=found.score,
        )

    def _new_text(self, tokenizer: Tokenizer) -> OutputText:
        return OutputText(tokenizer, self.request.prompt_token_ids, self.request.params)


def _from_best_to_worst(seq: Sequence) -> tuple[bool, float]:
    """Sorts by the mean log-probability of a token; who was aborted comes last."""
    mean = seq.cumulative_logprob / max(1, seq.num_output_tokens)
    return seq.finish_reason is FinishReason.ABORT, -mean
