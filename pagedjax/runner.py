"""Runs scheduled chunks on the device: owns parameters, device state and the compiled steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.batch import build_batch
from pagedjax.buckets import Buckets
from pagedjax.host_blocks import HostBlocks
from pagedjax.models.config import DecoderConfig
from pagedjax.models.decoder import KVCache, Params
from pagedjax.plan import BlockTransfers, ScheduledChunk, StepPlan
from pagedjax.scheduler import SchedulerConfig
from pagedjax.step import EngineState, StepOutput, step
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
    """Executes steps. `state` is donated to each and replaced by its result.

    Args:
      num_host_blocks: blocks of the host pool, its unused block 0 included.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: Params,
        state: EngineState,
        limits: SchedulerConfig,
        num_host_blocks: int = 1,
    ):
        self.params = params
        self.state = state
        self.limits = limits
        self.buckets = Buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
        # At most, every sequence copies its last block in every group.
        max_copies = limits.max_num_seqs * limits.num_groups
        self._host = HostBlocks(state.cache, num_host_blocks, max_copies)
        self._used: set[tuple[int, int]] = set()
        self._step = jax.jit(functools.partial(step, model), donate_argnums=1)

    @property
    def num_programs(self) -> int:
        """Shapes of steps that have been used so far."""
        return len(self._used)

    def dispatch(self, plan: StepPlan) -> StepOutput | None:
        """Move blocks and compute the chunks, without waiting for the device.

        Returns:
          Arrays on the device; row i of what was sampled is for `plan.samplers[i]`, row i of the
          prompt's for the i-th of all its wanted tokens. None without chunks.
        """
        self._move(plan.transfers)
        if not plan.chunks:
            return None
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        num_seqs = max(len(plan.chunks), len(plan.samplers))
        return self._dispatch(plan.chunks, self.buckets.pick(num_tokens, num_seqs))

    def link_bytes_per_s(self) -> float:
        """Speed between device and host, measured once."""
        return self._host.link_bytes_per_s(self.state.cache)

    def warmup(self) -> int:
        """Compile every bucket (on padding: the pool keeps its contents); returns their number.

        Block movements are compiled, too.
        """
        self._replace_cache(self._host.warmup(self.state.cache))
        buckets = self.buckets.all()
        for bucket in buckets:
            jax.block_until_ready(self._dispatch([], bucket))
        return len(buckets)

    def _move(self, transfers: BlockTransfers) -> None:
        if transfers.swap_outs:
            self._host.swap_out(self.state.cache, transfers.swap_outs)
        if transfers.swap_ins:
            self._replace_cache(self._host.swap_in(self.state.cache, transfers.swap_ins))
        if transfers.copies:
            self._replace_cache(self._host.copy(self.state.cache, transfers.copies))

    def _replace_cache(self, cache: KVCache) -> None:
        self.state = dataclasses.replace(self.state, cache=cache)

    def _dispatch(self, chunks: list[ScheduledChunk], bucket: tuple[int, int]) -> StepOutput:
        self._used.add(bucket)
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
