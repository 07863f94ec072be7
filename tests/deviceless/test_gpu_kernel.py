"""The GPU kernel, compiled by the real compiler for an H200: what it supports, and in place."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from pagedjax.ptxas import KernelResources, kernel_resources
from pallas_kernels import RaggedBatch, gpu_kernel, paged_attention, paged_attention_and_write
from pallas_kernels.kv_format import FORMATS, KVFormat, plain_format
from tests.deviceless.targets import Compiled, compile_for

NAMES = ("bfloat16", "float16", "fp8", "int8", "int4", "k8v4")
HEADS = {64: (6, 2), 96: (2, 2), 128: (8, 2), 256: (7, 1)}
"""Query and KV heads by head size: groups of 3, 1, 4 and 7."""
BLOCK_SIZES = {64: 16, 96: 8, 128: 16, 256: 128}
MATRIX = list(itertools.product(NAMES, HEADS))
FIRST = [("bfloat16", 64), ("float16", 96), ("int4", 128), ("k8v4", 256)]
NUM_BLOCKS = 16384


def compile_kernel(
    kv: KVFormat,
    head_dim: int,
    *,
    heads: tuple[int, int] | None = None,
    block_size: int | None = None,
    writes: bool = True,
    batch_invariant: bool = False,
) -> tuple[Compiled, list[KernelResources], jax.ShapeDtypeStruct]:
    """Compile attention of 64 rows with a window; sinks and a soft cap in turns."""
    num_heads, kv_heads = heads or HEADS[head_dim]
    block_size = block_size or BLOCK_SIZES[head_dim]
    width = kv.row(head_dim, "gpu").width
    pool = jax.ShapeDtypeStruct((2, NUM_BLOCKS, kv_heads, block_size, width), kv.element)
    scales = jax.ShapeDtypeStruct(pool.shape[:4], jnp.uint32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    row = jax.ShapeDtypeStruct((64, kv_heads, head_dim), jnp.float32)
    batch = RaggedBatch(
        jax.ShapeDtypeStruct((17,), jnp.int32),
        jax.ShapeDtypeStruct((16,), jnp.int32),
        jax.ShapeDtypeStruct((16, 8192 // block_size), jnp.int32),
    )

    def attend(pool, scales, q, k, v, layer, batch, window, sinks):
        options = {
            "sm_scale": head_dim**-0.5,
            "soft_cap": 30.0 if head_dim > 96 else None,
            "window": window,
            "sinks": sinks,
            "kv_dtype": kv,
            "implementation": "mosaic_gpu",
            "batch_invariant": batch_invariant,
        }
        if not writes:
            return paged_attention(q, pool, scales, layer, batch, **options), pool
        return paged_attention_and_write(q, k, v, pool, scales, layer, batch, **options)

    with kernel_resources() as resources:
        compiled = compile_for(
            "h200",
            attend,
            pool,
            scales if kv.has_scales else None,
            jax.ShapeDtypeStruct((64, num_heads, head_dim), jnp.float32),
            row,
            row,
            number,
            batch,
            number,
            jax.ShapeDtypeStruct((num_heads,), jnp.float32) if head_dim < 128 else None,
            donate=(0, 1),
        )
    return compiled, resources, pool


def assert_compiles_well(kv: KVFormat, head_dim: int, **options) -> None:
    """In place, and no register is spilled. Too much shared memory would be an error."""
    compiled, resources, pool = compile_kernel(kv, head_dim, **options)
    size = pool.size * pool.dtype.itemsize
    assert compiled.alias_bytes >= size
    assert compiled.temp_bytes < size / 2
    assert not compiled.copies_of(pool.shape)
    names = {"paged_attention_chunk"}
    if not options.get("batch_invariant"):
        names.add("paged_attention_decode")
    assert {r.name for r in resources} == names
    assert not [r for r in resources if r.spill_bytes]


@pytest.mark.parametrize(("name", "head_dim"), FIRST)
def test_compiles_in_place_without_spilling(name, head_dim):
    assert_compiles_well(FORMATS[name], head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_dim"), [c for c in MATRIX if c not in FIRST])
def test_the_rest_of_the_matrix_compiles_in_place_without_spilling(name, head_dim):
    assert_compiles_well(FORMATS[name], head_dim)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": (32, 8), "batch_invariant": True},
        {"heads": (17, 1), "block_size": 256, "writes": False},
    ],
    ids=["one tile shape for every row", "attention alone, an odd group, large blocks"],
)
def test_other_forms_compile_well(options):
    assert_compiles_well(FORMATS["bfloat16"], 128, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "block_size", "group"), [(96, 32, 64), (128, 64, 5)])
def test_fp8_without_scales_compiles_well(head_dim, block_size, group):
    fp8 = plain_format("float8_e4m3fn")
    assert_compiles_well(fp8, head_dim, heads=(group, 1), block_size=block_size)


def test_a_kernel_that_spills_is_seen(monkeypatch):
    """Negative control: with so few registers, attending cannot do without memory."""
    monkeypatch.setattr(gpu_kernel, "_ATTEND_REGISTERS", 152)
    _, resources, _ = compile_kernel(FORMATS["bfloat16"], 128, heads=(16, 2))
    assert any(r.spill_bytes for r in resources)
