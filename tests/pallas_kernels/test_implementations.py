"""Which implementation of attention serves a call, and that all of them agree."""

import logging
import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    FORMATS,
    GpuTiles,
    GpuTileSizes,
    TileSizes,
    TpuTiles,
    choose_implementation,
    gpu_attention,
    most_table_entries,
    paged_attention,
    paged_attention_and_write,
    plan_attention,
)
from pallas_kernels._compat import cannot_simulate_gpu
from tests.pallas_kernels.gpu_cases import threads_compiled_once
from tests.pallas_kernels.random_batch import random_case, stored

SERVED = {
    "kv_format": FORMATS["bfloat16"],
    "storage": jnp.dtype(jnp.bfloat16),
    "block_size": 16,
    "num_seqs": 8,
    "table_width": 64,
    "head_dim": 64,
    "group": 4,
}


def test_none_takes_the_best_of_each_platform_without_a_warning(caplog):
    best = {"cpu": "xla", "gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
    for platform, want in best.items():
        assert choose_implementation(None, platform, **SERVED) == want
    assert not caplog.records


@pytest.mark.parametrize(
    "name", ["xla", "reference", "mosaic_tpu_interpret", "mosaic_gpu_interpret"]
)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_name_is_taken_at_its_word(platform, name):
    assert choose_implementation(name, platform, **SERVED) == name


@pytest.mark.parametrize("home", ["gpu", "tpu"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_kernel_runs_on_no_other_platform(platform, home):
    name = f"mosaic_{home}"
    if platform == home:
        assert choose_implementation(name, platform, **SERVED) == name
        return
    with pytest.raises(
        NotImplementedError, match=f"'{platform}'.*runs on {home.upper()}.*{name}_interpret"
    ):
        choose_implementation(name, platform, **SERVED)


def pool_of(name: str) -> dict:
    return {"kv_format": FORMATS[name], "storage": FORMATS[name].element}


UNSERVED_ON_TPU = [
    ({"block_size": 8}, "block_size 8: .*multiple of 16"),
    ({"storage": jnp.dtype(jnp.uint16)}, "bfloat16 stored as uint16"),
    (pool_of("float16"), "a pool of float16"),
    (
        {"table_width": 1 << 20},
        r"8 sequences and 1048576 blocks.*raise block_size \(16\).*length \(now 16777216 tokens\)",
    ),
]


UNSERVED_ON_GPU = [
    (pool_of("float32"), "a pool of float32: it reads bfloat16, .*int8"),
    ({"head_dim": 32}, "head size 32: one of 64, 96, 128, 256"),
    ({"group": 65}, "65 query heads a KV head: at most 64"),
    ({"block_size": 4}, "block_size 4: it must be 8, 16, 32 or a multiple of 64"),
    ({"block_size": 24}, "block_size 24: it must be"),
    ({"block_size": 96}, "block_size 96: it must be"),
]
UNSERVED = [
    pytest.param(platform, change, reason, id=f"{platform}: {reason[:30]}")
    for platform, table in (("tpu", UNSERVED_ON_TPU), ("gpu", UNSERVED_ON_GPU))
    for change, reason in table
]


def falls_back(caplog, platform: str, **call) -> str:
    """The one warning with which None becomes plain XLA; by no means on CPU."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        assert choose_implementation(None, platform, **call) == "xla"
    (record,) = caplog.records
    assert f"slower than the {platform.upper()} kernel" in record.getMessage()
    caplog.clear()
    assert choose_implementation(None, "cpu", **call) == "xla"
    assert not caplog.records
    return record.getMessage()


@pytest.mark.parametrize(("platform", "change", "reason"), UNSERVED)
def test_what_a_kernel_cannot_serve_raises_by_name_and_falls_back_with_a_warning(
    platform, change, reason, caplog
):
    call = SERVED | change
    for name in (f"mosaic_{platform}", f"mosaic_{platform}_interpret"):
        with pytest.raises(NotImplementedError, match=f"'{name}' cannot serve.*{reason}"):
            choose_implementation(name, platform, **call)
    assert re.search(reason, falls_back(caplog, platform, **call))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "k8v4"])
def test_on_tpu_nothing_but_the_kernel_serves_elements_of_8_bits(name):
    form = re.escape(str(FORMATS[name]))
    call = SERVED | pool_of(name)
    assert choose_implementation(None, "tpu", **call | {"block_size": 128}) == "mosaic_tpu"
    reason = f"block_size 16: with {form} it must be a multiple of 32"
    for wanted in (None, "mosaic_tpu", "mosaic_tpu_interpret"):
        with pytest.raises(NotImplementedError, match=f"cannot serve {reason}"):
            choose_implementation(wanted, "tpu", **call)
    with pytest.raises(NotImplementedError, match=f"'xla' .*cannot serve a pool of {form}"):
        choose_implementation("xla", "tpu", **call | {"block_size": 128})
    call["block_size"] = 64  # the simulated kernel does not mind how XLA lays out an array
    assert choose_implementation("mosaic_tpu_interpret", "tpu", **call) == "mosaic_tpu_interpret"
    for wanted in (None, "mosaic_tpu"):
        with pytest.raises(NotImplementedError, match=r"block_size 64: with scales .*of 128"):
            choose_implementation(wanted, "tpu", **call)


def test_only_the_simulated_gpu_kernel_takes_a_pool_of_bits(caplog):
    call = SERVED | {"storage": jnp.dtype(jnp.uint16)}
    simulated = "mosaic_gpu_interpret"
    assert choose_implementation(simulated, "cpu", **call) == simulated
    reason = "bfloat16 stored as uint16"
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu' cannot serve.*{reason}"):
        choose_implementation("mosaic_gpu", "gpu", **call)
    assert reason in falls_back(caplog, "gpu", **call)


def test_another_gpu_than_hopper_falls_back_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(gpu_attention, "unsupported_chip", lambda: "a GPU of another kind")
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' cannot serve a GPU of another"):
        choose_implementation("mosaic_gpu", "gpu", **SERVED)
    assert "a GPU of another kind" in falls_back(caplog, "gpu", **SERVED)
    simulated = "mosaic_gpu_interpret"
    assert choose_implementation(simulated, "cpu", **SERVED) == simulated


@pytest.mark.parametrize(
    ("capability", "is_served"),
    [("9.0", True), (9.0, True), ("10.0", False), ("12.0", False), ("8.9", False), (None, True)],
)
def test_the_gpu_kernel_is_for_compute_capability_nine(capability, is_served, monkeypatch):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    reason = gpu_attention.unsupported_chip()
    assert (reason is None) == is_served
    assert is_served or f"capability {capability}: it is written for Hopper" in reason


@pytest.mark.parametrize(
    ("variables", "cores", "threads"),
    [
        ({}, 3, 3),
        ({}, 4, None),
        ({}, None, 1),
        ({"PJRT_NPROC": "2"}, 64, 2),
        ({"NPROC": "3"}, 64, 3),
        ({"PJRT_NPROC": "4", "NPROC": "1"}, 1, None),
    ],
)
def test_the_gpu_kernel_is_not_simulated_where_it_would_wait_for_ever(
    variables, cores, threads, monkeypatch
):
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    if threads is None:
        assert cannot_simulate_gpu() is None
        return
    with pytest.raises(NotImplementedError, match=f"{threads} threads of XLA.*PJRT_NPROC=4"):
        choose_implementation("mosaic_gpu_interpret", "cpu", **SERVED)
    assert choose_implementation("mosaic_gpu", "gpu", **SERVED) == "mosaic_gpu"


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


TPU_TILES = TpuTiles(TileSizes(1, 2, 16), TileSizes(4, 2, 16))
GPU_TILES = GpuTiles(GpuTileSizes(2, 64, 2, 128), GpuTileSizes(2, 64, 2, 128))


@pytest.mark.parametrize(
    ("name", "tiles", "reason"),
    [
        ("mosaic_gpu_interpret", TPU_TILES, "TpuTiles given to a kernel that takes GpuTiles"),
        ("mosaic_tpu_interpret", GPU_TILES, "GpuTiles given to a kernel that takes TpuTiles"),
    ],
)
def test_sizes_of_another_kernel_are_refused(name, tiles, reason):
    case = random_case(0, [(2, 5)], block_size=16, head_dim=64)
    q, pool = (jnp.asarray(x, jnp.bfloat16) for x in (case.q, case.pool))
    with pytest.raises(ValueError, match=reason):
        paged_attention(
            q, pool, None, 0, case.batch, sm_scale=1.0, implementation=name, tiles=tiles
        )
    with pytest.raises(ValueError, match=reason):
        plan_attention(case.batch, len(q), 4, 64, pool, None, implementation=name, tiles=tiles)


LENGTHS = [(1, 1), (1, 37), (6, 50), (20, 20)]


TPU, GPU = "mosaic_tpu_interpret", "mosaic_gpu_interpret"


@pytest.mark.parametrize(
    ("name", "dim", "kernels"),
    [
        ("float32", 16, (TPU,)),
        ("bfloat16", 64, (GPU,)),
        ("fp8", 64, (GPU,)),
        ("int8", 64, (TPU,)),
        ("int4", 64, (TPU, GPU)),
        ("k8v4", 64, (TPU, GPU)),
    ],
)
def test_all_implementations_attend_and_write_alike(name, dim, kernels):
    """Attention against the float64 oracle of the same pool, and every bit of what is written."""
    size, heads, form = 32, 2, FORMATS[name]
    case = random_case(0, LENGTHS, block_size=size, head_dim=dim, padding_rows=3, padding_seqs=1)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, len(case.q), heads, dim)).astype(np.float32)
    out = {}
    for implementation in ("reference", "xla", *kernels):
        # The TPU kernel takes rows of whole tiles of lanes.
        platform = "tpu" if implementation == TPU else "cpu"

        def attend(pool, scales, implementation=implementation):
            how = {"kv_dtype": form, "implementation": implementation}
            shape = (case.batch, len(case.q), *case.q.shape[1:], pool, scales)
            layout = plan_attention(*shape, **how)
            assert (layout is None) == (implementation in ("reference", "xla"))
            rows = map(jnp.asarray, (case.q, k, v))
            return paged_attention_and_write(
                *(*rows, pool, scales, 1, case.batch), sm_scale=0.25, layout=layout, **how
            )

        with threads_compiled_once():
            found = jax.jit(attend)(*stored(case, form, platform))
        attended, pool, scales = jax.tree.map(np.asarray, found)
        out[implementation] = attended, without_padding(pool, form, dim), scales
    want, pool, scales = out.pop("reference")
    for got, got_pool, got_scales in out.values():
        tolerance = 2e-5 if name == "float32" else 2e-2  # kernels multiply in 16 bits
        rows = slice(case.num_rows)
        np.testing.assert_allclose(got[rows], want[rows], rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(got_pool, pool)
        np.testing.assert_array_equal(got_scales, scales)


def without_padding(pool, form, head_dim):
    """The lanes of rows that hold elements, as bits."""
    row = form.split(pool.shape[-1], head_dim)
    k, v = (form.lanes(dtype, head_dim) for dtype in (form.k, form.v))
    kept = np.concatenate([pool[..., :k], pool[..., row.k : row.k + v]], axis=-1)
    return kept.view(f"u{pool.itemsize}")
