"""What an engine tells Prometheus: counters, gauges and latency histograms.

Counting must cost next to nothing beside a step, so events only add to plain Python numbers. The
families that Prometheus reads are built from them when it asks.
"""

import dataclasses
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from pagedjax.compile_log import CompileLog
from pagedjax.request import FinishReason
from pagedjax.scheduler import Scheduler

_PREFIX = "pagedjax_"


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """State that other parts of the engine keep; each field is the metric of the same name.

    Attributes:
      num_requests_running, num_requests_waiting: unfinished requests, now.
      kv_cache_usage: share of the pool's blocks that requests hold, in [0, 1].
      prefix_cache_queries, prefix_cache_hits: prompt tokens looked up, and found.
      num_preemptions: how often a request had to give way.
      compiles: programs that XLA compiled. compiles_after_warmup: those of them that a request had
        to wait for although the engine was warm.
      swap_out_bytes, swap_in_bytes: moved from the device to the host, and back.
      attention_kernel_disabled: 1 if the attention kernel failed its check at start, else 0.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    compiles: int = 0
    compiles_after_warmup: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    attention_kernel_disabled: int = 0


def take_snapshot(
    scheduler: Scheduler, compiles: CompileLog, block_bytes: int, kernel_disabled: bool
) -> EngineSnapshot:
    """State of an engine now."""
    pool, stats = scheduler.pool, scheduler.blocks.stats
    return EngineSnapshot(
        num_requests_running=len(scheduler.running),
        num_requests_waiting=len(scheduler) - len(scheduler.running),
        kv_cache_usage=1 - pool.num_free / pool.num_usable,
        prefix_cache_queries=stats.prefix_queries,
        prefix_cache_hits=stats.prefix_hits,
        num_preemptions=scheduler.num_swaps + scheduler.num_recomputes,
        compiles=compiles.num_programs,
        compiles_after_warmup=compiles.num_after_warmup,
        swap_out_bytes=stats.swapped_out * block_bytes,
        swap_in_bytes=stats.swapped_in * block_bytes,
        attention_kernel_disabled=int(kernel_disabled),
    )


class EngineMetrics:
    """The metrics of one engine, in a registry of their own: engines in one process do not collide.

    One thread reports events; any thread may read. A reader sees each number as of some moment
    during its call; the count of a histogram is that of its buckets.

    Args:
      snapshot: called on every reading, by whatever thread reads; it must only look. Let it hold
        the parts that it reads and not the engine, which would keep the engine alive in a cycle.

    Attributes:
      registry: for Prometheus' own servers and tools.

    Example:
      >>> metrics.on_add(num_prompt_tokens=7)
      >>> metrics.on_tokens(now, [seq.token_time for seq in sequences])
      >>> print(metrics.text().decode())
    """

    def __init__(self, snapshot: Callable[[], EngineSnapshot]):
        self._counts = _Counts()
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(self._counts, snapshot))

    def on_add(self, num_prompt_tokens: int) -> None:
        """A request was accepted."""
        self._counts.prompt_tokens += num_prompt_tokens

    def on_first_token(self, since_arrival_s: float) -> None:
        """A request got the first token of any of its sequences; `on_tokens` counts the token.

        One that begins again with other weights gets a first token again.
        """
        self._counts.first_token.observe(since_arrival_s)

    def on_tokens(
        self, now: float, previous: Collection[float | None], num_tokens: int = 1
    ) -> None:
        """Sequences got `num_tokens` new tokens each. Called once a step, or once a `num_tokens`.

        Tokens that came together share the time since the one before them evenly.

        Args:
          now: seconds of any clock.
          previous: for each of the sequences, when it got its last token before, by the same clock;
            None: these are its first. Equal times, which one step gives to all, cost once.
        """
        counts = self._counts
        counts.generation_tokens += len(previous) * num_tokens
        for time, num_sequences in Counter(previous).items():
            if time is not None:
                counts.inter_token.observe((now - time) / num_tokens, num_sequences * num_tokens)

    def on_finish(self, reason: FinishReason, since_arrival_s: float) -> None:
        """A request ended; of one with several sequences, `reason` is that of the last to end."""
        self._counts.finished[reason] += 1
        self._counts.request.observe(since_arrival_s)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _bounds(steps: tuple[float, ...], decades: range) -> tuple[float, ...]:
    """Upper bounds of buckets in seconds: `steps` in each decade, 10**d to 10**(d + 1)."""
    return tuple(float(f"{step}e{decade}") for decade in decades for step in steps)


class _Histogram:
    """Counts by bucket; bucket i holds `bounds[i - 1] < value <= bounds[i]`, the last the rest."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self, name: str, documentation: str) -> Metric:
        total = self.sum
        # Copied at once, so that the buckets agree while another thread goes on counting.
        cumulative = itertools.accumulate(list(self.counts))
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        buckets = list(zip(names, map(float, cumulative), strict=True))
        return HistogramMetricFamily(
            _PREFIX + name, documentation, buckets=buckets, sum_value=total
        )


