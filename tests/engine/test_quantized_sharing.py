"""What is shared, evicted, swapped and forked, once more with quantized pools.

The oracle knows nothing of quantization; a request alone in an engine of the same kind takes its
place. Deterministic engines, so that what must be equal is equal bit by bit: a row that is computed
again may otherwise be rounded to another step.
"""

import functools
from typing import Any

import numpy as np
import pytest

from pagedjax.models.config import DecoderConfig
from tests.engine import fresh, test_sharing, test_traps
from tests.engine.tiny import generate

pytestmark = pytest.mark.slow
_AGAIN = ("test_trap_6_", "test_trap_8_")
_NOT_AGAIN = (
    "test_best_of_returns_the_likeliest",  # by the numbers of the oracle
    "test_a_thousand_aborts",  # nothing of it depends on the pool's contents
)
globals().update(
    {
        name: found
        for module, wanted in ((test_sharing, ("test_",)), (test_traps, _AGAIN))
        for name, found in vars(module).items()
        if name.startswith(wanted) and not name.startswith(_NOT_AGAIN)
    }
)


@pytest.fixture(autouse=True, params=["int8", "k8v4"])
def quantized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines are of this kind."""
    config = {"kv_cache_dtype": request.param, "deterministic": True}
    monkeypatch.setattr(fresh, "CONFIG", config)
    monkeypatch.setattr(fresh, "oracle_greedy", functools.partial(alone, request.param))


@functools.cache
def engine_alone(model: DecoderConfig, kv_cache_dtype: str) -> Any:
    config = {"kv_cache_dtype": kv_cache_dtype, "enable_prefix_caching": False}
    return fresh.fresh_engine(model, **config)


def alone(
    kv_cache_dtype: str, model: DecoderConfig, prompt: list[int], max_tokens: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """What `oracle_greedy` gives, from an engine that serves nobody else."""
    engine = engine_alone(model, kv_cache_dtype)
    (output,) = generate(engine, [prompt], fresh.greedy(max_tokens, logprobs=20))
    completion = output.outputs[0]
    rows = np.full((len(completion.token_ids), model.vocab_size), np.nan)
    for row, position in zip(rows, completion.logprobs or (), strict=True):
        for token_id, value in position.top:
            row[token_id] = value
    return completion.token_ids, rows
