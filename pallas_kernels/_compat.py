"""Every difference between the jax versions we support, in one place."""

import os
from typing import Any

import jax

JAX_VERSION: tuple[int, ...] = jax.__version_info__

# XLA:CPU fuses `x @ W.T.astype(f32)` for one row into a parallel mat-vec in jax 0.10; from 0.11 on
# the same product outside a loop runs on one thread, and a padded bf16 product is faster.
CPU_MATVEC_FUSES_CAST = JAX_VERSION < (0, 11)

# GPU interpret mode: buffers may share their memory, and a kernel that is called again is not
# compiled again, which takes a quarter of a minute.
GPU_SIMULATOR_KNOWS_UNIONS = GPU_SIMULATOR_REUSES_PROGRAMS = JAX_VERSION >= (0, 12)

_SIMULATOR_THREADS = 4  # one a warpgroup, which wait for each other, and one to spare


def gpu_simulator(**options: Any) -> Any:
    """What `plgpu.kernel` takes to be simulated; its options are `InterpretGPUParams`'s."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(**options)


def cannot_simulate_gpu() -> str | None:
    """Why a GPU kernel would wait for ever in interpret mode, with what to do; None if it works.

    XLA:CPU runs the simulated warpgroups in its thread pool, as large as the machine has cores.
    """
    threads = int(os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or os.cpu_count() or 1)
    if threads >= _SIMULATOR_THREADS:
        return None
    return (
        f"{threads} threads of XLA:CPU: it takes {_SIMULATOR_THREADS}; set the environment "
        f"variable PJRT_NPROC={_SIMULATOR_THREADS} before JAX starts"
    )
