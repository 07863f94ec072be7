"""The public attention functions and the choice of their implementation."""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._compat import gpu_simulator
from pallas_kernels.batch import RaggedBatch, slot_mapping
from pallas_kernels.blocks import Scales, format_of, kv_rows, write_kv
from pallas_kernels.gpu_attention import gpu_attention, plan_gpu_attention
from pallas_kernels.gpu_layout import GpuLayout
from pallas_kernels.gpu_tiles import GpuTiles
from pallas_kernels.implementations import GPU, TPU, Implementation, choose_for
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.quantization import rotate
from pallas_kernels.reference import reference_attention
from pallas_kernels.scale_pages import touched_pages, write_scale_pages
from pallas_kernels.storage import from_storage
from pallas_kernels.tpu_attention import plan_tpu_attention, tpu_attention
from pallas_kernels.tpu_layout import TpuLayout
from pallas_kernels.tpu_tiles import TpuTiles
from pallas_kernels.xla_attention import xla_attention

NO_WINDOW = 2**30  # wider than any context: a row sees everything

Layout = TpuLayout | GpuLayout
"""Of a batch, for a kernel: what is the same for all layers."""

Tiles = TpuTiles | GpuTiles
T = TypeVar("T")


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
    kv_dtype: KVFormat | DTypeLike | None = None,
    implementation: Implementation | None = None,
    batch_invariant: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Causal attention "N H D" of a ragged batch over its own blocks of the pool.

    PagedAttention (Kwon et al., arXiv:2309.06180) for any mix of prefill chunks and decodes: row i
    of a sequence sees the keys of its own sequence up to its own position. Query head h reads KV
    head `h * KVH // H`.

    Args:
      q: [N, H, D] float; rows as `batch` says.
      pool: [Lg, P, KVH, T, width], this step's keys and values already written (`write_kv`).
      scales: u32[Lg, P, KVH, T] of a quantized pool; None: the pool's values are meant as they are.
      layer: i32 scalar, index in the group.
      batch: rows, context lengths and block tables.
      sm_scale: factor on q . k, usually `D ** -0.5`.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      window: a row sees its last `window` positions, its own included; None: all.
      sinks: [H] logits that take part in the softmax with value zero (gpt-oss).
      kv_dtype: what the pool's elements mean (see `kv_format`); a dtype: values of it; None: of the
        pool's own.
      implementation: None picks the best that supports the call; a name is used or raises.
      batch_invariant: a row's result has the same bits whatever its index, its chunk's length and
        the rest of the batch; for a given block size and backend, at some cost. "reference" works
        row by row anyway.
      tiles: sizes of the pieces that the platform's kernel works on; None: what it finds best.

    Returns:
      [N, H, D] in q's dtype. Padding rows hold unspecified finite numbers.

    Raises:
      ValueError: shapes that do not fit together, or an unknown implementation.
      NotImplementedError: the named implementation cannot serve this call.
    """
    form = _check(q, pool, scales, sinks, batch, kv_dtype)
    chosen = choose_for(implementation, q.shape[1], q.shape[2], pool, batch, form)
    window = NO_WINDOW if window is None else window
    options = _Options(sm_scale, soft_cap, window, sinks, form, batch_invariant, None, tiles)
    return _attend(chosen, q, None, pool, scales, layer, batch, options)[0]


def paged_attention_and_write(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    scales: Scales,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    slots: tuple[jax.Array, jax.Array] | None = None,
    layout: Layout | None = None,
    sm_scale: float,
    soft_cap: float | None = None,
    window: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    kv_dtype: KVFormat | DTypeLike | None = None,
    implementation: Implementation | None = None,
    batch_invariant: bool = False,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array, Scales]:
    """`write_kv` of this step's keys and values and `paged_attention`, in one kernel on TPU.

    No sequence may read a block that another one writes in the same call, and no block may be
    written by two: the kernel keeps no order among sequences, and rewrites whole blocks.

    Args:
      k, v: [N, KVH, D], rows as `batch` says; rounded (or quantized) to `kv_dtype`.
      slots: `slot_mapping` of the batch, where the caller has it already.
      layout: `plan_attention` of the batch, likewise, for a kernel.
      others: see `paged_attention`.

    Returns:
      `(out [N, H, D] in q's dtype, pool, scales)`.

    Raises:
      ValueError, NotImplementedError: see `paged_attention`.
    """
    form = _check(q, pool, scales, sinks, batch, kv_dtype)
    chosen = choose_for(implementation, q.shape[1], q.shape[2], pool, batch, form)
    window = NO_WINDOW if window is None else window
    options = _Options(sm_scale, soft_cap, window, sinks, form, batch_invariant, layout, tiles)
    num_blocks, _, block_size = pool.shape[1:4]
    new = None
    if chosen in TPU:
        new, words = kv_rows(k, v, pool, form)
        if scales is not None and words is not None:
            planned = _of(TpuLayout, layout)
            pages = planned.pages if planned else None
            pages = pages or touched_pages(batch, len(q), block_size)
            scales = write_scale_pages(scales, layer, words, batch, pages)
    else:
        if slots is None:
            slots = slot_mapping(batch, len(q), block_size=block_size, num_blocks=num_blocks)
        pool, scales = write_kv(pool, scales, layer, k, v, *slots, kv_dtype=form)
    out, pool = _attend(chosen, q, new, pool, scales, layer, batch, options)
    return out, pool, scales


class _Options(NamedTuple):
    """What `paged_attention` and `paged_attention_and_write` say of a call; see there."""

    sm_scale: float
    soft_cap: float | None
    window: jax.Array | int
    sinks: jax.Array | None
    kv_format: KVFormat
    batch_invariant: bool
    layout: Layout | None
    tiles: Tiles | None


def _attend(
    chosen: Implementation,
    q: jax.Array,
    new: jax.Array | None,
    pool: jax.Array,
    scales: Scales,
    layer: jax.Array | int,
    batch: RaggedBatch,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Attention in q's dtype, and the pool; `new` rows only the TPU kernel writes."""
    if chosen == "reference":
        return _reference(q, pool, scales, layer, batch, options), pool
    form, dtype = options.kv_format, q.dtype
    if form.rotates_k:
        q = rotate(q)
    shared = {
        "kv_format": form,
        "sm_scale": options.sm_scale,
        "soft_cap": options.soft_cap,
        "window": options.window,
        "sinks": options.sinks,
        "batch_invariant": options.batch_invariant,
    }
    if chosen == "xla":
        out = xla_attention(q, pool, scales, layer, batch, **shared)
    elif chosen in TPU:
        out, pool = tpu_attention(
            q,
            new,
            pool,
            scales,
            layer,
            batch,
            **shared,
            layout=_of(TpuLayout, options.layout),
            tiles=_of(TpuTiles, options.tiles),
            interpret=chosen == "mosaic_tpu_interpret",
        )
    else:
        out = gpu_attention(
            q,
            from_storage(pool, form.element),  # only simulated pools are kept as bits
            scales,
            layer,
            batch,
            **shared,
            layout=_of(GpuLayout, options.layout),
            tiles=_of(GpuTiles, options.tiles),
            interpret=gpu_simulator() if chosen == "mosaic_gpu_interpret" else False,
        )
    if form.rotates_v:
        out = rotate(out)
    return out.astype(dtype), pool


