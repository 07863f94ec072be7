"""Strict numerics for the whole suite, on several virtual CPU devices."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests compile the same small programs again and again; nothing outlives the session.
_programs = tempfile.TemporaryDirectory(prefix="pagedjax-tests-")
jax.config.update("jax_compilation_cache_dir", _programs.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
