"""Bugs that real engines shipped: one or more tests each, by the numbers of the design's list."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pagedjax.beam_search import BeamSearch, BeamSearchParams
from pagedjax.block_hash import block_hash, root_hash
from pagedjax.block_pool import BlockPool
from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError
from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.decoder import random_params
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestOutput
from pagedjax.plan import StepPlan
from pagedjax.request import FinishReason, Request, Sequence, derived_seed
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.scheduler_config import SchedulerConfig
from tests.engine.fresh import (
    assert_greedy,
    assert_idle,
    assert_prompt_logprobs,
    fresh_engine,
    greedy,
    poison,
    seeded,
    step_until_done,
    watch_plans,
)
from tests.engine.tiny import SLIDING, UNIFORM, generate, random_prompts, tiny_params

MODELS = pytest.mark.parametrize("model", [UNIFORM, SLIDING], ids=["uniform", "sliding"])
MODES = pytest.mark.parametrize("mode", ["swap", "recompute"])
GIVES_WAY = RequestOptions(priority=1)


def one(engine: LLMEngine, prompt: list[int], params: SamplingParams, **options: Any) -> Any:
    """The finished output of a single request."""
    request_id = engine.add_request(prompt, params, options=RequestOptions(**options))
    return step_until_done(engine)[request_id]


def rivals(engine: LLMEngine, steps: Iterable[int], **fields: Any) -> Callable[[int], None]:
    """Before each of `steps`, a short request comes that goes before those that give way."""

    def before(step: int) -> None:
        if step in steps:
            engine.add_request([step, step + 1], greedy(**{"max_tokens": 2, **fields}))

    return before


def tokens_of(output: RequestOutput) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in output.outputs]


def alone(model: DecoderConfig, prompt: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    """What a request gives with an engine for itself."""
    return tokens_of(one(fresh_engine(model), prompt, params))


# --- 1: two same-prefix requests in one step read unwritten blocks ---


def refuse_reads_across_sequences(engine: LLMEngine) -> None:
    """No sequence may read a block that another one writes in the same step."""

    def watch(plan: StepPlan) -> None:
        size, writer = engine.config.block_size, {}
        for seq, start, num_tokens, _ in plan.chunks:
            for block in seq.tables[:, start // size : -(-(start + num_tokens) // size)].flat:
                assert writer.setdefault(int(block), seq) is seq
        for chunk in plan.chunks:
            for block in chunk.sequence.tables.flat:
                assert writer.get(int(block), chunk.sequence) is chunk.sequence

    watch_plans(engine, watch)


@MODELS
def test_trap_1_two_same_prefix_requests_in_one_step(model: DecoderConfig) -> None:
    engine, computed = fresh_engine(model), []
    refuse_reads_across_sequences(engine)
    watch_plans(engine, lambda plan: computed.extend(chunk.num_tokens for chunk in plan.chunks))
    (common,) = random_prompts(1, [21])
    prompts = [[*common, i, i, i] for i in range(3)]
    outputs = generate(engine, prompts, greedy(6))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(model, prompt, output.outputs[0], 6)
    # They wait for the five whole blocks of the first instead of computing them as well.
    assert [output.metrics.cached_tokens for output in outputs] == [0, 20, 20]
    assert sum(computed) == (24 + 4 + 4) + 3 * 5
    assert_idle(engine)


@MODELS
def test_trap_1_samples_that_compute_their_prompt_again_together(model: DecoderConfig) -> None:
    (prompt,) = random_prompts(2, [9])
    engine = fresh_engine(model, max_num_seqs=3, preemption_mode="recompute")
    refuse_reads_across_sequences(engine)
    params = seeded(3, n=3)
    request_id = engine.add_request(prompt, params, options=GIVES_WAY)
    disturb = rivals(engine, {3, 6})

    def before(step: int) -> None:
        engine.reset_prefix_cache()  # nothing of theirs is left
        disturb(step)

    finished = step_until_done(engine, before=before)
    assert finished[request_id].metrics.preemptions == 2
    assert tokens_of(finished[request_id]) == alone(model, prompt, params)
    assert_idle(engine)


# --- 2: a fully cached prompt, its length an exact multiple of the block size ---


@MODELS
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_trap_2_a_fully_cached_prompt_of_whole_blocks(
    model: DecoderConfig, block_size: int
) -> None:
    engine = fresh_engine(model, block_size)
    for prompt in random_prompts(4, [16, 32]):
        first, *again = generate(engine, [prompt], greedy(5))
        again += generate(engine, [prompt] * 2, greedy(5))
        assert first.metrics.cached_tokens == 0
        for output in (first, *again):
            assert_greedy(model, prompt, output.outputs[0], 5)
        cached = {output.metrics.cached_tokens for output in again}
        assert cached == {len(prompt) - block_size}, "the last token is computed in any case"
    assert_idle(engine)


# --- 3: `prompt_logprobs` with a cached prefix or chunks ---


@MODELS
@pytest.mark.parametrize("block_size", [1, 4])
def test_trap_3_prompt_logprobs_of_a_cached_prompt(model: DecoderConfig, block_size: int) -> None:
    engine = fresh_engine(model, block_size)
    (prompt,) = random_prompts(5, [23])
    one(engine, prompt, greedy(3))
    asked = one(engine, prompt, greedy(3, prompt_logprobs=2))
    assert_prompt_logprobs(model, asked, 2)
    assert asked.metrics.cached_tokens == 0
    assert one(engine, prompt, greedy(3)).metrics.cached_tokens == 22 // block_size * block_size
    assert_greedy(model, prompt, asked.outputs[0], 3)


@MODELS
@MODES
def test_trap_3_prompt_logprobs_in_chunks_of_samples_that_are_preempted(
    model: DecoderConfig, mode: str
) -> None:
    (prompt,) = random_prompts(6, [30])
    params = seeded(7, n=3, prompt_logprobs=3)
    engine = fresh_engine(
        model, host_blocks=99, max_num_seqs=3, max_num_batched_tokens=7, preemption_mode=mode
    )
    request_id = engine.add_request(prompt, params, options=GIVES_WAY)
    # In the middle of the prompt, twice, and behind it.
    finished = step_until_done(engine, before=rivals(engine, {1, 4, 12}))
    output = finished[request_id]
    assert output.metrics.preemptions == 3
    assert_prompt_logprobs(model, output, 3)
    assert tokens_of(output) == alone(model, prompt, params)
    assert_idle(engine)


# --- 4: weights swapped, stale keys and values reused ---


def update(engine: LLMEngine, seed: int | None = None) -> None:
    """Go on with random weights, or with those of the oracle."""
    model = engine.model
    engine.update_params(tiny_params(model) if seed is None else random_params(model, "cpu", seed))


@MODELS
def test_trap_4_the_same_prompt_after_other_weights(model: DecoderConfig) -> None:
    engine = fresh_engine(model)
    (prompt,) = random_prompts(8, [22])
    update(engine, seed=1)
    old = one(engine, prompt, greedy(6))
    assert one(engine, prompt, greedy(6)).metrics.cached_tokens == 20
    update(engine)
    new = one(engine, prompt, greedy(6))
    assert new.metrics.cached_tokens == 0
    assert tokens_of(new) != tokens_of(old)
    assert_greedy(model, prompt, new.outputs[0], 6)
    assert one(engine, prompt, greedy(6)).metrics.cached_tokens == 20


@MODELS
@pytest.mark.parametrize("state", ["waiting", "in its prompt", "running", "swapped"])
def test_trap_4_nobody_hits_blocks_of_requests_that_live_through_an_update(
    model: DecoderConfig, state: str
) -> None:
    engine = fresh_engine(model, host_blocks=99, max_num_seqs=1, preemption_mode="swap")
    update(engine, seed=1)
    (prompt,) = random_prompts(9, [30])
    if state == "waiting":
        engine.add_request([1, 2], greedy(4))
    lives_on = engine.add_request(prompt, greedy(8), options=GIVES_WAY)
    for _ in range({"waiting": 2, "in its prompt": 1}.get(state, 4)):
        engine.step()
    if state == "swapped":
        engine.add_request([1, 2], greedy(4))
        engine.step()
        assert next(iter(engine.scheduler.waiting)).is_swapped
    added_before = engine.add_request(prompt, greedy(6), options=GIVES_WAY)  # and not yet begun
    update(engine)
    added_after = engine.add_request(prompt, greedy(6), options=GIVES_WAY)
    finished = step_until_done(engine)
    if state == "waiting":
        assert_greedy(model, prompt, finished[lives_on].outputs[0], 8)
    else:
        old = fresh_engine(model)
        update(old, seed=1)
        assert tokens_of(finished[lives_on]) == tokens_of(one(old, prompt, greedy(8)))
    for output in (finished[added_before], finished[added_after], one(engine, prompt, greedy(6))):
        assert_greedy(model, prompt, output.outputs[0], 6)
    assert_idle(engine)


@MODELS
def test_trap_4_no_prefix_of_old_weights_comes_back_from_the_host(model: DecoderConfig) -> None:
    engine = fresh_engine(model, usable_blocks=14, host_blocks=99, host_cache_bytes=1)
    stats = engine.scheduler.blocks.stats
    prompt, *others = random_prompts(10, [24, 30, 30])
    update(engine, seed=1)
    for fill in (prompt, *others, prompt):
        one(engine, fill, greedy(2))
    assert stats.host_hits > 0, "it does come back without an update"
    generate(engine, others, greedy(2))
    update(engine)
    before = stats.host_hits
    output = one(engine, prompt, greedy(6))
    assert (output.metrics.cached_tokens, stats.host_hits) == (0, before)
    assert_greedy(model, prompt, output.outputs[0], 6)


# --- 5: prefixes shared across tenants ---


def test_trap_5_tenants_with_different_salts_never_share() -> None:
    engine = fresh_engine()
    owners: dict[int, set[str]] = {}

    def watch(plan: StepPlan) -> None:
        owners.clear()
        for chunk in plan.chunks:
            for block in chunk.sequence.tables.flat:
                tenant = chunk.sequence.request.request_id[0]
                owners.setdefault(int(block), set()).add(tenant)
        assert all(len(tenants) == 1 for block, tenants in owners.items() if block)

    watch_plans(engine, watch)
    (prompt,) = random_prompts(11, [18])
    salts = {"n": None, "a": "a", "b": "b", "e": "", "l": "null"}
    for again in range(3):
        ids = [
            engine.add_request(
                prompt, greedy(3), f"{tenant}{again}", RequestOptions(cache_salt=salt)
            )
            for tenant, salt in salts.items()
        ]
        finished = step_until_done(engine)
        cached = {finished[request_id].metrics.cached_tokens for request_id in ids}
        assert cached == {16 if again else 0}
    for output in finished.values():
        assert_greedy(UNIFORM, prompt, output.outputs[0], 3)


def test_trap_5_a_request_without_the_prefix_cache_neither_reads_nor_fills_it() -> None:
    engine = fresh_engine()
    first, second = random_prompts(12, [18, 18])
    one(engine, first, greedy(3))
    cached = engine.scheduler.pool.num_cached
    assert one(engine, first, greedy(3), use_prefix_cache=False).metrics.cached_tokens == 0
    for params in (greedy(3), seeded(1, n=2)):
        one(engine, second, params, use_prefix_cache=False)
        assert one(engine, second, params, use_prefix_cache=False).metrics.cached_tokens == 0
    assert one(engine, first, greedy(3)).metrics.cached_tokens == 16
    assert one(engine, second, greedy(3)).metrics.cached_tokens == 0
    assert cached == 5


# --- 6: preempted in flight: tokens twice, lost, or another's ---


@MODELS
@MODES
@pytest.mark.parametrize("rival_tokens", [1, 3])
def test_trap_6_preempted_with_its_slot_taken_by_another(
    model: DecoderConfig, mode: str, rival_tokens: int
) -> None:
    engine = fresh_engine(model, host_blocks=99, max_num_seqs=1, preemption_mode=mode)
    (prompt,) = random_prompts(13, [10])
    request_id = engine.add_request(prompt, greedy(12), options=GIVES_WAY)
    before = rivals(engine, {2, 4, 12, 14}, max_tokens=rival_tokens)
    seen, step, preemptions = [], 0, 0
    while engine.has_unfinished_requests() or step < 15:
        before(step)
        step += 1
        for output in engine.step():
            completion = output.outputs[0]
            if output.request_id == request_id:
                seen.append(len(completion.token_ids))
                preemptions = output.metrics.preemptions
            prompt_of = list(output.prompt_token_ids)
            assert_greedy(model, prompt_of, completion, len(completion.token_ids))
    assert seen == list(range(1, 13)), "none twice, none lost"
    assert preemptions >= 2
    swaps, recomputes = engine.scheduler.num_swaps, engine.scheduler.num_recomputes
    assert (swaps, recomputes) == ((preemptions, 0) if mode == "swap" else (0, preemptions))
    assert_idle(engine)


def test_trap_6_a_request_is_not_swapped_out_before_its_blocks_are_back() -> None:
    # Two beams compute 6 tokens again, 4 of them common, at 3 tokens a step; the end of the second
    # beam's prefix is on the host. When the second begins, the other request has left one block.
    config = SchedulerConfig(3, 4, 64, 1, (NO_WINDOW,), offload_evicted=True)
    host = BlockPool(40)
    scheduler = Scheduler(config, BlockPool(12), host, lambda num_tokens, num_blocks: True)
    other = Request("other", (50,), greedy(5), arrival=0, seed=0)
    scheduler.add(other)

    def step() -> StepPlan:
        plan = scheduler.schedule()
        scheduler.update(plan)
        scheduler.collect(plan)
        if other.sequences[0] in plan.samplers:
            scheduler.append(other.sequences[0], 60)
        scheduler.check()
        return plan

    step()
    root = root_hash(0)
    search = BeamSearch(BeamSearchParams(2, 3), frozenset(), 3)
    beams = Request(
        "beams", (1, 2, 3, 4), greedy(3), 1, 0, 1, root=root, beam_search=search, width=2
    )
    beams.sequences[0].token_ids += [5, 6]
    beams.sequences.append(Sequence(beams, 1, [1, 2, 3, 4, 7, 8], 0, root))
    beams.num_sequences, beams.num_preemptions = 2, 1
    scheduler.add(beams)
    prefix = root
    for token in (1, 2, 3, 4, 7):
        prefix = block_hash(prefix, [token])
    (on_host,) = host.allocate(1)
    host.register(on_host, (0, prefix))
    host.free([on_host])
    for _ in range(5):
        transfers = step().transfers
        on_their_way = {block for _, block in transfers.swap_ins}
        assert on_their_way.isdisjoint(block for block, _ in transfers.swap_outs)
    assert scheduler.num_swaps == 1


# --- 7: fits `max_model_len` but not the pool ---


@pytest.mark.parametrize(
    ("fields", "need"),
    [({"max_tokens": 16}, 12), ({"max_tokens": 1000}, 12), ({"max_tokens": 6, "n": 4}, 16)],
)
def test_trap_7_a_request_that_the_pool_can_never_hold_is_refused_at_once(
    fields: dict[str, Any], need: int
) -> None:
    engine = fresh_engine(usable_blocks=11)
    prompts = random_prompts(14, [9, 33, 13])
    ids = [engine.add_request(prompts[0], greedy(7))]
    engine.step()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(prompts[1], seeded(1, **fields))
    for part in ("33 prompt tokens", f"need {need} blocks of 4 tokens", "the pool has 11"):
        assert part in str(caught.value)
    ids.append(engine.add_request(prompts[2], greedy(7)))
    finished = step_until_done(engine, most=30)
    assert list(finished) == ids
    for prompt, request_id in zip((prompts[0], prompts[2]), ids, strict=True):
        assert_greedy(UNIFORM, prompt, finished[request_id].outputs[0], 7)
    assert_idle(engine)


@MODELS
@MODES
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_trap_7_what_the_door_lets_in_comes_to_an_end_in_a_pool_of_just_its_size(
    model: DecoderConfig, mode: str, block_size: int, width: int
) -> None:
    sampled, beams = seeded(2, 13, n=width), BeamSearchParams(width, max_tokens=13)
    (prompt,) = random_prompts(15, [22])
    ample = fresh_engine(model, block_size)
    need = ample.scheduler.blocks.worst_case(22, 22 + 13 - 1, width)
    tight = fresh_engine(
        model, block_size, usable_blocks=need, host_blocks=99, preemption_mode=mode
    )
    found = []
    for engine in (ample, tight):
        ids = [engine.add_request(prompt, sampled), engine.add_beam_search(prompt, beams)]
        ids += [engine.add_request(short, greedy(9)) for short in random_prompts(16, [5, 6])]
        finished = step_until_done(engine)
        found.append([tokens_of(finished[request_id]) for request_id in ids])
        assert_idle(engine)
    assert found[0] == found[1]
    short_of_one = fresh_engine(model, block_size, usable_blocks=need - 1)
    for add, params in (
        (short_of_one.add_request, sampled),
        (short_of_one.add_beam_search, beams),
    ):
        with pytest.raises(InvalidRequestError, match=f"need {need} blocks.*has {need - 1}"):
            add(prompt, params)  # type: ignore[operator]
    assert_idle(short_of_one)


# --- 8: recycled blocks and neighbours of the null block hold NaN ---


@MODELS
@MODES
@pytest.mark.parametrize("block_size", [4, 16])
def test_trap_8_blocks_that_nobody_holds_may_hold_nan(
    model: DecoderConfig, mode: str, block_size: int
) -> None:
    engine = fresh_engine(model, block_size, host_blocks=99, max_num_seqs=3, preemption_mode=mode)
    prompts = random_prompts(17, [5, 17, 30, 16])
    ids = [engine.add_request(prompt, greedy(9), options=GIVES_WAY) for prompt in prompts]
    samples = engine.add_request(prompts[1], seeded(5, n=3), options=GIVES_WAY)
    disturb = rivals(engine, {4, 9})

    def before(step: int) -> None:
        poison(engine)
        disturb(step)

    finished = step_until_done(engine, before=before)
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_greedy(model, prompt, finished[request_id].outputs[0], 9)
    assert tokens_of(finished[samples]) == alone(model, prompts[1], seeded(5, n=3))
    assert any(output.metrics.preemptions for output in finished.values())


# --- 10: a seeded stream depends on batchmates or preemption ---


@MODELS
@pytest.mark.parametrize("n", [1, 3])
def test_trap_10_a_seeded_stream_is_its_own(model: DecoderConfig, n: int) -> None:
    prompt, *others = random_prompts(18, [17, 9, 20, 4])
    params = seeded(2**62 + 5, 10, n=n, top_p=0.95)
    streams = alone(model, prompt, params)
    assert len(set(streams)) == n
    for index, stream in enumerate(streams):
        seed = derived_seed(params.seed or 0, index) if index else params.seed or 0
        assert [stream] == alone(model, prompt, seeded(seed, 10, top_p=0.95))

    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):  # batchmates
        prompts = [[prompt, *others][i] for i in order]
        each = [params if i == 0 else seeded(i, 10) for i in order]
        outputs = generate(fresh_engine(model), prompts, each)
        assert tokens_of(outputs[order.index(0)]) == streams

    for mode in ("swap", "recompute"):
        engine = fresh_engine(model, host_blocks=99, max_num_seqs=n, preemption_mode=mode)
        request_id = engine.add_request(prompt, params, options=GIVES_WAY)
        finished = step_until_done(engine, before=rivals(engine, {1, 4, 9}))
        assert finished[request_id].metrics.preemptions == 3
        assert tokens_of(finished[request_id]) == streams

    engine = fresh_engine(model, max_num_batched_tokens=8)
    again = [one(engine, prompt, params) for _ in range(2)]  # prefix hits, and other chunks
    assert [output.metrics.cached_tokens for output in again] == [0, 16]
    assert [tokens_of(output) for output in again] == [streams, streams]


# --- 13: the abort of one of n samples leaks blocks ---


@pytest.mark.parametrize("sample", [0, 2, None])
@pytest.mark.parametrize("state", ["waiting", "prompt", "running", "swapped", "recomputing"])
@MODELS
def test_trap_13_an_abort_of_samples_returns_their_blocks(
    model: DecoderConfig, state: str, sample: int | None
) -> None:
    mode = "recompute" if state == "recomputing" else "swap"
    engine = fresh_engine(
        model, host_blocks=99, max_num_seqs=4, max_num_batched_tokens=8, preemption_mode=mode
    )
    prompt, other = random_prompts(19, [14, 6])
    params = seeded(3, 10, n=3)
    bystander = engine.add_request(other, greedy(15))
    request_id = engine.add_request(prompt, params, options=GIVES_WAY)
    for _ in range({"waiting": 0, "prompt": 2}.get(state, 6)):
        engine.step()
    if state in ("swapped", "recomputing"):
        engine.add_request([1, 2, 3], greedy(3))
        engine.step()
        assert [r.is_swapped for r in engine.scheduler.waiting] == [state == "swapped"]
    aborted = engine.abort(request_id, sample)
    engine.scheduler.check()
    assert aborted is not None
    assert aborted.finished == (sample is None) == (not engine.is_unfinished(request_id))
    assert engine.abort(request_id, sample) is None, "it is not known any more"
    finished = step_until_done(engine)
    assert_idle(engine)
    assert_greedy(model, other, finished[bystander].outputs[0], 15)
    expected = alone(model, prompt, params)
    for completion in finished.get(request_id, aborted).outputs:
        ended = sample in (None, completion.index)
        reason = FinishReason.ABORT if ended else FinishReason.LENGTH
        assert completion.finish_reason is reason
        stream = expected[completion.index]
        length = len(completion.token_ids) if ended else 10
        assert completion.token_ids == stream[:length]
        assert length < 10 or not ended


# --- 15: `max_model_len` reached mid-step ---


@MODELS
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_trap_15_max_model_len_reached_mid_step(model: DecoderConfig, block_size: int) -> None:
    engine = fresh_engine(model, block_size)
    prompts = random_prompts(20, [41, 44, 47, 47, 20])
    samples = engine.add_request(prompts[0], seeded(4, 1000, n=3))
    ids = [engine.add_request(prompt, greedy(1000)) for prompt in prompts[1:4]]
    bystander = engine.add_request(prompts[4], greedy(20))
    finished = step_until_done(engine)
    assert tokens_of(finished[samples]) == alone(model, prompts[0], seeded(4, 7, n=3))
    for prompt, request_id in zip(prompts[1:4], ids, strict=True):
        assert_greedy(model, prompt, finished[request_id].outputs[0], 48 - len(prompt))
    assert_greedy(model, prompts[4], finished[bystander].outputs[0], 20)
    reasons = {c.finish_reason for output in finished.values() for c in output.outputs}
    assert reasons == {FinishReason.LENGTH}
    assert_idle(engine)


@MODELS
@pytest.mark.parametrize("prompt_len", [43, 47])
def test_trap_15_beams_end_at_max_model_len(model: DecoderConfig, prompt_len: int) -> None:
    (prompt,) = random_prompts(21, [prompt_len])
    found = []
    for max_tokens in (48 - prompt_len, 1000):
        engine = fresh_engine(model)
        request_id = engine.add_beam_search(prompt, BeamSearchParams(3, max_tokens))
        found.append(step_until_done(engine)[request_id].outputs)
        assert_idle(engine)
    assert found[0] == found[1]
    assert {len(beam.token_ids) for beam in found[1]} == {48 - prompt_len}
