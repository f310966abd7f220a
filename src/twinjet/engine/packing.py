"""A plan as the one packed array that a step program takes. Host-only, no queues, no device."""

from functools import lru_cache

import numpy as np

from twinjet.core.plan import PageGrant, Plan
from twinjet.core.types import SamplingParams
from twinjet.ops.batch import StepLayout

CACHED_SAMPLINGS = 4096
"""Sets of sampling parameters whose words are kept, more than there are slots: a set is packed once for each token."""


class StepPacker:
    """Holds the page tables and lays plans out for the device."""

    def __init__(self, num_slots: int, table_width: int, layouts: dict[int, StepLayout]) -> None:
        self._page_table = np.zeros((num_slots, table_width), np.int32)
        self._buckets = {rows: _Bucket(layout) for rows, layout in layouts.items()}

    def grant(self, grants: tuple[PageGrant, ...]) -> None:
        for grant in grants:
            self._page_table[grant.slot, grant.first_index : grant.first_index + len(grant.page_ids)] = grant.page_ids

    def pack(self, plan: Plan, bucket: int, tag: int) -> np.ndarray:
        """[X] int32 in the bucket's layout. Its own array each time: the device may still read the last one."""
        return self._buckets[bucket].pack(plan, self._page_table, tag)


class _Bucket:
    """One layout, and what its packed array holds where no plan fills it."""

    def __init__(self, layout: StepLayout) -> None:
        self._tile_rows = layout.tile_rows
        self._sections = layout.sections()
        self._padding = np.zeros(layout.size, np.int32)
        # A slot and a row out of range, position -1.
        self._part(self._padding, "rows")[1] = layout.num_slots
        self._part(self._padding, "rows")[2] = -1
        self._part(self._padding, "samples")[1] = layout.num_slots
        self._part(self._padding, "singles")[:] = layout.num_rows

    def _part(self, packed: np.ndarray, name: str) -> np.ndarray:
        start, stop, shape = self._sections[name]
        return packed[start:stop].reshape(shape)

    def pack(self, plan: Plan, page_table: np.ndarray, tag: int) -> np.ndarray:
        # Lists first, each then stored at once: numpy's price is by the call.
        token_ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        singles: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        samples: list[tuple[int, ...]] = []
        row = with_logprobs = 0
        for work in plan.work:
            slot, start, num_tokens = work.slot, work.start, work.num_tokens
            if num_tokens == 1:
                token_ids.append(-1 if work.token_ids is None else work.token_ids[0])
                slots.append(slot)
                positions.append(start)
                singles.append(row)
            else:
                token_ids += (-1,) * num_tokens if work.token_ids is None else work.token_ids
                slots += (slot,) * num_tokens
                positions += range(start, start + num_tokens)
                for offset in range(0, num_tokens, self._tile_rows):
                    tiles.append((slot, row + offset, min(self._tile_rows, num_tokens - offset), start + offset))
            row += num_tokens
            if work.samples:
                samples.append((row - 1, slot, start + num_tokens, *_sampling_words(work.sampling)))
                with_logprobs += work.num_logprobs is not None
        packed = self._padding.copy()
        self._part(packed, "counts")[:] = len(samples), len(singles), len(tiles), with_logprobs, tag
        self._part(packed, "rows")[:, :row] = token_ids, slots, positions
        if singles:
            self._part(packed, "singles")[: len(singles)] = singles
        if tiles:
            self._part(packed, "tiles")[: len(tiles)] = tiles
        if samples:
            self._part(packed, "samples")[:, : len(samples)] = np.array(samples, np.int32).T
        self._part(packed, "page_table")[:] = page_table
        return packed


@lru_cache(CACHED_SAMPLINGS)
def _sampling_words(sampling: SamplingParams) -> tuple[int, ...]:
    """The last of `SAMPLE_FIELDS`, each in the bits of an int32."""
    temperature, top_p, min_p = (
        np.array([sampling.temperature, sampling.top_p, sampling.min_p], np.float32).view(np.int32).tolist()
    )
    seed_low, seed_high = np.array([sampling.seed], np.uint64).view(np.int32).tolist()
    return temperature, sampling.top_k, top_p, min_p, seed_low, seed_high, sampling.choice
