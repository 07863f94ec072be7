"""One command for a machine with an NVIDIA GPU: is the attention kernel right, and how fast is it?

  numerics    the kernel against a float64 oracle, over dtypes, head sizes, groups, block sizes
              and ragged batches; equal bits when run again, and alone (batch-invariant calls)
  speed       decodes as a share of the copy bandwidth, prefill chunks of a matrix product's rate
  references  the same work by JAX's Triton kernel, by cuDNN and by plain XLA
  engine      tokens a second of Llama 3.1 8B's shape with random weights, against its floor

Copy bandwidth is the bytes read plus the bytes written of a copy of 4 GiB over its time; of a
kernel, too, all that it must read and write counts. The product is 8192^3 in bfloat16.

Every part runs in a process of its own, which is stopped when it hangs, and started again behind
the piece of work that broke it. The exit status is 1 if numerics failed, and 2 without a GPU.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from gpu_records import LOST_DEVICE, Record, read_records
from gpu_report import numerics_failed, print_report, write_plot
from gpu_worker import PARTS, Task

from pallas_kernels import Implementation
from pallas_kernels._compat import GPU_SIMULATOR_REUSES_PROGRAMS

RESERVED_S = {"machine": 25, "numerics": 145, "speed": 110, "references": 80, "engine": 120}
"""Of a budget of 480 s: what is left for a part by those before it, and more if they need less."""
_STARTS = 4  # of one part's process
_LOST = "the device was lost"
# A kernel's simulated warpgroups wait for each other, each in one of XLA's threads, of which there
# may be too few on a small machine.
_TOY_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "8"}
_GRACE_S = 30  # for the last piece that a part began in time, but for the last part's


class Runner:
    """Starts parts one by one within a budget of `budget` seconds, counted from now.

    Args:
      stall: seconds without a record after which a part is stopped.
    """

    def __init__(self, implementation: str, toy: bool, budget: float, stall: float, folder: Path):
        self._implementation, self.is_toy = implementation, toy
        self._budget, self._stall, self._folder = budget, stall, folder
        self.worker = Path(__file__).with_name("gpu_worker.py")
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def run(
        self, part: str, later: list[str], limits: dict[str, float] | None = None
    ) -> list[Record]:
        """Records of a part, which leaves time for the parts that come later."""
        path = self._folder / f"{part}.jsonl"
        scale = self._budget / sum(RESERVED_S.values())
        end = self._budget - scale * sum(RESERVED_S[name] for name in later)
        for _ in range(_STARTS):
            seconds = end - self.elapsed
            if seconds <= 0:
                break
            print(f"{self.elapsed:7.1f} s  {part}: {seconds:.0f} s", flush=True)
            task = Task(part, self._implementation, self.is_toy, str(path), seconds, limits)
            reason = self._work(task, path)
            if reason is None:
                break
            begun = read_records(path)[1]
            name = begun or f"{part}: the process"
            print(f"{self.elapsed:7.1f} s  {name}: {reason}", flush=True)
            if reason == _LOST:
                continue  # behind the piece whose error is recorded
            _append(path, {"name": name, "error": reason})
            if begun is None:
                break  # it would end there again
        records = read_records(path)[0]
        return records or [{"name": part, "skipped": "no time left"}]

    def _work(self, task: Task, path: Path) -> str | None:
        """Run a worker to its end; why it was no good one."""
        environment = os.environ | (_TOY_ENVIRONMENT if self.is_toy else {})
        process = subprocess.Popen(
            [sys.executable, str(self.worker), task.to_json()], env=environment
        )
        try:
            seconds = min(task.seconds + _GRACE_S, self._budget - self.elapsed)
            return self._watch(process, path, time.monotonic() + seconds)
        finally:
            process.kill()
            process.wait()

    def _watch(self, process: subprocess.Popen[bytes], path: Path, deadline: float) -> str | None:
        size, changed = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            written = path.stat().st_size if path.exists() else 0
            if written != size:
                size, changed = written, now
            if now - changed > self._stall:
                return f"stopped, as nothing came for {self._stall:.0f} s"
            if now > deadline:
                return "stopped, as the time was up"
        if process.returncode == LOST_DEVICE:
            return _LOST
        return None if process.returncode == 0 else f"ended with status {process.returncode}"


def _append(path: Path, record: Record) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def run_all(parts: list[str], runner: Runner) -> Iterator[dict[str, Any]]:
    """Records of the machine, and then of each part, by name, as they come.

    Raises:
      SystemExit: there is no device of the kind that the parts need.
    """
    about, *rest = runner.run("machine", parts)
    limits = next((r for r in rest if "copy_bytes_per_s" in r), None)
    needed = "cpu" if runner.is_toy else "gpu"
    if about.get("platform") != needed:
        found = about.get("error") or about.get("platform")
        print(f"check_gpu needs an NVIDIA GPU, found: {found}; --toy runs on CPU", file=sys.stderr)
        raise SystemExit(2)
    yield {"machine": about, "limits": limits}
    rates = {name: value for name, value in (limits or {}).items() if name.endswith("_per_s")}
    for i, part in enumerate(parts):
        if part != "numerics" and not rates:
            yield {part: [{"name": part, "skipped": "the device's limits are not known"}]}
        else:
            yield {part: runner.run(part, parts[i + 1 :], rates)}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="all of it small, simulated on CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--budget", type=float, default=480, help="seconds in all (default: 480)")
    parser.add_argument(
        "--stall", type=float, default=150, help="seconds that one piece may take (default: 150)"
    )
    parser.add_argument(
        "--implementation",
        choices=get_args(Implementation),
        help="what to check (default: the kernel for GPU; of a toy, the same simulated)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers there, too")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the decodes' speed (png)")
    args = parser.parse_args(argv)
    args.implementation = args.implementation or (_toy_kernel() if args.toy else "mosaic_gpu")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs the package matplotlib")
    return args


def _toy_kernel() -> Implementation:
    # Older simulators compile every thread anew in every call, which takes a quarter of a minute.
    return "mosaic_gpu_interpret" if GPU_SIMULATOR_REUSES_PROGRAMS else "xla"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    parts = [part for part in PARTS if part in args.parts]
    with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
        runner = Runner(args.implementation, args.toy, args.budget, args.stall, Path(folder))
        data: dict[str, Any] = {"implementation": args.implementation, "toy": args.toy}
        for found in run_all(parts, runner):
            data |= found | {"seconds": runner.elapsed}
            if args.json:  # after every part, as somebody may stop this at any time
                args.json.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    print_report(data)
    if args.plot:
        write_plot(data, args.plot)
    return 1 if "numerics" in parts and numerics_failed(data["numerics"]) else 0


if __name__ == "__main__":
    sys.exit(main())
