"""Runs scheduled chunks on the device: owns parameters, device state and the compiled steps."""

import dataclasses

import jax

from pagedjax.batch import Batch, build_batch, stop_input
from pagedjax.buckets import Buckets
from pagedjax.compile_log import CompileLog
from pagedjax.decode_ahead import decode_ahead
from pagedjax.errors import InvalidRequestError
from pagedjax.host_blocks import HostBlocks
from pagedjax.logits import LogitsProcessor, check_processor
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache, Params
from pagedjax.plan import BlockTransfers, StepPlan
from pagedjax.request import Sequence
from pagedjax.sampler import begin
from pagedjax.sampling_input import SlotState
from pagedjax.sampling_rows import SamplingRows
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.slot_start import slot_start
from pagedjax.step import EngineState, StepOutput, step

MAX_PROCESSORS = 16

# One cache of compiled programs for all engines of a process: those of one model share them.
_step = jax.jit(step, static_argnums=(0, 1), donate_argnums=3)
_decode_ahead = jax.jit(decode_ahead, static_argnums=(0, 1, 2, 3), donate_argnums=5)
_begin = jax.jit(begin, donate_argnums=0)


class Runner:
    """Executes steps. `state` is donated to each and replaced by its result.

    Args:
      buckets: the shapes that steps may have.
      num_host_blocks: blocks of the host pool, its unused block 0 included.
      eos_token_ids: at which sequences stop that decode several steps ahead.
      processors: logits processors of requests to come; others are compiled when they come.
      compiles: notes what is compiled.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: Params,
        state: EngineState,
        limits: SchedulerConfig,
        buckets: Buckets,
        *,
        num_host_blocks: int = 1,
        eos_token_ids: tuple[int, ...] = (),
        processors: tuple[LogitsProcessor, ...] = (),
        compiles: CompileLog | None = None,
    ):
        self.model = model
        self.params = params
        self.state = state
        self.limits = limits
        self.buckets = buckets
        self.processors: tuple[LogitsProcessor, ...] = ()
        for processor in processors:
            self.add_processor(processor)
        self.compiles = compiles or CompileLog()
        self._rows = SamplingRows(limits.max_num_seqs)
        self._eos_token_ids = eos_token_ids
        # At most, every sequence copies its last block in every group.
        max_copies = limits.max_num_seqs * limits.num_groups
        self._host = HostBlocks(state.cache, num_host_blocks, max_copies)

    def add_processor(self, processor: LogitsProcessor) -> None:
        """Let steps know a logits processor; a new one has every shape compiled anew when used.

        Raises:
          InvalidRequestError: it cannot be traced, returns something else than logits, or is one of
            too many.
        """
        if processor in self.processors:
            return
        if len(self.processors) == MAX_PROCESSORS:
            raise InvalidRequestError(
                f"more than {MAX_PROCESSORS} different logits processors were used; each is "
                "compiled into the step, so define one function once and use it again"
            )
        check_processor(processor, self.model.vocab_size)
        self.processors = (*self.processors, processor)

    def dispatch(self, plan: StepPlan) -> StepOutput | None:
        """Move blocks and compute the chunks, without waiting for the device.

        Returns:
          Arrays on the device; row i of what was sampled is for `plan.samplers[i]`, row i of the
          prompt's for the i-th of all its wanted tokens. Where the plan has several steps, there is
          one more axis in front, and nothing of prompts. None without chunks.
        """
        self._move(plan.transfers)
        for seq in plan.new:
            self._set_up(seq)
        if not plan.chunks:
            return None
        if plan.num_steps > 1:
            size = len(plan.chunks)
            return self._run_ahead(plan, self.buckets.pick(size, size)[1])
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        num_seqs = max(len(plan.chunks), len(plan.samplers))
        return self._run(plan, self.buckets.pick(num_tokens, num_seqs))

    def run_batch(self, batch: Batch) -> StepOutput:
        """Compute a batch that is laid out already."""
        what = f"step of {len(batch.token_ids)} tokens, {len(batch.token_slots)} sequences"
        with self.compiles.watch(what):
            self.state, output = _step(self.model, self.processors, self.params, self.state, batch)
        return output

    def link_bytes_per_s(self) -> float:
        """Speed between device and host, measured once."""
        with self.compiles.watch("measurement of the link"):
            return self._host.link_bytes_per_s(self.state.cache)

    def sleep(self) -> None:
        """Free the device state; what swapped blocks hold is on the host then."""
        self._host.settle()
        for values in jax.tree.leaves(self.state):
            values.delete()

    def warmup(self) -> int:
        """Compile everything (on padding: the pool keeps its contents); returns the shapes."""
        with self.compiles.watch("block transfers"):
            self._replace(cache=self._host.warmup(self.state.cache))
        self._set_up(None)
        nothing = StepPlan([], BlockTransfers())
        shapes = self.buckets.all()
        for shape in shapes:
            jax.block_until_ready(self._run(nothing, shape))
        if self.limits.num_decode_steps > 1:
            ahead = [num_seqs for num_tokens, num_seqs in shapes if num_tokens == num_seqs]
            for num_seqs in ahead:
                jax.block_until_ready(self._run_ahead(nothing, num_seqs))
        self.compiles.end_warmup()
        return len(shapes)

    def _move(self, transfers: BlockTransfers) -> None:
        with self.compiles.watch("block transfers"):
            if transfers.swap_outs:
                self._host.swap_out(self.state.cache, transfers.swap_outs)
            if transfers.swap_ins:
                self._replace(cache=self._host.swap_in(self.state.cache, transfers.swap_ins))
            if transfers.copies:
                self._replace(cache=self._host.copy(self.state.cache, transfers.copies))

    def _replace(self, **parts: KVCache | SlotState) -> None:
        self.state = dataclasses.replace(self.state, **parts)

    def _set_up(self, seq: Sequence | None) -> None:
        """Tell a sequence's slot what it asks of the sampler, and which tokens it has."""
        start = slot_start(seq, self.limits, self.model.vocab_size)
        with self.compiles.watch("set-up of a slot"):
            self._replace(slots=_begin(self.state.slots, start))

    def _run(self, plan: StepPlan, shape: tuple[int, int]) -> StepOutput:
        return self.run_batch(self._batch(plan, *shape))

    def _run_ahead(self, plan: StepPlan, num_seqs: int) -> StepOutput:
        rows = [chunk._replace(num_tokens=1) for chunk in plan.chunks]
        batch = self._batch(dataclasses.replace(plan, chunks=rows), num_seqs, num_seqs)
        num_steps = self.limits.num_decode_steps
        with self.compiles.watch(f"{num_steps} decode steps of {num_seqs} sequences"):
            self.state, sampled = _decode_ahead(
                self.model,
                self.processors,
                self._eos_token_ids,
                num_steps,
                self.params,
                self.state,
                batch,
                stop_input(plan.chunks, num_seqs),
            )
        return StepOutput(sampled, None)

    def _batch(self, plan: StepPlan, num_tokens: int, num_seqs: int) -> Batch:
        return build_batch(
            plan.chunks,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_groups=self.limits.num_groups,
            table_width=self.limits.table_width,
            rows=self._rows,
            processors=self.processors,
        )
