"""Counting XLA compilations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax


@contextmanager
def counted_compiles() -> Iterator[list[float]]:
    """The durations of XLA compilations inside the block."""
    durations: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
