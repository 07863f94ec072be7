"""The simulated decode is the one that is claimed; its times are not asserted."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.load import load_script

script = load_script("benchmark_scheduler")

SMALL = ["--running", "3", "--waiting", "2", "--context", "128", "--steps", "1"]


def simulate(*, groups: int = 1, in_phase: bool = False, num_steps: int = 40):
    load = script.Load(running=4, waiting=3, context=600, groups=groups, in_phase=in_phase)
    queue = script.make_requests(4, 5, 600)
    simulation = script.Simulation(load, queue, max_model_len=700)
    simulation.run(num_steps)
    return simulation


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("in_phase", [False, True])
def test_every_step_decodes_a_token_of_all_that_run_and_none_of_those_that_wait(
    groups: int, in_phase: bool
) -> None:
    simulation = simulate(groups=groups, in_phase=in_phase)
    scheduler = simulation.scheduler
    assert len(scheduler.running) == 4
    assert len(scheduler.waiting) == 3
    assert [r.sequences[0].num_output_tokens for r in scheduler.running] == [41] * 4
    assert scheduler.num_recomputes == 0
    assert len(simulation.times) == 40
    scheduler.check()
    lengths = {request.prompt_len for request in scheduler.running}
    assert lengths == {600} if in_phase else len(lengths) > 1


def test_prompts_share_nothing_but_are_hashed() -> None:
    scheduler = simulate().scheduler
    hashes = [h for request in scheduler.running for h in request.sequences[0].block_hashes]
    assert len(hashes) == len(set(hashes)) >= 4 * 600 // 16
    assert scheduler.blocks.stats.prefix_hits == 0


def test_groups_with_a_window_hold_no_more_than_it_spans() -> None:
    scheduler = simulate(groups=6).scheduler
    for request in scheduler.running:
        *windowed, full = (request.sequences[0].tables != 0).sum(axis=1).tolist()
        assert full == -(-request.sequences[0].num_computed_tokens // 16)
        assert all(held <= 512 // 16 + 1 for held in windowed)


def test_steps_in_phase_are_told_apart() -> None:
    # 600 tokens: the first decode step computes the token at 600, the ninth of its block.
    simulation = simulate(in_phase=True)
    times = np.zeros((script._TURN + 32, 5))
    begins, fills = script._TURN + 8, script._TURN + 7  # 600 + 80 + 8 is a multiple of 16
    times[[begins, begins + 16]], times[[fills, fills + 16]] = 1.0, 2.0
    simulation.times = [tuple(row) for row in times]
    first, second = script.rows_of(simulation)
    assert (first.phase, first.schedule, first.bookkeeping) == ("all begin", 1e3, 3e3)
    assert (second.phase, second.update, second.bookkeeping_p99) == ("all fill", 2e3, 6e3)


def test_the_command_prints_both_tables_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.json"
    script.main([*SMALL, "--json", str(file)])
    printed = capsys.readouterr().out
    assert "3 running requests" in printed
    assert "ratio" in printed
    assert "…" not in printed
    data = json.loads(file.read_text("utf-8"))
    kinds = [(row["load"]["groups"], row["phase"]) for row in data["steps"]]
    phases = ("mixed", "all begin", "all fill")
    assert kinds == [(groups, phase) for groups in (1, 6) for phase in phases]
    loads = [(row["load"]["context"], row["load"]["waiting"]) for row in data["growth"]]
    assert loads == [(context, waiting) for context in (32, 128, 512) for waiting in (0, 2)]
    assert all(row["bookkeeping"] > 0 for row in (*data["steps"], *data["growth"]))


@pytest.mark.parametrize("args", [["--running", "0"], ["--context", "100"], ["--steps", "0"]])
def test_nonsense_arguments_are_refused(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(args)
    assert caught.value.code == 2
    assert "must be at least" in capsys.readouterr().err
