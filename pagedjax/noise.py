"""Random numbers that are a pure function of a seed, a position and a token."""

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def gumbel(seed: jax.Array, position: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Noise of the standard Gumbel distribution for some tokens, the same in any selection.

    Args:
      seed: u32[T, 2]. position: i32[T].
      token_ids: i32[T, K], or i32[1, K] for all rows.

    Returns:
      f32[T, K] in (-4, 23). Large values, which decide, have the resolution of 32 random bits.
    """
    zero = jnp.zeros((), jnp.uint32)
    key = threefry2x32(seed[:, 0], seed[:, 1], position.astype(jnp.uint32), zero)
    bits, _ = threefry2x32(key[0][:, None], key[1][:, None], token_ids.astype(jnp.uint32), zero)
    # In (0, 1): neither end is reached, although the larger numbers are rounded.
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def threefry2x32(
    key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two random words for each counter (x0, x1): Threefry-2x32 with 20 rounds.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). `jax.random` has the
    same function, but as a loop over the whole array on CPU, 15 times slower. Arguments: u32,
    broadcast against each other.
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = x0 ^ _rotate(x1, distance)
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x0, x1


def _rotate(x: jax.Array, distance: int) -> jax.Array:
    return (x << jnp.uint32(distance)) | (x >> jnp.uint32(32 - distance))
