"""The largest entries by way of chunks are those of the plain functions, ties and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pagedjax import likeliest
from pagedjax.likeliest import CHUNK, chunked

argmax = jax.jit(lambda x: likeliest.argmax(chunked(x)))
top_k = jax.jit(lambda x, k: likeliest.top_k(chunked(x), k), static_argnums=1)


def rows(vocab: int) -> np.ndarray:
    """f32[6, vocab]: various, with many ties and excluded tokens among them."""
    rng = np.random.default_rng(vocab)
    x = rng.normal(size=(6, vocab)).astype(np.float32)
    x[1] -= 1e4  # far below zero, where padding must not win
    x[2] = rng.integers(0, 3, vocab)
    x[3] = 0.0
    x[4, rng.random(vocab) < 0.9] = -np.inf
    x[5, -1] = 50.0
    return x


@pytest.mark.parametrize("vocab", [1, 5, 97, 127, 128, 129, 1000, 40_000])
def test_they_are_those_of_the_plain_functions(vocab: int) -> None:
    x = rows(vocab)
    np.testing.assert_array_equal(argmax(x), x.argmax(-1))
    for k in (1, 20, 128):
        if k <= vocab:
            found, expected = top_k(x, k), lax.top_k(jnp.asarray(x), k)
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_array_equal(found[1], expected[1])


def test_the_first_of_tied_tokens_wins() -> None:
    x = np.zeros((4, 1030), np.float32)
    x[1, [300, 310]] = 1.0  # inside a chunk
    x[2, [CHUNK - 1, CHUNK]] = 1.0  # in neighbouring chunks
    x[3, [700, 1029]] = 1.0
    assert argmax(x).tolist() == [0, 300, CHUNK - 1, 700]


def test_minus_infinity_is_never_the_argmax() -> None:
    x = np.full((3, 700), -np.inf, np.float32)
    x[0, 699], x[1, 3], x[2, 600] = -1e30, 0.0, -5.0
    assert argmax(x).tolist() == [699, 3, 600]


def test_the_values_alone_are_not_found_by_sorting_all_candidates() -> None:
    """XLA:CPU would: its fast search of the largest returns indices too, or is not used."""
    x = jnp.zeros((8, 1 << 15), jnp.float32)
    compiled = jax.jit(lambda x: likeliest.top_k(chunked(x), 128)[0]).lower(x).compile().as_text()
    sorts = [line for line in compiled.splitlines() if " sort(" in line]
    assert sorts, "the chunks are put in order"
    assert not any(f",{128 * CHUNK}]" in line for line in sorts)
