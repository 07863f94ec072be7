"""The report of training and inference, on a tiny model."""

import dataclasses

from pagedjax.models.decoder import random_params
from tests.engine.tiny import SLIDING, tiny_params
from tests.scripts.load import load_script


def test_sampling_and_training_agree() -> None:
    script, prompts = load_script("report_agreement"), [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    row = script.compare(SLIDING, tiny_params(SLIDING), prompts, 20)
    assert row.tokens == 40
    assert 0 < row.mean <= row.most <= 1e-5
    half = dataclasses.replace(SLIDING, dtype="bfloat16")
    rough = script.compare(half, random_params(half, "cpu"), prompts, 20)
    assert rough.dtype == "bfloat16"
    assert 0 < rough.most < 0.1
    assert script.make_table([row, rough], "tiny").row_count == 2
