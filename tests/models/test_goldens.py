"""The decoder against Transformers' logits for tiny random models of every family."""

from pathlib import Path

import numpy as np
import pytest

from pagedjax.models.checkpoint import load_hf
from tests.models.forward import prompt_logits

ROOT = Path(__file__).parents[1] / "goldens"
GOLDENS = sorted(path.parent for path in ROOT.glob("*/golden.npz"))
TOLERANCE = 1e-4


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks"])
@pytest.mark.parametrize("directory", GOLDENS, ids=lambda path: path.name)
def test_logits_match_transformers(directory: Path, chunk: int | None) -> None:
    golden = np.load(directory / "golden.npz")
    config, params = load_hf(directory, dtype="float32")
    logits = prompt_logits(config, params, golden["token_ids"], chunk)
    assert np.abs(logits - golden["logits"]).max() < TOLERANCE


# Means over all logits, which are of size 1; about three times what was seen.
HALVES = [*((path, "bfloat16", 0.05) for path in GOLDENS), (ROOT / "mistral", "float16", 0.006)]


@pytest.mark.parametrize(
    ("directory", "dtype", "tolerance"), HALVES, ids=lambda x: getattr(x, "name", x)
)
def test_16_bits_stay_near_32(directory: Path, dtype: str, tolerance: float) -> None:
    golden = np.load(directory / "golden.npz")
    config, params = load_hf(directory, dtype=dtype)
    logits = prompt_logits(config, params, golden["token_ids"])
    assert np.abs(logits - golden["logits"]).mean() < tolerance


def test_there_is_a_golden_of_every_family() -> None:
    assert {path.name.split("_")[0] for path in GOLDENS} == {
        "gemma3", "llama", "mistral", "qwen2", "qwen3",
    }  # fmt: skip
