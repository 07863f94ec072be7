"""The implementations of attention, and which of them serves a call."""

import logging
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import gpu_attention, tpu_attention
from pallas_kernels._compat import cannot_simulate_gpu
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.kv_format import KVFormat

Implementation = Literal[
    "xla", "mosaic_tpu", "mosaic_tpu_interpret", "mosaic_gpu", "mosaic_gpu_interpret", "reference"
]
"""Of attention: plain XLA, the Pallas kernels for TPU and for GPU, each also simulated on any
backend, and the float64 oracle."""

TPU = ("mosaic_tpu", "mosaic_tpu_interpret")
GPU = ("mosaic_gpu", "mosaic_gpu_interpret")
_KERNELS: dict[str, Implementation] = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
_log = logging.getLogger(__name__)


def choose_implementation(
    implementation: Implementation | None,
    platform: str,
    *,
    kv_format: KVFormat,
    storage: DTypeLike,
    block_size: int,
    num_seqs: int,
    table_width: int,
    head_dim: int,
    group: int,
) -> Implementation:
    """The implementation that serves such calls on `platform`: "cpu", "gpu" or "tpu".

    None picks the best one; where that is not the platform's kernel, a warning says why. Elements
    of 8 bits are served on TPU by the kernel alone.

    Args:
      storage: dtype of the pool, see `storage_dtype`.
      num_seqs, table_width: S and B of the block tables.
      head_dim: of keys in the pool, padding included. group: query heads of a KV head.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: the named implementation cannot serve them.
    """
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation {implementation!r}: one of {get_args(Implementation)}")
    kernel = implementation or _KERNELS.get(platform, "xla")
    xla_copies = platform == "tpu" and kv_format.element.itemsize == 1
    if kernel == "xla" and xla_copies:
        raise NotImplementedError(
            f"implementation 'xla' on platform 'tpu' cannot serve a pool of {kv_format}: XLA would "
            "copy it in every layer to write elements of 8 bits"
        )
    if kernel in ("xla", "reference"):
        return kernel
    for home, name in _KERNELS.items():
        if kernel == name and platform != home:
            raise NotImplementedError(
                f"implementation {name!r} on platform {platform!r}: it runs on {home.upper()}; "
                f"'{name}_interpret' simulates it"
            )
    if kernel in TPU:
        reason = tpu_attention.unsupported(
            kv_format, jnp.dtype(storage), block_size, num_seqs, table_width
        )
        if reason is None and kernel == "mosaic_tpu":
            reason = tpu_attention.unsupported_layout(kv_format, block_size)
    else:
        reason = gpu_attention.unsupported(kv_format, block_size, head_dim, group)
        if reason is None and kernel == "mosaic_gpu":
            reason = gpu_attention.unsupported_chip()
            if reason is None and storage != kv_format.element:
                reason = f"a pool of {kv_format} stored as {storage}"
        elif reason is None:
            reason = cannot_simulate_gpu()
    if reason is None:
        return kernel
    if implementation is not None or xla_copies:
        raise NotImplementedError(f"implementation {kernel!r} cannot serve {reason}")
    _log.warning(
        "attention runs in plain XLA, slower than the %s kernel, for %s", platform.upper(), reason
    )
    return "xla"


def choose_for(
    implementation: Implementation | None,
    num_heads: int,
    head_dim: int,
    pool: jax.Array,
    batch: RaggedBatch,
    kv_format: KVFormat,
) -> Implementation:
    """`choose_implementation` of a call with these arrays."""
    homes = {name: home for home, name in _KERNELS.items()}
    num_seqs, table_width = batch.block_tables.shape
    return choose_implementation(
        implementation,
        # A kernel that is named is compiled for the chip of the mesh, if for any.
        homes.get(implementation or "", jax.default_backend()),
        kv_format=kv_format,
        storage=pool.dtype,
        block_size=pool.shape[3],
        num_seqs=num_seqs,
        table_width=table_width,
        head_dim=kv_format.split(pool.shape[4], head_dim).head_dim(kv_format.k),
        group=num_heads // pool.shape[2],
    )
