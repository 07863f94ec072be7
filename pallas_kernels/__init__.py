"""Kernels over a paged KV pool: arrays in, arrays out. Knows nothing of requests or models."""

from pallas_kernels.attention import (
    NO_WINDOW,
    Layout,
    paged_attention,
    paged_attention_and_write,
    plan_attention,
)
from pallas_kernels.batch import RaggedBatch, row_sequences, slot_mapping
from pallas_kernels.blocks import copy_blocks, gather_blocks, scatter_blocks, write_kv
from pallas_kernels.dense import dense_attention
from pallas_kernels.gpu_tiles import GpuTiles, GpuTileSizes
from pallas_kernels.implementations import Implementation, choose_implementation
from pallas_kernels.kv_format import FORMATS, KVFormat, Row, plain_format
from pallas_kernels.storage import from_storage, storage_dtype, to_storage
from pallas_kernels.tpu_tiles import TileSizes, TpuTiles, most_table_entries

__all__ = [
    "FORMATS",
    "NO_WINDOW",
    "GpuTileSizes",
    "GpuTiles",
    "Implementation",
    "KVFormat",
    "Layout",
    "RaggedBatch",
    "Row",
    "TileSizes",
    "TpuTiles",
    "choose_implementation",
    "copy_blocks",
    "dense_attention",
    "from_storage",
    "gather_blocks",
    "most_table_entries",
    "paged_attention",
    "paged_attention_and_write",
    "plain_format",
    "plan_attention",
    "row_sequences",
    "scatter_blocks",
    "slot_mapping",
    "storage_dtype",
    "to_storage",
    "write_kv",
]
