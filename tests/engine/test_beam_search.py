"""Beam search: its parameters, its rules on small language models, and Transformers' results.

The small models are random tables of log-probabilities, so that two slow references can be run:
every possible sequence, and Transformers' algorithm in its own manner, with whole rows of the
vocabulary. `tests/data/beam_search.json` has what Transformers itself finds on tiny checkpoints.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.beam_search import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    BeamSearch,
    BeamSearchParams,
    Continuation,
    Hypothesis,
)
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError
from pagedjax.llm import LLM
from pagedjax.models.checkpoint import load_hf
from pagedjax.request import FinishReason
from pagedjax.sampling_params import MAX_LOGPROBS
from tests.engine.tiny import in_one_shape
from tests.models.forward import prompt_logits

NAN, INF = float("nan"), float("inf")
Model = Callable[[tuple[int, ...]], np.ndarray]
"""Log-probabilities f64[vocab] of the token behind the generated ones."""


# --- parameters ---


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("beam_width", 0, rf"in \[1, {MAX_BEAM_WIDTH}\]"),
        ("beam_width", MAX_BEAM_WIDTH + 1, rf"in \[1, {MAX_BEAM_WIDTH}\]"),
        ("beam_width", 2.0, "an integer"),
        ("beam_width", None, "an integer"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", "16", "an integer"),
        ("length_penalty", MAX_LENGTH_PENALTY + 0.5, r"in \[-10.0, 10.0\]"),
        ("length_penalty", -1e300, r"in \[-10.0, 10.0\]"),
        ("length_penalty", 10**400, r"in \[-10.0, 10.0\]"),
        ("length_penalty", NAN, r"in \[-10.0, 10.0\]"),
        ("length_penalty", INF, r"in \[-10.0, 10.0\]"),
        ("length_penalty", "1", "a number"),
        ("length_penalty", None, "a number"),
        ("early_stopping", "always", "True, False or 'never'"),
        ("early_stopping", None, "True, False or 'never'"),
        ("early_stopping", 1, "True, False or 'never'"),
        ("num_return_sequences", 0, r"in \[1, 4\], the beam width"),
        ("num_return_sequences", 5, r"in \[1, 4\], the beam width"),
        ("num_return_sequences", 1.5, "an integer"),
        ("stop_token_ids", 5, "integers"),
        ("stop_token_ids", (1, 2.5), "integers"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_value_and_the_limit(
    name: str, value: Any, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=limit) as caught:
        BeamSearchParams(**{"beam_width": 4, name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}; it must be ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 1),
        ("beam_width", MAX_BEAM_WIDTH),
        ("max_tokens", 1),
        ("length_penalty", -MAX_LENGTH_PENALTY),
        ("length_penalty", MAX_LENGTH_PENALTY),
        ("length_penalty", 0),
        ("early_stopping", True),
        ("early_stopping", "never"),
        ("num_return_sequences", None),
        ("num_return_sequences", 1),
        ("num_return_sequences", 4),
        ("stop_token_ids", ()),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(name: str, value: Any) -> None:
    assert getattr(BeamSearchParams(**{"beam_width": 4, name: value}), name) == value


def test_values_become_plain_and_the_params_hashable() -> None:
    params = BeamSearchParams(
        np.int8(4),  # type: ignore[arg-type]
        length_penalty=np.float32(2),  # type: ignore[arg-type]
        num_return_sequences=np.int64(3),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
    )
    assert params == BeamSearchParams(
        4, length_penalty=2.0, num_return_sequences=3, stop_token_ids=(3, 4)
    )
    assert hash(params)
    assert type(params.beam_width) is type(params.num_return_sequences) is int
    assert type(params.length_penalty) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.beam_width = 3  # type: ignore[misc]


# --- a case by hand ---

STOP = 0
BY_HAND = {  # probabilities of tokens 0 (stop), 1 and 2 behind the generated ones
    (): (0.2, 0.5, 0.3),  # the stop token is third: no hypothesis
    (1,): (0.6, 0.3, 0.1),
    (2,): (0.05, 0.9, 0.05),  # (1, 0): 0.30 ends; (2, 1): 0.27 and (1, 1): 0.15 live on
    (2, 1): (0.8, 0.1, 0.1),
    (1, 1): (0.5, 0.3, 0.2),  # (2, 1, 0): 0.216 and (1, 1, 0): 0.075 end
    (1, 1, 1): (0.05, 0.9, 0.05),  # 0.045, the best that lives on
    (1, 1, 2): (0.1, 0.8, 0.1),  # 0.030
}


def by_hand(tokens: tuple[int, ...]) -> np.ndarray:
    return np.log(BY_HAND[tokens])


def test_the_case_by_hand_step_by_step() -> None:
    search = BeamSearch(BeamSearchParams(2), frozenset({STOP}), 10)
    assert search.num_candidates == 3
    live = search.advance([likeliest(by_hand(()), 3)])
    assert live == [Continuation(0, 1, np.log(0.5)), Continuation(0, 2, np.log(0.3))]
    assert search.best() == []
    live = search.advance([likeliest(by_hand((1,)), 3), likeliest(by_hand((2,)), 3)])
    assert [(c.parent, c.token_id) for c in live] == [(1, 1), (0, 1)]
    assert [c.cumulative_logprob for c in live] == pytest.approx(np.log([0.27, 0.15]))
    assert [h.token_ids for h in search.best()] == [(1, 0)]
    assert not search.is_done
    live = search.advance([likeliest(by_hand((2, 1)), 3), likeliest(by_hand((1, 1)), 3)])
    assert live == []
    assert search.is_done
    best, second = search.best()
    assert (best.token_ids, best.stop_token_id) == ((2, 1, 0), STOP)
    assert best.cumulative_logprob == pytest.approx(math.log(0.216))
    assert best.score == pytest.approx(-0.510826)  # log(0.216) / 3
    assert second.token_ids == (1, 0)
    assert second.score == pytest.approx(-0.601986)  # log(0.30) / 2


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping", "lives_on", "kept"),
    [
        # log(0.045) / 3 = -1.034 does not beat the second best, log(0.30) / 2 = -0.602 ...
        (1.0, False, False, [(2, 1, 0), (1, 0)]),
        (1.0, True, False, [(2, 1, 0), (1, 0)]),
        # ... but log(0.045) / 10 = -0.310 would.
        (1.0, "never", True, [(2, 1, 0), (1, 0)]),
        # Where long ones are not favoured, nothing of probability 0.045 can beat 0.216.
        (0.0, "never", False, [(1, 0), (2, 1, 0)]),
        (-1.0, "never", False, [(1, 0), (2, 1, 0)]),
        # log(0.075) / 9 = -0.288 beats log(0.30) / 4 = -0.301; log(0.045) / 9 = -0.345 does not.
        (2.0, False, False, [(2, 1, 0), (1, 1, 0)]),
        (2.0, "never", True, [(2, 1, 0), (1, 1, 0)]),
    ],
)
def test_the_rules_of_early_stopping_by_hand(length_penalty, early_stopping, lives_on, kept):
    params = BeamSearchParams(2, length_penalty=length_penalty, early_stopping=early_stopping)
    search = BeamSearch(params, frozenset({STOP}), 10)
    search.advance([likeliest(by_hand(()), 3)])
    search.advance([likeliest(by_hand((1,)), 3), likeliest(by_hand((2,)), 3)])
    live = search.advance([likeliest(by_hand((2, 1)), 3), likeliest(by_hand((1, 1)), 3)])
    assert [(c.parent, c.token_id) for c in live] == ([(1, 1), (1, 2)] if lives_on else [])
    assert search.is_done is not lives_on
    assert [h.token_ids for h in search.best()] == kept


def test_a_live_beam_that_only_equals_the_worst_hypothesis_does_not_go_on() -> None:
    search = BeamSearch(BeamSearchParams(1), frozenset({STOP}), 10)
    assert search.advance([[(STOP, -1.0), (1, -1.0)]]) == []
    assert search.best() == [Hypothesis((STOP,), -1.0, -1.0, STOP)]


def test_at_the_limit_of_tokens_beams_end_without_a_stop_token() -> None:
    search = BeamSearch(BeamSearchParams(2), frozenset({STOP}), 2)
    found = drive(search, by_hand)
    assert [(h.token_ids, h.stop_token_id) for h in found] == [((1, 0), STOP), ((2, 1), None)]
    assert [h.score for h in found] == pytest.approx([np.log(0.30) / 2, np.log(0.27) / 2])


# --- random models ---


def random_model(seed: int, vocab: int, spread: float = 1.5) -> Model:
    """Depends on the last token and on how many there are; 0 to begin with."""
    logits = np.random.default_rng(seed).normal(0, spread, (20, vocab, vocab))
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return lambda tokens: table[len(tokens), tokens[-1] if tokens else 0]


def likeliest(logprobs: np.ndarray, count: int) -> list[tuple[int, float]]:
    order = np.argsort(-logprobs, kind="stable")[:count]
    return list(zip(order.tolist(), logprobs[order].tolist(), strict=True))


def drive(search: BeamSearch, model: Model, count: int | None = None) -> list[Hypothesis]:
    """Search to the end with `count` candidates a beam (None: as many as it asks for)."""
    return drive_counting(search, model, count)[0]


def drive_counting(
    search: BeamSearch, model: Model, count: int | None = None
) -> tuple[list[Hypothesis], int]:
    """As `drive`; also the number of steps."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    num_steps = 0
    while not search.is_done:
        num_steps += 1
        rows = [likeliest(model(tokens), count or search.num_candidates) for tokens, _ in beams]
        live = search.advance(rows)
        for c in live:
            tokens, logprob = beams[c.parent]
            logprob += model(tokens)[c.token_id]
            assert c.cumulative_logprob == pytest.approx(logprob, rel=1e-12)
        logprobs = [c.cumulative_logprob for c in live]
        assert logprobs == sorted(logprobs, reverse=True)
        beams = [((*beams[c.parent][0], c.token_id), c.cumulative_logprob) for c in live]
    return search.best(), num_steps


