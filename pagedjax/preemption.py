"""How a preempted request will come back: its blocks swapped to the host, or computed again."""

import dataclasses
from collections.abc import Callable
from typing import Literal

PreemptionMode = Literal["auto", "swap", "recompute"]

_NEWEST = 0.2  # weight of the newest measurement in the running mean


@dataclasses.dataclass
class PreemptionPolicy:
    """Chooses by cost: the bytes over the link, out and in, against the tokens to compute again.

    Attributes:
      mode: "auto" compares, the others are fixed.
      block_bytes: of a physical block.
      link_bytes_per_s: measures the link between device and host, when first asked.
      prefill_tokens_per_s: running mean of what steps with prompts achieved; None before the first.
    """

    mode: PreemptionMode
    block_bytes: int
    link_bytes_per_s: Callable[[], float]
    prefill_tokens_per_s: float | None = None

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take in a step that computed `num_tokens` tokens, most of them of prompts."""
        rate, old = num_tokens / seconds, self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if old is None else old + _NEWEST * (rate - old)

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to swap `num_blocks` rather than compute `num_tokens` again."""
        if self.mode != "auto":
            return self.mode == "swap"
        if self.prefill_tokens_per_s is None:  # nothing was computed yet, so nothing is lost
            return False
        swap = 2 * num_blocks * self.block_bytes / self.link_bytes_per_s()
        return swap < num_tokens / self.prefill_tokens_per_s
