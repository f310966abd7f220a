"""Which pages of the KV pool are free, and how many hold on to the others.

Knows ids only: not what a page contains, nor whose it is. A freed page may be given out again at once,
because plans run on the device in the order in which they were made: whatever an earlier plan still
writes to the page is written before the new holder's first row.
"""

from collections.abc import Sequence


class PageAllocator:
    """Pages `[0, num_pages)`, each free or held by one or more holders."""

    def __init__(self, num_pages: int) -> None:
        self._num_holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        # A stack: the page freed last is given out first, while it may still be in the processor's cache.

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._num_holders) - len(self._free)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Take pages, with one holder each; None, and nothing taken, if fewer are free."""
        first = len(self._free) - num_pages
        if first < 0:
            return None
        page_ids = self._free[first:]
        del self._free[first:]
        page_ids.reverse()
        for page_id in page_ids:
            self._num_holders[page_id] = 1
        return page_ids

    def share(self, page_ids: Sequence[int]) -> None:
        """Add a holder to pages in use."""
        for page_id in page_ids:
            if self._num_holders[page_id] == 0:
                raise RuntimeError(f"page {page_id} is free and cannot be shared")
            self._num_holders[page_id] += 1

    def free(self, page_ids: Sequence[int]) -> None:
        """Take one holder from each page; pages without a holder become free."""
        for page_id in reversed(page_ids):
            if self._num_holders[page_id] == 0:
                raise RuntimeError(f"page {page_id} is free already")
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id] == 0:
                self._free.append(page_id)

    def num_holders(self, page_id: int) -> int:
        return self._num_holders[page_id]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every page is either free, once, or held."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a page is on the free list twice")
        for page_id, num_holders in enumerate(self._num_holders):
            if num_holders < 0 or (num_holders == 0) != (page_id in free):
                raise RuntimeError(f"page {page_id} has {num_holders} holders, free: {page_id in free}")