def assert_same(found: Sequence[Hypothesis], want: Sequence[tuple[tuple[int, ...], float]]) -> None:
    assert [h.token_ids for h in found] == [tokens for tokens, _ in want]
    assert [h.score for h in found] == pytest.approx([score for _, score in want])


def every_sequence(
    model: Model, params: BeamSearchParams, stops: frozenset[int], vocab: int
) -> list[tuple[tuple[int, ...], float]]:
    """The best of all sequences that end, by trying them."""
    found = []
    lengths = range(1, params.max_tokens + 1)
    for tokens in itertools.chain(*(itertools.product(range(vocab), repeat=n) for n in lengths)):
        ends = tokens[-1] in stops or len(tokens) == params.max_tokens
        if ends and not stops.intersection(tokens[:-1]):
            logprob = sum(model(tokens[:i])[token_id] for i, token_id in enumerate(tokens))
            found.append((tokens, logprob / len(tokens) ** params.length_penalty))
    return sorted(found, key=lambda item: -item[1])[: params.beam_width]


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_wide_enough_and_never_cut_short_finds_the_best_of_all(seed, length_penalty):
    # All 2 * 3 continuations of the second step are among the best `beam_width`.
    model = random_model(seed, vocab=3)
    params = BeamSearchParams(6, 3, length_penalty, early_stopping="never")
    search = BeamSearch(params, frozenset({STOP}), 3)
    assert_same(drive(search, model), every_sequence(model, params, frozenset({STOP}), 3))


