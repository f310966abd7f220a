"""Lists of ids in slices: the same ids and errors as in one piece, and other tasks between."""

import asyncio
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinjet.core.errors import InvalidRequest
from twinjet.server import body as body_module
from twinjet.server.body import decode_ids, ids_decoder

DECODER = ids_decoder(50_000)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body_module, "_SLICE_BYTES", 16)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 49_999), max_size=60), st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")]))
def test_slices_make_the_same_ids(ids: list[int], separators: tuple[str, str]):
    raw = json.dumps(ids, separators=separators).encode()
    assert asyncio.run(decode_ids(DECODER, raw, "prompt")) == ids


json_values = st.recursive(
    st.integers(-5, 60_000) | st.text(max_size=4) | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.lists(json_values, max_size=5),
    st.lists(st.integers(0, 9), max_size=20),
)
def test_slices_accept_no_more_than_the_whole(before: list[int], middle: list[object], after: list[int]):
    raw = msgspec.json.encode([*before, *middle, *after])
    places: list[str] = []
    try:
        whole: object = DECODER.decode(raw)
    except msgspec.ValidationError:
        whole = None
    try:
        sliced: object = asyncio.run(decode_ids(DECODER, raw, "prompt"))
    except InvalidRequest as error:
        sliced = None
        places.append(error.param or "")
    assert sliced == whole
    assert all(place.startswith("prompt[") for place in places)


def test_a_bad_id_far_behind_is_named_by_its_place():
    raw = msgspec.json.encode([1] * 1000 + [50_000] + [1] * 1000)
    with pytest.raises(InvalidRequest, match=r"`prompt\[1000\]`: expected `int` <= 49999") as caught:
        asyncio.run(decode_ids(DECODER, raw, "prompt"))
    assert caught.value.param == "prompt[1000]"


def test_other_tasks_run_between_slices():
    turns = 0

    async def main() -> None:
        nonlocal turns
        decoding = asyncio.create_task(decode_ids(DECODER, msgspec.json.encode([7] * 1000), "prompt"))
        while not decoding.done():
            turns += 1
            await asyncio.sleep(0)
        assert decoding.result() == [7] * 1000

    asyncio.run(main())
    # 2,001 bytes in slices of 16 to 18.
    assert turns > 100
