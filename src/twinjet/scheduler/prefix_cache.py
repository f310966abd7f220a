"""Which pages hold the KV of which prefixes, so that a prefix which was computed once need not be computed again.

Knows pages and keys: not whose the pages are, nor what a step is. A page is cached under a key that stands for all
tokens from position 0 to the page's end, so equal keys mean equal KV. Only whole pages are cached. The cache is one
holder of each of its pages; a page that has no other is *idle*, and idle pages are evicted when pages run out, the one
that was let go first first. A page that somebody else holds is never evicted.
"""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from twinjet.scheduler.pages import PageAllocator

KEY_BYTES = 32
"""Long enough that nobody finds two prefixes with one key on purpose, which would show one tenant another's."""

KnownIds = Callable[[int, int], tuple[int, ...]]
"""Token ids of positions [start, stop)."""


class PageKeys:
    """Keys of one sequence's whole pages, each made once, when it is first asked for.

    key(i) = BLAKE2b(key(i - 1), the ids of page i as int32); before page 0 stands the hash of a salt. A salt of its own
    keeps the pages of whoever sends it apart from all others'. One pool holds the KV of one model, so the model is not
    part of a key.
    """

    __slots__ = ("_keys", "_page_size", "_root")

    def __init__(self, page_size: int, salt: str) -> None:
        self._page_size = page_size
        self._root = blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def key(self, index: int, known_ids: KnownIds) -> bytes:
        """Of page `index`, all of whose tokens must be known. An id, once known, never changes."""
        keys, size = self._keys, self._page_size
        while len(keys) <= index:
            start = len(keys) * size
            ids = array("i", known_ids(start, start + size)).tobytes()
            keys.append(blake2b((keys[-1] if keys else self._root) + ids, digest_size=KEY_BYTES).digest())
        return keys[index]


class PrefixCache:
    """Gives out the pages of an allocator, keeping those that were registered until they are needed."""

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}
        """Pages that only the cache holds, the one that was let go first first. Used as an ordered set."""
        self.evictions_total = 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return self._pages.num_free + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages that sequences hold."""
        return self._pages.num_used - len(self._idle)

    @property
    def num_cached(self) -> int:
        """Registered pages, held or idle."""
        return len(self._page_of)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Take pages, evicting idle ones where too few are free; None, and nothing evicted, if that does not do."""
        num_missing = num_pages - self._pages.num_free
        if num_missing > len(self._idle):
            return None
        for _ in range(num_missing):
            self.drop(next(iter(self._idle)))
            self.evictions_total += 1
        return self._pages.allocate(num_pages)

    def release(self, page_ids: Sequence[int]) -> None:
        """Take one holder from each page of a sequence, given in order of position.

        The last page is let go first, so that a prefix is evicted from its end.
        """
        self._pages.free(page_ids)
        for page_id in reversed(page_ids):
            if page_id in self._key_of and self._pages.num_holders(page_id) == 1:
                self._idle[page_id] = None

    def page(self, key: bytes) -> int | None:
        """The page cached under `key`."""
        return self._page_of.get(key)

    def is_idle(self, page_id: int) -> bool:
        return page_id in self._idle

    def share(self, page_ids: Sequence[int]) -> None:
        """Add a holder to cached pages, who must read them only."""
        self._pages.share(page_ids)
        for page_id in page_ids:
            self._idle.pop(page_id, None)

    def register(self, key: bytes, page_id: int) -> bool:
        """Cache a page that a sequence holds and will not write again; False if there is one of this key already."""
        if key in self._page_of:
            return False
        self._pages.share((page_id,))
        self._page_of[key] = page_id
        self._key_of[page_id] = key
        return True

    def drop(self, page_id: int) -> None:
        """Cache a page no more; whoever holds it keeps it. Pages that are not cached are left as they are."""
        key = self._key_of.pop(page_id, None)
        if key is None:
            return
        del self._page_of[key]
        self._idle.pop(page_id, None)
        self._pages.free((page_id,))

    def check_integrity(self, num_holders: Sequence[int]) -> None:
        """Raise RuntimeError unless the pages' holders are the sequences' (`num_holders[page_id]`) and the cache."""
        self._pages.check_integrity()
        if {page_id: key for key, page_id in self._page_of.items()} != self._key_of:
            raise RuntimeError("the cache's two tables contradict each other")
        for page_id, num in enumerate(num_holders):
            cached = page_id in self._key_of
            if self._pages.num_holders(page_id) != num + cached:
                raise RuntimeError(
                    f"page {page_id} has {self._pages.num_holders(page_id)} holders, but {num} sequences hold it, "
                    f"and it is {'' if cached else 'not '}cached"
                )
            if (page_id in self._idle) != (cached and num == 0):
                raise RuntimeError(f"page {page_id} is held by {num} sequences, cached: {cached}, and listed wrongly")
