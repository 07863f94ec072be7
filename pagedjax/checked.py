"""Checks that the parameters of a request share."""

from collections.abc import Iterable
from numbers import Integral

from pagedjax.errors import InvalidRequestError


class CheckedFields:
    """For frozen dataclasses that users fill in: bad values are refused by name and limit."""

    def _require(self, name: str, ok: bool, limit: str) -> None:
        if not ok:
            raise InvalidRequestError(f"{name} is {getattr(self, name)!r}; it must be {limit}")

    def _to_ints(self, names: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Make plain ints of integers of any kind (numpy's too); `optional` ones may be None."""
        given = [name for name in optional if getattr(self, name) is not None]
        for name in (*names, *given):
            value = getattr(self, name)
            self._require(name, isinstance(value, Integral), "an integer")
            object.__setattr__(self, name, int(value))

    def _to_token_ids(self, name: str) -> None:
        """Make a tuple of plain ints."""
        value = getattr(self, name)
        self._require(name, isinstance(value, Iterable), "integers")
        ids = tuple(value)
        self._require(name, all(isinstance(i, Integral) for i in ids), "integers")
        object.__setattr__(self, name, tuple(int(i) for i in ids))
