"""`LLM`: load a model, generate for many prompts."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from pagedjax.beam_search import BeamSearchParams
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError, PagedJaxError
from pagedjax.loader import load_model
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestMetrics, RequestOutput
from pagedjax.sampling_params import SamplingParams

Prompt = str | list[int]


class LLM:
    """A model with its engine, for offline use.

    Args:
      model: a Hugging Face directory, a GGUF file, or the name of a packaged model
        ("gemma-3-270m"); or an `LLMEngine` made elsewhere.
      config: settings of the engine; None takes the defaults. An engine made elsewhere has its own.

    Raises:
      ModelNotFoundError, CheckpointError, ConfigError: the model cannot be loaded or served.

    Example:
      >>> llm = LLM("gemma-3-270m")
      >>> llm.generate(["Four score and seven"], SamplingParams(temperature=0.0))
    """

    def __init__(self, model: str | Path | LLMEngine, config: EngineConfig | None = None):
        if isinstance(model, LLMEngine):
            self.engine = model
        else:
            loaded = load_model(model, config or EngineConfig())
            self.engine = LLMEngine(loaded.config, loaded.params, loaded.tokenizer, config)
        self._streamed: set[str] = set()  # requests of all streams
        self._undelivered: list[RequestOutput] = []

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; one finished output each, in the order of the prompts.

        Args:
          prompts: text or token ids, one or many.
          params: for all prompts, or one each.
          options: priority and caching, for all prompts.

        A prompt that cannot be served does not stop the others: its output carries the `error`,
        which `RequestOutput.outputs` raises.
        """
        return _finished(self.stream(prompts, params, options))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        """Search the likeliest continuations of every prompt, as Transformers' `num_beams` does.

        Returns:
          One finished output per prompt, its completions from best to worst score; a refused one
          carries its `error`, as with `generate`.
        """
        prompts = _as_list(prompts)
        adds = [
            functools.partial(self.engine.add_beam_search, p, params, options=options)
            for p in prompts
        ]
        return _finished(self._serve(prompts, adds))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield `(index of the prompt, output so far)` whenever a prompt gets a token.

        Leaving the iterator early aborts the rest. Several streams may be read in turn.

        Raises:
          PagedJaxError: a request was ended from outside, by the engine's `abort`.
        """
        prompts = _as_list(prompts)
        all_params = [params] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(all_params) != len(prompts):
            raise InvalidRequestError(f"{len(all_params)} params for {len(prompts)} prompts")
        adds = [
            functools.partial(self.engine.add_request, prompt, own, options=options)
            for prompt, own in zip(prompts, all_params, strict=True)
        ]
        yield from self._serve(prompts, adds)

    def _serve(
        self, prompts: list[Prompt], adds: Sequence[Callable[[], str]]
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Queue every prompt by its call of `adds` and yield the outputs as they come."""
        index_of: dict[str, int] = {}
        try:
            for index, (prompt, add) in enumerate(zip(prompts, adds, strict=True)):
                try:
                    request_id = add()
                except InvalidRequestError as error:
                    yield index, _refused(prompt, error)
                else:
                    index_of[request_id] = index
                    self._streamed.add(request_id)
            while index_of:
                for output in self._next_outputs(index_of):
                    index = index_of[output.request_id]
                    if output.finished:
                        del index_of[output.request_id]
                        self._streamed.remove(output.request_id)
                    yield index, output
        finally:
            for request_id in index_of:
                self.engine.abort(request_id)
            self._streamed -= index_of.keys()
            self._take(index_of)  # nobody is there any more to want them

    def _next_outputs(self, requests: Collection[str]) -> list[RequestOutput]:
        """New outputs of `requests`; what a step brings for other streams waits for them."""
        found = self._take(requests)
        if found:
            return found
        if not any(self.engine.is_unfinished(request_id) for request_id in requests):
            raise PagedJaxError(f"requests {sorted(requests)} were ended outside of their stream")
        new = self.engine.step()
        self._undelivered += [output for output in new if output.request_id in self._streamed]
        return self._take(requests)

    def _take(self, requests: Collection[str]) -> list[RequestOutput]:
        own = [output for output in self._undelivered if output.request_id in requests]
        self._undelivered = [o for o in self._undelivered if o.request_id not in requests]
        return own


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one text, one list of token ids, or many of either."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], Integral) else items


def _refused(prompt: Prompt, error: InvalidRequestError) -> RequestOutput:
    token_ids = () if isinstance(prompt, str) else tuple(prompt)
    metrics = RequestMetrics(arrival=0.0)
    return RequestOutput("", token_ids, (), finished=True, metrics=metrics, error=error)


def _finished(stream: Iterator[tuple[int, RequestOutput]]) -> list[RequestOutput]:
    """The finished outputs of a stream, in the order of their prompts."""
    final = {index: output for index, output in stream if output.finished}
    return [final[index] for index in sorted(final)]
