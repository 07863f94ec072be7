"""What XLA compiled for an engine, and how long it took."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also what a persistent cache returned
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Programs that one call had to wait for.

    Attributes:
      what: the call, e.g. "step of 16 tokens, 4 sequences".
      num_programs: how many were compiled, or found in JAX's persistent cache.
      seconds: the whole call, tracing and lowering included.
    """

    what: str
    num_programs: int
    seconds: float


class CompileLog:
    """Notes which calls of an engine compile something.

    Attributes:
      entries: so far. num_after_warmup: programs compiled since `end_warmup`; ought to stay 0.
      on_compile: called with every new entry.
    """

    def __init__(self, on_compile: Callable[[Compilation], None] | None = None):
        self.entries: list[Compilation] = []
        self.num_after_warmup = 0
        self.on_compile = on_compile
        self._is_warm = False
        self._num_programs = 0
        _listen_to_compilations()

    @property
    def num_programs(self) -> int:
        return sum(entry.num_programs for entry in self.entries)

    def end_warmup(self) -> None:
        """From here on, nothing should have to be compiled."""
        self._is_warm = True

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Note what is compiled inside the block, by this thread."""
        self._num_programs, start = 0, time.perf_counter()
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            if self._num_programs:
                self._add(Compilation(what, self._num_programs, time.perf_counter() - start))

    def _add(self, entry: Compilation) -> None:
        self.entries.append(entry)
        self.num_after_warmup += entry.num_programs * self._is_warm
        level = logging.WARNING if self._is_warm else logging.INFO
        _logger.log(level, "compiled %s in %.2f s", entry.what, entry.seconds)
        if self.on_compile is not None:
            self.on_compile(entry)


_current: ContextVar[CompileLog | None] = ContextVar("current_compile_log", default=None)


@functools.cache
def _listen_to_compilations() -> None:
    """JAX tells all listeners of all compilations; the log that this thread uses takes its own."""

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        log = _current.get()
        if log is not None and event == _COMPILED:
            log._num_programs += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
