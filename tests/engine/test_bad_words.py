"""Bad words become the token sequences that a model would write them with."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from pagedjax.bad_words import bad_word_ids
from pagedjax.errors import InvalidRequestError
from pagedjax.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from pagedjax.tokenizer import Tokenizer
from tests.engine.small_tokenizers import TOKENIZERS

BYTES = TOKENIZERS["byte-level"]  # every byte is a token


def words_tokenizer() -> Tokenizer:
    """Words are tokens, spaces are not; the start of a text is one too."""
    core = tokenizers.Tokenizer(models.WordLevel({"cat": 0, "dog": 1, "<s>": 2}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 2)])
    return Tokenizer(core)


def spell(text: str) -> tuple[int, ...]:
    return tuple(BYTES.encode(text, add_special_tokens=False))


def test_a_word_is_forbidden_at_the_start_of_a_text_and_behind_a_space(gemma_tokenizer: Tokenizer):
    for word in ("father", " father"):
        start, behind = bad_word_ids([word], gemma_tokenizer)
        assert gemma_tokenizer.decode(start) == "father"
        assert gemma_tokenizer.decode(behind) == " father"
        assert len(start) == len(behind) == 1


def test_words_of_several_tokens_keep_their_order(gemma_tokenizer: Tokenizer):
    found = bad_word_ids(["Four score"], gemma_tokenizer)
    assert [gemma_tokenizer.decode(ids) for ids in found] == ["Four score", " Four score"]
    assert all(len(ids) > 1 for ids in found)


def test_special_tokens_around_a_text_are_not_part_of_a_word():
    assert bad_word_ids(["cat", "dog cat"], words_tokenizer()) == ((0,),)
    assert bad_word_ids(["dog cat"], words_tokenizer()) == ((1, 0),)


def test_what_another_sequence_forbids_already_is_left_out():
    assert bad_word_ids(["b"], BYTES) == (spell("b"),)  # " b" ends with "b"
    assert bad_word_ids(["ab", "b", "b", "bb"], BYTES) == (spell("b"),)
    assert bad_word_ids(["ab", "a"], BYTES) == (spell("ab"), spell("a"))  # " ab" ends with "ab"
    assert bad_word_ids(["b", "x" * 1000 + "b"], BYTES) == (spell("b"),)
    assert bad_word_ids([], BYTES) == ()


def test_white_space_is_a_word_too():
    assert bad_word_ids([" "], BYTES) == (spell(" "),)
    assert bad_word_ids(["\n"], BYTES) == (spell("\n"),)


def test_too_many_tokens_are_refused_by_word_and_limit():
    longest = "x" * MAX_BAD_WORD_TOKENS
    assert bad_word_ids([longest], BYTES) == (spell(longest),)
    with pytest.raises(InvalidRequestError, match=r"'xxxxxxxxy' of bad_words has 9 .* limit is 8"):
        bad_word_ids(["b", longest + "y"], BYTES)


def test_too_many_sequences_are_refused_by_the_last_word_and_limit():
    words = [f"{i:03}" for i in range(MAX_BAD_WORDS + 1)]
    assert len(bad_word_ids(words[:-1], BYTES)) == MAX_BAD_WORDS
    with pytest.raises(InvalidRequestError, match=r"make 129 .* '128'; the limit is 128"):
        bad_word_ids(words, BYTES)


def test_a_word_that_the_tokenizer_cannot_write_is_refused():
    core = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(InvalidRequestError, match="a word of bad_words is 'b'"):
        bad_word_ids(["a", "b"], Tokenizer(core))
    with pytest.raises(InvalidRequestError, match="bad_words: cannot encode"):
        bad_word_ids(["\ud83c"], BYTES)
