"""Ownership of physical blocks and what they hold: plain Python, no device arrays."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from pagedjax.errors import PagedJaxError

BlockKey = tuple[int, bytes]
"""What a full block holds: its KV group and the hash of the prefix it ends (`block_hash`)."""


class OutOfBlocksError(PagedJaxError, MemoryError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Reference counts of the physical blocks `1 .. num_blocks - 1`; block 0 is the null block.

    A block is owned (it has references), or free. A free block that has a key is cached: it can be
    found by that key and owned again until it is handed out for something else. Free blocks without
    a key are handed out first, then the least recently used of the cached ones. Every operation
    costs O(blocks touched).

    Args:
      on_evict: called with `(block, key)` when a cached block is handed out and so loses its key.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int, BlockKey], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._blank: deque[int] = deque(range(1, num_blocks))
        # In the order of their last use, with removal from the middle in O(1).
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[BlockKey, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that can still be found by their key."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def key_of(self, block: int) -> BlockKey | None:
        return self._keys[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference and no key.

        Raises:
          OutOfBlocksError: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} free")
        blank = min(count, len(self._blank))
        blocks = [self._blank.popleft() for _ in range(blank)]
        blocks += [self._evict() for _ in range(count - blank)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are owned or cached."""
        for block in blocks:
            if not self._ref_counts[block]:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block of a sequence, given from head to tail.

        Blocks without references become free, the tail first: it is the least useful to keep.
        """
        for block in reversed(list(blocks)):
            if not self._ref_counts[block]:
                raise ValueError(f"block {block} is free already")
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                if self._keys[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, key: BlockKey) -> int:
        """Make an owned block findable by `key`, unless another is; returns the one that is."""
        if not self._ref_counts[block]:
            raise ValueError(f"block {block} is free and cannot get a key")
        if key not in self._index and self._keys[block] is None:
            self._keys[block] = key
            self._index[key] = block
        return self._index.get(key, block)

    def find(self, key: BlockKey) -> int | None:
        """The block, owned or cached, that holds `key`."""
        return self._index.get(key)

    def forget_keys(self) -> None:
        """Make no block findable any more; owners keep theirs."""
        self._index.clear()
        self._keys = [None] * self.num_blocks
        self._blank.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Assert the invariants: every block is free, cached or owned, and the index is right."""
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a block is free twice"
        assert not blank & cached, "a block is both blank and cached"
        assert self._ref_counts[0] == 0, "the null block is never owned"
        assert 0 not in blank | cached, "the null block is never free"
        for block in range(1, self.num_blocks):
            assert self._ref_counts[block] >= 0, f"block {block} has negative references"
            free = block in blank or block in cached
            assert (self._ref_counts[block] == 0) == free, f"block {block} is lost or free twice"
            assert block not in blank or self._keys[block] is None, f"blank {block} has a key"
            assert block not in cached or self._keys[block] is not None, f"cached {block}: no key"
        held = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert held == self._index, "the index and the keys of the blocks differ"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._index[key]
        self._keys[block] = None
        if self.on_evict is not None:
            self.on_evict(block, key)
        return block
