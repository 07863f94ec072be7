"""The benchmark of weight updates, on a tiny model; its times are not asserted."""

import jax
import numpy as np
import pytest

from pagedjax import LLM
from tests.engine.fresh import fresh_engine
from tests.engine.tiny import UNIFORM, tiny_params
from tests.scripts.load import load_script


def test_every_way_brings_the_same_weights() -> None:
    script, params = load_script("benchmark_update_params"), tiny_params(UNIFORM)
    for way in script.WAYS.values():
        new = way(params)
        assert jax.tree.structure(new) == jax.tree.structure(params)
        assert all(map(np.array_equal, jax.tree.leaves(new), jax.tree.leaves(params)))
    llm = LLM(fresh_engine(UNIFORM))
    rows = script.measure(llm, params, repeats=1)
    assert [row.way for row in rows] == list(script.WAYS)
    assert rows[0].gb_per_s is None
    for row in rows:
        assert row.of_handed_over == pytest.approx(row.milliseconds / rows[0].milliseconds)
    assert script.make_table(rows, "tiny").row_count == len(rows)
