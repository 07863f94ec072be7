"""From token ids back to text, one token at a time and never half a character.

Every token stands for some bytes, so the text of a sequence is the UTF-8 decoding of its tokens'
bytes put together. Decoding byte by byte (rather than comparing decoded strings) makes streaming
exact and O(1) a token: an unfinished character simply waits inside the UTF-8 decoder.
"""

import codecs
import re
from collections.abc import Collection, Sequence

from pagedjax.token_bytes import TokenBytes

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_UNFINISHED_BYTES = 3  # the longest prefix of a UTF-8 character that is not yet a character


class IncrementalDetokenizer:
    """Turns the tokens a model emits into text as they come.

    The pieces joined are exactly what the output adds to the text of the prompt: spaces at the
    border are right, and a character that the prompt's last tokens began belongs to the output.

    Args:
      token_bytes: of the tokenizer whose ids these are (see `Tokenizer.detokenizer`).
      prompt_token_ids: the tokens before the output; only the last few are looked at.
      skipped: ids to leave out of the text.
      set_off: ids that a space separates from what stands next to them. What stands between two of
        them is a text of its own, whose first space is dropped where that of a whole text is.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        prompt_token_ids: Sequence[int],
        skipped: Collection[int] = (),
        set_off: Collection[int] = (),
    ):
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._set_off = set_off
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._token_bytes.utf8_errors)
        self._drops_space = self._token_bytes.strips_first_space  # of the next bytes
        self._owes_space = False  # before the next bytes
        self._has_text = False
        self._was_set_off = False  # the last token
        for token_id in self._last_tokens(prompt_token_ids):
            self.append(token_id)  # text of the prompt; an unfinished character stays pending
        self._has_output = False

    def append(self, token_id: int) -> str:
        """The text that `token_id` completes: "" while its last character is unfinished."""
        token_id = int(token_id)
        data = self._bytes(token_id)
        if not data:
            return ""
        self._has_output = True
        return _visible(self._utf8.decode(self._spaced(data, token_id in self._set_off)))

    def flush(self) -> str:
        """The rest at the end of the output: U+FFFD if it stops inside a character, else ""."""
        if not self._has_output:
            return ""  # whatever is pending is the prompt's
        return _visible(self._utf8.decode(b"", final=True))

    def _spaced(self, data: bytes, is_set_off: bool) -> bytes:
        """`data` with the space before it that it must have, without one that it must not."""
        if self._has_text and (is_set_off or self._was_set_off):
            self._owes_space = True
            self._drops_space = self._token_bytes.strips_first_space
        self._was_set_off = is_set_off
        if self._drops_space:
            self._drops_space = False
            data = data.removeprefix(b" ")
        if data and self._owes_space:
            self._owes_space = False
            data = b" " + data
        self._has_text = self._has_text or bool(data)
        return data

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._token_bytes[token_id]

    def _last_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        # UTF-8 synchronises itself: the last three bytes tell whether a character is unfinished.
        size = 0
        for start in reversed(range(len(token_ids))):
            size += len(self._bytes(int(token_ids[start])))
            if size >= _MAX_UNFINISHED_BYTES:
                return token_ids[start:]
        return token_ids


def _visible(text: str) -> str:
    """`text` with each byte that the UTF-8 decoder escaped shown as U+FFFD."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)
