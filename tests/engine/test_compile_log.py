"""What is compiled is noted, by the engine it is for, and kept on disk."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pagedjax.compile_log import Compilation, CompileLog


def compile_something(constant: float) -> None:
    jax.block_until_ready(jax.jit(lambda x: x * constant)(jnp.ones(3)))


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    jax.block_until_ready(jnp.ones(3))
    jax.clear_caches()
    jax.block_until_ready(jnp.ones(3))


def test_notes_what_was_compiled_inside_and_only_there() -> None:
    seen: list[Compilation] = []
    log = CompileLog(seen.append)
    compile_something(1.5)
    with log.watch("nothing"):
        pass
    with log.watch("a product"):
        compile_something(2.5)
    compile_something(3.5)
    (entry,) = log.entries
    assert entry.what == "a product"
    assert entry.num_programs >= 1
    assert entry.seconds > 0
    assert seen == [entry]
    assert log.num_programs == entry.num_programs


def test_two_logs_and_two_threads_do_not_mix() -> None:
    first, second = CompileLog(), CompileLog()
    with first.watch("outer"):
        with second.watch("inner"):
            compile_something(4.5)
        thread = threading.Thread(target=compile_something, args=(5.5,))
        thread.start()
        thread.join()
    assert not first.entries
    assert [entry.what for entry in second.entries] == ["inner"]


def test_after_warm_up_compilations_are_counted_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = CompileLog()
    with log.watch("early"):
        compile_something(6.5)
    assert log.num_after_warmup == 0
    log.end_warmup()
    with caplog.at_level(logging.WARNING), log.watch("late"):
        compile_something(7.5)
    assert log.num_after_warmup == log.entries[-1].num_programs > 0
    assert "compiled late in" in caplog.text
    assert "early" not in caplog.text


_SCRIPT = """
import jax, jax.numpy as jnp
from pagedjax.compilation_cache import enable_compilation_cache
enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))
print(jax.config.jax_compilation_cache_dir)
"""


def run_script(**environment: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


def test_programs_are_kept_in_the_users_cache_or_where_jax_was_told(tmp_path: Path) -> None:
    directory = run_script(XDG_CACHE_HOME=str(tmp_path))
    assert directory == tmp_path / "pagedjax" / "programs"
    assert any(directory.iterdir())
    other = tmp_path / "other"
    assert run_script(JAX_COMPILATION_CACHE_DIR=str(other)) == other
    assert any(other.iterdir())
