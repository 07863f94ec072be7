"""Negative controls: a wait that is taken out of the TPU kernel is noticed."""

import numpy as np
import pytest

from pallas_kernels import tpu_copies, tpu_kernel
from tests.pallas_kernels.ragged_cases import bits, make_case
from tests.pallas_kernels.tpu_cases import Setup, arguments, compile_anew, races_are_errors

# Decodes and chunks of several fetches each: halves of the buffers are refilled after writes.
LENGTHS = [(1, 3), (1, 40), (1, 20), (40, 40), (25, 60)]


def run(mode: str, window: int | None = None) -> None:
    """Simulate a kernel that is traced anew.

    Raises:
      AssertionError: a race, a semaphore that is not zero in the end, a wrong result or pool.
    """
    case = make_case(Setup(), 0, LENGTHS, window)
    with races_are_errors():
        out, pool = map(np.asarray, compile_anew(case.setup, mode)(*arguments(case)))
    np.testing.assert_allclose(out[: case.num_rows], case.oracle(), rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(bits(pool), bits(case.after))


def leave_out(monkeypatch, module, name: str) -> None:
    monkeypatch.setattr(module, name, lambda *_: None)


@pytest.mark.parametrize("mode", ["races", "eager"])
@pytest.mark.parametrize("window", [None, 9])
def test_with_all_waits_there_is_no_race(window, mode):
    run(mode, window)


def test_work_on_a_fetch_that_may_be_in_flight_is_a_race(monkeypatch):
    leave_out(monkeypatch, tpu_kernel, "wait_for_fetch")
    with pytest.raises(AssertionError, match="RACE"):
        run("eager")


def test_work_on_a_fetch_that_has_not_come_gives_nan(monkeypatch):
    leave_out(monkeypatch, tpu_kernel, "wait_for_fetch")
    with pytest.raises(AssertionError, match="nan location mismatch"):
        run("races")


@pytest.mark.parametrize("mode", ["races", "eager"])
@pytest.mark.parametrize("window", [None, 9])
def test_a_fetch_into_a_buffer_that_is_being_written_out_is_a_race(window, mode, monkeypatch):
    leave_out(monkeypatch, tpu_copies, "wait_for_writes")
    with pytest.raises(AssertionError, match="RACE"):
        run(mode, window)


def test_a_write_that_nobody_waits_for_is_noticed(monkeypatch):
    leave_out(monkeypatch, tpu_kernel, "wait_for_writes")
    with pytest.raises(AssertionError, match=r"non-zero count|RACE"):
        run("eager")
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        run("races")
