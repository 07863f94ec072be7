"""The oracle: paged attention in float64 numpy, one row at a time, written to be obvious."""

import numpy as np

from pallas_kernels.kv_format import KVFormat, plain_format


def reference_attention(
    q: np.ndarray,
    pool: np.ndarray,
    layer: int,
    query_start: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    *,
    kv_format: KVFormat | None = None,
    scales: np.ndarray | None = None,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """`paged_attention` in float64.

    Args:
      q: [N, H, D]; pool: [Lg, P, KVH, T, width], elements of `kv_format`; None: of its own dtype.
      scales: u32[Lg, P, KVH, T] of a quantized pool.
      query_start: i32[S + 1]; context_lens: i32[S]; block_tables: i32[S, B].

    Returns:
      f64[N, H, D]; padding rows are zero.
    """
    kv_format = kv_format or plain_format(pool.dtype)
    num_heads, head_dim = q.shape[1:]
    kv_heads, block_size = pool.shape[2:4]
    out = np.zeros(q.shape, np.float64)
    for s, length in enumerate(context_lens):
        start, stop = int(query_start[s]), int(query_start[s + 1])
        for row in range(start, stop):
            position = int(length) - (stop - row)
            first = 0 if window is None else max(0, position - window + 1)
            keys = np.arange(first, position + 1)
            blocks = block_tables[s, keys // block_size]
            at = (layer, blocks, slice(None), keys % block_size)
            k, v = read_rows(pool[at], None if scales is None else scales[at], kv_format, head_dim)
            for head in range(num_heads):
                own = head * kv_heads // num_heads
                scores = sm_scale * (k[:, own] @ q[row, head].astype(np.float64))
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(scores.max(), sink)
                p = np.exp(scores - top)
                out[row, head] = p @ v[:, own] / (p.sum() + np.exp(sink - top))
    return out


def read_rows(
    rows: np.ndarray, words: np.ndarray | None, kv_format: KVFormat, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values that rows [..., width] of a pool stand for: f64[..., D] each.

    `words`: u32[...], the scales of quantized rows.
    """
    lanes = kv_format.split(rows.shape[-1], head_dim)
    k = _elements(rows[..., : lanes.k], kv_format.k, head_dim)
    v = _elements(rows[..., lanes.k :], kv_format.v, head_dim)
    if words is not None:
        k = k * (words & np.uint32(0xFFFF0000)).view(np.float32)[..., None]
        v = v * (words << np.uint32(16)).view(np.float32)[..., None]
    rotation = _rotation(head_dim)
    return k @ rotation if kv_format.rotates_k else k, v @ rotation if kv_format.rotates_v else v


def _elements(lanes: np.ndarray, dtype: np.dtype, head_dim: int) -> np.ndarray:
    if dtype.name != "int4":
        return np.ascontiguousarray(lanes[..., :head_dim]).view(dtype).astype(np.float64)
    both = lanes[..., : head_dim // 2].astype(np.int64)
    nibbles = np.concatenate([both % 16, both // 16], axis=-1)
    return np.where(nibbles < 8, nibbles, nibbles - 16).astype(np.float64)


def _rotation(size: int) -> np.ndarray:
    """f64[size, size]: Hadamard matrices along the diagonal, as large as a power of two can be."""
    block = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(size // len(block)), block / np.sqrt(len(block)))
