"""Rows get what they ask for: alone, among others, and without paying for their neighbours."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import likeliest, sampler
from pagedjax.likeliest import chunked
from pagedjax.sampler import sample
from pagedjax.sampling_input import SlotState
from pagedjax.sampling_params import MAX_LOGPROBS
from pagedjax.slot_start import empty_slots
from tests.engine.draws import draw, jitted_begin, make_input, make_start
from tests.engine.sampling_oracle import Options, kept, log_softmax, probabilities

# --- greedy ---


@pytest.mark.parametrize("vocab", [1, 97])
def test_greedy_is_argmax_for_any_vocabulary_size(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=(6, vocab)).astype(np.float32)
    np.testing.assert_array_equal(draw(logits).token_ids, logits.argmax(-1))


# --- what is drawn ---


@pytest.mark.parametrize("vocab", [3, 700])
def test_only_kept_tokens_are_drawn(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(60, vocab)) * rng.choice([0.1, 5.0], (60, 1))).astype(np.float32)
    columns = {
        "temperature": rng.uniform(0.2, 2.0, 60).astype(np.float32),
        "top_k": rng.integers(0, vocab + 2, 60) * rng.integers(0, 2, 60),
        "top_p": np.where(rng.random(60) < 0.3, 1.0, rng.uniform(0.05, 0.99, 60)),
        "min_p": rng.choice([0.0, 0.1], 60),
    }
    rows = zip(logits, *columns.values(), strict=True)
    keep = np.array([kept(x, t, k, p, min_p) for x, t, k, p, min_p in rows])
    for seed in range(20):
        token_ids = draw(logits, seed=seed, **columns).token_ids
        assert keep[np.arange(60), token_ids].all()


def test_the_likeliest_token_alone_is_drawn_at_the_ends_of_the_ranges() -> None:
    logits = np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32) * 30
    best, seeds = logits.argmax(-1), np.arange(64)
    smallest = np.finfo(np.float32).tiny
    for columns in (
        {"top_k": 1, "temperature": 5.0},
        {"top_p": 1e-6, "temperature": 5.0},
        {"top_p": 1e-45, "temperature": 5.0},  # rounds to 0 on some hardware
        {"top_p": 0.0, "temperature": 5.0},  # what smaller ones are as float32
        {"min_p": 1.0, "temperature": 5.0},
        {"temperature": 2 * smallest},  # logits / temperature would be infinite
        {"temperature": 2 * smallest, "top_k": 3, "top_p": 0.9},
        {"temperature": 1e-45},
    ):
        np.testing.assert_array_equal(draw(logits, seed=seeds, **columns).token_ids, best, columns)


def test_few_kept_tokens_are_drawn_as_they_are_from_the_whole_row() -> None:
    """The noise belongs to the token, not to the way it is found."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, 3000)).astype(np.float32) * 4
    x[::2] = np.round(x[::2])
    x = chunked(jnp.asarray(x))
    sampling = make_input(64, temperature=1.0, seed=np.arange(64), position=7)

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        top, ids = likeliest.top_k(x, sampler.NUM_LIKELIEST)
        threshold = top[:, 60]
        few = sampler._draw_among(top, ids, threshold, sampling)
        return few, sampler._draw_among_all(x, threshold, sampling)

    few, all_tokens = both(x)
    np.testing.assert_array_equal(few, all_tokens)
    assert len(set(few.tolist())) > 32


# --- rows do not see each other ---

NUM_ROWS, VOCAB = 24, 700


