"""GGUF files: metadata and the places of the tensors, read in one pass over the header.

The layout is that of ggml's GGUF specification, versions 2 and 3: magic, version, counts, key-value
pairs, tensor descriptions, padding, data. The `gguf` package's own reader makes several numpy
objects per vocabulary entry, which takes seconds; here a vocabulary costs one pass. The package
still owns the quantized formats.
"""

import dataclasses
import functools
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagedjax.models.errors import CheckpointError
from pagedjax.models.tensor_file import TensorRef

_T = GGMLQuantizationType
_SUPPORTED = (_T.F32, _T.F16, _T.BF16, _T.Q4_0, _T.Q5_0, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.Q6_K)
_ENCODINGS = ", ".join(t.name for t in _SUPPORTED)

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """Header of a GGUF file.

    Attributes:
      metadata: numbers, bools, strings, lists of strings, and numpy vectors.
      tensors: by name; shapes outermost axis first (the reverse of the file's order).
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorRef]


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file.

    Raises:
      CheckpointError: no such file, not GGUF, an unsupported version, truncated, or malformed.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    size = path.stat().st_size
    if size < 4:
        raise CheckpointError(f"{path}: {size} bytes are too few for a GGUF file")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(path, data)
        try:
            return header.parse()
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path}: malformed GGUF header at byte {header.position}: {error}"
            ) from error


class _Header:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.position = 0

    def parse(self) -> GGUFFile:
        magic = self.take(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{self.path}: starts with {magic!r}, not with b'GGUF'")
        version = self.number("I")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(f"{self.path}: GGUF version {version}{hint}; supported are 2, 3")
        num_tensors, num_pairs = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.string()
            metadata[key] = self.value(key, self.number("I"))
        described = [self.describe() for _ in range(num_tensors)]
        return GGUFFile(self.path, metadata, self.place(described, metadata))

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path}: truncated: {size} bytes expected at byte {self.position} of "
                f"{len(self.data)}"
            )
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: metadata {key!r} has the unknown type {kind}")
        kind, length = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.strings(length)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: metadata {key!r} is an array of type {kind}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(length * dtype.itemsize), dtype)

    def strings(self, length: int) -> list[str]:
        """`string` for whole vocabularies, written out for speed."""
        unpack, data, position = struct.Struct("<Q").unpack_from, self.data, self.position
        out = []
        for _ in range(length):
            (size,) = unpack(data, position)
            position += 8
            out.append(data[position : position + size].decode())
            position += size
        self.position = position
        self.take(0)  # complains if the last string ran over the end
        return out

    def describe(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, element type and offset of a tensor."""
        name = self.string()
        dims = self.number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise CheckpointError(f"{self.path}: tensor {name!r} has {dims} dimensions; 1 to 4")
        shape = tuple(self.number("Q") for _ in range(dims))[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def place(
        self, described: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]
    ) -> dict[str, TensorRef]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorRef] = {}
        for name, shape, code, offset in described:
            if name in tensors:
                raise CheckpointError(f"{self.path}: two tensors are named {name!r}")
            ref = self.reference(name, shape, code, start + offset)
            if ref.offset + ref.nbytes > len(self.data):
                raise CheckpointError(
                    f"{self.path}: truncated: tensor {name!r} ends at byte "
                    f"{ref.offset + ref.nbytes} of {len(self.data)}"
                )
            tensors[name] = ref
        return tensors

    def reference(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> TensorRef:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the unknown element type {code}; "
                f"supported are {_ENCODINGS}"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block or 0 in shape:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} of shape {shape}: its rows are not whole blocks of "
                f"{block} elements ({kind.name})"
            )
        nbytes = int(np.prod([int(n) for n in shape], dtype=object)) // block * block_bytes
        decode = functools.partial(_dequantize, kind=kind) if kind in _SUPPORTED else None
        return TensorRef(name, self.path, offset, nbytes, shape, kind.name, decode, _ENCODINGS)


def _dequantize(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """One row, so that numpy works on all of it at once."""
    return dequantize(raw.reshape(1, -1), kind).reshape(-1)
