"""Checks that the parameters of a request share."""

from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from pagedjax.errors import InvalidRequestError


def require(ok: bool, name: str, value: Any, limit: str) -> None:
    """Raise an InvalidRequestError that names field, value and limit, unless `ok`."""
    if not ok:
        raise InvalidRequestError(f"{name} is {value!r:.500}; it must be {limit}")


class FrozenMapping(Mapping[int, float]):
    """A mapping that can be hashed, as a field of a frozen dataclass must be; sorted by key."""

    def __init__(self, items: Mapping[int, float]):
        self._items = dict(sorted(items.items()))

    def __getitem__(self, key: int) -> float:
        return self._items[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


class CheckedFields:
    """For frozen dataclasses that users fill in: bad values are refused by name and limit.

    The `_to_...` methods also make plain, hashable Python values of what numpy or a list gives.
    """

    def _require(self, name: str, ok: bool, limit: str) -> None:
        require(ok, name, getattr(self, name), limit)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _to_ints(self, names: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Make plain ints of integers of any kind (numpy's too); `optional` ones may be None."""
        given = [name for name in optional if getattr(self, name) is not None]
        for name in (*names, *given):
            value = getattr(self, name)
            self._require(name, isinstance(value, Integral), "an integer")
            self._set(name, int(value))

    def _to_floats(self, names: Iterable[str]) -> None:
        """Make floats of real numbers of any kind."""
        for name in names:
            self._set(name, _to_float(getattr(self, name), name))

    def _to_bools(self, names: Iterable[str]) -> None:
        """Make plain bools; nothing else is taken for one."""
        for name in names:
            value = getattr(self, name)
            self._require(name, isinstance(value, bool | np.bool_), "True or False")
            self._set(name, bool(value))

    def _to_token_ids(self, name: str) -> None:
        """Make a tuple of plain ints."""
        value = getattr(self, name)
        self._require(name, isinstance(value, Iterable), "integers")
        ids = tuple(value)
        self._require(name, all(isinstance(i, Integral) for i in ids), "integers")
        self._set(name, tuple(int(i) for i in ids))

    def _to_strings(self, name: str) -> None:
        """Make a tuple of strings, none of them empty; a lone one is taken as one."""
        value = getattr(self, name)
        limit = "a string or strings, none of them empty"
        self._require(name, isinstance(value, Iterable), limit)
        strings = (value,) if isinstance(value, str) else tuple(value)
        self._require(name, all(isinstance(s, str) and s for s in strings), limit)
        self._set(name, strings)

    def _to_token_numbers(self, name: str) -> None:
        """Make a mapping from plain ints to floats."""
        value = getattr(self, name)
        limit = "a mapping from token ids to numbers"
        self._require(name, isinstance(value, Mapping), limit)
        self._require(name, all(isinstance(key, Integral) for key in value), limit)
        items = {int(key): _to_float(each, f"{name}[{key}]") for key, each in value.items()}
        self._set(name, FrozenMapping(items))


def _to_float(value: Any, name: str) -> float:
    require(isinstance(value, Real), name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequestError(
            f"{name} has {len(str(value))} digits; it must fit a float"
        ) from None