@functools.cache
def mixed_rows() -> tuple[np.ndarray, SlotState, dict[str, np.ndarray]]:
    """Rows of all kinds, each with its own seed and slot, and some with long searches."""
    rng = np.random.default_rng(11)
    logits = rng.normal(size=(NUM_ROWS, VOCAB)) * rng.choice([1.0, 6.0], (NUM_ROWS, 1))
    columns = {
        "slot": rng.permutation(NUM_ROWS),
        "temperature": rng.choice([0.0, 0.5, 1.0, 2.0], NUM_ROWS),
        "top_k": rng.choice([0, 0, 1, 5, 40, 400], NUM_ROWS),
        "top_p": rng.choice([1.0, 1.0, 0.6, 0.95], NUM_ROWS),
        "min_p": rng.choice([0.0, 0.0, 0.01], NUM_ROWS),
        "presence_penalty": rng.choice([0.0, 0.5], NUM_ROWS),
        "frequency_penalty": rng.choice([0.0, 0.3], NUM_ROWS),
        "repetition_penalty": rng.choice([1.0, 1.3], NUM_ROWS),
        "seed": rng.integers(0, 2**63, NUM_ROWS),
        "position": rng.integers(9, 20, NUM_ROWS),
        "min_position": rng.choice([0, 15], NUM_ROWS),
        "adjusts": rng.choice([False, True], NUM_ROWS),
        "wants_logprobs": rng.choice([False, True], NUM_ROWS),
    }
    slots = empty_slots(NUM_ROWS, VOCAB)
    for slot in range(NUM_ROWS):
        best = np.argsort(-logits[list(columns["slot"]).index(slot)])
        start = make_start(
            slot,
            VOCAB,
            prompt=best[:3],
            output=rng.choice(best[:50], 20),
            stops=best[3:6],
            bias={int(best[4]): -1.0},
            bad_words=[[best[1]]] if slot % 3 == 0 else [],
        )
        slots = jitted_begin(slots, start)
    return logits.astype(np.float32), slots, columns


def draw_rows(rows: np.ndarray, **changes: np.ndarray) -> dict[str, np.ndarray]:
    """Some of the mixed rows, in some order; `changes` are columns of those."""
    logits, slots, columns = mixed_rows()
    columns = {name: values[rows] for name, values in columns.items()} | changes
    return vars(draw(logits[rows], slots, **columns))


def test_permuted_rows_give_permuted_results() -> None:
    """Parameters and state follow the request, not the row (bit for bit, log-probabilities too)."""
    together = draw_rows(np.arange(NUM_ROWS))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(NUM_ROWS)
        for name, values in draw_rows(order).items():
            np.testing.assert_array_equal(values, together[name][order], name)


@pytest.mark.parametrize("size", [1, 3, 8, 13])
def test_a_row_is_the_same_bit_for_bit_in_a_batch_of_any_size(size: int) -> None:
    together = draw_rows(np.arange(NUM_ROWS))
    for start in range(0, NUM_ROWS - size + 1, size):
        rows = np.arange(start, start + size)
        for name, values in draw_rows(rows).items():
            np.testing.assert_array_equal(values, together[name][rows], name)


def test_what_batch_mates_ask_changes_nothing() -> None:
    together, half = draw_rows(np.arange(NUM_ROWS)), NUM_ROWS // 2
    _, _, columns = mixed_rows()
    for change in (
        {"temperature": 3.0},
        {"temperature": 0.0},
        {"top_k": 200},
        {"top_p": 0.3},
        {"seed": 77},
        {"adjusts": True},
        {"wants_logprobs": True},
    ):
        ((name, value),) = change.items()
        values = columns[name].copy()
        values[half:] = value
        found = draw_rows(np.arange(NUM_ROWS), **{name: values})
        for field in found:
            np.testing.assert_array_equal(found[field][:half], together[field][:half], field)


# --- rows do not pay for each other ---


def tiles_of(num_seqs: int, **columns: np.ndarray) -> int:
    """How many tiles of rows are worked on beyond the argmax."""
    rows = []
    original = sampler._sample_tile

    def counting(*args):
        jax.debug.callback(lambda: rows.append(None))
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_sample_tile", counting)
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(num_seqs, 200)), jnp.float32)
        sampling = make_input(num_seqs, **columns)
        jax.block_until_ready(jax.jit(lambda *args: sample(*args))(logits, sampling, slots_of(200)))
        jax.effects_barrier()
    return len(rows)


