"""What a request asks of the sampler."""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from pagedjax.checked import CheckedFields, require

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries of `logit_bias`
MAX_BAD_WORDS = 128  # token sequences that the `bad_words` of a request become
MAX_BAD_WORD_TOKENS = 8  # of each of these
_MAX_BIAS = 100.0
_MAX_PENALTY = 2.0

_INTS = ("max_tokens", "min_tokens", "top_k", "n")
_OPTIONAL_INTS = ("seed", "logprobs", "prompt_logprobs", "best_of")
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_BOOLS = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
)


@dataclasses.dataclass(frozen=True)
class SamplingParams(CheckedFields):
    """How the tokens of one request are chosen. Field names and meanings follow vLLM.

    A token's logits go through these, in this order; what is off costs nothing:
    `logits_processor`, `logit_bias`, `repetition_penalty`, `frequency_penalty`, `presence_penalty`;
    then `allowed_token_ids`, `bad_words` and `min_tokens`, which forbid tokens; `temperature`,
    `min_p`, `top_k`, `top_p`. A greedy request takes the likeliest token before the last four.
    "Output" below is what the request has generated so far, without its prompt. Sequences become
    tuples, mappings are copied, so that params can be hashed and shared.

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
        (of the model's own distribution, before all of the above); None for none.
      prompt_logprobs: the same for every prompt token but the first.
      n: how many continuations to return. The prompt is computed and stored once for all.
      best_of: how many to sample, at least `n`; the `n` with the highest mean log-probability a
        token are returned, best first. None: `n`, in the order in which they were seeded.
      min_p: keep the tokens that are at least `min_p` times as likely as the likeliest one, after
        `temperature`, in [0, 1] (Nguyen et al., arXiv:2407.01082); 0 keeps all.
      presence_penalty: taken from the logit of every token that is in the output, in [-2, 2].
      frequency_penalty: the same, times how often the token is there, in [-2, 2].
      repetition_penalty: of every token that is in the prompt or the output, a positive logit is
        divided by it, a negative one multiplied (Keskar et al., arXiv:1909.05858); 1 is off.
      stop: strings that end the request as soon as the output's text has one of them; the text ends
        before it. A lone string is taken as one. They are looked for in the text as it is returned.
      min_tokens: how many tokens come before one that may end the request: until then, the tokens
        that would are forbidden, and a stop string that is complete is text like any other.
      logit_bias: added to the logits of these tokens, in [-100, 100]; at most 1024 of them.
      allowed_token_ids: no other token is generated, ever; None allows all.
      bad_words: words that are not generated: the last token of one is forbidden where the others
        are the end of the output. A word is forbidden as it is tokenized at the start of a text and
        behind a space, also as the beginning of a longer one; spelt with other tokens it passes.
        At most 128 such sequences, of at most 8 tokens.
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: if they are in it, put a space between one and its neighbours.
      include_stop_str_in_output: let the text end behind the stop string.
      detokenize: make text of the tokens; without, there can be no `stop`.
      logits_processor: a function from logits f32[V] and a `LogitsContext` to new logits f32[V]. It
        runs on the device as a part of the step, so it must be pure and traceable by JAX. Give
        requests the same function object: a new one compiles the step again.

    Raises:
      InvalidRequestError: a field is out of its range, or contradicts another.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    logits_processor: Callable[..., Any] | None = None

    @property
    def num_samples(self) -> int:
        """Sequences to sample."""
        return self.n if self.best_of is None else self.best_of

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the output are to be computed, for whatever reason."""
        return self.logprobs is not None or self.num_samples > self.n

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but temperature, min_p, top_k and top_p changes the distribution."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
            or self.min_tokens > 0
            or self.logits_processor is not None
        )

    def ending_token_ids(self, eos_ids: Collection[int]) -> frozenset[int]:
        """Tokens that end the request, of a model with these end-of-sequence tokens."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_ids)

    def __post_init__(self) -> None:
        self._normalize()
        self._check_distribution()
        self._check_adjustments()
        self._check_length()
        self._check_samples()

    def _normalize(self) -> None:
        """Refuse values of a wrong type."""
        self._to_ints(_INTS, _OPTIONAL_INTS)
        self._to_floats(_FLOATS)
        self._to_bools(_BOOLS)
        self._to_token_ids("stop_token_ids")
        if self.allowed_token_ids is not None:
            self._to_token_ids("allowed_token_ids")
        self._to_strings("stop")
        self._to_strings("bad_words")
        self._to_token_numbers("logit_bias")

    def _check_distribution(self) -> None:
        self._require("temperature", 0 <= self.temperature < float("inf"), "finite and at least 0")
        self._require("top_k", self.top_k >= 0, "at least 0 (0: all)")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._require("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        in_range = self.seed is None or 0 <= self.seed < 2**63
        self._require("seed", in_range, "in [0, 2**63)")

    def _check_adjustments(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            in_range = -_MAX_PENALTY <= getattr(self, name) <= _MAX_PENALTY
            self._require(name, in_range, f"in [{-_MAX_PENALTY}, {_MAX_PENALTY}]")
        in_range = 0 < self.repetition_penalty < float("inf")
        self._require("repetition_penalty", in_range, "finite and above 0")
        for token_id, bias in self.logit_bias.items():
            in_range = -_MAX_BIAS <= bias <= _MAX_BIAS
            require(in_range, f"logit_bias[{token_id}]", bias, f"in [{-_MAX_BIAS}, {_MAX_BIAS}]")
        few = len(self.logit_bias) <= MAX_LOGIT_BIAS
        self._require("logit_bias", few, f"of at most {MAX_LOGIT_BIAS} tokens")
        self._require("allowed_token_ids", self.allowed_token_ids != (), "None or not empty")
        few = len(self.bad_words) <= MAX_BAD_WORDS
        self._require("bad_words", few, f"at most {MAX_BAD_WORDS} words")
        processor = self.logits_processor
        usable = processor is None or (callable(processor) and isinstance(processor, Hashable))
        self._require("logits_processor", usable, "None or a function, and hashable")

    def _check_length(self) -> None:
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        in_range = 0 <= self.min_tokens <= self.max_tokens
        self._require("min_tokens", in_range, f"in [0, {self.max_tokens}], up to max_tokens")
        findable = not self.stop or self.detokenize
        self._require("stop", findable, "empty with detokenize=False, which leaves no text")

    def _check_samples(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            in_range = value is None or 0 <= value <= MAX_LOGPROBS
            self._require(name, in_range, f"in [0, {MAX_LOGPROBS}]")
        self._require("n", self.n >= 1, "at least 1")
        in_range = self.best_of is None or self.best_of >= self.n
        self._require("best_of", in_range, f"at least n, {self.n}")
        name = "n" if self.best_of is None else "best_of"
        alike = self.temperature == 0 and self.num_samples > 1
        self._require(name, not alike, "1 with temperature 0, which makes all samples alike")


def check_vocabulary(params: SamplingParams, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Check what only a model's vocabulary decides.

    Args:
      eos_ids: the model's end-of-sequence tokens.

    Raises:
      InvalidRequestError: a field names a token that is not in the vocabulary, or `min_tokens`
        forbids every token that `allowed_token_ids` allows.
    """
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token_id in getattr(params, name) or ():
            known = 0 <= token_id < vocab_size
            require(known, f"a token of {name}", token_id, f"in [0, {vocab_size}), the vocabulary")
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed is not None:
        goes_on = not params.ending_token_ids(eos_ids).issuperset(allowed)
        limit = "more than tokens that end the request, since min_tokens is above 0"
        require(goes_on, "allowed_token_ids", allowed, limit)
