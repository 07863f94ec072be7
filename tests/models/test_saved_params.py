"""Saved parameters come back bit by bit, and never as something else."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pagedjax.models.checkpoint import load_hf
from pagedjax.models.errors import CheckpointError
from pagedjax.models.saved_params import restore_params, save_params

GOLDENS = Path(__file__).parents[1] / "goldens"


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "decoder.json"
    described = json.loads(path.read_text())
    for key, value in changes.items():
        place = described if key in described else described["config"]
        place[key] = value
    path.write_text(json.dumps(described))


@pytest.mark.parametrize(("name", "platform"), [("gemma3", "cpu"), ("qwen2", "gpu")])
def test_round_trip(name: str, platform: str, tmp_path: Path) -> None:
    config, params = load_hf(GOLDENS / name, "bfloat16", platform)
    save_params(tmp_path / "saved", config, params, platform)
    restored_config, restored = restore_params(tmp_path / "saved", platform)
    assert restored_config == config
    assert jax.tree.map(lambda x: x.dtype, restored) == jax.tree.map(lambda x: x.dtype, params)
    jax.tree.map(np.testing.assert_array_equal, restored, params)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config, params = load_hf(GOLDENS / "qwen3", "bfloat16", "cpu")
    save_params(tmp_path / "saved", config, params, "cpu")
    return tmp_path / "saved"


def test_another_platforms_storage_is_not_misread(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"saved for 'cpu'.*uint16.*'gpu' wants bfloat16"):
        restore_params(saved, "gpu")


def test_saving_twice_is_refused(saved: Path) -> None:
    config, params = load_hf(GOLDENS / "qwen3", "bfloat16", "cpu")
    with pytest.raises(CheckpointError, match="already holds saved parameters"):
        save_params(saved, config, params, "cpu")


def test_parameters_that_do_not_fit_are_not_saved(tmp_path: Path) -> None:
    config, params = load_hf(GOLDENS / "qwen3", "bfloat16", "cpu")
    del params["layers"]["down"]
    with pytest.raises(CheckpointError, match=r"'layers\.down' is missing"):
        save_params(tmp_path / "saved", config, params, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "format 99; known is 1"),
        ({"vocab_size": 7}, r"'embed' is bfloat16\[96, 32\].* wants bfloat16\[7, 32\]"),
        ({"tie_embeddings": False}, "'head' is missing"),
        ({"dtype": "float32"}, r"'embed' is bfloat16\[96, 32\].* wants float32"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"config": {"layers": 3}}, "not a description of a decoder"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    edit(saved, **changes)
    with pytest.raises(CheckpointError, match=message):
        restore_params(saved)


def test_missing_and_damaged_files_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"decoder\.json: no such file"):
        restore_params(tmp_path / "nowhere")
    (saved / "params").rename(saved / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be restored"):
        restore_params(saved, "cpu")
    (saved / "decoder.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a description"):
        restore_params(saved, "cpu")
