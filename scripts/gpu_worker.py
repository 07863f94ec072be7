"""Runs one part of `check_gpu` in a process of its own; see `gpu_records`.

The only argument is a `Task` in JSON.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from gpu_records import LOST_DEVICE, LostDeviceError, Recorder

PARTS = ("numerics", "speed", "references", "engine")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker has to do.

    Attributes:
      part: "machine" or one of `PARTS`.
      toy: everything small, for any machine.
      records: path of the file to write to.
      seconds: after which nothing is begun any more.
      limits: of `gpu_timing.Limits`, for the parts that need them.
    """

    part: str
    implementation: str
    toy: bool
    records: str
    seconds: float
    limits: dict[str, float] | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def run(task: Task) -> None:
    """The part's module is imported here: one that cannot be imported does not stop others."""
    recorder = Recorder(Path(task.records), task.seconds)
    implementation: Any = task.implementation
    if task.part == "machine":
        from gpu_machine import measure_machine

        measure_machine(recorder, task.toy)
        return
    if task.part == "numerics":
        from gpu_numerics import measure_numerics

        measure_numerics(recorder, implementation, task.toy)
        return
    from gpu_timing import Limits

    limits = Limits(**(task.limits or {}))
    if task.part == "speed":
        from gpu_speed import measure_speed as measure
    elif task.part == "references":
        from gpu_references import measure_references as measure
    else:
        from gpu_engine import measure_engine as measure
    measure(recorder, implementation, limits, task.toy)


def main() -> int:
    try:
        run(Task(**json.loads(sys.argv[1])))
    except LostDeviceError as error:
        print(f"the device is lost: {error}", flush=True)
        return LOST_DEVICE
    return 0


if __name__ == "__main__":
    sys.exit(main())