@functools.cache
def slots_of(vocab: int) -> SlotState:
    return empty_slots(1, vocab)


@pytest.mark.parametrize(
    ("option", "value"), [("temperature", 1.0), ("adjusts", True), ("wants_logprobs", True)]
)
def test_greedy_rows_cost_no_more_for_a_neighbour_with_options(option: str, value: float) -> None:
    assert tiles_of(33, **{option: (np.arange(33) == 20) * value}) == 1


def test_the_work_goes_with_the_number_of_rows_that_have_options() -> None:
    tile = sampler._TILE
    assert tiles_of(33) == 0
    assert tiles_of(33, temperature=np.arange(33) % 4 == 0) == -(-9 // tile)
    assert tiles_of(33, temperature=1.0) == -(-33 // tile)
    assert tiles_of(tile - 1, temperature=1.0) == 1


def test_no_vocabulary_is_sorted() -> None:
    vocab = 262_144
    args = (jnp.zeros((8, vocab), jnp.float32), make_input(8), empty_slots(1, vocab))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    text = jax.jit(sample).lower(*shapes).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r" sort\(|TopK", line)]
    sizes = [int(size) for line in lines for size in re.findall(r"\[(?:\d+,)*(\d+)\]", line)]
    assert any(size == sampler.NUM_LIKELIEST for size in sizes), "sorts are found by this test"
    assert max(sizes) <= vocab // 8


# --- log-probabilities ---


@pytest.mark.parametrize("vocab", [7, 1030])
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


@pytest.mark.parametrize("vocab", [7, 1030])
def test_processed_logprobs_are_those_of_the_distribution_that_was_sampled(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 4
    cases = [
        Options(temperature=0.3),
        Options(temperature=2.0, top_k=4),
        Options(temperature=1.5, top_p=0.8),
        Options(min_p=0.1),
        Options(),
    ]
    names = ("temperature", "top_k", "top_p", "min_p")
    columns = {name: [getattr(options, name) for options in cases] for name in names}
    out = draw(logits, seed=5, wants_logprobs=True, **columns)
    for options, token, logprob in zip(cases, out.token_ids, out.processed_logprobs, strict=True):
        expected = np.log(probabilities(logits, options)[token])
        assert logprob == pytest.approx(expected, abs=2e-5)


def test_processed_logprobs_of_a_greedy_row_are_of_the_adjusted_logits() -> None:
    logits = np.random.default_rng(0).normal(size=30).astype(np.float32)
    slots = jitted_begin(empty_slots(1, 30), make_start(0, 30, allowed=range(10)))
    out = draw(logits, slots, adjusts=True, top_k=3, wants_logprobs=True)
    best = int(logits[:10].argmax())
    assert out.token_ids.tolist() == [best]
    assert out.processed_logprobs[0] == pytest.approx(log_softmax(logits[:10])[best], abs=2e-5)
    assert out.logprobs[0] == pytest.approx(log_softmax(logits)[best], abs=2e-5)


def test_logprobs_are_zero_for_rows_that_do_not_want_them() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 97)).astype(np.float32)
    one, none = draw(logits, wants_logprobs=[False, True, False]), draw(logits)
    np.testing.assert_allclose(one.logprobs, log_softmax(logits).max(-1) * [0, 1, 0], atol=2e-5)
    np.testing.assert_array_equal(one.token_ids, none.token_ids)
    for name in ("logprobs", "processed_logprobs", "top_ids", "top_logprobs"):
        assert not getattr(one, name)[[0, 2]].any()
        assert getattr(one, name)[1].any()
        assert not getattr(none, name).any()


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
    for cuts in ({}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 300, "top_p": 0.99}, {"min_p": 0.3}):
        out = draw(logits, temperature=temperature, wants_logprobs=True, **cuts)
        assert not any(np.isnan(x).any() for x in vars(out).values())
        assert ((out.token_ids >= 0) & (out.token_ids < 600)).all()
        assert np.isfinite(logits[np.arange(6), out.token_ids]).all()
        assert out.token_ids[2] == 599
