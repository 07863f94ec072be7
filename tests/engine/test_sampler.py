"""The sampler that never sorts agrees with a numpy sampler that does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.batch import SamplingInput
from pagedjax.sampler import SamplerOutput, _cut, sample
from pagedjax.sampling_params import MAX_LOGPROBS

jitted_sample = jax.jit(sample)
jitted_cut = jax.jit(_cut)


def make_input(num_seqs: int, **columns) -> SamplingInput:
    """Columns of one value for all rows or one each; `seed` as Python integers."""
    defaults = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "position": 0,
        "wants_logprobs": False,
    }
    c = {
        name: np.broadcast_to(np.asarray(columns.get(name, default)), num_seqs)
        for name, default in defaults.items()
    }
    seed = c["seed"].astype(np.uint64)
    rows = jnp.arange(num_seqs, dtype=jnp.int32)  # for the step; the sampler does not look at them
    return SamplingInput(
        row=rows,
        slot=rows,
        temperature=jnp.asarray(c["temperature"], jnp.float32),
        top_k=jnp.asarray(c["top_k"], jnp.int32),
        top_p=jnp.asarray(c["top_p"], jnp.float32),
        seed=jnp.asarray(np.stack([seed & 0xFFFFFFFF, seed >> 32], axis=1), jnp.uint32),
        position=jnp.asarray(c["position"], jnp.int32),
        wants_logprobs=jnp.asarray(c["wants_logprobs"], bool),
    )


def draw(logits: np.ndarray, **columns) -> SamplerOutput:
    """`sample`, fetched; one row of logits is repeated for every row of the columns."""
    num_seqs = max([len(logits) if logits.ndim == 2 else 1, *map(np.size, columns.values())])
    logits = np.broadcast_to(logits, (num_seqs, logits.shape[-1])).astype(np.float32)
    return jax.device_get(jitted_sample(logits, make_input(num_seqs, **columns)))


def numpy_probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """f64[V]: the distribution to be sampled, by sorting; zero for tokens that are cut."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    if top_k:
        order = order[:top_k]
    p = np.exp((logits[order] - logits.max()).astype(np.float64) / temperature)
    p /= p.sum()
    if top_p < 1:
        count = 1 + np.count_nonzero(np.cumsum(p) < top_p)
        order, p = order[:count], p[:count] / p[:count].sum()
    full = np.zeros(len(logits))
    full[order] = p
    return full


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# --- greedy ---


@pytest.mark.parametrize("vocab", [1, 5, 97, 511, 512, 513, 1000, 1536])
def test_greedy_is_argmax_for_any_vocabulary_size(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=(6, vocab)).astype(np.float32)
    logits[1] -= 1e4  # far below zero, where padding must not win
    logits[2, -1] = 50.0
    np.testing.assert_array_equal(draw(logits).token_ids, logits.argmax(-1))


def test_the_first_of_tied_tokens_wins() -> None:
    logits = np.zeros((4, 1030), np.float32)
    logits[1, [300, 400]] = 1.0  # inside a block of the search
    logits[2, [511, 512]] = 1.0  # in neighbouring blocks
    logits[3, [700, 1029]] = 1.0
    assert draw(logits).token_ids.tolist() == [0, 300, 511, 700]


def test_minus_infinity_is_never_the_argmax() -> None:
    logits = np.full((3, 700), -np.inf, np.float32)
    logits[0, 699], logits[1, 3], logits[2, 600] = -1e30, 0.0, -5.0
    assert draw(logits).token_ids.tolist() == [699, 3, 600]


# --- what is kept ---


