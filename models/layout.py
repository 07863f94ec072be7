"""How parameters lie in a chip's memory.

A TPU7x (v7x) reads 16-bit matrices in tiles of (16, 128), but by default arrays are stored in tiles
of (8, 128). A step would bring every weight into the wider tiles first, each time: as much
temporary memory as the weights take, and their traffic three times. Stored in the wider tiles from
the start, nothing is copied. Other chips read weights as they are stored by default.

Proven by compiling whole steps for the chip without having it (`tests/deviceless`): the copies
without these formats, their absence with them, and that `jax.jit` takes an argument's format as it
is. That `jax.device_put` brings arrays into these formats is compiled, and has not been run.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from pagedjax.models.decoder import Params

_WIDE_KINDS = ("TPU7x",)
_WIDE_TILES = ((16, 128), (2, 1))  # 16 rows; rows in pairs, as two 16-bit values fill a word


def param_formats(params: Params, sharding: Sharding) -> Any:
    """Where to put each parameter (arrays or `ShapeDtypeStruct`s): a tree of the same structure.

    Leaves are `sharding` itself, or a `Format` on it where the default one would be copied. Both
    are good for `jax.device_put` and for the `sharding` of a `ShapeDtypeStruct`.
    """
    kinds = {device.device_kind for device in sharding.device_set}
    if not kinds <= set(_WIDE_KINDS):
        return jax.tree.map(lambda _: sharding, params)
    return jax.tree.map(lambda x: _wide(x, sharding), params)


def place_params(params: Params, sharding: Sharding, *, donate: bool = False) -> Params:
    """Put parameters on the device in the formats that its matrix products read.

    Those that are there already are not copied.

    Args:
      donate: give up the old arrays that are brought into another format, one by one, so that only
        one parameter is there twice at a time.
    """
    return jax.tree.map(
        lambda x, target: jax.device_put(x, target, donate=donate and isinstance(target, Format)),
        params,
        param_formats(params, sharding),
    )


def _wide(x: Any, sharding: Sharding) -> Format | Sharding:
    """For matrices of 16-bit values, alone or stacked; vectors and others stay as they are."""
    shape = sharding.shard_shape(x.shape)
    if x.dtype != jnp.bfloat16 or len(shape) < 2 or shape[-2] < _WIDE_TILES[0][0]:
        return sharding
    return Format(Layout(tuple(range(len(shape))), _WIDE_TILES), sharding)
