"""The block pool hands out every block once, takes it back once, and forgets the oldest first."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedjax.block_pool import BlockKey, BlockPool, OutOfBlocksError

NUM_BLOCKS = 9
KEYS = [(group, name) for group in range(2) for name in (b"a", b"b", b"c")]


class PoolMachine(RuleBasedStateMachine):
    """Sequences that allocate, share, name and free blocks, against a model.

    The model is two lists of free blocks, without and with a key, oldest first, the key of every
    block that has one, and the blocks that every sequence holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[tuple[int, BlockKey]] = []
        self.pool = BlockPool(NUM_BLOCKS, lambda block, key: self.evicted.append((block, key)))
        self.blank = list(range(1, NUM_BLOCKS))
        self.cached: list[int] = []
        self.keys: dict[int, BlockKey] = {}
        self.sequences: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        num_free = len(self.blank) + len(self.cached)
        if count > num_free:
            with pytest.raises(OutOfBlocksError, match=f"{count} blocks.* {num_free} free"):
                self.pool.allocate(count)
        else:
            self.sequences.append(self._take(count))

    @precondition(lambda self: self.sequences and (self.blank or self.cached))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence += self._take(1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        prefix = sequence[: data.draw(st.integers(0, len(sequence)))]
        self.pool.share(prefix)
        self.sequences.append(prefix)

    @rule(key=st.sampled_from(KEYS))
    def share_what_is_found(self, key: BlockKey) -> None:
        block = self.pool.find(key)
        assert block == next((b for b, own in self.keys.items() if own == key), None)
        if block is not None:
            self.pool.share([block])
            self.sequences.append([block])
            self.cached = [b for b in self.cached if b != block]

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def register(self, data: st.DataObject, key: BlockKey) -> None:
        block = data.draw(st.sampled_from([b for sequence in self.sequences for b in sequence]))
        self.pool.register(block, key)
        if key not in self.keys.values():
            self.keys.setdefault(block, key)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        sequence = self.sequences.pop(index)
        self.pool.free(sequence)
        for block in reversed(sequence):  # the tail is the first to be reused
            if not self._holders(block):
                (self.cached if block in self.keys else self.blank).append(block)

    @rule()
    def forget_keys(self) -> None:
        self.pool.forget_keys()
        self.keys.clear()
        self.blank, self.cached = self.blank + self.cached, []

    @precondition(lambda self: self.blank or self.cached)
    @rule(data=st.data())
    def refuses_to_touch_free_blocks(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([0, *self.blank, *self.cached]))
        message = f"block {block} is free"
        with pytest.raises(ValueError, match=message):
            self.pool.free([block])
        with pytest.raises(ValueError, match=message):
            self.pool.register(block, KEYS[0])
        if block not in self.cached:
            with pytest.raises(ValueError, match=message):
                self.pool.share([block])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.blank) + len(self.cached)
        assert self.pool.num_cached == len(self.cached)
        for block in range(NUM_BLOCKS):
            assert self.pool.ref_count(block) == self._holders(block)
            assert self.pool.key_of(block) == self.keys.get(block)
        for key in KEYS:
            assert (self.pool.find(key) is not None) == (key in self.keys.values())

    def _take(self, count: int) -> list[int]:
        """Allocate, as the model says: blank blocks first, then cached ones, which are evicted."""
        expected = [*self.blank, *self.cached][:count]
        evicted = [(block, self.keys.pop(block)) for block in expected if block in self.cached]
        self.evicted.clear()
        assert self.pool.allocate(count) == expected
        assert self.evicted == evicted
        self.blank = [b for b in self.blank if b not in expected]
        self.cached = [b for b in self.cached if b not in expected]
        return expected

    def _holders(self, block: int) -> int:
        return sum(block in sequence for sequence in self.sequences)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestPoolMachineDeeply(PoolMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=100, deadline=None)


def test_the_null_block_is_not_usable_and_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_usable == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.ref_count(0) == 0


