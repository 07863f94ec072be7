"""Moving blocks between the device's pool and host memory, and copying them on the device.

    pool[Lg, P, KVH, T, width]  -- gather -->  [M, Lg, KVH, T, width]  -- link -->  host[H, Lg, ...]
                                <- scatter --                          <-- link --

and the scales of quantized pools beside it, in arrays of their own. A call moves one of a few fixed
numbers M of blocks, padded, so that few programs are compiled. On the way out the device gathers
and sends while it goes on computing; the host takes delivery when somebody reads the block, or when
too many bytes are on their way. What a call reads from the pool is what the pool held when it was
called: JAX runs programs in the order in which they were dispatched, also before one that is given
the pool to overwrite.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from pagedjax.models.decoder import KVCache
from pallas_kernels import copy_blocks, gather_blocks, scatter_blocks

BlockPairs = list[tuple[int, int]]
"""(source, target) of blocks to copy."""

_SIZES = (8, 32, 128)  # blocks a call
_CALL_BYTES = 32 << 20  # a call of more than the smallest size moves no more
_PENDING_BYTES = 256 << 20  # gathered on the device and not yet taken by the host
_NULL = 0  # pads what is read; its contents go nowhere
_ROUND_TRIPS = 5


class Blocks(NamedTuple):
    """Contents of M blocks: rows [M, Lg, KVH, T, width], scales u32[M, Lg, KVH, T] or None."""

    rows: Any
    scales: Any

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self))


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """Blocks on their way out: the i-th of `values` goes to `host_blocks[i]`."""

    values: Blocks
    host_blocks: list[int]


class HostBlocks:
    """The contents of blocks in host memory, and the transfers from and to the device's pool.

    Which block is free and what it holds is the caller's to know. Block 0 pads on both sides and is
    nobody's. Targets in one call are all different. Contents are opaque: values or their bits.

    Args:
      cache: the pool that the blocks come from and return to; its shape must stay.
      num_blocks: of host memory, the unused block 0 included (as in `BlockPool`); below 2 there are
        none. Memory is committed as blocks are first written.
      max_copies: the most pairs that `copy` takes.
    """

    def __init__(self, cache: KVCache, num_blocks: int, max_copies: int):
        self._nowhere = cache.pool.shape[1]  # a target >= P is dropped
        self._contents = _empty(cache, num_blocks)
        block_bytes = Blocks(cache.pool, cache.scales).nbytes // self._nowhere
        self._sizes = [n for n in _SIZES if n == _SIZES[0] or n * block_bytes <= _CALL_BYTES]
        self._copy_sizes = [*(n for n in _SIZES if n < max_copies), max_copies]
        self._pending: list[_Transfer] = []  # oldest first
        self._link_bytes_per_s: float | None = None

    def swap_out(self, cache: KVCache, pairs: BlockPairs) -> None:
        """Copy (device block, host block) pairs to the host, without waiting for the device.

        It waits for the oldest transfers while more than 256 MiB are on their way.
        """
        for size, part in self._calls(pairs):
            values = _gather(cache, _padded([device for device, _ in part], size, _NULL))
            for x in jax.tree.leaves(values):
                x.copy_to_host_async()
            self._pending.append(_Transfer(values, [host for _, host in part]))
            while sum(transfer.values.nbytes for transfer in self._pending) > _PENDING_BYTES:
                self._take_delivery(1)

    def settle(self) -> None:
        """Wait for all that is on its way to the host."""
        self._take_delivery(len(self._pending))

    def swap_in(self, cache: KVCache, pairs: BlockPairs) -> KVCache:
        """Copy (host block, device block) pairs to the device; `cache` is donated."""
        wanted = {host for host, _ in pairs}
        # A block may be on its way twice: all transfers up to the last of it arrive, in order.
        awaited = (
            number
            for number, transfer in enumerate(self._pending, start=1)
            if not wanted.isdisjoint(transfer.host_blocks)
        )
        self._take_delivery(max(awaited, default=0))
        for size, part in self._calls(pairs):
            sources = _padded([host for host, _ in part], size, _NULL)
            values = jax.tree.map(lambda x, rows=sources: x[rows], self._contents)
            targets = _padded([device for _, device in part], size, self._nowhere)
            cache = _scatter(cache, targets, values)
        return cache

    def copy(self, cache: KVCache, pairs: BlockPairs) -> KVCache:
        """Copy (source, target) pairs on the device, as if all at once; `cache` is donated.

        Raises:
          ValueError: more than `max_copies` pairs.
        """
        if not pairs:
            return cache
        if len(pairs) > self._copy_sizes[-1]:
            raise ValueError(f"{len(pairs)} copies in one call, at most {self._copy_sizes[-1]}")
        size = next(size for size in self._copy_sizes if size >= len(pairs))
        sources = _padded([source for source, _ in pairs], size, _NULL)
        targets = _padded([target for _, target in pairs], size, self._nowhere)
        return _copy(cache, sources, targets)

    def link_bytes_per_s(self, cache: KVCache) -> float:
        """How fast blocks travel, both ways together, measured at the first call.

        Counts what the host does for them as well: a copy into and one out of its blocks. It waits
        for the device, and compiles a program unless `warmup` has.
        """
        if self._link_bytes_per_s is None:
            sources = np.full(self._sizes[-1], _NULL, np.int32)
            here = _empty(cache, len(sources))
            seconds = [_round_trip(_gather(cache, sources), here) for _ in range(_ROUND_TRIPS)]
            self._link_bytes_per_s = 2 * here.nbytes / min(seconds)
        return self._link_bytes_per_s

    def warmup(self, cache: KVCache) -> KVCache:
        """Compile everything, on padding: no block of the pool changes; `cache` is donated."""
        for size in self._copy_sizes:
            cache = self.copy(cache, [(_NULL, self._nowhere)] * size)
        if len(self._contents.rows) > 1:
            for size in self._sizes:
                self.swap_out(cache, [(_NULL, _NULL)] * size)
                cache = self.swap_in(cache, [(_NULL, self._nowhere)] * size)
        return cache

    def _calls(self, pairs: BlockPairs) -> Iterator[tuple[int, BlockPairs]]:
        """Cut pairs into calls, with their sizes: the largest that is more than half full."""
        while pairs:
            fits = (size for size in reversed(self._sizes) if 2 * len(pairs) > size)
            size = next(fits, self._sizes[0])
            yield size, pairs[:size]
            pairs = pairs[size:]

    def _take_delivery(self, count: int) -> None:
        """Wait for the `count` oldest transfers and keep what they bring."""
        for transfer in self._pending[:count]:
            blocks = transfer.host_blocks
            jax.tree.map(
                lambda x, values, blocks=blocks: _put(x, blocks, values),
                self._contents,
                transfer.values,
            )
        del self._pending[:count]


def _empty(cache: KVCache, num_blocks: int) -> Blocks:
    """Host memory for so many blocks of the pool."""

    def empty(x: jax.Array) -> np.ndarray:
        layers, _, *block = x.shape
        return np.empty((num_blocks, layers, *block), x.dtype)

    return jax.tree.map(empty, Blocks(cache.pool, cache.scales))


def _put(contents: np.ndarray, blocks: list[int], values: jax.Array) -> None:
    contents[blocks] = np.asarray(values)[: len(blocks)]


@jax.jit
def _gather(cache: KVCache, blocks: jax.Array) -> Blocks:
    """i32[M] blocks, block after block, so that each is contiguous on the host."""
    found = Blocks(*gather_blocks(cache.pool, cache.scales, blocks))
    return jax.tree.map(lambda x: x.swapaxes(0, 1), found)


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(cache: KVCache, blocks: jax.Array, values: Blocks) -> KVCache:
    rows, scale_words = jax.tree.map(lambda x: x.swapaxes(0, 1), values)
    pool, scales = scatter_blocks(cache.pool, cache.scales, blocks, rows, scale_words)
    return dataclasses.replace(cache, pool=pool, scales=scales)


@functools.partial(jax.jit, donate_argnums=0)
def _copy(cache: KVCache, sources: jax.Array, targets: jax.Array) -> KVCache:
    pool, scales = copy_blocks(cache.pool, cache.scales, sources, targets)
    return dataclasses.replace(cache, pool=pool, scales=scales)


def _padded(blocks: list[int], size: int, padding: int) -> np.ndarray:
    """i32[size]."""
    return np.array(blocks + [padding] * (size - len(blocks)), np.int32)


def _round_trip(values: Blocks, here: Blocks) -> float:
    """Seconds that `values` take from the device to `here` and back."""
    jax.block_until_ready(values)
    start = time.perf_counter()
    jax.tree.map(lambda x, y: np.copyto(x, np.asarray(y)), here, values)
    back = [
        jax.device_put(x.copy(), y.sharding)
        for x, y in zip(jax.tree.leaves(here), jax.tree.leaves(values), strict=True)
    ]
    jax.block_until_ready(back)
    return time.perf_counter() - start
