"""Every difference between the jax versions we support, in one place."""

import jax

JAX_VERSION: tuple[int, ...] = jax.__version_info__

# XLA:CPU fuses `x @ W.T.astype(f32)` for one row into a parallel mat-vec in jax 0.10; from 0.11 on
# the same product outside a loop runs on one thread, and a padded bf16 product is faster.
CPU_MATVEC_FUSES_CAST = JAX_VERSION < (0, 11)
