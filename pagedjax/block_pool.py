"""Ownership of the physical blocks: plain Python, no device arrays."""

from collections import OrderedDict
from collections.abc import Iterable

from pagedjax.errors import PagedJaxError


class OutOfBlocksError(PagedJaxError, MemoryError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Reference counts of the physical blocks `1 .. num_blocks - 1`; block 0 is the null block.

    The free blocks stand in the order in which they were freed, and the least recently used one
    is handed out first. Every operation costs O(blocks touched).
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # Ordered, with removal from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference.

        Raises:
          OutOfBlocksError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are owned already."""
        for block in blocks:
            if not self._ref_counts[block]:
                raise ValueError(f"block {block} is free and cannot be shared")
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
                self._free[block] = None

    def check(self) -> None:
        """Assert the invariants: a block is free exactly when nothing refers to it."""
        assert self._ref_counts[0] == 0, "the null block is never owned"
        assert 0 not in self._free, "the null block is never free"
        for block in range(1, self.num_blocks):
            assert (self._ref_counts[block] == 0) == (block in self._free), block
            assert self._ref_counts[block] >= 0, block
