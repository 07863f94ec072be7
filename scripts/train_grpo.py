"""Teach a tiny model a task by reinforcement learning, on CPU, in minutes: GRPO in one file.

The model starts from random weights and never sees an answer. A prompt is a few digits; the model
is to write them in ascending order and end. It samples a group of answers to each prompt, a
function says how much of each is right, and answers better than their group's mean become likelier
(group relative policy optimization, Shao et al., arXiv:2402.03300).

A training step is ONE jitted function: it generates from the parameters that it then updates, in
the KV pool that it was given, so no weights move, no cache is stale, and nothing runs on the host
between a sample and its gradient.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pagedjax import functional
from pagedjax.functional import Cache, Generation
from pagedjax.models.config import NO_WINDOW, DecoderConfig
from pagedjax.models.decoder import Params, random_params
from pagedjax.models.rope import RopeConfig

DIGITS, LENGTH = 8, 4  # different digits, digits of a prompt
EOS, GO = DIGITS, DIGITS + 1  # ends an answer, ends a prompt
MAX_TOKENS = LENGTH + 1

MODEL = DecoderConfig(
    vocab_size=DIGITS + 2,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    windows=(NO_WINDOW,) * 2,
    ropes=(RopeConfig(theta=10_000.0),),
    rope_of_layer=(0, 0),
    attn_scale=16**-0.5,
    norm_eps=1e-6,
    dtype="float32",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """`prompts`: of a step. `group`: answers to each. `clip`: of the ratio of probabilities."""

    steps: int = 300
    prompts: int = 64
    group: int = 8
    updates: int = 2  # gradient steps on the answers of one step
    learning_rate: float = 1e-3  # falls to zero at the end
    clip: float = 0.2

    @property
    def optimizer(self) -> optax.GradientTransformation:
        falling = optax.linear_schedule(self.learning_rate, 0.0, self.steps * self.updates)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(falling))


def make_prompts(key: jax.Array, count: int) -> jax.Array:
    """i32[count, LENGTH + 1]: random digits, then GO."""
    digits = jax.random.randint(key, (count, LENGTH), 0, DIGITS, jnp.int32)
    return jnp.pad(digits, ((0, 0), (0, 1)), constant_values=GO)


def reward(prompts: jax.Array, answers: jax.Array, lengths: jax.Array) -> jax.Array:
    """f32[S]: 1 for the sorted digits and EOS; the share of right places, none if it is longer."""
    wanted = jnp.pad(jnp.sort(prompts[:, :LENGTH], axis=1), ((0, 0), (0, 1)), constant_values=EOS)
    places = jnp.arange(MAX_TOKENS, dtype=jnp.int32)[None] < lengths[:, None]
    return ((answers == wanted) & places).mean(1, dtype=jnp.float32)


def advantages(rewards: jax.Array, group: int) -> jax.Array:
    """f32[S]: how much better than its group's mean, in standard deviations of the group."""
    grouped = rewards.reshape(-1, group)
    centred = grouped - grouped.mean(1, keepdims=True)
    return (centred / (grouped.std(1, keepdims=True) + 1e-4)).reshape(-1)


def loss(
    params: Params, prompts: jax.Array, out: Generation, advantage: jax.Array, clip: float
) -> jax.Array:
    """The clipped objective of PPO (Schulman et al., arXiv:1707.06347), a token at a time."""
    tokens = jnp.concatenate([prompts, out.token_ids], axis=1)
    mask = jnp.concatenate([jnp.ones(prompts.shape, bool), out.mask], axis=1)
    logprobs = functional.score(MODEL, params, tokens, mask)[:, prompts.shape[1] :]
    ratio = jnp.exp(jnp.where(out.mask, logprobs - out.logprobs, 0.0))
    gain = jnp.minimum(
        ratio * advantage[:, None], jnp.clip(ratio, 1 - clip, 1 + clip) * advantage[:, None]
    )
    return -jnp.where(out.mask, gain, 0.0).sum() / out.mask.sum(dtype=jnp.float32)


@functools.partial(jax.jit, static_argnames="settings", donate_argnums=(0, 1, 2))
def train_step(
    params: Params, opt_state: Any, cache: Cache, key: jax.Array, settings: Settings
) -> tuple[Params, Any, Cache, jax.Array, jax.Array]:
    """Sample, judge, learn; returns the new state, the mean reward, and the share of all right."""
    prompt_key, sample_key = jax.random.split(key)
    prompts = make_prompts(prompt_key, settings.prompts)
    ids = jnp.arange(settings.prompts, dtype=jnp.int32)
    cache, out = functional.generate(
        MODEL,
        params,
        cache,
        prompts,
        jnp.full(settings.prompts, LENGTH + 1, jnp.int32),
        functional.request_seeds(sample_key, ids, settings.group),
        n=settings.group,
        max_tokens=MAX_TOKENS,
        stop_token_ids=(EOS,),
    )
    prompts = jnp.repeat(prompts, settings.group, axis=0)
    rewards = reward(prompts, out.token_ids, out.lengths)
    advantage = advantages(rewards, settings.group)
    for _ in range(settings.updates):
        gradient = jax.grad(loss)(params, prompts, out, advantage, settings.clip)
        updates, opt_state = settings.optimizer.update(gradient, opt_state)
        params = optax.apply_updates(params, updates)
    return params, opt_state, cache, rewards.mean(), (rewards == 1).mean(dtype=jnp.float32)


def train(
    settings: Settings, seed: int, report: Callable[[str], None] = print
) -> list[dict[str, float]]:
    """Train from random weights; one record for each step."""
    params = random_params(MODEL, jax.default_backend(), seed)
    opt_state = settings.optimizer.init(params)
    cache = functional.init_cache(
        MODEL,
        num_seqs=settings.prompts * settings.group,
        max_len=LENGTH + 1 + MAX_TOKENS,
        block_size=4,
    )
    records, began = [], time.perf_counter()
    for step in range(settings.steps):
        key = jax.random.fold_in(jax.random.key(seed), step)
        params, opt_state, cache, mean, solved = train_step(params, opt_state, cache, key, settings)
        seconds = time.perf_counter() - began
        records.append(
            {"step": step, "reward": float(mean), "solved": float(solved), "seconds": seconds}
        )
        if step % 20 == 0 or step == settings.steps - 1:
            report(f"step {step:4d}  reward {mean:.3f}  solved {solved:.3f}  {seconds:6.1f} s")
    return records


def draw(records: list[dict[str, float]], path: Path) -> None:
    """The curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, label in (("reward", "mean reward"), ("solved", "share of answers all right")):
        axes.plot([r["step"] for r in records], [r[name] for r in records], label=label)
    axes.set(xlabel="step", ylim=(0, 1.02), title="GRPO from random weights: sort four digits")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Settings()
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--prompts", type=int, default=defaults.prompts, help="of a step")
    parser.add_argument("--group", type=int, default=defaults.group, help="answers to each")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="PNG with the curve (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="write the records here")
    args = parser.parse_args(argv)
    settings = Settings(args.steps, args.prompts, args.group, learning_rate=args.learning_rate)
    records = train(settings, args.seed)
    if args.json:
        args.json.write_text(json.dumps(records))
    if args.plot:
        draw(records, args.plot)


if __name__ == "__main__":
    main()
