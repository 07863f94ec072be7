"""The decoder against Transformers' logits for tiny random models of every family."""

from pathlib import Path

import numpy as np
import pytest

from pagedjax.models.checkpoint import load_hf
from tests.models.forward import prompt_logits

GOLDENS = sorted(
    path.parent for path in (Path(__file__).parents[1] / "goldens").glob("*/golden.npz")
)
TOLERANCE = 1e-4


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks"])
@pytest.mark.parametrize("directory", GOLDENS, ids=lambda path: path.name)
def test_logits_match_transformers(directory: Path, chunk: int | None) -> None:
    golden = np.load(directory / "golden.npz")
    config, params = load_hf(directory, dtype="float32")
    logits = prompt_logits(config, params, golden["token_ids"], chunk)
    assert np.abs(logits - golden["logits"]).max() < TOLERANCE


@pytest.mark.parametrize("directory", GOLDENS, ids=lambda path: path.name)
def test_bfloat16_stays_near_float32(directory: Path) -> None:
    golden = np.load(directory / "golden.npz")
    config, params = load_hf(directory, dtype="bfloat16")
    logits = prompt_logits(config, params, golden["token_ids"])
    assert np.abs(logits - golden["logits"]).mean() < 0.05


def test_there_is_a_golden_of_every_family() -> None:
    assert {path.name.split("_")[0] for path in GOLDENS} == {
        "gemma3", "llama", "mistral", "qwen2", "qwen3",
    }  # fmt: skip
