"""How a request is treated beside others, apart from how its tokens are chosen."""

import dataclasses

from pagedjax.checked import CheckedFields


@dataclasses.dataclass(frozen=True)
class RequestOptions(CheckedFields):
    """Scheduling and caching of a request.

    Attributes:
      priority: lower goes first, whatever the order of arrival, and makes higher ones give way.
      cache_salt: prefixes are shared only between requests with the same salt. A secret of the
        tenant keeps others from learning, by timing, what it has asked.
      use_prefix_cache: False neither reads nor fills the cache.

    Raises:
      InvalidRequestError: a field has the wrong type.
    """

    priority: int = 0
    cache_salt: str | None = None
    use_prefix_cache: bool = True

    def __post_init__(self) -> None:
        self._to_ints(("priority",))
        self._require("cache_salt", isinstance(self.cache_salt, str | None), "text or None")
