"""Which implementation of attention serves a call, and that all of them agree."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    TileSizes,
    TpuTiles,
    choose_implementation,
    most_table_entries,
    paged_attention,
    paged_attention_and_write,
    plan_attention,
    storage_dtype,
    to_storage,
)
from tests.pallas_kernels.random_batch import random_case

SERVED = {
    "kv_dtype": "bfloat16",
    "storage": "bfloat16",
    "is_quantized": False,
    "block_size": 16,
    "num_seqs": 8,
    "table_width": 64,
}


def test_none_takes_the_best_of_each_platform_without_a_warning(caplog):
    best = {"cpu": "xla", "gpu": "xla", "tpu": "mosaic_tpu"}
    for platform, want in best.items():
        assert choose_implementation(None, platform, **SERVED) == want
    assert not caplog.records


@pytest.mark.parametrize("name", ["xla", "reference", "mosaic_tpu_interpret"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_name_is_taken_at_its_word(platform, name):
    assert choose_implementation(name, platform, **SERVED) == name


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_tpu_kernel_runs_on_no_other_platform(platform):
    with pytest.raises(NotImplementedError, match=f"'{platform}'.*mosaic_tpu_interpret"):
        choose_implementation("mosaic_tpu", platform, **SERVED)


UNSERVED = [
    ({"block_size": 8}, "block_size 8: .*multiple of 16"),
    ({"kv_dtype": "float8_e4m3fn", "storage": "float8_e4m3fn"}, "block_size 16: .*multiple of 32"),
    ({"storage": "uint16"}, "bfloat16 stored as uint16"),
    ({"kv_dtype": "float16", "storage": "float16"}, "a pool of float16"),
    ({"kv_dtype": "int8", "storage": "int8", "block_size": 32}, "int8 pool without scales"),
    (
        {"table_width": 1 << 20},
        r"8 sequences and 1048576 blocks.*raise block_size \(16\).*length \(now 16777216 tokens\)",
    ),
]


@pytest.mark.parametrize(("change", "reason"), UNSERVED)
def test_what_the_kernel_cannot_serve_raises_by_name_and_falls_back_with_a_warning(
    change, reason, caplog
):
    for name in ("mosaic_tpu", "mosaic_tpu_interpret"):
        with pytest.raises(NotImplementedError, match=f"'{name}' cannot serve.*{reason}"):
            choose_implementation(name, "tpu", **(SERVED | change))
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        assert choose_implementation(None, "tpu", **(SERVED | change)) == "xla"
    assert "slower than the TPU kernel" in caplog.text
    caplog.clear()
    assert choose_implementation(None, "cpu", **(SERVED | change)) == "xla"
    assert not caplog.records


def test_block_tables_fit_up_to_the_limit():
    served = SERVED | {"num_seqs": 1}
    most = most_table_entries()
    name = "mosaic_tpu"
    assert choose_implementation(name, "tpu", **(served | {"table_width": most})) == name
    with pytest.raises(NotImplementedError, match=f"{most} entries"):
        choose_implementation(name, "tpu", **(served | {"table_width": most + 1}))


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"'cuda_core': one of .*mosaic_tpu"):
        choose_implementation("cuda_core", "tpu", **SERVED)  # type: ignore


def test_sizes_that_the_kernel_cannot_work_with_are_refused():
    case = random_case(0, [(2, 5)], block_size=8)
    with pytest.raises(ValueError, match="must divide"):
        paged_attention(
            jnp.asarray(case.q),
            jnp.asarray(case.pool),
            None,
            0,
            case.batch,
            sm_scale=1.0,
            implementation="mosaic_tpu_interpret",
            tiles=TpuTiles(TileSizes(1, 3, 16), TileSizes(4, 3, 16)),
        )


LENGTHS = [(1, 1), (1, 37), (6, 50), (20, 20)]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_all_implementations_attend_and_write_alike(kv_dtype):
    size, dim, heads = 32, 16, 2
    case = random_case(0, LENGTHS, block_size=size, padding_rows=3, padding_seqs=1)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, len(case.q), heads, dim)).astype(np.float32)
    is_quantized = kv_dtype == "int8"
    values = jnp.nan_to_num(jnp.asarray(case.pool)) * (20 if is_quantized else 1)
    pool = to_storage(values, kv_dtype, storage_dtype(kv_dtype, "cpu"))
    scales = None
    if is_quantized:
        scales = jnp.full((*pool.shape[:3], 2, size), 0.05, jnp.float32)
    out = {}
    for name in ("reference", "xla", "mosaic_tpu_interpret"):

        def attend(pool, scales, name=name):
            shape = (case.batch, len(case.q), case.q.shape[1], pool, scales)
            layout = plan_attention(*shape, implementation=name)
            assert (layout is None) == (name != "mosaic_tpu_interpret")
            rows = map(jnp.asarray, (case.q, k, v))
            return paged_attention_and_write(
                *rows,
                pool,
                scales,
                1,
                case.batch,
                sm_scale=0.25,
                implementation=name,
                layout=layout,
            )

        out[name] = jax.tree.map(np.asarray, jax.jit(attend)(pool, scales))
    want, pool, scales = out.pop("reference")
    for got, got_pool, got_scales in out.values():
        tolerance = 2e-2 if is_quantized else 2e-5  # the kernel multiplies in bfloat16
        rows = slice(case.num_rows)
        np.testing.assert_allclose(got[rows], want[rows], rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(got_pool, pool)
        np.testing.assert_array_equal(got_scales, scales)
