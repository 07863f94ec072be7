"""Parameters as numbers to train, and as an engine stores them.

On CPU, stacked 16-bit matrices are stored as their bits (see `pallas_kernels.storage`), which have
no gradient. Elsewhere, and in float32, both forms are the same arrays.
"""

import jax
import jax.numpy as jnp

from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, abstract_params
from pallas_kernels import from_storage, to_storage


def as_values(config: DecoderConfig, params: Params) -> Params:
    """Parameters as floats: bits become `config.dtype` values; floats stay as they are."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else from_storage(x, config.dtype),
        params,
    )


def as_stored(config: DecoderConfig, params: Params, platform: str) -> Params:
    """What an engine on `platform` ("cpu", "gpu", "tpu") stores: rounded from floats of any dtype.

    For instance from the float32 copy that a trainer keeps. Pure; jit it with `config` and
    `platform` static.
    """

    def store(x: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype == wanted.dtype:
            return x
        is_bits = not jnp.issubdtype(wanted.dtype, jnp.floating)
        return to_storage(x, config.dtype if is_bits else wanted.dtype, wanted.dtype)

    return jax.tree.map(store, params, abstract_params(config, platform))
