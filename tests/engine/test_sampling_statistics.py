"""Draws follow the distribution that the options ask for: chi-square tests with fixed seeds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from pagedjax.logits import LogitsContext
from pagedjax.noise import gumbel, threefry2x32
from tests.engine.draws import begun_as, draw
from tests.engine.sampling_oracle import Options, probabilities

VOCAB = 24
NUM_DRAWS = 20_000
POSITION = 40

jitted_gumbel = jax.jit(gumbel)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare outcomes are taken together.

    Infinite where something has happened that could not.
    """
    possible = expected > 0
    if counts[~possible].any():
        return float("inf"), 1
    counts, expected = counts[possible], expected[possible] * counts.sum()
    rare = expected < 5
    if rare.any():
        rare |= expected == expected[~rare].min()  # so that there are enough of them
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(((counts - expected) ** 2 / expected).sum()), max(len(counts) - 1, 1)


def critical_chi_square(freedom: int, z: float = 3.719) -> float:
    """Upper quantile, by Wilson and Hilferty (1931); `z` is the normal's, here for 1e-4."""
    return freedom * (1 - 2 / (9 * freedom) + z * np.sqrt(2 / (9 * freedom))) ** 3


def agrees(counts: np.ndarray, expected: np.ndarray) -> bool:
    statistic, freedom = chi_square(counts, expected)
    return statistic < critical_chi_square(freedom)


# --- every option ---


