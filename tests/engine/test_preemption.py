"""Whether a preempted request is swapped or computed again follows from measurements."""

import pytest

from pagedjax.preemption import PreemptionMode, PreemptionPolicy


def policy(mode: PreemptionMode = "auto", link: float = 1000.0) -> PreemptionPolicy:
    return PreemptionPolicy(mode, block_bytes=100, link_bytes_per_s=lambda: link)


@pytest.mark.parametrize(("mode", "swaps"), [("swap", True), ("recompute", False)])
def test_a_fixed_mode_measures_nothing(mode: PreemptionMode, swaps: bool) -> None:
    def never() -> float:
        raise AssertionError("the link is not to be measured")

    fixed = PreemptionPolicy(mode, 100, never)
    assert fixed.prefers_swap(1, 10**6) == swaps
    assert fixed.prefers_swap(10**6, 1) == swaps


def test_the_faster_way_is_taken() -> None:
    auto = policy()
    auto.observe_prefill(num_tokens=50, seconds=1.0)
    # 10 blocks of 100 bytes, out and in, take 2 s at 1,000 bytes/s; 100 tokens take 2 s, too.
    assert not auto.prefers_swap(num_tokens=100, num_blocks=10)
    assert auto.prefers_swap(num_tokens=101, num_blocks=10)
    assert not auto.prefers_swap(num_tokens=101, num_blocks=11)


def test_before_anything_was_computed_there_is_nothing_worth_moving() -> None:
    assert not policy(link=1e12).prefers_swap(10**6, 1)


def test_the_rate_of_prefill_is_a_running_mean() -> None:
    auto = policy()
    auto.observe_prefill(100, 1.0)
    assert auto.prefill_tokens_per_s == 100
    auto.observe_prefill(400, 2.0)
    assert auto.prefill_tokens_per_s == pytest.approx(120)  # a fifth of the way to 200
    for _ in range(60):
        auto.observe_prefill(300, 1.0)
    assert auto.prefill_tokens_per_s == pytest.approx(300, rel=1e-3)
