"""The oracle: paged attention in float64 numpy, one row at a time, written to be obvious."""

import numpy as np


def reference_attention(
    q: np.ndarray,
    pool: np.ndarray,
    layer: int,
    query_start: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    *,
    scales: np.ndarray | None = None,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """`paged_attention` in float64.

    Args:
      q: [N, H, D]; pool: [Lg, P, KVH, T, 2 * lanes] of real values (no bits).
      scales: [Lg, P, KVH, 2, T] of a quantized pool.
      query_start: i32[S + 1]; context_lens: i32[S]; block_tables: i32[S, B].

    Returns:
      f64[N, H, D]; padding rows are zero.
    """
    num_heads, head_dim = q.shape[1:]
    kv_heads, block_size, lanes = *pool.shape[2:4], pool.shape[4] // 2
    out = np.zeros(q.shape, np.float64)
    for s, length in enumerate(context_lens):
        start, stop = int(query_start[s]), int(query_start[s + 1])
        for row in range(start, stop):
            position = int(length) - (stop - row)
            first = 0 if window is None else max(0, position - window + 1)
            keys = np.arange(first, position + 1)
            blocks = block_tables[s, keys // block_size]
            kv = pool[layer, blocks, :, keys % block_size].astype(np.float64)
            kv = kv.reshape(len(keys), kv_heads, 2, lanes)[..., :head_dim]
            if scales is not None:
                kv *= scales[layer, blocks, :, :, keys % block_size].astype(np.float64)[..., None]
            for head in range(num_heads):
                k, v = kv[:, head * kv_heads // num_heads].swapaxes(0, 1)
                scores = sm_scale * (k @ q[row, head].astype(np.float64))
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(scores.max(), sink)
                p = np.exp(scores - top)
                out[row, head] = p @ v / (p.sum() + np.exp(sink - top))
    return out
