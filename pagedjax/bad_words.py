"""The token sequences that a request's bad words are written with."""

from collections.abc import Container, Iterable

from pagedjax.checked import require
from pagedjax.errors import InvalidRequestError, TokenizerError
from pagedjax.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from pagedjax.tokenizer import Tokenizer


def bad_words_of(
    params: SamplingParams, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """Token ids of a request's bad words.

    Raises:
      InvalidRequestError: as for `bad_word_ids`, or something that it wants is text and there is no
        tokenizer.
    """
    if tokenizer is not None:
        return bad_word_ids(params.bad_words, tokenizer)
    for name in ("stop", "bad_words"):
        if getattr(params, name):
            raise InvalidRequestError(f"{name} is text, and there is no tokenizer for it")
    return ()


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of every word as it stands at the start of a text, and behind a space.

    A sequence that ends with another one is left out, as it cannot come about where the last token
    of the other is forbidden.

    Raises:
      InvalidRequestError: a word has no tokens or too many, or there are too many sequences.
    """
    found: dict[tuple[int, ...], str] = {}
    for word in words:
        spelt = _spellings(word, tokenizer)
        found |= {ids: word for ids in spelt if ids}
        require(any(spelt), "a word of bad_words", word, "text that the tokenizer has tokens for")
    kept = {ids: word for ids, word in found.items() if not _ends_with_another(ids, found)}
    for ids, word in kept.items():
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"{word!r:.80} of bad_words has {len(ids)} tokens; "
                f"the limit is {MAX_BAD_WORD_TOKENS}"
            )
    if len(kept) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words make {len(kept)} token sequences, the last for {[*kept.values()][-1]!r}; "
            f"the limit is {MAX_BAD_WORDS}"
        )
    return tuple(kept)


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    bare = word.removeprefix(" ")
    try:
        return [tuple(tokenizer.encode(text, False)) for text in (bare, " " + bare)]
    except TokenizerError as error:
        raise InvalidRequestError(f"bad_words: {error}") from error


def _ends_with_another(ids: tuple[int, ...], found: Container[tuple[int, ...]]) -> bool:
    longest = min(len(ids) - 1, MAX_BAD_WORD_TOKENS)
    return any(ids[-length:] in found for length in range(1, longest + 1))
