"""A request as its user sees it: text, log-probabilities and metrics, gathered token by token."""

import dataclasses
import time

from pagedjax.beam_search import Hypothesis
from pagedjax.detokenizer import IncrementalDetokenizer
from pagedjax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedjax.request import FinishReason, Request, Sequence
from pagedjax.tokenizer import Tokenizer


class TrackedRequest:
    """A request with what the engine adds to it.

    Attributes:
      ended: its sequences that are finished.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        self.request = request
        self.ended: list[Sequence] = []
        self._tokenizer = tokenizer
        self._texts: dict[Sequence, _Text] = {}
        self._metrics = RequestMetrics(arrival=time.monotonic())

    @property
    def is_finished(self) -> bool:
        return not self.request.sequences

    def append_text(self, sequence: Sequence, token_id: int) -> None:
        """Take in a token that is part of the text."""
        if self._tokenizer is not None:
            if sequence not in self._texts:
                self._texts[sequence] = self._new_text(self._tokenizer)
            self._texts[sequence].append(token_id)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Note that a sequence, no longer among the request's running ones, is finished."""
        sequence.finish_reason = reason
        self.ended.append(sequence)
        if sequence in self._texts:
            self._texts[sequence].flush()

    def output(self) -> RequestOutput:
        """State of the request now."""
        request, now = self.request, time.monotonic()
        m = self._metrics
        self._metrics = dataclasses.replace(
            m,
            first_token=now if m.first_token is None and self._has_tokens() else m.first_token,
            finished=now if self.is_finished else None,
            cached_tokens=request.num_cached_tokens,
            preemptions=request.num_preemptions,
        )
        wants_prompt = request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            completions=self._completions(),
            finished=self.is_finished,
            metrics=self._metrics,
            prompt_logprobs=tuple(request.prompt_logprobs) if wants_prompt else None,
        )

    def _has_tokens(self) -> bool:
        return any(seq.num_output_tokens for seq in (*self.request.sequences, *self.ended))

    def _completions(self) -> tuple[CompletionOutput, ...]:
        """Of all samples; where the best are to be chosen, only in the end."""
        request, params = self.request, self.request.params
        if request.beam_search is not None:
            best = request.beam_search.best() if self.is_finished else []
            return tuple(self._of_hypothesis(i, found) for i, found in enumerate(best))
        sequences = sorted((*request.sequences, *self.ended), key=lambda seq: seq.index)
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
            stop_token_id=seq.stop_token_id,
            cumulative_logprob=seq.cumulative_logprob if params.wants_logprobs else None,
        )

    def _of_hypothesis(self, index: int, found: Hypothesis) -> CompletionOutput:
        stopped = found.stop_token_id is not None
        text = ""
        if self._tokenizer is not None:
            whole = self._new_text(self._tokenizer)
            for token_id in found.token_ids[:-1] if stopped else found.token_ids:
                whole.append(token_id)
            whole.flush()
            text = whole.so_far
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=found.token_ids,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_token_id=found.stop_token_id,
            cumulative_logprob=found.cumulative_logprob,
            score=found.score,
        )

    def _new_text(self, tokenizer: Tokenizer) -> "_Text":
        return _Text(tokenizer.detokenizer(list(self.request.prompt_token_ids)))


def _from_best_to_worst(seq: Sequence) -> tuple[bool, float]:
    """Sorts by the mean log-probability of a token; who was aborted comes last."""
    mean = seq.cumulative_logprob / max(1, seq.num_output_tokens)
    return seq.finish_reason is FinishReason.ABORT, -mean


@dataclasses.dataclass
class _Text:
    """The text of one sequence, as far as it has come."""

    detokenizer: IncrementalDetokenizer
    so_far: str = ""

    def append(self, token_id: int) -> None:
        self.so_far += self.detokenizer.append(token_id)

    def flush(self) -> None:
        self.so_far += self.detokenizer.flush()
