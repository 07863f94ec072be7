"""The decoder: one Flax nnx module for every family, its layers stacked and scanned.

    x = embed(tokens)
    for each layer:  x += attention(norm(x));  x += mlp(norm(x))       (lax.scan)
    logits = head(norm(x))

Parameters of all layers are stacked on a leading axis `L`, so a 32-layer model traces and compiles
like a 4-layer one. The KV pool rides in the scan's carry and is updated in place; each layer knows
its place in it by scanned integers (group, index in the group, window, rope).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pagedjax.models.config import DecoderConfig
from pagedjax.models.errors import ConfigError
from pagedjax.models.linear import linear
from pagedjax.models.rope import apply_rope, rope_table
from pallas_kernels import (
    Implementation,
    KVFormat,
    RaggedBatch,
    dense_attention,
    paged_attention_and_write,
    plan_attention,
    slot_mapping,
    storage_dtype,
    to_storage,
)

INVARIANT_ROWS = 16  # a whole vector of rows: compilers may round a loop's left-over rows otherwise

Params = dict[str, Any]
"""Parameters as a plain pytree: nested dicts with the names of the modules, arrays as leaves."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The pool of all layers.

    Attributes:
      pool: [Lg, P, KVH, T, width] as stored (see `KVFormat`).
      scales: u32[Lg, P, KVH, T] of quantized pools.
      kv_format: what they mean.
      implementation: which attention kernel reads it; None picks one.
      batch_invariant: a token's bits depend on its own sequence alone (see `paged_attention`),
        among steps of one shape; N must be a multiple of `INVARIANT_ROWS`.
    """

    pool: jax.Array
    scales: jax.Array | None
    kv_format: KVFormat = dataclasses.field(metadata={"static": True})
    implementation: Implementation | None = dataclasses.field(metadata={"static": True})
    batch_invariant: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInput:
    """What the layers need to know of a batch.

    Attributes:
      positions: i32[N]. query_start: i32[S + 1]. context_lens: i32[S] (see `RaggedBatch`).
      block_tables: i32[G, S, B], one table per KV group and sequence.
    """

    positions: jax.Array
    query_start: jax.Array
    context_lens: jax.Array
    block_tables: jax.Array

    def of_group(self, group: jax.Array | int) -> RaggedBatch:
        return RaggedBatch(self.query_start, self.context_lens, self.block_tables[group])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _LayerInfo:
    """Scanned integers of a layer, i32[L] each."""

    group: jax.Array
    index: jax.Array
    window: jax.Array
    rope: jax.Array


_Attend = Callable[..., tuple[jax.Array, Any]]
"""q [N, H, D], k and v [N, KVH, D], the cache, the layer -> f32[N, H, D], the cache."""


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMS norm over the last axis (Zhang and Sennrich, arXiv:1910.07467), in float32."""
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


class Block(nnx.Module):
    """Attention and MLP of one layer; built with the layers stacked, called with one of them."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, platform: str):
        c = self.config = config
        make = _Maker(c, rngs, platform, stack=(c.num_layers,))
        group = c.num_heads // c.num_kv_heads
        self.attn_norm = make.norm(c.hidden_size)
        # Rows of a KV head lie together, [KVH, G queries + K + V, D], so that heads can be sharded.
        self.qkv = make.weight(c.num_kv_heads * (group + 2) * c.head_dim, c.hidden_size)
        self.qkv_bias = make.bias(self.qkv.shape[1]) if c.qkv_bias else None
        self.q_norm = make.norm(c.head_dim) if c.qk_norm else None
        self.k_norm = make.norm(c.head_dim) if c.qk_norm else None
        self.out = make.weight(c.hidden_size, c.num_heads * c.head_dim)
        self.post_attn_norm = make.norm(c.hidden_size) if c.post_norms else None
        self.mlp_norm = make.norm(c.hidden_size)
        self.gate_up = make.weight(2, c.intermediate_size, c.hidden_size)
        self.down = make.weight(c.hidden_size, c.intermediate_size)
        self.post_mlp_norm = make.norm(c.hidden_size) if c.post_norms else None

    def __call__(
        self,
        x: jax.Array,
        cache: KVCache | None,
        info: _LayerInfo,
        rope: tuple[jax.Array, jax.Array],
        attend: _Attend,
    ) -> tuple[jax.Array, KVCache | None]:
        """x f32[N, hidden]; rope f32[R, N, D / 2] each."""
        c = self.config
        q, k, v = self._project(x, rope[0][info.rope], rope[1][info.rope])
        attended, cache = attend(q, k, v, cache, info)
        attended = linear(attended.reshape(len(x), -1), self.out[...], c.dtype)
        x = x + self._norm(attended, self.post_attn_norm)
        x = x + self._norm(self._mlp(self._norm(x, self.mlp_norm)), self.post_mlp_norm)
        return x, cache

    def _project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [N, H, D], k and v [N, KVH, D], rotated."""
        c = self.config
        qkv = linear(self._norm(x, self.attn_norm), self.qkv[...], c.dtype)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...][None]
        qkv = qkv.reshape(len(x), c.num_kv_heads, -1, c.head_dim)
        q = qkv[:, :, :-2].reshape(len(x), c.num_heads, c.head_dim)
        k, v = qkv[:, :, -2], qkv[:, :, -1]
        q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def _mlp(self, x: jax.Array) -> jax.Array:
        c = self.config
        both = linear(x, self.gate_up[...], c.dtype)
        gate, up = both[:, 0], both[:, 1]
        act = jax.nn.silu(gate) if c.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return linear(act * up, self.down[...], c.dtype)

    def _norm(self, x: jax.Array, weight: nnx.Param | None) -> jax.Array:
        return x if weight is None else rms_norm(x, weight[...], self.config.norm_eps)


