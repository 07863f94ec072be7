"""What a request asks of the sampler."""

import dataclasses
from numbers import Real

from pagedjax.checked import CheckedFields

MAX_LOGPROBS = 20
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs", "best_of")


@dataclasses.dataclass(frozen=True)
class SamplingParams(CheckedFields):
    """How the tokens of one request are chosen. Field names and meanings follow vLLM.

    Attributes:
      max_tokens: most tokens to generate, at least 1.
      temperature: 0 is greedy (argmax); otherwise logits are divided by it.
      top_k: keep the `top_k` likeliest tokens, and ties with the last of them; 0 keeps all.
      top_p: keep the likeliest tokens whose probabilities sum to at least `top_p`, in (0, 1];
        applied to what `top_k` left (nucleus sampling, Holtzman et al., arXiv:1904.09751).
      seed: makes the request's stream reproducible, whatever else is in the batch; None draws one.
      stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
      ignore_eos: go on behind an end-of-sequence token.
      logprobs: also return this many of the likeliest tokens' log-probabilities at every position
        (of the model's own distribution, before temperature, top-k and top-p); None for none.
      prompt_logprobs: the same for every prompt token but the first.
      n: how many continuations to return. The prompt is computed and stored once for all.
      best_of: how many to sample, at least `n`; the `n` with the highest mean log-probability a
        token are returned, best first. None: `n`, in the order in which they were seeded.

    Raises:
      InvalidRequestError: a field is out of its range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None

    @property
    def num_samples(self) -> int:
        """Sequences to sample."""
        return self.n if self.best_of is None else self.best_of

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the output are to be computed, for whatever reason."""
        return self.logprobs is not None or self.num_samples > self.n

    def __post_init__(self) -> None:
        self._normalize()
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        self._require("temperature", 0 <= self.temperature < float("inf"), "finite and at least 0")
        self._require("top_k", self.top_k >= 0, "at least 0 (0: all)")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        in_range = self.seed is None or 0 <= self.seed < 2**63
        self._require("seed", in_range, "in [0, 2**63)")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            in_range = value is None or 0 <= value <= MAX_LOGPROBS
            self._require(name, in_range, f"in [0, {MAX_LOGPROBS}]")
        alike = self.temperature == 0 and self.num_samples > 1
        self._require("n", self.n >= 1, "at least 1")
        in_range = self.best_of is None or self.best_of >= self.n
        self._require("best_of", in_range, f"at least n, {self.n}")
        name = "n" if self.best_of is None else "best_of"
        self._require(name, not alike, "1 with temperature 0, which makes all samples alike")

    def _normalize(self) -> None:
        """Refuse values of a wrong type."""
        for name in ("temperature", "top_p"):
            self._require(name, isinstance(getattr(self, name), Real), "a number")
        self._to_ints(("max_tokens", "top_k", "n"), optional=_OPTIONAL)
        self._to_token_ids("stop_token_ids")
