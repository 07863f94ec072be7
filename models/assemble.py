"""Filling the decoder's stacked parameters from a checkpoint's tensors.

One stack at a time is preallocated in host memory, filled from the file a few megabytes at a time,
and handed to the device. So loading needs the parameters, one stack and a small buffer.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, abstract_params
from pagedjax.models.errors import CheckpointError
from pagedjax.models.families import TensorNames
from pagedjax.models.parts import ParamPath, is_stacked, part_shape, parts_of, place_of
from pagedjax.models.progress import progress_bar
from pagedjax.models.tensor_file import TensorRef

_BUFFER = 2**19  # elements read at once
_ALIGNMENT = 64  # bytes; XLA:CPU takes over a host buffer so aligned without copying it

Source = tuple[str, int | None, TensorRef]  # part, layer, tensor


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Tensors on disk and how a family names them.

    Attributes:
      label: what messages call it, usually its path.
    """

    label: str
    tensors: Mapping[str, TensorRef]
    names: TensorNames


def assemble(config: DecoderConfig, checkpoint: Checkpoint, platform: str) -> Params:
    """The parameters of `abstract_params(config, platform)`, filled from a checkpoint.

    Raises:
      CheckpointError: a tensor is missing, unknown, of the wrong shape or of an unsupported type;
        all before anything is read.
    """
    expected: dict[ParamPath, Any] = flatten_dict(abstract_params(config, platform))
    plan = {path: _sources(path, config, checkpoint) for path in expected}
    _refuse_unknown(checkpoint, {ref.name for refs in plan.values() for *_, ref in refs})
    total = sum(ref.nbytes for refs in plan.values() for *_, ref in refs)
    params = {}
    with progress_bar(f"Loading {checkpoint.label}", total) as advance:
        for path, sources in plan.items():
            stack = _empty(expected[path])
            values = stack.view(_value_dtype(stack.dtype, config))
            for part, layer, ref in sources:
                target = _place(config, part, values if layer is None else values[layer])
                _fill(target, part, ref, config, checkpoint.names, advance)
            params[path] = _to_device(stack)
    return unflatten_dict(params)


def _sources(path: ParamPath, config: DecoderConfig, checkpoint: Checkpoint) -> list[Source]:
    """Every tensor that goes into one parameter, checked."""
    parts = parts_of(path)
    layers = range(config.num_layers) if is_stacked(path) else [None]
    return [
        (part, layer, _find(checkpoint, part, layer, part_shape(config, part)))
        for layer in layers
        for part in parts
    ]


def _find(
    checkpoint: Checkpoint, part: str, layer: int | None, shape: tuple[int, ...]
) -> TensorRef:
    name = checkpoint.names.of(part, layer or 0)
    ref = checkpoint.tensors.get(name)
    if ref is None:
        raise CheckpointError(
            f"{checkpoint.label}: tensor {name!r} of shape {shape} is missing; the checkpoint has "
            f"{len(checkpoint.tensors)} others"
        )
    if ref.shape != shape:
        raise CheckpointError(
            f"{ref.file}: tensor {ref.name!r} has shape {ref.shape}; the configuration "
            f"wants {shape}"
        )
    _ = ref.decoder  # complains now rather than halfway through
    return ref


def _place(config: DecoderConfig, part: str, array: np.ndarray) -> np.ndarray:
    """Where a part goes in its layer's parameter: a view whose leading axis splits its rows."""
    split, index = place_of(config, part, array.shape)
    return array.reshape(split)[index]


def _fill(
    target: np.ndarray,
    part: str,
    ref: TensorRef,
    config: DecoderConfig,
    names: TensorNames,
    advance: Callable[[int], None],
) -> None:
    """Read a tensor piece by piece into its place, rounded to the place's dtype."""
    rows = ref.shape[0] // len(target)  # of the tensor, per entry of the target
    step = max(1, _BUFFER * len(target) // ref.size)
    for start in range(0, len(target), step):
        piece = target[start : start + step]
        values = ref.read(start * rows, (start + len(piece)) * rows)
        if names.interleaved and part.removesuffix("_bias") in ("q", "k"):
            pairs = values.reshape(-1, config.head_dim // 2, 2, *values.shape[1:])
            values = np.swapaxes(pairs, 1, 2)
        if part.endswith("norm") and names.norm_offset:
            values = values.astype(np.float32) + np.float32(names.norm_offset)
        with np.errstate(over="ignore", invalid="ignore"):
            piece[...] = values.reshape(piece.shape)
        if not _all_finite(piece):
            raise CheckpointError(
                f"{ref.file}: tensor {ref.name!r} has values that are not finite in {piece.dtype}"
            )
        advance(ref.nbytes * len(piece) // len(target))


def _all_finite(values: np.ndarray) -> bool:
    """`np.isfinite(values).all()` on the bits, many times as fast for 16-bit floats.

    Without their sign bit, exactly the finite numbers are below infinity.
    """
    bits = np.dtype(f"u{values.itemsize}")
    infinity = np.array(np.inf, values.dtype).view(bits)
    return bool((values.view(bits) & bits.type(2 ** (bits.itemsize * 8 - 1) - 1)).max() < infinity)


def _refuse_unknown(checkpoint: Checkpoint, known: set[str]) -> None:
    ignored = re.compile("|".join(checkpoint.names.ignored) or r"(?!)")
    extra = [
        name
        for name, ref in checkpoint.tensors.items()
        if ref.name not in known and not ignored.fullmatch(name)
    ]
    if extra:
        raise CheckpointError(
            f"{checkpoint.label}: tensor {extra[0]!r} has no place in this architecture "
            f"({len(extra)} such tensors)"
        )


def _value_dtype(stored: np.dtype, config: DecoderConfig) -> np.dtype:
    """What the elements of a stack mean: unsigned integers are bits of the config's dtype."""
    return jnp.dtype(config.dtype) if np.issubdtype(stored, np.unsignedinteger) else stored


def _empty(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes].view(leaf.dtype).reshape(leaf.shape)


def _to_device(stack: np.ndarray) -> jax.Array:
    """Onto the default device; on CPU the host buffer itself becomes the array."""
    return jax.block_until_ready(jax.device_put(stack))
