"""The real TPU and GPU compilers on a machine that has neither, for chips by description."""

import dataclasses
import functools
import importlib.util
import os
import re
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import jax
import numpy as np
import pytest
from jax.experimental import topologies

TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
TARGETS = ("cpu", "h200", *TPUS)

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


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled program says about its memory."""

    alias_bytes: int
    temp_bytes: int
    hlo: str

    def copies_of(self, shape: tuple[int, ...]) -> list[str]:
        """HLO instructions that make another array of this shape."""
        dims = ",".join(map(str, shape))
        makes = r"(copy|copy-start|transpose|bitcast-convert|convert)\("
        pattern = re.compile(r"= *\(?\w+\[" + dims + r"\][^=]*\b" + makes)
        return [line.strip() for line in self.hlo.splitlines() if pattern.search(line)]


@functools.cache
def _device(target: str) -> Any:
    if target == "cpu":
        return jax.devices("cpu")[0]
    if target == "h200":
        _need("jax_plugins.xla_cuda13", "jax-cuda13-plugin")
        options = {"platform": "cuda", "target_config": _H200, "topology": "1x1x1"}
        return topologies.get_topology_desc("h200", **options).devices[0]
    _need("libtpu", "jax[tpu]")
    return topologies.get_topology_desc(topology_name=TPUS[target], platform="tpu").devices[0]


def _need(module: str, package: str) -> None:
    """Skip without the compiler, unless `PAGEDJAX_REQUIRE_COMPILERS` says that it must be there."""
    if importlib.util.find_spec(module) is None:
        if os.environ.get("PAGEDJAX_REQUIRE_COMPILERS"):
            pytest.fail(f"{package} is not installed")
        pytest.skip(f"needs {package}")


def platform(target: str) -> str:
    return {"cpu": "cpu", "h200": "gpu"}.get(target, "tpu")


def compile_for(target: str, fn: Any, *args: Any, donate: tuple[int, ...] = ()) -> Compiled:
    """Compile `fn` of arrays or `ShapeDtypeStruct`s for one chip of `target`."""
    mesh = jax.sharding.Mesh(np.array([_device(target)]), ("x",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)

    with jax.set_mesh(mesh):
        lowered = jax.jit(fn, donate_argnums=donate).lower(*jax.tree.map(place, args))
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return Compiled(memory.alias_size_in_bytes, memory.temp_size_in_bytes, compiled.as_text())
