"""Streaming gives exactly the text of the whole, piece by piece and never half a character."""

from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from pagedjax.errors import TokenizerError
from pagedjax.token_bytes import TokenBytes
from pagedjax.tokenizer import Tokenizer
from tests.engine.small_tokenizers import CORES, PIZZA, TOKENIZERS, ids

families = pytest.mark.parametrize("family", CORES)


def stream(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool, spaces: bool = False
) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, skip, spaces)
    return [*map(detokenizer.append, output), detokenizer.flush()]


@families
@settings(deadline=None, max_examples=200)
@given(prompt=ids, output=ids, skip=st.booleans(), spaces=st.booleans())
@example(prompt=[*PIZZA[:2]], output=[*PIZZA[2:]], skip=True, spaces=False)
@example(prompt=[*PIZZA[:3]], output=[0x41], skip=True, spaces=False)
@example(prompt=[0xFF, 0x80], output=[0x80, *PIZZA], skip=False, spaces=True)
def test_pieces_join_to_what_the_output_adds(
    family: str, prompt: list[int], output: list[int], skip: bool, spaces: bool
):
    tokenizer = TOKENIZERS[family]
    pieces = stream(tokenizer, prompt, output, skip, spaces)
    added = "".join(pieces)
    before = tokenizer.decode(prompt, skip, spaces)
    whole = tokenizer.decode(prompt + output, skip, spaces)
    # The prompt may end inside a character: its up to three U+FFFD then turn into output.
    heads = [before] + [before[:-n] for n in (1, 2, 3) if before.endswith("\ufffd" * n)]
    assert whole in [head + added for head in heads]
    for piece in pieces:
        piece.encode()  # a lone surrogate would raise


@families
@settings(deadline=None, max_examples=200)
@given(output=ids, skip=st.booleans())
def test_decoding_is_the_utf8_text_of_the_tokens_bytes(family: str, output: list[int], skip: bool):
    core, table = CORES[family]
    eos = len(table) - 1
    data = b"".join(table[i] for i in output if i < eos + (not skip))
    if family == "sentencepiece-strip":
        data = data.removeprefix(b" ")
    text = TOKENIZERS[family].decode(output, skip)
    assert "".join(stream(TOKENIZERS[family], [], output, skip)) == text
    assert text.replace("\ufffd", "") == data.decode(errors="ignore").replace("\ufffd", "")
    if family == "byte-level" or "\ufffd" not in text:
        assert text == core.decode(output, skip_special_tokens=skip)


@families
def test_unfinished_character_counts_as_the_library_counts_it(family: str):
    core, table = CORES[family]
    output = [table.index(b"a", 256 if family != "byte-level" else 0), *PIZZA[:3]]
    assert TOKENIZERS[family].decode(output) == core.decode(output)
    assert TOKENIZERS[family].decode(output).startswith("a\ufffd")


@families
def test_emoji_over_four_tokens_comes_out_whole(family: str):
    assert stream(TOKENIZERS[family], [0x41], [*PIZZA, 0x42], True) == ["", "", "", "🍕", "B", ""]


@families
def test_character_begun_in_the_prompt_belongs_to_the_output(family: str):
    for cut in (1, 2, 3):
        pieces = stream(TOKENIZERS[family], [0x41, *PIZZA[:cut]], [*PIZZA[cut:], 0x42], True)
        assert "".join(pieces) == "🍕B"


@families
def test_output_that_ends_inside_a_character_flushes_replacements_once(family: str):
    detokenizer = TOKENIZERS[family].detokenizer([0x41])
    assert [detokenizer.append(b) for b in PIZZA[:3]] == ["", "", ""]
    assert set(detokenizer.flush()) == {"\ufffd"}
    assert detokenizer.flush() == ""


@families
def test_empty_output_is_empty_even_after_an_unfinished_prompt(family: str):
    assert stream(TOKENIZERS[family], [0x41, *PIZZA[:2]], [], True) == [""]


