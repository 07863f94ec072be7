"""The bytes behind each token id, by the rules of a tokenizer's decoder."""

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from pagedjax.errors import TokenizerError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes each token id stands for, by the rules of a tokenizer's decoder.

    Two families cover generative models: byte-level vocabularies (each character of a piece is one
    byte) and SentencePiece-style ones ("▁" is a space, "<0xE4>" is a byte). A tokenizer without a
    decoder joins its pieces with spaces. Any other decoder is refused by name.

    Attributes:
      strips_first_space: whether one space at the very start of a text is dropped (vocabularies
        that put a space before the first word).
      utf8_errors: error mode of the UTF-8 decoder. "replace" writes one U+FFFD for each broken
        sequence, "surrogateescape" stands for one U+FFFD for each broken byte: what the two
        families do.

    Raises:
      TokenizerError: the decoder is of another kind.
    """

    def __init__(self, core: tokenizers.Tokenizer):
        self.strips_first_space = False
        self.utf8_errors = "replace"
        self._core = core
        self._cache: dict[int, bytes] = {}
        self._replacements: list[tuple[str, str]] = []
        self._encode: Callable[[str], bytes] = str.encode
        for step in _decoder_steps(core):
            self._add_rule(step)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of `token_id`; empty for an id that the vocabulary does not have."""
        known = self._cache.get(token_id)
        if known is None:
            piece = self._core.id_to_token(token_id)
            known = self._cache[token_id] = b"" if piece is None else self._spell(piece)
        return known

    def _spell(self, piece: str) -> bytes:
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return self._encode(piece)

    def _add_rule(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._encode = _byte_level_encoder()
            case {"type": "ByteFallback"}:
                self._encode = _encode_byte_piece
                self.utf8_errors = "surrogateescape"
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                self._replacements.append((old, " "))
                self.strips_first_space = scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.strips_first_space = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Joined"}:
                self._encode = _encode_with_space
                self.strips_first_space = True
            case _:
                raise TokenizerError(
                    f"decoder step {step} of this tokenizer is not supported; supported are "
                    "ByteLevel, Metaspace, and Replace (of a string), ByteFallback, Fuse and "
                    "Strip of one leading space, as in SentencePiece-style tokenizers"
                )


def _decoder_steps(core: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder of `core` as a flat list of its serialized steps."""
    if core.decoder is None:
        return [{"type": "Joined"}]
    decoder = json.loads(core.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _encode_byte_piece(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else piece.encode()


def _encode_with_space(piece: str) -> bytes:
    return b" " + piece.encode()


def _byte_level_encoder() -> Callable[[str], bytes]:
    byte_of = {character: byte for byte, character in enumerate(byte_level_alphabet())}

    def encode(piece: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in piece])
        except KeyError:  # an added token, written as plain text
            return piece.encode()

    return encode


def byte_level_alphabet() -> list[str]:
    """The printable character that stands for each byte 0-255 in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are the
    characters from U+0100 on (the convention of GPT-2's vocabulary).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
