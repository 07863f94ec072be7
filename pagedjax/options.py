"""How a request is treated beside others, apart from how its tokens are chosen."""

import dataclasses
from typing import Literal, get_args

from pagedjax.checked import CheckedFields

OutputKind = Literal["cumulative", "final"]


@dataclasses.dataclass(frozen=True)
class RequestOptions(CheckedFields):
    """Scheduling and caching of a request.

    Attributes:
      priority: lower goes first, whatever the order of arrival, and makes higher ones give way.
      cache_salt: prefixes are shared only between requests with the same salt. A secret of the
        tenant keeps others from learning, by timing, what it has asked.
      use_prefix_cache: False neither reads nor fills the cache.
      output_kind: "cumulative" reports all that there is after every step that brings a token;
        "final" only the end, which saves the host work.

    Raises:
      InvalidRequestError: a field has the wrong type.
    """

    priority: int = 0
    cache_salt: str | None = None
    use_prefix_cache: bool = True
    output_kind: OutputKind = "cumulative"

    def __post_init__(self) -> None:
        self._to_ints(("priority",))
        kinds = get_args(OutputKind)
        self._require("output_kind", self.output_kind in kinds, f"one of {kinds}")
        self._require("cache_salt", isinstance(self.cache_salt, str | None), "text or None")
