"""The claim of a run on a destination in a bucket: a small object beside it, `.step-100.partial-0`.

It is created on the condition that there is none, so of two runs one writes and the other is told. It says which
process writes, is renewed while that goes on, and names the objects of the run: the next run, or `clean`, removes those
of one that was killed, and no others.
"""

from __future__ import annotations

import json
import posixpath
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from obstore.exceptions import AlreadyExistsError, PreconditionError

from ckpttool.errors import OverwriteError
from ckpttool.remote.cloud import boto
from ckpttool.remote.cloud.client import Client, Condition, StoredObject
from ckpttool.storage.workspace import is_running, owner_now

_SUFFIX = ".partial-0"
_NAME = re.compile(r"\.(.+)\.partial-0")
_RENEW = 30.0  # seconds
_DEAD_AFTER = 600.0  # seconds without a renewal, whatever the clocks of two machines say
_LATEST = 2 * _RENEW  # seconds after the last renewal in which objects of a killed run arrive
_own: set[str] = set()  # tokens of the claims that this process holds


@dataclass(slots=True)
class Claim:
    """A claim that was found: the destination `key` that it is about, its owner and the names of its objects. `commit`
    is the one that makes the destination complete, once all others are there and it is not of the tag `before` any
    more; those of the old checkpoint that are `stale` then go."""

    key: str
    version: StoredObject
    owner: dict[str, Any]
    names: list[str]
    commit: str | None
    before: str | None
    stale: list[str]

    @property
    def name(self) -> str:
        """The name of the object."""
        return name_of(self.key)

    def is_complete(self, there: Mapping[str, StoredObject]) -> bool:
        """Return whether its run was killed behind its last act."""
        return self.commit is not None and self.commit in there and there[self.commit].tag != self.before

    def left(self, there: Mapping[str, StoredObject]) -> list[str]:
        """Return the names of what its run has left, among the objects that are there: not of those that were written
        long after it had ended, by others and without a claim."""
        if not self.is_held:
            last = self.version.modified + timedelta(seconds=_LATEST)
            there = {name: one for name, one in there.items() if one.modified <= last}
        gone = {*(self.stale if self.is_complete(there) else self.names)}
        return [name for name in there if name in gone or name.startswith(f"{self.name}/")]

    def remove(self, client: Client, address: str, names: Sequence[str]) -> None:
        """Delete what its run has left, and the claim. Raises OverwriteError if another run has taken over."""
        own = HeldClaim(client, address, self.key, self.names, self.commit, self.before, self.stale)
        own.take(self)
        try:
            abort_uploads(address, self.key)
            client.delete(names).result()
        except BaseException:
            with suppress(Exception):
                own.release(keep=True)
            raise
        own.release()

    @property
    def age(self) -> float:
        """Seconds since it was renewed."""
        return max(0.0, datetime.now(timezone.utc).timestamp() - float(self.version.modified.timestamp()))

    @property
    def is_held(self) -> bool:
        """Whether its run may go on."""
        if self.owner.items() >= owner_now().items():
            # The answer to a request of this process was lost, and the request was carried out later.
            return self.owner.get("token") in _own
        return self.age < _DEAD_AFTER and not self.owner.get("ended") and is_running(self.owner)

    @property
    def host(self) -> str:
        """The machine of its run."""
        return str(self.owner.get("host", "another machine"))


def name_of(key: str) -> str:
    """Return the name of the claim on a destination. Pure."""
    return posixpath.join(posixpath.dirname(key), f".{posixpath.basename(key)}{_SUFFIX}")


def aside(key: str, name: str) -> str:
    """Return the name that an object has until those of an old checkpoint may go, one of which has its name. Pure."""
    return f"{name_of(key)}/{name.removeprefix(f'{key}/')}"


def list_all(client: Client, key: str, claim: Claim | None, most: int) -> dict[str, StoredObject]:
    """Return the objects at and below a destination, and those that the run of a claim has put aside. Raises the
    exceptions of obstore."""
    there = client.list_all(key, most).result()
    if claim is not None:
        there |= client.list_all(claim.name, most).result()
    with suppress(FileNotFoundError):
        there |= {key: client.head(key).result()}
    return there


def keys_of(names: Iterable[str]) -> list[str]:
    """Return the destinations that claims among these names are about. Pure."""
    matches = ((posixpath.dirname(name), _NAME.fullmatch(posixpath.basename(name))) for name in names)
    return [posixpath.join(folder, match[1]) for folder, match in matches if match is not None]


def find(client: Client, key: str, asked: Future[tuple[StoredObject, bytes]] | None = None) -> Claim | None:
    """Return the claim on a destination, None if there is none; it may be `asked` for before. Raises the exceptions of
    obstore."""
    try:
        version, data = (asked or client.get(name_of(key))).result()
    except FileNotFoundError:
        return None
    said: Any = None
    with suppress(ValueError):
        said = json.loads(data)
    said = said if isinstance(said, dict) else {}
    lists = {kind: said[kind] for kind in ("names", "stale") if isinstance(said.get(kind), list)}

    def is_own(name: object) -> bool:
        # An object of somebody else may have this name: nothing of what it names is touched, unless it lies in there.
        return isinstance(name, str) and (name == key or name.startswith((f"{key}/", f"{name_of(key)}/")))

    names, stale = ([name for name in lists.get(kind, ()) if is_own(name)] for kind in ("names", "stale"))
    owner, commit = said.get("owner"), said.get("commit")
    owner = owner if isinstance(owner, dict) else {}
    return Claim(key, version, owner, names, commit if is_own(commit) else None, said.get("before"), stale)


