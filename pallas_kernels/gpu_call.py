"""One call of the GPU kernel: its operands, buffers and barriers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import GPU_SIMULATOR_KNOWS_UNIONS
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.gpu_kernel import kernel
from pallas_kernels.gpu_layout import GpuCallLayout, most_parts
from pallas_kernels.gpu_operands import Refs, Static
from pallas_kernels.gpu_products import transforms
from pallas_kernels.gpu_tiles import TILE_ROWS, GpuShape, GpuTileSizes


def call_kernel(
    q: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    layer: jax.Array | int,
    batch: RaggedBatch,
    layout: GpuCallLayout,
    shape: GpuShape,
    sizes: GpuTileSizes,
    *,
    is_decode: bool,
    programs: int,
    sm_scale: float,
    soft_cap: float | None,
    window: jax.Array | int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Partial results of the rows of `layout`.

    Args:
      q: [KVH, M, D] in the compute dtype, rows as laid out.

    Returns:
      `(f32[parts, KVH, M, D], f32[parts, KVH, M])`: softmax-weighted means, and logarithms of base
      2 of the sums they were divided by, -inf for none. Parts that no item belongs to are
      unspecified.
    """
    s = Static(
        shape,
        sizes,
        is_decode,
        shape.row_group(sizes, is_decode=is_decode),
        sm_scale,
        soft_cap,
        programs,
        is_simulated=bool(interpret),
    )
    parts = most_parts(shape, sizes, is_decode=is_decode)
    inputs = [
        layout.items,
        layout.count,
        jnp.reshape(window, 1).astype(jnp.int32),
        jnp.reshape(jnp.asarray(layer, jnp.int32), 1),
        batch.block_tables,
        q,
        pool,
    ]
    if scales is not None:
        inputs.append(scales)

    def body(*refs: Any, tiles: Any, **buffers: Any) -> None:
        *read, out, lse = refs
        if scales is None:
            read.append(None)
        q_tiles, out_tiles = zip(*tiles, strict=True)
        named = zip(Refs._fields, (*read, out, lse, q_tiles, out_tiles), strict=False)
        kernel(s, Refs(**dict(named), **buffers))

    body.__name__ = f"paged_attention_{'decode' if is_decode else 'chunk'}"
    options = {"interpret": interpret} if interpret else {}
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((parts, *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((parts, *q.shape[:2]), jnp.float32),
        ],
        scratch_types=_scratch(s),
        grid=(programs,),
        grid_names=("program",),
        num_threads=sizes.warpgroups + 1,
        thread_name="warpgroup",
        # jax 0.10 would lower for single lanes, which knows nothing of layouts.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **options,
    )(*inputs)


def _scratch(s: Static) -> dict[str, Any]:
    """Buffers and barriers, by their names in `Refs`; "tiles" are those of q and of results."""
    shape, sizes = s.shape, s.sizes

    def tiled(*size: int, dtype: jnp.dtype, width: int) -> Any:
        return plgpu.SMEM(size, dtype, transforms=transforms(dtype, width))

    groups, head_dim = sizes.warpgroups, shape.head_dim
    swizzled = shape.swizzled(sizes)
    queries = tiled(TILE_ROWS, head_dim, dtype=shape.compute_dtype, width=swizzled)
    results = tiled(TILE_ROWS, head_dim, dtype=jnp.dtype(jnp.float32), width=head_dim)
    in_one = not s.is_simulated or GPU_SIMULATOR_KNOWS_UNIONS
    words = plgpu.SMEM((sizes.stages, s.fetched), jnp.uint32) if shape.kv.has_scales else None
    ring = (sizes.stages, s.fetched, shape.row.width)
    converted = tiled(sizes.keys, 2 * head_dim, dtype=shape.compute_dtype, width=swizzled)
    return {
        "tiles": [
            plgpu.RefUnion(queries, results) if in_one else (queries, results)
            for _ in range(groups)
        ],
        "lse_tile": plgpu.SMEM((groups, TILE_ROWS), jnp.float32),
        "ring": tiled(*ring, dtype=shape.kv.element, width=shape.piece),
        "words": words,
        "converted": [converted] * groups if shape.is_converted else None,
        "q_there": plgpu.Barrier(num_barriers=groups),
        "filled": plgpu.Barrier(num_arrivals=s.copies, num_barriers=sizes.stages),
        "free": plgpu.Barrier(num_arrivals=groups, num_barriers=sizes.stages),
        "cleaned": plgpu.Barrier(num_arrivals=groups),
    }
