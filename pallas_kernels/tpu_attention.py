"""Paged attention on TPU: a batch laid out for the kernel, its calls, the result put back."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.batch import RaggedBatch, row_sequences
from pallas_kernels.tpu_kernel import run
from pallas_kernels.tpu_layout import AlignedRows, Tiles, align_rows, list_tiles, most_rows
from pallas_kernels.tpu_operands import Hbm, Operands, Scalars, Scratch, Static
from pallas_kernels.tpu_tiles import (
    KernelShape,
    TileSizes,
    check_sizes,
    chip,
    chunk_sizes,
    decode_sizes,
    most_table_entries,
    sublanes,
    vmem_limit,
)

KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
MOST_CONTEXT = 1 << 23  # positions times rows of a token stay below 2**31


@dataclasses.dataclass(frozen=True)
class TpuTiles:
    """Sizes of the pieces that the TPU kernel works on, for decodes and for chunks."""

    decode: TileSizes
    chunk: TileSizes


def unsupported(
    kv_dtype: jnp.dtype,
    storage: jnp.dtype,
    is_quantized: bool,
    block_size: int,
    num_seqs: int,
    table_width: int,
) -> str | None:
    """Why the kernel cannot serve such calls, with what to change; None if it can."""
    if str(kv_dtype) not in KV_DTYPES or storage != kv_dtype:
        return f"a pool of {kv_dtype} stored as {storage}: it reads {', '.join(KV_DTYPES)}"
    if kv_dtype == jnp.int8 and not is_quantized:
        return "an int8 pool without scales"
    if block_size % sublanes(kv_dtype):
        need = sublanes(kv_dtype)
        return f"block_size {block_size}: with {kv_dtype} it must be a multiple of {need}"
    most = most_table_entries()
    if num_seqs * table_width > most:
        return (
            f"block tables of {num_seqs} sequences and {table_width} blocks: {most} entries fit in "
            f"the chip's scalar memory; raise block_size ({block_size}), or lower the most "
            f"sequences or their length (now {table_width * block_size} tokens)"
        )
    return None


def tpu_attention(
    q: jax.Array,
    new: jax.Array | None,
    pool: jax.Array,
    scales: jax.Array | None,
    layer: jax.Array | int,
    batch: RaggedBatch,
    *,
    sm_scale: float,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    batch_invariant: bool = False,
    tiles: TpuTiles | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of a ragged batch; with `new` it also writes this step's keys and values.

    Two calls of one kernel: decodes as tiles of one token, chunks as taller ones. Batch-invariant
    calls take everything as chunks, so that a row meets one tile shape.

    Args:
      q: [N, H, D]. pool: [Lg, P, KVH, T, 2 * lanes], lanes >= D.
      new: [N, KVH, 2 * lanes] in the pool's dtype, or None where the pool has them already.
      scales: f32[Lg, P, KVH, 2, T] of quantized pools, this step's already written.
      window: see `paged_attention`. sinks: [H].
      tiles: None takes what the cost model says (`tpu_tiles`).
      interpret: what `pallas_call` takes.

    Returns:
      f32[N, H, D], zero in padding rows, and the pool.
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads, block_size = pool.shape[2:4]
    lanes = pool.shape[4] // 2
    shape = KernelShape(
        kv_heads,
        num_heads // kv_heads,
        lanes,
        block_size,
        batch.block_tables.shape[1] * block_size,
        pool.dtype,
        scales is not None,
    )
    info = chip()
    tiles = tiles or TpuTiles(decode_sizes(shape, info), chunk_sizes(shape, info))
    lengths = jnp.diff(batch.query_start)
    is_decode = lengths == 1 if not batch_invariant else jnp.zeros_like(lengths, bool)
    fresh, new = _lay_out_new(new, batch, shape)
    dtype = shape.compute_dtype
    call = functools.partial(
        _call_kernel, shape, batch, new, fresh, scales, layer, window, soft_cap, sinks, interpret
    )
    q = (q.astype(jnp.float32) * sm_scale).astype(dtype)
    q = q.reshape(num_rows, kv_heads, shape.group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, shape.width - head_dim)))
    parts = []
    if not batch_invariant:
        part, pool = call(q, pool, is_decode, tiles.decode, is_decode=True)
        parts.append((is_decode, part))
    if num_rows > 1 or batch_invariant:
        chosen = (lengths > 0) & ~is_decode
        part, pool = call(q, pool, chosen, tiles.chunk, is_decode=False)
        parts.append((chosen, part))
    own = row_sequences(batch.query_start, num_rows)
    out = jnp.zeros((num_rows, kv_heads, shape.group, lanes), jnp.float32)
    for chosen, part in parts:
        mine = jnp.pad(chosen, (0, 1))[own]
        out = jnp.where(mine[:, None, None, None], part, out)
    return out.reshape(num_rows, num_heads, lanes)[..., :head_dim], pool


def _lay_out_new(
    new: jax.Array | None, batch: RaggedBatch, shape: KernelShape
) -> tuple[AlignedRows | None, jax.Array | None]:
    """This step's rows as [KVH, M', 2 * D], each at its position modulo a sublane tile.

    A page of rows is free before and behind all, so that whole pages can be read at its ends.
    """
    if new is None:
        return None, None
    num_rows, num_seqs = len(new), len(batch.context_lens)
    lengths = jnp.diff(batch.query_start)
    align, page = shape.alignment, shape.block_size
    rows = align_rows(
        batch,
        num_rows,
        lengths > 0,
        (batch.context_lens - lengths) % align,
        alignment=align,
        front=page,
        size=2 * page + most_rows(num_rows, num_seqs, align, with_offset=True),
    )
    return rows, new[rows.source].transpose(1, 0, 2)


def _call_kernel(
    shape: KernelShape,
    batch: RaggedBatch,
    new: jax.Array | None,
    fresh: AlignedRows | None,
    scales: jax.Array | None,
    layer: jax.Array | int,
    window: jax.Array | int,
    soft_cap: float | None,
    sinks: jax.Array | None,
    interpret: Any,
    q: jax.Array,
    pool: jax.Array,
    chosen: jax.Array,
    sizes: TileSizes,
    *,
    is_decode: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the `chosen` sequences: f32[N, KVH, G, D], unspecified in other rows."""
    check_sizes(shape, sizes)
    num_rows, num_seqs = len(q), len(batch.context_lens)
    group, tile = shape.row_group(is_decode=is_decode), sizes.tile
    seqs = min(num_seqs, num_rows)
    align = 1 if is_decode else shape.token_alignment
    most = seqs if is_decode else num_rows // tile + seqs
    rows = align_rows(
        batch,
        num_rows,
        chosen,
        jnp.zeros_like(batch.context_lens),
        alignment=align,
        front=0,
        size=most_rows(seqs if is_decode else num_rows, seqs, align, with_offset=False) + tile,
    )
    work = list_tiles(batch, chosen, tile, most)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, group - shape.group), (0, 0)))
    q = q[rows.source].transpose(1, 0, 2, 3).reshape(shape.kv_heads, -1, shape.width)
    static = Static(
        group=group,
        tile=tile,
        pages=sizes.pages,
        keys=sizes.keys,
        strip=shape.alignment if is_decode else shape.block_size,
        alignment=shape.alignment,
        table_width=batch.block_tables.shape[1],
        soft_cap=soft_cap,
    )
    scalars = _scalars(batch, work, rows, fresh, layer, window)
    out, pool = _pallas_call(
        static, shape, scalars, q, new, scales, pool, _sink_rows(sinks, shape, static), interpret
    )
    out = out.reshape(shape.kv_heads, -1, group, shape.width)[:, rows.target]
    return out[:, :, : shape.group, -shape.head_dim :].transpose(1, 0, 2, 3), pool


