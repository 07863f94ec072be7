"""What machine this is: device, versions, and its limits."""

import dataclasses
import datetime
import shutil
import subprocess

import jax
import jaxlib
from gpu_records import Record, Recorder
from gpu_timing import measure_limits


def measure_machine(recorder: Recorder, toy: bool) -> None:
    recorder.run("about", about)
    if not toy and jax.default_backend() != "gpu":
        return  # where it would take minutes
    copied_bytes, side = (1 << 22, 256) if toy else (1 << 32, 8192)
    recorder.run("limits", lambda: dataclasses.asdict(measure_limits(copied_bytes, side)))


def about() -> Record:
    """Device kind, versions, date, and bytes of device memory that JAX may use."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device": device.device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform_version": " ".join(device.client.platform_version.split()),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "driver": _driver(),
    }


def _driver() -> str | None:
    """Driver version, clocks and power limit, if the vendor's tool is there to tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    fields = "driver_version,clocks.max.sm,clocks.max.memory,power.limit"
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0]
