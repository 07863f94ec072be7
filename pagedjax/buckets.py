"""The shapes a step is compiled for, listed in one place."""

import dataclasses

from pagedjax.models.decoder import INVARIANT_ROWS

_MIN_PREFILL = 16


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Shapes `(tokens, sequences)` of a step, for given limits.

    Decodes alone have one token a sequence: powers of two up to `max_num_seqs`. A step with a
    prompt in it has a power of two of tokens, and one sequence or the most there can be: the price
    of padding sequences is small there, and the number of programs to compile stays so too.

    With `is_single` every step has the largest shape, so that one program computes every token;
    both numbers are rounded up to what leaves no rows over, which some loops round differently.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    is_single: bool = False

    def pick(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """The smallest bucket that holds the step."""
        if self.is_single:
            tokens = -(-self.max_num_batched_tokens // INVARIANT_ROWS) * INVARIANT_ROWS
            few = 1 << (self.max_num_seqs - 1).bit_length()
            many = -(-self.max_num_seqs // INVARIANT_ROWS) * INVARIANT_ROWS
            return tokens, min(few, many)
        if num_tokens == num_seqs:
            size = self._round_up(num_seqs, self.max_num_seqs)
            return size, size
        tokens = self._round_up(max(num_tokens, _MIN_PREFILL), self.max_num_batched_tokens)
        return tokens, 1 if num_seqs == 1 else self.max_num_seqs

    def all(self) -> list[tuple[int, int]]:
        """Every bucket that `pick` can return, largest first."""
        sizes = range(1, self.max_num_seqs + 1)
        decodes = {self.pick(n, n) for n in sizes}
        seqs = {1, min(2, self.max_num_seqs)}
        prompts = {
            self.pick(n, s)
            for n in self._powers(self.max_num_batched_tokens)
            for s in seqs
            if n > s
        }
        return sorted(decodes | prompts, reverse=True)

    @classmethod
    def _powers(cls, maximum: int) -> list[int]:
        powers = [2**i for i in range(maximum.bit_length()) if 2**i < maximum]
        return [*powers, maximum]

    @classmethod
    def _round_up(cls, n: int, maximum: int) -> int:
        return min(1 << (n - 1).bit_length(), maximum)
