"""Parameters under a checkpoint's names are its tensors, and come back as they were."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pagedjax.models.checkpoint import load_hf
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import Params
from pagedjax.models.errors import CheckpointError, ConfigError
from pagedjax.models.families import TensorNames, from_hf
from pagedjax.models.families.names import GGUF_NAMES
from pagedjax.models.named_params import from_hf_names, to_hf_names

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
ONE_OF_EACH = ["gemma3", "llama_tied", "mistral", "qwen2", "qwen3"]


def names_of(name: str) -> TensorNames:
    return from_hf(json.loads((GOLDENS / name / "config.json").read_text()))[1]


def load(
    name: str, dtype: str = "float32", platform: str = "cpu"
) -> tuple[DecoderConfig, Params, TensorNames]:
    return *load_hf(GOLDENS / name, dtype, platform), names_of(name)


def in_files(name: str) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, straight from its files."""
    found: dict[str, np.ndarray] = {}
    for file in sorted((GOLDENS / name).glob("*.safetensors")):
        found |= load_file(file)
    return {names_of(name).canonical(key): values for key, values in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_they_are_the_tensors_of_the_checkpoint(name: str) -> None:
    config, params, names = load(name)
    tensors = to_hf_names(config, params, names)
    expected = in_files(name)
    if config.tie_embeddings:
        expected.pop("lm_head.weight", None)
    assert tensors.keys() == expected.keys()
    for key, values in expected.items():
        atol = 1e-6 if key.endswith("norm.weight") else 0  # Gemma's are kept with 1 added
        np.testing.assert_allclose(tensors[key], values, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_way_there_and_back_under_jit(name: str, platform: str) -> None:
    config, params, names = load(name, "bfloat16", platform)

    @jax.jit
    def there_and_back(params: Params) -> tuple[dict[str, jax.Array], Params]:
        tensors = to_hf_names(config, params, names)
        return tensors, from_hf_names(config, tensors, platform, names)

    tensors, back = there_and_back(params)
    for key, values in tensors.items():
        is_vector = key.endswith(("norm.weight", "bias"))
        assert values.dtype == (jnp.float32 if is_vector else jnp.bfloat16), key
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_float32_tensors_of_a_trainer_are_rounded_to_what_the_engine_stores() -> None:
    config, params, names = load("gemma3", "bfloat16")
    wide = {k: v.astype(jnp.float32) for k, v in to_hf_names(config, params, names).items()}
    back = from_hf_names(config, wide, "cpu", names)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_gradients_go_both_ways() -> None:
    config, params, names = load("qwen2")
    tensors = to_hf_names(config, params, names)
    weigh = functools.partial(jax.tree.map, lambda x: jnp.sum(x * x))

    def of_params(tensors: dict[str, jax.Array]) -> jax.Array:
        return sum(jax.tree.leaves(weigh(from_hf_names(config, tensors, "cpu", names))))

    for key, gradient in jax.grad(of_params)(tensors).items():
        np.testing.assert_allclose(gradient, 2 * tensors[key], rtol=1e-6, err_msg=key)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, r"'model\.norm\.weight' of shape \(\d+,\) is missing"),
        ({"model.extra": np.zeros(1)}, r"'model\.extra' has no place .*\(1 such"),
        ({"lm_head.weight": np.zeros((3, 4))}, r"'lm_head\.weight' has shape \(3, 4\); it must be"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    config, params, names = load("mistral")
    tensors: dict[str, Any] = {**to_hf_names(config, params, names), **changes}
    tensors = {key: values for key, values in tensors.items() if values is not None}
    with pytest.raises(CheckpointError, match=message):
        from_hf_names(config, tensors, "cpu", names)


def test_other_names_than_those_of_hugging_face_are_refused() -> None:
    config, params, _ = load("mistral")
    for call in (
        lambda: to_hf_names(config, params, GGUF_NAMES),
        lambda: from_hf_names(config, {}, "cpu", GGUF_NAMES),
    ):
        with pytest.raises(ConfigError, match=r"'token_embd\.weight' are not those of Hugging"):
            call()
