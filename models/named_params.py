"""Parameters under the names of a Hugging Face checkpoint, and back: for trainers that use those.

The decoder stacks its layers and fuses projections that are computed together. Here each tensor of
a checkpoint is an array of its own, such as "model.layers.0.self_attn.q_proj.weight". Both ways are
pure, and differentiable between values; in a jitted function, let it close over all but the arrays.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, abstract_params
from pagedjax.models.errors import CheckpointError, ConfigError
from pagedjax.models.families import HF_NAMES, TensorNames
from pagedjax.models.param_values import as_stored, as_values
from pagedjax.models.parts import ParamPath, is_stacked, part_shape, parts_of, place_of


def to_hf_names(
    config: DecoderConfig, params: Params, names: TensorNames = HF_NAMES
) -> dict[str, jax.Array]:
    """The tensors of a checkpoint with these parameters, by name; tied heads are left out.

    Args:
      names: of the model's family, as `families.from_hf` returns them beside the configuration.

    Returns:
      Values in `config.dtype`, never their bits; norms and biases in float32, as they are kept.

    Raises:
      ConfigError: the names are not those of Hugging Face.
    """
    _check_names(names)
    found: dict[str, jax.Array] = {}
    flat: dict[ParamPath, Any] = flatten_dict(as_values(config, params))
    for path, values in flat.items():
        for part in parts_of(path):
            for layer in range(config.num_layers if is_stacked(path) else 1):
                own = values[layer] if is_stacked(path) else values
                found[names.of(part, layer)] = _part(config, names, part, own)
    return found


def from_hf_names(
    config: DecoderConfig,
    tensors: Mapping[str, jax.Array],
    platform: str,
    names: TensorNames = HF_NAMES,
) -> Params:
    """The parameters that an engine on `platform` ("cpu", "gpu", "tpu") stores.

    Args:
      tensors: of any float dtype; rounded to `config.dtype`, norms and biases to float32.
      names: as for `to_hf_names`.

    Raises:
      CheckpointError: names the tensor that is missing, unknown or of another shape.
      ConfigError: the names are not those of Hugging Face.
    """
    _check_names(names)
    left = {names.canonical(name): values for name, values in tensors.items()}
    expected: dict[ParamPath, Any] = flatten_dict(abstract_params(config, platform))
    params: dict[ParamPath, Any] = {}
    for path, wanted in expected.items():
        stacked = is_stacked(path)
        layers = [
            [_take(left, config, names, part, layer) for part in parts_of(path)]
            for layer in range(config.num_layers if stacked else 1)
        ]
        shape = wanted.shape[1:] if stacked else wanted.shape
        filled = [_fused(config, path, parts, shape) for parts in layers]
        params[path] = jnp.stack(filled) if stacked else filled[0]
    if left:
        raise CheckpointError(
            f"tensor {next(iter(left))!r} has no place in this architecture ({len(left)} such)"
        )
    return as_stored(config, unflatten_dict(params), platform)


def _check_names(names: TensorNames) -> None:
    """A GGUF file orders the rows of queries and keys by pairs, which is for loading alone."""
    if names.interleaved or names.of("embed", 0) != HF_NAMES.of("embed", 0):
        raise ConfigError(
            f"names with {names.of('embed', 0)!r} are not those of Hugging Face checkpoints, the "
            "only ones that parameters are given under"
        )


def _part(config: DecoderConfig, names: TensorNames, part: str, values: jax.Array) -> jax.Array:
    """One part of a layer's parameter, as a checkpoint has it."""
    split, index = place_of(config, part, values.shape)
    found = values.reshape(split)[index].reshape(part_shape(config, part))
    return found - names.norm_offset if part.endswith("norm") else found


def _take(
    left: dict[str, jax.Array], config: DecoderConfig, names: TensorNames, part: str, layer: int
) -> jax.Array:
    """Take a tensor from those that are left, checked; norms as the decoder has them."""
    name, shape = names.of(part, layer), part_shape(config, part)
    if name not in left:
        raise CheckpointError(f"tensor {name!r} of shape {shape} is missing")
    values = left.pop(name)
    if values.shape != shape:
        raise CheckpointError(f"tensor {name!r} has shape {values.shape}; it must be {shape}")
    if part.endswith("norm"):
        return values.astype(jnp.float32) + names.norm_offset
    return values


def _fused(
    config: DecoderConfig, path: ParamPath, parts: list[jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """One layer's parameter from its parts."""
    if len(parts) == 1:
        return parts[0]
    fused = jnp.zeros(shape, parts[0].dtype)
    for part, values in zip(parts_of(path), parts, strict=True):
        split, index = place_of(config, part, shape)
        rows = np.broadcast_to(False, split)[index].shape
        fused = fused.reshape(split).at[index].set(values.reshape(rows)).reshape(shape)
    return fused
