"""Samples for a training step: what an engine generated, as arrays on its device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pagedjax.checked import require
from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError
from pagedjax.finish_code import FinishCode
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.prompts import Prompt
from pagedjax.request import FinishReason, derived_seed
from pagedjax.sampling_params import SamplingParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """S = prompts * n samples, those of a prompt together; Lp and Lc are the arrays' widths.

    `[prompt_ids, completion_ids]`, side by side, are sequences without a gap, as are the masks.

    Attributes:
      prompt_ids: i32[S, Lp], padded on the left. prompt_mask: bool[S, Lp], which are tokens.
      completion_ids: i32[S, Lc], padded on the right, the token that ended a sample included.
      completion_mask: bool[S, Lc], which are tokens.
      logprobs: f32[S, Lc], (natural) log-probability of each token in the model's own distribution;
        zero in padding.
      processed_logprobs: f32[S, Lc], in the distribution that it was drawn from, behind penalties,
        masks, temperature and cuts.
      lengths: i32[S], tokens of each completion.
      finish_reasons: i32[S], a `FinishCode` each.
      weights_version: i32[], of the weights that all of it was sampled from.
    """

    prompt_ids: jax.Array
    prompt_mask: jax.Array
    completion_ids: jax.Array
    completion_mask: jax.Array
    logprobs: jax.Array
    processed_logprobs: jax.Array
    lengths: jax.Array
    finish_reasons: jax.Array
    weights_version: jax.Array


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """What is to be sampled, and the arrays that it goes to.

    Attributes:
      prompts: token ids. params: of each.
      prompt_length, completion_length: Lp and Lc.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    pad_token_id: int
    prompt_length: int
    completion_length: int

    def arrays(
        self, outputs: Sequence[RequestOutput], weights_version: int, device: Any
    ) -> Rollout:
        """The finished outputs of all prompts as arrays on `device`, a `jax.Device`."""
        rows = [(output, completion) for output in outputs for completion in output.outputs]
        prompts = [np.array(output.prompt_token_ids, np.int32) for output, _ in rows]
        completions = [completion for _, completion in rows]
        width = self.completion_length
        prompt_ids = np.full((len(rows), self.prompt_length), self.pad_token_id, np.int32)
        completion_ids = np.full((len(rows), width), self.pad_token_id, np.int32)
        logprobs, processed = np.zeros((2, len(rows), width), np.float32)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            prompt_ids[row, self.prompt_length - len(prompt) :] = prompt
            found = completion.logprobs or ()
            completion_ids[row, : len(found)] = completion.token_ids
            logprobs[row, : len(found)] = [token.sampled for token in found]
            processed[row, : len(found)] = [token.processed for token in found]
        prompt_lens = np.array([len(prompt) for prompt in prompts], np.int32)
        lengths = np.array([len(completion.token_ids) for completion in completions], np.int32)
        on_host = {
            "prompt_ids": prompt_ids,
            "prompt_mask": _mask(prompt_lens, self.prompt_length)[:, ::-1],
            "completion_ids": completion_ids,
            "completion_mask": _mask(lengths, width),
            "logprobs": logprobs,
            "processed_logprobs": processed,
            "lengths": lengths,
            "finish_reasons": np.array([_code(c) for c in completions], np.int32),
            "weights_version": np.array(weights_version, np.int32),
        }
        return Rollout(**jax.device_put(on_host, device))


def plan_rollout(
    engine: LLMEngine,
    prompts: Sequence[Prompt],
    n: int,
    params: SamplingParams | None,
    *,
    pad_token_id: int,
    prompt_length: int | None,
    completion_length: int | None,
) -> RolloutPlan:
    """What `LLM.rollout` is to sample with an engine, checked.

    Raises:
      InvalidRequestError: see there.
    """
    params = _samples_of(params or SamplingParams(), n)
    vocab_size = engine.model.vocab_size
    known = 0 <= pad_token_id < vocab_size
    require(known, "pad_token_id", pad_token_id, f"in [0, {vocab_size}), the vocabulary")
    most = params.max_tokens
    completion_length = most if completion_length is None else completion_length
    limit = f"at most completion_length, {completion_length}"
    require(most <= completion_length, "max_tokens", most, limit)
    token_ids = [_encode(engine, index, prompt) for index, prompt in enumerate(prompts)]
    if not token_ids:
        raise InvalidRequestError("there are no prompts; give at least 1")
    if prompt_length is None:
        prompt_length = max(map(len, token_ids))
    for index, own in enumerate(token_ids):
        if len(own) > prompt_length:
            raise InvalidRequestError(
                f"prompt {index}: it has {len(own)} tokens; prompt_length is {prompt_length}"
            )
    each = [_with_own_seed(params, index) for index in range(len(token_ids))]
    return RolloutPlan(token_ids, each, pad_token_id, prompt_length, completion_length)


def _samples_of(params: SamplingParams, n: int) -> SamplingParams:
    """The same with `n` samples, and the log-probability of each token."""
    for name in ("n", "best_of"):
        value = getattr(params, name)
        require(value in (None, 1, n), f"{name} of params", value, f"left out, or n, {n}")
    logprobs = 0 if params.logprobs is None else params.logprobs
    return dataclasses.replace(params, n=n, best_of=None, logprobs=logprobs)


def _with_own_seed(params: SamplingParams, index: int) -> SamplingParams:
    """So that prompts, even equal ones, are not sampled with the same noise."""
    if params.seed is None:
        return params
    return dataclasses.replace(params, seed=derived_seed(params.seed, index))


def _encode(engine: LLMEngine, index: int, prompt: Prompt) -> list[int]:
    try:
        return engine.encode_prompt(prompt)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"prompt {index}: {error}") from error


def _mask(lengths: np.ndarray, width: int) -> np.ndarray:
    """bool[S, width]: as many from the left."""
    return np.arange(width) < lengths[:, None]


def _code(completion: CompletionOutput) -> FinishCode:
    return FinishCode.of(completion.finish_reason or FinishReason.ABORT)
