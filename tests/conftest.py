"""Strict numerics for the whole suite, on several virtual CPU devices."""

import os
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A simulated GPU kernel waits for ever with fewer threads of XLA:CPU, which has one a core.
os.environ.setdefault("PJRT_NPROC", "4")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests compile the same small programs again and again; nothing outlives the session.
_programs = tempfile.TemporaryDirectory(prefix="pagedjax-tests-")
jax.config.update("jax_compilation_cache_dir", _programs.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """A process can map only so much code: drop what a module compiled; it is still on disk."""
    yield
    jax.clear_caches()
