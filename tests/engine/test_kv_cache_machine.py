"""Whatever is shared, copied, swapped and found again: everybody sees their own tokens only."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pagedjax.block_hash import block_hash, private_root, root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.cache_stats import PrefixHit
from pagedjax.kv_cache_manager import KVCacheManager
from pagedjax.plan import BlockTransfers, ScheduledChunk
from pagedjax.request import Request, Sequence
from tests.engine.memory_model import Memory, make_request

NO_WINDOW = 2**30
LONGEST = 24
MOST_REQUESTS = 5
TOKENS = st.integers(0, 1)


def seen(position: int, window: int) -> range:
    """What the token at `position` sees before it."""
    return range(max(0, position - window + 1), position)


class ManagerMachine(RuleBasedStateMachine):
    """Requests that start, grow, fork, are swapped and dropped in any order that is allowed.

    Between two dispatches a step is put together. Whoever has a part in it keeps what they have
    until it is dispatched; others can be preempted, and their blocks be used, in the same step.
    """

    @initialize(
        windows=st.lists(st.sampled_from([1, 3, 5, NO_WINDOW]), min_size=1, max_size=3),
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(0, 20),
        num_host_blocks=st.sampled_from([1, 4, 10, 40]),
        offload=st.booleans(),
    )
    def begin(
        self,
        windows: list[int],
        block_size: int,
        spare_blocks: int,
        num_host_blocks: int,
        offload: bool,
    ) -> None:
        width = -(-LONGEST // block_size)  # of a table
        self.manager = KVCacheManager(
            BlockPool(1 + width * len(windows) + spare_blocks),
            BlockPool(num_host_blocks),
            block_size=block_size,
            windows=tuple(windows),
            table_width=width,
            offload_evicted=offload,
        )
        self.memory = Memory(self.manager)
        self.requests: list[Request] = []
        self.num_arrivals = 0
        self.num_steps = 0
        self.version = 0
        self.chunks: list[ScheduledChunk] = []
        self.is_open = False  # something is to be dispatched
        self.has_part: set[Request] = set()

    # --- between steps ---

    @precondition(lambda self: len(self.requests) < MOST_REQUESTS)
    @rule(
        common=st.integers(0, LONGEST),
        rest=st.lists(TOKENS, max_size=4),
        root=st.sampled_from(["shared", "shared", "shared", "private", None]),
    )
    def arrive(self, common: int, rest: list[int], root: str | None) -> None:
        self.num_arrivals += 1
        own = private_root(self.num_arrivals) if root == "private" else None
        chosen = root_hash(self.version) if root == "shared" else own
        if chosen is not None:
            self.memory.versions[chosen] = self.version
        prompt = ([0, 0, 1] * common)[:common] + rest
        self.requests.append(make_request(prompt[:LONGEST] or [1], self.num_arrivals, chosen))

    @precondition(lambda self: not self.is_open and self.forkable())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.forkable()))
        free = self.manager.pool.num_free
        self.new_fork(parent)
        assert self.manager.pool.num_free == free

    @precondition(lambda self: not self.is_open and self.requests)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([s for r in self.requests for s in r.sequences]))
        self.manager.release(seq)
        seq.request.sequences.remove(seq)
        self.requests = [request for request in self.requests if request.sequences]

    @precondition(lambda self: not self.is_open and self.num_steps % 10 == 9)
    @rule(new_weights=st.booleans())
    def forget(self, new_weights: bool) -> None:
        """Everything that can be found; or everybody ends, and who comes has other weights."""
        if not new_weights:
            self.manager.pool.forget_keys()
            self.manager.host.forget_keys()
            return
        for request in self.requests:
            for seq in request.sequences:
                self.manager.release(seq)
        self.requests = []
        self.version += 1
        self.memory.weights += 1

    # --- a step is put together ---

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def recompute_later(self, data: st.DataObject) -> None:
        for seq in data.draw(st.sampled_from(self.idle())).sequences:
            self.manager.release(seq)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.idle()))
        manager, blocks = self.manager, self.manager.blocks_of(request)
        if len(blocks) <= manager.host.num_free:
            free = manager.host.num_free
            manager.swap_out(request)
            assert manager.host.num_free == free - len(blocks), "the sequences go on sharing"
            self.is_open = True

    @precondition(lambda self: self.swapped())
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.swapped()))
        if len(self.manager.blocks_of(request)) <= self.manager.pool.num_free:
            self.manager.swap_in(request)
            self.take_part(request)

    @rule(random=st.randoms(), is_dispatched=st.sampled_from([True, True, False]))
    def compute(self, random: Random, is_dispatched: bool) -> None:
        """Some of the running sequences, each so far as there is room."""
        busy = {seq for chunk in self.chunks for seq in (chunk.sequence, *chunk.samplers)}
        for request in random.sample(self.requests, k=len(self.requests)):
            if request.is_swapped or random.random() < 0.2:
                continue
            for seq in tuple(request.sequences):
                if seq.block_tables is None:
                    self.start(seq, random.choice([seq.num_tokens - 1, seq.num_tokens // 2]))
                if seq.block_tables is not None and seq not in busy:
                    self.compute_more(seq, random)
        if is_dispatched:
            self.dispatch()

    def start(self, seq: Sequence, limit: int) -> None:
        manager = self.manager
        hit = manager.find_prefix(seq, limit)
        self.check_hit(seq, hit, limit)
        free = manager.pool.num_free
        if not hit.is_coming and hit.num_unowned <= free:
            manager.start(seq, hit)
            assert manager.pool.num_free == free - hit.num_unowned
            assert seq.num_computed_tokens == hit.num_blocks * manager.block_size <= limit
            self.take_part(seq.request)

    def compute_more(self, seq: Sequence, random: Random) -> None:
        manager, start = self.manager, seq.num_computed_tokens
        if start == seq.num_tokens < LONGEST:
            seq.token_ids.append(random.randrange(2))
        room = min(manager.room(seq), seq.num_tokens - start)
        self.check_room(seq, room)
        if room <= 0:
            return
        end = start + random.choice([room, room, random.randint(1, room)])
        free, need = manager.pool.num_free, manager.need(seq, end)
        manager.reserve(seq, end)
        assert manager.pool.num_free == free - need
        is_last = end == seq.num_tokens
        num_forks = random.choice([0, 0, 2]) if is_last and len(seq.request.sequences) < 2 else 0
        samplers = (seq, *(self.new_fork(seq) for _ in range(num_forks)))
        self.chunks.append(ScheduledChunk(seq, start, end - start, samplers if is_last else ()))
        self.take_part(seq.request)

    @precondition(lambda self: self.is_open)
    @rule()
    def dispatch(self) -> None:
        manager = self.manager
        self.memory.move(manager.take_transfers())
        self.memory.compute(self.chunks)
        for chunk in self.chunks:
            for seq in chunk.samplers or (chunk.sequence,):
                seq.num_computed_tokens = chunk.end
                manager.advance(seq, chunk.end)
        manager.end_step()
        assert manager.take_transfers() == BlockTransfers()
        for chunk in self.chunks:
            self.check_findable(chunk)
        self.num_steps += 1
        self.chunks, self.is_open = [], False
        self.has_part.clear()

    # --- what must hold ---

    @invariant()
    def everything_is_right(self) -> None:
        self.manager.pool.check()
        self.manager.host.check()
        if not self.is_open:
            self.manager.check(self.requests)
            self.memory.check(self.requests)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.dispatch()
            for request in self.requests:
                for seq in request.sequences:
                    self.manager.release(seq)
            for pool in (self.manager.pool, self.manager.host):
                assert pool.num_free == pool.num_usable

    def check_hit(self, seq: Sequence, hit: PrefixHit, limit: int) -> None:
        """Against all prefixes, the longest first."""
        manager, size = self.manager, self.manager.block_size
        hashes = []
        if seq.root is not None:
            parent = seq.root
            for i in range(seq.num_tokens // size):
                parent = block_hash(parent, seq.token_ids[i * size : (i + 1) * size])
                hashes.append(parent)

        def needed(length: int) -> Iterator[tuple[int, int]]:
            for group, window in enumerate(manager.windows):
                for i in sorted({p // size for p in seen(length * size, window)}):
                    yield group, i

        def is_there(group: int, i: int) -> bool:
            key = (group, hashes[i])
            return manager.pool.find(key) is not None or manager.host.find(key) is not None

        possible = range(min(limit // size, len(hashes)), -1, -1)
        longest = next(n for n in possible if all(is_there(*place) for place in needed(n)))
        assert hit.num_blocks == longest
        found = [(group, i) for group, i, _ in (*hit.device, *hit.host)]
        assert sorted(found) == sorted(needed(longest))
        for group, i, block in hit.device:
            assert manager.pool.key_of(block) == (group, hashes[i])
        for group, i, block in hit.host:
            assert manager.host.key_of(block) == (group, hashes[i])
            assert manager.pool.find((group, hashes[i])) is None
        if hit.is_coming:
            assert hashes[longest] in self.being_filled()
        elif longest < possible[0]:
            assert hashes[longest] not in self.being_filled()

    def being_filled(self) -> set[bytes]:
        size = self.manager.block_size
        return {
            block
            for seq, start, num_tokens, _ in self.chunks
            if num_tokens > 1
            for block in seq.block_hashes[start // size : (start + num_tokens) // size]
        }

    def check_room(self, seq: Sequence, room: int) -> None:
        start, free = seq.num_computed_tokens, self.manager.pool.num_free
        if room > 0:
            assert self.manager.need(seq, start + room) <= free
        if room < seq.num_tokens - start:
            assert self.manager.need(seq, start + max(room, 0) + 1) > free

    def check_findable(self, chunk: ScheduledChunk) -> None:
        """Full blocks can be found, and those that left a window are given back."""
        manager, size = self.manager, self.manager.block_size
        for seq in chunk.samplers or (chunk.sequence,):
            if seq.root is not None:
                for i in range(chunk.start // size, chunk.end // size):
                    for group in range(manager.num_groups):
                        found = manager.pool.find((group, seq.block_hashes[i]))
                        assert found is not None
                        assert seq.tables[group, i] in (0, found), "the same is kept once"
            for group, window in enumerate(manager.windows):
                owned = {i for i in range(seq.num_blocks) if seq.tables[group, i]}
                # The next token needs the block it will be in, too, if that has begun.
                places = {p // size for p in (*seen(chunk.end, window), chunk.end)}
                assert owned == {i for i in places if i < seq.num_blocks}

    # --- who can do what ---

    def idle(self) -> list[Request]:
        """Running requests with blocks and without a part in the step."""
        return [
            request
            for request in self.requests
            if not request.is_swapped
            and request not in self.has_part
            and self.manager.blocks_of(request)
        ]

    def swapped(self) -> list[Request]:
        return [r for r in self.requests if r.is_swapped and r not in self.has_part]

    def forkable(self) -> list[Sequence]:
        running = [r for r in self.requests if not r.is_swapped and len(r.sequences) < 4]
        return [s for r in running for s in r.sequences if s.block_tables is not None]

    def new_fork(self, parent: Sequence) -> Sequence:
        request = parent.request
        request.num_sequences += 1
        child = Sequence(request, request.num_sequences, list(parent.token_ids), 0, parent.root)
        request.sequences.append(child)
        self.manager.fork(parent, child)
        return child

    def take_part(self, request: Request) -> None:
        self.has_part.add(request)
        self.is_open = True


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


@pytest.mark.slow
class TestManagerMachineDeeply(ManagerMachine.TestCase):
    settings = settings(
        max_examples=200,
        stateful_step_count=150,
        deadline=None,
        suppress_health_check=[HealthCheck.large_base_example, HealthCheck.data_too_large],
    )
