"""Paged attention on GPU: a batch laid out for the kernel, its calls, partial results combined."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.gpu_call import call_kernel
from pallas_kernels.gpu_layout import GpuCallLayout, GpuLayout, lay_out
from pallas_kernels.gpu_softmax import LOG2E
from pallas_kernels.gpu_tiles import (
    MULTIPROCESSORS,
    TILE_ROWS,
    GpuShape,
    GpuTiles,
    GpuTileSizes,
    best_tiles,
)
from pallas_kernels.kv_format import KVFormat

KV_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8", "int4")
HEAD_DIMS = (64, 96, 128, 256)
_SIMULATED_PROGRAMS = 2  # enough to share work, and few to wait for
_WIDEST_WINDOW = 1 << 24  # times a group it is still an int32


def unsupported(kv_format: KVFormat, block_size: int, head_dim: int, group: int) -> str | None:
    """Why the kernel cannot serve such calls, with what to change; None if it can."""
    if not {kv_format.k.name, kv_format.v.name} <= set(KV_DTYPES):
        return f"a pool of {kv_format}: it reads {', '.join(KV_DTYPES)}"
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim}: one of {', '.join(map(str, HEAD_DIMS))}"
    if group > TILE_ROWS:
        return f"{group} query heads a KV head: at most {TILE_ROWS}"
    if block_size % 8 or (block_size % TILE_ROWS and TILE_ROWS % block_size):
        return f"block_size {block_size}: it must be 8, 16, 32 or a multiple of {TILE_ROWS}"
    return None


def unsupported_chip() -> str | None:
    """Why the kernel does not run on this machine's GPU; None if it does, or if there is none.

    Without a GPU the kernel can be compiled for one that is described.
    """
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None or str(capability).startswith("9."):
        return None
    return f"a GPU of compute capability {capability}: it is written for Hopper, 9.0"


def plan_gpu_attention(
    batch: RaggedBatch,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    pool: jax.Array,
    kv_format: KVFormat,
    *,
    batch_invariant: bool = False,
    tiles: GpuTiles | None = None,
) -> GpuLayout:
    """What `gpu_attention` needs to know of a batch; the same for all layers of a model."""
    shape = GpuShape.of(num_heads, head_dim, pool, kv_format, batch)
    tiles = tiles or _tiles(shape, num_rows, batch, batch_invariant)
    return lay_out(batch, num_rows, shape, tiles, batch_invariant=batch_invariant)


def gpu_attention(
    q: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    kv_format: KVFormat,
    sm_scale: float,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    batch_invariant: bool = False,
    layout: GpuLayout | None = None,
    tiles: GpuTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of a ragged batch whose keys and values are in the pool.

    Two calls of one kernel: decodes as tiles of one token, chunks as tiles full of rows.
    Batch-invariant calls take everything as chunks, so that a row meets one tile shape, and the
    same splits of its keys.

    Args:
      q: [N, H, D]. pool: [Lg, P, KVH, T, width], elements of `kv_format`.
      scales: u32[Lg, P, KVH, T] of quantized pools.
      window: see `paged_attention`. sinks: [H].
      layout: `plan_gpu_attention` of the batch; None: it is made here.
      tiles: None takes what fits (`gpu_tiles`).
      interpret: what `plgpu.kernel` takes.

    Returns:
      f32[N, H, D], zero in padding rows.
    """
    num_rows, num_heads, head_dim = q.shape
    shape = GpuShape.of(num_heads, head_dim, pool, kv_format, batch)
    tiles = tiles or _tiles(shape, num_rows, batch, batch_invariant)
    if layout is None:
        layout = lay_out(batch, num_rows, shape, tiles, batch_invariant=batch_invariant)
    q = q.astype(shape.compute_dtype).reshape(num_rows, shape.kv_heads, shape.group, head_dim)
    q = _padded(q, kv_format.k, shape.head_dim)
    window = jnp.minimum(window, _WIDEST_WINDOW)
    out = jnp.zeros(q.shape, jnp.float32)
    for part, sizes in ((layout.decode, tiles.decode), (layout.chunk, tiles.chunk)):
        if part is None:
            continue
        is_decode = part is layout.decode
        group = shape.row_group(sizes, is_decode=is_decode)
        means, logs = call_kernel(
            _rows(q, part, group),
            pool,
            scales,
            layer,
            batch,
            part,
            shape,
            sizes,
            is_decode=is_decode,
            programs=_programs(interpret),
            sm_scale=sm_scale,
            soft_cap=soft_cap,
            window=window,
            interpret=interpret,
        )
        splits = len(means) // (sizes.warpgroups if is_decode else 1)
        found = _combine(means, logs, _has_keys(part, sizes, splits, window), group, sinks)
        found = found[part.rows.target, :, : shape.group]
        out = jnp.where(part.chosen[:, None, None, None], found, out)
    return _unpadded(out, kv_format.v, head_dim).reshape(num_rows, num_heads, head_dim)


