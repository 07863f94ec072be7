"""Safetensors files: the places of the tensors, from the JSON header alone.

Layout: header size (u64), JSON header, data. Read here rather than through the `safetensors`
package because its numpy interface has no bfloat16.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pagedjax.models.errors import CheckpointError
from pagedjax.models.tensor_file import TensorRef

_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}
_ENCODINGS = ", ".join(_DTYPES)
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


def read_safetensors(path: Path) -> dict[str, TensorRef]:
    """The tensors of one file, by name.

    Raises:
      CheckpointError: no such file, truncated, or malformed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    size = path.stat().st_size
    header, start = _header(path, size)
    header.pop("__metadata__", None)
    return {name: _reference(path, name, entry, start, size) for name, entry in header.items()}


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The JSON header, and the byte where the data starts."""
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size or length > _MAX_HEADER:
            raise CheckpointError(
                f"{path}: truncated or not safetensors: a header of {length} bytes in a file of "
                f"{size}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    return header, 8 + length


def _reference(path: Path, name: str, entry: Any, start: int, size: int) -> TensorRef:
    try:
        encoding, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: malformed entry of tensor {name!r}: {entry!r}") from error
    if not 0 <= begin <= end:
        raise CheckpointError(f"{path}: tensor {name!r} has the data offsets {begin}, {end}")
    if start + end > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name!r} ends at byte {start + end} of {size}"
        )
    dtype = _DTYPES.get(encoding)
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {encoding} has {end - begin} bytes"
        )
    decode = functools.partial(np.ndarray.view, dtype=dtype) if dtype is not None else None
    return TensorRef(name, path, start + begin, end - begin, shape, encoding, decode, _ENCODINGS)
