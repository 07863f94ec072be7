"""A kernel that is wrong on this device is found when the engine starts, and not used."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pagedjax import KernelCheckError, PagedJaxError, engine, self_check
from pagedjax.models.config import DecoderConfig
from pagedjax.sampling_params import SamplingParams
from pagedjax.self_check import CheckResult, check_attention
from pallas_kernels import FORMATS, attention, gpu_softmax, paged_attention_and_write
from tests.engine.tiny import (
    SLIDING,
    UNIFORM,
    generate,
    in_one_shape,
    oracle_greedy,
    tiny_engine,
)

KERNEL = "mosaic_tpu_interpret"  # plays the kernel of the device
SUMMED = dataclasses.replace(SLIDING, attn_scale=1.0, num_kv_heads=1, head_dim=16)

Call = Callable[..., tuple[jax.Array, jax.Array, Any]]


def check(model: DecoderConfig = SLIDING, **changed: Any) -> CheckResult:
    """Of one tile shape, unless told otherwise: that compiles fast."""
    settings = {
        "block_size": 16,
        "kv_format": FORMATS["float32"],
        "implementation": KERNEL,
        "platform": "cpu",
        "batch_invariant": True,
        **changed,
    }
    return check_attention(model, **settings)


# --- kernels with a mistake; each does what XLA does, but for one thing ---


def wrong_scale(call: Call, *arrays: Any, sm_scale: float, **options: Any) -> Any:
    return call(*arrays, sm_scale=1.2 * sm_scale, **options)


def sees_too_little(call: Call, *arrays: Any, window: jax.Array, **options: Any) -> Any:
    return call(*arrays, window=window - 1, **options)


def sees_what_comes(call: Call, q: Any, k: Any, v: Any, *arrays: Any, **options: Any) -> Any:
    """The second row of the chunk gets what the row behind it gets."""
    out, pool, scales = call(q, k, v, *arrays, **options)
    return out.at[5].set(out[6]), pool, scales


def one_nan(call: Call, *arrays: Any, **options: Any) -> Any:
    out, pool, scales = call(*arrays, **options)
    return out.at[40, 3, 1].set(jnp.nan), pool, scales


def one_infinity(call: Call, *arrays: Any, **options: Any) -> Any:
    out, pool, scales = call(*arrays, **options)
    return out.at[0, 0, 0].set(jnp.inf), pool, scales


def does_not_write(
    call: Call, q: Any, k: Any, v: Any, pool: Any, *rest: Any, **options: Any
) -> Any:
    out, _, scales = call(q, k, v, pool, *rest, **options)
    return out, pool, scales


def clears_a_free_slot(call: Call, *arrays: Any, **options: Any) -> Any:
    out, pool, scales = call(*arrays, **options)
    return out, pool.at[1, 0, 0, 0, 0].set(0), scales


def forgets_the_scales(call: Call, *arrays: Any, **options: Any) -> Any:
    out, pool, _ = call(*arrays, **options)
    return out, pool, arrays[4]


def reads_free_slots(
    call: Call, q: Any, k: Any, v: Any, pool: Any, *rest: Any, **options: Any
) -> Any:
    """Weights of zero do not help against NaN."""
    out, after, scales = call(q, k, v, pool, *rest, **options)
    return out + 0 * after.sum(), after, scales


def does_not_run(call: Call, *arrays: Any, **options: Any) -> Any:
    raise NotImplementedError("no such instruction\nand a long story")


WRONG = [
    *(wrong_scale, sees_too_little, sees_what_comes, one_nan, one_infinity, reads_free_slots),
    *(does_not_write, clears_a_free_slot),
]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Puts a mistake in the kernel that the check runs; a call of "xla" stays what it is."""

    def planted(mistake: Any) -> None:
        def call(*arrays: Any, implementation: str, **options: Any) -> Any:
            def right(*arrays: Any, **options: Any) -> Any:
                return paged_attention_and_write(*arrays, implementation="xla", **options)

            if implementation == "xla":
                return right(*arrays, **options)
            return mistake(right, *arrays, **options)

        monkeypatch.setattr(self_check, "paged_attention_and_write", call)

    return planted