def ended(client: Client, address: str, key: str) -> Claim | None:
    """Return the claim that a run which has ended has left on a destination. Raises OverwriteError if another one goes
    on, or something else has that name."""
    claim = find(client, key)
    if claim is not None and not claim.owner:
        message = f"`{address}` cannot be claimed: `{claim.name}` is of something else"
        raise OverwriteError(message, hint="rename it, or name another destination", file=address)
    if claim is not None and claim.is_held:
        raise held(address, claim)
    return claim


@dataclass(slots=True)
class HeldClaim:
    """The claim of this run, renewed by a thread until `release`."""

    client: Client
    address: str
    key: str
    names: list[str]
    commit: str | None = None
    before: str | None = None
    stale: list[str] = field(default_factory=list)
    _condition: Condition | None = None
    _token: str = field(default_factory=partial(secrets.token_hex, 16))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)
    _lost: threading.Event = field(default_factory=threading.Event)

    def take(self, before: Claim | None) -> None:
        """Write the claim, in place of that of a run that has ended. Raises OverwriteError if another run has one."""
        mode = "create" if before is None else before.version.condition
        _own.add(self._token)
        try:
            self._condition = self.client.put(name_of(self.key), self._content(), mode).result()
        except (AlreadyExistsError, PreconditionError):
            there = find(self.client, self.key)
            # Of our own attempt the answer may have been lost.
            if there is None or there.owner.get("token") != self._token:
                _own.discard(self._token)
                raise held(self.address, there) from None
            self._condition = there.version.condition
        except BaseException:
            _own.discard(self._token)
            with suppress(Exception):
                there = find(self.client, self.key)
                if there is not None and there.owner.get("token") == self._token:
                    self.client.delete([there.name]).result()
            raise
        threading.Thread(target=self._renew, name="ckpttool-claim", daemon=True).start()

    def _content(self) -> bytes:
        owner = owner_now() | {"token": self._token, "ended": self._over.is_set()}
        said = {"names": self.names, "commit": self.commit, "before": self.before, "stale": self.stale}
        return json.dumps({"owner": owner, **said}).encode()

    def update(self) -> None:
        """Write what has changed, and that the run goes on. Raises OverwriteError if another run has taken over."""
        with self._lock:
            self.check()
            try:
                self._condition = self.client.put(name_of(self.key), self._content(), self._condition).result()
            except (PreconditionError, AlreadyExistsError, FileNotFoundError):
                there = find(self.client, self.key)
                if there is None or there.owner.get("token") != self._token:
                    self._lost.set()
                    raise held(self.address, there) from None
                self._condition = there.version.condition

    @property
    def is_lost(self) -> bool:
        """Whether another run has taken over."""
        return self._lost.is_set()

    def check(self) -> None:
        """Raise OverwriteError if another run has taken over."""
        if self.is_lost:
            raise held(self.address, None)

    def release(self, *, keep: bool = False) -> None:
        """End the renewal, and delete the claim; with `keep`, it says that the run has ended."""
        self._over.set()
        _own.discard(self._token)
        if keep:
            self.update()
        elif not self.is_lost:
            with self._lock:
                self.client.delete([name_of(self.key)]).result()

    def _renew(self) -> None:
        while not self._over.wait(_RENEW):
            # Without an answer for a while the claim holds; what the next request raises is said there.
            with suppress(Exception):
                if not self._over.is_set():
                    self.update()


def held(address: str, claim: Claim | None) -> OverwriteError:
    """Return the error for a destination that another run writes."""
    by = f"on {claim.host} " if claim is not None else ""
    since = f", which was active {claim.age:.0f} s ago" if claim is not None else ""
    return OverwriteError(
        f"`{address}` is being written by another run {by}{since}".replace(" ,", ","),
        hint=f"wait for it; if it has ended, this can be run again {_DEAD_AFTER / 60:.0f} minutes after that",
        file=address,
    )


def abort_uploads(address: str, key: str) -> bool:
    """Abort what killed runs have sent of an object in parts, to S3. obstore cannot list that: return whether boto3 is
    there, which can."""
    if not address.startswith("s3://"):
        return False
    bucket = address.split("/")[2]
    # It costs money, and nothing else: whatever goes wrong is no reason to fail.
    with suppress(Exception):
        service = boto.service()
        for prefix in (key, f"{name_of(key)}/"):
            for page in service.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
                for upload in page.get("Uploads", ()):
                    if upload["Key"] == key or upload["Key"].startswith((f"{key}/", f"{name_of(key)}/")):
                        service.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        return True
    return False
