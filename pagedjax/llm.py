"""`LLM`: load a model, generate for many prompts."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pagedjax.beam_search import BeamSearchParams
from pagedjax.chat import Message
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError, PagedJaxError, TokenizerError
from pagedjax.loader import load_model
from pagedjax.models.decoder import Params
from pagedjax.options import RequestOptions
from pagedjax.outputs import RequestMetrics, RequestOutput
from pagedjax.prompts import Prompt, prompt_list
from pagedjax.rollout import Rollout, plan_rollout
from pagedjax.sampling_params import SamplingParams
from pagedjax.scoring import SCORING, Score, join_all, score_of
from pagedjax.weights import InFlight


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
        self.engine = engine_of(model, config)
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
        return self._complete(self._jobs(prompt_list(prompts), params), options)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
        *,
        add_generation_prompt: bool = True,
        template_name: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer every conversation; one finished output each, in their order.

        Args:
          messages: one conversation or many, each of mappings with "role" and "content".
          params: for all conversations, or one each.
          options: priority and caching, for all conversations.
          add_generation_prompt: end the prompt with the opening of the assistant's turn.
          template_name: which of the tokenizer's chat templates; None takes the one that fits.
          template_variables: further names for the template, such as "tools".

        A conversation that cannot be served does not stop the others, as with `generate`.

        Raises:
          InvalidRequestError: there is no tokenizer.
        """
        if self.engine.tokenizer is None:
            raise InvalidRequestError("a conversation needs a tokenizer with a chat template")
        encode = functools.partial(
            self.engine.tokenizer.encode_chat,
            add_generation_prompt=add_generation_prompt,
            template_name=template_name,
            **(template_variables or {}),
        )
        conversations = _conversations(messages)
        each = zip(conversations, _one_each(params, len(conversations)), strict=True)
        jobs = [_Job(functools.partial(self._add_chat, encode, *pair)) for pair in each]
        return self._complete(jobs, options)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        options: RequestOptions | None = None,
    ) -> list[Score]:
        """How likely each continuation is behind its prompt, as evaluation harnesses ask.

        Two texts are tokenized as one and split where their tokens begin to differ from the
        prompt's own: a token that the tokenizer merges across the border is scored, as part of the
        continuation. Give token ids for another split.

        Args:
          prompts: text or token ids; one for all continuations (multiple choice), or one each.
          continuations: text or token ids, one or many.
          options: priority and caching, for all of them.

        Returns:
          A score for every continuation, in their order.

        Raises:
          InvalidRequestError: one of the prompts or continuations is empty, or the two together
            have `max_model_len` tokens or more. Nothing is computed for the others then.
        """
        joined = join_all(self.engine.tokenizer, prompt_list(prompts), prompt_list(continuations))
        jobs = self._jobs([token_ids for token_ids, _ in joined], SCORING)
        outputs = self._complete(jobs, options, stops_at_error=True)
        borders = [border for _, border in joined]
        return [score_of(*pair) for pair in zip(outputs, borders, strict=True)]

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
        add = self.engine.add_beam_search
        jobs = [_Job(functools.partial(add, p, params), p) for p in prompt_list(prompts)]
        return self._complete(jobs, options)

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
        yield from self._serve(self._jobs(prompt_list(prompts), params), options)

    def rollout(
        self,
        prompts: Prompt | Sequence[Prompt],
        n: int = 1,
        params: SamplingParams | None = None,
        *,
        weights: Params | None = None,
        pad_token_id: int = 0,
        prompt_length: int | None = None,
        completion_length: int | None = None,
    ) -> Rollout:
        """Sample `n` continuations of every prompt, as arrays on the device for a training step.

        Args:
          prompts: text or token ids, one or many.
          params: how tokens are chosen, for all of them; None takes the defaults. Of a `seed` every
            prompt gets its own, by its place.
          weights: to go on with from here on, as by `update_params`; all is sampled from them.
          pad_token_id: what stands where no token is.
          prompt_length, completion_length: widths of the arrays; None takes the longest prompt and
            `params.max_tokens`. With widths that stay, a training step is compiled once.

        Raises:
          InvalidRequestError: names the prompt that is refused, or that is longer than
            `prompt_length`; there is none; `max_tokens` is above `completion_length`; `params` want
            another `n`, or all samples to be alike. Nothing is computed then.
          ConfigError: as for `update_params`.
        """
        plan = plan_rollout(
            self.engine,
            prompt_list(prompts),
            n,
            params,
            pad_token_id=pad_token_id,
            prompt_length=prompt_length,
            completion_length=completion_length,
        )
        if weights is not None:
            self.update_params(weights)
        jobs = self._jobs(plan.prompts, plan.params)
        outputs = self._complete(jobs, None, stops_at_error=True)
        return plan.arrays(outputs, self.engine.weights_version, self.engine.device)

    def update_params(self, params: Params, *, in_flight: InFlight = "finish") -> None:
        """Go on with other weights; see `LLMEngine.update_params`."""
        self.engine.update_params(params, in_flight=in_flight)

    def sleep(self) -> None:
        """Free the device's memory but for the weights; see `LLMEngine.sleep`."""
        self.engine.sleep()

    def wake(self) -> None:
        """Be ready to compute again; see `LLMEngine.wake`."""
        self.engine.wake()

    # --- jobs: requests that are yet to be added ---

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list["_Job"]:
        add = self.engine.add_request
        each = zip(prompts, _one_each(params, len(prompts)), strict=True)
        return [_Job(functools.partial(add, prompt, own), prompt) for prompt, own in each]

    def _add_chat(
        self,
        encode: Callable[[Sequence[Message]], list[int]],
        messages: Sequence[Message],
        params: SamplingParams | None,
        options: RequestOptions | None,
    ) -> str:
        try:
            token_ids = encode(messages)
        except TokenizerError as error:
            raise InvalidRequestError(str(error)) from error
        return self.engine.add_request(token_ids, params, options=options)

    def _complete(
        self, jobs: list["_Job"], options: RequestOptions | None, *, stops_at_error: bool = False
    ) -> list[RequestOutput]:
        """The finished output of every job, in order; `stops_at_error` raises the first error."""
        final: dict[int, RequestOutput] = {}
        options = dataclasses.replace(options or RequestOptions(), output_kind="final")
        with closing(self._serve(jobs, options)) as outputs:
            for index, output in outputs:
                if stops_at_error and output.error is not None:
                    raise InvalidRequestError(f"prompt {index}: {output.error}") from output.error
                if output.finished:
                    final[index] = output
        return [final[index] for index in sorted(final)]

    def _serve(
        self, jobs: list["_Job"], options: RequestOptions | None
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Add every job, then yield `(index of the job, output)` as they come."""
        index_of: dict[str, int] = {}
        try:
            for index, job in enumerate(jobs):
                try:
                    request_id = job.add(options=options)
                except InvalidRequestError as error:
                    yield index, _refused(job.prompt, error)
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


def engine_of(model: str | Path | LLMEngine, config: EngineConfig | None) -> LLMEngine:
    """The engine itself, or a new one for a model that is loaded; see `LLM`."""
    if isinstance(model, LLMEngine):
        return model
    loaded = load_model(model, config or EngineConfig())
    return LLMEngine(loaded.config, loaded.params, loaded.tokenizer, config)


@dataclasses.dataclass(frozen=True)
class _Job:
    """A request to add, by calling `add(options=...)`; its prompt, where that is known before."""

    add: Callable[..., str]
    prompt: Prompt = ""


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """A list of conversations, from one or many."""
    items: list[Any] = list(messages)
    return [items] if items and isinstance(items[0], Mapping) else items


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} params for {count} prompts")
    return list(params)


def _refused(prompt: Prompt, error: InvalidRequestError) -> RequestOutput:
    token_ids = () if isinstance(prompt, str) else tuple(prompt)
    metrics = RequestMetrics(arrival=0.0)
    return RequestOutput("", token_ids, (), finished=True, metrics=metrics, error=error)
