"""The waiting queue serves by priority, then by arrival, whoever leaves in between."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedjax.request import Request
from pagedjax.waiting_queue import WaitingQueue
from tests.engine.memory_model import make_request


class QueueMachine(RuleBasedStateMachine):
    """Against a list that is sorted whenever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[Request] = []
        self.gone: list[Request] = []
        self.arrivals = 0

    @rule(priority=st.integers(-1, 1))
    def push(self, priority: int) -> None:
        self.arrivals += 1
        request = make_request([1], self.arrivals, priority=priority)
        self.queue.push(request)
        self.waiting.append(request)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.gone))
        self.gone.remove(request)
        self.queue.push(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        request = self.queue.pop()
        assert request is self._in_order()[0]
        self._leave(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(request)
        self._leave(request)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def refuses_to_remove_who_does_not_wait(self, data: st.DataObject) -> None:
        with pytest.raises(KeyError):
            self.queue.remove(data.draw(st.sampled_from(self.gone)))

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert bool(self.queue) == bool(self.waiting)
        assert list(self.queue) == self._in_order()
        assert all(request in self.queue for request in self.waiting)
        assert not any(request in self.queue for request in self.gone)
        if self.waiting:
            assert self.queue.peek() is self._in_order()[0]

    def _in_order(self) -> list[Request]:
        return sorted(self.waiting, key=lambda request: (request.priority, request.arrival))

    def _leave(self, request: Request) -> None:
        self.waiting.remove(request)
        self.gone.append(request)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_lower_priority_goes_first_and_then_who_arrived_first() -> None:
    queue = WaitingQueue()
    late, urgent, early, lazy = (
        make_request([1], arrival, priority=priority)
        for arrival, priority in [(3, 0), (9, -5), (1, 0), (0, 2)]
    )
    for request in (late, urgent, early, lazy):
        queue.push(request)
    assert [queue.pop() for _ in range(4)] == [urgent, early, late, lazy]


def test_a_preempted_request_waits_at_the_place_of_its_arrival() -> None:
    queue = WaitingQueue()
    first, second, third = (make_request([1], arrival) for arrival in range(3))
    queue.push(first)
    assert queue.pop() is first
    queue.push(third)
    queue.push(second)
    queue.push(first)
    assert list(queue) == [first, second, third]


def test_who_left_is_not_kept_forever() -> None:
    queue = WaitingQueue()
    queue.push(make_request([1], 10_000))
    for arrival in range(1000):
        request = make_request([1], arrival)
        queue.push(request)
        queue.remove(request)
        assert queue.peek().arrival == 10_000
    assert len(queue._heap) == 1


def test_who_takes_the_place_of_another_goes_when_it_would_have_gone() -> None:
    queue = WaitingQueue()
    for arrival in range(3):
        queue.push(make_request([1], arrival))
    for request in queue:
        queue.remove(request)
        queue.push(request.anew(None, set()))
    assert [queue.pop().arrival for _ in range(3)] == [0, 1, 2]
    assert not queue


def test_those_who_have_left_are_not_kept_for_ever() -> None:
    queue = WaitingQueue()
    stays = make_request([1], 0, priority=-1)
    queue.push(stays)
    for arrival in range(1, 1000):
        request = make_request([1], arrival)
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) < 30
    assert queue.pop() is stays
