"""The report of a tiny model's step, held against what is known of it."""

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import jax
import pytest

from pagedjax.errors import CompilerNotInstalledError
from pagedjax.models.decoder import abstract_params
from tests.deviceless.targets import need
from tests.engine.tiny import SLIDING, UNIFORM
from tests.scripts.load import SCRIPTS, load_script

# Whole vectors, as compilers turn smaller matrices as they like; 384 is in no shape but weights'.
WIDTHS = {"hidden_size": 384, "intermediate_size": 256, "vocab_size": 256}
TINY = dataclasses.replace(UNIFORM, **WIDTHS, dtype="bfloat16")
SMALL = ["--num-tokens", "8", "--num-seqs", "4", "--context", "64", "--num-blocks", "1025"]


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("compile_report")


def run(script, monkeypatch, tmp_path: Path, target: str, *more: str) -> dict:
    """The JSON of the command, with a tiny model under a real one's name."""
    monkeypatch.setattr(script, "real_model", lambda name: TINY)
    file = tmp_path / "report.json"
    args = ["--target", target, "--model", "qwen3-0.6b", *SMALL, *more, "--json", str(file)]
    script.main(args)
    return json.loads(file.read_text("utf-8"))


@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_tells_of_a_step_that_works_in_place(
    target: str,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need(target)
    got = run(script, monkeypatch, tmp_path, target, "--attention", "xla")
    assert (got["target"], got["model"], got["attention"]) == (target, "qwen3-0.6b", "xla")
    assert (got["num_tokens"], got["num_seqs"], got["block_size"]) == (8, 4, 64)
    params = jax.tree.leaves(abstract_params(TINY, "tpu"))
    assert got["param_bytes"] == sum(leaf.size * leaf.dtype.itemsize for leaf in params)
    assert got["in_place"] is True
    assert got["pool_copies"] == []
    assert got["alias_bytes"] >= got["state_bytes"] > got["pool_bytes"] > 0
    assert 0 < got["temp_bytes"] < got["pool_bytes"]
    assert min(got["lower_s"], got["compile_s"]) > 0
    assert (got["retiled"], got["kernels"]) == ({}, [])
    printed = capsys.readouterr().out
    for row in ("compile", "parameters", "pool", "in place", "temporary", "re-tiled"):
        assert row in printed
    assert "…" not in printed


def test_tells_of_the_kernels_and_their_vmem(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need("v5e")
    kernels = run(script, monkeypatch, tmp_path, "v5e", "--attention", "mosaic_tpu")["kernels"]
    assert kernels
    for kernel in kernels:
        assert kernel["backend"] == "tpu_custom_call"
        assert 0 < kernel["vmem_bytes"] <= kernel["vmem_limit_bytes"]
    assert f"kernel {kernels[0]['name']}: VMEM" in capsys.readouterr().out


def test_tells_of_the_registers_of_gpu_kernels(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need("h200")
    monkeypatch.setitem(globals(), "TINY", dataclasses.replace(TINY, head_dim=64))
    got = run(script, monkeypatch, tmp_path, "h200")  # it is what an engine would take
    assert got["attention"] == "mosaic_gpu"
    names = {"paged_attention_chunk", "paged_attention_decode"}
    assert {kernel["name"] for kernel in got["resources"]} == names
    assert all(0 < kernel["registers"] <= 255 for kernel in got["resources"])
    assert not any(kernel["spill_bytes"] for kernel in got["resources"])
    assert "kernel paged_attention_decode: registers" in capsys.readouterr().out


def test_blocks_fill_the_memory_that_parameters_leave(script: ModuleType) -> None:
    shape = script.Shape(256, 64, 4096, 64)
    model = script.real_model("gemma-3-270m")
    assert script.blocks_that_fit(model, "h200", shape) == 6 * 64 * 64 + 1, "all that can be used"
    llama = script.real_model("llama-3.1-8b")
    blocks = script.blocks_that_fit(llama, "v6e", shape)
    used = 2 * 8.03e9 + blocks * 32 * 8 * 64 * 256 * 2
    assert used == pytest.approx(0.9 * 32 * 2**30, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("gemma-3-270m", 0.268)],
)
def test_models_have_their_published_size(script: ModuleType, name: str, billions: float) -> None:
    params = abstract_params(script.real_model(name), "tpu")
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert size / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "v9x"], "invalid choice"),
        (["--model", "gpt-2"], "invalid choice"),
        (["--num-tokens", "3"], "--num-tokens at least --num-seqs"),
        (["--context", "0"], "must be at least 1"),
        (["--num-blocks", "1"], "--num-blocks must be at least 2"),
    ],
)
def test_nonsense_arguments_are_refused(
    script: ModuleType, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(["--target", "v5e", "--model", "qwen3-0.6b", *SMALL, *args])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "v5e", "--model", "llama-3.1-8b"], "llama-3.1-8b on v5e: .* free memory"),
        (["--target", "h200", "--model", "qwen3-0.6b", "--attention", "mosaic_tpu"], "on TPU"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    script: ModuleType, args: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        script.main(args)


def test_a_missing_compiler_is_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CompilerNotInstalledError("compiling for v5e needs the package jax[tpu]")

    monkeypatch.setattr(script, "real_model", lambda name: SLIDING)
    monkeypatch.setattr(script, "compile_for", refuse)
    with pytest.raises(SystemExit, match=r"qwen3-0.6b on v5e: .* needs the package jax\[tpu\]"):
        script.main(["--target", "v5e", "--model", "qwen3-0.6b", *SMALL, "--attention", "xla"])
