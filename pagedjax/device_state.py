"""What lives on the device: the pool and the slots, and the kernel that reads the pool."""

import jax.numpy as jnp

from pagedjax.errors import ConfigError
from pagedjax.memory import pool_shape
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.slot_start import empty_slots
from pagedjax.step import EngineState
from pallas_kernels import Implementation, KVFormat, choose_implementation, storage_dtype


def choose_attention(
    wanted: Implementation | None,
    model: DecoderConfig,
    limits: SchedulerConfig,
    kv_format: KVFormat,
    platform: str,
) -> Implementation:
    """The kernel that reads the pool; None wants the best for the platform.

    Raises:
      ConfigError: the named one cannot serve this model with these limits.
    """
    try:
        return choose_implementation(
            wanted,
            platform,
            kv_format=kv_format,
            storage=storage_dtype(kv_format.element, platform),
            block_size=limits.block_size,
            num_seqs=limits.max_num_seqs,
            table_width=limits.table_width,
            head_dim=kv_format.row(model.head_dim, platform).head_dim(kv_format.k),
            group=model.num_heads // model.num_kv_heads,
        )
    except NotImplementedError as error:
        raise ConfigError(f"attention: {error}") from error


def init_state(
    model: DecoderConfig,
    limits: SchedulerConfig,
    *,
    num_blocks: int,
    kv_format: KVFormat,
    platform: str,
    attention: Implementation | None = None,
    batch_invariant: bool = False,
) -> EngineState:
    """An empty pool of `num_blocks` blocks and empty slots."""
    cache = init_cache(
        model,
        limits.block_size,
        num_blocks=num_blocks,
        kv_format=kv_format,
        platform=platform,
        attention=attention,
        batch_invariant=batch_invariant,
    )
    return EngineState(cache, empty_slots(limits.max_num_seqs, model.vocab_size))


def init_cache(
    model: DecoderConfig,
    block_size: int,
    *,
    num_blocks: int,
    kv_format: KVFormat,
    platform: str,
    attention: Implementation | None = None,
    batch_invariant: bool = False,
) -> KVCache:
    """A pool of `num_blocks` blocks, all zero."""
    shape = pool_shape(model, block_size, num_blocks, kv_format, platform)
    pool = jnp.zeros(shape, storage_dtype(kv_format.element, platform))
    scales = jnp.zeros(shape[:-1], jnp.uint32) if kv_format.has_scales else None
    return KVCache(pool, scales, kv_format, attention, batch_invariant)
