"""Tunix over our engine: the worker, and real GRPO steps with it and a `TunixDecoder`.

Skipped where Tunix is not installed, unless PAGEDJAX_REQUIRE_TUNIX is set.
"""

import functools
import importlib
import io
import os
import random
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

if "PAGEDJAX_REQUIRE_TUNIX" not in os.environ:
    pytest.importorskip("tunix")

import sentencepiece
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from pagedjax import functional
from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.integrations.tunix import PagedJaxRollout, TunixDecoder
from pagedjax.sampling_params import SamplingParams
from tests.engine.tiny import (
    UNIFORM,
    VOCAB,
    in_one_shape,
    tiny_params,
)

# What Tunix 0.1.7 does that jax and optax have deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`with mesh.` context manager:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:jax.interpreters.pxla.thread_resources:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),
]

PAD, EOS, BOS = 0, 1, 2
PROMPTS = ["abc de", "x", "to be or"]
WIDTH, NEW = 12, 6  # of prompts, of completions
SETTINGS = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=24, num_blocks=64)


@contextmanager
def relaxed_numerics() -> Iterator[None]:
    """Let Tunix mix dtypes and ranks, which the suite forbids; in all threads, as it has some."""
    names = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, ("standard", "allow"), strict=True):
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture(scope="module")
def tokenizer() -> sentencepiece.SentencePieceProcessor:
    """As many pieces as the tiny models know, learned from made-up words."""
    rng, model = random.Random(0), io.BytesIO()
    words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 5))) for _ in range(300))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words)]),
        model_writer=model,
        vocab_size=VOCAB,
        model_type="bpe",
        pad_id=PAD,
        eos_id=EOS,
        bos_id=BOS,
        unk_id=3,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def make_worker(tokenizer: Any, **options: Any) -> PagedJaxRollout:
    options = {"rollout_actor": TunixDecoder(UNIFORM, tiny_params(UNIFORM)), **options}
    worker = PagedJaxRollout(tokenizer=tokenizer, engine_config=SETTINGS, **options)
    in_one_shape(worker.llm.engine)
    return worker


@pytest.fixture(scope="module")
def worker(tokenizer: Any) -> PagedJaxRollout:
    return make_worker(tokenizer)


def config(**changes: Any) -> RolloutConfig:
    settings = {"temperature": 1.0, "seed": jax.random.key(4), "return_logprobs": True, **changes}
    return RolloutConfig(max_prompt_length=WIDTH, max_tokens_to_generate=NEW, **settings)


def padded(tokens: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.pad(row, (0, NEW - len(row)), constant_values=PAD) for row in tokens])


def assert_same_logps(found: Any, rows: list[np.ndarray]) -> None:
    """f32[B, NEW] against ragged rows."""
    for own, row in zip(np.asarray(found), rows, strict=True):
        np.testing.assert_allclose(own[: len(row)], row, atol=1e-5)


# --- the worker ---


def test_it_is_a_complete_worker(worker: PagedJaxRollout, tokenizer: Any) -> None:
    assert isinstance(worker, BaseRollout)
    assert (worker.pad_id(), worker.eos_id()) == (PAD, EOS)
    wrapped = TokenizerAdapter(tokenizer)  # as RLCluster passes it
    assert make_worker(wrapped).eos_id() == EOS


