"""Rows of the device state: every running sequence has one, its slot."""

from collections.abc import Iterable

from pagedjax.request import Request, Sequence


class SlotPool:
    """Gives sequences their slots and takes them back.

    A request gets the slots of all sequences that it may grow to at once; those that its later
    sequences will have are spare until then.
    """

    def __init__(self, size: int):
        self.size = size
        self._free = list(reversed(range(size)))
        self._new: list[Sequence] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, request: Request) -> None:
        """Give a request all the slots that it needs to run."""
        request.spare_slots = [self._free.pop() for _ in range(request.num_slots)]
        for seq in request.sequences:
            self.take_spare(seq)

    def take_spare(self, seq: Sequence) -> None:
        """Give a sequence one of its request's spare slots."""
        seq.slot = seq.request.spare_slots.pop()
        params = seq.request.params
        if params.adjusts_logits or params.stop_token_ids:
            self._new.append(seq)

    def release(self, seq: Sequence) -> None:
        """Take the slot of a finished sequence, if it has one."""
        if seq.slot is not None:
            # Beams that die make room for those that fork.
            is_beam = seq.request.beam_search is not None
            (seq.request.spare_slots if is_beam else self._free).append(seq.slot)
            seq.slot = None

    def release_all(self, request: Request) -> None:
        """Take all slots of a request, spare ones too."""
        for seq in request.sequences:
            if seq.slot is not None:
                self._free.append(seq.slot)
                seq.slot = None
        self._free += request.spare_slots
        request.spare_slots = []

    def take_new(self) -> list[Sequence]:
        """Sequences whose slot has yet to be told what they ask of the sampler."""
        new, self._new = self._new, []
        return [seq for seq in dict.fromkeys(new) if seq.slot is not None]

    def check(self, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        """Assert that no slot is lost or shared."""
        slots = [*self._free]
        for request in running:
            slots += request.spare_slots
            slots += [seq.slot for seq in request.sequences if seq.slot is not None]
        assert sorted(slots) == list(range(self.size)), "a slot is lost or shared"
        idle = [seq for request in waiting for seq in request.sequences]
        assert all(seq.slot is None for seq in idle), "a waiting request holds a slot"
