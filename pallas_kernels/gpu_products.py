"""The few operations of the GPU kernel that interpret mode cannot do as the hardware does.

Interpret mode of the supported jax versions knows no register layouts, and not all of wgmma: there
products are `jnp.dot` of the same operands.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
_Accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
ROWS = WGMMA.reduce(1)  # of a vector with one element a row
KEYS = WGMMA.reduce(0)  # ... a column


def transforms(dtype: jnp.dtype, width: int) -> tuple[Any, ...]:
    """How a buffer is tiled and swizzled, so that `width` of its columns are whole tiles.

    Tiles of 16 bytes are not swizzled.
    """
    itemsize = jnp.dtype(dtype).itemsize
    size = next(s for s in (128, 64, 32, 16) if width * itemsize % s == 0)
    tiling: Any = plgpu.TilingTransform  # abstract, say the types of some versions
    swizzling: Any = plgpu.SwizzleTransform
    tiles = tiling((8, size // itemsize))
    return (tiles, swizzling(size)) if size > 16 else (tiles,)


def full(shape: tuple[int, ...], value: float, layout: Any, *, is_simulated: bool) -> jax.Array:
    x = jnp.full(shape, value, jnp.float32)
    return x if is_simulated else plgpu.layout_cast(x, layout)


def iota(shape: tuple[int, ...], dim: int, layout: Any, *, is_simulated: bool) -> jax.Array:
    if is_simulated:
        return lax.broadcasted_iota(jnp.int32, shape, dim)
    return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=layout)


def scores(q: Any, k: Any, *, is_simulated: bool) -> jax.Array:
    """f32[rows, keys]: q [rows, D] times k [keys, D], both references."""
    if is_simulated:
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, _Accumulator((q.shape[0], k.shape[0]), jnp.float32))


def add_product(acc: jax.Array, p: jax.Array, v: Any, *, is_simulated: bool) -> jax.Array:
    """acc f32[rows, D] + p [rows, keys] times v [keys, D], a reference."""
    if is_simulated:
        return acc + jnp.dot(p, v[...], preferred_element_type=jnp.float32)

    def multiply(acc: Any) -> None:
        plgpu.wgmma(acc, p, v)

    start: Any = _Accumulator.init(acc)
    return pl.run_state(multiply)(start)
