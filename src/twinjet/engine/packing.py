"""A plan as the one packed array that a step program takes. Host-only, no queues, no device."""

import numpy as np

from twinjet.core.plan import PageGrant, Plan
from twinjet.ops.batch import StepLayout


class StepPacker:
    """Holds the page tables and lays plans out for the device."""

    def __init__(self, num_slots: int, table_width: int, layouts: dict[int, StepLayout]) -> None:
        self._page_table = np.zeros((num_slots, table_width), np.int32)
        self._num_slots = num_slots
        self._sections = {rows: (layout, layout.sections()) for rows, layout in layouts.items()}

    def grant(self, grants: tuple[PageGrant, ...]) -> None:
        for grant in grants:
            self._page_table[grant.slot, grant.first_index : grant.first_index + len(grant.page_ids)] = grant.page_ids

    def pack(self, plan: Plan, bucket: int) -> np.ndarray:
        """[X] int32 in the bucket's layout. Its own array each time: the device may still read the last one."""
        layout, sections = self._sections[bucket]
        packed = np.zeros(layout.size, np.int32)
        part = {name: packed[a:b].reshape(shape) for name, (a, b, shape) in sections.items()}
        rows, samples, singles, tiles = part["rows"], part["samples"], part["singles"], part["tiles"]
        # Padding: a slot and a row out of range, position -1.
        rows[1], rows[2], samples[1], singles[:] = self._num_slots, -1, self._num_slots, bucket
        row = num_samples = num_singles = num_tiles = with_logprobs = 0
        for work in plan.work:
            stop = row + work.num_tokens
            rows[0, row:stop] = -1 if work.token_ids is None else work.token_ids
            rows[1, row:stop] = work.slot
            rows[2, row:stop] = np.arange(work.start, work.start + work.num_tokens)
            if work.num_tokens == 1:
                singles[num_singles] = row
                num_singles += 1
            else:
                for offset in range(0, work.num_tokens, layout.tile_rows):
                    size = min(layout.tile_rows, work.num_tokens - offset)
                    tiles[num_tiles] = work.slot, row + offset, size, work.start + offset
                    num_tiles += 1
            if work.samples:
                self._pack_sample(samples, num_samples, stop - 1, work)
                num_samples += 1
                with_logprobs += work.num_logprobs is not None
            row = stop
        part["counts"][:] = num_samples, num_singles, num_tiles, with_logprobs
        part["page_table"][:] = self._page_table
        return packed

    def _pack_sample(self, samples: np.ndarray, index: int, row: int, work) -> None:
        sampling = work.sampling
        floats = np.array([sampling.temperature, sampling.top_p, sampling.min_p], np.float32).view(np.int32)
        seed = np.array([sampling.seed], np.uint64).view(np.int32)  # low word, high word
        samples[:, index] = (
            row,
            work.slot,
            work.start + work.num_tokens,
            floats[0],
            sampling.top_k,
            floats[1],
            floats[2],
            seed[0],
            seed[1],
            sampling.choice,
        )
