"""Several processes that share the copies of one job: what `torchrun` starts, on one node or on several.

    rank 0                                   every other rank
    lays the destination down                lays the same one down, sparse, in a scratch directory
    begin: where it lies, and a digest ->    join: is it there, is it the same?
    copies its share                         copies its share, syncs it
    gathered                              <- hand_in: the CRCs of what was written and read
    checks, finishes, commits
    verdict                               -> exit

Each rank computes the whole plan, which is the same everywhere, so nothing else has to be said. It is said in the
key-value store of torchrun's rendezvous (`torch.distributed.TCPStore`): without a process group there is no collective
that a dead rank could leave the others in. Whoever fails says so there; everybody looks several times a second, at the
pulse of rank 0 and rank 0 at that of all. Only rank 0 speaks to people. torch is imported here, and only when there
are several processes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ckpttool import errors
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError, StorageError
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.transfer.execute import Transferred, transfer
from ckpttool.transfer.threads import Progress

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_JOBS = itertools.count()
_POLL = 0.05
_LOOK = 0.3
_PULSE = 1.0
_DEAD = 30.0  # seconds without a pulse
_MEET = 60.0  # seconds to find the store
_LEAVE = 5.0  # seconds that somebody is waited for who ought to have gone
_INTERRUPTED = "a rank was interrupted"
_LAST_WORDS = 2.0  # seconds in which somebody who fails has said why
_PIECE = 4 << 20  # the store takes 8 MiB at most


class Crew:
    """One of the processes of a job: `Crew(rank=2, size=4, store=...)`; alone, it does everything and tells nobody."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._pulse: _Pulse | None = None
        self._looked = 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        """Which share of the plan is ours: `(2, 4)`, the third of four."""
        return self.rank, self.size

    # Rank 0 ----------------------------------------------------------------------------------------------------------

    def begin(self, partial: str, catalogue: Catalogue) -> None:
        """Tell the others where the destination lies, which has its full size now."""
        if self.size > 1:
            found = [[os.path.relpath(f.location, partial), f.size] for f in catalogue.files]
            said = {"partial": os.path.abspath(partial), "files": found, "digest": _digest(catalogue)}
            self._say("begin", json.dumps(said).encode())

    def gathered(self, moved: Transferred, source: Source, catalogue: Catalogue, how: Any) -> Transferred:
        """What all have moved, once all have; records that several read a part of are checked then. Raises the error
        of whoever failed."""
        if self.size == 1:
            return moved
        for rank in range(1, self.size):
            _unpack(self._hear(f"done/{rank}"), moved)
        checked = transfer(
            (), source, catalogue, total=moved.moved, threads=how.threads, memory=how.max_memory,
            progress=self.watching(None), earlier=moved.read,
        )  # fmt: skip
        moved.checked += checked.checked
        moved.unchecked += checked.unchecked
        return moved

    # The others ------------------------------------------------------------------------------------------------------

    def join(self, partial: str, catalogue: Catalogue) -> None:
        """Have `catalogue`, laid down at `partial`, mean the files of rank 0. Raises StorageError when they are not
        there, or are not the same."""
        said = json.loads(self._hear("begin"))
        there = said["partial"]
        if said["digest"] != _digest(catalogue):
            raise StorageError(
                f"rank {self.rank} sees another source than rank 0",
                hint="all nodes need the same files and the same version of ckpttool",
            )
        for file in catalogue.files:
            file.location = os.path.normpath(os.path.join(there, os.path.relpath(file.location, partial)))
            size = os.stat(file.location).st_size if os.path.exists(file.location) else None
            if size != file.size:
                raise StorageError(
                    f"rank {self.rank} does not see `{os.path.dirname(there)}` as rank 0 does: "
                    f"`{os.path.basename(file.location)}` is {'missing' if size is None else f'of {size} bytes'} there",
                    hint="all ranks must write to one shared file system; without one, run `ckpttool reshard` alone",
                    file=file.location, found=size, expected=file.size,
                )  # fmt: skip

    def hand_in(self, moved: Transferred, catalogue: Catalogue) -> None:
        """What was written is on disk: tell rank 0 what it was."""
        for number in sorted({file for file, _ in moved.crcs}):
            files.sync(catalogue.files[number].location)
        self._say(f"done/{self.rank}", _packed(moved))

    # Both ------------------------------------------------------------------------------------------------------------

    def exchange(self, name: str, value: Any) -> list[Any]:
        """What each process says under this name, in the order of their ranks; values are those of JSON."""
        if self.size == 1:
            return [value]
        self._say(f"{name}/{self.rank}", json.dumps(value).encode())
        return [json.loads(self._hear(f"{name}/{rank}")) for rank in range(self.size)]

    def store(self) -> Any:
        """A store in which torch may make a process group of these processes."""
        from torch.distributed import HashStore, PrefixStore

        # A connection of its own: who waits in one holds up the pulse.
        return HashStore() if self._store is None else PrefixStore("group", self._store.clone())

    def lost(self, error: CkptError) -> Exception:
        """What to raise when another process has gone in the middle of something: what it said, where it said something
        in time, else `error`. Only rank 0 is to speak of it."""
        if not self.is_first:
            return _Over()
        until = time.monotonic() + _LAST_WORDS
        while time.monotonic() < until:
            if self._store is not None and self._store.check(["failed"]):
                return self._failure()
            time.sleep(_POLL)
        return error

    def watching(self, progress: Progress | None) -> Progress | None:
        """`progress`, which also looks how the others are: what it raises stops the transfer that calls it."""
        if self.size == 1:
            return progress

        def watch(done: int, total: int) -> None:
            self._look()
            if progress is not None and self.is_first:
                # The shares are about equal, and the others are about as far.
                progress(min(done * self.size, total), total)

        return watch

    @contextmanager
    def together(self) -> Iterator[None]:
        """Everything that is done together: when the block of one ends in an error, those of all others do, with that
        error in rank 0; and nobody leaves before rank 0 has come to an end."""
        if self.size == 1:
            yield
            return
        self._pulse = _Pulse(self._store, self.rank)
        try:
            yield
            if not self.is_first:
                self._hear_verdict()
        except BaseException as error:
            told = self._told_before(error)
            with suppress(Exception):
                self._fail(error)
            if told is not None:
                raise told from None
            raise
        else:
            if self.is_first:
                self._part(b"done")
        finally:
            self._pulse.stop()

    def _failure(self) -> Exception:
        """What the process that failed first has said."""
        return _retold(json.loads(self._hear(f"failed/{int(self._store.get('failed'))}")))

    def _told_before(self, error: BaseException) -> CkptError | None:
        """Why rank 0 is being ended, where another process has said that it failed: torchrun ends all as soon as one
        has, perhaps before rank 0 has noticed. A signal that all of them got is no such reason."""
        with suppress(Exception):
            if self.is_first and isinstance(error, KeyboardInterrupt) and self._store.check(["failed"]):
                told = self._failure()
                return told if isinstance(told, CkptError) and told.message != _INTERRUPTED else None
        return None

    def _fail(self, error: BaseException) -> None:
        if self.is_first:
            self._part(b"failed")
        elif not isinstance(error, _Over):
            self._say(f"failed/{self.rank}", json.dumps(_told(error), default=str).encode())
            self._store.set("failed", str(self.rank))

    def _part(self, verdict: bytes) -> None:
        """Say how it ended. Where rank 0 keeps the store itself, it must outlive those who have yet to read that."""
        self._store.set("verdict", verdict)
        until = time.monotonic() + _LEAVE
        names = [f"left/{rank}" for rank in range(1, self.size)]
        while verdict == b"done" and time.monotonic() < until and not self._store.check(names):
            time.sleep(_POLL)

    def _hear_verdict(self) -> None:
        verdict = self._wait("verdict")
        self._store.set(f"left/{self.rank}", b"")
        if verdict != b"done":
            raise _Over

    def _say(self, key: str, data: bytes) -> None:
        pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)] or [b""]
        for i, piece in enumerate(pieces):
            self._store.set(f"{key}/{i}", piece)
        self._store.set(key, str(len(pieces)))

    def _hear(self, key: str) -> bytes:
        count = int(self._wait(key))
        return b"".join(self._store.get(f"{key}/{i}") for i in range(count))

    def _wait(self, key: str) -> bytes:
        while not self._store.check([key]):
            self._look()
            time.sleep(_POLL)
        found: bytes = self._store.get(key)
        return found

    def _look(self) -> None:
        """Raises when somebody failed or is gone."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        if self.is_first and self._store.check(["failed"]):
            raise self._failure()
        if not self.is_first and self._store.check(["verdict"]) and self._store.get("verdict") != b"done":
            raise _Over
        assert self._pulse is not None
        silent = self._pulse.silent(range(1, self.size) if self.is_first else (0,))
        if silent is not None:
            raise StorageError(
                f"rank {silent} has not been heard of for {_DEAD:.0f} s", hint="look at what its node says"
            )


ALONE = Crew()


class _Over(Exception):
    """Another rank failed, and rank 0 says so."""


def is_shared() -> bool:
    """Whether torchrun, or something that sets the same variables, started several of us."""
    return all(name in os.environ for name in _VARIABLES) and os.environ["WORLD_SIZE"] not in ("", "1")


def is_launched() -> bool:
    """Whether torchrun started us, be it alone."""
    return all(name in os.environ for name in _VARIABLES)


def is_silent() -> bool:
    """Whether another process does the talking."""
    return is_shared() and os.environ["RANK"] != "0"


def wait_to_be_ended() -> None:
    """After a failure, for a silent process: rank 0 may be about to say what is wrong, and torchrun ends all as soon as
    one has ended."""
    with suppress(KeyboardInterrupt):
        time.sleep(_LEAVE)


def meet() -> Crew:
    """The processes that torchrun started, or `ALONE`. Raises StorageError when they cannot find each other."""
    if not is_shared():
        return ALONE
    from datetime import timedelta

    with _signals_wait():
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=_MEET)))
    # Whatever it is: a wrong address, a port in use, an old torch.
    except Exception as error:
        raise StorageError(
            f"cannot find the other processes at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}",
            hint="without torchrun, unset RANK, WORLD_SIZE and LOCAL_RANK",
        ) from None
    store.set_timeout(timedelta(seconds=_DEAD))
    # What was said in an earlier job of the same processes is still there.
    return Crew(rank, size, PrefixStore(f"job{next(_JOBS)}", store))


@contextmanager
def _signals_wait() -> Iterator[None]:
    """A block after which a signal is noticed that came within. While torch is imported, it may be raised in what torch
    itself imports, and torch then goes on without numpy, as if nothing had happened."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pulse:
    """Tells the store every second that this process lives, and knows since when the others have not."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        beats = 0
        while True:
            beats += 1
            try:
                self._store.set(f"pulse/{self._rank}", str(beats))
            # The store is gone: the main thread finds out.
            except Exception:
                return
            if self._done.wait(_PULSE):
                return

    def silent(self, ranks: Any) -> int | None:
        """The first of these that has had no new pulse for too long."""
        now = time.monotonic()
        for rank in ranks:
            key = f"pulse/{rank}"
            last = self._store.get(key) if self._store.check([key]) else b""
            if rank not in self._heard or self._heard[rank][0] != last:
                self._heard[rank] = (last, now)
            elif now - self._heard[rank][1] > _DEAD:
                return int(rank)
        return None

    def stop(self) -> None:
        self._done.set()
        self._thread.join(_LEAVE)


# On the wire ----------------------------------------------------------------------------------------------------------


def _digest(catalogue: Catalogue) -> int:
    """A number that tells two layouts apart."""
    crc = 0
    for tensor in catalogue.tensors:
        crc = crc32(tensor.name.encode(errors="surrogatepass"), crc)
        crc = crc32(tensor.chunks.offset.tobytes(), crc32(tensor.chunks.file.tobytes(), crc))
    return crc


def _packed(moved: Transferred) -> bytes:
    """Numbers in one row: a checkpoint of many ranks has a million of them."""
    written = array("q", (n for (file, offset), crc in moved.crcs.items() for n in (file, offset, crc)))
    head = [moved.moved, moved.unchecked, moved.checked, len(moved.crcs)]
    return array("q", head).tobytes() + written.tobytes() + moved.read.packed()


def _unpack(data: bytes, into: Transferred) -> None:
    numbers = array("q")
    numbers.frombytes(data[: len(data) // 8 * 8])
    into.moved += numbers[0]
    into.unchecked += numbers[1]
    into.checked += numbers[2]
    end = 4 + 3 * numbers[3]
    for at in range(4, end, 3):
        into.crcs[numbers[at], numbers[at + 1]] = numbers[at + 2]
    into.read.unpack(numbers[end:])


def _told(error: BaseException) -> dict[str, Any]:
    if isinstance(error, CkptError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "facts": error.facts}
    if isinstance(error, KeyboardInterrupt):
        return {"kind": "StorageError", "message": _INTERRUPTED, "hint": None, "facts": {}}
    if isinstance(error, (OSError, MemoryError)):
        return {"kind": "StorageError", "message": str(error) or "out of memory", "hint": None, "facts": {}}
    return {"kind": "", "message": f"{type(error).__name__}: {error}", "hint": None, "facts": {}}


def _retold(said: dict[str, Any]) -> Exception:
    kind = getattr(errors, said["kind"], None) if said["kind"] else None
    if not (isinstance(kind, type) and issubclass(kind, CkptError)):
        return RuntimeError(said["message"])
    return kind(said["message"], hint=said["hint"], **said["facts"])