def plan_attention(
    batch: RaggedBatch,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    pool: jax.Array,
    scales: Scales,
    *,
    kv_dtype: KVFormat | DTypeLike | None = None,
    implementation: Implementation | None = None,
    batch_invariant: bool = False,
    tiles: Tiles | None = None,
) -> Layout | None:
    """The `layout` of `paged_attention_and_write`: the same for all layers and KV groups.

    Returns:
      None for implementations that need none.
    """
    form = format_of(kv_dtype, pool, scales)
    chosen = choose_for(implementation, num_heads, head_dim, pool, batch, form)
    sizes = (batch, num_rows, num_heads, head_dim, pool, form)
    if chosen in TPU:
        tiles = _of(TpuTiles, tiles)
        return plan_tpu_attention(*sizes, batch_invariant=batch_invariant, tiles=tiles)
    if chosen in GPU:
        tiles = _of(GpuTiles, tiles)
        return plan_gpu_attention(*sizes, batch_invariant=batch_invariant, tiles=tiles)
    return None


def _of(kind: type[T], given: Any) -> T | None:
    """What was `given` for the kernel, if it is for this one."""
    if given is not None and not isinstance(given, kind):
        raise ValueError(f"{type(given).__name__} given to a kernel that takes {kind.__name__}")
    return given


def _check(
    q: jax.Array,
    pool: jax.Array,
    scales: Scales,
    sinks: jax.Array | None,
    batch: RaggedBatch,
    kv_dtype: KVFormat | DTypeLike | None,
) -> KVFormat:
    """Refuse shapes that do not fit together; returns what the pool's elements mean."""
    _, num_heads, head_dim = q.shape
    if pool.ndim != 5:
        raise ValueError(f"pool {pool.shape}: want [Lg, P, KVH, T, width]")
    form = format_of(kv_dtype, pool, scales)
    form.split(pool.shape[4], head_dim)
    if num_heads % pool.shape[2]:
        raise ValueError(f"q {q.shape}: heads must be a multiple of the {pool.shape[2]} KV heads")
    if scales is not None and scales.shape != pool.shape[:4]:
        raise ValueError(f"scales {scales.shape} do not fit pool {pool.shape}: [Lg, P, KVH, T]")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks {sinks.shape}: want one per query head, ({num_heads},)")
    num_seqs = batch.block_tables.shape[0]
    if batch.query_start.shape != (num_seqs + 1,) or batch.context_lens.shape != (num_seqs,):
        raise ValueError(
            f"query_start {batch.query_start.shape} and context_lens {batch.context_lens.shape} "
            f"do not fit block_tables {batch.block_tables.shape}"
        )
    return form


def _reference(
    q: jax.Array,
    pool: jax.Array,
    scales: Scales,
    layer: jax.Array | int,
    batch: RaggedBatch,
    options: _Options,
) -> jax.Array:
    """The float64 oracle as a jax function: numpy on the host, through a callback under jit."""

    def on_host(q, pool, scales, layer, query_start, context_lens, block_tables, window, sinks):
        optional = functools.partial(jax.tree.map, np.asarray)  # None stays None
        out = reference_attention(
            np.asarray(q),
            np.asarray(pool),
            int(layer),
            np.asarray(query_start),
            np.asarray(context_lens),
            np.asarray(block_tables),
            kv_format=options.kv_format,
            scales=optional(scales),
            sm_scale=options.sm_scale,
            soft_cap=options.soft_cap,
            window=int(window),
            sinks=optional(sinks),
        )
        return out.astype(q.dtype)

    meta = (batch.query_start, batch.context_lens, batch.block_tables)
    traced = (options.window, options.sinks)
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return jax.pure_callback(on_host, result, q, pool, scales, layer, *meta, *traced)
