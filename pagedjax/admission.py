"""Whether a waiting request fits beside those that run, and what of it is there already."""

from pagedjax.cache_stats import PrefixHit
from pagedjax.kv_cache_manager import KVCacheManager
from pagedjax.request import Request, Sequence
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.slots import SlotPool


class Admission:
    """Admits a request when its known tokens fit beside what the running ones are about to need."""

    def __init__(self, config: SchedulerConfig, blocks: KVCacheManager, slots: SlotPool):
        self.config, self.blocks, self.slots = config, blocks, slots
        # The request that did not fit when it was asked last, and how many blocks were free.
        self._refused: tuple[Request | None, int] = (None, 0)

    def find_prefix(self, seq: Sequence) -> PrefixHit:
        """One token at least is computed, and all whose log-probabilities are yet to be found."""
        limit, request = seq.num_tokens - 1, seq.request
        known = len(request.prompt_logprobs)
        if request.params.prompt_logprobs is not None and known < request.prompt_len - 1:
            limit = min(limit, known)
        return self.blocks.find_prefix(seq, limit)

    def fits(self, request: Request, running: list[Request]) -> bool:
        """Whether a waiting request can be admitted now, beside those that run."""
        if request.num_slots > self.slots.num_free or request.num_in_flight:
            return False
        if not running:
            return True
        refused, free_then = self._refused
        if request is refused and self.blocks.pool.num_free <= free_then:
            return False  # so that a step costs nothing for those who wait
        need = self._blocks_to_admit(request)
        if need is None:
            return False
        if need + self._blocks_to_keep(running) <= self.blocks.pool.num_free:
            return True
        self._refused = request, self.blocks.pool.num_free
        return False

    def _blocks_to_admit(self, request: Request) -> int | None:
        """Free blocks that the known tokens of a waiting request take.

        None: this very step computes its next block for another request, so it waits for that.
        """
        first, *others = request.sequences
        if request.is_swapped:
            return len(self.blocks.blocks_of(request)) + self.config.num_groups * (1 + len(others))
        hit = self.find_prefix(first)
        if hit.is_coming:
            return None
        computed = hit.num_blocks * self.config.block_size
        return (
            hit.num_unowned
            + self._blocks_to_add(first, computed)
            + sum(self._blocks_to_add(seq, request.prompt_len) for seq in others)
        )

    def _blocks_to_keep(self, running: list[Request]) -> int:
        """Free blocks that running sequences will soon need: for prompts, and one more to grow."""
        size = self.config.block_size
        return sum(
            self.config.num_groups + self._blocks_to_add(seq, seq.num_blocks * size)
            for request in running
            for seq in request.sequences
        )

    def _blocks_to_add(self, seq: Sequence, start: int) -> int:
        if start >= seq.num_tokens:
            return 0
        return self.blocks.blocks_to_add(start, seq.num_tokens, self.config.max_num_batched_tokens)
