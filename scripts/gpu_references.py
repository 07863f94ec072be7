"""The same work by software that is there already: JAX's Triton kernel, cuDNN, plain XLA.

  triton   `jax.experimental.pallas.ops.gpu.paged_attention` (deprecated), over pages of its layout
  cudnn    `jax.nn.dot_product_attention`, over dense keys and values: decodes as one query a
           sequence with its length, chunks from nothing with a causal mask. Its causal mask begins
           at the first key, so that a chunk behind others cannot be asked for.
  xla      this project's attention without a kernel, over the same pool

What does not run is recorded with the first line of its error, under "does not run".
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from gpu_records import Record, Recorder, does_not_run
from gpu_speed import PagedPool, queries
from gpu_timing import Limits, chain_seconds, num_calls
from gpu_work import BLOCK_SIZE, Chunk, Decode, Heads, Piece, facts

_TRITON_SPLITS = 16  # its default; it wants a divisor of a sequence's pages
_EXPECTED = 0.3  # share of the device's best that the length of a chain is chosen for


def pieces(toy: bool) -> list[Piece]:
    if toy:
        return [Decode(2, 64), Chunk(24, 0)]
    decodes = [Decode(batch, context) for batch in (64, 1) for context in (4096, 512, 32768)]
    return [*decodes, Chunk(2048, 0), Chunk(8192, 0), Chunk(512, 0)]


def measure_references(recorder: Recorder, _: str, limits: Limits, toy: bool) -> None:
    """One record for each piece of work and each way to do it."""
    heads = Heads.of(toy)

    def work(piece: Piece, by: str, seconds_of: Callable[..., float]) -> Record:
        record = facts(piece) | {"by": by}
        calls = num_calls(piece.floor_s(heads, limits) / _EXPECTED, heads.chain_s)
        with does_not_run(record):
            record |= piece.record(heads, limits, seconds_of(piece, heads, calls))
        return record

    for piece in pieces(toy):
        for by, seconds_of in ways(piece).items():
            recorder.run(
                f"{by}: {piece.name}",
                lambda piece=piece, by=by, seconds_of=seconds_of: work(piece, by, seconds_of),
            )


def ways(piece: Piece) -> dict[str, Callable[[Any, Heads, int], float]]:
    """By name: from a piece of work, heads and a chain's length to seconds."""
    if isinstance(piece, Decode):
        return {"triton": triton_decode, "cudnn": cudnn_decode, "xla": xla_seconds}
    return {"cudnn": cudnn_chunk, "xla": xla_seconds}


def xla_seconds(piece: Piece, heads: Heads, calls: int) -> float:
    pool = PagedPool(heads, piece.kv, piece.block_size, piece.num_blocks)
    return pool.seconds(piece, "xla", calls)


def triton_decode(piece: Decode, heads: Heads, calls: int) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    pages = -(-piece.context // BLOCK_SIZE)
    options = {
        "k_splits": min(_TRITON_SPLITS, pages),
        "interpret": jax.default_backend() == "cpu",
    }

    def step(
        q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        return paged_attention(q * heads.sm_scale, k, v, tables, lengths, **options)

    shape = (heads.kv_heads, piece.batch * pages, BLOCK_SIZE, heads.head_dim)
    k, v = random_pair(shape)
    shuffled = jax.random.permutation(jax.random.key(3), piece.batch * pages)
    tables = shuffled.astype(jnp.int32).reshape(piece.batch, pages)
    lengths = jnp.full(piece.batch, piece.context, jnp.int32)
    return chain_seconds(step, queries(heads, piece), k, v, tables, lengths, calls=calls)


def cudnn_decode(piece: Decode, heads: Heads, calls: int) -> float:
    def step(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q[:, None],
            k,
            v,
            scale=heads.sm_scale,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )[:, 0]

    k, v = random_pair((piece.batch, piece.context, heads.kv_heads, heads.head_dim))
    lengths = jnp.full(piece.batch, piece.context, jnp.int32)
    return chain_seconds(step, queries(heads, piece), k, v, lengths, calls=calls)


def cudnn_chunk(piece: Chunk, heads: Heads, calls: int) -> float:
    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q[None], k, v, scale=heads.sm_scale, is_causal=True, implementation="cudnn"
        )[0]

    k, v = random_pair((1, piece.new, heads.kv_heads, heads.head_dim))
    return chain_seconds(step, queries(heads, piece), k, v, calls=calls)


def random_pair(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """K and V, bfloat16, made where they are used: they may be gigabytes."""
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    k, v = (draw(jax.random.key(seed), shape, jnp.bfloat16) for seed in (0, 1))
    return k, v
