"""How large the pool may be."""

import jax
import numpy as np

from pagedjax.errors import ConfigError
from pagedjax.models.config import DecoderConfig
from pagedjax.scheduler import SchedulerConfig

_CPU_POOL_BYTES = 4 << 30


def block_bytes(model: DecoderConfig, block_size: int, kv_dtype: np.dtype) -> int:
    """Bytes of one physical block: K and V of `block_size` tokens in the layers of a KV group."""
    rows = model.kv_layout.layers_per_group * model.num_kv_heads * block_size
    return rows * 2 * model.head_dim * kv_dtype.itemsize


def default_num_blocks(
    model: DecoderConfig,
    limits: SchedulerConfig,
    kv_dtype: np.dtype,
    device: jax.Device,
    memory_utilization: float,
) -> int:
    """Blocks that fit in free memory, and no more than all requests at full length could use.

    Raises:
      ConfigError: not even one block a KV group fits.
    """
    size = block_bytes(model, limits.block_size, kv_dtype)
    budget = _pool_budget(device, memory_utilization)
    most = limits.max_num_seqs * limits.num_groups * limits.table_width
    blocks = min(budget // size, most)
    if blocks < limits.num_groups:
        raise ConfigError(
            f"{budget} bytes are free for the KV pool, a block takes {size}, and every request "
            f"needs at least {limits.num_groups}; lower block_size or free memory"
        )
    return blocks + 1  # the null block


def _pool_budget(device: jax.Device, memory_utilization: float) -> int:
    if device.platform == "cpu":
        return min(_CPU_POOL_BYTES, _free_host_memory() // 2)
    stats = device.memory_stats()
    if stats is None:
        raise ConfigError(f"{device} does not report its free memory; give num_blocks")
    return max(0, int(stats["bytes_limit"] * memory_utilization) - stats["bytes_in_use"])


def _free_host_memory() -> int:
    """Bytes that a new process could use without swapping; half of a guess where unknown."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 2 * _CPU_POOL_BYTES
