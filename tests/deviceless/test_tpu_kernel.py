"""The TPU kernel, compiled by the real compilers of every chip: what it supports, and in place."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    FORMATS,
    RaggedBatch,
    most_table_entries,
    paged_attention,
    paged_attention_and_write,
)
from tests.deviceless.targets import Compiled, compile_for

CHIPS = ("v5e", "v6e", "v7x")
NAMES = ("float32", "bfloat16", "fp8", "int8", "int4", "k8v4")
HEADS = {64: (6, 2), 80: (14, 2), 128: (8, 2), 256: (2, 2)}
"""Query and KV heads by head size: groups of 3, 7, 4 and 1."""
MANY_HEADS = (32, 8)
NUM_BLOCKS = 4096
PADDED = ("float32", "int4", "k8v4")  # one of each kind of row that is padded with head size 80
MATRIX = [
    (chip, name, head_dim)
    for chip, name, head_dim in itertools.product(CHIPS, NAMES, HEADS)
    if head_dim != 80 or name in PADDED
]
PAIRS = [case for n, case in enumerate(MATRIX) if n % 8 == 0]  # all chips, formats and head sizes


def compile_kernel(
    chip: str,
    name: str,
    head_dim: int,
    *,
    heads: tuple[int, int] | None = None,
    table: tuple[int, int] = (16, 32),
    writes: bool = True,
    batch_invariant: bool = False,
) -> tuple[Compiled, jax.ShapeDtypeStruct]:
    """Compile attention of 64 rows with a window; sinks and a soft cap in turns."""
    num_heads, kv_heads = heads or HEADS[head_dim]
    kv, num_seqs = FORMATS[name], table[0]
    block_size, width = 128 if kv.has_scales else 64, kv.row(head_dim, "tpu").width
    pool = jax.ShapeDtypeStruct((2, NUM_BLOCKS, kv_heads, block_size, width), kv.element)
    scales = jax.ShapeDtypeStruct(pool.shape[:4], jnp.uint32) if kv.has_scales else None
    number = jax.ShapeDtypeStruct((), jnp.int32)
    row = jax.ShapeDtypeStruct((64, kv_heads, head_dim), jnp.float32)
    batch = RaggedBatch(
        jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32),
        jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
        jax.ShapeDtypeStruct(table, jnp.int32),
    )

    def attend(pool, scales, q, k, v, layer, batch, window, sinks):
        options = {
            "sm_scale": head_dim**-0.5,
            "soft_cap": 30.0 if head_dim > 80 else None,
            "window": window,
            "sinks": sinks,
            "kv_dtype": kv,
            "implementation": "mosaic_tpu",
            "batch_invariant": batch_invariant,
        }
        if not writes:
            return paged_attention(q, pool, scales, layer, batch, **options), pool
        return paged_attention_and_write(q, k, v, pool, scales, layer, batch, **options)

    compiled = compile_for(
        chip,
        attend,
        pool,
        scales,
        jax.ShapeDtypeStruct((64, num_heads, head_dim), jnp.float32),
        row,
        row,
        number,
        batch,
        number,
        jax.ShapeDtypeStruct((num_heads,), jnp.float32) if head_dim < 128 else None,
        donate=(0, 1),
    )
    return compiled, pool


def assert_compiles_in_place(chip: str, name: str, head_dim: int, **options) -> None:
    compiled, pool = compile_kernel(chip, name, head_dim, **options)
    size = pool.size * pool.dtype.itemsize
    assert compiled.alias_bytes >= size
    assert compiled.temp_bytes < size / 4
    assert not compiled.copies_of(pool.shape)


@pytest.mark.parametrize(("chip", "name", "head_dim"), PAIRS)
def test_compiles_and_writes_in_place(chip, name, head_dim):
    assert_compiles_in_place(chip, name, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "name", "head_dim"), [c for c in MATRIX if c not in PAIRS])
def test_the_rest_of_the_matrix_compiles_and_writes_in_place(chip, name, head_dim):
    assert_compiles_in_place(chip, name, head_dim)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_largest_tables_that_are_accepted_fit_in_scalar_memory(chip):
    table = (64, most_table_entries() // 64)
    assert_compiles_in_place(chip, "bfloat16", 128, heads=MANY_HEADS, table=table)


@pytest.mark.parametrize("chip", CHIPS)
def test_one_tile_shape_for_every_row_compiles(chip):
    assert_compiles_in_place(chip, "bfloat16", 128, batch_invariant=True)


def test_attention_alone_reads_the_pool_where_it_is():
    assert_compiles_in_place("v6e", "bfloat16", 64, writes=False)
