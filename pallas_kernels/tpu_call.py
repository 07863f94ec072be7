"""One call of the TPU kernel: its operands, buffers and parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.tpu_kernel import run
from pallas_kernels.tpu_layout import CallLayout
from pallas_kernels.tpu_operands import Hbm, Operands, Scalars, Scratch, Static
from pallas_kernels.tpu_tiles import KernelShape, TileSizes, check_sizes, chip, vmem_limit

MOST_CONTEXT = 1 << 23  # positions times rows of a token stay below 2**31


def call_kernel(
    q: jax.Array,
    new: jax.Array | None,
    pool: jax.Array,
    scales: jax.Array | None,
    layer: jax.Array | int,
    batch: RaggedBatch,
    layout: CallLayout,
    shape: KernelShape,
    sizes: TileSizes,
    *,
    is_decode: bool,
    batch_invariant: bool,
    soft_cap: float | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the sequences of a layout.

    Args:
      q: [N, KVH, G, D], scaled, in the compute dtype.
      new: [N, KVH, width] in the pool's dtype, or None.

    Returns:
      `(f32[N, KVH, G, D], unspecified in the rows of others, pool)`.
    """
    check_sizes(shape, sizes)
    group, head_dim = shape.row_group(is_decode=is_decode), q.shape[-1]
    k, v = shape.columns
    static = Static(
        group=group,
        tile=sizes.tile,
        pages=sizes.pages,
        keys=sizes.keys,
        is_decode=is_decode,
        alignment=shape.alignment,
        k=k,
        v=v,
        masks_all=batch_invariant,
        table_width=batch.block_tables.shape[1],
        soft_cap=soft_cap,
    )
    rows = layout.rows
    q = jnp.pad(k.place(q), ((0, 0), (0, 0), (0, group - shape.group), (0, 0)))
    q = q[rows.source].transpose(1, 0, 2, 3).reshape(shape.kv_heads, -1, k.width)
    if new is not None and is_decode:
        new = new[rows.source][:, :, None]
    elif new is not None:
        assert layout.new is not None
        new = new[layout.new.source].transpose(1, 0, 2)
    out, pool = _pallas_call(
        static,
        shape,
        _scalars(batch, layout, layer, window),
        q,
        new,
        scales,
        pool,
        _sink_rows(sinks, shape, static),
        interpret,
    )
    out = out.reshape(shape.kv_heads, -1, group, v.width)[:, rows.target]
    return v.take(out[:, :, : shape.group], head_dim).transpose(1, 0, 2, 3), pool


def _scalars(
    batch: RaggedBatch, layout: CallLayout, layer: jax.Array | int, window: jax.Array | int
) -> Scalars:
    work, rows = layout.tiles, layout.rows
    window = jnp.minimum(jnp.asarray(window, jnp.int32), MOST_CONTEXT)
    return Scalars(
        call=jnp.stack([jnp.asarray(layer, jnp.int32), window, work.count]),
        tables=batch.block_tables.reshape(-1),
        tile_seq=work.seq,
        tile_first=work.first,
        q_start=rows.start,
        new_start=rows.start if layout.new is None else layout.new.start,
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
    """Returns f32[KVH, M * group, Wv] and the pool, written in place if there is `new`."""
    writes = new is not None
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
        out, *others = refs[len(inputs) :]
        # Aliased with the input: the kernel reads, too, where it writes.
        pool_ref, *buffers = others if writes else [given["pool"], *others]
        unused = dict.fromkeys(Scratch._fields)
        held = unused | dict(zip(used, buffers, strict=True))
        hbm = Hbm(given["q"], given.get("new"), given.get("scales"), pool_ref, out)
        run(Operands(static, numbers, hbm, Scratch(**held), given.get("sinks")))

    results = [jax.ShapeDtypeStruct((*q.shape[:2], static.v.width), jnp.float32)]
    if writes:
        results.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(1,),
        in_specs=specs,
        out_specs=[in_hbm] * len(results),
        scratch_shapes=tuple(x for x in scratch if x is not None),
    )
    out, *written = pl.pallas_call(
        kernel,
        grid_spec=grid,
        out_shape=results,
        # The pool is the last input.
        input_output_aliases={len(scalars) + len(inputs) - 1: 1} if writes else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit(shape, sizes, chip()),
        ),
        interpret=interpret,
        name="paged_attention_decode" if static.is_decode else "paged_attention_chunk",
    )(*scalars, *inputs.values())
    return out, written[0] if writes else pool


def _scratch(
    static: Static,
    shape: KernelShape,
    q: jax.Array,
    new: jax.Array | None,
    scales: jax.Array | None,
    pool: jax.Array,
) -> Scratch:
    rows, span = static.tile * static.group, static.pages * shape.block_size
    heads, width = shape.kv_heads, shape.row.width
    new_rows = 1 if static.is_decode else span

    def vmem(dtype: jnp.dtype, *size: int) -> Any:
        return pltpu.VMEM(size, dtype)

    f32, u32 = jnp.dtype(jnp.float32), jnp.dtype(jnp.uint32)
    two: Any = pltpu.SemaphoreType.DMA((2,))
    return Scratch(
        q=vmem(q.dtype, 2, heads, rows, static.k.width),
        acc=vmem(f32, 2, heads, rows, static.v.width),
        top=vmem(f32, heads, rows, 1),
        total=vmem(f32, heads, rows, 1),
        kv=vmem(pool.dtype, 2, heads, span, width),
        new=None if new is None else vmem(new.dtype, 2, heads, new_rows, width),
        scales=None if scales is None else vmem(u32, 2, static.pages, heads, shape.block_size),
        num_writes=pltpu.SMEM((2,), jnp.dtype(jnp.int32)),
        q_sem=two,
        out_sem=two,
        fetch_sem=two,
        write_sem=two,
    )