def swap_halves(logits: jax.Array, context: LogitsContext) -> jax.Array:
    return jnp.roll(logits, len(logits) // 2)


BASE = Options(prompt=[0, 1, 1, 2], output=[2, 3, 3, 3, 4])
"""Some tokens are known in every case, so that an option that is not asked for would show."""

CASES = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 3": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"top_k": 9, "top_p": 0.8, "temperature": 0.8},
    "all cuts": {"top_k": 12, "top_p": 0.9, "min_p": 0.08, "temperature": 1.5},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.6},
    "repetition": {"repetition_penalty": 1.8},
    "logit_bias": {"bias": {5: 1.5, 6: -1.5, 7: 0.5}},
    "allowed": {"allowed": range(3, 15)},
    "bad words": {"bad_words": [[8], [3, 4, 9], [4, 4, 10]]},
    "min_tokens": {"stops": [11, 12], "is_too_early": True},
    "processor": {"processor": lambda x: np.roll(x, VOCAB // 2)},
    "penalties and cuts": {
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "temperature": 0.7,
        "top_k": 15,
        "top_p": 0.9,
    },
    "everything": {
        "processor": lambda x: np.roll(x, VOCAB // 2),
        "bias": {5: 1.0, 9: -1.0},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "allowed": range(1, 22),
        "bad_words": [[8], [4, 9]],
        "stops": [11],
        "is_too_early": True,
        "temperature": 1.3,
        "top_k": 14,
        "top_p": 0.95,
        "min_p": 0.05,
    },
}


def options_of(case: str) -> Options:
    return Options(prompt=BASE.prompt, output=BASE.output, **CASES[case])


@functools.cache
def some_logits() -> np.ndarray:
    return np.random.default_rng(5).normal(size=VOCAB).astype(np.float32)


@functools.cache
def counts_of(case: str, stream: str) -> np.ndarray:
    """How often each token is drawn, with other seeds or at other positions."""
    options, each = options_of(case), np.arange(NUM_DRAWS) + POSITION
    where = {"position": POSITION, "seed": each} if stream == "seeds" else {"position": each}
    position = where["position"]
    slots = begun_as(options, VOCAB)
    out = draw(
        some_logits(),
        slots,
        (swap_halves,),
        adjusts=True,
        min_position=position + options.is_too_early,
        processor=int(options.processor is not None),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        **where,
    )
    return np.bincount(out.token_ids, minlength=VOCAB)


@pytest.mark.parametrize("stream", ["seeds", "positions"])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution_that_is_asked_for(case: str, stream: str) -> None:
    assert agrees(counts_of(case, stream), probabilities(some_logits(), options_of(case)))


@pytest.mark.parametrize("case", CASES)
def test_draws_of_other_options_would_be_noticed(case: str) -> None:
    """The test above has the power to fail: draws of each case disagree with every other case."""
    counts = counts_of(case, "seeds")
    for other in CASES:
        expected = probabilities(some_logits(), options_of(other))
        assert agrees(counts, expected) == (other == case), other


def test_a_temperature_that_is_a_tenth_too_high_would_be_noticed() -> None:
    counts = counts_of("temperature 1", "seeds")
    assert not agrees(counts, probabilities(some_logits(), Options(temperature=1.1)))


def test_draws_from_the_whole_of_a_large_vocabulary_follow_the_distribution() -> None:
    """More tokens are kept than are looked at one by one."""
    logits = np.random.default_rng(6).normal(size=1000).astype(np.float32)
    options = Options(top_p=0.9, temperature=1.5)
    each = np.arange(NUM_DRAWS)
    out = draw(logits, seed=each, position=3, temperature=1.5, top_p=0.9)
    counts, p = np.bincount(out.token_ids, minlength=1000), probabilities(logits, options)
    assert np.count_nonzero(p) > 500
    assert agrees(counts, p)
    assert not agrees(counts, probabilities(logits, Options(temperature=1.5)))


# --- independence ---


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    logits, each = np.zeros(4, np.float32), np.arange(NUM_DRAWS + 1)
    for where in ({"position": each, "seed": 1}, {"position": 1, "seed": each}):
        tokens = draw(logits, temperature=1.0, **where).token_ids
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        assert agrees(pairs, np.full(16, 1 / 16))


def test_both_words_of_the_seed_and_the_position_select_the_stream() -> None:
    logits = np.zeros(50_000, np.float32)
    seeds, positions = [7, 8, 7 + 2**32, 7, 7], [1, 1, 1, 2, 1]
    tokens = draw(logits, temperature=1.0, seed=seeds, position=positions).token_ids
    assert len(set(tokens[:4].tolist())) == 4
    assert tokens[4] == tokens[0]


# --- noise ---


def test_the_words_are_those_of_the_same_function_in_jax() -> None:
    key = jnp.array([0x13198A2E, 0x03707344], jnp.uint32)
    count = jnp.array([*range(50), 2**32 - 1, 5, 0, 77], jnp.uint32)
    first, second = threefry2x32(key[0], key[1], *jnp.split(count, 2))
    np.testing.assert_array_equal(jnp.concatenate([first, second]), threefry_2x32(key, count))


def test_the_noise_of_a_token_is_the_same_in_any_selection() -> None:
    seed = jnp.array([[1, 2], [3, 4]], jnp.uint32)
    position = jnp.array([5, 6], jnp.int32)
    every = np.asarray(jitted_gumbel(seed, position, jnp.arange(4096, dtype=jnp.int32)[None]))
    some = np.array([[4095, 0, 17], [3, 3, 2048]], np.int32)
    found = jitted_gumbel(seed, position, jnp.asarray(some))
    np.testing.assert_array_equal(found, np.take_along_axis(every, some, axis=1))


def test_the_noise_is_of_the_gumbel_distribution_up_to_its_tail() -> None:
    size = 1 << 22
    ids = jnp.arange(size, dtype=jnp.int32)[None]
    noise = jitted_gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), ids)
    sorted_noise = np.sort(np.asarray(noise[0], np.float64))
    assert np.isfinite(sorted_noise).all()
    cdf = np.exp(-np.exp(-sorted_noise))
    distance = np.abs(cdf - (np.arange(size) + 0.5) / size).max()
    assert distance * np.sqrt(size) < 2.2, "Kolmogorov and Smirnov, 1e-4"
    # The maximum of a large vocabulary decides. There are expected to be 64 beyond this value, all
    # different: noise from 23 bits would have taken few values there.
    tail = sorted_noise[sorted_noise > -np.log(-np.log1p(-64 / size))]
    assert 32 < len(tail) < 96
    assert len(set(tail)) > 0.9 * len(tail)
