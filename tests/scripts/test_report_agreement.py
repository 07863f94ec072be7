"""The report of training and inference, on a tiny model."""

import pytest

from tests.engine.tiny import SLIDING, tiny_params
from tests.scripts.load import load_script


def test_sampling_and_training_agree() -> None:
    script, prompts = load_script("report_agreement"), [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    row = script.compare(SLIDING, tiny_params(SLIDING), prompts, 20)
    assert row.tokens == 40
    assert 0 < row.mean <= row.most <= 1e-5
    assert row.ratio == pytest.approx(row.most, rel=1e-3)  # exp(x) - 1 is x where x is so small
    assert script.make_table([row], "tiny").row_count == 1
