"""The invariants that hold between any two calls of the scheduler, checked; for tests, and for idle moments.

Reads state only.
"""

from collections import Counter

from twinjet.scheduler.prefix_cache import PrefixCache
from twinjet.scheduler.state import SequenceState


def check_sequences(
    *,
    live: dict[int, SequenceState],
    running: list[SequenceState],
    waiting: list[SequenceState],
    unread: list[SequenceState],
    free_slots: list[int],
    max_streams: int,
    cache: PrefixCache,
    num_pages: int,
    page_size: int,
    num_reserved: int,
) -> None:
    """Raise RuntimeError at the first contradiction.

    Args:
        live: all sequences not ended, by id.
        running: those with a slot, in order of rank.
        waiting: those without, and with rows still to be planned.
        unread: the sequence of each sampling row in flight.
        free_slots: slots without a sequence.
        max_streams: all slots.
        cache: of the pool's pages.
        num_pages: all pages.
        page_size: tokens per page.
        num_reserved: pages promised to running sequences and not yet given.
    """
    for seq_id, seq in live.items():
        _require(seq.sequence_id == seq_id and not seq.ended, "is live under its own id", seq)
    for seq in (*running, *waiting):
        _require(live.get(seq.sequence_id) is seq, "is live", seq)
    queued = Counter(seq.sequence_id for seq in (*running, *waiting))
    for seq in live.values():
        if queued[seq.sequence_id] == 0:
            # Draining: the last row is planned, so it is among those in flight.
            _require(seq.num_unread > 0 and seq.decoding and seq.fully_planned, "drains, or is in a queue", seq)
            _require(seq.slot is None and not seq.page_ids and seq.num_reserved == 0, "drains, so holds nothing", seq)
        else:
            _require(queued[seq.sequence_id] == 1, "is in one queue, once", seq)

    num_unread = Counter(id(seq) for seq in unread)
    for seq in live.values():
        _require(num_unread[id(seq)] == seq.num_unread, "has as many rows in flight as tokens unread", seq)
        _require(seq.num_known == len(seq.given_ids) + len(seq.new_ids), "counts its known tokens", seq)
        _require(len(seq.new_ids) + seq.num_unread <= seq.max_new_tokens, "has no row beyond its last token", seq)

    for seq in waiting:
        _require(seq.slot is None and not seq.page_ids and seq.num_reserved == 0, "waits, so holds nothing", seq)
        _require(not seq.decoding and seq.num_computed == 0, "waits, so nothing of it is computed", seq)

    for seq in running:
        _require(len(seq.page_ids) == -(-seq.num_computed // page_size), "holds pages for its computed tokens", seq)
        if seq.decoding:
            _require(seq.num_reserved == 0, "decodes, so nothing is reserved", seq)
            _require(seq.num_computed == seq.num_known + seq.num_unread - 1, "is computed up to its last token", seq)
        else:
            needed = -(-seq.num_known // page_size)
            _require(len(seq.page_ids) + seq.num_reserved == needed, "has pages for its known tokens", seq)
            _require(0 < seq.num_computed < seq.num_known, "is amid its known tokens", seq)
        _require(len(set(seq.page_ids)) == len(seq.page_ids), "holds no page twice", seq)
        _require(seq.num_registered <= len(seq.page_ids), "has cached only pages that it holds", seq)

    holders = Counter(page_id for seq in running for page_id in seq.page_ids)
    cache.check_integrity([holders[page_id] for page_id in range(num_pages)])
    for seq in running:
        # Rows in flight, or to come, write all positions from `num_known` on.
        for page_id in seq.page_ids[seq.num_known // page_size if seq.decoding else len(seq.page_ids) :]:
            _require(holders[page_id] == 1, f"alone holds page {page_id}, which it writes", seq)
    if num_reserved != sum(seq.num_reserved for seq in running) or num_reserved > cache.num_available:
        raise RuntimeError(f"{num_reserved} pages are reserved, {cache.num_available} to be had")
    slots = sorted([*free_slots, *(seq.slot for seq in running if seq.slot is not None)])
    if slots != list(range(max_streams)):
        raise RuntimeError(f"each of {max_streams} slots must be free or held once, got {slots}")
    ranks = [seq.rank for seq in running]
    if ranks != sorted(set(ranks)):
        raise RuntimeError(f"running sequences must be in order of rank, got {ranks}")


def _require(holds: bool, what: str, seq: SequenceState) -> None:
    if not holds:
        raise RuntimeError(
            f"sequence {seq.sequence_id} {what}: violated with slot {seq.slot}, pages {seq.page_ids} and "
            f"{seq.num_reserved} reserved, {seq.num_computed} computed, {seq.num_known} known, {seq.num_unread} unread"
        )
