"""A tensor inside a checkpoint file, read by rows: what the loaders of all file formats share."""

import dataclasses
import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pagedjax.models.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class TensorRef:
    """Where a tensor lies and how its bytes become numbers. Nothing is read until `read`.

    Attributes:
      encoding: the file format's name of the element type, e.g. "BF16" or "Q4_K".
      decode: u8[bytes] of whole rows -> flat floats; None: this encoding is not supported.
      supported: the encodings of this file format that are, for messages.
    """

    name: str
    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    encoding: str
    decode: Callable[[np.ndarray], np.ndarray] | None
    supported: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def decoder(self) -> Callable[[np.ndarray], np.ndarray]:
        """`decode`, or a CheckpointError."""
        if self.decode is None:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} is stored as {self.encoding}; "
                f"supported are {self.supported}"
            )
        return self.decode

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop` of the leading axis, as floats [stop - start, *shape[1:]]."""
        decode = self.decoder
        row_bytes, rest = divmod(self.nbytes, self.shape[0])
        if rest:
            raise CheckpointError(
                f"{self.file}: the {self.nbytes} bytes of tensor {self.name!r} are not "
                f"{self.shape[0]} equal rows"
            )
        raw = np.empty((stop - start) * row_bytes, np.uint8)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset + start * row_bytes)
            _fill(file, raw, self)
        return decode(raw).reshape(stop - start, *self.shape[1:])


def _fill(file: io.RawIOBase, raw: np.ndarray, tensor: TensorRef) -> None:
    view = raw.data
    while len(view):
        count = file.readinto(view)
        if not count:
            raise CheckpointError(
                f"{tensor.file} ends inside tensor {tensor.name!r}: {len(view)} bytes are missing"
            )
        view = view[count:]
