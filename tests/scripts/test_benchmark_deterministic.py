"""The benchmark of the deterministic mode, on a tiny model; its times are not asserted."""

from typing import Any

import pytest

from pagedjax import LLM
from tests.engine.tiny import UNIFORM, random_prompts, tiny_engine
from tests.scripts.load import SCRIPTS, load_script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With workloads that a tiny model can serve."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = load_script("benchmark_deterministic")

    def workload(repeat: int) -> tuple[list[list[int]], int]:
        return random_prompts(repeat, [5, 9, 13]), 4

    monkeypatch.setattr(module, "WORKLOADS", dict.fromkeys(("W1", "W2", "W4"), workload))
    return module


def test_ratios_are_to_the_ordinary_engine_and_bits_are_compared(script: Any) -> None:
    engines = {
        None: LLM(tiny_engine(UNIFORM)),
        8: LLM(tiny_engine(UNIFORM, deterministic=True, max_num_batched_tokens=8)),
    }
    ordinary, deterministic = script.measure(engines, repeats=1)
    assert (ordinary.step_tokens, deterministic.step_tokens) == (None, 8)
    assert set(ordinary.of_ordinary.values()) == {1.0}
    assert deterministic.same_bits == 1.0
    for name, rate in deterministic.tokens_per_s.items():
        ratio = rate / ordinary.tokens_per_s[name]
        assert deterministic.of_ordinary[name] == pytest.approx(ratio)
    table = script.make_table([ordinary, deterministic])
    assert table.row_count == 2
