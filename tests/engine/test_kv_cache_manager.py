"""Blocks of sequences: what is shared, copied, kept once and moved, by example.

`test_kv_cache_machine` tries everything in any order.
"""

from collections.abc import Callable

import pytest

from pagedjax.block_hash import root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.cache_stats import PrefixHit
from pagedjax.kv_cache_manager import KVCacheManager
from pagedjax.plan import BlockTransfers, ScheduledChunk
from pagedjax.request import Request, Sequence
from tests.engine.memory_model import Memory, make_request

NO_WINDOW = 2**30
ROOT = root_hash(0)


class Driver:
    """A manager with sequences that are computed to their last known token, step by step."""

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int = 1,
        *,
        block_size: int = 2,
        windows: tuple[int, ...] = (NO_WINDOW,),
        offload: bool = False,
    ):
        self.manager = KVCacheManager(
            BlockPool(num_blocks),
            BlockPool(num_host_blocks),
            block_size=block_size,
            windows=windows,
            table_width=20,
            offload_evicted=offload,
        )
        self.memory = Memory(self.manager)
        self.requests: list[Request] = []

    def new(self, *prompt: int, root: bytes | None = ROOT) -> Sequence:
        request = make_request(list(prompt), len(self.requests), root)
        self.requests.append(request)
        return request.sequences[0]

    def fork(self, parent: Sequence) -> Sequence:
        child = Sequence(parent.request, 1, list(parent.token_ids), 0, parent.root)
        parent.request.sequences.append(child)
        self.manager.fork(parent, child)
        return child

    def start(self, seq: Sequence) -> PrefixHit:
        hit = self.manager.find_prefix(seq, seq.num_tokens - 1)
        self.manager.start(seq, hit)
        return hit

    def step(self, *sequences: Sequence) -> BlockTransfers:
        """Start who has not started, compute everything, check everything."""
        manager, chunks = self.manager, []
        for seq in sequences:
            if seq.block_tables is None:
                self.start(seq)
            start, end = seq.num_computed_tokens, seq.num_tokens
            if start < end:
                manager.reserve(seq, end)
                chunks.append(ScheduledChunk(seq, start, end - start, (seq,)))
        transfers = manager.take_transfers()
        self.memory.move(transfers)
        self.memory.compute(chunks)
        for seq, start, num_tokens, _ in chunks:
            seq.num_computed_tokens = start + num_tokens
            manager.advance(seq, seq.num_computed_tokens)
        manager.end_step()
        self.check()
        return transfers

    def check(self) -> None:
        self.manager.check(self.requests)
        self.memory.check(self.requests)

    def fill(self, num_blocks: int) -> None:
        """Use so many free blocks for something that nobody will look for."""
        blocks = self.manager.pool.allocate(num_blocks)
        self.memory.move(self.manager.take_transfers())
        self.manager.pool.free(blocks)


def test_the_first_writer_of_a_shared_tail_copies_it_and_the_last_owner_keeps_it() -> None:
    driver = Driver(20, windows=(NO_WINDOW, NO_WINDOW))
    parent = driver.new(1, 2, 3)
    driver.step(parent)
    tail = parent.tables[:, 1].tolist()
    first, second = driver.fork(parent), driver.fork(parent)
    for token, seq in enumerate((parent, first, second)):
        seq.token_ids.append(10 + token)
    assert driver.step(parent).copies == [
        (tail[0], parent.tables[0, 1]),
        (tail[1], parent.tables[1, 1]),
    ]
    assert len(driver.step(first).copies) == 2
    assert driver.step(second).copies == []
    assert second.tables[:, 1].tolist() == tail
    assert (parent.tables[:, 0] == second.tables[:, 0]).all()
    assert driver.manager.stats.copied == 4


def test_a_fork_behind_a_full_block_copies_nothing() -> None:
    driver = Driver(20)
    parent = driver.new(1, 2)
    driver.step(parent)
    child = driver.fork(parent)
    for token, seq in enumerate((parent, child)):
        seq.token_ids.append(10 + token)
    assert driver.step(parent, child) == BlockTransfers()


def test_without_a_root_nothing_is_found_and_nobody_finds_it() -> None:
    driver = Driver(20)
    hidden = driver.new(1, 2, 3, root=None)
    driver.step(hidden)
    for root in (None, ROOT):
        seq = driver.new(1, 2, 3, root=root)
        assert driver.start(seq).num_blocks == 0
    assert hidden.block_hashes == []


def test_the_same_content_is_kept_once_even_if_it_was_computed_twice() -> None:
    driver = Driver(20)
    one, other = driver.new(1, 2, 3), driver.new(1, 2, 4)
    driver.step(one, other)  # nobody waited for the other
    assert one.tables[0, 0] == other.tables[0, 0]
    assert one.tables[0, 1] != other.tables[0, 1]


