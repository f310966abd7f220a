"""Sequences that wait for a slot, and which of them may have one now.

Knows how many slots and pages there are to give, not which. A sequence is admitted when pages for all its
known tokens are there, and one more for each sequence that runs besides it, so that the others' next pages
do not preempt it at once. With nothing else running every sequence fits, because the pool holds a context.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import chain, islice

from twinjet.scheduler.state import SequenceState

LOOK_AHEAD = 16
"""How many sequences without room for their pages are passed over in search of a smaller one."""

MAX_OVERTAKEN = 16
"""How often a sequence without room is overtaken before the door closes behind it until it is in."""


def _rank(seq: SequenceState) -> tuple[float, ...]:
    return seq.rank


class WaitingQueue:
    """New sequences in order of rank, and before them the preempted ones.

    While a preempted sequence waits, no new one is admitted. Everything that runs then ranks before it (it was
    the last), so it waits for no one who came later.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._preempted: list[SequenceState] = []
        self._new: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    def __iter__(self) -> Iterator[SequenceState]:
        return chain(self._preempted, self._new)

    def add(self, seq: SequenceState) -> None:
        insort(self._new, seq, key=_rank)

    def add_preempted(self, seq: SequenceState) -> None:
        insort(self._preempted, seq, key=_rank)

    def remove(self, seq: SequenceState) -> None:
        """Take out a sequence that waits no more, for whatever reason."""
        queue, index = self._find(seq)
        del queue[index]

    def admit(self, seq: SequenceState) -> None:
        """Take out a sequence that gets a slot, remembering whom it overtook."""
        queue, index = self._find(seq)
        for overtaken in islice(queue, index):
            overtaken.num_overtaken += not overtaken.awaits_prefix
        del queue[index]

    def admissible(
        self, num_slots: int, num_pages: int, num_running: int, num_found: Callable[[SequenceState], int | None]
    ) -> list[SequenceState]:
        """Those that could all be admitted now, in order of rank.

        Args:
            num_slots: free slots.
            num_pages: pages to be had that are not reserved.
            num_running: sequences that hold a slot.
            num_found: how many pages a sequence would share with running ones; None: it waits for one of these to
                compute what it needs, which costs it neither its place nor a slot.
        """
        found: list[SequenceState] = []
        for seq in islice(self._preempted or self._new, num_slots + LOOK_AHEAD):
            if len(found) == num_slots:
                break
            shared = num_found(seq)
            seq.awaits_prefix = shared is None
            if shared is None:
                if self._preempted:
                    break
                continue
            needed = self.pages_needed(seq) - shared
            if seq.num_unread == 0 and needed + num_running + len(found) <= num_pages:
                found.append(seq)
                num_pages -= needed
            elif self._preempted or seq.num_overtaken >= MAX_OVERTAKEN:
                break
        return found

    def pages_needed(self, seq: SequenceState) -> int:
        """Pages for all known tokens."""
        return -(-seq.num_known // self._page_size)

    def _find(self, seq: SequenceState) -> tuple[list[SequenceState], int]:
        for queue in (self._preempted, self._new):
            index = bisect_left(queue, seq.rank, key=_rank)
            if index < len(queue) and queue[index] is seq:
                return queue, index
        raise RuntimeError(f"sequence {seq.sequence_id} does not wait")
