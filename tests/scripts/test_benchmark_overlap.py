"""The loops decode what they claim to; their times are not asserted."""

import json
from pathlib import Path

import pytest

from tests.scripts.load import load_script

script = load_script("benchmark_overlap")
SMALL = ["--requests", "2", "--layers", "1", "--hidden", "64", "--turns", "1", "--steps", "3"]


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_step_decodes_a_token_of_every_request(overlaps: bool) -> None:
    model = script.small_model(1, 64)
    params = script.random_params(model, "cpu")
    decoding = script.Decoding(model, params, 3, 40, async_scheduling=overlaps)
    requests = [tracked.request for tracked in decoding.engine._processor.tracked.values()]
    before = [request.sequences[0].num_tokens for request in requests]
    whole, host = decoding.run(5)
    assert 0 < host < whole
    assert [request.sequences[0].num_tokens for request in requests] == [n + 5 for n in before]
    assert all((r.sequences[0].num_pending == 1) == overlaps for r in requests)


def test_prints_a_row_for_each_number_of_requests_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main([*SMALL, "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["requests"] == 2
    assert row["overlapped_over_device"] == pytest.approx(row["overlapped"] / row["device"])
    assert "milliseconds a decode step" in capsys.readouterr().out
