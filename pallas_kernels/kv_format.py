"""How the pool keeps keys and values: dtypes, bytes of a row, and which vectors are rotated.

A row is what one token has of one KV head, `[K | V]` along the pool's last axis. Elements of eight
bits or more of one dtype are kept as that dtype. With int4 in it a row is bytes (uint8): an int4
vector of `n` elements takes `n / 2`, low nibbles for its first half and high nibbles for its
second, so that unpacking is a concatenation; an int8 key beside it takes `n`.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

_INT4 = jnp.dtype(jnp.int4)
_HALF_TILE = 64  # lanes; TPU memory comes in tiles of twice as many


class Row(NamedTuple):
    """Lanes that K, and V behind it, have of a row of the pool; zero behind their elements."""

    k: int
    v: int

    @property
    def width(self) -> int:
        return self.k + self.v

    def head_dim(self, k: jnp.dtype) -> int:
        """Elements of dtype `k` that K's lanes hold."""
        return 2 * self.k if k == _INT4 else self.k


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How the pool keeps keys and values.

    Attributes:
      k, v: dtype of an element of a key, and of a value; they differ in bytes of a row only.
      has_scales: every row is quantized: a value is its element times the scale of its K or V.
      is_rotated: integer vectors are multiplied by a Hadamard matrix before they are quantized (see
        `quantization.rotate`). Floats have small steps for small elements without.
    """

    k: jnp.dtype
    v: jnp.dtype
    has_scales: bool = False
    is_rotated: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for formats that no pool can have."""
        if self.k != self.v and {self.k, self.v} != {jnp.dtype(jnp.int8), _INT4}:
            raise ValueError(f"{self.k} keys with {self.v} values: they may be int8 and int4")
        if jnp.issubdtype(self.k, jnp.integer) and not self.has_scales:
            raise ValueError(f"{self.k} elements without scales: say which values they stand for")

    @property
    def is_packed(self) -> bool:
        """A row is bytes, some of which hold two elements."""
        return _INT4 in (self.k, self.v)

    @property
    def element(self) -> jnp.dtype:
        """dtype of what the pool holds, where the backend has a use for it (`storage_dtype`)."""
        return jnp.dtype(jnp.uint8) if self.is_packed else self.k

    @property
    def rotates_k(self) -> bool:
        return self.is_rotated and jnp.issubdtype(self.k, jnp.integer)

    @property
    def rotates_v(self) -> bool:
        return self.is_rotated and jnp.issubdtype(self.v, jnp.integer)

    def row(self, head_dim: int, platform: str) -> Row:
        """Lanes of a row in a pool on `platform`: "cpu", "gpu" or "tpu".

        TPU memory comes in tiles of 128 lanes, so that a row that is no multiple of them takes the
        next one anyway. Left to itself, XLA would lay the pool out in another way, and copy it for
        every kernel.

        Raises:
          ValueError: int4 with an odd head size.
        """
        if self.is_packed and head_dim % 2:
            raise ValueError(f"head size {head_dim}: int4 packs two elements a byte, so it is even")
        k, v = self.lanes(self.k, head_dim), self.lanes(self.v, head_dim)
        if platform != "tpu":
            return Row(k, v)
        k, v = _round_up(k, _HALF_TILE), _round_up(v, _HALF_TILE)
        return Row(k, v + (k + v) % (2 * _HALF_TILE))

    def split(self, width: int, head_dim: int) -> Row:
        """K and V of the `width` lanes of a pool's rows.

        Raises:
          ValueError: such rows do not hold heads of that size.
        """
        rows = {self.row(head_dim, platform) for platform in ("cpu", "tpu")}
        for row in rows:
            if row.width == width:
                return row
        if self.k == self.v and width % 2 == 0 and width >= min(rows).width:
            return Row(width // 2, width // 2)
        raise ValueError(
            f"a pool of rows of {width} lanes does not fit heads of {head_dim}: they take "
            f"{' or '.join(str(row.width) for row in sorted(rows))} as {self}"
        )

    def lanes(self, dtype: jnp.dtype, head_dim: int) -> int:
        """Lanes that `head_dim` elements take."""
        return head_dim // 2 if dtype == _INT4 else head_dim

    def __str__(self) -> str:
        k, v = self.k.name, self.v.name
        return (k if k == v else f"{k} keys, {v} values") + (" scaled" if self.has_scales else "")


def _quantized(k: DTypeLike, v: DTypeLike) -> KVFormat:
    return KVFormat(jnp.dtype(k), jnp.dtype(v), has_scales=True)


def plain_format(dtype: DTypeLike) -> KVFormat:
    """Elements are values, rounded to `dtype`."""
    return KVFormat(jnp.dtype(dtype), jnp.dtype(dtype))


FORMATS: dict[str, KVFormat] = {
    "float32": plain_format(jnp.float32),
    "bfloat16": plain_format(jnp.bfloat16),
    "float16": plain_format(jnp.float16),
    "fp8": _quantized(jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    "int8": _quantized(jnp.int8, jnp.int8),
    "int4": _quantized(_INT4, _INT4),
    "k8v4": _quantized(jnp.int8, _INT4),
}
"""By the names of `kv_cache_dtype`."""


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
