"""Every case is the one that is claimed; its time is not asserted."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.load import load_script

script = load_script("benchmark_sampling")


def test_options_are_of_all_rows_or_of_one() -> None:
    options = script.CASES["top-k 50, top-p 0.95, penalties"]
    every, one = (script.make_input(3, options, one_row=one_row) for one_row in (False, True))
    for name, value in options.items():
        neutral = {"top_p": 1, "repetition_penalty": 1}.get(name, 0)
        np.testing.assert_allclose(getattr(every, name), [value] * 3)
        np.testing.assert_allclose(getattr(one, name), [value, neutral, neutral])


def test_the_nucleus_is_that_of_the_median_row() -> None:
    logits = np.log(np.array([[0.96, 0.02, 0.02], [0.5, 0.46, 0.04], [0.34, 0.33, 0.33]]))
    assert script.nucleus_of(logits) == 2


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.json"
    size = ["--vocab", "300", "--rows", "3", "--hidden", "4", "--turns", "2"]
    script.main([*size, "--json", str(file)])
    printed = capsys.readouterr().out
    assert "3 rows of 300 tokens" in printed
    assert "…" not in printed
    rows = json.loads(file.read_text("utf-8"))
    expected = [(case, logits) for logits in ("peaked", "flat") for case in script.CASES]
    assert [(row["case"], row["logits"]) for row in rows] == expected
    assert all(row["product"] > 0 and row["nucleus"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["vocab", "rows", "hidden", "turns"])
def test_nonsense_arguments_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main([f"--{name}", "0"])
    assert caught.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err