class Decoder(nnx.Module):
    """A decoder-only transformer over the paged KV pool.

    Args:
      rngs: for random weights; checkpoints replace them (`nnx.eval_shape` gives the shapes alone).
      platform: backend the weights are for, which decides how they are stored.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, platform: str):
        self.config = config
        make = _Maker(config, rngs, platform)
        # Not sliced in a loop, so stored as values on every backend.
        self.embed = make.table()
        self.layers = Block(config, rngs=rngs, platform=platform)
        self.final_norm = make.norm(config.hidden_size)
        self.head = None if config.tie_embeddings else make.table()

    def __call__(
        self, token_ids: jax.Array, step: StepInput, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """i32[N] tokens -> (f32[N, hidden] before the final norm, the cache with their keys).

        Raises:
          AssertionError: at trace time, shapes or dtypes that do not fit the configuration.
        """
        self._check(token_ids, step, cache)
        attend = self._paged(len(token_ids), step, cache)
        return self._run(token_ids, step.positions, cache, attend)

    def without_cache(self, token_ids: jax.Array, mask: jax.Array) -> jax.Array:
        """i32[S, L] whole sequences -> f32[S, L, hidden] before the final norm; differentiable.

        The layers are those of `__call__`, over attention that needs no pool. For the gradient
        every layer is computed again (`jax.checkpoint`), so that one layer's values exist at a
        time.

        Args:
          mask: bool[S, L], which are tokens; the others are padding, wherever it stands.
        """
        c = self.config
        positions = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: None, info: _LayerInfo
        ) -> tuple[jax.Array, None]:
            q, k, v = (x.reshape(*mask.shape, *x.shape[1:]) for x in (q, k, v))
            attended = dense_attention(
                q,
                k,
                v,
                positions,
                mask,
                sm_scale=c.attn_scale,
                soft_cap=c.attn_soft_cap,
                window=info.window,
                dtype=c.dtype,
            )
            return attended.reshape(-1, *attended.shape[2:]), None

        flat = jnp.where(mask, token_ids, 0).reshape(-1), positions.reshape(-1)
        hidden, _ = self._run(*flat, None, attend, remat=True)
        return hidden.reshape(*mask.shape, -1)

    def _run(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        cache: KVCache | None,
        attend: _Attend,
        *,
        remat: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Embed i32[N] tokens and run all layers; `cache` rides along from one to the next."""
        c = self.config
        x = self.embed[...][token_ids].astype(jnp.float32) * c.embed_scale
        rope = rope_table(c.ropes, c.head_dim, positions)
        graph, stacked = nnx.split(self.layers)

        def layer(carry: tuple, scanned: tuple) -> tuple[tuple, None]:
            hidden, cache = carry
            state, info = scanned
            return nnx.merge(graph, state)(hidden, cache, info, rope, attend), None

        body = jax.checkpoint(layer) if remat else layer
        (x, cache), _ = lax.scan(body, (x, cache), (stacked, self._layer_info()))
        return x, cache

    def _paged(self, num_rows: int, step: StepInput, cache: KVCache) -> _Attend:
        """Attention over the pool, which gets the new keys and values; what all layers share."""
        c = self.config
        block_size, num_blocks = cache.pool.shape[3], cache.pool.shape[1]
        slots = jax.vmap(
            lambda table: slot_mapping(
                RaggedBatch(step.query_start, step.context_lens, table),
                num_rows,
                block_size=block_size,
                num_blocks=num_blocks,
            )
        )(step.block_tables)
        layout = plan_attention(
            step.of_group(0),
            num_rows,
            c.num_heads,
            c.head_dim,
            cache.pool,
            cache.scales,
            kv_dtype=cache.kv_format,
            implementation=cache.implementation,
            batch_invariant=cache.batch_invariant,
        )

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, info: _LayerInfo
        ) -> tuple[jax.Array, KVCache]:
            attended, pool, scales = paged_attention_and_write(
                q,
                k,
                v,
                cache.pool,
                cache.scales,
                info.index,
                step.of_group(info.group),
                slots=(slots[0][info.group], slots[1][info.group]),
                layout=layout,
                sm_scale=c.attn_scale,
                soft_cap=c.attn_soft_cap,
                window=info.window,
                kv_dtype=cache.kv_format,
                implementation=cache.implementation,
                batch_invariant=cache.batch_invariant,
            )
            return attended, dataclasses.replace(cache, pool=pool, scales=scales)

        return attend

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[M, hidden] rows of `__call__` -> f32[M, vocab]."""
        c = self.config
        hidden = rms_norm(hidden, self.final_norm[...], c.norm_eps)
        weight = self.embed if self.head is None else self.head
        out = linear(hidden, weight[...], c.dtype)
        if c.final_soft_cap is not None:
            out = c.final_soft_cap * jnp.tanh(out / c.final_soft_cap)
        return out

    def _check(self, token_ids: jax.Array, step: StepInput, cache: KVCache) -> None:
        c, num_seqs = self.config, len(step.context_lens)
        chex.assert_type([token_ids, *jax.tree.leaves(step)], jnp.int32)
        chex.assert_equal_shape([token_ids, step.positions])
        chex.assert_shape(step.query_start, (num_seqs + 1,))
        chex.assert_shape(step.block_tables, (c.kv_layout.num_groups, num_seqs, None))
        rows = {cache.kv_format.row(c.head_dim, platform).width for platform in ("cpu", "tpu")}
        pool = (c.kv_layout.layers_per_group, None, c.num_kv_heads, None, rows)
        chex.assert_shape(cache.pool, pool)
        if cache.batch_invariant:
            chex.assert_is_divisible(len(token_ids), INVARIANT_ROWS)

    def _layer_info(self) -> _LayerInfo:
        layout = self.config.kv_layout
        columns = (layout.group, layout.index, self.config.windows, self.config.rope_of_layer)
        return _LayerInfo(*(jnp.array(column, jnp.int32) for column in columns))


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Random parameters in their stored form."""

    config: DecoderConfig
    rngs: nnx.Rngs
    platform: str
    stack: tuple[int, ...] = ()

    def weight(self, *shape: int) -> nnx.Param:
        """[*stack, *out, in], normal with variance 1 / in."""
        dtype = self.config.dtype
        values = jax.random.normal(self.rngs.params(), (*self.stack, *shape), jnp.float32)
        values = values / math.sqrt(shape[-1])
        return nnx.Param(to_storage(values, dtype, storage_dtype(dtype, self.platform)))

    def table(self) -> nnx.Param:
        """[vocab, hidden], kept as values."""
        c = self.config
        shape = (c.vocab_size, c.hidden_size)
        values = jax.random.normal(self.rngs.params(), shape, jnp.float32)
        return nnx.Param((values / math.sqrt(c.hidden_size)).astype(c.dtype))

    def norm(self, size: int) -> nnx.Param:
        return nnx.Param(jnp.ones((*self.stack, size), jnp.float32))

    def bias(self, size: int) -> nnx.Param:
        return nnx.Param(jnp.zeros((*self.stack, size), jnp.float32))


def abstract_params(config: DecoderConfig, platform: str) -> Params:
    """Shapes and stored dtypes of the parameters: nested dicts of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.state(_abstract(config, platform)))


def random_params(config: DecoderConfig, platform: str, seed: int = 0) -> Params:
    """Random parameters: nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(seed), platform=platform)))


def bind(config: DecoderConfig, params: Params) -> Decoder:
    """The decoder that computes with `params`; for use inside a jitted function."""
    graph, state = nnx.split(_abstract(config, "cpu"))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def check_same_shapes(old: Params, new: Params) -> None:
    """Make sure that a compiled step takes `new` in place of `old`.

    Raises:
      ConfigError: names the first parameter that is missing or differs in shape or dtype.
    """
    old_leaves, new_leaves = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(p)}
        for p in (old, new)
    )
    for name in sorted(old_leaves.keys() | new_leaves.keys()):
        have, want = (
            f"{leaf.dtype}{list(leaf.shape)}" if leaf is not None else "absent"
            for leaf in (new_leaves.get(name), old_leaves.get(name))
        )
        if have != want:
            raise ConfigError(f"parameter {name} is {have}; it must be {want}")


def _abstract(config: DecoderConfig, platform: str) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), platform=platform))
