"""Logits are adjusted as the oracle adjusts them, and a slot remembers what it should."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pagedjax.logits import LogitsContext, adjust
from pagedjax.sampler import record
from pagedjax.sampling_input import (
    COUNT_MASK,
    FORBIDDEN,
    IN_PROMPT,
    STOPS,
    TAIL,
    SlotState,
)
from pagedjax.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS
from pagedjax.slot_start import empty_slots
from tests.engine import sampling_oracle
from tests.engine.draws import begun, begun_as, draw, jitted_begin, make_input, make_start
from tests.engine.sampling_oracle import Options

VOCAB = 40
POSITION = 10

jitted_adjust = jax.jit(adjust, static_argnums=3)
jitted_record = jax.jit(record)


def normal(vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * 2).astype(np.float32)


def adjusted(logits: np.ndarray, options: Options) -> np.ndarray:
    """f32[V], of a row whose slot starts as `options` say."""
    slots = begun_as(options, len(logits))
    sampling = make_input(
        1,
        adjusts=True,
        position=POSITION,
        min_position=POSITION + options.is_too_early,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
    )
    return np.asarray(jitted_adjust(jnp.asarray(logits[None]), sampling, slots, ()))[0]


CASES = {
    "nothing": Options(),
    "presence": Options(presence_penalty=0.7, prompt=[1], output=[2, 2, 3]),
    "frequency": Options(frequency_penalty=0.7, prompt=[1], output=[2, 2, 3]),
    "negative": Options(frequency_penalty=-2.0, presence_penalty=-1.0, output=[2, 2, 3]),
    "repetition": Options(repetition_penalty=1.7, prompt=[1, 1, 4, 5], output=[2, 2, 3]),
    "repetition below 1": Options(repetition_penalty=0.6, prompt=[1, 4], output=[2, 3]),
    "bias": Options(bias={0: 100.0, 7: -3.5, VOCAB - 1: 0.25}),
    "most bias": Options(bias={token: token / 7 for token in range(VOCAB)}),
    "allowed": Options(allowed=[3, 4, VOCAB - 1]),
    "too early": Options(stops=[1, 2], is_too_early=True),
    "late enough": Options(stops=[1, 2]),
    "all too early": Options(stops=range(VOCAB), is_too_early=True),
    "bad token": Options(bad_words=[[5], [6]]),
    "bad word begun": Options(bad_words=[[5, 6], [4, 5, 7], [9, 5, 8]], output=[4, 5]),
    "bad word in the prompt": Options(bad_words=[[5, 6]], prompt=[5]),
    "longest bad word": Options(bad_words=[[1, 2, 3, 4, 5, 6, 7, 8]], output=[0, *range(1, 8)]),
    "longest bad word, not quite": Options(bad_words=[range(1, 9)], output=[1, 9, *range(3, 8)]),
    "every token bad": Options(bad_words=[[token] for token in range(VOCAB)]),
    "every allowed token bad": Options(allowed=[3, 4], bad_words=[[3], [4]]),
    "allowed and too early": Options(allowed=[3, 4], stops=[3], is_too_early=True),
    "all": Options(
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        bias={2: 3.0, 5: -1.0},
        allowed=range(1, 30),
        bad_words=[[3, 9], [4]],
        stops=[7],
        is_too_early=True,
        prompt=[1, 2, 2],
        output=[5, 5, 3],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_adjusted_as_by_the_oracle(name: str) -> None:
    logits, options = normal(), CASES[name]
    expected = sampling_oracle.adjust(logits, options)
    np.testing.assert_allclose(adjusted(logits, options), expected, rtol=1e-5, atol=1e-6)


def test_bad_words_and_biases_fit_up_to_their_limits() -> None:
    vocab = 2048
    words = [[token] for token in range(MAX_BAD_WORDS)]
    bias = {vocab - 1 - i: i / 100 for i in range(MAX_LOGIT_BIAS)}
    options, logits = Options(bad_words=words, bias=bias), normal(vocab)
    expected = sampling_oracle.adjust(logits, options)
    np.testing.assert_allclose(adjusted(logits, options), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-45, 1e-30, 1e30, 3e38])
def test_no_penalty_makes_an_infinity_of_a_positive_logit(factor: float) -> None:
    found = adjusted(
        np.full(VOCAB, 5.0, np.float32), Options(repetition_penalty=factor, output=[3])
    )
    assert np.isfinite(found).all()


def test_what_an_earlier_request_left_in_the_slot_is_gone() -> None:
    used = jitted_begin(
        empty_slots(1, VOCAB),
        make_start(0, VOCAB, prompt=[1, 2], output=[3], allowed=[4], stops=[5], bias={6: 1.0}),
    )
    fresh = jitted_begin(used, make_start(0, VOCAB))
    assert all(map(np.array_equal, *map(jax.tree.leaves, (fresh, empty_slots(1, VOCAB)))))


def test_only_rows_that_adjust_are_adjusted_and_from_their_own_slots() -> None:
    slots = empty_slots(3, VOCAB)
    for slot, token in enumerate((4, 5, 6)):
        slots = jitted_begin(slots, make_start(slot, VOCAB, allowed=[token]))
    out = draw(normal(), slots, slot=[2, 0, 1, 1, 9], adjusts=[True, True, True, False, False])
    best = int(normal().argmax())
    assert out.token_ids.tolist() == [6, 4, 5, best, best]


# --- logits processors ---


def only_even(logits: jax.Array, context: LogitsContext) -> jax.Array:
    even = jnp.arange(len(logits), dtype=jnp.int32) % 2 == 0
    return jnp.where(even, logits, -jnp.inf)


def says_what_it_knows(logits: jax.Array, context: LogitsContext) -> jax.Array:
    known = 100 * context.output_counts + 1000 * context.in_prompt.astype(jnp.int32)
    known = known.at[0].set(context.position).at[1].set(context.tail[-1])
    return known.at[2].set(context.tail[0]).astype(jnp.float32)


def test_each_row_is_processed_by_its_own_processor_before_anything_else() -> None:
    logits = np.arange(VOCAB, dtype=np.float32)
    slots = begun(VOCAB, bias={3: 1000.0, 4: 100.0})
    processors = (only_even, says_what_it_knows)
    columns = {"adjusts": True, "processor": [0, 1, 2], "position": 7}
    out = draw(logits, slots, processors, wants_logprobs=True, **columns)
    assert out.token_ids.tolist() == [3, 4, 3]  # the bias comes after what is not even is excluded
    np.testing.assert_allclose(out.logprobs, sampling_oracle.log_softmax(logits)[[3, 4, 3]])


def test_a_processor_knows_the_sequence() -> None:
    slots = begun(VOCAB, prompt=[5, 6, 6], output=[6, 7, 7])
    sampling = make_input(1, adjusts=True, processor=1, position=6)
    args = (jnp.zeros((1, VOCAB), jnp.float32), sampling, slots, (says_what_it_knows,))
    found = np.asarray(jitted_adjust(*args))[0]
    expected = np.zeros(VOCAB)
    expected[[0, 1, 2, 5, 6, 7]] = 6, 7, -1, 1000, 1100, 200
    np.testing.assert_array_equal(found, expected)


def test_a_processor_runs_once_a_row_that_has_it() -> None:
    seen = []

    def watched(logits: jax.Array, context: LogitsContext) -> jax.Array:
        jax.debug.callback(lambda position: seen.append(int(position)), context.position)
        return logits

    has_it = np.arange(40) % 13 == 0
    columns = {"adjusts": has_it, "processor": has_it.astype(int), "position": np.arange(40)}
    draw(normal(), begun(VOCAB), (watched,), temperature=1.0, **columns)
    jax.effects_barrier()
    assert sorted(seen) == [0, 13, 26, 39]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_leaves_nothing_is_overruled_but_no_forbidden_token_is_drawn(
    value: float, temperature: float
) -> None:
    def nothing(logits: jax.Array, context: LogitsContext) -> jax.Array:
        return jnp.full_like(logits, value)

    slots = begun(VOCAB, allowed=[11, 30])
    columns = {"adjusts": True, "processor": 1, "seed": np.arange(64)}
    out = draw(normal(), slots, (nothing,), temperature=temperature, **columns)
    assert set(out.token_ids.tolist()) <= {11, 30}


def test_infinite_logits_of_a_processor_win_and_are_no_nan() -> None:
    def wins(logits: jax.Array, context: LogitsContext) -> jax.Array:
        return logits.at[9].set(jnp.inf)

    columns = {"adjusts": True, "processor": 1, "temperature": [0.0, 1.0]}
    out = draw(normal(), begun(VOCAB), (wins,), wants_logprobs=True, **columns)
    assert out.token_ids.tolist() == [9, 9]
    np.testing.assert_allclose(out.processed_logprobs, 0.0, atol=1e-6)


# --- what a slot remembers ---

SMALL, SLOTS = 6, 3
tokens = st.integers(0, SMALL - 1)
token_lists = st.lists(tokens, max_size=12)


@dataclasses.dataclass
class Remembered:
    """Of one slot, in numpy; None for what is arbitrary."""

    prompt: list[int]
    output: list[int]
    allowed: list[int]
    stops: list[int]
    counted: list[int]

    def check(self, slots: SlotState, slot: int) -> None:
        tail = ([-1] * TAIL + self.output)[-TAIL:]
        assert slots.tail[slot].tolist() == tail
        for token, entry in enumerate(slots.tokens[slot].tolist()):
            assert entry & COUNT_MASK == self.counted.count(token)
            assert bool(entry & IN_PROMPT) == (token in self.prompt)
            assert bool(entry & FORBIDDEN) == (token not in self.allowed)
            assert bool(entry & STOPS) == (token in self.stops)


begins = st.tuples(st.integers(0, SLOTS - 1), token_lists, token_lists, token_lists, token_lists)
row = st.tuples(tokens, st.booleans())  # what is sampled, and whether the row adjusts
records = st.dictionaries(st.integers(0, SLOTS - 1), row, min_size=1)


@functools.cache
def idle() -> SlotState:
    return empty_slots(SLOTS, SMALL)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.one_of(begins, records), max_size=12))
def test_a_slot_remembers_its_sequence_through_any_history(steps: list) -> None:
    slots = idle()
    model = [Remembered([], [], list(range(SMALL)), [], []) for _ in range(SLOTS)]
    for step in steps:
        if isinstance(step, tuple):
            slot, prompt, output, allowed, stops = step
            model[slot] = Remembered(prompt, list(output), allowed, stops, list(output))
            start = make_start(
                slot, SMALL, prompt=prompt, output=output, allowed=allowed, stops=stops
            )
            slots = jitted_begin(slots, start)
        else:
            sampled = np.zeros(SLOTS + 1, np.int32)  # the last row is padding
            columns = {"slot": np.full(SLOTS + 1, SLOTS), "adjusts": np.zeros(SLOTS + 1, bool)}
            for i, (slot, (token, adjusts)) in enumerate(step.items()):
                sampled[i], columns["slot"][i], columns["adjusts"][i] = token, slot, adjusts
                model[slot].output.append(token)
                model[slot].counted += [token] * adjusts
            slots = jitted_record(slots, make_input(SLOTS + 1, **columns), jnp.asarray(sampled))
        for slot in range(SLOTS):
            model[slot].check(slots, slot)


def test_a_sequence_that_starts_again_is_as_it_was() -> None:
    """After a preemption the slot is set up from the tokens, not from what it was told."""
    slots = begun(VOCAB, prompt=[1, 2], stops=[8], bias={4: 2.0})
    for token in (3, 4, 4, 5, 6, 7, 8, 9, 9, 10):
        sampling = make_input(1, adjusts=True)
        slots = jitted_record(slots, sampling, jnp.array([token], jnp.int32))
    output = (3, 4, 4, 5, 6, 7, 8, 9, 9, 10)
    again = begun(VOCAB, prompt=[1, 2], output=output, stops=[8], bias={4: 2.0})
    jax.tree.map(np.testing.assert_array_equal, slots, again)
