"""Products over the columns of rows, against the keys and values that the rows stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.reference import read_rows
from pallas_kernels.tpu_columns import LANES, Columns, kv_columns
from tests.pallas_kernels.tpu_cases import kept_as

NUM_KEYS = 32


def taken(columns: Columns, rows: np.ndarray) -> jax.Array:
    """What a kernel multiplies: f32[keys, columns]."""

    def kernel(rows, out):
        lanes = rows[:, columns.start : columns.start + columns.lanes]
        out[...] = columns.elements(lanes, out.dtype)

    shape = jax.ShapeDtypeStruct((len(rows), columns.width), jnp.float32)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(rows)


@pytest.mark.parametrize("name", ["float32", "int8", "int4", "k8v4"])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 192, 256, 320])
def test_products_are_those_of_keys_and_values(head_dim, name):
    """Whatever lies in the lanes behind them."""
    kv, rng = kept_as(name), np.random.default_rng(head_dim)
    row = kv.row(head_dim, "tpu")
    rows = rng.integers(-127, 127, (NUM_KEYS, row.width)).astype(np.int8).astype(kv.element)
    keys, values = read_rows(rows, None, kv, head_dim)
    q = rng.integers(-9, 9, (3, head_dim)).astype(np.float32)
    p = rng.integers(0, 9, (3, NUM_KEYS)).astype(np.float32)
    of_k, of_v = kv_columns(kv, row)
    k, v = taken(of_k, rows), taken(of_v, rows)
    assert not of_k.is_same(of_v) or (k == v).all()
    assert k.shape[1] % LANES == v.shape[1] % LANES == 0
    np.testing.assert_array_equal(of_k.place(jnp.asarray(q)) @ k.T, q @ keys.T)
    np.testing.assert_array_equal(of_v.take(p @ v, head_dim), p @ values)
