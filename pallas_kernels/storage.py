"""How values are stored on a backend: the one owner of "storage dtype".

XLA:CPU widens a whole bf16, f16 or fp8 array when it is sliced, gathered or scattered inside a
loop, which costs 10 to 100 times the work. Arrays that live in a loop on CPU (the pool, the stacked
weights) are therefore kept as unsigned bits of the same width, and only the slice in use is
bitcast.
Elsewhere values are stored as they are.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

_BITS = {1: jnp.uint8, 2: jnp.uint16}


def storage_dtype(dtype: DTypeLike, platform: str) -> jnp.dtype:
    """dtype in which an array of `dtype` values is kept on `platform`: "cpu", "gpu" or "tpu"."""
    dtype = jnp.dtype(dtype)
    narrow_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(_BITS[dtype.itemsize]) if platform == "cpu" and narrow_float else dtype


def to_storage(x: jax.Array, dtype: DTypeLike, storage: DTypeLike) -> jax.Array:
    """Round `x` to `dtype` and return it as stored: the same values, or their bits."""
    x = x.astype(dtype)
    return x if x.dtype == storage else lax.bitcast_convert_type(x, storage)


def from_storage(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Read stored `x` as `dtype` values: a bitcast, free of arithmetic, if `x` holds bits."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
