"""`AsyncLLM`: generate for many tasks of an event loop at once.

One thread runs the engine and alone touches it. Tasks send it commands through a queue, which it
empties between steps; it sleeps while there is nothing to do. What it has for a task lies in the
task's slot, where a newer output takes the place of one that was not read yet.
"""

import asyncio
import functools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError, EngineDeadError, PagedJaxError
from pagedjax.llm import engine_of
from pagedjax.models.decoder import Params
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestOutput
from pagedjax.prompts import Prompt
from pagedjax.sampling_params import SamplingParams
from pagedjax.weights import InFlight

T = TypeVar("T")


class AsyncLLM:
    """A model with its engine, for the tasks of one event loop.

    It belongs to the loop of its first call. Close it, or use it as an async context manager.

    Args:
      model: as for `LLM`.
      config: settings of the engine; None takes the defaults. An engine made elsewhere has its own.
      max_waiting: most requests that the engine has at a time, running or waiting to run. Further
        calls of `generate` wait, first come, first served, until the last output of one was read.

    Raises:
      ModelNotFoundError, CheckpointError, ConfigError: the model cannot be loaded or served.

    Example:
      >>> async with AsyncLLM("gemma-3-270m") as llm:
      ...     async for output in llm.generate("Four score and seven"):
      ...         print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path | LLMEngine,
        config: EngineConfig | None = None,
        *,
        max_waiting: int = 1024,
    ):
        if max_waiting < 1:
            raise ConfigError(f"max_waiting is {max_waiting}; it must be at least 1")
        self._worker = _Worker(engine_of(model, config), self._wake)
        self._room = asyncio.Semaphore(max_waiting)
        self._slots: set[_Slot[Any]] = set()  # of all tasks that wait for the worker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._has_ended = asyncio.Event()

    @property
    def engine(self) -> LLMEngine:
        """The engine. Its thread may be in the middle of a step: look, but change nothing."""
        return self._worker.engine

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far whenever there is a new one; the last one is `finished`.

        Outputs are cumulative: who reads slowly misses some, but no token. Cancelling the task that
        reads, or closing the generator, aborts the request. Leaving a loop over it early does so
        when nothing refers to the generator any more; `contextlib.aclosing` makes that certain.

        Args:
          prompt: text or token ids.
          options: priority and caching. Among requests that wait for room (`max_waiting`) the
            priority does not count.
          request_id: a name for `abort`.

        Raises:
          InvalidRequestError: as for `LLMEngine.add_request`.
          EngineDeadError: the engine failed, or this was closed, before the request's end.
        """
        self._enter()
        async with self._room:
            with self._slot() as slot:
                add = self.engine.add_request  # called by the worker's thread
                self._worker.add(slot, functools.partial(add, prompt, params, request_id, options))
                try:
                    while not (output := await slot.take()).finished:
                        yield output
                except BaseException:
                    self._worker.drop(slot)
                    raise
        yield output  # when it has left: the reader may never come back for more

    async def abort(self, request_id: str) -> bool:
        """End a request early; its last output has `FinishReason.ABORT`. Its blocks are free then.

        Returns:
          Whether the engine had it. One that still waits for room it does not have; cancel its
          task.

        Raises:
          EngineDeadError: the engine failed, or this was closed.
        """
        self._enter()
        with self._slot() as slot:
            self._worker.abort(slot, request_id)
            return await slot.take()

    async def update_params(self, params: Params, *, in_flight: InFlight = "finish") -> None:
        """Go on with other weights; see `LLMEngine.update_params`. Returns when they are accepted.

        With "finish", requests that have begun may not have come to their end by then.

        Raises:
          ConfigError: they do not fit, or were deleted; the engine goes on with those it has.
          EngineDeadError: the engine failed, or this was closed.
        """
        await self._call(functools.partial(self.engine.update_params, params, in_flight=in_flight))

    async def sleep(self) -> None:
        """Free the device's memory but for the weights; see `LLMEngine.sleep`. Requests wait.

        Raises:
          EngineDeadError: the engine failed, or this was closed.
        """
        await self._call(self.engine.sleep)

    async def wake(self) -> None:
        """Let requests go on after `sleep`.

        Raises:
          EngineDeadError: the engine failed, or this was closed.
        """
        await self._call(self.engine.wake)

    async def close(self) -> None:
        """Abort all requests, whose tasks get an `EngineDeadError`, and end the thread.

        Nothing can be generated any more. Closing again does nothing.
        """
        loop_is_gone = self._loop is not None and self._loop.is_closed()
        if not loop_is_gone:
            self._check_loop()
        self._is_closed = True
        if self._loop is None:
            return
        self._worker.stop()
        if loop_is_gone:
            self._worker.join()
        else:
            await self._has_ended.wait()

    async def __aenter__(self) -> "AsyncLLM":
        self._enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- in the event loop ---

    def _enter(self) -> None:
        """Begin a call: there must be an engine, and this must be its loop."""
        if self._loop is None and not self._is_closed:
            self._loop = asyncio.get_running_loop()
            self._worker.start()
        self._check_loop()

    def _check_loop(self) -> None:
        if self._loop not in (None, asyncio.get_running_loop()):
            raise PagedJaxError(
                "this AsyncLLM belongs to another event loop, that of its first call; make one "
                "for each loop, or call it from that loop (asyncio.run_coroutine_threadsafe)"
            )

    async def _call(self, function: Callable[[], None]) -> None:
        """Have the worker call a function, between steps."""
        self._enter()
        with self._slot() as slot:
            self._worker.call(slot, function)
            await slot.take()

    @contextmanager
    def _slot(self) -> Iterator["_Slot[Any]"]:
        """A slot for what the worker will have, which is an error at last if it ends."""
        if self._is_closed or self._has_ended.is_set():
            raise self._death()
        slot: _Slot[Any] = _Slot()
        self._slots.add(slot)
        try:
            yield slot
        finally:
            self._slots.remove(slot)

    def _deliver(self) -> None:
        """Move what the worker has into the slots."""
        values, has_ended = self._worker.collect()
        for slot, value in values.items():
            slot.put(value)
        if has_ended and not self._has_ended.is_set():
            self._worker.join()
            self._has_ended.set()
            for slot in self._slots:
                slot.put(self._death())
            self._room.release()  # every task that waits for room goes in, and out by an error

    def _death(self) -> EngineDeadError:
        """A new error, since raising one changes it."""
        cause = self._worker.failure
        if cause is None:
            return EngineDeadError("the AsyncLLM was closed; make a new one")
        error = EngineDeadError(f"the engine failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    # --- in the worker's thread ---

    def _wake(self) -> None:
        """Have the loop deliver."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop was closed, nobody is there any more
            self._worker.stop()


class _Slot(Generic[T]):
    """Where a task finds the newest value that the worker has for it. Only the loop uses it.

    Attributes:
      request_id: of the request whose outputs go here; only the worker's thread uses it.
    """

    def __init__(self) -> None:
        self.request_id: str | None = None
        self._value: T | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, value: T | Exception) -> None:
        """Replace the value; an error is kept behind it."""
        if isinstance(value, Exception):
            self._error = value
        else:
            self._value = value
        self._changed.set()

    async def take(self) -> T:
        """Wait for a value, or raise the error."""
        await self._changed.wait()
        value, self._value = self._value, None
        if value is not None:
            if self._error is None:
                self._changed.clear()
            return value
        assert self._error is not None
        raise self._error


class _Worker:
    """The thread that runs the engine.

    Args:
      wake: called by the thread when there is something to `collect` and there was nothing before.

    Attributes:
      failure: what ended the thread, if it was not `stop`.
    """

    def __init__(self, engine: LLMEngine, wake: Callable[[], None]):
        self.engine = engine
        self.failure: BaseException | None = None
        self._wake = wake
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers: dict[str, _Slot[RequestOutput]] = {}  # of unfinished requests
        self._lock = threading.Lock()
        self._values: dict[_Slot[Any], Any] = {}  # guarded by the lock, as is the next
        self._has_ended = False
        # A daemon: who forgets to close it can still leave the program.
        self._thread = threading.Thread(target=self._run, name="pagedjax-engine", daemon=True)

    # --- from the event loop ---

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        """Abort all requests and end, behind the commands that came before."""
        self._commands.put(None)

    def add(self, slot: _Slot[RequestOutput], add: Callable[[], str]) -> None:
        """Add a request by `add`; its outputs, or the error that refuses it, go to the slot."""
        self._commands.put(functools.partial(self._add, slot, add))

    def drop(self, slot: _Slot[RequestOutput]) -> None:
        """Abort the request of a slot, which nobody reads any more."""
        self._commands.put(functools.partial(self._drop, slot))

    def abort(self, slot: _Slot[bool], request_id: str) -> None:
        """Abort a request; whether there was one goes to the slot."""
        self._commands.put(functools.partial(self._abort, slot, request_id))

    def call(self, slot: _Slot[bool], function: Callable[[], None]) -> None:
        """Call a function; True, or the error that it raises, goes to the slot."""
        self._commands.put(functools.partial(self._call, slot, function))

    def collect(self) -> tuple[dict[_Slot[Any], Any], bool]:
        """New values by slot, an exception being a value too; whether no more will come."""
        with self._lock:
            values, self._values = self._values, {}
            return values, self._has_ended

    # --- in the thread ---

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._post_outputs(self.engine.step())
            for request_id in self._readers:
                self.engine.abort(request_id)
        except BaseException as error:  # whatever it is, somebody waits to hear of it
            self.failure = error
        self._post({}, has_ended=True)

    def _take_commands(self) -> bool:
        """Do what is in the queue, and wait there for something to do; False to stop."""
        engine = self.engine
        while (
            engine.is_sleeping or not engine.has_unfinished_requests() or not self._commands.empty()
        ):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, slot: _Slot[RequestOutput], add: Callable[[], str]) -> None:
        try:
            slot.request_id = add()
        except Exception as error:
            self._post({slot: error})
        else:
            self._readers[slot.request_id] = slot

    def _drop(self, slot: _Slot[RequestOutput]) -> None:
        if slot.request_id is not None and self._readers.get(slot.request_id) is slot:
            del self._readers[slot.request_id]
            self.engine.abort(slot.request_id)

    def _abort(self, slot: _Slot[bool], request_id: str) -> None:
        output = self.engine.abort(request_id)
        if output is not None:
            self._post_outputs([output])
        self._post({slot: output is not None})

    def _call(self, slot: _Slot[bool], function: Callable[[], None]) -> None:
        try:
            function()
        except ConfigError as error:
            self._post({slot: error})
        else:
            self._post({slot: True})

    def _post_outputs(self, outputs: list[RequestOutput]) -> None:
        values: dict[_Slot[Any], Any] = {}
        for output in outputs:
            slot = self._readers.get(output.request_id)
            if slot is not None:
                values[slot] = output
                if output.finished:
                    del self._readers[output.request_id]
        if values:
            self._post(values)

    def _post(self, values: dict[_Slot[Any], Any], has_ended: bool = False) -> None:
        """Have values delivered; they replace older ones for the same slots."""
        with self._lock:
            is_awake = bool(self._values)
            self._values.update(values)
            self._has_ended = has_ended
        if has_ended or not is_awake:
            self._wake()
