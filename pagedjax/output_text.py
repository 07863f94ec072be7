"""The text of one sequence, token by token, up to its stop string."""

from collections.abc import Sequence

from pagedjax.sampling_params import SamplingParams
from pagedjax.stop_strings import StopFinder
from pagedjax.tokenizer import Tokenizer


class OutputText:
    """What a sequence of tokens reads as, and where a stop string ends it.

    Text that may yet turn out to be the beginning of a stop string is held back until it is known
    not to be, so what has been shown is never taken back. With `include_stop_str_in_output` nothing
    need be held back. The prompt's text does not matter: stop strings are looked for in the output.

    A stop string counts if the token that completes it comes behind `min_tokens` others; it may
    begin earlier. Of several, the one that is complete first counts; of those that end together,
    the one that begins first. Which tokens the text is made of does not change that.

    A token costs O(its text) plus amortised O(1), however long the text already is.

    Args:
      params: the fields about text: `stop`, `include_stop_str_in_output`, `min_tokens`,
        `detokenize` (without, there is never any text), and those about special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ):
        self._stream = tokenizer.detokenizer(
            prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._finder = StopFinder(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._shows_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._pieces: list[str] = []  # shown
        self._held = ""  # behind them, the beginning of a stop string
        self._is_complete = not params.detokenize

    @property
    def so_far(self) -> str:
        """The text that may be shown. Later values begin with earlier ones."""
        text = "".join(self._pieces)
        self._pieces = [text]  # the next call joins only what is new
        return text

    def append(self, token_id: int) -> str | None:
        """Take in a token; the stop string that is now complete, else None.

        The text is then complete, and tokens behind it are disregarded.
        """
        if self._is_complete:
            return None
        self._num_tokens += 1
        piece = self._stream.append(token_id)
        if self._finder is None:
            self._pieces.append(piece)
            return None
        found = self._finder.find(piece, counts=self._num_tokens > self._min_tokens)
        if found is not None:
            self._cut(piece, *found)
            return found[0]
        text = self._held + piece
        known = len(text) if self._shows_stop else len(text) - self._finder.pending
        self._pieces.append(text[:known])
        self._held = text[known:]
        return None

    def finish(self) -> None:
        """Show what was held back; an unfinished character becomes U+FFFD.

        That is no place to find a stop string in.
        """
        if not self._is_complete:
            self._pieces.append(self._held + self._stream.flush())
            self._is_complete = True

    def _cut(self, piece: str, stop: str, end: int) -> None:
        """Complete the text: `stop` ends at `end` in `piece`."""
        end += len(self._held)
        text = self._held + piece
        self._pieces.append(text[: end if self._shows_stop else end - len(stop)])
        self._is_complete = True
