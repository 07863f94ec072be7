"""How large the pool and its blocks may be."""

import dataclasses
import math
from typing import Any

import jax

from pagedjax.errors import ConfigError
from pagedjax.models.config import DecoderConfig
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.slot_start import empty_slots
from pallas_kernels import FORMATS, KVFormat, most_table_entries

_CPU_POOL_BYTES = 4 << 30
_LANES = 128  # of a tile of TPU memory
_SCALE_BYTES = 4  # those of K and V of a token and head, in one word


@dataclasses.dataclass(frozen=True)
class PoolSize:
    """How much a KV pool holds.

    Attributes:
      num_blocks: without the null block. block_size: tokens of one.
      block_bytes: K, V and scales of a block, in the layers of a KV group.
      num_groups: KV groups of the model; a token takes a place in a block of each.
    """

    kv_format: KVFormat
    num_blocks: int
    block_size: int
    block_bytes: int
    num_groups: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit; more of models with windows, which give blocks back."""
        return self.num_blocks // self.num_groups * self.block_size

    def __str__(self) -> str:
        gib = self.num_blocks * self.block_bytes / 2**30
        return (
            f"{self.kv_format}, {gib:.2f} GiB, {self.num_blocks} blocks of {self.block_size} "
            f"tokens: {self.num_tokens} tokens fit"
        )


def pool_format(kv_cache_dtype: str, model: DecoderConfig) -> KVFormat:
    """What the pool of an engine with such a setting holds."""
    return FORMATS[model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype]


def default_block_size(
    platform: str, kv_format: KVFormat, max_num_seqs: int, max_model_len: int
) -> int:
    """Tokens a block, where the user has no wish.

    The TPU kernel moves whole blocks and keeps the block tables in scalar memory: large ones keep
    its DMAs long and the tables short. The scales of a block fill whole lanes of memory there.
    """
    if platform != "tpu":
        return 16
    most = most_table_entries() // max_num_seqs
    sizes = [size for size in (64, 128, 256, 512) if size >= _LANES or not kv_format.has_scales]
    return next((size for size in sizes if -(-max_model_len // size) <= most), 1024)


def pool_shape(
    model: DecoderConfig, block_size: int, num_blocks: int, kv_format: KVFormat, platform: str
) -> tuple[int, int, int, int, int]:
    """[Lg, P, KVH, T, width]; scales, if any, have the same without `width`."""
    width = kv_format.row(model.head_dim, platform).width
    layers = model.kv_layout.layers_per_group
    return layers, num_blocks, model.num_kv_heads, block_size, width


def block_bytes(
    model: DecoderConfig, block_size: int, kv_format: KVFormat, platform: str = "cpu"
) -> int:
    """Bytes of one physical block: K, V and scales of its tokens in the layers of a KV group."""
    *block, width = pool_shape(model, block_size, 1, kv_format, platform)
    rows = math.prod(block) * width * kv_format.element.itemsize
    if not kv_format.has_scales:
        return rows
    layers, _, heads, tokens = block
    if platform == "tpu":  # in tiles of 8 sublanes, or a power of two below, and 128 lanes
        sublanes = min(8, 1 << (heads - 1).bit_length())
        heads, tokens = -(-heads // sublanes) * sublanes, -(-tokens // _LANES) * _LANES
    return rows + layers * heads * tokens * _SCALE_BYTES


def size_pool(
    model: DecoderConfig,
    limits: SchedulerConfig,
    kv_format: KVFormat,
    device: Any,
    num_blocks: int | None,
    memory_utilization: float,
) -> PoolSize:
    """The pool of an engine on a `jax.Device`; `num_blocks`: with the null block, None: what fits.

    Raises:
      ConfigError: not even one block a KV group fits.
    """
    num_blocks = num_blocks or default_num_blocks(
        model, limits, kv_format, device.memory_stats(), memory_utilization, device.platform
    )
    size = block_bytes(model, limits.block_size, kv_format, device.platform)
    return PoolSize(kv_format, num_blocks - 1, limits.block_size, size, limits.num_groups)


def default_num_blocks(
    model: DecoderConfig,
    limits: SchedulerConfig,
    kv_format: KVFormat,
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
    size = block_bytes(model, limits.block_size, kv_format, platform)
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
