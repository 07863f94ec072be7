"""The floors of the benchmark, against counts by hand."""

from types import ModuleType

import pytest

from pagedjax.models.config import NO_WINDOW
from tests.engine.tiny import SLIDING, tiny_engine
from tests.scripts.load import SCRIPTS, load_script


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("benchmark_offline")


def test_prompt_flops_count_every_product_and_every_visible_key(benchmark):
    c, length = SLIDING, 11
    per_token = 0
    for out, into in (
        (c.num_heads * c.head_dim, c.hidden_size),
        (c.num_kv_heads * c.head_dim, c.hidden_size),
        (c.num_kv_heads * c.head_dim, c.hidden_size),
        (c.hidden_size, c.num_heads * c.head_dim),
        (c.intermediate_size, c.hidden_size),
        (c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    ):
        per_token += 2 * out * into
    attention = 0
    for window in c.windows:
        for position in range(length):
            keys = len(range(max(0, position - window + 1), position + 1))
            attention += keys * c.num_heads * (2 * c.head_dim + 2 * c.head_dim)
    head = 2 * c.vocab_size * c.hidden_size
    want = length * c.num_layers * per_token + attention + head
    assert benchmark.prompt_flops(c, length) == want


def test_kv_bytes_stop_at_the_window(benchmark):
    windows = [w for w in SLIDING.windows if w != NO_WINDOW]
    full = len(SLIDING.windows) - len(windows)
    row = 2 * SLIDING.num_kv_heads * SLIDING.head_dim * 4
    assert benchmark.kv_bytes(SLIDING, 1000, 4) == row * (sum(windows) + full * 1000)


def test_the_floor_adds_weights_kv_and_prompt_work(benchmark):
    llm = benchmark.LLM(tiny_engine(SLIDING))
    limits = benchmark.Limits(100.0, 200.0, 50.0)
    weights = benchmark.weight_bytes(llm.engine.runner.params)
    kv = sum(benchmark.kv_bytes(SLIDING, context, 4) for context in (4, 5))
    want = (2 * weights + kv) / 200.0 + benchmark.prompt_flops(SLIDING, 3) / 50.0
    assert benchmark.floor_seconds(llm, [[1, 2, 3]], 3, limits) == pytest.approx(want)


def test_a_shared_prefix_counts_once_but_for_the_last_token(benchmark):
    assert benchmark.shared_lengths([[1, 2, 3], [1, 2, 4], [1, 2, 4], [5], [1, 2]]) == [
        0,
        2,
        2,
        0,
        1,
    ]
    behind = benchmark.prompt_flops(SLIDING, 9, 4)
    head = 2 * SLIDING.vocab_size * SLIDING.hidden_size
    first, whole = benchmark.prompt_flops(SLIDING, 4), benchmark.prompt_flops(SLIDING, 9)
    assert behind + first - head == whole


def test_a_run_generates_what_it_is_timed_for(benchmark):
    llm = benchmark.LLM(tiny_engine(SLIDING))
    seconds, first, rest = benchmark.run_once(llm, [[1, 2, 3], [4, 5]], 4)
    assert seconds >= first + rest - 1e-6
    assert not llm.engine.has_unfinished_requests()
