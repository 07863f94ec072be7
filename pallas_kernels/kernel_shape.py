"""What the sizes of both kernels' pieces depend on."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Of a call of a kernel.

    Attributes:
      kv_heads: KVH. group: query heads of a KV head. head_dim: D. block_size: T.
      num_keys: most keys of a sequence, the table's width times T.
      kv_dtype: of the pool. is_quantized: whether it has scales.
    """

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    num_keys: int
    kv_dtype: jnp.dtype
    is_quantized: bool

    @classmethod
    def of(
        cls,
        num_heads: int,
        pool: jax.Array,
        kv_dtype: jnp.dtype,
        scales: jax.Array | None,
        batch: RaggedBatch,
    ) -> Self:
        """Of a call with these arrays; a head has as many lanes as in the pool."""
        _, _, kv_heads, block_size, both = pool.shape
        num_keys = batch.block_tables.shape[1] * block_size
        group = num_heads // kv_heads
        return cls(kv_heads, group, both // 2, block_size, num_keys, kv_dtype, scales is not None)
