"""The claim of paged attention holds for this scheduler and pool, and the report adds up."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.load import load_script

script = load_script("report_fragmentation")


@pytest.fixture(scope="module")
def rows() -> dict[str, object]:
    """The report with its defaults, blocks of 16 tokens."""
    trace = script.make_trace(0, 500, 2048)
    return {row.layout: row for row in script.report(trace, 2048, block_sizes=(16,))}


def test_paged_memory_holds_over_96_percent_and_contiguous_20_to_40(rows) -> None:
    contiguous = rows["contiguous, 2048 slots"]
    assert 0.2 < contiguous.holds_tokens < 0.4
    assert 0.2 < contiguous.holds_tokens_at_peak < 0.4
    paged = rows["paged, blocks of 16"]
    assert paged.holds_tokens > 0.96
    assert paged.holds_tokens_at_peak > 0.96


def test_paging_lets_more_requests_run_at_once_though_no_length_is_known(rows) -> None:
    contiguous, paged = rows["contiguous, 2048 slots"], rows["paged, blocks of 16"]
    assert contiguous.running_max == 16
    assert paged.running_mean > 2 * contiguous.running_mean
    assert paged.steps < contiguous.steps / 2


def test_preemption_is_rare(rows) -> None:
    contiguous, paged = rows["contiguous, 2048 slots"], rows["paged, blocks of 16"]
    assert (contiguous.preemptions, contiguous.recomputed) == (0, 0)
    assert 0 < paged.preemptions < 100
    assert 0 < paged.recomputed < 0.1


def test_shares_add_up(rows) -> None:
    for row in rows.values():
        assert row.holds_tokens + row.for_later + row.never_used == pytest.approx(1)
        assert 0 < row.reserved <= 1


def test_the_trace_has_the_lengths_that_are_claimed() -> None:
    trace = script.make_trace(0, 20_000, 1_000_000)
    prompts, outputs = [e.prompt for e in trace], [e.output for e in trace]
    assert np.median(prompts) == pytest.approx(100, rel=0.05)
    assert np.median(outputs) == pytest.approx(200, rel=0.05)
    assert np.mean(prompts) == pytest.approx(165, rel=0.05)
    assert np.mean(outputs) == pytest.approx(330, rel=0.05)
    cut = script.make_trace(0, 20_000, 300)
    assert max(e.prompt for e in cut) == 299
    assert max(e.prompt + e.output for e in cut) == 300
    assert min(min(e.prompt, e.output) for e in cut) >= 1


def test_one_request_by_hand() -> None:
    # 5 prompt tokens and 3 outputs store 5, 6, then 7 tokens in two blocks of 4.
    trace = [script.TraceEntry(5, 3)]
    steps = list(script.replay(trace, block_size=4, num_blocks=4, max_model_len=16))
    assert [dataclasses.astuple(step) for step in steps] == [
        (1, 8, held, 1, computed, 0) for held, computed in ((5, 5), (6, 1), (7, 1))
    ]
    row = script.summarize("", steps, trace, num_slots=256)
    assert row.holds_tokens == pytest.approx(6 / 8)
    assert row.never_used == pytest.approx(1 / 8)
    assert row.for_later == pytest.approx(1 / 8)
    assert row.reserved == pytest.approx(8 / 256)
    assert row.recomputed == 0


def test_what_a_preempted_request_computes_again_is_counted() -> None:
    # Both begin with one block of 4 and need two: the second makes way at its 4 tokens, comes back
    # when the first is done, and computes them again.
    trace = [script.TraceEntry(3, 5), script.TraceEntry(3, 5)]
    steps = list(script.replay(trace, block_size=4, num_blocks=3, max_model_len=8))
    assert steps[-1].preemptions == 1
    row = script.summarize("", steps, trace, num_slots=12)
    assert row.preemptions == 1
    assert row.recomputed == pytest.approx(4 / (2 * 7 + 4))


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    args = ["--json", str(file), "--seed", "3", "--requests", "20", "--max-model-len", "256"]
    script.main(args)
    printed = capsys.readouterr().out
    assert "contiguous, 256 slots" in printed
    assert "paged, blocks of 32" in printed
    assert "…" not in printed
    data = json.loads(file.read_text("utf-8"))
    assert (data["seed"], data["requests"], data["max_model_len"]) == (3, 20, 256)
    paged = [f"paged, blocks of {size}" for size in (8, 16, 32)]
    assert [row["layout"] for row in data["rows"]] == ["contiguous, 256 slots", *paged]
    script.main(args)
    assert json.loads(file.read_text("utf-8")) == data, "the same seed gives the same numbers"


@pytest.mark.parametrize("args", [["--requests", "0"], ["--seed", "-1"], ["--max-model-len", "1"]])
def test_nonsense_arguments_are_refused(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(args)
    assert caught.value.code == 2
    assert "must be at least" in capsys.readouterr().err
