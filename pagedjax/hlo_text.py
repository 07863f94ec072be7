"""What a compiled program's text tells: which arrays it moves, and which Pallas kernels it calls.

XLA has no interface for these questions, so its text is read, line by line:

    %fused_computation.5 (param_0: bf16[4,8]) -> bf16[4,8] {
      ROOT %copy.3 = bf16[4,8]{1,0:T(8,128)(2,1)} copy(%param_0), metadata=...
    }

Braces behind a shape are its layout: the order of the axes, minor first, the tiles T(...), and the
memory S(n) if it is not the main one (on TPU, S(1) is VMEM).
"""

import dataclasses
import json
import math
import re
from typing import Any

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_RESULT = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = \(?(\w+)\[([\d,]*)\](\{[^}]*\})?")
_OPCODE = re.compile(r" ([a-z][a-z\d\-]*)\(")
_OPERAND = re.compile(r"[^%)]*%([\w.\-]+)")
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_MEMORY = re.compile(r"S\(\d+\)")
_MOVES = ("copy", "copy-start", "transpose", "convert", "bitcast-convert", "dynamic-slice", "slice")
_FREE = ("parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element")
_KERNEL_TARGETS = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|[^"]*triton)"')
_VMEM = "1"  # of XLA's memory spaces on TPU


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program; of a tuple, the first result.

    Attributes:
      dtype: as XLA writes it, such as "bf16". layout: axes and tiles, without the memory.
      main_memory: the result lies in the device's main memory (HBM).
      operand: name of the first operand. called: name of a fusion's body.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    main_memory: bool
    opcode: str
    operand: str | None
    called: str | None
    line: str


@dataclasses.dataclass(frozen=True)
class Move:
    """An instruction that writes an array's elements elsewhere, as they are or as another dtype.

    Attributes:
      relaid: the result's axes or tiles are not those of what is read.
      main_memory: it is written to the main memory; otherwise brought to where it is used.
    """

    name: str
    shape: tuple[int, ...]
    relaid: bool
    main_memory: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A call of a Pallas kernel; bytes are None where the compiler does not tell.

    Attributes:
      vmem_bytes: what it uses of a TPU core's VMEM. vmem_limit_bytes: what it may use, if set.
    """

    name: str
    backend: str
    vmem_bytes: int | None
    vmem_limit_bytes: int | None


class Program:
    """A compiled program, from `jax.stages.Compiled.as_text`."""

    def __init__(self, text: str):
        self._bodies = _computations(text)
        self._by_name = {i.name: i for body in self._bodies.values() for i in body}
        fusions = (i for i in self._by_name.values() if i.opcode == "fusion")
        fused = {i.called for i in fusions}
        # What stands in a fusion's body is never stored, except the fusion's own result.
        self._stored = [i for n, body in self._bodies.items() if n not in fused for i in body]

    def moves_of(self, shape: tuple[int, ...]) -> list[Move]:
        """Moves of arrays with as many elements as `shape`, whatever their dtype."""
        size = math.prod(shape)
        return [
            Move(i.name, i.shape, self._relays(i), i.main_memory)
            for i in self._stored
            if math.prod(i.shape) == size and self._only_moves(i)
        ]

    def relaid(self, shape: tuple[int, ...]) -> list[Move]:
        """Moves of arrays with the axes of `shape`, in any order, that change axes or tiles."""
        axes = _axes(shape)
        return [move for move in self.moves_of(shape) if move.relaid and _axes(move.shape) == axes]

    def kernels(self) -> list[Kernel]:
        """The Pallas kernels, in the order of the text."""
        calls = ((i, _KERNEL_TARGETS.search(i.line)) for i in self._stored)
        return [_kernel(i, found[1]) for i, found in calls if found and i.opcode == "custom-call"]

    def _only_moves(self, i: Instruction) -> bool:
        if i.opcode != "fusion":
            return i.opcode in _MOVES
        if "output_to_operand_aliasing" in i.line:  # in place
            return False
        body = self._bodies.get(i.called or "", [])
        array_steps = [x for x in body if math.prod(x.shape) > 1 and x.opcode not in _FREE]
        return bool(array_steps) and all(self._only_moves(x) for x in array_steps)

    def _relays(self, i: Instruction) -> bool:
        source = self._by_name.get(i.operand or "")
        return source is not None and source.layout != i.layout


def _axes(shape: tuple[int, ...]) -> list[int]:
    return sorted(n for n in shape if n > 1)


def _computations(text: str) -> dict[str, list[Instruction]]:
    """Name of a computation -> its instructions."""
    bodies: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            body = bodies.setdefault(header[1], [])
        elif instruction := _instruction(line):
            body.append(instruction)
    return bodies


def _instruction(line: str) -> Instruction | None:
    result = _RESULT.match(line)
    opcode = _OPCODE.search(line, result.end()) if result else None
    if result is None or opcode is None:
        return None
    layout = result[4] or ""
    operand = _OPERAND.match(line, opcode.end())
    called = _CALLED.search(line, opcode.end())
    return Instruction(
        name=result[1],
        dtype=result[2],
        shape=tuple(int(n) for n in result[3].split(",") if n),
        layout=_MEMORY.sub("", layout),
        main_memory=not _MEMORY.search(layout),
        opcode=opcode[1],
        operand=operand[1] if operand else None,
        called=called[1] if called else None,
        line=line.strip(),
    )


def _kernel(call: Instruction, target: str) -> Kernel:
    name = re.sub(r"\.\d+$", "", call.name)
    if target != "tpu_custom_call":
        return Kernel(name, target, None, None)
    config = _backend_config(call.line)
    used = _vmem(config.get("used_scoped_memory_configs", []))
    return Kernel(name, target, used, _vmem(config.get("scoped_memory_configs", [])))


def _backend_config(line: str) -> dict[str, Any]:
    _, found, rest = line.partition("backend_config=")
    return json.JSONDecoder().raw_decode(rest)[0] if found and rest.startswith("{") else {}


def _vmem(configs: list[dict[str, str]]) -> int | None:
    sizes = [int(c["size"]) for c in configs if c.get("memory_space") == _VMEM]
    return max(sizes, default=None)
