"""Seconds of work on the device, and what the device does at best.

Everything is timed as a chain: each call takes the result of the one before, so that none can be
left out or run beside another. Short calls (attention) are chained inside one program, as the host
needs longer to start a program than the device needs for them; calls of milliseconds (copies,
matrix products) are chained by the host, which is ahead of the device then. Nothing is subtracted.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_REPEATS = 7
_TIME_LIMIT_S = 1.5  # of all repeats of a slow chain
_MOST_CALLS = 512


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the device does at best, measured.

    Attributes:
      copy_bytes_per_s: of an array written to another place, its bytes counted twice, as they are
        read and written. A kernel that only reads is held against this same number of bytes moved:
        it may come out above 1, as memory that never turns from reads to writes is a bit faster.
      read_bytes_per_s: of an array summed up, its bytes counted once.
      product_flops_per_s: of a square matrix product, bfloat16 in and out.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    product_flops_per_s: float


def median_seconds(run: Callable[[], Any]) -> float:
    """Seconds of one run, after one that is not counted: fewer runs where they are slow."""
    times: list[float] = []
    jax.block_until_ready(run())
    while len(times) < _REPEATS and (len(times) < 2 or sum(times) < _TIME_LIMIT_S):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def num_calls(floor_s: float, target_s: float) -> int:
    """How many calls that take at least `floor_s` make a chain of `target_s`: an even number."""
    return 2 * max(1, min(_MOST_CALLS // 2, math.ceil(target_s / floor_s / 2)))


def chain_seconds(
    step: Callable[..., jax.Array], q: jax.Array, *operands: Any, calls: int
) -> float:
    """Seconds of one `step(q, *operands)`, whose result is the next one's `q`."""
    step = jax.jit(step)  # traced and lowered once

    @jax.jit
    def chain(q: jax.Array, *operands: Any) -> jax.Array:
        def two_steps(_: jax.Array, q: jax.Array) -> jax.Array:
            # Two, so that the results can take turns in two places and need not be copied.
            return step(step(q, *operands), *operands)

        return lax.fori_loop(0, calls // 2, two_steps, q)

    return median_seconds(lambda: chain(q, *operands)) / calls


def measure_limits(copied_bytes: int, side: int) -> Limits:
    """Copy and sum of an array of so many bytes, and a product of `side`^3."""
    words = jnp.arange(copied_bytes // 4, dtype=jnp.uint32)
    flip = jax.jit(lambda x, key: x ^ key)  # as much traffic as a copy; XLA may drop a mere copy
    total = jax.jit(lambda x, key: jnp.sum(x ^ key, dtype=jnp.uint32))
    matrix = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    weight = (matrix * side**-0.5).astype(jnp.bfloat16)  # so that products of products stay small
    product = jax.jit(jnp.dot)
    one, calls = jnp.uint32(1), 8

    def copies() -> jax.Array:
        x = words
        for _ in range(calls):
            x = flip(x, one)
        return x

    def sums() -> jax.Array:
        key = one
        for _ in range(calls):
            key = total(words, key)
        return key

    def products() -> jax.Array:
        x = matrix
        for _ in range(calls):
            x = product(x, weight)
        return x

    return Limits(
        2 * words.nbytes * calls / median_seconds(copies),
        words.nbytes * calls / median_seconds(sums),
        2 * side**3 * calls / median_seconds(products),
    )
