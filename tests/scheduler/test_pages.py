import pytest

from twinjet.scheduler.pages import PageAllocator


def test_allocates_each_page_once_and_takes_nothing_when_short() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(3) == [0, 1, 2]
    assert pages.allocate(2) is None
    assert (pages.num_free, pages.num_used) == (1, 3)
    assert pages.allocate(1) == [3]
    assert pages.allocate(0) == []
    assert pages.allocate(1) is None
    pages.check_integrity()


def test_freed_pages_come_back_first() -> None:
    pages = PageAllocator(8)
    first, second = pages.allocate(2), pages.allocate(2)
    assert first is not None
    assert second is not None
    pages.free(first)
    assert pages.allocate(2) == first
    pages.check_integrity()


def test_shared_page_is_free_after_its_last_holder() -> None:
    pages = PageAllocator(2)
    page_ids = pages.allocate(1)
    assert page_ids is not None
    pages.share(page_ids)
    assert pages.num_holders(page_ids[0]) == 2
    pages.free(page_ids)
    assert pages.num_used == 1
    pages.check_integrity()
    pages.free(page_ids)
    assert pages.num_used == 0
    pages.check_integrity()


def test_free_pages_cannot_be_freed_or_shared() -> None:
    pages = PageAllocator(2)
    with pytest.raises(RuntimeError, match="free already"):
        pages.free([1])
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pages.share([1])


@pytest.mark.parametrize("damage", ["lost", "double", "held"])
def test_integrity_notices(damage: str) -> None:
    pages = PageAllocator(3)
    pages.allocate(1)
    if damage == "lost":
        pages._free.pop()
    elif damage == "double":
        pages._free.append(pages._free[0])
    else:
        pages._num_holders[2] = 1
    with pytest.raises(RuntimeError):
        pages.check_integrity()
