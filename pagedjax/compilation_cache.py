"""Compiled programs on disk, so that the next start need not compile them."""

import jax

from pagedjax.demo import user_cache_dir

_DIRECTORY = "jax_compilation_cache_dir"
_MIN_COMPILE_S = 0.1  # JAX keeps only what took a second, and an engine has many smaller programs


def enable_compilation_cache() -> None:
    """Let JAX keep compiled programs in the user's cache directory, unless it has one already."""
    if getattr(jax.config, _DIRECTORY) is None:
        jax.config.update(_DIRECTORY, str(user_cache_dir() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
