"""The benchmark of pools of one size, on a tiny model."""

import json
from types import ModuleType

import pytest

from pagedjax.loader import LoadedModel
from tests.engine.tiny import UNIFORM, in_one_shape, random_prompts, tiny_params
from tests.scripts.load import SCRIPTS, load_script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("benchmark_kv_dtypes")


def test_the_load_is_as_many_requests_as_wanted_all_different(script):
    prompts, new = script.load(1, 70)
    assert (len(prompts), new) == (70, 64)
    assert [len(p) for p in prompts[:6]] == [len(p) for p in prompts[32:38]]
    others, _ = script.load(2, 70)
    assert len({tuple(p) for p in prompts + others}) == 140


def test_more_requests_run_at_once_in_the_same_bytes(script, monkeypatch, tmp_path, capsys):
    loaded = LoadedModel(UNIFORM, tiny_params(UNIFORM), None)
    monkeypatch.setattr(script, "load_model", lambda name, config: loaded)
    monkeypatch.setattr(script, "load", lambda repeat, n: (random_prompts(repeat, [12] * n), 6))
    monkeypatch.setattr(script, "_MAX_MODEL_LEN", 48)
    make = script.make_engine

    def make_fast(*arguments):
        llm = make(*arguments)
        in_one_shape(llm.engine)
        return llm

    monkeypatch.setattr(script, "make_engine", make_fast)
    path = tmp_path / "numbers.json"
    # Blocks of 16 tokens take 4,096 bytes of float32, and 768 of int4; one is the null block.
    options = ["--kv-cache-dtypes", "float32", "int4", "--requests", "8", "--repeats", "1"]
    script.main([*options, "--pool-mib", str(5 * 4096 / 2**20), "--json", str(path)])
    plain, low = json.loads(path.read_text())["results"]
    assert (plain["num_blocks"], low["num_blocks"]) == (4, 25)
    assert (plain["tokens_fit"], low["tokens_fit"]) == (4 * 16, 25 * 16)
    assert plain["running_max"] < low["running_max"] == 8
    assert plain["tokens_per_s"] > 0
    assert "int4" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--pool-mib", "--requests", "--repeats"])
def test_nothing_is_no_load(script, option, capsys):
    with pytest.raises(SystemExit):
        script.parse_args([option, "0"])
    assert f"{option} is 0" in capsys.readouterr().err