def test_a_sequence_that_does_not_know_its_hashes_yet_may_share_blocks_that_are_found() -> None:
    driver = Driver(20, 20)
    parent = driver.new(1, 2, 3)
    driver.step(parent)
    child, request = driver.fork(parent), parent.request
    driver.manager.pool.forget_keys()
    child.block_hashes = []
    parent.token_ids.append(4)
    driver.step(parent)
    driver.manager.swap_out(request)
    driver.step()
    driver.manager.swap_in(request)
    driver.step()
    assert driver.manager.pool.key_of(int(child.tables[0, 0])) == (0, parent.block_hashes[0])
    child.token_ids.append(5)
    driver.step(child)
    assert child.block_hashes[0] == parent.block_hashes[0]


def test_statistics_count_prompt_tokens_and_where_they_were_found() -> None:
    driver = Driver(10, 10, offload=True)
    first = driver.new(1, 2, 3, 4, 5)
    driver.manager.count(first.request, driver.start(first))
    driver.step(first)
    driver.manager.release(first)
    driver.fill(8)  # of 9 blocks; the head of the prompt is the last to go
    second = driver.new(1, 2, 3, 4, 5, 6)
    driver.manager.count(second.request, driver.start(second))
    driver.step(second)
    stats = driver.manager.stats
    assert (stats.prefix_queries, stats.prefix_hits, stats.host_hits) == (11, 4, 2)
    assert (stats.offloaded, stats.swapped_in, stats.swapped_out) == (1, 0, 0)
    assert (first.request.num_cached_tokens, second.request.num_cached_tokens) == (0, 4)


def test_an_evicted_block_goes_to_the_host_once_and_only_where_there_is_room() -> None:
    driver = Driver(5, 3, offload=True)  # 4 blocks on the device, 2 on the host
    for _ in range(3):
        seq = driver.new(1, 2, 3)
        driver.step(seq)
        driver.manager.release(seq)
        driver.fill(4)
    assert driver.manager.stats.offloaded == 1
    assert driver.manager.host.num_cached == 1
    swapped = driver.new(9, 9, 9)
    driver.step(swapped)
    driver.manager.swap_out(swapped.request)  # takes all of the host
    driver.fill(4)
    assert driver.manager.stats.offloaded == 1
    driver.check()


def test_host_blocks_that_a_step_reads_are_not_written_in_it() -> None:
    driver = Driver(5, 2, offload=True)  # 4 blocks on the device, 1 on the host
    old = driver.new(1, 2, 3)
    driver.step(old)
    driver.manager.release(old)
    driver.fill(4)
    recent = driver.new(7, 7, 7, 7, 7, 7, 7)
    driver.step(recent)  # the whole device
    driver.manager.release(recent)
    # `again` finds its block on the host, and what it evicts would go there.
    again = driver.new(1, 2, 3, 4, 5)
    transfers = driver.step(again)
    assert len(transfers.swap_ins) == 1
    assert transfers.swap_outs == []


def test_blocks_to_add_counts_what_a_window_needs_at_a_time() -> None:
    manager = Driver(5, block_size=4, windows=(6, NO_WINDOW)).manager
    assert manager.blocks_to_add(0, 10, most=100) == 3 + 3
    assert manager.blocks_to_add(8, 9, most=100) == 1 + 1
    assert manager.blocks_to_add(3, 100, most=8) == 4 + 25  # 13 tokens lie in 4 blocks at most
    assert manager.blocks_to_add(6, 8, most=8) == 1 + 1  # the block of a part is needed anew


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda driver, seq: driver.manager.pool.share([1]), "block 1: references differ"),
        (lambda driver, seq: driver.manager.host.allocate(1), "block 1: references differ"),
        (lambda driver, seq: seq.tables.__setitem__((0, 1), seq.tables[0, 0]), "twice in a table"),
        (lambda driver, seq: seq.tables.__setitem__((0, 0), 0), "missing"),
        (lambda driver, seq: seq.tables.__setitem__((0, 9), 1), None),
        (lambda driver, seq: seq.block_hashes.__setitem__(0, b"other"), "wrong key"),
        (lambda driver, seq: setattr(seq, "num_computed_tokens", 5), None),
    ],
)
def test_check_finds_corrupted_tables(
    corrupt: Callable[[Driver, Sequence], object], message: str | None
) -> None:
    driver = Driver(10, 10)
    seq = driver.new(1, 2, 3)
    driver.step(seq)
    corrupt(driver, seq)
    with pytest.raises(AssertionError, match=message):
        driver.manager.check(driver.requests)


def test_a_memory_that_holds_something_else_is_noticed() -> None:
    driver = Driver(10)
    seq = driver.new(1, 2, 3)
    driver.step(seq)
    driver.memory.move(BlockTransfers(copies=[(int(seq.tables[0, 1]), int(seq.tables[0, 0]))]))
    with pytest.raises(AssertionError, match="not its own token"):
        driver.memory.check(driver.requests)
    driver.manager.release(seq)
    with pytest.raises(AssertionError, match="other tokens than its hash says"):
        driver.memory.check(driver.requests)
