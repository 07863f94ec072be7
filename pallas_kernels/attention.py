"""The public attention function and the choice of its implementation."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.blocks import Scales
from pallas_kernels.reference import reference_attention
from pallas_kernels.xla_attention import xla_attention

Implementation = Literal["xla", "reference"]
NO_WINDOW = 2**30  # wider than any context: a row sees everything


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    scales: Scales,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    kv_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Causal attention "N H D" of a ragged batch over its own blocks of the pool.

    PagedAttention (Kwon et al., arXiv:2309.06180) for any mix of prefill chunks and decodes: row i
    of a sequence sees the keys of its own sequence up to its own position. Query head h reads KV
    head `h * KVH // H`.

    Args:
      q: [N, H, D] float; rows as `batch` says.
      pool: [Lg, P, KVH, T, 2 * D], this step's keys and values already written (`write_kv`).
      scales: None (unquantized pools).
      layer: i32 scalar, index in the group.
      batch: rows, context lengths and block tables.
      sm_scale: factor on q . k, usually `D ** -0.5`.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      window: a row sees its last `window` positions, its own included; None: all.
      sinks: [H] logits that take part in the softmax with value zero (gpt-oss).
      kv_dtype: what the pool's elements mean; None: the pool's own dtype.
      implementation: None picks the best that supports the call; a name is used or raises.
      batch_invariant: a row's result has the same bits whatever its index, its chunk's length and
        the rest of the batch; for a given block size and backend, at some cost. "reference" works
        row by row anyway.

    Returns:
      [N, H, D] in q's dtype. Padding rows hold unspecified finite numbers.

    Raises:
      ValueError: shapes that do not fit together, or an unknown implementation.
    """
    _check_shapes(q, pool, sinks, batch)
    kv_dtype = pool.dtype if kv_dtype is None else jnp.dtype(kv_dtype)
    if jnp.issubdtype(kv_dtype, jnp.integer):
        raise ValueError(
            f"kv_dtype {kv_dtype} is not a float dtype: say which values it stands for"
        )
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation {implementation!r}: one of {get_args(Implementation)}")
    if implementation == "reference":
        return _reference(q, pool, layer, batch, sm_scale, soft_cap, window, sinks, kv_dtype)
    out = xla_attention(
        q,
        pool,
        layer,
        batch,
        kv_dtype=kv_dtype,
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        window=NO_WINDOW if window is None else window,
        sinks=sinks,
        batch_invariant=batch_invariant,
    )
    return out.astype(q.dtype)


def _check_shapes(
    q: jax.Array, pool: jax.Array, sinks: jax.Array | None, batch: RaggedBatch
) -> None:
    _, num_heads, head_dim = q.shape
    if pool.ndim != 5 or pool.shape[4] != 2 * head_dim or num_heads % pool.shape[2]:
        raise ValueError(
            f"q {q.shape} does not fit pool {pool.shape}: want [Lg, P, KVH, T, 2 * {head_dim}] "
            f"with {num_heads} heads a multiple of KVH"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks {sinks.shape}: want one per query head, ({num_heads},)")
    num_seqs = batch.block_tables.shape[0]
    if batch.query_start.shape != (num_seqs + 1,) or batch.context_lens.shape != (num_seqs,):
        raise ValueError(
            f"query_start {batch.query_start.shape} and context_lens {batch.context_lens.shape} "
            f"do not fit block_tables {batch.block_tables.shape}"
        )


def _reference(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: RaggedBatch,
    sm_scale: float,
    soft_cap: float | None,
    window: jax.Array | int | None,
    sinks: jax.Array | None,
    kv_dtype: jnp.dtype,
) -> jax.Array:
    """The float64 oracle as a jax function: numpy on the host, through a callback under jit."""

    def on_host(q, pool, layer, query_start, context_lens, block_tables, window, sinks):
        out = reference_attention(
            np.asarray(q),
            np.asarray(pool).view(kv_dtype),
            int(layer),
            np.asarray(query_start),
            np.asarray(context_lens),
            np.asarray(block_tables),
            sm_scale=sm_scale,
            soft_cap=soft_cap,
            window=None if window is None else int(window),
            sinks=None if sinks is None else np.asarray(sinks),
        )
        return out.astype(q.dtype)

    meta = (batch.query_start, batch.context_lens, batch.block_tables)
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return jax.pure_callback(on_host, result, q, pool, layer, *meta, window, sinks)
