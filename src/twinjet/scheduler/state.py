"""One live sequence, as far as the scheduler has planned it and read it back.

Holds numbers and ids; decides nothing.
"""

from twinjet.scheduler.prefix_cache import PageKeys
from twinjet.scheduler.sequence import SequenceSpec


class SequenceState:
    """Known tokens, computed tokens, and what the sequence holds on the device.

    It is in one of these states:
    - waiting: no slot, no pages; either new, or preempted, with `num_unread` tokens perhaps still to be read;
    - running: holds a slot; computes its known tokens in chunks, then is `decoding`;
    - draining: its last row is planned, so it holds nothing any more and only waits to be read;
    - ended: its rows still in flight are wasted.
    """

    __slots__ = (
        "awaits_prefix",
        "decoding",
        "ended",
        "export_pages",
        "given_ids",
        "imports",
        "keys",
        "last_step",
        "looked_up",
        "max_new_tokens",
        "new_ids",
        "num_cached",
        "num_computed",
        "num_known",
        "num_logprobs",
        "num_overtaken",
        "num_registered",
        "num_reserved",
        "num_unread",
        "page_ids",
        "preempted",
        "rank",
        "sampling",
        "sequence_id",
        "slot",
        "stop_token_ids",
    )

    def __init__(self, spec: SequenceSpec, rank: tuple[float, ...], keys: PageKeys | None = None) -> None:
        # Fields are copied rather than `spec` kept, because `imports` is large and to be let go early.
        self.sequence_id = spec.sequence_id
        self.given_ids = spec.token_ids
        self.max_new_tokens = spec.max_new_tokens
        self.sampling = spec.sampling
        self.stop_token_ids = spec.stop_token_ids
        self.num_logprobs = spec.num_logprobs
        # With one token to generate there is nothing to go on with elsewhere: the sequence ends as `length`.
        self.export_pages = spec.export_pages and spec.max_new_tokens > 1
        self.imports = spec.imports
        self.rank = rank
        """Lower goes first; no two are equal."""
        self.keys = keys
        """None: the prefix cache is neither looked up for it nor filled by it."""
        self.new_ids: list[int] = []
        """Generated tokens that were read back."""
        self.num_known = len(spec.token_ids)
        self.num_computed = 0
        """Positions whose KV is in the pages once all plans made so far have run."""
        self.num_unread = 0
        """Tokens that plans in flight sample."""
        self.decoding = False
        """The input of the next row is the device's own last token of the slot."""
        self.last_step = -1
        """The latest plan that it has rows in."""
        self.slot: int | None = None
        self.page_ids: list[int] = []
        self.num_reserved = 0
        """Pages set aside for its known tokens and not yet given."""
        self.num_overtaken = 0
        """Later ones admitted before it."""
        self.preempted = False
        """It was, at least once."""
        self.looked_up = False
        """The prefix cache was looked up for it, at least once."""
        self.awaits_prefix = False
        """Another sequence computes what it needs next, so it does not compete for the present plan."""
        self.num_cached = 0
        """Tokens that it found in the prefix cache rather than computed, less its own."""
        self.num_registered = 0
        """Leading pages that were offered to the prefix cache, or come from it."""
        self.ended = False

    @property
    def num_imported(self) -> int:
        return sum(pages.kv.shape[2] for pages in self.imports)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that chunks have still to compute."""
        if self.decoding:
            return 0
        return self.num_known - (self.num_computed or self.num_imported)

    @property
    def fully_planned(self) -> bool:
        """No further row is needed."""
        return self.export_pages or len(self.new_ids) + self.num_unread >= self.max_new_tokens

    def known_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens [start, stop). Copies no more than these."""
        num_given = len(self.given_ids)
        if stop <= num_given:
            return self.given_ids[start:stop]
        if start >= num_given:
            return tuple(self.new_ids[start - num_given : stop - num_given])
        return self.given_ids[start:] + tuple(self.new_ids[: stop - num_given])
