"""The waiting queue serves by priority and arrival, and lets anybody leave."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.request import Request
from pagedjax.sampling_params import SamplingParams
from pagedjax.waiting_queue import WaitingQueue


def make(arrival: int, priority: int = 0) -> Request:
    return Request(str(arrival), (1,), SamplingParams(), arrival, seed=0, priority=priority)


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while queue:
        assert queue.peek() is next(iter(queue))
        order.append(queue.pop().arrival)
    return order


def test_who_comes_first_is_served_first_unless_priority_says_otherwise() -> None:
    queue = WaitingQueue()
    for arrival, priority in ((2, 0), (0, 1), (3, -1), (1, 0)):
        queue.push(make(arrival, priority))
    assert [request.arrival for request in queue] == [3, 1, 2, 0]
    assert drain(queue) == [3, 1, 2, 0]


def test_who_comes_back_takes_its_old_place() -> None:
    queue = WaitingQueue()
    requests = [make(arrival) for arrival in range(3)]
    for request in requests:
        queue.push(request)
    assert queue.pop() is requests[0]
    queue.push(requests[0])
    assert drain(queue) == [0, 1, 2]


def test_who_does_not_wait_cannot_leave() -> None:
    with pytest.raises(KeyError):
        WaitingQueue().remove(make(0))


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 3))))
def test_any_comings_and_goings_agree_with_a_sorted_list(moves: list[tuple[str, int]]) -> None:
    queue, model = WaitingQueue(), []
    for arrival, (move, number) in enumerate(moves):
        if move == "push":
            model.append(make(arrival, priority=number))
            queue.push(model[-1])
        elif model and move == "pop":
            model.sort(key=lambda request: request.order)
            assert queue.pop() is model.pop(0)
        elif model:
            leaving = model.pop(number % len(model))
            queue.remove(leaving)
            assert leaving not in queue
        assert len(queue) == len(model)
        assert list(queue) == sorted(model, key=lambda request: request.order)
    assert drain(queue) == [r.arrival for r in sorted(model, key=lambda request: request.order)]
