"""Requests to a bucket, which run on the event loop of a thread of their own and can be given up at any time."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import obstore
from obstore.exceptions import GenericError

from ckpttool.remote.cloud import errors

T = TypeVar("T")
Condition = dict[str, str]  # `e_tag` and `version`, as far as a store has them
AT_ONCE = 32  # requests
_ATTEMPTS = 3  # where an answer broke off; obstore repeats requests that were not answered
_PAGE = 1000  # names
_BLOCK = 8 << 20
LARGEST_COPY = 5 << 30
_CALM = 0.05  # seconds


class StoredObject(NamedTuple):
    """What a store says of an object: its size, and what tells a version of it from another. Google's conditions are on
    its `generation`, which no listing has."""

    size: int
    tag: str | None
    modified: Any = None
    generation: str | None = None

    @classmethod
    def of(cls, meta: Any) -> StoredObject:
        """Return that of obstore's description."""
        tag = meta["e_tag"]
        # Azure lists them without the quotes that they have elsewhere.
        is_bare = tag is not None and tag.startswith("0x")
        return cls(meta["size"], '"' + tag + '"' if is_bare else tag, meta["last_modified"], meta["version"])

    @property
    def condition(self) -> Condition:
        """The `mode` of a `put` that replaces this version only."""
        return _condition(self.tag, self.generation)

    def is_same(self, other: StoredObject) -> bool:
        """Return whether both are the same version. Where there are no tags, sizes and times decide."""
        if self.tag is not None and other.tag is not None:
            return self.size == other.size and self.tag == other.tag
        return self.size == other.size and self.modified == other.modified


async def _awaited(blocks: Iterator[T]) -> AsyncIterator[T]:
    """Yield blocks that may have to be waited for. obstore takes an iterator's in one of its few threads, in which the
    read that a block waits for may be."""
    while True:
        taking: Future[T | None] = Future()
        threading.Thread(target=_take, args=(blocks, taking), name="ckpttool-block", daemon=True).start()
        block = await asyncio.wrap_future(taking)
        if block is None:
            return
        yield block


def _take(blocks: Iterator[T], taking: Future[T | None]) -> None:
    if taking.set_running_or_notify_cancel():
        try:
            taking.set_result(next(blocks, None))
        except BaseException as error:
            taking.set_exception(error)


def _condition(tag: str | None, generation: str | None) -> Condition:
    both = {"e_tag": tag, "version": generation}
    return {name: value for name, value in both.items() if value is not None}


class ChangedError(Exception):
    """An object is not of the version that was listed."""


@cache
def _leave_calmly() -> None:
    """Let threads of obstore come to the end of their last request before Python ends: one that calls Python later
    aborts the process."""
    atexit.register(time.sleep, _CALM)