def _scalars(
    batch: RaggedBatch,
    work: Tiles,
    rows: AlignedRows,
    fresh: AlignedRows | None,
    layer: jax.Array | int,
    window: jax.Array | int,
) -> Scalars:
    window = jnp.minimum(jnp.asarray(window, jnp.int32), MOST_CONTEXT)
    return Scalars(
        call=jnp.stack([jnp.asarray(layer, jnp.int32), window, work.count]),
        tables=batch.block_tables.reshape(-1),
        tile_seq=work.seq,
        tile_first=work.first,
        q_start=rows.start,
        new_start=rows.start if fresh is None else fresh.start,
        query_lens=jnp.diff(batch.query_start),
        context_lens=batch.context_lens,
    )


def _sink_rows(sinks: jax.Array | None, shape: KernelShape, static: Static) -> jax.Array | None:
    """f32[KVH, R, 1]: the sink of every row of a tile."""
    if sinks is None:
        return None
    sinks = sinks.astype(jnp.float32).reshape(shape.kv_heads, 1, shape.group)
    sinks = jnp.pad(sinks, ((0, 0), (0, 0), (0, static.group - shape.group)))
    return jnp.tile(sinks, (1, static.tile, 1)).reshape(shape.kv_heads, -1, 1)


def _pallas_call(
    static: Static,
    shape: KernelShape,
    scalars: Scalars,
    q: jax.Array,
    new: jax.Array | None,
    scales: jax.Array | None,
    pool: jax.Array,
    sinks: jax.Array | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns f32[KVH, M * group, W] and the pool, which is written in place."""
    sizes = TileSizes(static.tile, static.pages, static.keys)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    inputs = {"q": q, "new": new, "scales": scales, "sinks": sinks, "pool": pool}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    specs = [in_vmem if name == "sinks" else in_hbm for name in inputs]
    scratch = _scratch(static, shape, q, new, scales, pool)
    used = [name for name, x in scratch._asdict().items() if x is not None]

    def kernel(*refs: Any) -> None:
        numbers = Scalars(*refs[: len(scalars)])
        refs = refs[len(scalars) :]
        given = dict(zip(inputs, refs, strict=False))
        out, pool_out, *buffers = refs[len(inputs) :]
        held = dict.fromkeys(Scratch._fields) | dict(zip(used, buffers, strict=True))
        hbm = Hbm(given["q"], given.get("new"), given.get("scales"), pool_out, out)
        run(Operands(static, numbers, hbm, Scratch(**held), given.get("sinks")))

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(1,),
        in_specs=specs,
        out_specs=[in_hbm, in_hbm],
        scratch_shapes=[x for x in scratch if x is not None],
    )
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return pl.pallas_call(
        kernel,
        grid_spec=grid,
        out_shape=[out, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        # The pool is the last input.
        input_output_aliases={len(scalars) + len(inputs) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit(shape, sizes, chip()),
        ),
        interpret=interpret,
        name="paged_attention_decode" if static.tile == 1 else "paged_attention_chunk",
    )(*scalars, *inputs.values())


def _scratch(
    static: Static,
    shape: KernelShape,
    q: jax.Array,
    new: jax.Array | None,
    scales: jax.Array | None,
    pool: jax.Array,
) -> Scratch:
    rows, span = static.tile * static.group, static.pages * shape.block_size
    heads, width = shape.kv_heads, shape.width
    strips = static.pages if static.strip == shape.block_size else 1

    def vmem(dtype: DTypeLike, *size: int) -> Any:
        return pltpu.VMEM(size, dtype)

    two = pltpu.SemaphoreType.DMA((2,))
    return Scratch(
        q=vmem(q.dtype, 2, heads, rows, width),
        acc=vmem(jnp.float32, 2, heads, rows, width),
        top=vmem(jnp.float32, heads, rows, 1),
        total=vmem(jnp.float32, heads, rows, 1),
        kv=vmem(pool.dtype, 2, heads, span, 2 * shape.head_dim),
        new=None
        if new is None
        else vmem(new.dtype, 2, heads, strips * static.strip, 2 * shape.head_dim),
        scales=None
        if scales is None
        else vmem(jnp.float32, 2, static.pages, heads, 2, shape.block_size),
        num_writes=pltpu.SMEM((2,), jnp.int32),
        q_sem=two,
        out_sem=two,
        fetch_sem=two,
        write_sem=two,
    )