def test_leading_space_depends_on_the_context():
    tokenizer = TOKENIZERS["sentencepiece-strip"]
    the, eos = 257, len(CORES["sentencepiece-strip"][1]) - 1
    assert stream(tokenizer, [], [the, the], True) == ["the", " the", ""]
    assert stream(tokenizer, [eos], [the, the], True) == ["the", " the", ""]
    assert stream(tokenizer, [the], [the, the], True) == [" the", " the", ""]
    assert stream(tokenizer, [eos], [the], False) == [" the", ""]


@families
def test_special_tokens_are_shown_or_skipped(family: str):
    tokenizer, eos = TOKENIZERS[family], len(CORES[family][1]) - 1
    assert stream(tokenizer, [0x41], [0x42, eos, 0x43], True) == ["B", "", "C", ""]
    assert stream(tokenizer, [0x41], [0x42, eos, 0x43], False) == ["B", "<eos>", "C", ""]


@families
@settings(deadline=None, max_examples=200)
@given(runs=st.lists(ids, min_size=1, max_size=4))
def test_spaces_stand_between_special_tokens_and_texts_decoded_one_by_one(
    family: str, runs: list[list[int]]
):
    tokenizer, eos = TOKENIZERS[family], len(CORES[family][1]) - 1
    runs = [[i for i in run if i != eos] for run in runs]
    tokens, parts = runs[0], [tokenizer.decode(runs[0])]
    for run in runs[1:]:
        tokens = [*tokens, eos, *run]
        parts += ["<eos>", tokenizer.decode(run)]
    text = tokenizer.decode(tokens, False, spaces_between_special_tokens=True)
    assert text == " ".join(part for part in parts if part)
    assert tokenizer.decode(tokens, True, True) == tokenizer.decode(tokens, True, False)


def test_a_space_goes_between_the_special_token_of_the_prompt_and_the_output():
    tokenizer = TOKENIZERS["sentencepiece-strip"]
    the, eos = 257, len(CORES["sentencepiece-strip"][1]) - 1
    pieces = stream(tokenizer, [0x41, eos], [the, the, eos, eos], skip=False, spaces=True)
    assert pieces == [" the", " the", " <eos>", " <eos>", ""]
    assert stream(tokenizer, [], [eos, 0x41], skip=False, spaces=True) == ["<eos>", " A", ""]


def test_work_per_token_does_not_grow():
    tokenizer = Tokenizer(CORES["byte-level"][0])
    looked_up: list[int] = []

    class Counting(TokenBytes):
        def __getitem__(self, token_id: int) -> bytes:
            looked_up.append(token_id)
            return super().__getitem__(token_id)

    tokenizer.token_bytes = Counting(CORES["byte-level"][0])
    detokenizer = tokenizer.detokenizer([0x41] * 10_000)
    assert len(looked_up) <= 6  # the last three tokens, to measure and to decode
    looked_up.clear()
    for _ in range(1000):
        detokenizer.append(0xFF)  # never completes a character
    assert len(looked_up) == 1000


def test_decoder_of_another_kind_is_refused_by_name():
    core = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    core.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(core)


@pytest.mark.parametrize(
    "decoder", [None, decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never")]
)
def test_other_supported_decoders_decode_as_the_library_does(decoder: decoders.Decoder | None):
    core = tokenizers.Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1, "▁c▁": 2}, merges=[]))
    if decoder is not None:
        core.decoder = decoder
    for output in ([0, 1, 2], [1, 0], [0, 2, 0], [1], []):
        assert Tokenizer(core).decode(output) == core.decode(output)


def test_recorded_gemma_continuations_stream_to_their_text(
    gemma_tokenizer: Tokenizer, parity_cases: dict[str, Any]
):
    for name, case in parity_cases.items():
        pieces = stream(gemma_tokenizer, case["prompt_ids"], case["continuation_ids"], True)
        assert "".join(pieces) == case["continuation_text"], name
        assert len(pieces) == len(case["continuation_ids"]) + 1
