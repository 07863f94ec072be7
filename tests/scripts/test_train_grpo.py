"""The example learns its task."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.scripts.load import load_script

pytest.importorskip("optax")
grpo = load_script("train_grpo")


def test_rewards_are_for_right_places_in_front_of_the_end() -> None:
    prompts = jnp.array([[3, 1, 2, 1, grpo.GO]] * 4, jnp.int32)
    eos = grpo.EOS
    answers = jnp.array(
        [[1, 1, 2, 3, eos], [1, 1, 3, 2, eos], [1, 1, 2, 3, 0], [1, 1, 2, 3, eos]], jnp.int32
    )
    found = grpo.reward(prompts, answers, jnp.array([5, 5, 5, 2], jnp.int32))
    np.testing.assert_allclose(found, [1.0, 0.6, 0.8, 0.4])
    grouped = np.asarray(grpo.advantages(found, 2)).reshape(2, 2)
    np.testing.assert_allclose(grouped, [[1, -1], [1, -1]], rtol=1e-3)


def test_the_reward_climbs_from_near_zero(tmp_path) -> None:
    path = tmp_path / "curve.json"
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        grpo.main(["--steps", "100", "--json", str(path)])
    records = json.loads(path.read_text())
    rewards = [record["reward"] for record in records]
    assert rewards[0] < 0.12
    assert np.mean(rewards[-5:]) > 0.9
