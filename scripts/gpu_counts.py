"""Bytes and FLOPs of attention at the least, counted by hand-sized formulas."""

from collections.abc import Sequence

from pallas_kernels.kv_format import KVFormat


def kv_token_bytes(kv_heads: int, head_dim: int, kv: KVFormat) -> int:
    """Bytes of K and V of one token in one layer, with the word of scales of a head if any."""
    row = kv.row(head_dim, "gpu").width * kv.element.itemsize
    return kv_heads * (row + (4 if kv.has_scales else 0))


def decode_bytes(
    contexts: Sequence[int], token_bytes: int, num_heads: int, head_dim: int, q_itemsize: int
) -> int:
    """Bytes that a decode of one row a sequence moves: K and V, its queries, its results."""
    return sum(contexts) * token_bytes + 2 * len(contexts) * num_heads * head_dim * q_itemsize


def causal_pairs(rows: int, context: int) -> int:
    """Query-key pairs that a causal mask leaves of the last `rows` tokens of a context."""
    return rows * (context - rows) + rows * (rows + 1) // 2


def causal_flops(rows: int, context: int, num_heads: int, head_dim: int) -> int:
    """FLOPs of both products of causal attention, masked pairs left out: 4 D a pair and head."""
    return 4 * head_dim * num_heads * causal_pairs(rows, context)
