"""What sequences share, how long it stays, and what comes back: the exact numbers of examples."""

from collections.abc import Iterator

import numpy as np
import pytest

from pagedjax.beam_search import BeamSearchParams
from pagedjax.engine import LLMEngine
from pagedjax.llm import LLM
from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestOutput
from pagedjax.plan import StepPlan
from pagedjax.request import FinishReason, derived_seed
from pagedjax.sampling_params import SamplingParams
from tests.engine.fresh import (
    MAX_NUM_SEQS,
    assert_greedy,
    assert_idle,
    fresh_engine,
    greedy,
    seeded,
    step_until_done,
    watch_plans,
)
from tests.engine.tiny import SLIDING, UNIFORM, generate, oracle_logprobs, random_prompts

MODELS = pytest.mark.parametrize("model", [UNIFORM, SLIDING], ids=["uniform", "sliding"])


def used(engine: LLMEngine) -> int:
    pool = engine.scheduler.pool
    return pool.num_usable - pool.num_free


def cached_tokens(engine: LLMEngine, prompt: list[int], **options: object) -> int:
    """Of a prompt, how many are found by a request that wants one more token."""
    request_id = engine.add_request(prompt, greedy(1), options=RequestOptions(**options))  # type: ignore[arg-type]
    return step_until_done(engine)[request_id].metrics.cached_tokens


def computed_tokens(engine: LLMEngine) -> list[int]:
    """Filled, from now on, with the number of tokens that every step computes."""
    counts: list[int] = []
    watch_plans(engine, lambda plan: counts.append(sum(c.num_tokens for c in plan.chunks)))
    return counts


# --- n samples ---


