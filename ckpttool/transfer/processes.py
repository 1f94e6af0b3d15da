"""Divides one transfer over several processes: those that `torchrun` starts, on one node or on several.

    rank 0                                     every other rank
    creates the destination                    creates the same one, sparse, in a scratch directory
    announces where it lies, and a digest ->   joins: is it there, is it the same?
    copies its share                           copies its share, syncs it
    collects                                <- the CRCs of what was written and read
    checks, finishes, commits
    verdict                                 -> exit

Each rank computes the whole plan, which is the same everywhere. Messages go through the key-value store of torchrun's
rendezvous, see `store`, and need no torch: without a process group there is no collective in which a dead rank could
leave the others waiting. All look in the store for a failure, and for the heartbeat of rank 0, which looks for theirs.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from ckpttool import errors
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError, StorageError, UsageError
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import local_path
from ckpttool.storage.writers import Writers
from ckpttool.transfer import plan
from ckpttool.transfer.execute import Transferred, transfer
from ckpttool.transfer.store import TorchrunStore, UnknownProtocolError
from ckpttool.transfer.threads import Progress

_UNSET = "without torchrun, unset RANK, WORLD_SIZE and LOCAL_RANK"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_JOBS = itertools.count()
_POLL = 0.05
_CHECK_INTERVAL = 0.3
_BEAT = 1.0
_DEAD_AFTER = 30.0  # seconds without a heartbeat
_MEET = 60.0  # seconds to find the store
_LEAVE = 5.0  # seconds to wait for a process that ought to have ended
_INTERRUPTED = "a rank was interrupted"
_LAST_WORDS = 2.0  # seconds in which a process that fails has reported why
_BLOCK = 4 << 20  # the store takes 8 MiB at most


T = TypeVar("T")


class Coordinator(Writers):
    """Divides one transfer over the processes of a job; this one is the only process, and does all of it."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def transfer(
        self, partial: str, created: Catalogue, source: Source, *, progress: Progress | None, **options: Any
    ) -> Transferred:
        """Fill `created`, which lies at `partial`, from the origins of its tensors; `options` are those of
        `execute.transfer`. Several processes fill the files of rank 0, which gets the result of all.

        Raises StorageError when another process does not see the same files, and what `execute.transfer` raises.
        """
        return transfer(plan.plan(created), source, created, progress=progress, **options)

    def watch(self, progress: Progress | None) -> Progress | None:
        """Return what is called during long work in place of `progress`: it raises the error of another process."""
        return progress

    def collect(self, moved: Transferred) -> None:
        """Add to what rank 0 has transferred what the others have; each waits for nothing else."""

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Return the value that each process passes under this name, in the order of their ranks; values are JSON."""
        return [value]

    def compare(self, name: str, check: Callable[[Any], None], value: Callable[[], Any]) -> None:
        """Call `check` in every other process with the value of rank 0, which is JSON. Rank 0 returns when it has
        raised nothing in any of them."""

    def take(self, name: str) -> int:
        """Return the next number under this name, from 0 on, which no other process gets."""
        self._taken[name] += 1
        return self._taken[name] - 1

    def check(self) -> None:
        """Raise the error of another process, or StorageError if one is gone. Call it often during long work."""

    def store(self) -> Any:
        """Return a store in which torch can make a process group of these processes."""
        from torch.distributed import HashStore

        return HashStore()

    def lost(self, error: CkptError) -> Exception:
        """Return what to raise when another process has ended during a collective: its own error where it reported one
        in time, else `error`. Only rank 0 reports it to the user."""
        return error


class _SharedWork(Coordinator):
    """The coordinator of one of several processes, over the key-value store of torchrun's rendezvous."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._store = store
        self._heartbeat = _Heartbeat(store, rank)
        self._checked_at = 0.0
        self._failure_of_first: Exception | None = None
        self._gathered = itertools.count()
        self._is_decided = False

    def transfer(
        self, partial: str, created: Catalogue, source: Source, *, progress: Progress | None, **options: Any
    ) -> Transferred:
        if self.is_first:
            # Where the destination lies, which has its full size now.
            message = {"partial": local_path(partial).absolute(), "digest": _digest(created)}
            self._send("begin", json.dumps(message).encode())
        else:
            self._join(partial, created)

        jobs = plan.plan(created, (self.rank, self.size))
        moved = transfer(jobs, source, created, progress=self.watch(progress), check_later=True, **options)
        if not self.is_first:
            # Rank 0 commits only what is on disk.
            for number in sorted({file for file, _ in moved.crcs}):
                files.sync(created.files[number].location)
        self.collect(moved)
        if not self.is_first:
            return moved
        # Records of which several processes read a part.
        options |= {"total": moved.moved, "journal": None}
        checked = transfer((), source, created, progress=self.watch(None), earlier=moved.read, **options)
        moved.checked += checked.checked
        moved.unchecked += checked.unchecked
        return moved

    def watch(self, progress: Progress | None) -> Progress:
        def watch(done: int, total: int) -> None:
            self._check_others()
            if progress is not None and self.is_first:
                # The shares are about equal, and the others are about as far.
                progress(min(done * self.size, total), total)

        return watch

    def collect(self, moved: Transferred) -> None:
        if not self.is_first:
            self._send(f"done/{self.rank}", _packed(moved))
        for rank in range(1, self.size) if self.is_first else ():
            _unpack(self._receive(f"done/{rank}"), moved)

    def gather(self, call: Callable[[], T]) -> list[T]:
        return self.exchange(f"gathered{next(self._gathered)}", call())

    def ended(self, error: BaseException) -> bool:
        if self.is_first:
            self._decide(_as_json(self._earlier_failure(error) or error))
        return self.is_first and self._store.check([f"left/{rank}" for rank in range(1, self.size)])

    def exchange(self, name: str, value: Any) -> list[Any]:
        self._send(f"{name}/{self.rank}", json.dumps(value).encode())
        return [json.loads(self._receive(f"{name}/{rank}")) for rank in range(self.size)]

    def compare(self, name: str, check: Callable[[Any], None], value: Callable[[], Any]) -> None:
        count = f"{name}/checked"
        if self.is_first:
            self._send(name, json.dumps(value()).encode())
            while self._store.add(count, 0) < self.size - 1:
                self._check_others()
                time.sleep(_POLL)
        else:
            check(json.loads(self._receive(name)))
            self._store.add(count, 1)

    def take(self, name: str) -> int:
        return int(self._store.add(f"{name}/taken", 1)) - 1

    def check(self) -> None:
        self._check_others()

    def store(self) -> Any:
        # A connection of its own: waiting in a shared one delays the heartbeat.
        distributed = imported_torch().distributed
        if not isinstance(self._store, TorchrunStore):
            return distributed.PrefixStore("group", self._store.clone())
        timeout = timedelta(seconds=_DEAD_AFTER)
        store = distributed.TCPStore(*self._store.address, is_master=False, timeout=timeout)
        return distributed.PrefixStore(f"{self._store.prefix}/group", store)

    def lost(self, error: CkptError) -> Exception:
        until = time.monotonic() + _LAST_WORDS
        while time.monotonic() < until:
            if self._store.check(["failed" if self.is_first else "verdict"]):
                return self._failure() if self.is_first else self._verdict() or error
            time.sleep(_POLL)
        return error

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that ends in all processes: after an error in one, with that error in each; and no process leaves
        before rank 0 has come to an end."""
        self._heartbeat.start()
        try:
            yield
            if not self.is_first:
                self._wait("verdict")
                self._store.set(f"left/{self.rank}", b"")
                if (failure := self._verdict()) is not None:
                    raise failure
        except BaseException as error:
            reason = self._earlier_failure(error) or error
            with suppress(Exception):
                if self.is_first:
                    self._decide(_as_json(reason))
                else:
                    if error is not self._failure_of_first:
                        self._send(f"failed/{self.rank}", json.dumps(_as_json(error), default=str).encode())
                        self._store.set("failed", str(self.rank))
                        if isinstance(error, StorageError):
                            # Rank 0 may have failed, and removed what this process was to write to.
                            reason = self.lost(error)
                    self._store.set(f"left/{self.rank}", b"")
            if reason is not error:
                raise reason from None
            if not self.is_first and _is_of_the_store(error):
                hint = "look at what rank 0, or its node, says"
                raise StorageError(f"rank {self.rank} lost touch with rank 0", hint=hint) from error
            raise
        else:
            if self.is_first:
                self._decide({})
        finally:
            self._heartbeat.stop()

    def _join(self, partial: str, created: Catalogue) -> None:
        """Let `created`, made at `partial`, refer to the files of rank 0. Raises StorageError when this process does
        not see them, or they are of another layout."""
        message = json.loads(self._receive("begin"))
        shared = local_path(message["partial"])
        if message["digest"] != _digest(created):
            raise StorageError(
                f"rank {self.rank} sees another source than rank 0",
                hint="all nodes need the same files and the same version of ckpttool",
            )
        for file in created.files:
            location = (shared / file.location.relative_to(partial)).absolute()
            file.location, size = location, location.size() if location.exists() else None
            if size != file.size:
                state = "missing" if size is None else f"of {size} bytes"
                raise StorageError(
                    f"rank {self.rank} does not see `{shared.parent}` as rank 0 does: "
                    f"`{location.name}` is {state} there",
                    hint="all ranks must write to one shared file system; without one, run `ckpttool reshard` alone",
                    file=file.location,
                    found=size,
                    expected=file.size,
                )

    # The end ---------------------------------------------------------------------------------------------------------

    def _failure(self) -> Exception:
        """Return the error of the process that failed first."""
        return _from_json(json.loads(self._receive(f"failed/{int(self._store.get('failed'))}")))

    def _verdict(self) -> Exception | None:
        """Return the error with which rank 0 has ended; None if it has done what it was to do."""
        verdict = json.loads(self._store.get("verdict"))
        self._failure_of_first = _from_json(verdict) if verdict else None
        return self._failure_of_first

    def _earlier_failure(self, error: BaseException) -> CkptError | None:
        """Return why rank 0 is being ended, where another process has reported an error: torchrun ends all as soon as
        one has, perhaps before rank 0 has noticed. A signal that all of them got is not such a reason."""
        with suppress(Exception):
            if self.is_first and isinstance(error, KeyboardInterrupt) and self._store.check(["failed"]):
                earlier = self._failure()
                return earlier if isinstance(earlier, CkptError) and earlier.message != _INTERRUPTED else None
        return None

    def _decide(self, verdict: dict[str, Any]) -> None:
        """Send how it ended: with an error, or with nothing. Where rank 0 keeps the store itself, it must outlive those
        who have yet to read that."""
        if self._is_decided:
            return
        self._is_decided = True
        self._store.set("verdict", json.dumps(verdict, default=str))
        until = time.monotonic() + _LEAVE
        names = [f"left/{rank}" for rank in range(1, self.size)]
        while time.monotonic() < until and not self._store.check(names):
            time.sleep(_POLL)

    # Messages --------------------------------------------------------------------------------------------------------

    def _send(self, key: str, data: bytes) -> None:
        starts = range(0, len(data), _BLOCK)
        for i, at in enumerate(starts):
            self._store.set(f"{key}/{i}", data[at : at + _BLOCK])
        self._store.set(key, str(len(starts)))

    def _receive(self, key: str) -> bytes:
        return b"".join(self._store.get(f"{key}/{i}") for i in range(int(self._wait(key))))

    def _wait(self, key: str) -> bytes:
        while not self._store.check([key]):
            self._check_others()
            time.sleep(_POLL)
        return self._store.get(key)  # type: ignore[no-any-return] # bytes

    def _check_others(self) -> None:
        """Raise when another process has failed or is gone."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_INTERVAL:
            return
        self._checked_at = now
        if self.is_first and self._store.check(["failed"]):
            raise self._failure()
        if not self.is_first and self._store.check(["verdict"]) and (failure := self._verdict()) is not None:
            raise failure
        silent = self._heartbeat.silent(range(1, self.size) if self.is_first else (0,))
        if silent is not None:
            raise StorageError(f"no heartbeat from rank {silent} for {_DEAD_AFTER:.0f} s", hint="check that node's log")


