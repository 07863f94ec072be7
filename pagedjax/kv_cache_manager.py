"""The blocks of sequences: block tables over the pool, prefix hits, sharing, swapping.

Plain Python, no device arrays. What has to be moved in the pool is written down in `BlockTransfers`
and carried out before the next step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from pagedjax.block_hash import block_hash
from pagedjax.block_pool import BlockKey, BlockPool
from pagedjax.cache_stats import CacheStats, PrefixHit
from pagedjax.plan import BlockTransfers
from pagedjax.request import Request, Sequence


class KVCacheManager:
    """Gives sequences blocks and takes them back.

    Args:
      pool: blocks on the device. host: blocks in host memory, for swapping.
      windows: of each KV group. table_width: logical blocks of the longest sequence.
      offload_evicted: keep prefix blocks that the device evicts in what is free on the host.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: BlockPool,
        *,
        block_size: int,
        windows: tuple[int, ...],
        table_width: int,
        offload_evicted: bool = False,
    ) -> None:
        self.pool, self.host = pool, host
        self.block_size, self.windows, self.table_width = block_size, windows, table_width
        self.num_groups = len(windows)
        self.stats = CacheStats()
        self._transfers = BlockTransfers()
        self._being_filled: set[bytes] = set()
        self._being_read: list[int] = []  # on the host, by this step's swap_ins
        if offload_evicted:
            pool.on_evict = self._offload

    # --- room ---

    def worst_case(self, prompt_len: int, length: int, width: int) -> int:
        """Blocks that `width` sequences of `length` stored tokens need at least to run on.

        The full blocks of the prompt are shared, and blocks that left a window given back.
        """
        full = self._blocks_for(length)
        shared = prompt_len // self.block_size if width > 1 else 0
        own = shared + width * (full - shared)
        return sum(min(own, width * min(full, self._span(w, 1))) for w in self.windows)

    def blocks_to_add(self, start: int, end: int, most: int) -> int:
        """Blocks to compute tokens `start:end` of a sequence, in chunks of at most `most`."""
        new = self._blocks_for(end) - start // self.block_size
        return sum(min(new, self._span(window, most)) for window in self.windows)

    def need(self, seq: Sequence, end: int) -> int:
        """Free blocks that `reserve` will take."""
        new = max(0, self._blocks_for(end) - seq.num_blocks) * self.num_groups
        return new + (len(self._shared_tail(seq)) if seq.shares_tail else 0)

    def room(self, seq: Sequence) -> int:
        """Tokens of a sequence that the free blocks have room for."""
        free = self.pool.num_free
        if seq.shares_tail:
            free -= len(self._shared_tail(seq))
        blocks = seq.num_blocks + free // self.num_groups
        return blocks * self.block_size - seq.num_computed_tokens if free >= 0 else 0

    def reserve(self, seq: Sequence, end: int) -> None:
        """Make the tables ready for the tokens up to `end`: new blocks, and a tail of its own."""
        if seq.shares_tail:
            self._own_tail(seq)
        new = self._blocks_for(end) - seq.num_blocks
        if new > 0:
            blocks = np.reshape(self.pool.allocate(new * self.num_groups), (self.num_groups, new))
            seq.tables[:, seq.num_blocks : seq.num_blocks + new] = blocks
            seq.num_blocks += new
        if seq.root is not None and end - seq.num_computed_tokens > 1:
            size = self.block_size
            self._being_filled.update(
                seq.block_hashes[seq.num_computed_tokens // size : end // size]
            )

    # --- prefixes ---

    def find_prefix(self, seq: Sequence, limit: int) -> PrefixHit:
        """The longest prefix of at most `limit` tokens that need not be computed.

        A group needs those blocks only that are still in its window at the prefix's end.
        """
        if seq.root is None:
            return PrefixHit(0, [], [], 0, False)
        self._extend_hashes(seq)
        most = limit // self.block_size
        hashes = seq.block_hashes
        length = self._longest_hit(hashes, most)
        is_coming = length < most and hashes[length] in self._being_filled
        device, host = [], []
        for group, window in enumerate(self.windows):
            for i in range(self._first_seen(length * self.block_size, window), length):
                if (block := self.pool.find((group, hashes[i]))) is not None:
                    device.append((group, i, block))
                elif (block := self.host.find((group, hashes[i]))) is not None:
                    host.append((group, i, block))
        free = sum(not self.pool.ref_count(block) for _, _, block in device)
        return PrefixHit(length, device, host, free + len(host), is_coming)

    def start(self, seq: Sequence, hit: PrefixHit) -> None:
        """Give a sequence its tables, with the blocks of the prefix that was found."""
        tables = np.zeros((self.num_groups, self.table_width), np.int32)
        # All of them are owned before anything is allocated, which may evict.
        self.pool.share(block for _, _, block in hit.device)
        self.host.share(block for _, _, block in hit.host)
        for group, i, block in hit.device:
            tables[group, i] = block
        new = self.pool.allocate(len(hit.host))
        for (group, i, on_host), block in zip(hit.host, new, strict=True):
            tables[group, i] = block
            self.pool.register(block, (group, seq.block_hashes[i]))
            self._transfers.swap_ins.append((on_host, block))
            self._being_read.append(on_host)
        seq.block_tables, seq.num_blocks = tables, hit.num_blocks
        seq.num_computed_tokens = hit.num_blocks * self.block_size
        seq.num_published = hit.num_blocks
        seq.first_blocks = [self._first_seen(seq.num_computed_tokens, w) for w in self.windows]

    def count(self, request: Request, hit: PrefixHit) -> None:
        """Take a request's first hit into the statistics."""
        found = hit.num_blocks * self.block_size
        self.stats.prefix_queries += request.prompt_len
        self.stats.prefix_hits += found
        self.stats.host_hits += len({i for _, i, _ in hit.host}) * self.block_size
        request.num_cached_tokens = found

    def advance(self, seq: Sequence, end: int) -> None:
        """After the dispatch of tokens up to `end`: make full blocks findable, drop old ones."""
        self.publish(seq)
        for group, window in enumerate(self.windows):
            if window > end:
                continue
            first, seen = seq.first_blocks[group], self._first_seen(end, window)
            if seen > first:
                table = seq.tables[group]
                self.pool.free(table[first:seen].tolist())
                table[first:seen] = 0
                seq.first_blocks[group] = seen

    def publish(self, seq: Sequence) -> None:
        """Make computed blocks findable whose tokens are all on the host.

        A window may have left a block before its last token came; that one is not kept.
        """
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        if seq.root is None or full <= seq.num_published:
            return
        self._extend_hashes(seq)
        for i in range(seq.num_published, full):
            for group in range(self.num_groups):
                if seq.tables[group, i]:
                    self._publish(seq, group, i)
        seq.num_published = full

    def _publish(self, seq: Sequence, group: int, i: int) -> None:
        """Make a full block findable, or take the one that is found already in its place.

        So a resumed request shares its prefix again, even if blocks of a window were gone by which
        the prefix is found.
        """
        block = int(seq.tables[group, i])
        known = self.pool.register(block, (group, seq.block_hashes[i]))
        if known != block:
            self.pool.share([known])
            self.pool.free([block])
            seq.tables[group, i] = known

    # --- the end of a sequence, and its copies ---

    def release(self, seq: Sequence) -> None:
        """Take the blocks of a sequence back, wherever they are."""
        if seq.block_tables is not None:
            pool = self.host if seq.request.is_swapped else self.pool
            pool.free(self._blocks_of(seq))
        seq.block_tables, seq.num_blocks, seq.num_computed_tokens = None, 0, 0
        seq.shares_tail = seq.token_on_device = False

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, the partial last one too."""
        self.pool.share(self._blocks_of(parent))
        child.block_tables = parent.tables.copy()
        child.num_blocks, child.first_blocks = parent.num_blocks, list(parent.first_blocks)
        child.block_hashes = list(parent.block_hashes)
        child.num_published = parent.num_published
        child.num_computed_tokens = parent.num_computed_tokens
        parent.shares_tail = child.shares_tail = True

    # --- swapping ---

    def blocks_of(self, request: Request) -> set[int]:
        """The different blocks of all sequences of a request."""
        return {b for seq in request.sequences for b in self._blocks_of(seq)}

    def swap_out(self, request: Request) -> None:
        """Move the blocks of a request to the host pool, where they must have room."""
        mapping: dict[int, int] = {}
        freed = [self._blocks_of(seq) for seq in request.sequences]
        for seq in request.sequences:
            for group, i, block in self._entries(seq):
                if block in mapping:
                    self.host.share([mapping[block]])
                else:
                    (mapping[block],) = self.host.allocate(1)
                seq.tables[group, i] = mapping[block]
            seq.token_on_device = False
        for blocks in freed:
            self.pool.free(blocks)
        self._transfers.swap_outs += mapping.items()
        self.stats.swapped_out += len(mapping)
        request.is_swapped = True

    def swap_in(self, request: Request) -> None:
        """Bring the blocks of a request back; those that the pool still has are shared."""
        mapping: dict[int, int] = {}
        for seq in request.sequences:
            for group, i, on_host in self._entries(seq):
                if on_host not in mapping:
                    mapping[on_host] = self._bring_back(seq, group, i, on_host)
                else:
                    self.pool.share([mapping[on_host]])
                seq.tables[group, i] = mapping[on_host]
                self._being_read.append(on_host)
        request.is_swapped = False

    def _bring_back(self, seq: Sequence, group: int, i: int, on_host: int) -> int:
        key: BlockKey | None = None
        if i < min(len(seq.block_hashes), seq.num_computed_tokens // self.block_size):
            key = (group, seq.block_hashes[i])
            block = self.pool.find(key)
            if block is not None:
                self.pool.share([block])
                return block
        (block,) = self.pool.allocate(1)
        if key is not None:
            self.pool.register(block, key)
        self._transfers.swap_ins.append((on_host, block))
        self.stats.swapped_in += 1
        return block

    def take_transfers(self) -> BlockTransfers:
        """What is to be moved before the step that is about to be dispatched."""
        transfers, self._transfers = self._transfers, BlockTransfers()
        last = {on_host: block for block, on_host in transfers.swap_outs}  # evicted there at once
        transfers.swap_outs = [(block, on_host) for on_host, block in last.items()]
        return transfers

    def end_step(self) -> None:
        """The step was dispatched: its swap_ins have read the host, its blocks are published."""
        self.host.free(self._being_read)
        self._being_read = []
        self._being_filled.clear()

    # --- details ---

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the invariants, between steps, given all requests that are not finished.

        Reference counts equal table entries, no block stands twice in a table, tables cover what
        was computed, and what a table holds is what the index says of it.
        """
        self.pool.check()
        self.host.check()
        counts = {False: Counter(), True: Counter(self._being_read)}
        for request in requests:
            for seq in request.sequences:
                if seq.block_tables is not None:
                    self._check_tables(seq)
                    counts[request.is_swapped].update(self._blocks_of(seq))
        for pool, count in ((self.pool, counts[False]), (self.host, counts[True])):
            for block in range(1, pool.num_blocks):
                assert pool.ref_count(block) == count[block], f"block {block}: references differ"

    def _check_tables(self, seq: Sequence) -> None:
        assert seq.num_computed_tokens <= seq.num_blocks * self.block_size
        assert not seq.tables[:, seq.num_blocks :].any()
        blocks = self._blocks_of(seq)
        assert len(set(blocks)) == len(blocks), "a block stands twice in a table"
        pool = self.host if seq.request.is_swapped else self.pool
        for group, window in enumerate(self.windows):
            seen = self._first_seen(seq.num_computed_tokens, window)
            assert seq.tables[group, seen : seq.num_blocks].all(), "a seen block is missing"
        for group, i, block in self._entries(seq):
            for known in seq.block_hashes[i : i + 1]:
                assert pool.key_of(block) in (None, (group, known)), f"block {block}: wrong key"

    def _longest_hit(self, hashes: list[bytes], most: int) -> int:
        """Logical blocks of the longest prefix, at most `most`, that every group can continue.

        A block that is missing in the window at one length is in the window at all lengths between
        it and that one, so the prefix is cut there, and the groups are asked anew.
        """
        length, group, agreed = most, 0, 0
        while agreed < self.num_groups:
            first = self._first_seen(length * self.block_size, self.windows[group])
            for i in range(first, length):
                key = (group, hashes[i])
                if self.pool.find(key) is None and self.host.find(key) is None:
                    length, agreed = i, 0
                    break
            else:
                group, agreed = (group + 1) % self.num_groups, agreed + 1
        return length

    def _extend_hashes(self, seq: Sequence) -> None:
        hashes, size = seq.block_hashes, self.block_size
        assert seq.root is not None
        for i in range(len(hashes), len(seq.token_ids) // size):
            parent = hashes[-1] if hashes else seq.root
            hashes.append(block_hash(parent, seq.token_ids[i * size : (i + 1) * size]))

    def _offload(self, block: int, key: BlockKey) -> None:
        """Keep an evicted prefix block on the host, if there is room."""
        if self.host.find(key) is None and self.host.num_free:
            (on_host,) = self.host.allocate(1)
            self.host.register(on_host, key)
            self.host.free([on_host])
            self._transfers.swap_outs.append((block, on_host))
            self.stats.offloaded += 1

    def _shared_tail(self, seq: Sequence) -> list[int]:
        """The groups in which the partial last block of a sequence has other owners."""
        i = seq.num_computed_tokens // self.block_size
        if i >= seq.num_blocks:
            return []
        return [g for g, b in enumerate(seq.tables[:, i].tolist()) if self.pool.ref_count(b) > 1]

    def _own_tail(self, seq: Sequence) -> None:
        """Copy-on-write: the first writer gets a copy, the last owner keeps the original."""
        i = seq.num_computed_tokens // self.block_size
        for group in self._shared_tail(seq):
            shared = int(seq.tables[group, i])
            (own,) = self.pool.allocate(1)
            self.pool.free([shared])
            seq.tables[group, i] = own
            self._transfers.copies.append((shared, own))
            self.stats.copied += 1
        seq.shares_tail = False

    def _entries(self, seq: Sequence) -> Iterator[tuple[int, int, int]]:
        """`(group, logical block, physical block)` of a sequence, from head to tail."""
        if seq.block_tables is not None:
            for i, blocks in enumerate(seq.tables[:, : seq.num_blocks].T.tolist()):
                yield from ((group, i, block) for group, block in enumerate(blocks) if block)

    def _blocks_of(self, seq: Sequence) -> list[int]:
        return [block for _, _, block in self._entries(seq)]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _first_seen(self, end: int, window: int) -> int:
        """The first logical block that the token behind `end` tokens sees."""
        return max(0, end - window + 1) // self.block_size

    def _span(self, window: int, chunk: int) -> int:
        """Most logical blocks that the tokens of a chunk see."""
        return self._blocks_for(window + chunk - 2) + 1
