"""Steps that the device computes while the host goes on."""

import dataclasses
import time
from collections import deque

import jax

from pagedjax.output_processor import OutputProcessor
from pagedjax.outputs import RequestOutput
from pagedjax.plan import StepPlan
from pagedjax.preemption import PreemptionPolicy
from pagedjax.step import StepOutput


@dataclasses.dataclass(frozen=True)
class StepInFlight:
    """A step that was dispatched and whose results are not on the host.

    `compiled`: it had to be compiled, which took time. `started`: seconds of a monotonic clock.
    """

    plan: StepPlan
    output: StepOutput
    compiled: bool
    started: float


class StepsInFlight:
    """What was dispatched and not yet taken, oldest first.

    Args:
      preemption: learns how long prompts take.
    """

    def __init__(self, preemption: PreemptionPolicy):
        self._steps: deque[StepInFlight] = deque()
        self._preemption = preemption
        self._last_taken = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepInFlight) -> None:
        """A step was dispatched; its results set out for the host, while the next step runs."""
        sampled = step.output.sampled
        wanted = sampled if step.plan.wants_logprobs else sampled.token_ids
        for values in jax.tree.leaves(wanted):
            values.copy_to_host_async()
        self._steps.append(step)

    def take(self, processor: OutputProcessor) -> list[RequestOutput]:
        """Wait for the oldest step and take its results to their requests."""
        step = self._steps.popleft()
        outputs = processor.take(step.plan, step.output)
        # The device began when the step was there and the one before it was done.
        now, begun = time.monotonic(), max(step.started, self._last_taken)
        self._last_taken = now
        num_tokens = sum(chunk.num_tokens for chunk in step.plan.chunks)
        is_prefill = num_tokens > 2 * len(step.plan.chunks) and step.plan.num_steps == 1
        if is_prefill and not step.compiled:
            self._preemption.observe_prefill(num_tokens, now - begun)
        return outputs
