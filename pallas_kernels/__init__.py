"""Kernels over a paged KV pool: arrays in, arrays out. Knows nothing of requests or models."""

from pallas_kernels.attention import NO_WINDOW, Implementation, paged_attention
from pallas_kernels.batch import RaggedBatch, row_sequences, slot_mapping
from pallas_kernels.blocks import copy_blocks, gather_blocks, scatter_blocks, write_kv
from pallas_kernels.storage import from_storage, storage_dtype, to_storage

__all__ = [
    "NO_WINDOW",
    "Implementation",
    "RaggedBatch",
    "copy_blocks",
    "from_storage",
    "gather_blocks",
    "paged_attention",
    "row_sequences",
    "scatter_blocks",
    "slot_mapping",
    "storage_dtype",
    "to_storage",
    "write_kv",
]
