"""Runs scheduled chunks on the device: owns parameters, device state and the compiled steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.batch import build_batch
from pagedjax.buckets import Buckets
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache, Params
from pagedjax.sampler import SamplerOutput
from pagedjax.scheduler import ScheduledChunk, SchedulerConfig
from pagedjax.step import EngineState, step
from pallas_kernels import Implementation, storage_dtype


def init_state(
    model: DecoderConfig,
    limits: SchedulerConfig,
    *,
    num_blocks: int,
    kv_dtype: np.dtype,
    platform: str,
    attention: Implementation | None = None,
) -> EngineState:
    """An empty pool of `num_blocks` blocks, all zero, and no last tokens."""
    shape = (
        model.kv_layout.layers_per_group,
        num_blocks,
        model.num_kv_heads,
        limits.block_size,
        2 * model.head_dim,
    )
    pool = jnp.zeros(shape, storage_dtype(kv_dtype, platform))
    last_tokens = jnp.zeros(limits.max_num_seqs, jnp.int32)
    return EngineState(KVCache(pool, None, kv_dtype, attention), last_tokens)


class Runner:
    """Executes steps. `state` is donated to each and replaced by its result."""

    def __init__(
        self, model: DecoderConfig, params: Params, state: EngineState, limits: SchedulerConfig
    ):
        self.params = params
        self.state = state
        self.limits = limits
        self.buckets = Buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._step = jax.jit(functools.partial(step, model), donate_argnums=1)

    def execute(self, chunks: list[ScheduledChunk]) -> SamplerOutput:
        """Compute the chunks; numpy results, row i for chunk i."""
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        output = self._dispatch(chunks, self.buckets.pick(num_tokens, len(chunks)))
        return jax.device_get(output)

    def warmup(self) -> int:
        """Compile every bucket (on padding: the pool keeps its contents); returns their number."""
        buckets = self.buckets.all()
        for bucket in buckets:
            jax.block_until_ready(self._dispatch([], bucket))
        return len(buckets)

    def _dispatch(self, chunks: list[ScheduledChunk], bucket: tuple[int, int]) -> SamplerOutput:
        batch = build_batch(
            chunks,
            num_tokens=bucket[0],
            num_seqs=bucket[1],
            num_groups=self.limits.num_groups,
            table_width=self.limits.table_width,
            no_slot=self.limits.max_num_seqs,
        )
        self.state, output = self._step(self.params, self.state, batch)
        return output
