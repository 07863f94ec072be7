"""Compile for chips that are not here: the real compilers of TPU and GPU, given a description.

Needs the chip's compiler, not the chip: `jax[tpu]` for TPU; `jax-cuda13-plugin` and
`jax-cuda13-pjrt`, and a `ptxas` on the PATH, for the H200. Nothing is executed.
"""

import functools
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagedjax.batch import Batch, build_batch
from pagedjax.device_state import init_state
from pagedjax.errors import CompilerNotInstalledError
from pagedjax.hlo_text import Program
from pagedjax.memory import pool_format
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params, abstract_params
from pagedjax.models.layout import param_formats
from pagedjax.sampling_rows import SamplingRows
from pagedjax.scheduler_config import SchedulerConfig
from pagedjax.step import EngineState
from pallas_kernels import Implementation

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
"""The smallest topology of each TPU; programs are compiled for one of its chips."""

TARGETS = (*TOPOLOGIES, "h200")

# What XLA needs to know of an NVIDIA H200 SXM (sm_90a).
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


@dataclass(frozen=True)
class Compiled:
    """What a compiled program says of itself.

    Attributes:
      argument_bytes, temp_bytes: memory of its inputs, and beside inputs and outputs.
      alias_bytes: of outputs that take the place of donated inputs.
      lower_s, compile_s: seconds for tracing and lowering, and for compiling.
      program: its instructions.
    """

    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    lower_s: float
    compile_s: float
    program: Program

    def copies_of(self, shape: tuple[int, ...]) -> list[str]:
        """Instructions that write an array of so many elements to another place in memory."""
        return [move.name for move in self.program.moves_of(shape) if move.main_memory]


def platform(target: str) -> str:
    """JAX's name of a target's platform: "cpu", "gpu" or "tpu"."""
    return {"cpu": "cpu", "h200": "gpu"}.get(target, "tpu")


@functools.cache
def device(target: str) -> Any:
    """A chip of `TARGETS` to compile for, or the CPU for "cpu".

    Raises:
      CompilerNotInstalledError: names the package that has the compiler.
    """
    if target == "cpu":
        return jax.devices("cpu")[0]
    if target == "h200":
        _need("jax_plugins.xla_cuda13", "jax-cuda13-plugin", target)
        options = {"platform": "cuda", "target_config": _H200, "topology": "1x1x1"}
        return topologies.get_topology_desc("h200", **options).devices[0]
    _need("libtpu", "jax[tpu]", target)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip to share
    return topologies.get_topology_desc(TOPOLOGIES[target], platform="tpu").devices[0]


def mesh_of(target: str) -> Mesh:
    """A mesh of one chip. Pallas asks the current mesh (`jax.set_mesh`) for the chip."""
    return Mesh(np.array([device(target)]), ("x",))


def compile_for(
    target: str,
    fn: Callable[..., Any],
    *args: Any,
    donate: tuple[int, ...] = (),
    place: Callable[[Any, NamedSharding], Any] | None = None,
) -> Compiled:
    """Compile `fn` of arrays or `ShapeDtypeStruct`s for one chip of `target`.

    Args:
      donate: indices of the donated arguments.
      place: from the tuple of arguments and the sharding to a tree of where each array lies, a
        sharding or a `Format`; None: all on the sharding.

    Raises:
      CompilerNotInstalledError: names the package that has the compiler.
    """
    mesh = mesh_of(target)
    here = NamedSharding(mesh, PartitionSpec())
    places = place(args, here) if place else jax.tree.map(lambda _: here, args)
    abstract = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args, places
    )
    with jax.set_mesh(mesh):
        started = time.perf_counter()
        lowered = jax.jit(fn, donate_argnums=donate).lower(*abstract)
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None  # both compilers tell it
    assert text is not None
    return Compiled(
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        lower_s=lowered_at - started,
        compile_s=done - lowered_at,
        program=Program(text),
    )


def place_like_engine(args: Any, here: NamedSharding) -> Any:
    """For `compile_for`: the first of the arguments, parameters, in the formats of an engine."""
    params, *rest = args
    return param_formats(params, here), *(jax.tree.map(lambda _: here, arg) for arg in rest)


def abstract_step(
    model: DecoderConfig,
    limits: SchedulerConfig,
    *,
    num_tokens: int,
    num_blocks: int,
    platform: str,
    attention: Implementation | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[Params, EngineState, Batch]:
    """What `pagedjax.step.step` takes: shapes of parameters and state, and a batch of padding.

    Args:
      num_tokens: rows of the batch, for `limits.max_num_seqs` sequences.
      num_blocks: of the pool.
      platform: backend they are for, which decides how values are stored.
      attention: kernel to use; None picks one.
      kv_cache_dtype: as in `EngineConfig`.
    """
    state = jax.eval_shape(
        lambda: init_state(
            model,
            limits,
            num_blocks=num_blocks,
            kv_format=pool_format(kv_cache_dtype, model),
            platform=platform,
            attention=attention,
        )
    )
    batch = build_batch(
        [],
        num_tokens=num_tokens,
        num_seqs=limits.max_num_seqs,
        num_groups=limits.num_groups,
        table_width=limits.table_width,
        rows=SamplingRows(limits.max_num_seqs),
    )
    return abstract_params(model, platform), state, batch


def _need(module: str, package: str, target: str) -> None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        found = False
    if not found:
        raise CompilerNotInstalledError(f"compiling for {target} needs the package {package}")
