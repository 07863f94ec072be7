"""Finds stop strings in a text that comes piece by piece.

The automaton of Aho and Corasick (Efficient string matching, CACM 1975): its states are the
beginnings of the stop strings, and after every character it is in the longest one that the text
ends with. So a character costs amortised O(1), however long the text and the stop strings are.
"""

import collections
from collections.abc import Iterable, Iterator


class StopFinder:
    """Looks for the stop string that is complete first; of those that end together, the longest.

    Attributes:
      pending: number of characters at the end of the text so far that a stop string may begin with.
    """

    def __init__(self, stops: Iterable[str]):
        self._state = _automaton(stops)

    @property
    def pending(self) -> int:
        return self._state.length

    def find(self, piece: str, counts: bool = True) -> tuple[str, int] | None:
        """Go on with the text.

        Args:
          counts: whether a stop string that is complete in this piece is one.

        Returns:
          The stop string and where in `piece` it ends (it may begin before), or None. Once one was
          found, the search is over.
        """
        for end, character in enumerate(piece, start=1):
            state = self._state.after(character)
            if state.stop is not None and counts:
                return state.stop, end
            while not state.successors and state.shorter is not None:
                state = state.shorter  # no stop string goes on from here
            self._state = state
        return None


class _State:
    """A beginning of one or more stop strings, which the text ends with.

    Attributes:
      length: in characters.
      successors: the beginnings that are one character longer.
      shorter: the longest shorter beginning that this one ends with; None for the empty one.
      stop: the longest stop string that this one ends with, or None.
    """

    __slots__ = ("length", "shorter", "stop", "successors")

    def __init__(self, length: int, shorter: "_State | None" = None):
        self.length = length
        self.successors: dict[str, _State] = {}
        self.shorter = shorter
        self.stop: str | None = None

    def after(self, character: str) -> "_State":
        state = self
        while character not in state.successors:
            if state.shorter is None:
                return state
            state = state.shorter
        return state.successors[character]


def _automaton(stops: Iterable[str]) -> _State:
    """The empty beginning, from which all others are reached."""
    root = _State(0)
    for stop in stops:
        state = root
        for character in stop:
            if character not in state.successors:
                state.successors[character] = _State(state.length + 1, root)
            state = state.successors[character]
        state.stop = stop
    for state in _by_length(root):
        for character, longer in state.successors.items():
            if state.shorter is not None:
                longer.shorter = state.shorter.after(character)
            if longer.stop is None and longer.shorter is not None:
                longer.stop = longer.shorter.stop
    return root


def _by_length(root: _State) -> Iterator[_State]:
    """All states, the short ones first."""
    queue = collections.deque([root])
    while queue:
        state = queue.popleft()
        yield state
        queue.extend(state.successors.values())
