"""Moves KV pages between this process and shared memory, on a thread of its own.

Copying and checking a long prompt's pages takes tens of milliseconds; streams that run meanwhile must not wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from twinjet.core.errors import TransferFailed
from twinjet.scheduler.sequence import Exported, ImportedPages
from twinjet.wire.messages import PagesHandle
from twinjet.wire.pages import PageStore, read_pages
from twinjet.worker.process import name_thread


@dataclass(frozen=True, slots=True)
class PagesFetched:
    """The pages for a sequence are here, checked; or, with an error, are not to be had."""

    sequence_id: int
    imports: tuple[ImportedPages, ...]
    error: TransferFailed | None


@dataclass(frozen=True, slots=True)
class PagesStored:
    """The pages of a sequence are in shared memory; or, with an error, none of them is."""

    sequence_id: int
    handles: tuple[PagesHandle, ...]
    error: TransferFailed | None


TransferEvent = PagesFetched | PagesStored


@dataclass(frozen=True, slots=True)
class ExpectedPages:
    """What pages must look like to fit this engine and this sequence."""

    kv_shape: tuple[int, int, int]
    """(L, K, H)."""
    dtype: str
    most_tokens: int


class TransferThread:
    """Fetches, stores and frees in the order asked."""

    def __init__(self, store: PageStore, post: Callable[[TransferEvent], None]) -> None:
        """`store` is used on the thread only, until it has stopped. `post` is called from there."""
        self._store = store
        self._post = post
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fetch(self, sequence_id: int, handles: Sequence[PagesHandle], expected: ExpectedPages) -> None:
        """Answered by `PagesFetched`."""
        self._jobs.put(lambda: self._fetch(sequence_id, handles, expected))

    def store(self, sequence_id: int, exports: Sequence[Exported]) -> None:
        """Answered by `PagesStored`."""
        self._jobs.put(lambda: self._write(sequence_id, exports))

    def free(self, name: str) -> None:
        self._jobs.put(lambda: self._free(name))

    def stop(self, timeout_s: float) -> bool:
        """Finish what was asked, then free all segments; False if that takes longer than `timeout_s`."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._store.close()
        return True

    def _run(self) -> None:
        name_thread("transfer")
        while (job := self._jobs.get()) is not None:
            job()

    def _fetch(self, sequence_id: int, handles: Sequence[PagesHandle], expected: ExpectedPages) -> None:
        imports: list[ImportedPages] = []
        try:
            stop = 0
            for handle in handles:
                stop = _check_fit(handle, stop, expected)
                imports.append(ImportedPages(handle.start, read_pages(handle)))
        except Exception as error:
            self._post(PagesFetched(sequence_id, (), _transfer_failed(error)))
        else:
            self._post(PagesFetched(sequence_id, tuple(imports), None))

    def _write(self, sequence_id: int, exports: Sequence[Exported]) -> None:
        handles: list[PagesHandle] = []
        try:
            for export in exports:
                handles.append(self._store.write(export.kv, export.start))
        except Exception as error:
            for handle in handles:
                self._store.free(handle.name)
            self._post(PagesStored(sequence_id, (), _transfer_failed(error)))
        else:
            self._post(PagesStored(sequence_id, tuple(handles), None))

    def _free(self, name: str) -> None:
        self._store.free(name)


def _check_fit(handle: PagesHandle, start: int, expected: ExpectedPages) -> int:
    """See that pages may be imported next to those before `start`; returns the position after them."""
    L, _, num_tokens, K, H = handle.shape
    if handle.start != start or not 0 < num_tokens <= expected.most_tokens - start:
        raise TransferFailed(
            f"expected KV pages from position {start} up to {expected.most_tokens} at most, "
            f"got {num_tokens} from {handle.start}"
        )
    if expected.kv_shape != (L, K, H) or handle.dtype != expected.dtype:
        raise TransferFailed(
            f"this engine keeps KV of (layers, heads, dims) {expected.kv_shape} in {expected.dtype}, "
            f"got {(L, K, H)} in {handle.dtype}"
        )
    return start + num_tokens


def _transfer_failed(error: Exception) -> TransferFailed:
    """Whatever went wrong (no memory, say), somebody waits for an answer."""
    if isinstance(error, TransferFailed):
        return error
    return TransferFailed(f"KV pages could not be moved: {type(error).__name__}: {error}")