NEVER_CHOSEN = -1e9


def dense_search(
    model: Model, params: BeamSearchParams, stops: frozenset[int], vocab: int
) -> tuple[list[tuple[tuple[int, ...], float]], int]:
    """Transformers' algorithm in its own manner; also the number of steps.

    Whole rows of the vocabulary, a fixed number of beams and of hypotheses; what must not be chosen
    has `NEVER_CHOSEN` added to its score.
    """
    width, penalty, limit = params.beam_width, params.length_penalty, params.max_tokens
    tokens = [()] * width
    logprobs = np.array([0.0] + [NEVER_CHOSEN] * (width - 1))
    kept, scores, full = [()] * width, np.full(width, NEVER_CHOSEN), np.zeros(width, bool)
    for length in range(1, limit + 1):
        flat = np.concatenate([p + model(t) for p, t in zip(logprobs, tokens, strict=True)])
        chosen = np.argsort(-flat)[: max(2, 1 + len(stops)) * width]
        top = [(*tokens[i // vocab], int(i % vocab)) for i in chosen]
        hits = np.array([length == limit or t[-1] in stops for t in top])
        ended = hits & (np.arange(len(top)) < width)

        merged = np.append(scores, flat[chosen] / length**penalty + NEVER_CHOSEN * ~ended)
        best = np.argsort(-merged)[:width]
        kept, scores = [(kept + top)[i] for i in best], merged[best]
        full = np.append(full, ended)[best]

        running = flat[chosen] + NEVER_CHOSEN * hits
        going = np.argsort(-running)[:width]
        tokens, logprobs = [top[i] for i in going], running[going]
        far = limit if params.early_stopping == "never" and penalty > 0 else length
        worst = np.where(full, scores.min(), NEVER_CHOSEN)
        hopeless = not (logprobs[0] / far**penalty > worst).any()
        if hopeless or (full.all() and params.early_stopping is True):
            break
    return list(zip(kept, scores.tolist(), strict=True)), length


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
def test_random_models_give_what_the_dense_algorithm_gives(length_penalty, early_stopping):
    cut_short = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        width, vocab = int(rng.integers(1, 6)), int(rng.integers(25, 40))
        stops = frozenset(rng.choice(vocab, rng.integers(0, 5), replace=False).tolist())
        params = BeamSearchParams(width, int(rng.integers(1, 15)), length_penalty, early_stopping)
        model = random_model(seed, vocab, spread=3)
        want, num_steps = dense_search(model, params, stops, vocab)
        for count in (None, MAX_LOGPROBS):  # more candidates than asked for change nothing
            search = BeamSearch(params, stops, params.max_tokens)
            found, own_steps = drive_counting(search, model, count)
            assert_same(found, want)
            assert own_steps == num_steps
        cut_short += num_steps < params.max_tokens
    assert cut_short or early_stopping == "never"


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_one_beam_is_greedy(early_stopping, length_penalty):
    for seed in range(20):
        model, greedy = random_model(seed, 12), []
        while len(greedy) < 9 and STOP not in greedy:
            greedy.append(int(model(tuple(greedy)).argmax()))
        params = BeamSearchParams(1, 9, length_penalty, early_stopping)
        (found,) = drive(BeamSearch(params, frozenset({STOP}), 9), model)
        assert found.token_ids == tuple(greedy)


# --- what else is promised ---


def test_as_many_come_back_as_asked_for() -> None:
    model = random_model(0, 30)
    best = drive(BeamSearch(BeamSearchParams(4), frozenset(), 5), model)
    assert len(best) == 4
    for count in (1, 3):
        params = BeamSearchParams(4, num_return_sequences=count)
        assert drive(BeamSearch(params, frozenset(), 5), model) == best[:count]


def test_the_callers_limit_of_tokens_counts_not_that_of_the_params() -> None:
    found = drive(BeamSearch(BeamSearchParams(2, max_tokens=9), frozenset(), 4), random_model(0, 9))
    assert [len(h.token_ids) for h in found] == [4, 4]


def test_a_vocabulary_smaller_than_the_beam_leaves_fewer_beams() -> None:
    found = drive(BeamSearch(BeamSearchParams(8), frozenset(), 2), random_model(0, 2))
    assert {h.token_ids for h in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_beam_whose_every_token_ends_it_ends_the_search() -> None:
    search = BeamSearch(BeamSearchParams(3), frozenset({0, 1}), 5)
    assert {h.token_ids for h in drive(search, random_model(0, 2))} == {(0,), (1,)}
    assert search.is_done


def test_candidates_for_another_number_of_beams_are_refused() -> None:
    search = BeamSearch(BeamSearchParams(2), frozenset(), 5)
    with pytest.raises(ValueError, match="candidates of 2 beams; 1 live"):
        search.advance([[(1, -1.0)], [(2, -1.0)]])
    drive(search, random_model(0, 9))
    with pytest.raises(ValueError, match="candidates of 1 beams; 0 live"):
        search.advance([[(1, -1.0)]])


def test_more_stop_tokens_than_there_are_candidates_for_are_refused() -> None:
    params = BeamSearchParams(MAX_BEAM_WIDTH)
    assert BeamSearch(params, frozenset(range(10)), 5).num_candidates == MAX_LOGPROBS
    with pytest.raises(InvalidRequestError, match=r"beam_width is 10 with 11 .* at most 20"):
        BeamSearch(params, frozenset(range(11)), 5)


def test_extremes_of_the_penalty_stay_finite() -> None:
    for penalty in (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY):
        params = BeamSearchParams(2, 10**9, penalty, early_stopping="never")
        search = BeamSearch(params, frozenset({STOP}), 10**9)
        search.advance([[(STOP, -0.5), (1, -1.0), (2, -2.0)]])
        search.advance([[(STOP, -0.5), (1, -1.0), (2, -2.0)]] * 2)
        assert all(math.isfinite(h.score) for h in search.best())


# --- what Transformers finds ---

TESTS = Path(__file__).parents[1]
CASES = json.loads((TESTS / "data" / "beam_search.json").read_text("utf-8"))["cases"]
MODELS = sorted({case["model"] for case in CASES})
LONGEST = max(len(case["prompt_ids"]) + case["max_tokens"] for case in CASES)
TOLERANCE = 1e-3  # of scores


def params_of(case: dict[str, Any]) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=case["beam_width"],
        max_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        stop_token_ids=tuple(case["stop_token_ids"]),
    )


def checkpoint_model(name: str) -> Callable[[tuple[int, ...]], np.ndarray]:
    """f64[vocab] log-probabilities behind the given tokens, the prompt's and the generated."""
    config, params = load_hf(TESTS / "goldens" / name, dtype="float32")

    @functools.cache
    def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros(LONGEST, np.int32)  # always the same length: compiled once
        padded[: len(tokens)] = tokens
        logits = prompt_logits(config, params, padded)[len(tokens) - 1].astype(np.float64)
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    return logprobs


@pytest.mark.parametrize("name", MODELS)
def test_hypotheses_and_scores_match_transformers(name: str) -> None:
    logprobs = checkpoint_model(name)
    for case in (case for case in CASES if case["model"] == name):
        params, prompt = params_of(case), tuple(case["prompt_ids"])
        search = BeamSearch(params, frozenset(params.stop_token_ids), params.max_tokens)
        found = drive(search, lambda tokens, prompt=prompt: logprobs(prompt + tokens), MAX_LOGPROBS)
        assert [list(h.token_ids) for h in found] == case["token_ids"], case
        assert [h.score for h in found] == pytest.approx(case["scores"], abs=TOLERANCE), case


def test_the_recorded_cases_cover_the_rules() -> None:
    assert {case["early_stopping"] for case in CASES} == {False, True, "never"}
    assert {math.copysign(1, case["length_penalty"]) for case in CASES} == {-1, 1}
    ends = {
        (row[-1] in case["stop_token_ids"], len(row) == case["max_tokens"])
        for case in CASES
        for row in case["token_ids"]
    }
    assert ends >= {(True, False), (False, True)}
    by_rule: dict[str, dict[Any, list]] = {}
    for case in CASES:
        params = dataclasses.replace(params_of(case), early_stopping=False)
        by_rule.setdefault(f"{case['model']} {case['prompt_ids']} {params}", {})[
            case["early_stopping"]
        ] = case["token_ids"]
    differ = [found for found in by_rule.values() if found[False] != found["never"]]
    assert differ
    assert [found for found in by_rule.values() if found[False] != found[True]]


# --- through the engine: needs `LLM.beam_search` ---


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_finds_what_transformers_finds(name: str) -> None:
    config, params = load_hf(TESTS / "goldens" / name, dtype="float32")
    settings = EngineConfig(
        dtype="float32", block_size=4, max_model_len=64, max_num_seqs=16, max_num_batched_tokens=32
    )
    llm = LLM(in_one_shape(LLMEngine(config, params, None, settings)))
    pool = llm.engine.scheduler.pool
    own = [case for case in CASES if case["model"] == name]
    for beam_params, group in itertools.groupby(own, key=params_of):
        cases = list(group)
        outputs = llm.beam_search([case["prompt_ids"] for case in cases], beam_params)
        for output, case in zip(outputs, cases, strict=True):
            assert list(output.prompt_token_ids) == case["prompt_ids"]
            assert [list(c.token_ids) for c in output.outputs] == case["token_ids"], case
            for completion, score in zip(output.outputs, case["scores"], strict=True):
                assert_completion(completion, score, beam_params)
        pool.check()
        assert pool.num_free == pool.num_usable


def assert_completion(completion: Any, score: float, params: BeamSearchParams) -> None:
    length, last = len(completion.token_ids), completion.token_ids[-1]
    stopped = last in params.stop_token_ids
    assert completion.score == pytest.approx(score, abs=TOLERANCE)
    assert completion.cumulative_logprob == pytest.approx(
        score * length**params.length_penalty, abs=TOLERANCE * length**2
    )
    assert completion.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert completion.stop_reason == (last if stopped else None)