def _padded(x: jax.Array, dtype: jnp.dtype, size: int) -> jax.Array:
    """[..., D] -> [..., size], zeros where the pool has lanes behind vectors of `dtype`."""
    x = x.reshape(*x.shape[:-1], _parts(dtype), -1)
    behind = size // x.shape[-2] - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, behind)])
    return x.reshape(*x.shape[:-2], size)


def _unpadded(x: jax.Array, dtype: jnp.dtype, head_dim: int) -> jax.Array:
    """[..., size] -> [..., D], the inverse of `_padded`."""
    parts = _parts(dtype)
    x = x.reshape(*x.shape[:-1], parts, -1)[..., : head_dim // parts]
    return x.reshape(*x.shape[:-2], head_dim)


def _parts(dtype: jnp.dtype) -> int:
    """Parts of a vector of the pool that share lanes: low and high nibbles of int4."""
    return 2 if dtype == jnp.int4 else 1


def _programs(interpret: Any) -> int:
    """One a multiprocessor: of this machine's GPU, or of an H200 where there is none."""
    if interpret:
        return _SIMULATED_PROGRAMS
    return getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS


def _tiles(shape: GpuShape, num_rows: int, batch: RaggedBatch, batch_invariant: bool) -> GpuTiles:
    num_seqs = min(len(batch.context_lens), num_rows)
    return best_tiles(shape, num_rows, num_seqs, batch_invariant=batch_invariant)


def _rows(q: jax.Array, layout: GpuCallLayout, group: int) -> jax.Array:
    """Queries [N, KVH, G, D] as the kernel reads them, [KVH, M * group, D]."""
    _, kv_heads, heads, head_dim = q.shape
    q = jnp.pad(q[layout.rows.source], ((0, 0), (0, 0), (0, group - heads), (0, 0)))
    return q.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)


def _has_keys(
    layout: GpuCallLayout, sizes: GpuTileSizes, splits: int, window: jax.Array
) -> jax.Array:
    """bool[splits, M]: whether the kernel had an item for this split of a token's tile."""
    begin = jnp.arange(splits, dtype=jnp.int32)[:, None] * sizes.split
    first = jnp.maximum(layout.position - window + 1, 0)[None]
    return (begin < layout.end[None]) & (begin + sizes.split > first)


@functools.partial(jax.named_call, name="combine_splits")
def _combine(
    means: jax.Array,
    logs: jax.Array,
    has_keys: jax.Array,
    group: int,
    sinks: jax.Array | None,
) -> jax.Array:
    """f32[M, KVH, group, D] of the partial results f32[parts, KVH, M * group, D] of `call_kernel`.

    A sink is one more key, with value zero.
    """
    parts, kv_heads, _, head_dim = means.shape
    tokens = has_keys.shape[1]
    there = jnp.repeat(has_keys, parts // len(has_keys), axis=0)[:, None, :, None]
    logs = logs.reshape(parts, kv_heads, tokens, group)
    logs = jnp.where(there, logs, -jnp.inf)
    top = logs.max(axis=0)
    sink = None
    if sinks is not None:
        sink = (sinks.astype(jnp.float32) * LOG2E).reshape(kv_heads, 1, -1)
        sink = jnp.pad(sink, ((0, 0), (0, 0), (0, group - sink.shape[-1])))
        top = jnp.maximum(top, sink)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp2(logs - top[None])
    total = weights.sum(axis=0)
    if sink is not None:
        total = total + jnp.exp2(sink - top)
    means = means.reshape(parts, kv_heads, tokens, group, head_dim)
    means = jnp.where(there[..., None], means, 0.0)
    out = (means * weights[..., None]).sum(axis=0)
    return (out / jnp.where(total > 0, total, 1.0)[..., None]).transpose(1, 0, 2, 3)
