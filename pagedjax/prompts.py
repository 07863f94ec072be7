"""Prompts at the door: text or token ids, checked."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from pagedjax.errors import InvalidRequestError, TokenizerError
from pagedjax.tokenizer import Tokenizer

Prompt = str | list[int]


def prompt_token_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int
) -> list[int]:
    """Tokens of a prompt.

    Raises:
      InvalidRequestError: it is empty, leaves no room for a token within `max_model_len`, holds
        what is not a token of the vocabulary, or is text and there is no tokenizer.
    """
    token_ids = _encode(prompt, tokenizer) if isinstance(prompt, str) else prompt
    if not len(token_ids):
        raise InvalidRequestError("the prompt is empty; it must have at least 1 token")
    if len(token_ids) >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(token_ids)} tokens; with max_model_len {max_model_len} it can "
            f"have at most {max_model_len - 1}, so that one more fits"
        )
    for token_id in token_ids:
        if not isinstance(token_id, Integral):
            raise InvalidRequestError(f"token id {token_id!r} is not an integer")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"token id {token_id} is not in [0, {vocab_size})")
    return [int(token_id) for token_id in token_ids]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one text, one list of token ids, or many of either."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], Integral) else items


def _encode(prompt: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise InvalidRequestError("a text prompt needs a tokenizer; give token ids")
    if not prompt:
        raise InvalidRequestError("the prompt is empty; it must have at least 1 token")
    try:
        return tokenizer.encode(prompt)
    except TokenizerError as error:
        raise InvalidRequestError(str(error)) from error
