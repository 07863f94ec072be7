"""Who computes how many tokens in the next step: plain Python, no device arrays."""

import bisect
from collections.abc import Callable
from operator import attrgetter

from pagedjax.admission import Admission
from pagedjax.block_pool import BlockPool
from pagedjax.cache_stats import PrefixHit
from pagedjax.errors import InvalidRequestError
from pagedjax.kv_cache_manager import KVCacheManager
from pagedjax.plan import ScheduledChunk, StepPlan
from pagedjax.request import Request, Sequence, derived_seed
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.slots import SlotPool
from pagedjax.waiting_queue import WaitingQueue


class Scheduler:
    """First come, first served, with one token budget a step, chunked prefill and preemption.

    Running requests go first, by priority and arrival, then waiting ones. When a running request
    lacks a block, the last of the running ones is preempted, all of its blocks at once, and waits
    at the place that its arrival gives it. A waiting request is admitted when its known tokens fit
    beside what the running ones are about to need.

    Args:
      pool: blocks on the device. host: blocks in host memory for preempted requests.
      prefers_swap: given the tokens to compute again and the blocks to move, whether to swap.

    Attributes:
      held: requests that must not begin while `is_holding`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        host: BlockPool | None = None,
        prefers_swap: Callable[[int, int], bool] = lambda num_tokens, num_blocks: False,
    ):
        self.config = config
        self.pool = pool
        self.blocks = KVCacheManager(
            pool,
            host or BlockPool(1),
            block_size=config.block_size,
            windows=config.windows,
            table_width=config.table_width,
            offload_evicted=config.offload_evicted,
        )
        self.waiting = WaitingQueue()
        self.held = WaitingQueue()
        self.is_holding = False
        self.running: list[Request] = []
        self.num_swaps = 0
        self.num_recomputes = 0
        self._prefers_swap = prefers_swap
        self.slots = SlotPool(config.max_num_seqs)
        self.admission = Admission(config, self.blocks, self.slots)

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self.waiting) + len(self.held) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
          InvalidRequestError: the pool, or a step, could never hold it.
        """
        c = self.config
        if request.width > c.max_num_seqs:
            raise InvalidRequestError(
                f"{request.width} sequences at once were asked for; max_num_seqs is "
                f"{c.max_num_seqs}. Ask for fewer samples or beams, or raise it"
            )
        max_tokens = request.params.max_tokens
        request.max_length = min(request.prompt_len + max_tokens, c.max_model_len)
        # The last token is never stored.
        need = self.blocks.worst_case(request.prompt_len, request.max_length - 1, request.width)
        if need > self.pool.num_usable:
            raise InvalidRequestError(
                f"{request.prompt_len} prompt tokens and max_tokens {max_tokens} need {need} "
                f"blocks of {c.block_size} tokens in {c.num_groups} KV groups for "
                f"{request.width} sequences; the pool has {self.pool.num_usable}. Shorten the "
                "request or raise num_blocks"
            )
        (self.held if self.is_holding else self.waiting).push(request)

    def hold(self) -> None:
        """Let nobody begin; those who have begun go on, also when they are preempted."""
        self.is_holding = True
        for request in self.waiting:
            if not request.num_preemptions:
                self.waiting.remove(request)
                self.held.push(request)

    def unhold(self) -> None:
        """Let all begin."""
        self.is_holding = False
        for request in self.held:
            self.held.remove(request)
            self.waiting.push(request)

    @property
    def has_begun(self) -> bool:
        """Whether somebody goes on while nobody may begin."""
        return bool(self.running or self.waiting)

    def preempt_all(self) -> None:
        """Take the blocks of all requests that run, who will compute them again."""
        while self.running:
            self._preempt(self.running[-1], may_swap=False)

    def schedule(self) -> StepPlan:
        """The next step, with slots and blocks assigned; without chunks when there is no work.

        The results of steps before need not be known: what a sequence sampled last is one more
        token, which the device has.
        """
        self._make_way()
        chunks = self._decode_ahead()
        num_steps = self.config.num_decode_steps if chunks else 1
        if not chunks:
            self._schedule_all(chunks)
        return StepPlan(chunks, self.blocks.take_transfers(), self.slots.take_new(), num_steps)

    def update(self, plan: StepPlan) -> None:
        """The step was dispatched: its tokens are in the pool, as far as later steps can see."""
        size = self.config.block_size
        for sequence, start, num_tokens, samplers in plan.chunks:
            end = start + num_tokens
            crosses = end // size != start // size
            is_sampled = sequence.request.beam_search is None
            for seq in samplers or (sequence,):
                seq.num_computed_tokens = end
                seq.token_on_device = bool(samplers) and is_sampled
                if seq.token_on_device:
                    seq.num_pending += num_tokens if plan.num_steps > 1 else 1
                if crosses:
                    self.blocks.advance(seq, end)
        for request in plan.requests:
            request.num_in_flight += 1
        self.blocks.end_step()

    def collect(self, plan: StepPlan) -> None:
        """The results of a dispatched step are on the host; `append` follows for its tokens."""
        for request in plan.requests:
            request.num_in_flight -= 1

    def append(self, seq: Sequence, token_id: int) -> None:
        """A token that a sequence sampled has come to the host."""
        # Those before it are computed, as it was sampled from them. It is not, if it ends its
        # sequence and the device saw that.
        if seq.slot is not None and not len(seq.token_ids) % self.config.block_size:
            self.blocks.publish(seq)
        seq.token_ids.append(token_id)
        seq.num_pending -= 1

    def fork(self, parent: Sequence) -> Sequence:
        """A new running sequence that shares all tokens and blocks of `parent`."""
        request = parent.request
        child = Sequence(
            request,
            request.num_sequences,
            list(parent.token_ids),
            derived_seed(request.seed, request.num_sequences),
            parent.root,
            cumulative_logprob=parent.cumulative_logprob,
        )
        self.slots.take_spare(child)
        self.blocks.fork(parent, child)
        request.num_sequences += 1
        request.sequences.append(child)
        return child

    def finish(self, request: Request) -> None:
        """Forget a request, running or waiting, and return its blocks."""
        for sequence in list(request.sequences):
            self._remove(sequence)
        self._end(request)

    def finish_sequence(self, sequence: Sequence) -> None:
        """Forget one sequence and return its blocks; with the last one its request ends."""
        self._remove(sequence)
        if not sequence.request.sequences:
            self._end(sequence.request)

    def continue_beams(self, request: Request, chosen: list[tuple[Sequence, int]]) -> None:
        """Replace the beams of a request by `(parent, next token)`, in the order given.

        A parent's first continuation takes its place, further ones fork from it; parents without
        any are finished.
        """
        continued = {parent for parent, _ in chosen}
        for seq in [seq for seq in request.sequences if seq not in continued]:
            self._remove(seq)
        beams: list[Sequence] = []
        for parent, _ in chosen:
            beams.append(self.fork(parent) if parent in beams else parent)
        for seq, (_, token_id) in zip(beams, chosen, strict=True):
            seq.token_ids.append(token_id)
        request.sequences = beams

    def check(self) -> None:
        """Assert the invariants; between steps."""
        waiting = [*self.waiting, *self.held]
        self.blocks.check([*self.running, *waiting])
        self.slots.check(self.running, waiting)

    # --- one step ---

    def _schedule_all(self, chunks: list[ScheduledChunk]) -> None:
        """Append the chunks of running requests and of those that can be admitted."""
        budget = self.config.max_num_batched_tokens
        # Every sequence that comes later keeps a token of the budget, so that decodes go on.
        reserved = sum(len(request.sequences) for request in self.running)
        num_running, i = len(self.running), 0
        while i < len(self.running):
            request = self.running[i]
            reserved -= len(request.sequences)
            budget -= self._schedule_request(request, budget - reserved, chunks)
            i += 1
        if len(self.running) == num_running:  # nobody was preempted
            self._admit_waiting(budget, chunks)

    def _decode_ahead(self) -> list[ScheduledChunk]:
        """Several decodes of every sequence, if there is nothing else to do and room for them."""
        most = self.config.num_decode_steps
        if most == 1 or (self.waiting and self._fits_next()):
            return []
        chunks, need = [], 0
        for request in self.running:
            for seq in request.sequences:
                start = seq.num_computed_tokens
                if request.beam_search is not None or seq.num_tokens - start != 1:
                    return []
                num_tokens = min(most, request.max_length - seq.num_tokens)
                if start < request.prompt_len:
                    return []
                if num_tokens > 0:
                    need += self.blocks.need(seq, start + num_tokens)
                    chunks.append(ScheduledChunk(seq, start, num_tokens, (seq,)))
        if need > self.pool.num_free:
            return []
        for seq, _, num_tokens, _ in chunks:
            self.blocks.reserve(seq, seq.num_computed_tokens + num_tokens)
        return chunks

    # --- one request ---

    def _schedule_request(
        self, request: Request, budget: int, chunks: list[ScheduledChunk], *, preempts: bool = True
    ) -> int:
        """Append the next chunks of a request, at most `budget` tokens; returns their number.

        Preempts those behind it if it lacks blocks, and itself if that is not enough.
        """
        used = 0
        for seq in tuple(request.sequences):
            start = seq.num_computed_tokens
            if seq.num_tokens >= request.max_length:
                continue  # the last token is on its way
            if (  # most decodes
                used < budget
                and seq.num_tokens - start == 1
                and request.prompt_len <= start < seq.num_blocks * self.config.block_size
                and not seq.shares_tail
            ):
                chunks.append(ScheduledChunk(seq, start, 1, (seq,)))
                used += 1
                continue
            scheduled = self._schedule_sequence(seq, budget - used, chunks, preempts)
            if scheduled is None:
                if not used and preempts:
                    self._preempt(request)
                break
            used += scheduled
        return used

    def _schedule_sequence(
        self, seq: Sequence, budget: int, chunks: list[ScheduledChunk], preempts: bool
    ) -> int | None:
        """Tokens of the chunk that was appended; None if there is no block for even one."""
        request = seq.request
        if seq.block_tables is None:
            hit = self.admission.find_prefix(seq)
            if hit.is_coming:
                return 0
            # With the next block: who got blocks back from the host keeps them for this step.
            while hit.num_unowned + self.config.num_groups > self.pool.num_free:
                if not (preempts and self._preempt_behind(request)):
                    return None
                hit = self.admission.find_prefix(seq)  # other blocks are free now
            self._start(seq, hit)
        start = seq.num_computed_tokens
        num_tokens = min(seq.num_tokens - start, budget)
        if num_tokens <= 0:
            return 0
        while self.blocks.need(seq, start + num_tokens) > self.pool.num_free:
            if not (preempts and self._preempt_behind(request)):
                num_tokens = min(num_tokens, self.blocks.room(seq))
                break
        if num_tokens <= 0:
            return None
        self.blocks.reserve(seq, start + num_tokens)
        samplers = self._samplers(seq) if start + num_tokens == seq.num_tokens else ()
        chunks.append(ScheduledChunk(seq, start, num_tokens, samplers))
        return num_tokens

    def _samplers(self, seq: Sequence) -> tuple[Sequence, ...]:
        """The sequences that sample behind the last known token; all samples at a prompt's end."""
        request = seq.request
        if request.beam_search is not None or request.num_sequences > 1:
            return (seq,)
        return (seq, *(self.fork(seq) for _ in range(request.width - 1)))

    def _start(self, seq: Sequence, hit: PrefixHit) -> None:
        request = seq.request
        self.blocks.start(seq, hit)
        if not request.num_preemptions and seq.index == 0:
            self.blocks.count(request, hit)

    def _preempt_behind(self, request: Request) -> bool:
        """Preempt the last running request; False if that is `request` itself."""
        if self.running[-1] is request:
            return False
        self._preempt(self.running[-1])
        return True

    # --- in and out of the running ones ---

    def _admit_waiting(self, budget: int, chunks: list[ScheduledChunk]) -> None:
        while budget > 0 and self.waiting and self._fits_next():
            request = self.waiting.pop()
            self.slots.assign(request)
            bisect.insort(self.running, request, key=attrgetter("order"))
            if request.is_swapped:
                self.blocks.swap_in(request)
            budget -= self._schedule_request(request, budget, chunks, preempts=False)

    def _fits_next(self) -> bool:
        return self.admission.fits(self.waiting.peek(), self.running)

    def _make_way(self) -> None:
        """Preempt requests of a lower priority than that of one that waits."""
        while (
            self.waiting
            and self.running
            and not self.waiting.peek().num_in_flight
            and self.running[-1].priority > self.waiting.peek().priority
            and not self._fits_next()
        ):
            self._preempt(self.running[-1])

    def _preempt(self, request: Request, *, may_swap: bool = True) -> None:
        """Stop the last of the running requests and take all of its blocks."""
        assert request is self.running[-1]
        self.running.pop()
        num_blocks = len(self.blocks.blocks_of(request))
        fits = may_swap and 0 < num_blocks <= self.blocks.host.num_free
        # Beams that do not run cannot be continued, so what is in flight of them has to come again.
        fits &= not (request.num_in_flight and request.beam_search is not None)
        if fits and self._prefers_swap(_tokens_to_recompute(request), num_blocks):
            self.blocks.swap_out(request)
            self.num_swaps += 1
        else:
            for seq in request.sequences:
                self.blocks.release(seq)
            request.candidates.clear()
            self.num_recomputes += 1
        self.slots.release_all(request)
        request.num_preemptions += 1
        self.waiting.push(request)

    def _remove(self, seq: Sequence) -> None:
        request = seq.request
        self.blocks.release(seq)
        request.sequences.remove(seq)
        self.slots.release(seq)

    def _end(self, request: Request) -> None:
        queues = (self.waiting, self.held)
        queue = next((queue for queue in queues if request in queue), self.running)
        queue.remove(request)
        self.slots.release_all(request)


def _tokens_to_recompute(request: Request) -> int:
    """Tokens that a request would compute again, its prompt once."""
    prompt = request.prompt_len
    own = [max(0, seq.num_computed_tokens - prompt) for seq in request.sequences]
    return min(prompt, request.sequences[0].num_computed_tokens) + sum(own)