@MODELS
@pytest.mark.parametrize("prompt_len", [12, 13, 15])
@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_of_n_samples_is_stored_and_computed_once(
    model: DecoderConfig, prompt_len: int, caching: bool
) -> None:
    (prompt,) = random_prompts(1, [prompt_len])
    single = fresh_engine(model)
    single.add_request(prompt, seeded(1))
    single.step()
    engine = fresh_engine(model, enable_prefix_caching=caching)
    computed = computed_tokens(engine)
    request_id = engine.add_request(prompt, seeded(1, max_tokens=6, n=8))
    engine.step()
    assert used(engine) == used(single)
    assert model is SLIDING or used(engine) == -(-prompt_len // 4)
    finished = step_until_done(engine)
    assert computed == [prompt_len, *[8] * 5]
    # All but the last owner of a partial block copy it.
    groups = engine.limits.num_groups
    assert engine.scheduler.blocks.stats.copied == (0 if prompt_len % 4 == 0 else 7 * groups)
    assert len({c.token_ids for c in finished[request_id].outputs}) == 8
    assert_idle(engine)


@MODELS
def test_every_sample_is_the_single_request_with_its_derived_seed(model: DecoderConfig) -> None:
    (prompt,) = random_prompts(2, [14])
    engine = fresh_engine(model)
    (output,) = generate(engine, [prompt], seeded(7, n=8, logprobs=3))
    assert [completion.index for completion in output.outputs] == list(range(8))
    seeds = [7, *(derived_seed(7, index) for index in range(1, 8))]
    singles = generate(fresh_engine(model), [prompt] * 8, [seeded(s, logprobs=3) for s in seeds])
    for sample, single in zip(output.outputs, singles, strict=True):
        (expected,) = single.outputs
        assert sample.token_ids == expected.token_ids
        for got, want in zip(sample.logprobs or (), expected.logprobs or (), strict=True):
            assert got.sampled == pytest.approx(want.sampled, abs=1e-5)


def test_best_of_returns_the_likeliest_by_the_mean_of_their_tokens() -> None:
    (prompt,) = random_prompts(3, [9])
    stop = tuple(range(0, 97, 4))  # of different lengths, so that the mean is not the sum
    sampled = SamplingParams(seed=4, n=8, max_tokens=9, stop_token_ids=stop)
    (everything,) = generate(fresh_engine(), [prompt], sampled)

    def mean(token_ids: tuple[int, ...]) -> float:
        rows = oracle_logprobs(UNIFORM, [*prompt, *token_ids])[len(prompt) - 1 : -1]
        return float(np.mean([row[token] for row, token in zip(rows, token_ids, strict=True)]))

    assert len({len(c.token_ids) for c in everything.outputs}) > 2
    ranked = sorted(everything.outputs, key=lambda c: -mean(c.token_ids))
    by_sum = sorted(everything.outputs, key=lambda c: -mean(c.token_ids) * len(c.token_ids))
    assert ranked[:3] != by_sum[:3]
    best = SamplingParams(seed=4, n=3, best_of=8, max_tokens=9, stop_token_ids=stop)
    engine = fresh_engine()
    request_id = engine.add_request(prompt, best)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    *unfinished, final = outputs
    assert all(output.request_id == request_id for output in outputs)
    assert all(not output.outputs for output in unfinished), "it is not known yet which"
    for completion, expected in zip(final.outputs, ranked[:3], strict=True):
        assert (completion.index, completion.token_ids) == (expected.index, expected.token_ids)
        assert completion.cumulative_logprob == pytest.approx(
            mean(completion.token_ids) * len(completion.token_ids), abs=1e-3
        )


def test_of_the_best_an_aborted_sample_is_the_last() -> None:
    (prompt,) = random_prompts(4, [9])
    for steps in (0, 3):  # before and behind the prompt
        engine = fresh_engine()
        request_id = engine.add_request(prompt, seeded(5, n=3, best_of=4))
        for _ in range(steps):
            engine.step()
        for sample in (1, 3):
            engine.abort(request_id, sample)
        first, second, third = step_until_done(engine)[request_id].outputs
        assert {first.index, second.index} == {0, 2}
        assert third.finish_reason is FinishReason.ABORT


def test_beams_cannot_be_aborted_one_by_one() -> None:
    engine = fresh_engine()
    request_id = engine.add_beam_search([1, 2, 3], BeamSearchParams(3, max_tokens=5))
    engine.step()
    assert engine.abort(request_id, 0) is None
    assert len(step_until_done(engine)[request_id].outputs) == 3
    assert_idle(engine)


# --- prefixes ---


@MODELS
def test_the_next_turn_of_a_chat_hits_what_was_generated(model: DecoderConfig) -> None:
    engine = fresh_engine(model)
    turns = random_prompts(5, [10, 6, 7])
    history: list[int] = []
    stored = 0
    for turn in turns:
        history += turn
        (output,) = generate(engine, [history], greedy(7))
        assert output.metrics.cached_tokens == stored // 4 * 4
        assert_greedy(model, history, output.outputs[0], 7)
        history += output.outputs[0].token_ids
        stored = len(history) - 1  # the last token was never an input
    assert stored // 4 * 4 == 40


def test_of_a_finished_request_the_tail_is_evicted_first() -> None:
    engine = fresh_engine(usable_blocks=8)
    first, second = random_prompts(6, [17, 17])
    assert cached_tokens(engine, first) == 0
    assert cached_tokens(engine, first) == 16, "blocks stay when their request is done"
    # 4 of the 8 blocks hold the first prompt; the second needs 5 in all.
    assert cached_tokens(engine, second) == 0
    assert cached_tokens(engine, first) == 12


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    engine = fresh_engine(usable_blocks=13)
    old, older, new = random_prompts(7, [17, 17, 25])
    for prompt in (old, older, old):
        cached_tokens(engine, prompt)
    # 5 blocks are blank, and of the 8 with prefixes the 2 least useful go.
    assert cached_tokens(engine, new) == 0
    assert cached_tokens(engine, old) == 16
    assert cached_tokens(engine, older) == 8


@MODELS
def test_a_reset_of_the_prefix_cache_forgets_and_disturbs_nobody(model: DecoderConfig) -> None:
    engine = fresh_engine(model, host_blocks=99, host_cache_bytes=1)
    prompt, other = random_prompts(8, [18, 11])
    assert [cached_tokens(engine, prompt) for _ in range(2)] == [0, 16]
    engine.reset_prefix_cache()
    assert cached_tokens(engine, prompt) == 0
    ids = [engine.add_request(prompt, greedy(9)), engine.add_request(other, seeded(1, n=3))]
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    finished = step_until_done(engine)
    assert_greedy(model, prompt, finished[ids[0]].outputs[0], 9)
    expected = generate(fresh_engine(model), [other], seeded(1, n=3))[0].outputs
    assert [c.token_ids for c in finished[ids[1]].outputs] == [c.token_ids for c in expected]
    assert_idle(engine)


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = fresh_engine(enable_prefix_caching=False)
    (prompt,) = random_prompts(9, [18])
    assert [cached_tokens(engine, prompt) for _ in range(2)] == [0, 0]
    stats = engine.scheduler.blocks.stats
    assert (stats.prefix_queries, stats.prefix_hits) == (36, 0)


def test_hits_are_counted_in_tokens() -> None:
    engine = fresh_engine()
    (prompt,) = random_prompts(10, [18])
    assert [cached_tokens(engine, [*prompt[:cut], 1]) for cut in (18, 17, 7)] == [0, 16, 4]
    stats = engine.scheduler.blocks.stats
    assert (stats.prefix_queries, stats.prefix_hits, stats.host_hits) == (19 + 18 + 8, 20, 0)


# --- sliding windows ---


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_hit_needs_only_the_blocks_in_the_window(block_size: int) -> None:
    engine = fresh_engine(SLIDING, block_size)
    (prompt,) = random_prompts(11, [30])
    generate(engine, [prompt], greedy(8))
    for cut in (30, 29, 22, 13, 3):
        (output,) = generate(engine, [prompt[:cut]], greedy(8))
        assert output.metrics.cached_tokens == (cut - 1) // block_size * block_size
        assert_greedy(SLIDING, prompt[:cut], output.outputs[0], 8)


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_prefix_ends_where_a_group_lacks_a_block_of_its_window(block_size: int) -> None:
    # A pool so small that the window group's blocks, given back first, are overwritten.
    blocks = {1: 80, 4: 22}[block_size]
    engine = fresh_engine(SLIDING, block_size, usable_blocks=blocks)
    (prompt,) = random_prompts(12, [36])
    hits = []
    for cut in (36, 24, 36, 12, 30, 36, 18, 36):
        (output,) = generate(engine, [prompt[:cut]], greedy(6))
        hits.append(output.metrics.cached_tokens)
        assert_greedy(SLIDING, prompt[:cut], output.outputs[0], 6)
    assert len(set(hits)) > 3


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_window_holds_few_blocks_however_long_the_generation(block_size: int) -> None:
    engine = fresh_engine(SLIDING, block_size)
    group = engine.limits.windows.index(5)
    full = engine.limits.windows.index(NO_WINDOW)
    held = []

    def watch(plan: StepPlan) -> None:
        ((seq, *_),) = plan.chunks
        held.append(np.count_nonzero(seq.tables, axis=1))
        assert used(engine) == np.count_nonzero(seq.tables)

    watch_plans(engine, watch)
    engine.add_request([1, 2, 3], greedy(45))
    step_until_done(engine)
    most = np.max(held, axis=0)
    # The five tokens of a window touch at most two blocks of four.
    assert most[group] == {1: 5, 4: 2}[block_size]
    assert most[full] == -(-47 // block_size)


# --- the host ---


@MODELS
def test_an_evicted_prefix_comes_back_from_the_host(model: DecoderConfig) -> None:
    engine = fresh_engine(model, usable_blocks=20, host_blocks=99, host_cache_bytes=1)
    stats = engine.scheduler.blocks.stats
    prompt, *others = random_prompts(13, [26, 40, 40])
    for other in (prompt, *others):
        generate(engine, [other], greedy(4))
    assert stats.offloaded > 0
    (output,) = generate(engine, [prompt], greedy(8))
    assert output.metrics.cached_tokens == stats.host_hits == 24
    assert_greedy(model, prompt, output.outputs[0], 8)
    assert_idle(engine)


def test_without_a_host_tier_an_evicted_prefix_is_gone() -> None:
    engine = fresh_engine(usable_blocks=20, host_blocks=99)
    prompt, *others = random_prompts(13, [26, 40, 40])
    for other in (prompt, *others):
        generate(engine, [other], greedy(4))
    assert cached_tokens(engine, prompt) == 0
    assert engine.scheduler.blocks.stats.offloaded == 0


def test_a_host_block_gets_only_the_last_of_what_is_evicted_to_it_in_a_step() -> None:
    engine = fresh_engine(usable_blocks=10, host_blocks=2, host_cache_bytes=1)
    outs: list[list[int]] = []
    watch_plans(engine, lambda plan: outs.append([host for _, host in plan.transfers.swap_outs]))
    prompts = random_prompts(20, [15, 16, 16])
    for prompt in prompts:
        (output,) = generate(engine, [prompt], greedy(9))
        assert_greedy(UNIFORM, prompt, output.outputs[0], 9)
    assert engine.scheduler.blocks.stats.offloaded > sum(map(len, outs))
    assert all(len(set(hosts)) == len(hosts) for hosts in outs)
    assert any(len(hosts) == 2 for hosts in outs)


def preempted(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """The output of a request that has to give way after four steps."""
    request_id = engine.add_request(prompt, params, options=RequestOptions(priority=1))

    def before(step: int) -> None:
        if step == 4:
            engine.add_request([1, 2, 3], greedy(2))

    return step_until_done(engine, before=before)[request_id]


@MODELS
def test_swapped_blocks_are_those_of_all_samples_once(model: DecoderConfig) -> None:
    (prompt,) = random_prompts(14, [14])
    engine = fresh_engine(
        model, host_blocks=99, max_num_seqs=3, preemption_mode="swap", enable_prefix_caching=False
    )
    params = seeded(6, n=3)
    output = preempted(engine, prompt, params)
    assert output.completions == generate(fresh_engine(model), [prompt], params)[0].completions
    assert output.metrics.preemptions == engine.scheduler.num_swaps == 1
    # Each has 14 + 3 tokens: 3 whole blocks of the prompt, which all share, another one, and a
    # partial one. Of the window only the last two are there. The pool still has the whole ones.
    stats = engine.scheduler.blocks.stats
    expected = (3 + 3 * 2 + 3 * 2, 3 + 3) if model is SLIDING else (3 + 3 * 2, 3)
    assert (stats.swapped_out, stats.swapped_in) == expected
    assert_idle(engine)


@pytest.mark.parametrize(("use_prefix_cache", "swapped_in"), [(True, 1), (False, 5)])
def test_what_can_be_found_in_the_pool_is_not_brought_back(
    use_prefix_cache: bool, swapped_in: int
) -> None:
    (prompt,) = random_prompts(14, [14])
    engine = fresh_engine(
        host_blocks=99,
        max_num_seqs=1,
        preemption_mode="swap",
        enable_prefix_caching=use_prefix_cache,
    )
    output = preempted(engine, prompt, greedy(8))
    assert_greedy(UNIFORM, prompt, output.outputs[0], 8)
    stats = engine.scheduler.blocks.stats
    assert (stats.swapped_out, stats.swapped_in) == (5, swapped_in)


@pytest.mark.parametrize(("host_blocks", "swaps"), [(5, 1), (4, 0), (0, 0)])
def test_where_the_host_lacks_room_a_request_is_computed_again(
    host_blocks: int, swaps: int
) -> None:
    (prompt,) = random_prompts(15, [14])
    engine = fresh_engine(host_blocks=host_blocks, max_num_seqs=1, preemption_mode="swap")
    output = preempted(engine, prompt, greedy(8))
    assert_greedy(UNIFORM, prompt, output.outputs[0], 8)
    scheduler = engine.scheduler
    assert (scheduler.num_swaps, scheduler.num_recomputes) == (swaps, 1 - swaps)
    assert_idle(engine)


# --- LLM ---


def test_llm_generate_with_samples_and_options() -> None:
    engine = fresh_engine()
    llm = LLM(engine)
    prompts = random_prompts(16, [9, 13])
    params = [seeded(1, n=3), seeded(2, n=2)]
    shared, salted, private = (
        llm.generate(prompts, params, options)
        for options in (
            None,
            RequestOptions(cache_salt="s"),
            RequestOptions(use_prefix_cache=False),
        )
    )
    again = llm.generate(prompts, params, RequestOptions(cache_salt="s"))
    for outputs in (shared, salted, private, again):
        for output, own, expected in zip(outputs, params, shared, strict=True):
            assert len(output.outputs) == own.n
            assert output.completions == expected.completions
    for outputs, hits in ((shared, [0, 0]), (salted, [0, 0]), (private, [0, 0]), (again, [8, 12])):
        assert [output.metrics.cached_tokens for output in outputs] == hits
    assert_idle(engine)


# --- aborts ---


@MODELS
def test_a_thousand_aborts_at_random_leave_every_block_and_slot_free(model: DecoderConfig) -> None:
    rng = np.random.default_rng(17)
    usable = 28 if model is SLIDING else 24
    engine = fresh_engine(model, usable_blocks=usable, host_blocks=20, host_cache_bytes=1)
    requests = random_requests(rng)
    alive: list[str] = []
    aborts = 0
    while aborts < 1000:
        engine.preemption.mode = "swap" if rng.random() < 0.5 else "recompute"
        for _ in range(rng.integers(0, 4)):
            prompt, params, options = next(requests)
            if isinstance(params, BeamSearchParams):
                alive.append(engine.add_beam_search(prompt, params, options=options))
            else:
                alive.append(engine.add_request(prompt, params, options=options))
        for _ in range(rng.integers(0, 3)):
            engine.step()
        alive = [request_id for request_id in alive if engine.is_unfinished(request_id)]
        for request_id in rng.permutation(alive)[: rng.integers(0, 4)]:
            sample = None if rng.random() < 0.5 else int(rng.integers(0, 3))
            aborts += engine.abort(str(request_id), sample) is not None
            engine.scheduler.check()
    scheduler = engine.scheduler
    assert min(scheduler.num_swaps, scheduler.num_recomputes) > 5
    for request_id in alive:
        engine.abort(request_id)
    assert_idle(engine)
    (prompt,) = random_prompts(18, [20])
    for output in generate(engine, [prompt] * MAX_NUM_SEQS, greedy(4)):
        assert_greedy(model, prompt, output.outputs[0], 4)


def random_requests(
    rng: np.random.Generator,
) -> Iterator[tuple[list[int], SamplingParams | BeamSearchParams, RequestOptions]]:
    (base,) = random_prompts(19, [20])
    while True:
        prompt = [*base[: rng.integers(0, 20)], *rng.integers(0, 97, rng.integers(1, 4)).tolist()]
        max_tokens, width = int(rng.integers(4, 16)), int(rng.integers(1, 4))
        options = RequestOptions(priority=int(rng.integers(0, 3)))
        if rng.random() < 0.25:
            yield prompt, BeamSearchParams(width, max_tokens), options
        else:
            yield prompt, seeded(int(rng.integers(0, 99)), max_tokens, n=width), options
