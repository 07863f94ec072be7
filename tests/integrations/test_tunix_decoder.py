"""The decoder as a module with the signature that Tunix calls; needs no Tunix."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.errors import ConfigError
from pagedjax.integrations.tunix_decoder import TunixDecoder
from pagedjax.models.config import DecoderConfig
from tests.engine.tiny import SLIDING, UNIFORM, VOCAB, oracle_logprobs, tiny_params

PAD = 0


def test_the_state_is_the_parameters_themselves() -> None:
    params = tiny_params(UNIFORM)
    model = TunixDecoder(UNIFORM, params)
    tree = nnx.to_pure_dict(nnx.state(model))["decoder"]
    assert jax.tree.structure(tree) == jax.tree.structure(params)
    for trees in (tree, model.params):
        assert all(map(operator.is_, jax.tree.leaves(trees), jax.tree.leaves(params)))


@pytest.mark.parametrize("model", [UNIFORM, SLIDING], ids=["uniform", "sliding"])
def test_logits_are_the_oracles(model: DecoderConfig) -> None:
    tokens = [5, 6, 7, 8, 40, 3, 1, 4, 1]
    ids, mask = np.full((2, 14), PAD, np.int32), np.zeros((2, 14), bool)
    for row, start in enumerate((0, 3)):
        ids[row, start : start + len(tokens)] = tokens
        mask[row, start : start + len(tokens)] = True
    attention = jnp.asarray(np.tril(np.ones((14, 14), bool)) & mask[:, None])
    logits, cache = TunixDecoder(model, tiny_params(model))(ids, None, None, attention)
    assert cache is None
    assert logits.shape == (2, 14, VOCAB)
    found = np.asarray(jax.nn.log_softmax(logits))[mask].reshape(2, len(tokens), VOCAB)
    for row in found:
        np.testing.assert_allclose(row, oracle_logprobs(model, tokens), atol=1e-4)


def test_what_the_module_refuses() -> None:
    model = TunixDecoder(UNIFORM, tiny_params(UNIFORM))
    ids = jnp.ones((1, 4), jnp.int32)
    for arguments, names in (
        ({"segment_ids": ids}, "packed sequences"),
        ({"cache": {}}, "cache is not None"),
        ({"attention_mask": jnp.ones((1, 4, 8), bool)}, r"\(1, 4, 8\); it must be \(1, 4, 4\)"),
    ):
        with pytest.raises(ConfigError, match=names):
            model(ids, **arguments)
    with pytest.raises(ConfigError, match=r"\['head'\] is absent"):
        TunixDecoder(UNIFORM, {k: v for k, v in tiny_params(UNIFORM).items() if k != "head"})
