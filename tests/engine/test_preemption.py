"""A preempted request comes back by the way that costs less time."""

from typing import Any

import pytest

from pagedjax.preemption import PreemptionPolicy


def policy(mode: Any = "auto", **fields: Any) -> PreemptionPolicy:
    """Blocks of 1 MB over a link of 100 MB/s."""
    return PreemptionPolicy(mode, 1_000_000, lambda: 100e6, **fields)


def never_measured() -> float:
    raise AssertionError("the link was measured without need")


@pytest.mark.parametrize(("mode", "swaps"), [("swap", True), ("recompute", False)])
@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1000), (1000, 1)])
def test_a_fixed_mode_measures_and_compares_nothing(
    mode: Any, swaps: bool, num_tokens: int, num_blocks: int
) -> None:
    fixed = PreemptionPolicy(mode, 1_000_000, never_measured)
    assert fixed.prefers_swap(num_tokens, num_blocks) is swaps
    fixed.observe_prefill(1000, 1.0)
    assert fixed.prefers_swap(num_tokens, num_blocks) is swaps


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "swaps"),
    [
        # 10 blocks out and in are 20 MB, 0.2 s on the link; 1000 tokens/s compute 200 in this time.
        (201, 10, True),
        (199, 10, False),
        (200, 10, False),  # as long: there is nothing to gain
        (200, 9, True),
        (21, 1, True),
        (19, 1, False),
        (20_001, 1000, True),
        (19_999, 1000, False),
    ],
)
def test_auto_compares_bytes_over_the_link_with_tokens_to_compute(
    num_tokens: int, num_blocks: int, swaps: bool
) -> None:
    auto = policy(prefill_tokens_per_s=1000.0)
    assert auto.prefers_swap(num_tokens, num_blocks) is swaps


@pytest.mark.parametrize(
    ("block_bytes", "link", "prefill", "swaps"),
    [
        # 4 blocks against 100 tokens.
        (1_000_000, 100e6, 1000.0, True),  # 0.08 s against 0.1 s
        (2_000_000, 100e6, 1000.0, False),  # 0.16 s against 0.1 s
        (1_000_000, 50e6, 1000.0, False),  # 0.16 s against 0.1 s
        (1_000_000, 100e6, 2000.0, False),  # 0.08 s against 0.05 s
        (2_000_000, 50e6, 100.0, True),  # 0.32 s against 1 s
    ],
)
def test_each_measure_counts(block_bytes: int, link: float, prefill: float, swaps: bool) -> None:
    auto = PreemptionPolicy("auto", block_bytes, lambda: link, prefill)
    assert auto.prefers_swap(100, 4) is swaps


def test_auto_recomputes_and_does_not_measure_the_link_before_a_prompt_was_computed() -> None:
    auto = PreemptionPolicy("auto", 1, never_measured)
    assert auto.prefill_tokens_per_s is None
    assert not auto.prefers_swap(10**9, 1)


def test_the_prefill_rate_is_a_running_mean_that_begins_with_the_first_measurement() -> None:
    auto = policy()
    rates = []
    for num_tokens, seconds in [(100, 0.5), (300, 0.5), (0, 1.0), (200, 0.1)]:
        auto.observe_prefill(num_tokens, seconds)
        rates.append(auto.prefill_tokens_per_s)
    # The newest has a weight of a fifth: 200, + (600 - 200) / 5, - 280 / 5, + (2000 - 224) / 5.
    assert rates == pytest.approx([200.0, 280.0, 224.0, 579.2])


def test_the_running_mean_forgets_a_slow_beginning() -> None:
    auto = policy()
    auto.observe_prefill(1, 10.0)
    for _ in range(30):
        auto.observe_prefill(1000, 1.0)
    assert auto.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.01)


def test_what_is_observed_decides() -> None:
    auto = policy()
    auto.observe_prefill(1000, 1.0)
    assert not auto.prefers_swap(150, 10)
    for _ in range(20):
        auto.observe_prefill(100, 1.0)  # the device is busier now
    assert auto.prefers_swap(150, 10)
