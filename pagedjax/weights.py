"""Other weights for a running engine: checked, put where steps read them, and counted."""

from typing import Any, Literal, get_args

import jax
from jax.sharding import Sharding

from pagedjax.errors import ConfigError
from pagedjax.models.decoder import Params, check_same_shapes
from pagedjax.models.layout import param_formats, place_params
from pagedjax.runner import Runner

InFlight = Literal["finish", "restart"]
"""What becomes of requests that have begun when new weights come."""


class Weights:
    """Which weights the steps of an engine compute with, and which come next.

    Args:
      runner: has the parameters of its steps. sharding: where they are to be.

    Attributes:
      version: counts the changes.
    """

    def __init__(self, runner: Runner, sharding: Sharding):
        self.version = 0
        self._runner = runner
        self._sharding = sharding
        self._next: Params | None = None

    @property
    def is_pending(self) -> bool:
        """Whether others come next."""
        return self._next is not None

    def shardings(self) -> Any:
        """Where each parameter is to be: a tree of shardings, or formats on them."""
        return param_formats(self._runner.params, self._sharding)

    def propose(self, params: Params) -> None:
        """Have `params` come next; those that were to come before are dropped.

        Raises:
          ConfigError: names the parameter whose shape or dtype differs, or that was deleted.
        """
        check_same_shapes(self._runner.params, params)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ConfigError(
                    f"parameter {jax.tree_util.keystr(path)} was deleted, as by donating it to a "
                    "jitted function; give the arrays that came out of that"
                )
        self._next = place_params(params, self._sharding)

    def switch(self) -> None:
        """From here on, steps compute with what was to come next."""
        assert self._next is not None
        self._runner.params, self._next = self._next, None
        self.version += 1


def check_in_flight(in_flight: str) -> None:
    """Make sure that it says what becomes of requests that have begun.

    Raises:
      ConfigError: it does not.
    """
    if in_flight not in get_args(InFlight):
        raise ConfigError(f"in_flight is {in_flight!r}; it must be one of {get_args(InFlight)}")
