"""What a step brought is applied to its requests: tokens, ends, beams, log-probabilities."""

import dataclasses
import operator
import time

import jax
import numpy as np

from pagedjax.batch import targets_of
from pagedjax.beam_search import BeamSearch
from pagedjax.metrics import EngineMetrics
from pagedjax.outputs import RequestOutput
from pagedjax.plan import StepPlan
from pagedjax.prompt_logprobs import PromptLogprobs
from pagedjax.request import FinishReason, Sequence, TokenLogprobs
from pagedjax.sampler import SamplerOutput
from pagedjax.scheduler import Scheduler
from pagedjax.step import StepOutput
from pagedjax.tracker import TrackedRequest


class OutputProcessor:
    """Takes results to their requests, and ends those that are at their end.

    A step may have been dispatched before the one before it was known, so its results may be for
    sequences that have ended since: those are dropped.

    Attributes:
      tracked: the unfinished requests by id.
    """

    def __init__(self, scheduler: Scheduler, metrics: EngineMetrics):
        self.tracked: dict[str, TrackedRequest] = {}
        self.scheduler = scheduler
        self.metrics = metrics

    def take(self, plan: StepPlan, output: StepOutput) -> list[RequestOutput]:
        """Apply the results of a step, for which it waits.

        Returns:
          What is new of the requests that got a token, where they want to know.
        """
        self.scheduler.collect(plan)
        if all(not request.sequences for request in plan.requests):
            return []  # nobody is there any more
        steps = _fetch(plan, output.sampled)
        now = time.monotonic()
        if output.prompt is not None:
            self._take_prompt_logprobs(plan, output.prompt)
        touched = self._take_tokens(plan, steps, now)
        return [self.report(tracked) for tracked in touched if tracked.is_reported]

    def finish(self, tracked: TrackedRequest, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence and return its blocks."""
        self.scheduler.finish_sequence(seq)
        tracked.end(seq, reason)

    def restart(self, tracked: TrackedRequest, root: bytes | None) -> None:
        """Drop what a request has got; it begins again from its prompt, at its place.

        Args:
          root: see `Sequence.root`.
        """
        old = tracked.request
        for seq in old.sequences:
            seq.finish_reason = FinishReason.ABORT  # so that what is in flight is dropped
        self.scheduler.finish(old)
        self.scheduler.add(tracked.begin_anew(root))

    def report(self, tracked: TrackedRequest) -> RequestOutput:
        """The request as it stands; forgotten when it is finished."""
        if tracked.is_finished:
            del self.tracked[tracked.request.request_id]
            reason = tracked.ended[-1].finish_reason or FinishReason.ABORT
            self.metrics.on_finish(reason, time.monotonic() - tracked.arrival)
        return tracked.output()

    def _take_tokens(
        self, plan: StepPlan, steps: list[SamplerOutput], now: float
    ) -> list[TrackedRequest]:
        """Give every sequence its tokens; returns the requests that got some."""
        touched: dict[TrackedRequest, None] = {}
        times: dict[int, list[float | None]] = {}
        samplers = ((seq, chunk.num_tokens) for chunk in plan.chunks for seq in chunk.samplers)
        for row, (seq, num_tokens) in enumerate(samplers):
            if seq.finish_reason is not None:
                continue  # it ended while the step ran
            touched[self.tracked[seq.request.request_id]] = None
            before = seq.num_output_tokens
            for step in steps[:num_tokens]:
                if seq.finish_reason is None:
                    self._take_token(seq, step, row)
            new = seq.num_output_tokens - before
            times.setdefault(new, []).append(seq.token_time)
            seq.token_time = now
        for new, previous in times.items():
            if new:
                self.metrics.on_tokens(now, previous, new)
        for tracked in touched:
            if tracked.note_tokens(now):
                self.metrics.on_first_token(now - tracked.arrival)
        return list(touched)

    def _take_token(self, seq: Sequence, sampled: SamplerOutput, row: int) -> None:
        """Apply what the device found for a sequence."""
        request = seq.request
        params, tracked = request.params, self.tracked[request.request_id]
        if request.beam_search is not None:
            self._take_candidates(tracked, request.beam_search, seq, sampled, row)
            return
        if seq.index in request.unwanted:
            self.finish(tracked, seq, FinishReason.ABORT)
            return
        token_id = int(sampled.token_ids[row])
        self.scheduler.append(seq, token_id)
        if params.wants_logprobs:
            seq.cumulative_logprob += float(sampled.logprobs[row])
        if params.logprobs is not None:
            found = _token_logprobs(sampled, row, params.logprobs)
            processed = float(sampled.processed_logprobs[row])
            seq.logprobs.append(dataclasses.replace(found, processed=processed))
        reason = self._finish_reason(tracked, seq, token_id)
        if reason is not None:
            self.finish(tracked, seq, reason)

    def _finish_reason(
        self, tracked: TrackedRequest, seq: Sequence, token_id: int
    ) -> FinishReason | None:
        """Why the sequence ends with its last token, which is added to its text unless it stops."""
        request = seq.request
        if token_id in request.stop_token_ids:
            seq.stop_reason = token_id
            return FinishReason.STOP
        seq.stop_reason = tracked.append_text(seq, token_id)
        if seq.stop_reason is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(seq.token_ids) >= request.max_length else None

    def _take_candidates(
        self,
        tracked: TrackedRequest,
        search: BeamSearch,
        seq: Sequence,
        sampled: SamplerOutput,
        row: int,
    ) -> None:
        """Note the likeliest tokens behind a beam; when all beams have theirs, go on with the best.

        Those of beams that were to be computed anew meanwhile will come again.
        """
        request = seq.request
        if seq.num_computed_tokens < seq.num_tokens:
            return
        request.candidates[seq] = _top(sampled, row, search.num_candidates)
        live = request.sequences
        if len(request.candidates) < len(live):
            return
        going = search.advance([request.candidates[beam] for beam in live])
        request.candidates.clear()
        if going:
            self.metrics.on_tokens(0.0, [None] * len(going))
            self.scheduler.continue_beams(request, [(live[c.parent], c.token_id) for c in going])
        for beam in [] if going else list(live):
            self.finish(tracked, beam, FinishReason.LENGTH)

    def _take_prompt_logprobs(self, plan: StepPlan, prompt: PromptLogprobs) -> None:
        found, row = None, 0
        for chunk in plan.chunks:
            request = chunk.sequence.request
            positions = targets_of(chunk.sequence, chunk.start, chunk.end)
            if positions:
                found = found or jax.device_get(prompt)
                count = request.params.prompt_logprobs or 0
                for _ in positions:
                    request.prompt_logprobs.append(_token_logprobs(found, row, count))
                    row += 1


def _fetch(plan: StepPlan, sampled: SamplerOutput) -> list[SamplerOutput]:
    """The results of each of the plan's steps, on the host; log-probabilities only if wanted."""
    if not plan.wants_logprobs:
        token_ids = np.asarray(sampled.token_ids)
        each = token_ids if plan.num_steps > 1 else [token_ids]
        return [dataclasses.replace(sampled, token_ids=ids) for ids in each]
    sampled = jax.device_get(sampled)
    if plan.num_steps == 1:
        return [sampled]
    return [jax.tree.map(operator.itemgetter(i), sampled) for i in range(plan.num_steps)]


def _token_logprobs(found: SamplerOutput | PromptLogprobs, row: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(float(found.logprobs[row]), tuple(_top(found, row, count)))


def _top(found: SamplerOutput | PromptLogprobs, row: int, count: int) -> list[tuple[int, float]]:
    ids, values = found.top_ids[row, :count].tolist(), found.top_logprobs[row, :count].tolist()
    return list(zip(ids, values, strict=True))