def random_cuts(vocab: int, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Random logits of various sharpness and a mix of top-k, top-p, both and neither."""
    rng, rows = np.random.default_rng(seed), 60
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0.1, 1.0, 5.0], (rows, 1))
    logits[rng.random((rows, vocab)) < 0.1] = -np.inf
    logits[:, 0] = 0.0  # never all of them
    return logits.astype(np.float32), {
        "temperature": rng.uniform(0.2, 2.0, rows).astype(np.float32),
        "top_k": rng.integers(0, vocab + 2, rows) * rng.integers(0, 2, rows),
        "top_p": np.where(rng.random(rows) < 0.3, 1.0, rng.uniform(0.05, 0.99, rows)),
    }


@pytest.mark.parametrize("vocab", [3, 97, 1000])
def test_top_k_and_top_p_keep_exactly_what_sorting_keeps(vocab: int) -> None:
    logits, columns = random_cuts(vocab, seed=vocab)
    scaled = logits / columns["temperature"][:, None]
    got = np.isfinite(jitted_cut(scaled, make_input(len(logits), **columns)))
    kinds = set()
    for row in range(len(logits)):
        t, k, p = (columns[name][row] for name in ("temperature", "top_k", "top_p"))
        expected = numpy_probabilities(logits[row], t, k, p) > 0
        np.testing.assert_array_equal(got[row], expected, err_msg=f"k={k} p={p}")
        kinds.add((k > 0, p < 1))
    assert len(kinds) == 4, "top-k, top-p, both and neither were tried"


@pytest.mark.parametrize("vocab", [3, 97])
def test_only_kept_tokens_are_drawn(vocab: int) -> None:
    logits, columns = random_cuts(vocab, seed=vocab + 1)
    for seed in range(20):
        token_ids = draw(logits, seed=seed, **columns).token_ids
        for row, token in enumerate(token_ids):
            t, k, p = (columns[name][row] for name in ("temperature", "top_k", "top_p"))
            assert numpy_probabilities(logits[row], t, k, p)[token] > 0


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    scaled = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    kept = jitted_cut(scaled, make_input(3, top_k=[40, 41, 2**31 - 1]))
    np.testing.assert_array_equal(kept, scaled)


def test_the_likeliest_token_alone_is_drawn_at_the_ends_of_the_ranges() -> None:
    logits = np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32) * 30
    best, seeds = logits.argmax(-1), np.arange(64)
    smallest = np.finfo(np.float32).tiny
    for columns in (
        {"top_k": 1, "temperature": 5.0},
        {"top_p": 1e-6, "temperature": 5.0},
        {"top_p": 1e-45, "temperature": 5.0},  # rounds to 0 on some hardware
        {"top_p": 0.0, "temperature": 5.0},  # what smaller ones are as float32
        {"temperature": 2 * smallest},  # logits / temperature would be infinite
        {"temperature": 2 * smallest, "top_k": 3, "top_p": 0.9},
        {"temperature": 1e-45},
    ):
        np.testing.assert_array_equal(draw(logits, seed=seeds, **columns).token_ids, best, columns)


# --- distributions ---

NUM_DRAWS = 20_000


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    expected = counts.sum() * probabilities[kept]
    assert expected.min() > 5, "too few for the chi-square distribution"
    return float(((counts[kept] - expected) ** 2 / expected).sum())


def critical_chi_square(freedom: int, z: float = 3.719) -> float:
    """Upper quantile, by Wilson and Hilferty (1931); `z` is the normal's, here for 1e-4."""
    return freedom * (1 - 2 / (9 * freedom) + z * np.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("stream", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (3.0, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.7), (0.8, 6, 0.85)],
)
def test_draws_follow_the_distribution(
    temperature: float, top_k: int, top_p: float, stream: str
) -> None:
    logits = np.random.default_rng(5).normal(size=12).astype(np.float32)
    each = np.arange(NUM_DRAWS)
    where = {"seed": each, "position": 3} if stream == "seeds" else {"seed": 3, "position": each}
    tokens = draw(logits, temperature=temperature, top_k=top_k, top_p=top_p, **where).token_ids
    counts = np.bincount(tokens, minlength=12)
    p = numpy_probabilities(logits, temperature, top_k, top_p)
    limit = critical_chi_square(np.count_nonzero(p) - 1)
    assert chi_square(counts, p) < limit
    # The test can fail: draws of a temperature 20% higher would be noticed.
    assert chi_square(counts, numpy_probabilities(logits, temperature * 1.2, top_k, top_p)) > limit


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    logits, each = np.zeros(4, np.float32), np.arange(NUM_DRAWS + 1)
    limit = critical_chi_square(15)
    for where in ({"position": each, "seed": 1}, {"position": 1, "seed": each}):
        tokens = draw(logits, temperature=1.0, **where).token_ids
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        assert chi_square(pairs, np.full(16, 1 / 16)) < limit


def test_both_words_of_the_seed_and_the_position_select_the_stream() -> None:
    logits = np.zeros(50_000, np.float32)
    seeds, positions = [7, 8, 7 + 2**32, 7, 7], [1, 1, 1, 2, 1]
    tokens = draw(logits, temperature=1.0, seed=seeds, position=positions).token_ids
    assert len(set(tokens[:4].tolist())) == 4
    assert tokens[4] == tokens[0]


# --- rows do not see each other ---


@functools.cache
def mixed_rows() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Eight rows, each with other parameters and its own seed."""
    rng = np.random.default_rng(11)
    return rng.normal(size=(8, 700)).astype(np.float32), {
        "temperature": np.array([0.0, 1.0, 1.0, 1.0, 2.0, 0.0, 0.5, 1.0]),
        "top_k": np.array([0, 0, 5, 0, 40, 3, 0, 1]),
        "top_p": np.array([1.0, 1.0, 1.0, 0.6, 0.9, 0.5, 1.0, 1.0]),
        "seed": np.array([1, 2, 3, 4, 5, 6, 2**40, 8]),
        "position": np.array([9, 9, 9, 10, 11, 12, 13, 9]),
    }


def test_a_row_is_the_same_alone_as_among_rows_of_other_parameters() -> None:
    logits, columns = mixed_rows()
    together = draw(logits, **columns).token_ids
    for row in range(8):
        alone = draw(
            logits[row], **{name: values[row : row + 1] for name, values in columns.items()}
        )
        assert alone.token_ids[0] == together[row]
    assert together[0] == logits[0].argmax()
    assert together[5] == logits[5].argmax()
    assert together[7] == logits[7].argmax()


def test_a_row_is_the_same_at_any_index() -> None:
    logits, columns = mixed_rows()
    together = draw(logits, **columns).token_ids
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(8)
        moved = draw(logits[order], **{name: values[order] for name, values in columns.items()})
        np.testing.assert_array_equal(moved.token_ids, together[order])


def test_batch_mates_change_nothing() -> None:
    logits, columns = mixed_rows()
    together = draw(logits, **columns).token_ids
    for change in ({"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.3}, {"seed": 77}):
        changed = {name: values.copy() for name, values in columns.items()}
        for name, value in change.items():
            changed[name][4:] = value
        other_logits = logits.copy()
        other_logits[4:] = other_logits[4:, ::-1] * 3
        np.testing.assert_array_equal(draw(other_logits, **changed).token_ids[:4], together[:4])


# --- log-probabilities ---


@pytest.mark.parametrize("vocab", [7, 97, 1030])
def test_logprobs_are_those_of_the_uncut_unscaled_distribution(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=(5, vocab)).astype(np.float32) * 4
    out = draw(logits, temperature=[0.0, 0.3, 2.0, 1.0, 1.0], top_k=3, wants_logprobs=True)
    expected, rows = log_softmax(logits), np.arange(5)
    np.testing.assert_allclose(out.logprobs, expected[rows, out.token_ids], atol=2e-5)
    width = min(vocab, MAX_LOGPROBS)
    best = np.argsort(-expected, axis=-1)[:, :width]
    np.testing.assert_array_equal(out.top_ids, best)
    np.testing.assert_allclose(
        out.top_logprobs, np.take_along_axis(expected, best, axis=-1), atol=2e-5
    )


def test_logprobs_are_there_for_all_rows_when_one_asks_and_zero_when_none_does() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 97)).astype(np.float32)
    one, none = draw(logits, wants_logprobs=[False, True, False]), draw(logits)
    np.testing.assert_allclose(one.logprobs, log_softmax(logits).max(-1), atol=2e-5)
    np.testing.assert_array_equal(one.token_ids, none.token_ids)
    assert not none.logprobs.any()
    assert not none.top_logprobs.any()


# --- hostile numbers ---


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 1.0, 1e30])
def test_extreme_logits_give_no_nan_and_no_impossible_token(temperature: float) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, 600)).astype(np.float32)
    logits[0] *= 1e38  # near the largest float
    logits[1, ::2] = -np.inf
    logits[2] = -np.inf
    logits[2, 599] = 0.0  # one token is possible
    logits[3] = 0.0  # all are alike
    logits[4] *= 1e-40  # subnormal
    logits[5] -= 1e30
    for cuts in ({}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 300, "top_p": 0.99}):
        out = draw(logits, temperature=temperature, wants_logprobs=True, **cuts)
        assert not any(np.isnan(x).any() for x in vars(out).values())
        assert ((out.token_ids >= 0) & (out.token_ids < 600)).all()
        assert np.isfinite(logits[np.arange(6), out.token_ids]).all()
        assert out.token_ids[2] == 599
