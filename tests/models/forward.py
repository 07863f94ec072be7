"""Run a decoder over a paged pool, the whole prompt at once or in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache, Params, StepInput, bind
from pallas_kernels import plain_format, storage_dtype

BLOCK_SIZE = 4


def prompt_logits(
    config: DecoderConfig, params: Params, token_ids: np.ndarray, chunk: int | None = None
) -> np.ndarray:
    """f32[N, vocab]: the logits of every position of one sequence.

    Args:
      chunk: tokens a step; None: all in one. The last step is padded.
    """
    size = chunk or len(token_ids)
    tables, cache = _pool(config, len(token_ids))
    out = []
    for start in range(0, len(token_ids), size):
        rows = min(size, len(token_ids) - start)
        padded = np.zeros(size, np.int32)
        padded[:rows] = token_ids[start : start + rows]
        step = StepInput(
            positions=jnp.arange(start, start + size, dtype=jnp.int32),
            query_start=jnp.array([0, rows], jnp.int32),
            context_lens=jnp.array([start + rows], jnp.int32),
            block_tables=tables,
        )
        logits, cache = _step(config, params, jnp.asarray(padded), step, cache)
        out.append(np.asarray(logits)[:rows])
    return np.concatenate(out)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _step(
    config: DecoderConfig, params: Params, token_ids: jax.Array, step: StepInput, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    model = bind(config, params)
    hidden, cache = model(token_ids, step, cache)
    return model.logits(hidden), cache


def _pool(config: DecoderConfig, num_tokens: int) -> tuple[jax.Array, KVCache]:
    """Block tables i32[G, 1, B] in random order, and a pool of NaN but for the null block."""
    layout = config.kv_layout
    width = -(-num_tokens // BLOCK_SIZE)
    blocks = np.random.default_rng(0).permutation(np.arange(1, layout.num_groups * width + 1))
    shape = (layout.layers_per_group, len(blocks) + 1, config.num_kv_heads, BLOCK_SIZE)
    dtype = jnp.dtype(config.dtype)
    pool = np.full((*shape, 2 * config.head_dim), np.nan, dtype)
    pool[:, 0] = 0
    pool = pool.view(storage_dtype(dtype, jax.default_backend()))
    tables = blocks.reshape(layout.num_groups, 1, width).astype(np.int32)
    return jnp.asarray(tables), KVCache(jnp.array(pool), None, plain_format(dtype), None)
