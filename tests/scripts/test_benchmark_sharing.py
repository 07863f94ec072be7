"""The experiments measure what they claim, on tiny models; their times are not asserted."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from pagedjax.loader import LoadedModel
from pagedjax.models.config import NO_WINDOW
from tests.engine.tiny import SLIDING, random_prompts, tiny_engine, tiny_params
from tests.scripts.load import SCRIPTS, load_script


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("benchmark_sharing")


def test_samples_and_beams_share_the_blocks_of_the_prompt(benchmark):
    engine = tiny_engine(block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    (prompt,) = random_prompts(0, [20])
    samples, beams = benchmark.shared_blocks(engine, prompt, new=10, samples=2, beam_width=2)
    # When the last step is dispatched, 29 tokens are stored: 5 blocks of the prompt and 3 more.
    assert (samples.sequences, samples.shared, samples.separate) == ("2 samples", 5 + 2 * 3, 2 * 8)
    assert samples.saved == pytest.approx(5 / 16)
    assert (beams.sequences, beams.separate) == ("2 beams", 2 * 8)
    assert 5 + 2 < beams.shared <= 5 + 2 * 3  # beams may share some of what was generated, too
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def test_a_common_prefix_is_computed_by_each_request_or_by_one_or_by_none(benchmark):
    engine = tiny_engine(block_size=4, max_num_seqs=2)

    def make(repeat: int) -> tuple[list[list[int]], int]:
        prefix, *tails = random_prompts(repeat, [16, 2, 2])
        return [prefix + tail for tail in tails], 3

    rows = benchmark.first_tokens(engine, make, repeats=1)
    assert [row.cache for row in rows] == ["off", "cold", "warm"]
    assert [row.equal for row in rows] == [1, 1, 1]
    # In both repeats the second request finds 16 tokens in the cold run, and both in the warm one.
    assert engine.scheduler.blocks.stats.prefix_hits == 2 * (1 + 2) * 16
    for row in rows:
        assert 0 < row.median_s < row.all_done_s
        assert row.mean_ratio == pytest.approx(row.mean_s / rows[-1].mean_s)


def test_every_preemption_mode_is_put_to_work_and_changes_no_token(benchmark):
    ample = tiny_engine(SLIDING, block_size=4, max_num_seqs=2)

    def make(repeat: int) -> tuple[list[list[int]], int]:
        return random_prompts(repeat, [8, 8, 7, 6]), 12

    # 19, 19, 18, 17 stored tokens take 5 blocks in each of 2 groups; the null block is on top.
    num_blocks = benchmark.quarter_of_need(ample, make(0))
    assert num_blocks == 4 * 5 * 2 // 4 + 1
    tight = tiny_engine(SLIDING, block_size=4, max_num_seqs=2, num_blocks=num_blocks)
    rows = {row.mode: row for row in benchmark.preemption(ample, tight, make, repeats=1)}
    assert list(rows) == ["none", "auto", "swap", "recompute"]
    assert [row.equal for row in rows.values()] == [1, 1, 1, 1]
    assert [row.blocks for row in rows.values()][1:] == [num_blocks - 1] * 3
    assert (rows["none"].swaps, rows["none"].recomputes, rows["none"].moved) == (0, 0, 0)
    assert (rows["swap"].swaps > 0, rows["swap"].recomputes) == (True, 0)
    assert rows["swap"].moved > 0
    assert (rows["recompute"].swaps, rows["recompute"].recomputes > 0) == (0, True)
    assert rows["recompute"].moved == 0
    assert rows["auto"].swaps + rows["auto"].recomputes > 0


def test_blocks_of_a_window_by_hand(benchmark):
    found = benchmark.windowed_blocks((5, NO_WINDOW), 1, 32, prompt_len=32, new=8, block_size=4)
    # The prompt comes at once: 8 blocks in both groups. Then 39 tokens are stored in 10 blocks, of
    # which the token behind the 36th sees the last two through a window of 5.
    assert (found.peak, found.peak_all_kept) == (8 + 8, 10 + 10)
    assert (found.decoding, found.decoding_all_kept) == (2 + 10, 10 + 10)
    assert found.decoding_share == pytest.approx(12 / 20)


def test_the_command_prints_a_table_and_writes_json(
    benchmark, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    model = LoadedModel(SLIDING, tiny_params(SLIDING), None)
    monkeypatch.setattr(benchmark, "load_model", lambda name, config: model)
    monkeypatch.setattr(benchmark, "keep_freed_memory", lambda: True)
    file = tmp_path / "sharing.json"
    benchmark.main(["--experiments", "windows", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "Blocks of 8,192-token contexts" in printed
    assert "…" not in printed
    rows = json.loads(file.read_text("utf-8"))["windows"]
    sizes = [(row["requests"], row["tokens_a_step"]) for row in rows]
    assert sizes == [(1, 512), (1, 1024), (4, 512), (4, 1024)]
    assert all(0.5 < row["decoding_share"] < 0.52 for row in rows)  # one of two groups keeps all
