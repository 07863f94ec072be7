"""Matrix products with weights `[*out, in]`: the one owner of the form that XLA runs fast."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import from_storage
from pallas_kernels._compat import CPU_MATVEC_FUSES_CAST

_CPU_MIN_ROWS = 4  # XLA:CPU's fast bf16 product needs this many


def linear(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x @ weight.T` with operands in `dtype` and float32 sums.

    Args:
      x: f32[N, in].
      weight: [*out, in], `dtype` values as stored.

    Returns:
      f32[N, *out].
    """
    out_shape = weight.shape[:-1]
    weight = from_storage(weight.reshape(-1, weight.shape[-1]), dtype)
    if weight.dtype == jnp.float32:
        out = _dot(x, weight, lax.Precision.HIGHEST)
    else:
        out = lax.platform_dependent(x, weight, cpu=_cpu_dot, default=_half_dot)
    return out.reshape(len(x), *out_shape)


def _dot(x: jax.Array, weight: jax.Array, precision: lax.Precision | None) -> jax.Array:
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(
        x, weight, contract, precision=precision, preferred_element_type=jnp.float32
    )


def _half_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _dot(x.astype(weight.dtype), weight, None)


def _cpu_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    rows = len(x)
    if rows == 1 and CPU_MATVEC_FUSES_CAST:
        return x @ weight.T.astype(jnp.float32)
    x = jnp.pad(x, ((0, max(0, _CPU_MIN_ROWS - rows)), (0, 0)))
    return _half_dot(x, weight)[:rows]