class Client:
    """Makes requests to one bucket; each method returns a future, which can be cancelled."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: asyncio.Semaphore | None = None

    def head(self, name: str) -> Future[StoredObject]:
        """Ask what an object is. FileNotFoundError if there is none."""
        return self._start_repeated(partial(self._head, name))

    def first(self, name: str, end: int) -> Future[tuple[StoredObject, memoryview]]:
        """Ask what an object is, and for its first bytes, of a server that lists nothing."""
        return self._start_repeated(partial(self._range, name, 0, end))

    def read(self, name: str, start: int, end: int, known: StoredObject) -> Future[memoryview]:
        """Read a range of an object. ChangedError if it is not the one that is known."""
        return self._start_repeated(partial(self._read, name, start, end, known))

    def list_all(self, prefix: str, most: int) -> Future[dict[str, StoredObject]]:
        """List all objects below a prefix, of which one more than `most` is enough."""
        return self._start_repeated(partial(self._list_all, prefix, most))

    def list_folder(self, prefix: str) -> Future[tuple[list[str], dict[str, StoredObject]]]:
        """List the folders and the objects right below a prefix."""
        return self._start_repeated(partial(self._list_folder, prefix))

    def get(self, name: str) -> Future[tuple[StoredObject, bytes]]:
        """Read a small object. FileNotFoundError if there is none."""
        return self._start_repeated(partial(self._get, name))

    def put(self, name: str, data: Any, mode: Any = None, **options: Any) -> Future[Condition]:
        """Write an object of bytes, or of an iterator of blocks of `chunk_size`, in one step, and return its
        `condition`. `mode` is `create`, or the condition of what is replaced."""
        return self.start(partial(self._put, name, data, mode, options))

    def copy(self, name: str, to: str, known: StoredObject) -> Future[None]:
        """Copy an object within the store, whose bytes stay there unless they are more than S3 copies."""
        return self._start_repeated(partial(self._copy, name, to, known))

    def delete(self, names: Sequence[str]) -> Future[None]:
        """Delete objects; those that are not there do not matter."""
        return self._start_repeated(partial(self._delete, names))

    def start(self, request: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a request, which waits for its turn."""
        with self._lock:
            if self._loop is None:
                _leave_calmly()
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="ckpttool-cloud", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(self._in_turn(request), self._loop)

    def close(self) -> None:
        """Give up all requests, and end the thread."""
        with self._lock:
            loop, self._loop, self._places = self._loop, None, None
        if loop is not None:
            with suppress(Exception):
                asyncio.run_coroutine_threadsafe(_give_up(), loop).result(5)
            loop.call_soon_threadsafe(loop.stop)

    def _start_repeated(self, request: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a request that is made again if its answer breaks off."""

        async def repeated() -> T:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return await request()
                except (GenericError, errors.ShortError) as error:
                    if not errors.is_broken(error):
                        raise
            return await request()

        return self.start(repeated)

    async def _in_turn(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._places = self._places or asyncio.Semaphore(AT_ONCE)
        async with self._places:
            return await request()

    async def _head(self, name: str) -> StoredObject:
        return StoredObject.of(await obstore.head_async(self._store, name))

    async def _range(
        self, name: str, start: int, end: int, known: StoredObject | None = None
    ) -> tuple[StoredObject, memoryview]:
        options: Any = {"range": (start, end)}
        # By a weak tag no server compares.
        if known is not None and known.tag is not None and not known.tag.startswith("W/"):
            options["if_match"] = known.tag
        result = await obstore.get_async(self._store, name, options=options)
        data = memoryview(await result.bytes_async())
        there = StoredObject.of(result.meta)
        if known is not None and not known.is_same(there):
            raise ChangedError
        expected = min(end, there.size) - start
        if len(data) != expected:
            raise errors.ShortError(len(data), expected)
        return there, data

    async def _read(self, name: str, start: int, end: int, known: StoredObject) -> memoryview:
        return (await self._range(name, start, end, known))[1]

    async def _list_all(self, prefix: str, most: int) -> dict[str, StoredObject]:
        found: dict[str, StoredObject] = {}
        async for page in obstore.list(self._store, prefix or None, chunk_size=_PAGE):
            found |= {meta["path"]: StoredObject.of(meta) for meta in page}
            if len(found) > most:
                break
        return found

    async def _list_folder(self, prefix: str) -> tuple[list[str], dict[str, StoredObject]]:
        found = await obstore.list_with_delimiter_async(self._store, prefix or None)
        return list(found["common_prefixes"]), {meta["path"]: StoredObject.of(meta) for meta in found["objects"]}

    async def _get(self, name: str) -> tuple[StoredObject, bytes]:
        result = await obstore.get_async(self._store, name)
        return StoredObject.of(result.meta), bytes(await result.bytes_async())

    async def _put(self, name: str, data: Any, mode: Any, options: dict[str, Any]) -> Condition:
        data = data if isinstance(data, bytes | memoryview) else _awaited(data)
        result = await obstore.put_async(self._store, name, data, mode=mode, **options)
        return _condition(result["e_tag"], result["version"])

    async def _copy(self, name: str, to: str, known: StoredObject) -> None:
        if known.size <= LARGEST_COPY:
            await obstore.copy_async(self._store, name, to)
        else:
            block = max(_BLOCK, known.size // 9_000)  # S3 takes 10,000 parts
            await obstore.put_async(self._store, to, self._blocks(name, known, block), chunk_size=block)

    async def _blocks(self, name: str, known: StoredObject, block: int) -> AsyncIterator[memoryview]:
        for start in range(0, known.size, block):
            yield await self._read(name, start, min(start + block, known.size), known)

    async def _delete(self, names: Sequence[str]) -> None:
        with suppress(FileNotFoundError):
            await obstore.delete_async(self._store, list(names))
            return
        # In one request, unless one of them is not there, which stops some stores.
        for name in names:
            with suppress(FileNotFoundError):
                await obstore.delete_async(self._store, name)


async def _give_up() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
