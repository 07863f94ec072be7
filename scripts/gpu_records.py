"""What a worker of `check_gpu` has found, line by line in a file that outlives it.

A kernel that hangs or crashes takes its process along, and a CUDA error leaves it useless. So every
part runs in a process of its own and writes each result as soon as it has it; whoever started it
reads the file whatever happened, and may start the part again, which goes on behind what is there.

Each line is a JSON object: `{"begin": name}`, and then the record, which has the `name` and either
what was measured, or `error` (its first line), or `skipped` (why).
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

Record = dict[str, Any]
LOST_DEVICE = 3  # exit status of a worker whose device does not answer any more


class LostDeviceError(Exception):
    """The device refuses all work after an error: only a new process can go on."""


class Recorder:
    """Runs pieces of work by name and writes down what they return.

    Args:
      path: the file of records; what it has already is not run again.
      seconds: from now on; pieces that would start later are skipped.
    """

    def __init__(self, path: Path, seconds: float):
        self._path = path
        self._start = time.monotonic()
        self._deadline = self._start + seconds
        self._done = {record["name"] for record in read_records(path)[0]}

    def run(self, name: str, work: Callable[[], Record]) -> None:
        """Run `work` unless it was run before or time is up.

        Raises:
          LostDeviceError: it failed in a way that leaves the device useless.
        """
        if name in self._done:
            return
        if time.monotonic() > self._deadline:
            self._write({"name": name, "skipped": "no time left"})
            return
        self._write({"begin": name})
        print(f"{self.elapsed:7.1f} s  {name}", flush=True)
        began = time.monotonic()
        try:
            record = work()
        except Exception as error:
            record = {"error": first_line(error)}
        record["wall_s"] = time.monotonic() - began
        self._write({"name": name, **record})
        if "error" in record:
            print(f"{self.elapsed:7.1f} s    error: {record['error']}", flush=True)
            _check_device()

    @property
    def elapsed(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._start

    def _write(self, line: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_records(path: Path) -> tuple[list[Record], str | None]:
    """The records of a file, and the name of the piece of work that was begun and has none."""
    records, begun = [], None
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        data = json.loads(line)
        begun = data.get("begin")
        if begun is None:
            records.append(data)
    return records, begun


def first_line(error: Exception) -> str:
    """The error's class and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


@contextmanager
def does_not_run(what: Record) -> Iterator[None]:
    """Turn an error inside into the `does not run` of a record: of software that is not ours."""
    try:
        yield
    except Exception as error:
        what["does not run"] = first_line(error)
        _check_device()


def _check_device() -> None:
    try:
        jax.block_until_ready(jnp.arange(8, dtype=jnp.int32) + 1)
    except Exception as error:
        raise LostDeviceError(first_line(error)) from error
