"""The columns of the TPU kernel's products, and which of them are a head's keys and values.

A product takes a row of the pool by whole tiles of 128 lanes. Where K and V are some each, they are
taken one by one; otherwise both products take the whole row, queries being zero over V's columns,
and the columns of K in the result are dropped. Lanes that pad K or V are columns that queries are
zero in, or that are dropped: nothing is moved between lanes.

Int4 is two parts of columns, the low nibbles and the high ones, halves of a head. Where K or V is
in one half of the lanes that are taken, one part is rotated into the other half; else there are
twice as many columns:

    int4, 64 lanes each      [K_low | K_high], [V_low | V_high]    folded, 128 columns each
    int8 and int4, 64 each   [K V], [V_low | V_high]               V is
    int4, 128 lanes each     [K_low | K_high], [V_low | V_high]    256 each

No chip shifts bytes, and nibbles that are worked on one by one cost more than all that is done with
them. So it is four bytes at once, and a nibble stays in the high half of its byte: the int8 that is
16 times the element. Queries and results are divided by 16 instead, which loses no bit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_format import KVFormat, Row

LANES = 128  # of a tile of TPU memory
_INT4 = jnp.dtype(jnp.int4)
_HIGH = np.uint32(0xF0F0F0F0)


class Columns(NamedTuple):
    """Of one product: what it takes of a row, and where in it K, or V, is.

    Attributes:
      start, lanes: what is taken.
      before: lanes of that before K, or V.
      dtype: of an element.
      is_folded: both parts of int4 share `lanes` columns.
    """

    start: int
    lanes: int
    before: int
    dtype: jnp.dtype
    is_folded: bool

    @property
    def parts(self) -> int:
        """Of a head."""
        return 2 if self.dtype == _INT4 else 1

    @property
    def unit(self) -> float:
        """What an element of 1 is in the product."""
        return 16.0 if self.dtype == _INT4 else 1.0

    @property
    def width(self) -> int:
        return self.lanes if self.is_folded else self.parts * self.lanes

    @property
    def first(self) -> int:
        """The column of a part where K, or V, begins."""
        return 0 if self.is_folded else self.before

    def place(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., width]: over `unit`, in their columns, zero in all others."""
        x = (x / self.unit).reshape(*x.shape[:-1], self.parts, -1)
        behind = self.width // self.parts - self.first - x.shape[-1]
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(self.first, behind)])
        return x.reshape(*x.shape[:-2], self.width)

    def take(self, x: jax.Array, head_dim: int) -> jax.Array:
        """[..., width] -> [..., D]: over `unit`, from their columns."""
        x = x.reshape(*x.shape[:-1], self.parts, -1)
        x = x[..., self.first : self.first + head_dim // self.parts]
        return x.reshape(*x.shape[:-2], head_dim) / self.unit

    def elements(self, lanes: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[keys, lanes] of the pool -> [keys, width] in `dtype`, times `unit`; in the kernel."""
        if self.dtype != _INT4:
            return lax.bitcast_convert_type(lanes, self.dtype).astype(dtype)
        high = pltpu.bitcast(lanes, jnp.uint32)  # of four keys each
        low = high << np.uint32(4)
        if self.is_folded:
            half = self.lanes // 2
            if self.before:
                low = pltpu.roll(low, half, 1)
            else:
                high = pltpu.roll(high, half, 1)
            is_low = lax.broadcasted_iota(jnp.int32, low.shape, 1) < half
            words = jnp.where(is_low, low, high)
        else:
            words = jnp.concatenate([low, high], axis=-1)
        return pltpu.bitcast(words & _HIGH, jnp.int8).astype(dtype)

    def is_same(self, other: "Columns") -> bool:
        """Whether the other product's columns hold the same."""
        return not self.is_folded and self._replace(before=other.before) == other


def kv_columns(kv: KVFormat, row: Row) -> tuple[Columns, Columns]:
    """Of q . k and of p . v."""
    head_dim = row.head_dim(kv.k)

    def columns(start: int, lanes: int, before: int, dtype: jnp.dtype) -> Columns:
        in_half = before in (0, lanes // 2) and kv.lanes(dtype, head_dim) <= lanes // 2
        return Columns(start, lanes, before, dtype, in_half and dtype == _INT4)

    if row.k % LANES == 0 and row.v % LANES == 0:
        return columns(0, row.k, 0, kv.k), columns(row.k, row.v, 0, kv.v)
    return columns(0, row.width, 0, kv.k), columns(0, row.width, row.k, kv.v)
