"""What NVIDIA's assembler says of the Pallas kernels that are compiled: registers, and spills."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DUMP = "MOSAIC_GPU_DUMP_TO"  # where Mosaic GPU leaves the assembler's report, one file a kernel
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class KernelResources:
    """Of one kernel.

    Attributes:
      registers: of a thread. spill_bytes: stored to and loaded from memory for want of more.
    """

    name: str
    registers: int
    spill_bytes: int


@contextlib.contextmanager
def kernel_resources() -> Iterator[list[KernelResources]]:
    """A list that holds, when the block is left, all Mosaic GPU kernels compiled inside.

    One that comes from JAX's compilation cache is not compiled. Without `nvdisasm` on the PATH,
    Mosaic GPU says on stderr that it is missing: it would also disassemble, which is not needed.
    """
    found: list[KernelResources] = []
    before = os.environ.get(_DUMP)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_DUMP] = folder
        try:
            yield found
        finally:
            if before is None:
                del os.environ[_DUMP]
            else:
                os.environ[_DUMP] = before
            found += [_parse(path) for path in sorted(Path(folder).glob("*.ptxas"))]


def _parse(path: Path) -> KernelResources:
    text = path.read_text("utf-8")
    registers, spilled = _REGISTERS.search(text), _SPILLED.search(text)
    if registers is None or spilled is None:
        raise ValueError(f"no report of ptxas that can be read: {text[:200]!r}")
    name = re.sub(r"_\d+$", "", path.stem)
    return KernelResources(name, int(registers[1]), sum(map(int, spilled.groups())))
