"""Scores: right, differentiable, and those of the tokens as they were generated."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import functional
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import random_params
from pagedjax.models.param_values import as_stored, as_values
from tests.engine.tiny import SLIDING, UNIFORM, oracle_logprobs, tiny_params

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 40, 3, 1, 4, 1, 5, 9, 2, 6]
WIDTH = 24

score = jax.jit(functional.score, static_argnums=0)


def rows() -> tuple[np.ndarray, np.ndarray]:
    """One sequence three times: padded on both sides, with a gap, and its head alone."""
    ids, mask = np.full((3, WIDTH), 13, np.int32), np.zeros((3, WIDTH), bool)
    places = [range(3, 3 + len(TOKENS)), [*range(5), *range(9, 9 + len(TOKENS) - 5)], range(6)]
    for row, own in enumerate(places):
        for place, token in zip(own, TOKENS, strict=False):
            ids[row, place], mask[row, place] = token, True
    return ids, mask


@pytest.mark.parametrize("config", [UNIFORM, SLIDING], ids=["uniform", "sliding"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_are_the_oracles_wherever_padding_stands(
    config: DecoderConfig, temperature: float
) -> None:
    ids, mask = rows()
    found = np.asarray(score(config, tiny_params(config), ids, mask, temperature=temperature))
    logprobs = oracle_logprobs(config, TOKENS) / temperature
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
    wanted = [0.0, *(logprobs[i, token] for i, token in enumerate(TOKENS[1:]))]
    for row, own in zip(found, mask, strict=True):
        np.testing.assert_allclose(row[own], wanted[: own.sum()], atol=1e-5)
        assert not row[~own].any()


@pytest.mark.parametrize("config", [UNIFORM, SLIDING], ids=["uniform", "sliding"])
def test_gradients_are_the_slopes(config: DecoderConfig) -> None:
    ids, mask = rows()

    @jax.jit
    def loss(params):
        return functional.score(config, params, jnp.asarray(ids), jnp.asarray(mask)).sum()

    params = tiny_params(config)
    gradient = jax.jit(jax.grad(loss))(params)
    rng, step = np.random.default_rng(0), 1e-2
    names = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in names:  # one parameter at a time
        direction = rng.choice([-1.0, 1.0], leaf.shape).astype(np.float32)
        direction *= step / np.sqrt(leaf.size)

        def moved(sign, path=path, direction=direction):
            return jax.tree_util.tree_map_with_path(
                lambda p, x: x + sign * direction if p == path else x, params
            )

        slope = float(loss(moved(1.0)) - loss(moved(-1.0))) / 2
        own = functools.reduce(lambda tree, key: tree[key.key], path, gradient)
        name = jax.tree_util.keystr(path)
        assert float(jnp.vdot(own, direction)) == pytest.approx(slope, rel=0.02, abs=1e-3), name


def test_tiles_of_queries_and_of_logits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = rows()

    def value_and_gradient():
        def loss(params):
            return functional.score(SLIDING, params, jnp.asarray(ids), jnp.asarray(mask)).sum()

        return jax.jit(jax.value_and_grad(loss))(tiny_params(SLIDING))

    whole = value_and_gradient()
    monkeypatch.setattr("pallas_kernels.dense._TILE_ROWS", 5)
    monkeypatch.setattr(sys.modules["pagedjax.functional.score"], "_TILE_LOGITS", 7 * 97)
    in_tiles = value_and_gradient()
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(in_tiles), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_sixteen_bit_parameters_are_trained_as_values_and_stored_as_bits() -> None:
    config = dataclasses.replace(UNIFORM, dtype="bfloat16")
    stored = random_params(config, "cpu")
    values = as_values(config, stored)
    assert {x.dtype.name for x in jax.tree.leaves(values)} == {"bfloat16", "float32"}
    again = as_stored(config, jax.tree.map(lambda x: x.astype(jnp.float32), values), "cpu")
    assert jax.tree.map(lambda x: x.dtype, again) == jax.tree.map(lambda x: x.dtype, stored)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(stored)))
    ids, mask = rows()
    both = score(config, stored, ids, mask), score(config, values, ids, mask)
    np.testing.assert_array_equal(*both)
    gradient = jax.grad(lambda p: score(config, p, ids, mask).sum())(values)
    assert all(float(jnp.abs(x.astype(jnp.float32)).max()) > 0 for x in jax.tree.leaves(gradient))
