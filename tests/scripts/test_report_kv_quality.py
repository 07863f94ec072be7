"""The quality report, on a tiny model, against dense log-probabilities."""

import json
from types import ModuleType

import numpy as np
import pytest

from tests.engine.tiny import SLIDING, VOCAB, oracle_greedy, oracle_logprobs, tiny_params
from tests.scripts.load import load_script

BOS, WINDOW = 1, 16


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("report_kv_quality")


@pytest.fixture(scope="module")
def model(script):
    text = np.random.default_rng(0).integers(0, VOCAB, 48)
    return script.Model(SLIDING, tiny_params(SLIDING), BOS, text)


@pytest.fixture(scope="module")
def rows(script, model):
    script._CHUNK, script._TILE = 8, 4  # several of them a window
    forms = {name: script.FORMS[name] for name in ("float32", "int4")}
    settings = {"window": WINDOW, "num_prompts": 2, "prompt_len": 3, "num_tokens": 4}
    return {row.name: row for row in script.report(model, forms, **settings)}


def test_perplexity_is_that_of_every_token_behind_those_of_its_window(model, rows):
    found = []
    for first in range(0, len(model.text), WINDOW):
        tokens = [BOS, *model.text[first : first + WINDOW].tolist()]
        found += [r[t] for r, t in zip(oracle_logprobs(SLIDING, tokens), tokens[1:], strict=False)]
    assert len(found) == len(model.text)
    assert rows["float32"].perplexity == pytest.approx(np.exp(-np.mean(found)), rel=1e-4)


def test_the_float32_cache_is_its_own_measure_and_fewer_bits_are_worse(rows):
    base = rows["float32"]
    assert (base.kl, base.same_top, base.greedy) == (pytest.approx(0, abs=1e-6), 1.0, 1.0)
    assert rows["int4"].kl > 0.01
    assert rows["int4"].same_top < 1
    # Two KV groups of two layers, two KV heads: 8 elements of K and of V, and a word of scales.
    assert [row.token_bytes for row in rows.values()] == [8 * 64, 8 * 12]


def test_greedy_tokens_are_the_models(script, model):
    prompts = np.array([[BOS, 5, 9], [BOS, 7, 2]])
    got = script.continue_greedily(model, script.FORMS["float32"], prompts, 4)
    for prompt, tokens in zip(prompts, got, strict=True):
        assert tuple(tokens) == oracle_greedy(SLIDING, prompt.tolist(), 4)[0]


def test_the_text_is_there_and_long_enough(script):
    text = script.TEXT.read_text("utf-8")
    assert text.startswith("The Time Traveller (for so it will be convenient to speak of him)")
    assert len(text) > 4 * 20_000


def test_a_run_writes_its_numbers(script, model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "load", lambda name, text, count: model)
    path = tmp_path / "quality.json"
    options = ["--kv-cache-dtypes", "float32", "--prompts", "0", "--window", "16"]
    script.main([*options, "--json", str(path)])
    data = json.loads(path.read_text())
    assert [row["name"] for row in data["rows"]] == ["float32"]
    assert data["rows"][0]["greedy"] is None
    assert "(+0.00%)" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--window", "1"], ["--prompts", "-1"], ["--tokens", "0"]])
def test_numbers_that_make_no_sense_are_refused(script, option, capsys):
    with pytest.raises(SystemExit):
        script.parse_args(option)
    assert f"{option[0]} is {option[1]}; at least" in capsys.readouterr().err
