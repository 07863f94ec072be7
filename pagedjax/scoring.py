"""Log-probabilities of given continuations, as evaluation harnesses ask for them."""

import dataclasses
import math
from collections.abc import Sequence

from pagedjax.errors import InvalidRequestError, TokenizerError
from pagedjax.outputs import RequestOutput
from pagedjax.prompts import Prompt
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizer import Tokenizer

SCORING = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
"""What to ask for a prompt with its continuation behind it; the one new token is of no use."""


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely a continuation is.

    Attributes:
      token_ids: of the continuation.
      logprobs: natural, of each of them given the prompt and those before it.
      total: their sum.
      is_greedy: whether each is the likeliest at its place, so that greedy generation gives them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float
    is_greedy: bool


def join_all(
    tokenizer: Tokenizer | None, prompts: Sequence[Prompt], continuations: Sequence[Prompt]
) -> list[tuple[list[int], int]]:
    """`join` of every pair; a single prompt goes with all continuations.

    Raises:
      InvalidRequestError: as `join` does, naming the pair; or the numbers do not match.
    """
    if len(prompts) == 1:
        prompts = [prompts[0]] * len(continuations)
    if len(prompts) != len(continuations):
        raise InvalidRequestError(
            f"{len(prompts)} prompts for {len(continuations)} continuations; give 1 for all or "
            "1 each"
        )
    joined = []
    for index, pair in enumerate(zip(prompts, continuations, strict=True)):
        try:
            joined.append(join(tokenizer, *pair))
        except (InvalidRequestError, TokenizerError) as error:
            raise InvalidRequestError(f"prompt {index}: {error}") from error
    return joined


def join(
    tokenizer: Tokenizer | None, prompt: Prompt, continuation: Prompt
) -> tuple[list[int], int]:
    """Token ids of both together, and how many of them are the prompt's.

    Two texts are tokenized as one, as a model sees them. The continuation begins at the first token
    that differs from the prompt's own: where the tokenizer merges both at the border, the merged
    token is the continuation's, so that no part of it goes without a score.

    Raises:
      InvalidRequestError: either is empty, or there is text but no tokenizer.
      TokenizerError: a text cannot be encoded.
    """
    if tokenizer is None:
        if isinstance(prompt, str) or isinstance(continuation, str):
            raise InvalidRequestError("text needs a tokenizer; give token ids")
        token_ids, border = [*prompt, *continuation], len(prompt)
    elif isinstance(prompt, str) and isinstance(continuation, str):
        token_ids = tokenizer.encode(prompt + continuation)
        border = _num_common(tokenizer.encode(prompt), token_ids)
    else:
        before = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        behind = continuation
        if isinstance(behind, str):
            behind = tokenizer.encode(behind, add_special_tokens=False)
        token_ids, border = [*before, *behind], len(before)
    if border == 0:
        raise InvalidRequestError(
            "no token of the prompt is in front of the continuation, whose first token so has no "
            "probability; give a prompt of at least 1 token, such as the one that begins a text"
        )
    if border == len(token_ids):
        raise InvalidRequestError("the continuation is empty; it must have at least 1 token")
    return token_ids, border


def score_of(output: RequestOutput, border: int) -> Score:
    """The score of all tokens from `border` on, of a request with the parameters `SCORING`."""
    assert output.prompt_logprobs is not None
    token_ids = output.prompt_token_ids[border:]
    found = output.prompt_logprobs[border - 1 :]  # the first token has none
    logprobs = tuple(entry.sampled for entry in found)
    is_greedy = all(
        entry.top[0][0] == token_id for entry, token_id in zip(found, token_ids, strict=True)
    )
    return Score(token_ids, logprobs, math.fsum(logprobs), is_greedy)


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