class _Counts:
    """What events add up to."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.first_token = _Histogram(_bounds((1, 2.5, 5), range(-3, 3)))
        self.inter_token = _Histogram(_bounds((1, 1.5, 2, 3, 5, 7.5), range(-3, 1)))
        self.request = _Histogram(_bounds((1, 2.5, 5), range(-2, 4)))


class _Collector:
    """Builds the metric families, as a registry asks for them.

    Apart from `EngineMetrics`, which holds the registry that holds this: no cycle.
    """

    def __init__(self, counts: _Counts, snapshot: Callable[[], EngineSnapshot]):
        self._counts, self._snapshot = counts, snapshot

    def collect(self) -> Iterator[Metric]:
        state, counts = self._snapshot(), self._counts
        yield _gauge("num_requests_running", "Requests that hold blocks.", state)
        yield _gauge("num_requests_waiting", "Requests that wait to run (again).", state)
        yield _gauge("kv_cache_usage", "Share of the KV cache's blocks in use, 0 to 1.", state)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", state)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the cache.", state)
        yield _counter("num_preemptions", "Times a request had to give way.", state)
        yield _counter("compiles", "Programs compiled.", state)
        yield _counter("compiles_after_warmup", "Programs compiled in a warm engine.", state)
        yield _gauge(
            "attention_kernel_disabled",
            "1 if attention runs in plain XLA because its kernel failed the check at start.",
            state,
        )
        moved = {"out": state.swap_out_bytes, "in": state.swap_in_bytes}
        yield _labelled("swap_bytes", "KV cache moved to the host and back.", "direction", moved)
        yield CounterMetricFamily(
            f"{_PREFIX}prompt_tokens", "Prompt tokens accepted.", value=counts.prompt_tokens
        )
        yield CounterMetricFamily(
            f"{_PREFIX}generation_tokens", "Tokens generated.", value=counts.generation_tokens
        )
        yield _labelled(
            "request_success", "Requests that ended.", "finished_reason", dict(counts.finished)
        )
        yield counts.first_token.family(
            "time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        yield counts.inter_token.family(
            "inter_token_latency_seconds", "Between two tokens of a sequence."
        )
        yield counts.request.family(
            "e2e_request_latency_seconds", "From a request's arrival to its end."
        )


def _gauge(field: str, documentation: str, state: EngineSnapshot) -> Metric:
    return GaugeMetricFamily(_PREFIX + field, documentation, value=getattr(state, field))


def _counter(field: str, documentation: str, state: EngineSnapshot) -> Metric:
    return CounterMetricFamily(_PREFIX + field, documentation, value=getattr(state, field))


def _labelled(name: str, documentation: str, label: str, values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, documentation, labels=[label])
    for value, count in values.items():
        family.add_metric([str(value)], count)
    return family
