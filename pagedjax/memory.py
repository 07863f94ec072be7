"""How large the pool and its blocks may be."""

import math

import jax
import numpy as np

from pagedjax.errors import ConfigError
from pagedjax.models.config import DecoderConfig
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.slot_start import empty_slots
from pallas_kernels import head_lanes, most_table_entries

_CPU_POOL_BYTES = 4 << 30


def default_block_size(platform: str, max_num_seqs: int, max_model_len: int) -> int:
    """Tokens a block, where the user has no wish.

    The TPU kernel moves whole blocks and keeps the block tables in scalar memory: large ones keep
    its DMAs long and the tables short.
    """
    if platform != "tpu":
        return 16
    most = most_table_entries() // max_num_seqs
    return next((size for size in (64, 128, 256, 512) if -(-max_model_len // size) <= most), 1024)


def pool_shape(
    model: DecoderConfig, block_size: int, num_blocks: int, platform: str
) -> tuple[int, int, int, int, int]:
    """[Lg, P, KVH, T, 2 * lanes]."""
    lanes = head_lanes(model.head_dim, platform)
    layers = model.kv_layout.layers_per_group
    return layers, num_blocks, model.num_kv_heads, block_size, 2 * lanes


def block_bytes(
    model: DecoderConfig, block_size: int, kv_dtype: np.dtype, platform: str = "cpu"
) -> int:
    """Bytes of one physical block: K and V of `block_size` tokens in the layers of a KV group."""
    return math.prod(pool_shape(model, block_size, 1, platform)) * kv_dtype.itemsize


def default_num_blocks(
    model: DecoderConfig,
    limits: SchedulerConfig,
    kv_dtype: np.dtype,
    memory_stats: dict[str, int] | None,
    memory_utilization: float,
    platform: str = "cpu",
) -> int:
    """Blocks that fit in free memory, and no more than all requests at full length could use.

    `memory_stats`: what the accelerator says of itself (`jax.Device.memory_stats`); None on CPU,
    where the pool gets half of what is free, up to 4 GiB.

    Raises:
      ConfigError: not even one block a KV group fits.
    """
    size = block_bytes(model, limits.block_size, kv_dtype, platform)
    budget = _pool_budget(memory_stats, memory_utilization, slot_bytes(model, limits))
    most = limits.max_num_seqs * limits.num_groups * limits.table_width
    blocks = min(budget // size, most)
    if blocks < limits.num_groups:
        raise ConfigError(
            f"{budget} bytes are free for the KV pool, a block takes {size}, and every request "
            f"needs at least {limits.num_groups}; lower block_size or free memory"
        )
    return blocks + 1  # the null block


def slot_bytes(model: DecoderConfig, limits: SchedulerConfig) -> int:
    """Bytes of what the sampler keeps on the device, most of it a count for every token."""
    slots = jax.eval_shape(lambda: empty_slots(limits.max_num_seqs, model.vocab_size))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots))


def _pool_budget(
    memory_stats: dict[str, int] | None, memory_utilization: float, reserved: int
) -> int:
    if memory_stats is None:
        return min(_CPU_POOL_BYTES, _free_host_memory() // 2)
    usable = int(memory_stats["bytes_limit"] * memory_utilization)
    return max(0, usable - memory_stats["bytes_in_use"] - reserved)


def _free_host_memory() -> int:
    """Bytes that a new process could use without swapping; a guess where the system cannot say."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 2 * _CPU_POOL_BYTES
