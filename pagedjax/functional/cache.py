"""A paged KV cache that allocates its blocks on the device.

A block is free exactly when no block table has it, so reference counts need not be kept: what
drops table entries counts them anew, and taking a block is a pop from a stack.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import device_state
from pagedjax.errors import ConfigError
from pagedjax.memory import default_block_size, pool_format
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache
from pagedjax.scheduler_config import SchedulerConfig
from pallas_kernels import Implementation, copy_blocks

_COPIES = 8  # blocks that are copied at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of S sequences, in a pool of P blocks of T tokens.

    Donate it to whatever returns a new one, which then is the same memory.

    Attributes:
      kv: the pool; P blocks, block 0 is the null block.
      block_tables: i32[G, S, B], physical block of each logical block, a table for each KV group;
        0 where unused.
      context_lens: i32[S], tokens of each sequence in the pool.
      free: i32[P], a stack: the first `num_free` are the free blocks, the last of them goes next.
      num_free: i32 scalar.
      overflowed: bool[S], sequences that a block was missing for since they began; what they were
        given then is not in the pool, and logits that came of it mean nothing.
    """

    kv: KVCache
    block_tables: jax.Array
    context_lens: jax.Array
    free: jax.Array
    num_free: jax.Array
    overflowed: jax.Array

    @property
    def num_seqs(self) -> int:
        return self.block_tables.shape[1]

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence that its tables have room for."""
        return self.block_tables.shape[2] * self.kv.pool.shape[3]


def init_cache(
    config: DecoderConfig,
    *,
    num_seqs: int,
    max_len: int,
    num_blocks: int | None = None,
    block_size: int | None = None,
    kv_cache_dtype: str = "auto",
    attention: Implementation | None = None,
    batch_invariant: bool = False,
    platform: str | None = None,
) -> Cache:
    """An empty cache.

    Args:
      num_seqs: S. max_len: most tokens of a sequence, prompt and output.
      num_blocks: P, the null block included; None: enough for S sequences of `max_len`. With fewer,
        sequences may overflow. A sequence has `config.kv_layout.num_groups` blocks for every
        `block_size` tokens. Unlike the engine's, they are kept when they leave a window.
      block_size: T; None: what the engine takes.
      kv_cache_dtype, attention: as in `EngineConfig`; a kernel is not checked against XLA here.
      batch_invariant: a token's bits depend on its own sequence alone.
      platform: that the cache is for, "cpu", "gpu" or "tpu"; None: the default backend.

    Raises:
      ConfigError: a size is out of its range, or the kernel cannot serve it.
    """
    if num_seqs < 1:
        raise ConfigError(f"num_seqs is {num_seqs}; it must be at least 1")
    if not 1 <= max_len <= config.max_position:
        raise ConfigError(
            f"max_len is {max_len}; it must be in [1, {config.max_position}], which the model was "
            "made for"
        )
    platform = platform or jax.default_backend()
    kv_format = pool_format(kv_cache_dtype, config)
    limits = SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs,
        max_model_len=max_len,
        block_size=block_size or default_block_size(platform, kv_format, num_seqs, max_len),
        windows=config.kv_layout.windows,
    )
    entries = limits.num_groups, num_seqs, limits.table_width
    num_blocks = num_blocks or 1 + limits.num_groups * num_seqs * limits.table_width
    if num_blocks <= limits.num_groups:
        raise ConfigError(
            f"num_blocks is {num_blocks}; it must be above {limits.num_groups}, one block for each "
            "KV group besides the null block"
        )
    chosen = device_state.choose_attention(attention, config, limits, kv_format, platform)
    kv = device_state.init_cache(
        config,
        limits.block_size,
        num_blocks=num_blocks,
        kv_format=kv_format,
        platform=platform,
        attention=chosen,
        batch_invariant=batch_invariant,
    )
    return _count_free(
        Cache(
            kv,
            block_tables=jnp.zeros(entries, jnp.int32),
            context_lens=jnp.zeros(num_seqs, jnp.int32),
            free=jnp.zeros(num_blocks, jnp.int32),
            num_free=jnp.zeros((), jnp.int32),
            overflowed=jnp.zeros(num_seqs, bool),
        )
    )


def reserve(cache: Cache, num_new: jax.Array) -> tuple[Cache, jax.Array]:
    """Give sequences the blocks for `num_new` i32[S] more tokens, in their order.

    Returns:
      The cache, its context lengths as they were; bool[S], who has the room. Sequences that lack a
      block get none, nor do those behind them that need some, and are marked as overflowed.
    """
    size = cache.kv.pool.shape[3]
    have = _cdiv(cache.context_lens, size)
    fits = cache.context_lens + num_new <= cache.max_len
    new = jnp.where(fits, _cdiv(cache.context_lens + num_new, size) - have, 0)
    last = jnp.cumsum(new, dtype=jnp.int32) * len(cache.block_tables)
    fits &= (new == 0) | (last <= cache.num_free)
    new = jnp.where(fits, new, 0)
    tables, num_free = lax.cond(
        (new > 0).any(),
        lambda: _take(cache, have, new),
        lambda: (cache.block_tables, cache.num_free),
    )
    overflowed = cache.overflowed | ~fits
    cache = dataclasses.replace(
        cache, block_tables=tables, num_free=num_free, overflowed=overflowed
    )
    return cache, fits


def fork(cache: Cache, parents: jax.Array) -> Cache:
    """Make sequence i a copy of sequence `parents[i]`, for all i at once.

    Full blocks are shared. Of a partial last block the first child keeps the original, each other
    one gets a copy. Sequences that are no parent end, and their blocks are free. A child for whose
    copies no blocks are left is empty and overflowed.

    Args:
      parents: i32[S], values in [0, S).
    """
    num_groups, num_seqs, _ = cache.block_tables.shape
    lens = cache.context_lens[parents]
    partial = lens % cache.kv.pool.shape[3] > 0
    seqs = jnp.arange(num_seqs, dtype=jnp.int32)
    first = jnp.argmax(parents[None] == parents[:, None], axis=1)
    copies = partial & (first != seqs)
    logical = lens // cache.kv.pool.shape[3]
    tables = cache.block_tables[:, parents]
    column = jnp.where(copies, logical, tables.shape[2])
    source = tables.at[:, seqs, column].get(mode="fill", fill_value=0)
    tables = tables.at[:, seqs, column].set(0, mode="drop")
    # Blocks of those that end can be taken already.
    cache = _count_free(
        dataclasses.replace(
            cache,
            block_tables=tables,
            context_lens=lens,
            overflowed=cache.overflowed[parents],
        )
    )
    end = jnp.cumsum(copies, dtype=jnp.int32) * num_groups
    fits = ~copies | (end <= cache.num_free)
    copies &= fits
    groups = jnp.arange(num_groups, dtype=jnp.int32)[:, None]
    target = cache.free.at[cache.num_free - end[None] + groups].get(mode="clip")
    target = jnp.where(copies[None], target, 0)
    kv = _copy(cache.kv, source.reshape(-1), target.reshape(-1))
    tables = tables.at[:, seqs, jnp.where(copies, column, tables.shape[2])].set(target, mode="drop")
    taken = copies.sum(dtype=jnp.int32) * num_groups
    cache = dataclasses.replace(cache, kv=kv, block_tables=tables, num_free=cache.num_free - taken)
    cache = release(cache, ~fits)
    return dataclasses.replace(cache, overflowed=cache.overflowed | ~fits)


def release(cache: Cache, mask: jax.Array) -> Cache:
    """End the sequences of bool[S] `mask`; their blocks are free, and their rows empty."""
    return _count_free(
        dataclasses.replace(
            cache,
            block_tables=jnp.where(mask[None, :, None], 0, cache.block_tables),
            context_lens=jnp.where(mask, 0, cache.context_lens),
            overflowed=cache.overflowed & ~mask,
        )
    )


def _take(cache: Cache, have: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tables with `new` i32[S] logical blocks behind those they `have`, and what is left."""
    num_groups, _, width = cache.block_tables.shape
    first = (jnp.cumsum(new) - new) * num_groups
    groups = jnp.arange(num_groups, dtype=jnp.int32)[:, None, None]
    column = jnp.arange(width, dtype=jnp.int32)[None] - have[:, None]  # [S, B]
    is_new = (column >= 0) & (column < new[:, None])
    depth = (first[:, None] + column)[None] + groups * new[None, :, None]  # [G, S, B]
    blocks = cache.free.at[cache.num_free - 1 - depth].get(mode="clip")
    tables = jnp.where(is_new[None], blocks, cache.block_tables)
    return tables, cache.num_free - new.sum(dtype=jnp.int32) * num_groups