def is_launched() -> bool:
    """Return whether torchrun, or something that sets the same variables, started this process, be it the only one; not
    whether a rank did, which inherits them: a script may call a command on one rank, or on each for itself."""
    return all(name in os.environ for name in _VARIABLES) and not _is_of_a_rank()


def _is_of_a_rank() -> bool:
    """Return whether the process that started this one is a Python script with the same rank; not on macOS, where
    nothing says so."""
    parent = local_path(f"/proc/{os.getppid()}")
    try:
        variables = (parent / "environ").read().split(b"\0")
    except CkptError:
        return False
    is_python = (parent / "exe").real().name.startswith("python")
    return is_python and f"RANK={os.environ['RANK']}".encode() in variables


def is_shared() -> bool:
    """Return whether torchrun started several processes."""
    return is_launched() and os.environ["WORLD_SIZE"] not in ("", "1")


def is_of_torchrun() -> bool:
    """Return whether torchrun itself started this process and others. Scripts whose ranks another launcher starts call
    commands on one of them, which inherit its variables; only Linux says what the parent of a process has."""
    return sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ and is_shared()


def is_silent() -> bool:
    """Return whether another process reports to the user."""
    return is_shared() and os.environ["RANK"] != "0" and _is_rank_of_world()


def _is_rank_of_world() -> bool:
    """Return whether the variables name one of the processes; those of a shell may be left of something else."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    return rank.isdecimal() and size.isdecimal() and int(rank) < int(size)


def wait_to_be_ended() -> None:
    """After a failure in a silent process, give rank 0 time to report it: torchrun ends all processes as soon as one
    has ended."""
    with suppress(KeyboardInterrupt):
        time.sleep(_LEAVE)


@contextmanager
def coordinated() -> Iterator[Coordinator]:
    """Yield the coordinator of the processes that torchrun started; without torchrun, of this process alone.

    When the block of one process ends in an error, those of all others do, and rank 0 raises that error. Raises
    StorageError when the processes cannot find each other.
    """
    if not is_shared():
        yield Coordinator()
        return
    if not _is_rank_of_world():
        text = f"`RANK={os.environ['RANK']}` is not one of the ranks of `WORLD_SIZE={os.environ['WORLD_SIZE']}`"
        raise UsageError(text, hint=_UNSET)
    shared = _SharedWork(*_rendezvous())
    with shared.together():
        yield shared


def imported_torch() -> Any:
    """Return torch, with its rendezvous."""
    # Raised while torch is imported, a signal may end the import of numpy inside torch, which then goes on without it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        import torch.distributed.rendezvous
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return torch


def _rendezvous() -> tuple[int, int, Any]:
    """Return rank, number of processes, and the store of this job."""
    # Messages of an earlier job of the same processes are still there, and those of processes that were restarted.
    prefix = f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/job{next(_JOBS)}"
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            with suppress(UnknownProtocolError):
                rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
                own = TorchrunStore(os.environ["MASTER_ADDR"], port, prefix, timeout=_MEET)
                own.set_timeout(_DEAD_AFTER)
                return rank, size, own
        # Another launcher keeps no store, or one of another version.
        store, rank, size = next(imported_torch().distributed.rendezvous("env://", timeout=timedelta(seconds=_MEET)))
    # Whatever it is: a wrong address, a port in use, an old torch.
    except Exception as error:
        raise StorageError(
            f"cannot find the other processes at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}",
            hint=_UNSET,
        ) from None
    store.set_timeout(timedelta(seconds=_DEAD_AFTER))
    return rank, size, imported_torch().distributed.PrefixStore(prefix, store)


class _Heartbeat(threading.Thread):
    """Tells the store every second that this process lives, and knows since when the others have not."""

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__(daemon=True)
        self._store, self._rank = store, rank
        self._latest: dict[int, tuple[bytes, float]] = {}
        self._last = threading.Event()

    def run(self) -> None:
        # Without a store any more, which the main thread notices, it ends.
        with suppress(Exception):
            for beats in itertools.count(1):
                self._store.set(f"pulse/{self._rank}", str(beats))
                if self._last.wait(_BEAT):
                    return

    def silent(self, ranks: Any) -> int | None:
        """Return the first of these ranks without a new heartbeat for too long."""
        now = time.monotonic()
        for rank in ranks:
            key = f"pulse/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if rank not in self._latest or self._latest[rank][0] != beat:
                self._latest[rank] = (beat, now)
            elif now - self._latest[rank][1] > _DEAD_AFTER:
                return int(rank)
        return None

    def stop(self) -> None:
        self._last.set()
        self.join(_LEAVE)


# On the wire ----------------------------------------------------------------------------------------------------------


def _digest(catalogue: Catalogue) -> int:
    """Return a number that differs for two layouts."""
    crc = 0
    for tensor in catalogue.tensors:
        crc = crc32(tensor.name.encode(errors="surrogatepass"), crc)
        crc = crc32(tensor.chunks.offset.tobytes(), crc32(tensor.chunks.file.tobytes(), crc))
    return crc


def _packed(moved: Transferred) -> bytes:
    """Return the numbers of a result as bytes: a checkpoint of many ranks has a million of them."""
    written = array("q", (n for (file, offset), crc in moved.crcs.items() for n in (file, offset, crc)))
    overflowed = json.dumps(moved.overflowed).encode()
    overflowed += b" " * (-len(overflowed) % 8)
    head = [moved.moved, moved.unchecked, moved.checked, len(moved.crcs), len(overflowed)]
    return array("q", head).tobytes() + overflowed + written.tobytes() + moved.read.packed()


def _unpack(data: bytes, into: Transferred) -> None:
    numbers = array("q")
    numbers.frombytes(data[: len(data) // 8 * 8])
    moved, unchecked, checked, count, nbytes = numbers[:5]
    into.moved += moved
    into.unchecked += unchecked
    into.checked += checked
    start = 5 + nbytes // 8
    for name, values in json.loads(numbers[5:start].tobytes()).items():
        into.overflowed[name] = into.overflowed.get(name, 0) + values
    end = start + 3 * count
    columns = [numbers[start + i : end : 3] for i in range(3)]
    into.crcs.update(zip(zip(*columns[:2], strict=True), columns[2], strict=True))
    into.read.unpack(numbers[end:])


def _as_json(error: BaseException) -> dict[str, Any]:
    if isinstance(error, KeyboardInterrupt):
        error = StorageError(_INTERRUPTED)
    elif isinstance(error, (OSError, MemoryError)):
        error = StorageError(str(error) or "out of memory")
    if isinstance(error, CkptError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "facts": error.facts}
    return {"kind": "", "message": f"{type(error).__name__}: {error}"}


def _from_json(message: dict[str, Any]) -> Exception:
    if not message["kind"]:
        return RuntimeError(message["message"])
    kind: type[CkptError] = getattr(errors, message["kind"])
    return kind(message["message"], hint=message["hint"], **message["facts"])


def _is_of_the_store(error: BaseException) -> bool:
    """Return whether an error says that the store is gone, as when the process that keeps it has ended."""
    distributed = sys.modules.get("torch.distributed")
    return isinstance(error, ConnectionError) or (distributed is not None and isinstance(error, distributed.DistError))
