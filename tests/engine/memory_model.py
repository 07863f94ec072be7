"""Memory without arrays: what a step moves and writes, in cells that say what they hold.

The key and value of a token depend on its layer group, its position, all tokens up to it and the
weights. A cell names exactly these, so two cells are equal if and only if what a device would hold
there is. `Memory` carries out plans as the runner does, and checks what is read.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pagedjax.block_hash import block_hash
from pagedjax.block_pool import BlockPool
from pagedjax.kv_cache_manager import KVCacheManager
from pagedjax.plan import BlockTransfers, ScheduledChunk
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import SamplingParams

Cell = tuple[int, int, int, int]
"""`(group, position, number of the prefix that ends there, version of the weights)`."""


def make_request(
    prompt: list[int], arrival: int = 0, root: bytes | None = None, **fields: Any
) -> Request:
    return Request(
        f"r{arrival}", tuple(prompt), SamplingParams(), arrival, seed=0, root=root, **fields
    )


class Memory:
    """The contents of the device's and the host's blocks.

    Attributes:
      weights: version of the weights that steps compute with.
      versions: the weights that a root stands for; roots that are not in it stand for any.
      pending: tokens of sequences that the device knows and the host does not.
      stopped: positions from which nothing of a sequence is of worth, nor need be there.
    """

    def __init__(self, manager: KVCacheManager):
        self.manager = manager
        self.weights = 0
        self.versions: dict[bytes, int] = {}
        self.pending: dict[Sequence, list[int]] = {}
        self.stopped: dict[Sequence, int] = {}
        size = manager.block_size
        self._device: list[list[Cell | None]] = [[None] * size] * manager.pool.num_blocks
        self._host: list[list[Cell | None]] = [[None] * size] * manager.host.num_blocks
        self._prefixes: dict[tuple[int, int], int] = {}
        self._hashes: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        # Root, first position and prefixes of the block that a hash stands for.
        self._meanings: dict[bytes, tuple[bytes, int, list[int]]] = {}

    # --- what the runner does ---

    def move(self, transfers: BlockTransfers) -> None:
        """Carry out transfers in their order. Blocks are replaced, never changed in place."""
        for pairs in (transfers.swap_outs, transfers.swap_ins, transfers.copies):
            assert all(source and target for source, target in pairs), "the null block moves"
            targets = [target for _, target in pairs]
            assert len(set(targets)) == len(targets), "a block is written twice in one call"
        for block, on_host in transfers.swap_outs:
            self._host[on_host] = self._device[block]
        for on_host, block in transfers.swap_ins:
            self._device[block] = self._host[on_host]
        copied = [self._device[source] for source, _ in transfers.copies]
        for (_, target), cells in zip(transfers.copies, copied, strict=True):
            self._device[target] = cells

    def tokens_of(self, seq: Sequence) -> list[int]:
        """All its tokens, as the device knows them."""
        return seq.token_ids + self.pending.get(seq, [])

    def compute(
        self, chunks: Iterable[ScheduledChunk], until: Mapping[Sequence, int] | None = None
    ) -> None:
        """Read and write as a step of these chunks does, without any order among them.

        `until`: positions from which on sequences are not computed though it was planned.
        """
        until = until or {}
        chunks = list(chunks)
        for chunk in chunks:  # what lies before a chunk was there before the step
            self._check_seen(chunk.sequence, self._device, chunk.start, chunk.start)
        written: set[int] = set()
        for chunk in chunks:
            blocks = self._write(chunk, min(chunk.end, until.get(chunk.sequence, chunk.end)))
            assert not written & blocks, "two sequences write to one block in one step"
            written |= blocks
        for chunk in chunks:
            self._check_seen(chunk.sequence, self._device, chunk.start, chunk.end)
        for chunk in chunks:
            for seq in (chunk.sequence, *chunk.samplers):
                self.learn(seq)

    def _write(self, chunk: ScheduledChunk, end: int) -> set[int]:
        seq, size, pool = chunk.sequence, self.manager.block_size, self.manager.pool
        prefixes = self._prefixes_of(self.tokens_of(seq)[:end])
        blocks: set[int] = set()
        for group in range(self.manager.num_groups):
            for position in range(chunk.start, end):
                block = int(seq.tables[group, position // size])
                assert block, "a token has no place"
                cells = list(self._device[block])
                cells[position % size] = (group, position, prefixes[position], self.weights)
                self._device[block] = cells
                blocks.add(block)
        for block in blocks:
            assert pool.key_of(block) is None, f"block {block} changes while it can be found"
            owners = pool.ref_count(block)
            assert owners == max(1, len(chunk.samplers)), f"block {block} is written and shared"
        return blocks

    # --- what must hold between steps ---

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that everybody sees what they computed, and that hashes tell the truth."""
        for request in requests:
            for seq in request.sequences:
                if seq.block_tables is not None:
                    cells = self._host if request.is_swapped else self._device
                    computed = seq.num_computed_tokens
                    self._check_seen(seq, cells, computed, computed)
        self._check_index(self.manager.pool, self._device)
        self._check_index(self.manager.host, self._host)

    def _check_seen(
        self, seq: Sequence, blocks: list[list[Cell | None]], start: int, end: int
    ) -> None:
        """Assert that tokens from `start` on see the cells before `end` as they should be."""
        size = self.manager.block_size
        end = min(end, self.stopped.get(seq, end))
        prefixes = self._prefixes_of(self.tokens_of(seq)[:end])
        version = None if seq.root is None else self.versions.get(seq.root)
        for group, window in enumerate(self.manager.windows):
            for position in range(max(0, start - window + 1), end):
                cell = blocks[seq.tables[group, position // size]][position % size]
                assert cell is not None, f"nothing is at {position} in group {group}"
                assert cell[:3] == (group, position, prefixes[position]), "not its own token"
                assert version is None or cell[3] == version, "computed with other weights"

    def _check_index(self, pool: BlockPool, blocks: list[list[Cell | None]]) -> None:
        for block in range(1, pool.num_blocks):
            key = pool.key_of(block)
            if key is None:
                continue
            group, block_id = key
            root, first, prefixes = self._meanings[block_id]
            version = self.versions.get(root)
            for offset, cell in enumerate(blocks[block]):
                assert cell is not None, f"block {block} is not full but can be found"
                expected = (group, first + offset, prefixes[offset])
                assert cell[:3] == expected, f"block {block} holds other tokens than its hash says"
                assert version is None or cell[3] == version, "computed with other weights"

    # --- names ---

    def _prefixes_of(self, token_ids: list[int]) -> list[int]:
        """For every token a number that stands for it and all before it."""
        found: list[int] = []
        prefix = 0
        for token in token_ids:
            prefix = self._prefixes.setdefault((prefix, token), len(self._prefixes) + 1)
            found.append(prefix)
        return found

    def learn(self, seq: Sequence) -> None:
        """Note what the hashes of a sequence's full blocks stand for, of tokens on the host."""
        if seq.root is None:
            return
        size, parent = self.manager.block_size, seq.root
        prefixes = self._prefixes_of(seq.token_ids)
        for i in range(len(seq.token_ids) // size):
            tokens = tuple(seq.token_ids[i * size : (i + 1) * size])
            if (parent, tokens) not in self._hashes:
                self._hashes[parent, tokens] = block_hash(parent, tokens)
            parent = self._hashes[parent, tokens]
            self._meanings[parent] = seq.root, i * size, prefixes[i * size : (i + 1) * size]
            known = seq.block_hashes[i : i + 1]
            assert known in ([], [parent]), "a hash is not that of its block"
