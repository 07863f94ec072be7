"""Reading a foreign configuration without overlooking anything that changes the computation."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pagedjax.models.errors import ConfigError

_REQUIRED: Any = object()


class Fields:
    """A mapping that knows which of its entries were read.

    A family takes what it understands; `finish` then refuses the first entry left that could
    change the computation. Entries that say "off" (null, false, 0, empty) never do.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        """`where` names the configuration in messages."""
        self._values = dict(values)
        self.where = where

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `key`; null counts as absent."""
        value = self._values.pop(key, None)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}: {key!r} is missing")
        return default

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """A whole number of at least 1."""
        number = self.number(key, default)
        if not number.is_integer():
            raise ConfigError(f"{self.where}: {key!r} is {number}; it must be a whole number")
        return int(number)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive number."""
        value = self.take(key, default)
        if not _is_number(value) or not 0 < value < math.inf:
            raise ConfigError(f"{self.where}: {key!r} is {value!r}; it must be a positive number")
        return float(value)

    def optional_integer(self, key: str) -> int | None:
        """Null, absent and 0 mean None."""
        return None if self._is_off(key) else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        """Null, absent and 0 mean None."""
        return None if self._is_off(key) else self.number(key)

    def _is_off(self, key: str) -> bool:
        value = self._values.get(key)
        off = value is None or (_is_number(value) and value == 0)
        if off:
            self._values.pop(key, None)
        return off

    def switch(self, key: str, default: bool = False) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key!r} is {value!r}; it must be true or false")
        return value

    def names(self, key: str, default: list[str]) -> list[str]:
        value = self.take(key, default)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{self.where}: {key!r} is {value!r}; it must be a list of names")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """A nested mapping; empty if absent."""
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key!r} is {value!r}; it must be an object")
        return dict(value)

    def choice(self, key: str, choices: Mapping[str, Any], default: Any = _REQUIRED) -> Any:
        """The meaning of one of the supported names."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(
                f"{self.where}: {key!r} is {value!r}; supported are {', '.join(choices)}"
            )
        return choices[value]

    def only(self, key: str, supported: Any) -> None:
        """Accept `key` if it is absent or has the one supported value."""
        value = self.take(key, supported)
        if value != supported:
            raise ConfigError(
                f"{self.where}: {key!r} is {value!r}; only {supported!r} is supported"
            )

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse what is left, except entries whose whole name matches a pattern of `harmless`."""
        pattern = re.compile("|".join(harmless) or r"(?!)")
        for key, value in self._values.items():
            if value and not pattern.fullmatch(key):
                raise ConfigError(
                    f"{self.where}: {key!r} is {value!r}, which is not supported here; if it does "
                    "not change what the model computes, remove it from the configuration"
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
