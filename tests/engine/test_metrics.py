"""What Prometheus reads is exactly what was counted."""

import gc
import math
import threading
import weakref
from collections.abc import Iterable

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from pagedjax.metrics import EngineMetrics, EngineSnapshot
from pagedjax.request import FinishReason

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

SNAPSHOT = EngineSnapshot(
    num_requests_running=3,
    num_requests_waiting=4,
    kv_cache_usage=0.25,
    prefix_cache_queries=100,
    prefix_cache_hits=48,
    num_preemptions=5,
    compiles=11,
    compiles_after_warmup=2,
    swap_out_bytes=1 << 40,
    swap_in_bytes=7,
    attention_kernel_disabled=1,
)


def families(metrics: EngineMetrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.text().decode()))


def samples(found: Iterable[Metric]) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in found
        for sample in family.samples
    }


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    return samples(families(metrics))[f"pagedjax_{name}", tuple(sorted(labels.items()))]


def histogram(metrics: EngineMetrics, name: str) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Upper bounds and cumulative counts of the buckets, the count and the sum."""
    (family,) = [f for f in families(metrics) if f.name == f"pagedjax_{name}"]
    assert family.type == "histogram"
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    bounds = np.array([float(s.labels["le"]) for s in buckets])
    counts = np.array([s.value for s in buckets])
    return bounds, counts, value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")


def assert_counts(metrics: EngineMetrics, name: str, values: np.ndarray) -> None:
    bounds, counts, total, total_sum = histogram(metrics, name)
    assert list(bounds) == sorted(bounds)
    assert bounds[-1] == math.inf
    expected = (values[:, None] <= bounds).sum(0)
    np.testing.assert_array_equal(counts, expected)
    assert total == len(values)
    assert total_sum == pytest.approx(values.sum(), rel=1e-12)


def test_the_snapshot_is_read_when_somebody_asks() -> None:
    current = [EngineSnapshot()]
    metrics = EngineMetrics(lambda: current[0])
    assert value(metrics, "num_requests_running") == 0
    current[0] = SNAPSHOT
    found = samples(families(metrics))
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "kv_cache_usage": 0.25,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 48,
        "num_preemptions_total": 5,
        "compiles_total": 11,
        "compiles_after_warmup_total": 2,
        "attention_kernel_disabled": 1,
    }
    assert {name: found[f"pagedjax_{name}", ()] for name in expected} == expected
    assert value(metrics, "swap_bytes_total", direction="out") == 1 << 40
    assert value(metrics, "swap_bytes_total", direction="in") == 7


def test_every_metric_is_there_from_the_beginning_with_its_type() -> None:
    found = families(EngineMetrics(EngineSnapshot))
    assert {family.name.removeprefix("pagedjax_"): family.type for family in found} == {
        "num_requests_running": "gauge",
        "num_requests_waiting": "gauge",
        "kv_cache_usage": "gauge",
        "prefix_cache_queries": "counter",
        "prefix_cache_hits": "counter",
        "num_preemptions": "counter",
        "compiles": "counter",
        "compiles_after_warmup": "counter",
        "attention_kernel_disabled": "gauge",
        "swap_bytes": "counter",
        "prompt_tokens": "counter",
        "generation_tokens": "counter",
        "request_success": "counter",
        "time_to_first_token_seconds": "histogram",
        "inter_token_latency_seconds": "histogram",
        "e2e_request_latency_seconds": "histogram",
    }
    assert all(family.documentation for family in found)
    assert set(samples(found).values()) == {0.0}


def test_events_add_up() -> None:
    metrics = EngineMetrics(EngineSnapshot)
    metrics.on_add(7)
    metrics.on_add(5)
    metrics.on_tokens(10.0, [None, None])
    metrics.on_tokens(10.5, [10.0, 10.0, None])
    metrics.on_finish(FinishReason.STOP, 1.5)
    metrics.on_finish(FinishReason.LENGTH, 2.0)
    metrics.on_finish(FinishReason.LENGTH, 2.5)
    assert value(metrics, "prompt_tokens_total") == 12
    assert value(metrics, "generation_tokens_total") == 5
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 2
    assert value(metrics, "request_success_total", finished_reason="abort") == 0
    assert_counts(metrics, "inter_token_latency_seconds", np.array([0.5, 0.5]))
    assert_counts(metrics, "e2e_request_latency_seconds", np.array([1.5, 2.0, 2.5]))


def test_tokens_that_came_together_share_their_interval() -> None:
    metrics = EngineMetrics(EngineSnapshot)
    metrics.on_tokens(3.0, [2.0, 2.5], num_tokens=4)
    metrics.on_tokens(3.0, [None], num_tokens=2)
    assert value(metrics, "generation_tokens_total") == 10
    assert_counts(metrics, "inter_token_latency_seconds", np.array([0.25] * 4 + [0.125] * 4))


def test_histograms_count_as_numpy_does_also_on_their_bounds() -> None:
    rng = np.random.default_rng(0)
    metrics = EngineMetrics(EngineSnapshot)
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    bounds = [histogram(metrics, name)[0][:-1] for name in (*names, "e2e_request_latency_seconds")]
    values = np.concatenate([*bounds, [0.0], 10 ** rng.uniform(-4, 5, 3000)])
    for latency in values.tolist():
        metrics.on_first_token(latency)
        metrics.on_tokens(latency, [0.0])
        metrics.on_finish(FinishReason.STOP, latency)
    for name in (*names, "e2e_request_latency_seconds"):
        assert_counts(metrics, name, values)


def test_equal_and_different_times_of_one_step_count_alike() -> None:
    together, apart = EngineMetrics(EngineSnapshot), EngineMetrics(EngineSnapshot)
    times = [1.0, 1.25, None, 1.0, 1.75, 1.25, 1.0]
    together.on_tokens(2.0, times)
    for time in times:
        apart.on_tokens(2.0, [time])
    assert together.text() == apart.text()


def test_two_engines_do_not_collide() -> None:
    one, other = EngineMetrics(EngineSnapshot), EngineMetrics(lambda: SNAPSHOT)
    one.on_add(1)
    other.on_add(2)
    assert value(one, "prompt_tokens_total") == 1
    assert value(other, "prompt_tokens_total") == 2
    assert value(one, "num_requests_running") == 0
    assert value(other, "num_requests_running") == 3


def test_metrics_go_with_their_last_reference() -> None:
    """What the snapshot holds, such as a pool on the device, must not wait for the collector."""

    class Pool:
        def snapshot(self) -> EngineSnapshot:
            return SNAPSHOT

    pool = Pool()
    metrics, gone = EngineMetrics(pool.snapshot), weakref.ref(pool)
    metrics.text()
    gc.disable()
    try:
        del pool, metrics
        assert gone() is None
    finally:
        gc.enable()


def test_another_thread_may_read_while_events_come() -> None:
    metrics = EngineMetrics(EngineSnapshot)
    rounds, done = 20_000, threading.Event()
    seen: list[float] = []
    failures: list[Exception] = []

    def scrape() -> None:
        try:
            while not done.is_set():
                _, counts, total, _ = histogram(metrics, "inter_token_latency_seconds")
                assert (np.diff(counts) >= 0).all()
                assert counts[-1] <= total  # read a little later
                seen.append(total)
        except Exception as error:
            failures.append(error)

    reader = threading.Thread(target=scrape)
    reader.start()
    for i in range(rounds):
        metrics.on_tokens(1.0, [1.0 - i / rounds, 0.5])
        metrics.on_finish(FinishReason.STOP, 1.0)
    done.set()
    reader.join()
    assert not failures
    assert seen == sorted(seen)
    assert value(metrics, "inter_token_latency_seconds_count") == 2 * rounds
    assert value(metrics, "request_success_total", finished_reason="stop") == rounds
