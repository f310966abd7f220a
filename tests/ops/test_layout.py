"""A plan packed for the device and unpacked there again."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinjet.core.plan import PageGrant, Plan, SequenceWork
from twinjet.core.types import MAX_TOP_K, SamplingParams
from twinjet.engine.packing import StepPacker
from twinjet.ops.batch import MAX_TILE_ROWS, NUM_COUNTS, Batch, StepLayout

B, MP = 6, 8
LAYOUTS = {rows: StepLayout(rows, B, MP) for rows in (1, 7, 40, 300)}


@partial(jax.jit, static_argnums=0)
def _unpack(layout: StepLayout, packed: np.ndarray, last_token: np.ndarray) -> Batch:
    return layout.unpack(packed, last_token)  # pyright: ignore[reportArgumentType]


def unpack(layout: StepLayout, packed: np.ndarray, last_token: np.ndarray | None = None) -> Batch:
    return _unpack(layout, packed, np.zeros(B, np.int32) if last_token is None else last_token)


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, MAX_TOP_K),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 1000),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan and a bucket that it fits."""
    bucket = draw(st.sampled_from(list(LAYOUTS)))
    left, work = draw(st.integers(0, bucket)), []
    for slot in draw(st.permutations(range(B))):
        num_tokens = min(left, draw(st.sampled_from([1, 1, 2, 5, MAX_TILE_ROWS, MAX_TILE_ROWS + 1, 300])))
        if num_tokens == 0:
            break
        left -= num_tokens
        from_device = num_tokens == 1 and draw(st.booleans())
        first = draw(st.integers(0, 1 << 18))
        work.append(
            SequenceWork(
                sequence_id=slot + 100,
                slot=slot,
                start=draw(st.integers(0, 1 << 17)),
                num_tokens=num_tokens,
                token_ids=None if from_device else tuple(range(first, first + num_tokens)),
                samples=draw(st.booleans()),
                sampling=draw(sampling_params),
                num_logprobs=draw(st.sampled_from([None, None, 0, 5])),
            )
        )
    return Plan(1, tuple(work)), bucket


@settings(deadline=None, max_examples=150)
@given(plans())
def test_what_was_packed_comes_out(drawn: tuple[Plan, int]) -> None:
    plan, bucket = drawn
    layout = LAYOUTS[bucket]
    last_token = np.arange(B, dtype=np.int32) + 7000
    packed = StepPacker(B, MP, LAYOUTS).pack(plan, bucket, 9)
    assert packed.shape == (layout.size,)
    assert packed[NUM_COUNTS - 1] == 9
    batch = jax.tree.map(np.asarray, unpack(layout, packed, last_token))

    num_rows = plan.num_rows
    ids = [work.token_ids or (7000 + work.slot,) for work in plan.work]
    assert batch.token_ids[:num_rows].tolist() == [token for each in ids for token in each]
    assert batch.slot[:num_rows].tolist() == [work.slot for work in plan.work for _ in range(work.num_tokens)]
    positions = [np.arange(work.start, work.start + work.num_tokens) for work in plan.work]
    assert batch.position[:num_rows].tolist() == np.concatenate([*positions, []]).tolist()
    assert (batch.slot[num_rows:] == B).all()
    assert (batch.position[num_rows:] == -1).all()
    assert (batch.token_ids[num_rows:] >= 0).all()
    _check_samples(plan, batch)
    _check_cover(plan, batch, bucket)


def _check_samples(plan: Plan, batch: Batch) -> None:
    sampling = [work for work in plan.work if work.samples]
    samples, count = batch.samples, int(batch.samples.count)
    assert count == len(sampling)
    assert int(samples.with_logprobs) == sum(work.num_logprobs is not None for work in sampling)
    last_rows = np.cumsum([work.num_tokens for work in plan.work]) - 1
    rows = [int(row) for row, work in zip(last_rows, plan.work, strict=True) if work.samples]
    assert samples.row[:count].tolist() == rows
    assert samples.slot[:count].tolist() == [work.slot for work in sampling]
    assert samples.position[:count].tolist() == [work.start + work.num_tokens for work in sampling]
    assert (samples.slot[count:] == B).all()
    for name in ("temperature", "top_p", "min_p"):
        sent = np.array([getattr(work.sampling, name) for work in sampling], np.float32)
        np.testing.assert_array_equal(getattr(samples, name)[:count].view(np.int32), sent.view(np.int32))
    assert samples.top_k[:count].tolist() == [work.sampling.top_k for work in sampling]
    assert samples.choice[:count].tolist() == [work.sampling.choice for work in sampling]
    seeds = [(int(high) << 32) + int(low) for high, low in samples.seed[:count]]
    assert seeds == [work.sampling.seed for work in sampling]


def _check_cover(plan: Plan, batch: Batch, bucket: int) -> None:
    """Each row is in exactly one tile or single; tiles hold rows of one sequence, in order."""
    num_singles, num_tiles = int(batch.num_singles), int(batch.num_tiles)
    covered = batch.single_rows[:num_singles].tolist()
    assert (batch.single_rows[num_singles:] == bucket).all()
    starts = np.cumsum([0, *[work.num_tokens for work in plan.work]])
    assert covered == [int(row) for row, work in zip(starts, plan.work, strict=False) if work.num_tokens == 1]
    for slot, row, num_rows, position in batch.tiles[:num_tiles].tolist():
        assert 1 <= num_rows <= min(bucket, MAX_TILE_ROWS)
        rows = slice(row, row + num_rows)
        assert (batch.slot[rows] == slot).all()
        assert batch.position[rows].tolist() == list(range(position, position + num_rows))
        covered += range(row, row + num_rows)
    assert sorted(covered) == list(range(plan.num_rows))


@pytest.mark.parametrize("bucket", list(LAYOUTS))
def test_the_most_tiles_that_can_be_needed_fit(bucket: int) -> None:
    """One row over a tile in as many sequences as fit, or two rows in each."""
    for size in (2, MAX_TILE_ROWS + 1):
        sizes = [min(size, bucket)] * min(B, bucket // min(size, bucket))
        work = tuple(
            SequenceWork(slot, slot, 0, rows, tuple(range(rows)), True, SamplingParams())
            for slot, rows in enumerate(sizes)
        )
        plan = Plan(1, work)
        _check_cover(plan, jax.tree.map(np.asarray, unpack(LAYOUTS[bucket], _packer().pack(plan, bucket, 9))), bucket)


def test_grants_change_their_own_entries_only() -> None:
    packer = _packer()
    packer.grant((PageGrant(2, 0, (9, 8, 7)), PageGrant(5, 0, (1,))))
    packer.grant((PageGrant(2, 3, (6,)), PageGrant(5, 0, (4, 3))))
    table = np.asarray(unpack(LAYOUTS[7], packer.pack(Plan(1), 7, 9)).page_table)
    expected = np.zeros((B, MP), np.int32)
    expected[2, :4], expected[5, :2] = [9, 8, 7, 6], [4, 3]
    np.testing.assert_array_equal(table, expected)


def test_a_packed_plan_is_not_touched_by_later_ones() -> None:
    """The device may still read it."""
    packer = _packer()
    packer.grant((PageGrant(0, 0, (5,)),))
    first = packer.pack(Plan(1), 7, 9)
    before = first.copy()
    packer.grant((PageGrant(0, 0, (6,)),))
    packer.pack(Plan(2, (SequenceWork(1, 0, 3, 1, (4,), True, SamplingParams()),)), 7, 9)
    np.testing.assert_array_equal(first, before)


def _packer() -> StepPacker:
    return StepPacker(B, MP, LAYOUTS)
