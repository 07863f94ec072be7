"""Plain-XLA paged attention against the float64 oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    FORMATS,
    KVFormat,
    paged_attention,
    storage_dtype,
    to_storage,
)
from pallas_kernels.reference import read_rows, reference_attention
from tests.pallas_kernels.random_batch import RandomCase, random_case, stored


def oracle(case: RandomCase, layer: int, **options) -> np.ndarray:
    tables = (case.query_start, case.context_lens, case.block_tables)
    return reference_attention(case.q, case.pool, layer, *tables, **options)[: case.num_rows]


def xla(case: RandomCase, layer: int, pool: jax.Array | None = None, **options) -> np.ndarray:
    pool = jnp.asarray(case.pool) if pool is None else pool
    out = paged_attention(
        jnp.asarray(case.q), pool, None, layer, case.batch, implementation="xla", **options
    )
    assert np.isfinite(out).all()
    return np.asarray(out)[: case.num_rows]


@st.composite
def lengths(draw):
    """Up to four sequences: decodes, whole prompts and chunks behind a cached context."""
    pairs = []
    for _ in range(draw(st.integers(1, 4))):
        query = draw(st.one_of(st.just(1), st.integers(1, 40)))
        pairs.append((query, query + draw(st.one_of(st.just(0), st.integers(0, 60)))))
    return pairs


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    lengths=lengths(),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (5, 1)]),
    head_dim=st.sampled_from([8, 20, 64]),
    block_size=st.sampled_from([2, 4, 16]),
    window=st.sampled_from([None, 1, 5, 33]),
    soft_cap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    padding=st.sampled_from([(0, 0), (5, 0), (3, 2)]),
    invariant=st.booleans(),
)
def test_matches_the_oracle_over_random_ragged_batches(
    seed, lengths, heads, head_dim, block_size, window, soft_cap, with_sinks, padding, invariant
):
    case = random_case(
        seed,
        lengths,
        num_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        padding_rows=padding[0],
        padding_seqs=padding[1],
    )
    options = {"sm_scale": head_dim**-0.5, "soft_cap": soft_cap, "window": window}
    if with_sinks:
        options["sinks"] = np.linspace(-1, 2, heads[0]).astype(np.float32)
    got = xla(case, 1, batch_invariant=invariant, **options)
    np.testing.assert_allclose(got, oracle(case, 1, **options), rtol=2e-5, atol=2e-5)


def test_prefill_longer_than_a_tile_and_a_key_step():
    case = random_case(0, [(300, 700), (1, 600), (270, 270)], num_heads=4, kv_heads=1)
    for window, invariant in ((None, False), (100, False), (100, True)):
        options = {"sm_scale": 0.25, "window": window}
        got = xla(case, 0, batch_invariant=invariant, **options)
        np.testing.assert_allclose(got, oracle(case, 0, **options), rtol=3e-5, atol=3e-5)


def test_short_and_long_chunks_and_decodes_in_any_order_leave_each_others_rows_alone():
    # With four query heads on one KV head, tiles have 16 rows for short chunks, else 128.
    lengths = [(3, 40), (200, 210), (16, 16), (1, 90), (130, 130), (17, 300), (2, 2), (15, 80)]
    for order in (lengths, lengths[::-1]):
        case = random_case(0, order, num_heads=4, kv_heads=1, padding_rows=7, padding_seqs=1)
        for window in (None, 30):
            options = {"sm_scale": 0.25, "window": window}
            np.testing.assert_allclose(
                xla(case, 0, **options), oracle(case, 0, **options), rtol=3e-5, atol=3e-5
            )


def test_the_batched_decode_of_other_platforms_matches_the_oracle():
    from pallas_kernels import xla_attention as module

    case = random_case(3, [(1, 1), (1, 37), (6, 20), (1, 90)], padding_seqs=2)
    call = module._Call(
        jnp.asarray(case.pool), None, 1, FORMATS["float32"], 0.3, None, jnp.int32(11), None
    )
    q = jnp.asarray(case.q)
    is_decode = jnp.diff(case.batch.query_start) == 1
    out = module._decode_together(call, q, jnp.zeros_like(q), case.batch, is_decode)
    want = oracle(case, 1, sm_scale=0.3, window=11)
    rows = [0, 1, 8]
    np.testing.assert_allclose(out[np.array(rows)], want[rows], rtol=2e-5, atol=2e-5)
    assert not out[2:8].any(), "rows of a prefill chunk are not this function's"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_pools_kept_as_bits(dtype):
    case = random_case(7, [(1, 50), (9, 30)])
    stored = to_storage(jnp.asarray(case.pool), dtype, storage_dtype(dtype, "cpu"))
    assert stored.dtype == jnp.uint16
    case.pool = np.asarray(jnp.asarray(case.pool).astype(dtype).astype(jnp.float32))
    got = xla(case, 0, stored, sm_scale=0.25, kv_dtype=dtype)
    np.testing.assert_allclose(got, oracle(case, 0, sm_scale=0.25), rtol=0, atol=0.03)


def padded(case: RandomCase, lanes: int) -> np.ndarray:
    """The pool with `lanes` for K and for V of a head, zero behind those in use."""
    halves = case.pool.reshape(*case.pool.shape[:4], 2, -1)
    more = ((0, 0),) * 5 + ((0, lanes - halves.shape[-1]),)
    return np.pad(halves, more).reshape(*case.pool.shape[:4], 2 * lanes)


@pytest.mark.parametrize("invariant", [False, True])
def test_pools_whose_lanes_are_padded(invariant):
    case = random_case(8, [(1, 50), (9, 30), (40, 40)], padding_rows=2)
    want = oracle(case, 1, sm_scale=0.25)
    case.pool = padded(case, 24)
    got = xla(case, 1, sm_scale=0.25, batch_invariant=invariant)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(oracle(case, 1, sm_scale=0.25), want)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "k8v4"])
def test_quantized_pools_are_read_as_what_their_rows_stand_for(name, platform, implementation):
    """Every row of a pool is quantized; the scales of whatever nobody wrote are NaN."""
    case = random_case(9, [(1, 50), (9, 30), (40, 40)], padding_rows=2)
    form = FORMATS[name]
    pool, scales = stored(case, form, platform)
    options = {"sm_scale": 0.25, "window": 33}
    for invariant in (False, True):
        got = paged_attention(
            *(jnp.asarray(case.q), pool, scales, 0, case.batch),
            kv_dtype=form,
            implementation=implementation,
            batch_invariant=invariant,
            **options,
        )
        assert np.isfinite(got).all()
        want = oracle(case, 0, **options)
        exact = dataclasses.replace(case, pool=dequantized(case, pool, scales, form))
        got = np.asarray(got)[: case.num_rows]
        np.testing.assert_allclose(got, oracle(exact, 0, **options), rtol=2e-5, atol=2e-5)
        assert np.abs(got - want).max() < {"int8": 0.02, "fp8": 0.1}.get(name, 0.5)


def dequantized(case: RandomCase, pool: jax.Array, scales: jax.Array, form: KVFormat) -> np.ndarray:
    """The pool of plain numbers that a quantized one stands for."""
    rows = read_rows(np.asarray(pool), np.asarray(scales), form, case.pool.shape[-1] // 2)
    return np.concatenate(rows, axis=-1)


def test_a_traced_layer_and_window_under_jit():
    case = random_case(5, [(4, 9), (1, 30)])
    run = jax.jit(
        lambda q, pool, layer, window: paged_attention(
            q, pool, None, layer, case.batch, sm_scale=0.25, window=window
        )
    )
    got = run(case.q, case.pool, jnp.int32(1), jnp.int32(6))
    np.testing.assert_allclose(got, oracle(case, 1, sm_scale=0.25, window=6), rtol=2e-5, atol=2e-5)


def test_the_reference_implementation_runs_under_jit():
    case = random_case(6, [(4, 9), (1, 30)])
    run = jax.jit(
        lambda q, pool: paged_attention(
            q, pool, None, 1, case.batch, sm_scale=0.25, implementation="reference"
        )
    )
    got = run(case.q, case.pool)
    np.testing.assert_allclose(got, oracle(case, 1, sm_scale=0.25), rtol=1e-6, atol=1e-6)


def test_bad_arguments_are_refused_with_their_values():
    case = random_case(0, [(2, 5)])
    q, pool = jnp.asarray(case.q), jnp.asarray(case.pool)
    with pytest.raises(ValueError, match="cuda_core"):
        paged_attention(q, pool, None, 0, case.batch, sm_scale=1.0, implementation="cuda_core")  # type: ignore
    with pytest.raises(ValueError, match="heads of 17"):
        paged_attention(jnp.zeros((2, 4, 17)), pool, None, 0, case.batch, sm_scale=1.0)
    with pytest.raises(ValueError, match="sinks"):
        paged_attention(q, pool, None, 0, case.batch, sm_scale=1.0, sinks=jnp.zeros(3))
    with pytest.raises(ValueError, match="uint16"):
        paged_attention(q, pool.astype(jnp.uint16), None, 0, case.batch, sm_scale=1.0)
    with pytest.raises(ValueError, match="float32 with scales"):
        paged_attention(q, pool, jnp.ones((2, 2)), 0, case.batch, sm_scale=1.0)
    kind, low = FORMATS["int8"], pool.astype(jnp.int8)
    with pytest.raises(ValueError, match="int8 scaled cannot be stored as float32"):
        paged_attention(q, pool, jnp.ones(2), 0, case.batch, sm_scale=1.0, kv_dtype=kind)
    with pytest.raises(ValueError, match=r"scales \(2, 2\)"):
        paged_attention(q, low, jnp.ones((2, 2)), 0, case.batch, sm_scale=1.0, kv_dtype=kind)
