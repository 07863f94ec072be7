"""What the sizes of both kernels' pieces depend on."""

import dataclasses
from typing import Self

import jax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.kv_format import KVFormat, Row


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Of a call of a kernel.

    Attributes:
      kv_heads: KVH. group: query heads of a KV head. block_size: T.
      head_dim: D, of a key in the pool, padding included.
      num_keys: most keys of a sequence, the table's width times T.
      kv: what the pool holds. row: lanes of its rows.
    """

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    num_keys: int
    kv: KVFormat
    row: Row

    @property
    def row_bytes(self) -> int:
        """Of K and V of a token and KV head."""
        return self.row.width * self.kv.element.itemsize

    @property
    def scale_bytes(self) -> int:
        """Of a token and KV head."""
        return 4 if self.kv.has_scales else 0

    @classmethod
    def of(
        cls,
        num_heads: int,
        head_dim: int,
        pool: jax.Array,
        kv: KVFormat,
        batch: RaggedBatch,
    ) -> Self:
        """Of a call with these arrays, and queries of `head_dim`."""
        _, _, kv_heads, block_size, width = pool.shape
        num_keys = batch.block_tables.shape[1] * block_size
        row = kv.split(width, head_dim)
        padded = row.head_dim(kv.k)
        return cls(kv_heads, num_heads // kv_heads, padded, block_size, num_keys, kv, row)
