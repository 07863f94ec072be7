"""The block pool hands out every block once, takes it back once, and reuses the oldest first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedjax.block_pool import BlockPool, OutOfBlocksError

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """Sequences that allocate, share and free, against a model: a list of free blocks and the
    blocks that every sequence holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = list(range(1, NUM_BLOCKS))
        self.sequences: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocksError, match=f"{count} blocks.* {len(self.free)} free"):
                self.pool.allocate(count)
        else:
            blocks = self.pool.allocate(count)
            assert blocks == self.free[:count]
            self.free = self.free[count:]
            self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if self.free:
            sequence += self.pool.allocate(1)
            assert sequence[-1] == self.free.pop(0)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        prefix = sequence[: data.draw(st.integers(0, len(sequence)))]
        self.pool.share(prefix)
        self.sequences.append(prefix)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        sequence = self.sequences.pop(index)
        self.pool.free(sequence)
        self.free += [b for b in reversed(sequence) if not self._holders(b)]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def refuses_to_touch_free_blocks(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([0, *self.free]))
        with pytest.raises(ValueError, match=f"block {block} is free"):
            self.pool.share([block])
        with pytest.raises(ValueError, match=f"block {block} is free"):
            self.pool.free([block])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free)
        for block in range(NUM_BLOCKS):
            assert self.pool.ref_count(block) == self._holders(block)

    def _holders(self, block: int) -> int:
        return sum(block in sequence for sequence in self.sequences)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_the_null_block_is_not_usable_and_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_usable == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.ref_count(0) == 0


def test_out_of_blocks_takes_nothing() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(2) == [3, 4]


def test_freed_blocks_are_reused_oldest_first_and_the_tail_of_a_sequence_before_its_head() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(2)  # 6 and 7 stay free
    pool.free(second)
    pool.free(first)
    assert pool.allocate(7) == [6, 7, 5, 4, 3, 2, 1]


def test_a_shared_block_becomes_free_with_its_last_reference() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.free(blocks)
    assert (pool.num_free, pool.ref_count(blocks[0])) == (2, 1)
    pool.free(blocks[:1])
    assert pool.num_free == 3


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._free.update({1: None}), "1"),
        (lambda pool: pool._free.pop(3), "3"),
        (lambda pool: pool._free.update({0: None}), "null block"),
    ],
)
def test_check_finds_a_corrupted_pool(corrupt, message: str) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