# --- the check ---


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        (UNIFORM, {"batch_invariant": False}),
        (UNIFORM, {"block_size": 256}),
        (SLIDING, {"kv_format": FORMATS["bfloat16"], "platform": "tpu"}),
        (UNIFORM, {"kv_format": FORMATS["int4"], "block_size": 32, "platform": "tpu"}),
        (SUMMED, {"kv_format": FORMATS["bfloat16"], "platform": "gpu"}),
    ],
)
def test_a_right_kernel_passes(model: DecoderConfig, changed: dict[str, Any]) -> None:
    result = check(model, **changed)
    assert result.ok, str(result)
    assert result.largest_difference < result.tolerance / 2


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_the_gpu_kernel_passes_and_a_mistake_in_it_does_not(
    monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    if wrong:
        monkeypatch.setattr(gpu_softmax, "LOG2E", 1.5)
    result = check(
        dataclasses.replace(SLIDING, head_dim=64),
        kv_format=FORMATS["k8v4" if wrong else "bfloat16"],
        implementation="mosaic_gpu_interpret",
        platform="gpu",
        batch_invariant=False,
    )
    assert result.error is None
    assert result.ok is not wrong, str(result)


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_found(plant: Callable[[Any], None], mistake: Any) -> None:
    plant(mistake)
    result = check()
    assert not result.ok
    assert result.error is None
    assert result.is_pool_right == (mistake not in (does_not_write, clears_a_free_slot))


def test_a_mistake_inside_the_kernel_is_found_whatever_was_compiled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check(UNIFORM).ok
    kernel = attention.tpu_attention

    def with_mistake(*arrays: Any, sm_scale: float, **options: Any) -> Any:
        return kernel(*arrays, sm_scale=1.2 * sm_scale, **options)

    monkeypatch.setattr(attention, "tpu_attention", with_mistake)
    assert not check(UNIFORM).ok


def test_scales_that_are_not_written_are_found(plant: Callable[[Any], None]) -> None:
    plant(forgets_the_scales)
    result = check(kv_format=FORMATS["int8"], block_size=32)
    assert not result.is_pool_right
    assert result.error is None


def test_nan_in_16_bits_is_found(plant: Callable[[Any], None]) -> None:
    plant(one_nan)
    result = check(kv_format=FORMATS["bfloat16"], platform="gpu")
    assert not result.ok
    assert "nan" in str(result)


def test_an_exception_is_a_failure(plant: Callable[[Any], None]) -> None:
    plant(does_not_run)
    result = check()
    assert not result.ok
    assert isinstance(result.error, NotImplementedError)
    assert str(result) == "it raised NotImplementedError: no such instruction"


# --- the engine ---


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU becomes a device whose best attention is a kernel that has to be checked."""
    monkeypatch.setattr(self_check, "CHECKED", frozenset({("cpu", KERNEL)}))
    monkeypatch.setattr(engine, "choose_attention", lambda wanted, *_: wanted or KERNEL)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("mistake", "why"), [(wrong_scale, "the tolerance 0.0001"), (does_not_run, "no such instruct")]
)
def test_the_engine_goes_on_without_a_wrong_kernel(
    plant: Callable[[Any], None], caplog: pytest.LogCaptureFixture, mistake: Any, why: str
) -> None:
    plant(mistake)
    made = tiny_engine()
    (warning,) = warnings(caplog)
    assert all(text in warning for text in (KERNEL, why, jax.devices()[0].device_kind, "report"))
    assert made.runner.state.cache.implementation == "xla"
    assert b"\npagedjax_attention_kernel_disabled 1.0\n" in made.metrics.text()
    (output,) = generate(
        in_one_shape(made), [[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0)
    )
    assert output.outputs[0].token_ids == oracle_greedy(UNIFORM, [1, 2, 3], 4)[0]


@pytest.mark.usefixtures("on_device")
def test_the_engine_uses_a_right_kernel(caplog: pytest.LogCaptureFixture) -> None:
    made = tiny_engine()
    assert made.runner.state.cache.implementation == KERNEL
    assert b"\npagedjax_attention_kernel_disabled 0.0\n" in made.metrics.text()
    assert not warnings(caplog)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("mistake", "cause"), [(one_nan, type(None)), (does_not_run, NotImplementedError)]
)
def test_a_named_kernel_is_never_replaced(
    plant: Callable[[Any], None], caplog: pytest.LogCaptureFixture, mistake: Any, cause: type
) -> None:
    plant(mistake)
    with pytest.raises(KernelCheckError, match=KERNEL) as raised:
        tiny_engine(attention=KERNEL)
    assert isinstance(raised.value, PagedJaxError)
    assert isinstance(raised.value.__cause__, cause)
    assert not warnings(caplog)


@pytest.mark.parametrize("named", [None, KERNEL, "xla"])
def test_on_cpu_nothing_is_checked(plant: Callable[[Any], None], named: Any) -> None:
    plant(does_not_run)
    assert tiny_engine(attention=named).runner.state.cache.implementation == (named or "xla")
