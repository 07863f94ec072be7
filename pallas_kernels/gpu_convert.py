"""How elements of a byte or less become operands of the GPU kernel's products, exactly.

Through registers, from the ring to another buffer: few columns at once, as registers are few.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu_tiles import TILE_ROWS, GpuShape


def convert(shape: GpuShape, raw: Any, kv: Any) -> None:
    """From `raw` [keys, width] of the pool to `kv` [keys, 2 * D], compute dtype; references."""
    row, head_dim, width = shape.row, shape.head_dim, shape.piece
    for first in range(0, raw.shape[0], TILE_ROWS):
        for source, target, dtype in ((0, 0, shape.kv.k), (row.k, head_dim, shape.kv.v)):

            @pl.loop(0, shape.kv.lanes(dtype, head_dim) // width)
            def _(index, first=first, source=source, target=target, dtype=dtype) -> None:
                rows, lane = pl.ds(first, TILE_ROWS), pl.multiple_of(index * width, width)
                x = raw[rows, pl.ds(source + lane, width)]
                for part, elements in enumerate(_elements(x, dtype, shape.compute_dtype)):
                    column = target + part * head_dim // 2 + lane
                    kv[rows, pl.ds(column, width)] = elements


def _elements(x: jax.Array, dtype: jnp.dtype, compute: jnp.dtype) -> tuple[jax.Array, ...]:
    """What elements of the pool stand for; of int4, those of the low and of the high nibbles."""
    if dtype != jnp.int4:
        if x.dtype != dtype:
            x = lax.bitcast_convert_type(x, dtype)
        return (x.astype(compute),)
    return _nibbles(x)


def _nibbles(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bf16 of the low and of the high int4 of bytes, by few instructions.

    0x4300 is 128 in bfloat16, and its lowest bits count ones: with the bit of the sign flipped they
    make it 128 + 8 + n. 0x4100 is 8, its bits 4 to 6 count ones, and bit 7 makes it 16: the latter
    taken from the former leaves the number.
    """
    bits = x.astype(jnp.uint16) ^ np.uint16(0x4308)
    low = _float(bits & np.uint16(0xFF0F)) - jnp.bfloat16(136)
    return low, _float(bits & np.uint16(0xFD70)) - _float(bits & np.uint16(0xFD80))


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
