"""Formats of a pool, and the arithmetic of quantized rows, against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy.linalg import hadamard

from pallas_kernels import FORMATS, KVFormat, Row, plain_format
from pallas_kernels.quantization import (
    k_scales,
    pack_int4,
    pack_scales,
    quantize_rows,
    rotate,
    unpack_int4,
    v_scales,
)

LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def numpy_scales(x: np.ndarray, dtype: str) -> np.ndarray:
    """The least bfloat16 that is not below max |x| / largest."""
    exact = np.abs(x).max(-1) / np.float32(LARGEST[dtype])
    near = exact.astype(ml_dtypes.bfloat16)
    above = np.nextafter(near, ml_dtypes.bfloat16(np.inf))
    return np.where(near.astype(np.float32) < exact, above, near).astype(np.float32)


@pytest.mark.parametrize("dtype", LARGEST)
def test_quantized_rows_span_the_whole_range_of_the_dtype(dtype):
    x = np.random.default_rng(0).standard_normal((9, 4, 32)).astype(np.float32) * 30
    x[3, 2] = 0
    elements, scale = map(np.asarray, quantize_rows(jnp.asarray(x), dtype))
    # A quotient may be rounded the other way, and the scale then up.
    np.testing.assert_allclose(scale, numpy_scales(x, dtype), rtol=2**-7)
    assert (scale == numpy_scales(x, dtype)).mean() > 0.9
    elements = elements.astype(np.float32)
    assert np.abs(elements).max() <= LARGEST[dtype]
    assert (np.abs(elements).max(-1) >= 0.98 * LARGEST[dtype] - 0.5)[x.any(-1)].all()
    assert scale[3, 2] == 0
    assert not elements[3, 2].any()
    error = np.abs(elements * scale[..., None] - x) / np.abs(x).max(-1, keepdims=True).clip(1e-9)
    steps = {"int8": 0.5 / 127, "int4": 0.5 / 7, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}
    assert error.max() < 1.01 * steps[dtype]


def test_infinity_and_nan_stay_what_they_are():
    x = jnp.asarray([[1.0, np.inf], [np.nan, 1.0]], jnp.float32)
    _, scale = quantize_rows(x, jnp.int8)
    assert np.isinf(scale[0])
    assert np.isnan(scale[1])


def test_both_scales_come_back_from_their_word():
    x = np.random.default_rng(1).standard_normal((2, 5, 7)).astype(np.float32)
    _, (k, v) = quantize_rows(jnp.asarray(x), jnp.int8)
    words = pack_scales(k, v)
    assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(k_scales(words), k)
    np.testing.assert_array_equal(v_scales(words), v)


def test_nibbles_are_the_halves_of_a_vector():
    x = np.arange(-8, 8, dtype=np.int8)
    packed = pack_int4(jnp.asarray(x[None]))
    low, high = x[:8].astype(np.int64) % 16, x[8:].astype(np.int64) % 16
    np.testing.assert_array_equal(packed[0], low + 16 * high)
    np.testing.assert_array_equal(unpack_int4(packed)[0], x)


@pytest.mark.parametrize(("size", "block"), [(8, 8), (128, 128), (96, 32), (80, 16), (7, 1)])
def test_a_rotation_is_by_hadamard_matrices_and_undoes_itself(size, block):
    x = np.random.default_rng(2).standard_normal((3, 2, size)).astype(np.float32)
    got = jax.jit(rotate)(x)
    parts = x.astype(np.float64).reshape(3, 2, -1, block)
    want = (parts @ hadamard(block) / np.sqrt(block)).reshape(x.shape)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(rotate(got), x, atol=1e-5)


def test_a_rotation_flattens_an_outlier():
    x = jnp.zeros((1, 128)).at[0, 5].set(100.0)
    assert float(jnp.abs(rotate(x)).max()) == pytest.approx(100 / np.sqrt(128))


@pytest.mark.parametrize(
    ("name", "head_dim", "cpu", "tpu"),
    [
        ("bfloat16", 32, (32, 32), (64, 64)),
        ("float32", 80, (80, 80), (128, 128)),
        ("int8", 128, (128, 128), (128, 128)),
        ("int4", 128, (64, 64), (64, 64)),
        ("int4", 256, (128, 128), (128, 128)),
        ("int4", 80, (40, 40), (64, 64)),
        ("k8v4", 128, (128, 64), (128, 128)),
        ("k8v4", 256, (256, 128), (256, 128)),
        ("k8v4", 64, (64, 32), (64, 64)),
    ],
)
def test_rows_fill_whole_tiles_of_lanes_on_tpu_only(name, head_dim, cpu, tpu):
    form = FORMATS[name]
    assert form.row(head_dim, "cpu") == form.row(head_dim, "gpu") == Row(*cpu)
    assert form.row(head_dim, "tpu") == Row(*tpu)
    for row in (cpu, tpu):
        assert form.split(sum(row), head_dim) == Row(*row)
    with pytest.raises(ValueError, match=f"rows of 6 lanes does not fit heads of {head_dim}"):
        form.split(6, head_dim)


def test_formats_that_no_pool_can_have_are_refused():
    with pytest.raises(ValueError, match="bfloat16 keys with int8 values"):
        KVFormat(jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int8), has_scales=True)
    with pytest.raises(ValueError, match="int8 elements without scales"):
        plain_format(jnp.int8)
    with pytest.raises(ValueError, match="head size 7"):
        FORMATS["int4"].row(7, "cpu")


def test_only_integers_are_rotated():
    rotated = {name: (f.rotates_k, f.rotates_v) for name, f in FORMATS.items()}
    plain = dict.fromkeys(FORMATS, (False, False))
    assert rotated == plain | dict.fromkeys(("int8", "int4", "k8v4"), (True, True))
    unrotated = dataclasses.replace(FORMATS["k8v4"], is_rotated=False)
    assert not unrotated.rotates_k
    assert not unrotated.rotates_v
