"""Negative controls: what is taken out of the GPU kernel is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu_kernel, gpu_softmax
from pallas_kernels._compat import JAX_VERSION
from tests.pallas_kernels.gpu_cases import (
    RACES,
    Setup,
    check_anew,
    kernel_format,
    paged,
    small_tiles,
)
from tests.pallas_kernels.ragged_cases import make_case

DECODE = paged(16, num_rows=1)  # one program is compiled, not two
CONVERTED = paged(64, num_rows=1, kv=kernel_format("k8v4"))
CHUNK = paged(16, batch_invariant=True, tiles=small_tiles(chunk=(2, 64, 2)))
SEES_EVERYTHING = JAX_VERSION >= (0, 12)  # jax 0.10 takes a commit or a copy to be done at once


class Changed:
    """`plgpu` with some functions replaced."""

    def __init__(self, **functions: Callable[..., Any]):
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)


def nothing(*_: Any, **__: Any) -> None:
    pass


def run(setup: Setup) -> None:
    """Simulate several blocks of a split, of several splits.

    Raises:
      AssertionError: a race, or a wrong result.
    """
    check_anew(make_case(setup, 0, [(1 if setup.num_rows == 1 else 40, 300)]))


@pytest.mark.slow
@pytest.mark.parametrize("setup", [CONVERTED, CHUNK], ids=["k8v4 decode", "chunk"])
def test_unchanged_there_is_no_race(setup):
    run(setup)


def test_a_stage_that_is_free_before_it_was_read_is_a_race(monkeypatch):
    operands = gpu_softmax._operands

    def early(s, r, warpgroup, item, key, stage, own):
        plgpu.barrier_arrive(r.free.at[stage])
        return operands(s, r, warpgroup, item, key, stage, own)

    monkeypatch.setattr(gpu_softmax, "_operands", early)
    monkeypatch.setattr(gpu_softmax, "plgpu", Changed(barrier_arrive=nothing))
    with pytest.raises(AssertionError, match="RACE DETECTED"):
        run(DECODE)


def test_a_stage_that_is_read_before_it_was_filled_is_a_race(monkeypatch):
    filled = []

    def wait_at_last(free: Any) -> None:
        plgpu.barrier_wait(filled.pop())
        plgpu.barrier_arrive(free)

    late = Changed(barrier_wait=filled.append, barrier_arrive=wait_at_last)
    monkeypatch.setattr(gpu_softmax, "plgpu", late)
    with pytest.raises(AssertionError, match=r"RACE DETECTED|nan location"):
        run(DECODE)


LEFT_OUT = [
    (gpu_softmax, "barrier_wait", True, CHUNK),
    (gpu_kernel, "barrier_wait", True, DECODE),
    (gpu_softmax, "commit_smem", SEES_EVERYTHING, CONVERTED),
    (gpu_kernel, "commit_smem", SEES_EVERYTHING, CHUNK),
    (gpu_kernel, "wait_smem_to_gmem", SEES_EVERYTHING, DECODE),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "is_seen", "setup"),
    LEFT_OUT,
    ids=[f"{module.__name__}.{name}" for module, name, *_ in LEFT_OUT],
)
def test_what_is_left_out_is_a_race(module, name, is_seen, setup, monkeypatch):
    if not is_seen:
        pytest.skip("this jax does not simulate it")
    monkeypatch.setattr(module, "plgpu", Changed(**{name: nothing}))
    with pytest.raises(AssertionError, match=RACES):
        run(setup)


@pytest.mark.slow
@pytest.mark.parametrize(("off", "setup"), [(1, DECODE), (-1, CHUNK)], ids=["decode", "chunk"])
def test_a_mask_that_is_off_by_one_gives_wrong_numbers(off, setup, monkeypatch):
    mask = gpu_softmax._mask
    monkeypatch.setattr(gpu_softmax, "_mask", lambda *a: mask(*a[:4], a[4] + off, a[5]))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(setup)


@pytest.mark.slow
@pytest.mark.parametrize("setup", [DECODE, CONVERTED, CHUNK], ids=["decode", "k8v4", "chunk"])
def test_values_behind_the_end_that_are_not_cleaned_give_nan(setup, monkeypatch):
    monkeypatch.setattr(gpu_softmax, "_clean", nothing)
    with pytest.raises(AssertionError, match="nan location mismatch"):
        run(setup)