def test_out_of_blocks_takes_and_evicts_nothing() -> None:
    evicted: list[tuple[int, BlockKey]] = []
    pool = BlockPool(5, lambda *block_and_key: evicted.append(block_and_key))
    cached = pool.allocate(1)
    pool.register(cached[0], KEYS[0])
    pool.free(cached)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert (pool.num_free, pool.num_cached, evicted) == (2, 1, [])
    assert pool.allocate(2) == [4, 1]


def test_freed_blocks_are_reused_oldest_first_and_the_tail_of_a_sequence_before_its_head() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(2)  # 6 and 7 stay free
    pool.free(second)
    pool.free(first)
    assert pool.allocate(7) == [6, 7, 5, 4, 3, 2, 1]


def test_cached_blocks_are_evicted_after_blank_ones_the_least_recently_used_first() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    for block, key in zip(blocks[:3], KEYS, strict=False):
        pool.register(block, key)
    pool.free(blocks)  # 4 is blank; 3, 2, 1 are cached in this order, the tail first
    pool.share([3])
    pool.free([3])  # used again, so the last to go
    assert pool.allocate(5) == [5, 4, 2, 1, 3]
    assert [pool.find(key) for key in KEYS] == [None] * len(KEYS)


def test_the_first_block_with_a_key_keeps_it_and_a_block_keeps_its_first_key() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    pool.register(1, KEYS[0])
    pool.register(2, KEYS[0])
    pool.register(1, KEYS[1])
    assert (pool.key_of(1), pool.key_of(2)) == (KEYS[0], None)
    assert (pool.find(KEYS[0]), pool.find(KEYS[1])) == (1, None)


def test_an_evicted_block_is_not_found_by_the_one_who_is_told_of_it() -> None:
    seen: list[int | None] = []
    pool = BlockPool(2, lambda block, key: seen.append(pool.find(key)))
    pool.register(*pool.allocate(1), KEYS[0])
    pool.free([1])
    pool.allocate(1)
    assert seen == [None]


def test_a_shared_block_becomes_free_with_its_last_reference() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.free(blocks)
    assert (pool.num_free, pool.ref_count(blocks[0])) == (2, 1)
    pool.free(blocks[:1])
    assert pool.num_free == 3


def test_forgotten_blocks_stay_with_their_owners_and_can_be_named_anew() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.register(1, KEYS[0])
    pool.register(2, KEYS[1])
    pool.free([2])
    pool.forget_keys()
    assert (pool.ref_count(1), pool.num_cached, pool.num_free) == (1, 0, 2)
    pool.register(1, KEYS[1])
    assert pool.find(KEYS[1]) == 1
    pool.check()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._blank.append(1), "block 1 is lost or free twice"),
        (lambda pool: pool._blank.remove(4), "block 4 is lost"),
        (lambda pool: pool._blank.append(4), "free twice"),
        (lambda pool: pool._blank.append(0), "null block"),
        (lambda pool: pool._cached.update({0: None}), "null block"),
        (lambda pool: pool._blank.append(3), "both blank and cached"),
        (lambda pool: pool._cached.update({1: None}), "block 1 is lost or free twice"),
        (lambda pool: pool._cached.pop(3), "block 3 is lost"),
        (lambda pool: pool._ref_counts.__setitem__(1, -1), "negative"),
        (lambda pool: pool._ref_counts.__setitem__(0, 1), "null block"),
        (lambda pool: pool._keys.__setitem__(4, KEYS[5]), "blank 4 has a key"),
        (lambda pool: pool._keys.__setitem__(3, None), "cached 3: no key"),
        (lambda pool: pool._keys.__setitem__(2, None), "index and the keys"),
        (lambda pool: pool._index.pop(KEYS[0]), "index and the keys"),
        (lambda pool: pool._index.update({KEYS[5]: 1}), "index and the keys"),
    ],
)
def test_check_finds_a_corrupted_pool(corrupt: Callable[[BlockPool], object], message: str) -> None:
    pool = BlockPool(5)  # 1 and 2 are owned, 2 and 3 have a key, 3 is cached, 4 blank
    pool.allocate(3)
    pool.register(2, KEYS[0])
    pool.register(3, KEYS[1])
    pool.free([3])
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
