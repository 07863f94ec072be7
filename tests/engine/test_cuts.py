"""Exactly those tokens are kept that sorting keeps, whichever way the threshold is found."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import cuts, likeliest
from pagedjax.exact_sum import running_digits, sum_digits, to_float
from pagedjax.likeliest import chunked
from tests.engine.draws import make_input
from tests.engine.sampling_oracle import kept

exact_sum = jax.jit(lambda x: to_float(sum_digits(jnp.maximum(chunked(x), 0.0))))
exact_running_sum = jax.jit(lambda x: to_float(running_digits(x)))


@jax.jit
def find_thresholds(scaled: jax.Array, sampling: cuts.SamplingInput) -> jax.Array:
    x = chunked(scaled)
    return cuts.find_thresholds(x, likeliest.top_k(x, cuts.NUM_LIKELIEST)[0], sampling)


@functools.partial(jax.jit, static_argnums=2)
def both_searches(scaled: jax.Array, goal: jax.Array, by_mass: bool) -> tuple[jax.Array, jax.Array]:
    """The threshold as it is found, and as it is found in the whole row alone."""
    x, weigh = chunked(scaled), jnp.exp if by_mass else jnp.ones_like
    top, _ = likeliest.top_k(x, cuts.NUM_LIKELIEST)
    every = jnp.ones(len(x), bool)
    rows = cuts._search_rows(x, top[:, 0], weigh, goal, ~every)
    return cuts._search(x, top, weigh, goal, every), rows


def scale(logits: np.ndarray, temperature: np.ndarray | float) -> np.ndarray:
    logits = logits.astype(np.float32)
    temperature = np.broadcast_to(np.asarray(temperature, np.float32), len(logits))
    return (logits - logits.max(-1, keepdims=True)) / temperature[:, None]


def keep(logits: np.ndarray, **columns) -> np.ndarray:
    """bool[S, V]."""
    scaled = scale(logits, columns.get("temperature", 1.0))
    threshold = find_thresholds(scaled, make_input(len(logits), **columns))
    return scaled >= np.asarray(threshold)[:, None]


def random_rows(vocab: int, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits of various sharpness, with ties and minus infinities, and a mix of all cuts."""
    rng, rows = np.random.default_rng(seed), 96
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0.1, 1.0, 5.0], (rows, 1))
    rounded = np.round(logits * 4) / 4
    logits = np.where(rng.random((rows, 1)) < 0.4, rounded, logits)
    logits[rng.random((rows, vocab)) < 0.1] = -np.inf
    logits[:, 0] = 0.0  # never all of them

    def some(values: np.ndarray, none: float) -> np.ndarray:
        return np.where(rng.random(rows) < 0.5, none, values)

    return logits.astype(np.float32), {
        "temperature": rng.choice([1e-30, 0.2, 0.7, 1.0, 2.0, 1e30], rows),
        "top_k": some(rng.choice([1, 2, 3, vocab // 3 + 1, vocab, vocab + 2, 2**31 - 1], rows), 0),
        "top_p": some(rng.choice([1e-6, 0.0517, 0.3171, 0.7993, 0.9511, 0.9987], rows), 1.0),
        "min_p": some(rng.choice([1e-4, 0.01, 0.2, 0.9, 1.0], rows), 0.0),
    }


@pytest.mark.parametrize("vocab", [3, 97, 1000, 5000])
def test_what_is_kept_is_exactly_what_sorting_keeps(vocab: int) -> None:
    logits, columns = random_rows(vocab, seed=vocab)
    found = keep(logits, **columns)
    kinds = set()
    for row, x in enumerate(logits):
        t, k, p, m = (columns[name][row] for name in ("temperature", "top_k", "top_p", "min_p"))
        expected = kept(x, t, int(k), np.float32(p), np.float32(m))
        np.testing.assert_array_equal(found[row], expected, err_msg=f"{t=} {k=} {p=} {m=}")
        kinds.add((k > 0, p < 1, m > 0))
    assert len(kinds) == 8, "all combinations of cuts were tried"


@pytest.mark.parametrize("by_mass", [False, True])
@pytest.mark.parametrize("vocab", [97, 1000, 5000])
def test_both_ways_find_the_same_threshold(vocab: int, by_mass: bool) -> None:
    logits, columns = random_rows(vocab, seed=vocab + 1)
    scaled = scale(logits, columns["temperature"])
    rng = np.random.default_rng(0)
    goal = np.exp(scaled).sum(-1) * rng.random(96) if by_mass else rng.integers(1, vocab, 96)
    quick, slow = both_searches(scaled, goal.astype(np.float32), by_mass)
    # A goal that no number of finite tokens reaches: all of them are kept, or just all there is.
    finite = np.where(np.isfinite(scaled), scaled, 0.0).min(-1)
    np.testing.assert_array_equal(np.maximum(quick, finite), np.maximum(slow, finite))


def test_a_row_that_needs_the_whole_search_does_not_change_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 5000)).astype(np.float32)
    logits[::2] *= 8  # peaked: found among the likeliest
    together = keep(logits, top_p=0.9)
    counts = together.sum(-1)
    assert counts[::2].max() < cuts.NUM_LIKELIEST < counts[1::2].min()
    for row in range(8):
        np.testing.assert_array_equal(keep(logits[row : row + 1], top_p=0.9)[0], together[row])


def test_ties_beyond_the_likeliest_tokens_are_kept() -> None:
    logits = np.zeros((3, 1000), np.float32)
    logits[1, 7], logits[2, :300] = 5.0, 1.0
    assert keep(logits, top_k=[3, 2, 200]).sum(-1).tolist() == [1000, 1000, 300]
    assert keep(logits, top_p=0.1).sum(-1).tolist() == [1000, 1, 300]


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    assert keep(logits, top_k=[40, 41, 2**31 - 1]).all()


def test_a_top_p_that_float32_rounds_to_zero_keeps_the_likeliest() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32)
    found = keep(logits, top_p=[1e-6, 1e-45, 0.0])
    np.testing.assert_array_equal(found, logits == logits.max(-1, keepdims=True))


# --- exact sums ---


def weights(*shape: int) -> np.ndarray:
    """Of very different sizes, up to 1."""
    return np.exp(-np.random.default_rng(0).exponential(5.0, shape)).astype(np.float32)


def in_units(x: np.ndarray) -> int:
    """The sum of the weights as multiples of 2**-46, each rounded down."""
    return sum(int(Fraction(float(w)) * 2**46) for w in x.ravel())


def test_a_sum_is_exact_up_to_its_rounding() -> None:
    x = weights(3, 20_000)
    x[2] = 1.0
    for row, found in zip(x, np.asarray(exact_sum(x)), strict=True):
        assert found == pytest.approx(in_units(row) / 2**46, rel=2e-7)
        assert found == pytest.approx(row.astype(np.float64).sum(), rel=2e-7)


def test_a_sum_is_the_same_in_any_order_and_grouping() -> None:
    x = weights(1, 20_000)
    rng = np.random.default_rng(1)
    found = {float(exact_sum(rng.permuted(x, axis=1))[0]) for _ in range(10)}
    found.add(float(exact_sum(np.pad(x, ((0, 0), (7, 5000))))[0]))
    found.add(float(exact_sum(np.tile(x, (8, 1)))[5]))
    assert len(found) == 1


def test_a_running_sum_is_the_sum_of_what_it_has_passed() -> None:
    x = weights(4, 128)
    running = np.asarray(exact_running_sum(x))
    assert (np.diff(running) >= 0).all()
    for k in (1, 2, 77, 128):
        np.testing.assert_array_equal(running[:, k - 1], exact_sum(x[:, :k]))
