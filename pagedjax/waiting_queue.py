"""Requests that wait, by priority and arrival."""

import heapq
import itertools
from collections.abc import Iterator

from pagedjax.request import Request

_SLACK = 16  # entries that may always have left


class WaitingQueue:
    """A heap over `Request.order`; leaving from the middle is O(1), amortized.

    Who has left is cleaned up when on top, and when most of the heap has left.
    """

    def __init__(self) -> None:
        # The number settles whose turn it is between a request and who takes its place.
        self._heap: list[tuple[int, int, int, Request]] = []
        self._numbers = itertools.count()
        self._members: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they will be served."""
        return iter(sorted(self._members, key=lambda request: request.order))

    def push(self, request: Request) -> None:
        self._members[request] = None
        heapq.heappush(self._heap, (*request.order, next(self._numbers), request))

    def peek(self) -> Request:
        """The one to be served next."""
        while self._heap[0][-1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._members[request]
        return request

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands.

        Raises:
          KeyError: it does not wait.
        """
        del self._members[request]
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[-1] in self._members]
            heapq.heapify(self._heap)
