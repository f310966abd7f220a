"""What sequences share: which pages of a prefix a sequence finds, which it leaves behind, and whom it waits for.

Between sequences and the prefix cache; plans nothing. The device runs plans in the order made, and within a step all
rows write their KV before any reads, so a page may be shared as soon as the rows that fill it are in a plan. What is
in no plan yet, but being computed by another sequence that goes first, is waited for rather than computed twice.

Pages of a prompt are cached when planned. Those of generated tokens are cached when the last of their tokens and the
one after it were read: the KV is there by then, and rows in flight write behind it. The last pages that a sequence
fills before its end may be given away with rows in flight, so a few of its last tokens are not kept.
"""

from collections.abc import Iterable, Sequence

from twinjet.scheduler.draft import PrefixMove, StepDraft
from twinjet.scheduler.prefix_cache import PrefixCache
from twinjet.scheduler.state import SequenceState


class PrefixSharing:
    """Finds and caches pages for sequences that have `keys`; leaves others alone."""

    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self.queries_total = 0
        """Known tokens of the sequences that looked for their prefix."""
        self.hits_total = 0
        """Tokens that they found."""

    def find(self, seq: SequenceState) -> list[int]:
        """Cached pages that go on where a sequence stands, short of its last known token, which it must compute."""
        if seq.keys is None or seq.imports or seq.num_computed % self._page_size:
            return []
        found: list[int] = []
        for index in range(seq.num_computed // self._page_size, (seq.num_known - 1) // self._page_size):
            page_id = self._cache.page(seq.keys.key(index, seq.known_ids))
            if page_id is None:
                break
            found.append(page_id)
        return found

    def look(self, seq: SequenceState, claims: dict[bytes, SequenceState]) -> list[int] | None:
        """What `find` gives; None if what comes next is claimed by a sequence that goes before this one.

        The claims map the page that a sequence fills next to the first in rank of those that do.
        """
        found = self.find(seq)
        index = seq.num_computed // self._page_size + len(found)
        key = self._next_key(seq, index)
        if key is None:
            return found
        # Who is amid a page goes on with it, and who needs just its last token has no use for the page.
        waits = seq.num_computed % self._page_size == 0 and (index + 1) * self._page_size < seq.num_known
        first = claims.get(key)
        if waits and first is not None and first is not seq and first.rank < seq.rank:
            return None
        return found

    def claim(self, seq: SequenceState, num_found: int, claims: dict[bytes, SequenceState]) -> None:
        """Add the page that a sequence is to fill next, unless one that goes before it claims that."""
        key = self._next_key(seq, seq.num_computed // self._page_size + num_found)
        if key is not None and (key not in claims or seq.rank < claims[key].rank):
            claims[key] = seq

    def num_held(self, page_ids: Iterable[int]) -> int:
        """How many of these cached pages are held by a sequence, so that one more holder takes none from others."""
        return sum(not self._cache.is_idle(page_id) for page_id in page_ids)

    def attach(self, draft: StepDraft, seq: SequenceState) -> list[int]:
        """Have a sequence hold the pages that it finds, and take their tokens as computed."""
        found = self.find(seq)
        if seq.keys is not None and not seq.looked_up:
            seq.looked_up = True
            self.queries_total += seq.num_known
        if not found:
            return found
        self._cache.share(found)
        num_tokens = len(found) * self._page_size
        seq.page_ids += found
        seq.num_registered = len(seq.page_ids)
        seq.num_computed += num_tokens
        if not seq.preempted:  # its own tokens, computed before, are no hits
            seq.num_cached += num_tokens
            self.hits_total += num_tokens
        draft.prefix_moves += [PrefixMove(seq, page_id, False) for page_id in found]
        return found

    def register_planned(self, draft: StepDraft, seq: SequenceState) -> None:
        """Cache the pages that a chunk, now in the plan, fills."""
        registered = self._register(seq, seq.num_computed // self._page_size)
        draft.prefix_moves += [PrefixMove(seq, page_id, True) for page_id in registered]

    def register_read(self, seq: SequenceState) -> None:
        """Cache the pages of which all tokens, and one more, were read."""
        self._register(seq, min((seq.num_known - 1) // self._page_size, len(seq.page_ids)))

    def invalidate(self, failed: Iterable[SequenceState], steps: Iterable[StepDraft]) -> list[SequenceState]:
        """Drop the pages that failed sequences should have filled, in the step that failed or later.

        Args:
            failed: those with rows in the failed step.
            steps: the failed step and those in flight behind it, in order.

        Returns: the sequences, ended or not, that failed or hold such a page, and so compute from what is not there.
        """
        tainted = dict.fromkeys(failed)
        invalid: set[int] = set()
        for step in steps:
            for move in step.prefix_moves:
                if move.written:
                    if move.seq in tainted:
                        invalid.add(move.page_id)
                    else:
                        invalid.discard(move.page_id)  # given away meanwhile, and filled anew
                elif move.page_id in invalid:
                    tainted[move.seq] = None
        for page_id in invalid:
            self._cache.drop(page_id)
        return list(tainted)

    def _next_key(self, seq: SequenceState, index: int) -> bytes | None:
        """Key of a page whose tokens are known; None if it is not to be cached."""
        if seq.keys is None or seq.imports or (index + 1) * self._page_size > seq.num_known:
            return None
        return seq.keys.key(index, seq.known_ids)

    def _register(self, seq: SequenceState, num_pages: int) -> Sequence[int]:
        """Cache pages up to `num_pages`; returns those that were not cached under their key before."""
        if seq.keys is None or num_pages <= seq.num_registered:
            return ()
        registered: list[int] = []
        for index in range(seq.num_registered, num_pages):
            page_id = seq.page_ids[index]
            if self._cache.register(seq.keys.key(index, seq.known_ids), page_id):
                registered.append(page_id)
        seq.num_registered = num_pages
        return registered