def test_generates_what_llm_generates(worker: PagedJaxRollout, tokenizer: Any) -> None:
    out = worker.generate(PROMPTS, config(top_k=40, top_p=0.95, temperature=0.8))
    words = np.asarray(functional.request_seeds(jax.random.key(4), jnp.arange(3)), object)
    params = [
        SamplingParams(
            max_tokens=NEW,
            temperature=0.8,
            top_k=40,
            top_p=0.95,
            stop_token_ids=(EOS,),
            seed=(low + (high << 32)) % 2**63,
            logprobs=0,
        )
        for low, high in words.tolist()
    ]
    prompts = [[BOS, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    for row, wanted in enumerate(worker.llm.generate(prompts, params)):
        (completion,) = wanted.outputs
        assert out.tokens[row].tolist() == list(completion.token_ids)
        assert out.text[row] == tokenizer.decode(list(completion.token_ids))
        logprobs = [token.processed for token in completion.logprobs or ()]
        np.testing.assert_array_equal(out.logprobs[row], np.float32(logprobs))
        left = [PAD] * (WIDTH - len(prompts[row])) + prompts[row]
        assert out.left_padded_prompt_tokens[row].tolist() == left
    assert out.logits == []
    assert all(row.dtype == np.int32 for row in (*out.tokens, out.left_padded_prompt_tokens))


def test_log_probabilities_are_those_of_the_score(worker: PagedJaxRollout) -> None:
    out = worker.generate(PROMPTS, config())
    ids = padded(out.tokens)
    assert PAD not in np.concatenate(out.tokens)  # which Tunix would take for padding
    found = worker.get_per_token_logps(out.left_padded_prompt_tokens, ids)
    assert found.shape == ids.shape
    assert_same_logps(found, out.logprobs)


def test_a_cut_distribution_has_its_own_log_probabilities(worker: PagedJaxRollout) -> None:
    greedy = worker.generate(PROMPTS, config(temperature=0.0))
    cut = worker.generate(PROMPTS, config(top_k=1))
    for one, other in zip(greedy.tokens, cut.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.concatenate(cut.logprobs).any()
    found = worker.get_per_token_logps(cut.left_padded_prompt_tokens, padded(cut.tokens))
    assert_same_logps(found, greedy.logprobs)


@pytest.mark.parametrize("keep_eos", [False, True])
def test_the_token_that_ends_a_completion(tokenizer: Any, keep_eos: bool) -> None:
    worker = make_worker(tokenizer, keep_eos=keep_eos)
    whole = worker.generate(PROMPTS[:1], config())
    end = int(whole.tokens[0][2])
    assert end not in whole.tokens[0][:2]
    out = worker.generate(PROMPTS[:1], config(eos_tokens=[EOS, end]))
    np.testing.assert_array_equal(out.tokens[0], whole.tokens[0][: 2 + keep_eos])
    np.testing.assert_array_equal(out.logprobs[0], whole.logprobs[0][: 2 + keep_eos])
    assert out.text == [tokenizer.decode(whole.tokens[0][:2].tolist())]


def test_seeds(worker: PagedJaxRollout) -> None:
    def tokens(**changes: Any) -> list[list[int]]:
        out = worker.generate([PROMPTS[0]] * 2, config(top_p=None, top_k=-1, **changes))
        return [row.tolist() for row in out.tokens]

    assert tokens() == tokens() == tokens(seed=4) == tokens(seed=jax.random.PRNGKey(4))
    assert tokens() != tokens(seed=5)
    assert tokens()[0] != tokens()[1]
    assert tokens(seed=None) != tokens(seed=None)


def test_without_log_probabilities(worker: PagedJaxRollout) -> None:
    assert worker.generate(PROMPTS, config(return_logprobs=False)).logprobs is None


@pytest.mark.parametrize(
    ("prompt", "changes", "options", "names"),
    [
        ("x", {}, {"images": None, "echo": True}, "'echo', 'images'"),
        ("x " * 30, {}, {}, "31 tokens; max_prompt_length is 12"),
        ("x", {"max_tokens_to_generate": 30}, {}, "30 that is 32; max_model_len .* is 24"),
        (["x"], {}, {}, "a list; it must be text"),
        ("x", {"top_p": 2.0}, {}, "top_p is 2"),
        ("x", {"tensor_parallel_size": 2}, {}, "tensor_parallel_size is 2"),
        ("x", {"rollout_mapping_config": object()}, {}, "to_params"),
    ],
)
def test_what_cannot_be_generated(
    worker: PagedJaxRollout, prompt: Any, changes: dict, options: dict, names: str
) -> None:
    asked = config()
    for name, value in changes.items():
        setattr(asked, name, value)
    with pytest.raises((InvalidRequestError, ConfigError), match=names):
        worker.generate([prompt], asked, **options)


def test_what_cannot_be_made(tokenizer: Any) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    with pytest.raises(ConfigError, match="mesh has the devices"):
        make_worker(tokenizer, mesh=mesh)
    with pytest.raises(ConfigError, match="is a Linear; it must be a TunixDecoder"):
        make_worker(tokenizer, rollout_actor=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


# --- weights ---


def test_new_weights_are_read_where_they_are(tokenizer: Any) -> None:
    worker = make_worker(tokenizer)
    engine, out = worker.llm.engine, worker.generate(PROMPTS, config())
    params = jax.tree.map(lambda x: x * 1.25, tiny_params(UNIFORM))
    actor = TunixDecoder(UNIFORM, jax.device_put(params, engine.device))
    worker.update_params(nnx.state(actor, nnx.Param), (nnx.Param,))
    assert engine.weights_version == 1
    # Tunix compares objects to find out whether it has to send weights at all.
    model = worker.model()
    assert model is not None
    rows = zip(*map(jax.tree.leaves, (model.params, actor.params)), strict=True)
    for own, sent in rows:
        assert own is not sent
        assert own.unsafe_buffer_pointer() == sent.unsafe_buffer_pointer()
    new = worker.generate(PROMPTS, config())
    assert any(a.tolist() != b.tolist() for a, b in zip(new.tokens, out.tokens, strict=True))
    found = worker.get_per_token_logps(new.left_padded_prompt_tokens, padded(new.tokens))
    assert_same_logps(found, new.logprobs)


def test_weights_in_parts_of_other_dtypes_and_wrong_ones(tokenizer: Any) -> None:
    worker = make_worker(tokenizer)
    engine, old = worker.llm.engine, tiny_params(UNIFORM)
    kept = engine.runner.params["layers"]["qkv"]
    norm = (old["final_norm"] * 2).astype(jnp.bfloat16)
    worker.update_params({"decoder": {"final_norm": norm}}, (nnx.Param,))
    params = engine.runner.params
    np.testing.assert_array_equal(params["final_norm"], norm.astype(jnp.float32))
    assert params["layers"]["qkv"].unsafe_buffer_pointer() == kept.unsafe_buffer_pointer()
    np.testing.assert_array_equal(params["embed"], old["embed"])
    for wrong, names in (
        ({"layers": {"lora_a": norm}}, r"\['layers'\]\['lora_a'\] is unknown"),
        ({"layers": {"qkv": norm}}, r"\['layers'\]\['qkv'\] is float32\[32\]; it must be"),
    ):
        with pytest.raises(ConfigError, match=names):
            worker.update_params({"decoder": wrong})
    assert engine.weights_version == 1


class Wrapped(nnx.Module):
    """A model of somebody else's."""

    def __init__(self, inner: TunixDecoder):
        self.policy = inner


def test_other_models_and_another_dtype(tokenizer: Any) -> None:
    worker = make_worker(
        tokenizer,
        rollout_actor=Wrapped(TunixDecoder(UNIFORM, tiny_params(UNIFORM))),
        to_params=lambda state: nnx.to_pure_dict(state)["policy"]["decoder"],
        config=UNIFORM,
        rollout_config=RolloutConfig(data_type=jnp.bfloat16, temperature=1.0),
    )
    assert worker.model() is None  # so Tunix always sends weights
    assert worker.llm.engine.model.dtype == "bfloat16"
    ids = np.arange(4, 4 + 2 * NEW, dtype=np.int32)[None]
    before = worker.get_per_token_logps(ids[:, :NEW], ids[:, NEW:])
    wanted = functional.score(UNIFORM, tiny_params(UNIFORM), ids, ids != PAD)[:, NEW:]
    np.testing.assert_allclose(before, wanted, atol=0.3)
    changed = TunixDecoder(UNIFORM, jax.tree.map(lambda x: x * 1.25, tiny_params(UNIFORM)))
    worker.update_params(nnx.state(Wrapped(changed)))
    after = worker.get_per_token_logps(ids[:, :NEW], ids[:, NEW:])
    assert np.abs(after - before).max() > 0.3


def test_tunix_computes_our_scores_and_gradients() -> None:
    ids = np.random.default_rng(0).integers(4, VOCAB, (2, WIDTH + NEW)).astype(np.int32)
    ids[0, :5] = ids[1, -3:] = PAD
    graph, state = nnx.split(TunixDecoder(UNIFORM, tiny_params(UNIFORM)))

    @functools.partial(jax.jit, static_argnums=1)
    def of_tunix(state: Any, temperature: float) -> jax.Array:
        args = (graph, state, ids[:, :WIDTH], ids[:, WIDTH:], PAD, EOS)
        found = common.compute_per_token_logps(*args, stop_gradient=False, temperature=temperature)
        return jnp.where(ids[:, WIDTH:] != PAD, found, 0.0)

    def ours(params: Any, temperature: float) -> jax.Array:
        found = functional.score(UNIFORM, params, ids, ids != PAD, temperature=temperature)
        return found[:, WIDTH:]

    with relaxed_numerics():
        found = of_tunix(state, 0.7)
        slopes = jax.grad(lambda s: of_tunix(s, 0.7).sum())(state)
    np.testing.assert_allclose(found, ours(tiny_params(UNIFORM), 0.7), atol=1e-5)
    wanted = jax.grad(lambda p: ours(p, 0.7).sum())(tiny_params(UNIFORM))
    found_slopes = nnx.to_pure_dict(slopes)["decoder"]
    for own, other in zip(*map(jax.tree.leaves, (found_slopes, wanted)), strict=True):
        np.testing.assert_allclose(own, other, atol=2e-4)


def test_without_tunix_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tunix.generate.tokenizer_adapter", None)
    monkeypatch.delitem(sys.modules, "pagedjax.integrations.tunix")
    with pytest.raises(ImportError, match=r'pip install "pagedjax\[tunix\]" with Python 3.12'):
        importlib.import_module("pagedjax.integrations.tunix")


# --- training ---


@pytest.mark.parametrize("num_devices", [1, 2])
def test_grpo(tokenizer: Any, num_devices: int) -> None:
    """Two batches, two steps each: the second of them needs the worker's log-probabilities.

    With a mesh of its own the trainer works on the next batch's rollout while it is generated.
    """
    devices = np.array(jax.devices()).reshape(2, 1)
    mesh, rollout = (jax.sharding.Mesh(devices[:n], ("fsdp", "tp")) for n in (num_devices, 1))
    setup = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: rollout},
        rollout_engine=functools.partial(PagedJaxRollout, engine_config=SETTINGS),
        training_config=RLTrainingConfig(
            actor_optimizer=optax.sgd(0.1), eval_every_n_steps=100, max_steps=4
        ),
        rollout_config=config(temperature=0.7, seed=None),
    )
    rewarded: list[str] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewarded.extend(completions)
        return [float(len(completion)) for completion in completions]

    with relaxed_numerics():
        actor, reference = (TunixDecoder(UNIFORM, tiny_params(UNIFORM)) for _ in range(2))
        cluster = RLCluster(
            actor=actor, reference=reference, tokenizer=tokenizer, cluster_config=setup
        )
        engine = in_one_shape(cluster.rollout.llm.engine)
        learner = GRPOLearner(cluster, GRPOConfig(num_generations=2, num_iterations=2), reward)
        assert learner.should_sync_weights
        prompts = np.array([PROMPTS[:2], PROMPTS[1:]])
        learner.train([{"prompts": batch} for batch in prompts])
        out = cluster.generate(PROMPTS)
        prompt_ids, ids = (
            jnp.asarray(out.left_padded_prompt_tokens),
            jnp.asarray(padded(out.tokens)),
        )
        trainers = cluster.get_actor_per_token_logps(prompt_ids, ids, PAD, EOS)
        workers = cluster.get_old_per_token_logps(prompt_ids, ids)

    assert len(rewarded) == 8
    assert engine.weights_version == 2
    trained = nnx.to_pure_dict(nnx.state(cluster.actor_trainer.model))["decoder"]
    trees = (engine.runner.params, trained, tiny_params(UNIFORM))
    for own, new, old in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_array_equal(own, new)
        assert np.abs(new - old).max() > 1e-4
    assert PAD not in np.concatenate(out.tokens)
    assert_same_logps(trainers, out.logprobs)
    assert_same_logps(workers, out.logprobs)