def _count_free(cache: Cache) -> Cache:
    """The stack of all blocks that no table has."""
    num_blocks = len(cache.free)
    is_free = (
        jnp.ones(num_blocks, bool).at[cache.block_tables.reshape(-1)].set(False).at[0].set(False)
    )
    (free,) = jnp.nonzero(is_free, size=num_blocks, fill_value=0)
    return dataclasses.replace(
        cache, free=free.astype(jnp.int32), num_free=is_free.sum(dtype=jnp.int32)
    )


def _copy(kv: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copy i32[M] blocks whose target is not 0, a few at a time."""
    order = jnp.argsort(target == 0, stable=True)
    order = jnp.pad(order, (0, -len(order) % _COPIES), mode="edge")
    target = jnp.where(target == 0, kv.pool.shape[1], target)[order]
    target = target.at[len(source) :].set(kv.pool.shape[1])
    source = source[order]

    def copy(i: jax.Array, carry: tuple) -> tuple:
        own = (lax.dynamic_slice_in_dim(x, i * _COPIES, _COPIES) for x in (source, target))
        return copy_blocks(*carry, *own)

    count = (target < kv.pool.shape[1]).sum(dtype=jnp.int32)
    pool, scales = lax.fori_loop(0, _cdiv(count, _COPIES), copy, (kv.pool, kv.scales))
    return dataclasses.replace(kv, pool=pool, scales=scales)


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b
