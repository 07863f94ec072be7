"""Matrix products with weights `[*out, in]`: the one owner of the form that XLA runs fast."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import from_storage
from pallas_kernels._compat import CPU_MATVEC_FUSES_CAST

_CPU_MIN_ROWS = 4  # XLA:CPU's fast bf16 product needs this many


def linear(x: jax.Array, weight: jax.Array, dtype: DTypeLike, *, looped: bool = True) -> jax.Array:
    """`x @ weight.T` with operands in `dtype` and float32 sums.

    Args:
      x: f32[N, in].
      weight: [*out, in], `dtype` values as stored.
      looped: whether the weight is a slice of a stack inside a loop over layers.

    Returns:
      f32[N, *out].
    """
    weight = from_storage(weight, dtype)
    if weight.dtype == jnp.float32:
        return _dot(x, weight, lax.Precision.HIGHEST)
    return lax.platform_dependent(
        x, weight, cpu=_cpu_looped if looped else _cpu_whole, default=_half_dot
    )


def _dot(x: jax.Array, weight: jax.Array, precision: lax.Precision | None) -> jax.Array:
    contract = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(
        x, weight, contract, precision=precision, preferred_element_type=jnp.float32
    )


def _half_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _dot(x.astype(weight.dtype), weight, None)


def _cpu_padded(x: jax.Array, weight: jax.Array) -> jax.Array:
    rows = len(x)
    x = jnp.pad(x, ((0, max(0, _CPU_MIN_ROWS - rows)), (0, 0)))
    return _half_dot(x, weight)[:rows]


def _cpu_looped(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _cpu_matvec(x, weight) if len(x) == 1 else _cpu_padded(x, weight)


def _cpu_whole(x: jax.Array, weight: jax.Array) -> jax.Array:
    fused = len(x) == 1 and CPU_MATVEC_FUSES_CAST
    return _cpu_matvec(x, weight) if fused else _cpu_padded(x, weight)


def _cpu_matvec(x: jax.Array, weight: jax.Array) -> jax.Array:
    """One row: XLA widens the weight on the fly, inside one fused loop over its rows."""
    out = x @ weight.reshape(-1, weight.shape[-1]).T.astype(jnp.float32)
    return out.reshape(1, *weight.shape[:-1])
