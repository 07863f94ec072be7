"""Who computes how many tokens in the next step: plain Python, no device arrays."""

import collections
import dataclasses

import numpy as np

from pagedjax.block_pool import BlockPool
from pagedjax.errors import InvalidRequestError
from pagedjax.request import Request


@dataclasses.dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `start : start + num_tokens` of a request, to be computed in one step.

    `samples`: the chunk ends with the request's last known token, so the step picks the next one.
    """

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        return self.end == self.request.num_tokens


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits that the scheduler keeps; see `EngineConfig`. `num_groups`: KV groups of the model."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_groups: int

    @property
    def table_width(self) -> int:
        return -(-self.max_model_len // self.block_size)


class Scheduler:
    """First come, first served, with one token budget a step and chunked prefill.

    Running requests go first, in order of arrival, then waiting ones; a prompt that exceeds the
    budget is computed in chunks. A waiting request is admitted when the blocks of its worst case
    (all of `max_tokens`) are free and not promised to others, so a running request never lacks one.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        self.config = config
        self.pool = pool
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        self._free_slots = list(reversed(range(config.max_num_seqs)))

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
          InvalidRequestError: the pool could never hold it.
        """
        need = self._worst_case_blocks(request)
        if need > self.pool.num_usable:
            c = self.config
            raise InvalidRequestError(
                f"{len(request.prompt_token_ids)} prompt tokens and max_tokens "
                f"{request.params.max_tokens} need {need} blocks of {c.block_size} tokens in "
                f"{c.num_groups} KV groups; the pool has {self.pool.num_usable}. Shorten the "
                "request or raise num_blocks"
            )
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks, with slots and blocks assigned; empty when there is no work."""
        chunks = []
        budget = self.config.max_num_batched_tokens
        for request in self.running:
            budget -= self._schedule_chunk(request, budget, chunks)
        while budget and self.waiting and self._admits(self.waiting[0]):
            request = self.waiting.popleft()
            request.slot = self._free_slots.pop()
            shape = (self.config.num_groups, self.config.table_width)
            request.block_tables = np.zeros(shape, np.int32)
            self.running.append(request)
            budget -= self._schedule_chunk(request, budget, chunks)
        return chunks

    def finish(self, request: Request) -> None:
        """Forget a running or waiting request and return its blocks."""
        if request.slot is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = None
        assert request.block_tables is not None
        for table in request.block_tables:
            self.pool.free(table[: request.num_blocks].tolist())
        request.block_tables, request.num_blocks = None, 0

    def _schedule_chunk(self, request: Request, budget: int, chunks: list[ScheduledChunk]) -> int:
        """Append the request's next chunk of at most `budget` tokens; returns its tokens."""
        start = request.num_computed_tokens
        chunk = ScheduledChunk(request, start, min(request.num_tokens - start, budget))
        if chunk.num_tokens:
            self._grow(request, self._blocks_for(chunk.end))
            chunks.append(chunk)
        return chunk.num_tokens

    def _grow(self, request: Request, num_blocks: int) -> None:
        """Give the request's table of every group `num_blocks` logical blocks."""
        new = num_blocks - request.num_blocks
        if new > 0:
            groups = self.config.num_groups
            assert request.block_tables is not None
            blocks = np.reshape(self.pool.allocate(new * groups), (groups, new))
            request.block_tables[:, request.num_blocks : num_blocks] = blocks
            request.num_blocks = num_blocks

    def _admits(self, request: Request) -> bool:
        if not self._free_slots:
            return False
        promised = sum(
            self._worst_case_blocks(r) - r.num_blocks * self.config.num_groups for r in self.running
        )
        return self._worst_case_blocks(request) <= self.pool.num_free - promised

    def _worst_case_blocks(self, request: Request) -> int:
        """Blocks of all groups when the request runs to its end; the last token is never stored."""
        length = len(request.prompt_token_ids) + request.params.max_tokens
        stored = min(length, self.config.max_model_len) - 1
        return self.config.num_groups * self._blocks_for(stored)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)
