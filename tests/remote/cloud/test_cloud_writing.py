"""Checkpoints written to buckets: they are those that are written to a disk, and are there whole or not at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cli import environment, run, spawn
from support.folders import contents
from support.paths import CHECKPOINTS
from support.s3_server import Fault, Request, S3Server, error, variables
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpttool
from ckpttool.errors import CkptError, CorruptError, OverwriteError, RemoteError, UsageError
from ckpttool.remote.cloud import claim
from ckpttool.remote.cloud.store import CloudStore
from ckpttool.storage.stores import LeftObjects

DCP = str(CHECKPOINTS / "dcp/fsdp2_w4/ckpt")
FULL = str(CHECKPOINTS / "torch/full/ckpt.pt")
DST = "s3://bucket/out/step-3"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dcp": (FULL, {"to": "dcp", "to_world": 3}),
    "state": (DCP, {"to": "safetensors"}),
    "shards": (DCP, {"to": "safetensors", "only": "model", "max_shard_size": 1500}),
}


@pytest.mark.parametrize(("src", "options"), WAYS.values(), ids=WAYS)
def test_what_is_sent_is_what_is_written_here(
    src: str, options: dict[str, Any], server: S3Server, tmp_path: Path
) -> None:  # fmt: skip
    ckpttool.convert(src, tmp_path / "step-3", **options)
    result = ckpttool.convert(src, DST, **options)
    assert contents(server.download("out/step-3", tmp_path / "got")) == contents(tmp_path / "step-3")
    assert server.names() == [f"out/step-3/{name}" for name in sorted(contents(tmp_path / "step-3"))]
    assert result.sent.compared_bytes == result.sent.sent_bytes == sum(map(len, contents(tmp_path / "got").values()))
    # The last of all objects is what makes a checkpoint of them; then the claim is deleted.
    sent = [one for one in server.requests if one.startswith("PUT out/step-3/")]
    last = {"dcp": ".metadata", "state": "ckpttool.json", "shards": "model.safetensors.index.json"}.get(options["to"])
    assert last is None or sent[-1].endswith((last, "model.safetensors.index.json"))
    assert server.requests[-1].startswith("POST ?delete")


def test_upstream_reads_it(server: S3Server, tmp_path: Path) -> None:
    ckpttool.convert(FULL, DST, to="dcp", to_world=2)
    dcp_to_torch_save(server.download("out/step-3", tmp_path / "dcp"), tmp_path / "all.pt")
    one, two = (torch.load(path, weights_only=False)["model"] for path in (FULL, tmp_path / "all.pt"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    ckpttool.convert(FULL, "s3://bucket/model.safetensors", only="model")
    (tmp_path / "model.safetensors").write_bytes(server.get("model.safetensors") or b"")
    assert load_file(tmp_path / "model.safetensors").keys() <= {name.removeprefix("model.") for name in one} | {*one}


def test_one_object(server: S3Server, tmp_path: Path) -> None:
    ckpttool.convert(DCP, "s3://bucket/all.pt")
    ckpttool.convert(DCP, tmp_path / "all.pt")
    assert server.get("all.pt") == (tmp_path / "all.pt").read_bytes()
    with pytest.raises(OverwriteError, match=r"`s3://bucket/all.pt` exists"):
        ckpttool.convert(DCP, "s3://bucket/all.pt")
    ckpttool.convert(FULL, "s3://bucket/all.pt", overwrite=True)
    assert ckpttool.diff(FULL, "s3://bucket/all.pt").same and server.names() == ["all.pt"]


def test_reshard_and_export(server: S3Server, tmp_path: Path) -> None:
    ckpttool.reshard(DCP, tmp_path / "two", to_world=2)
    ckpttool.reshard(DCP, "s3://bucket/two", to_world=2)
    assert contents(server.download("two", tmp_path / "got")) == contents(tmp_path / "two")
    model = str(CHECKPOINTS / "hf/llama/ckpt")
    for dst in (str(tmp_path / "model"), "s3://bucket/model"):
        ckpttool.export(model, dst)
    here, there = contents(tmp_path / "model"), contents(server.download("model", tmp_path / "sent"))
    assert here.keys() == there.keys() and {name for name in here if here[name] != there[name]} <= {"README.md"}


def test_a_large_object_is_sent_in_parts(server: S3Server, tmp_path: Path) -> None:
    torch.save({"w": torch.rand(6 << 20)}, tmp_path / "large.pt")
    address = server.put("large.pt", tmp_path / "large.pt")
    result = ckpttool.convert(address, "s3://bucket/out/", to="dcp", in_store="never")
    assert len([one for one in server.requests if "?partNumber" in one]) == 4
    assert result.sent.compared_bytes == result.sent.sent_bytes
    assert ckpttool.diff(tmp_path / "large.pt", "s3://bucket/out").same


def test_what_is_there_is_not_replaced(server: S3Server, tmp_path: Path) -> None:
    server.put("out/step-3/notes.txt", b"mine")
    with pytest.raises(OverwriteError, match=r"has objects: `notes.txt`"):
        ckpttool.convert(DCP, DST, to="dcp")
    assert server.names() == ["out/step-3/notes.txt"]
    plan = run("convert", DCP, "s3://bucket/other", "--to", "dcp", "--dry-run", "--json")
    assert plan.exit_code == 0 and json.loads(plan.stdout)["sent"]["files"] and len(server.names()) == 1
    # What is of no checkpoint stays, also beside the files of one.
    ckpttool.convert(DCP, DST, to="dcp", overwrite=True)
    assert server.get("out/step-3/notes.txt") == b"mine" and ckpttool.diff(DCP, DST).same
    for n in (1, 2):
        server.put(f"run/step-{n}", Path(DCP))
    with pytest.raises(OverwriteError, match="has other checkpoints in it"):
        ckpttool.convert(DCP, "s3://bucket/run", to="dcp", overwrite=True)
    for options in ({"tag": "v1"}, {"private": True}, {"manifest": tmp_path / "m.json"}):
        with pytest.raises(UsageError):
            ckpttool.convert(DCP, DST, to="dcp", **options)
    for address in ("s3://bucket", "https://host/out.pt"):
        with pytest.raises(UsageError):
            ckpttool.convert(DCP, address)


def test_a_file_replaces_a_folder_and_a_folder_a_file(server: S3Server) -> None:
    ckpttool.convert(DCP, DST, to="dcp")
    ckpttool.convert(FULL, DST, to="torch", overwrite=True)
    assert server.names() == ["out/step-3"] and ckpttool.diff(FULL, DST).same
    ckpttool.convert(DCP, DST, to="dcp", overwrite=True)
    assert "out/step-3" not in server.names() and ckpttool.diff(DCP, DST).same


@pytest.mark.parametrize("key", ["a b/é+1", "x%2Fy/%zz", "q?x#y&z=1", "日本/'\"~*"])
def test_keys_are_what_they_are_written_as(key: str, server: S3Server) -> None:
    ckpttool.convert(FULL, f"s3://bucket/{key}", to="dcp")
    assert ckpttool.diff(FULL, f"s3://bucket/{key}").same and ckpttool.verify(f"s3://bucket/{key}").exit_code == 0
    assert server.get(f"{key}/.metadata") and not [name for name in server.names() if "partial" in name]
    with pytest.raises(UsageError, match="is not a path in a bucket"):
        ckpttool.convert(FULL, f"s3://bucket/{key}/a\nb", to="dcp")


OLD_AND_NEW = {
    # Shards of the same names, fewer of them, other names, and one that is the same.
    "names": (DCP, {"to": "dcp"}, FULL, {"to": "dcp", "to_world": 2}, False),
    "others": (DCP, {**WAYS["shards"][1]}, DCP, {**WAYS["shards"][1], "max_shard_size": 2500}, True),
    "format": (DCP, {"to": "dcp"}, DCP, {**WAYS["shards"][1]}, False),
    "ranks": (DCP, {"to": "fsdp1", "only": "model"}, FULL, {"to": "fsdp1", "only": "model", "to_world": 2}, False),
    "same": (DCP, {"to": "dcp"}, DCP, {"to": "dcp"}, True),
}


@pytest.mark.parametrize(
    ("old", "before", "new", "after", "always"),
    [
        pytest.param(*case, id=name, marks=() if name in ("names", "others") else pytest.mark.long)
        for name, case in OLD_AND_NEW.items()
    ],
)
def test_overwrite(
    old: str, before: dict[str, Any], new: str, after: dict[str, Any], always: bool, server: S3Server, tmp_path: Path
) -> None:  # fmt: skip
    """The old checkpoint is what it was until all that is new is in the store. Then, if no object of it has to be
    replaced but the index, that is replaced in one step (`always`); else the index goes first."""
    ckpttool.convert(old, DST, **before)
    ckpttool.convert(old, tmp_path / "old", **before)
    ckpttool.convert(new, tmp_path / "new", **after)
    tags = server.tags()
    beside = {"out/step-30/x": b"of somebody else", "out/step-3/notes.txt": b"mine"}
    for name, data in beside.items():
        server.put(name, data)
    writes: list[tuple[str, bool]] = []  # a request that writes, and whether the old checkpoint was there then
    indexes = [item for item in tags.items() if item[0].endswith((".metadata", ".index.json"))]

    def look(request: Request) -> Fault | None:
        if request.method != "GET" and request.method != "HEAD":
            now = server.tags().items()
            writes.append((str(request), tags.items() <= now))
            assert tags.items() <= now or not any(index in now for index in indexes), "the old index is of new shards"
        return None

    server.faults = [look]
    result = ckpttool.convert(new, DST, **after, overwrite=True)
    server.faults.clear()
    there = server.download("out/step-3", tmp_path / "got")
    (there / "notes.txt").unlink()
    assert contents(there) == contents(tmp_path / "new")
    assert {name: server.get(name) for name in beside} == beside
    assert len(server.names()) == len(contents(tmp_path / "new")) + 2
    assert set(result.sent.removed) == contents(tmp_path / "old").keys() - contents(tmp_path / "new").keys()
    # What replaces the old one, and all behind it: copies of what is in the store, and small objects.
    last = [asked for asked, is_old in writes if not is_old]
    assert not [asked for asked, _ in writes if "?partNumber" in asked or "?uploads" in asked]
    replacing = [asked for asked in last if not asked.endswith((".partial-0", "?delete"))]
    deleted = [asked for asked, is_old in writes if asked == "POST ?delete" and is_old]
    assert len(replacing) <= len(contents(there)) and (not always or (len(replacing) <= 1 and len(deleted) <= 1))


@pytest.mark.parametrize("at", ["send", "copy", pytest.param("end", marks=pytest.mark.long)])
def test_overwrite_that_fails(at: str, server: S3Server, tmp_path: Path) -> None:
    ckpttool.convert(DCP, DST, to="dcp")
    before = {name: server.get(name) for name in server.names()}

    def decide(request: Request) -> Fault | None:
        is_put = request.method == "PUT" and not request.name.endswith(".partial-0")
        is_copy = "x-amz-copy-source" in request.headers
        at_end = request.name.endswith(("step-3/integrity.json", "step-3/.metadata"))
        is_it = {"send": is_put and "__1_0" in request.name, "copy": is_copy, "end": at_end and not is_copy}[at]
        return error(503, "SlowDown") if is_put and is_it else None

    server.faults = [decide]
    with pytest.raises(RemoteError):
        ckpttool.convert(FULL, DST, to="dcp", to_world=3, overwrite=True)
    server.faults.clear()
    if at == "send":
        assert {name: server.get(name) for name in server.names()} == before
    else:
        assert server.names() == [], "it was half replaced"
    ckpttool.convert(FULL, DST, to="dcp", to_world=3, overwrite=True)
    assert ckpttool.diff(FULL, DST).same and not [name for name in server.names() if "partial" in name]


@pytest.mark.parametrize("before", [None, DCP])
@pytest.mark.parametrize("loses", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_fails_behind_the_last_object(before: str | None, loses: bool, server: S3Server) -> None:
    """The new checkpoint is whole, also if nobody has heard that its index arrived; the rest is removed later."""
    if before is not None:
        ckpttool.convert(before, DST, to="dcp")
    reached: list[Request] = []

    def decide(request: Request) -> Fault | None:
        is_last = request.method == "PUT" and request.name.endswith("/.metadata")
        if is_last:
            reached.append(request)
        if loses and reached and request.method != "HEAD":
            return Fault(loses=True) if is_last and len(reached) == 1 else error(503, "SlowDown")
        return error(503, "SlowDown") if reached and request.query.startswith("delete") else None

    server.faults = [decide]
    with pytest.raises(RemoteError) as raised:
        ckpttool.convert(FULL, DST, to="dcp", to_world=3, overwrite=True)
    assert loses or f"`{DST}` is complete; `ckpttool clean" in str(raised.value.hint)
    server.faults.clear()
    assert ckpttool.diff(FULL, DST).same and ckpttool.verify(DST).exit_code == 0
    if not loses:
        assert run("clean", "s3://bucket/out", "--yes").exit_code == 0
        assert ckpttool.diff(FULL, DST).same and len(server.names()) == 5


def test_a_copy_that_no_store_makes(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 copies 5 GiB at most: what is larger is read and sent again."""
    monkeypatch.setattr("ckpttool.remote.cloud.client.LARGEST_COPY", 1000)
    ckpttool.convert(DCP, DST, to="dcp")
    ckpttool.convert(FULL, DST, to="dcp", to_world=3, overwrite=True)
    assert ckpttool.diff(FULL, DST).same and ckpttool.verify(DST).exit_code == 0
    assert len(server.names()) == 5


# Failures --------------------------------------------------------------------------------------------------------


def writes(after: int, fault: Fault, lasting: bool = False) -> Callable[[Request], Fault | None]:
    """What goes wrong with one of the requests that write, and with all after it."""
    seen = [0]

    def decide(request: Request) -> Fault | None:
        if request.method not in ("PUT", "POST") or request.query.startswith("delete"):
            return None
        seen[0] += 1
        return fault if seen[0] == after or (lasting and seen[0] >= after) else None

    return decide


@pytest.mark.sweep(3)
@pytest.mark.parametrize("after", [1, 2, 4, 6])
@pytest.mark.parametrize("kind", ["503", "refused", "lost"])
def test_what_passes_is_repeated(kind: str, after: int, server: S3Server, tmp_path: Path) -> None:
    """`lost`: the request is carried out, and the answer does not arrive."""
    fault = {"503": error(503, "SlowDown"), "refused": Fault(refuses=True), "lost": Fault(loses=True)}[kind]
    server.faults = [writes(after, fault)]
    ckpttool.convert(FULL, DST, to="dcp", to_world=2)
    server.faults.clear()
    assert ckpttool.diff(FULL, DST).same
    assert not [name for name in server.names() if "partial" in name]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("after", [1, 2, 4, 6])
@pytest.mark.parametrize(
    ("fault", "said"),
    [(error(503, "SlowDown"), "failed several times"), (error(403, "ExpiredToken"), "expired")],
    ids=["503", "expired"],
)
def test_what_does_not_pass_leaves_nothing(
    fault: Fault, said: str, after: int, server: S3Server, tmp_path: Path
) -> None:  # fmt: skip
    server.faults = [writes(after, fault, lasting=True)]
    with pytest.raises(RemoteError, match=said) as raised:
        ckpttool.convert(FULL, DST, to="dcp", to_world=2)
    assert "s3cret" not in str(raised.value) and DST in str(raised.value)
    assert server.names() == []
    server.faults.clear()
    ckpttool.convert(FULL, DST, to="dcp", to_world=2)
    assert ckpttool.diff(FULL, DST).same


@pytest.mark.parametrize(
    ("fault", "error_type"),
    [
        (error(409, "ConditionalRequestConflict"), OverwriteError),
        (error(412, "PreconditionFailed"), OverwriteError),
        (error(404, "NoSuchUpload"), RemoteError),
    ],
    ids=["409", "412", "404"],
)
def test_a_refusal_of_what_is_not_there(fault: Fault, error_type: type[CkptError], server: S3Server) -> None:
    """As where somebody else has made an object, or aborted an upload, and that is gone when it is asked for."""
    for name in (".distcp", ".metadata", ".partial-0"):
        server.faults = [lambda r, name=name: fault if r.method == "PUT" and r.name.endswith(name) else None]  # type: ignore[misc]
        with pytest.raises(error_type):
            ckpttool.convert(FULL, DST, to="dcp")
        assert server.names() == []


@pytest.mark.parametrize("name", [".distcp", ".metadata"])
def test_bytes_that_arrive_wrong_are_found(name: str, server: S3Server) -> None:
    """Of the last object, too, which makes a checkpoint of the others."""
    server.faults = [lambda request: Fault(damages=request.name.endswith(name) and request.method == "PUT")]
    with pytest.raises(RemoteError, match="is not what was sent"):
        ckpttool.convert(FULL, DST, to="dcp")
    assert server.names() == []


def test_somebody_else_writes_meanwhile(server: S3Server) -> None:
    """Without a claim, as other programs do."""

    def put(request: Request) -> Fault | None:
        if request.method == "PUT" and request.name.endswith(".metadata"):
            server.put("out/step-3/.metadata", b"theirs")
        return None

    server.faults = [put]
    with pytest.raises(OverwriteError, match="another run has written it in the meantime"):
        ckpttool.convert(FULL, DST, to="dcp")
    assert server.get("out/step-3/.metadata") == b"theirs"
    assert not [name for name in server.names() if "partial" in name]


def test_of_two_writers_one_is_told(server: S3Server) -> None:
    told: list[str] = []
    done: list[str] = []

    def write(src: str) -> None:
        try:
            ckpttool.convert(src, DST, to="dcp")
            done.append(src)
        except OverwriteError as error:
            told.append(error.message)

    server.faults = [lambda request: Fault(seconds=0.02)]
    threads = [threading.Thread(target=write, args=(src,)) for src in (FULL, DCP)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.faults.clear()
    assert len(done) == len(told) == 1
    assert "exists" in told[0] or "another run" in told[0]
    assert ckpttool.diff(done[0], DST).same


TO_DCP = ("--to", "dcp", "--to-world", "3")


def kill_after(server: S3Server, src: str, requests: int, *words: str, to: Sequence[str] = TO_DCP) -> bool:
    """Start a conversion, kill it after so many of its requests, and return whether it had not ended before."""
    reached = threading.Event()

    def count(request: Request) -> Fault | None:
        if len(server.requests) > requests:
            reached.set()
        return Fault(seconds=0.01)

    server.requests.clear()
    server.faults = [count]
    process = spawn("convert", src, DST, *to, *words, env=environment(**variables(server)))
    while process.poll() is None and not reached.is_set():
        time.sleep(0.001)
    is_killed = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(0.3)  # what is on its way arrives
    server.faults.clear()
    return is_killed


def check_after_a_kill(server: S3Server, src: str, world: int = 3) -> bool:
    """The destination is whole, which is returned, or no checkpoint; the next run succeeds, and leaves nothing behind,
    also no part."""
    is_there = "out/step-3/.metadata" in server.names()
    if is_there:
        assert ckpttool.diff(src, DST).same
    else:
        with pytest.raises(CkptError):
            ckpttool.inspect(DST)
    try:
        ckpttool.convert(src, DST, to="dcp", to_world=world)
    except OverwriteError:
        assert is_there
    assert ckpttool.diff(src, DST).same
    assert server.names() == sorted(
        f"out/step-3/{n}" for n in (".metadata", "integrity.json", *(f"__{rank}_0.distcp" for rank in range(world)))
    )
    assert server.uploads() == []
    return is_there


@pytest.mark.sweep(3)
@pytest.mark.parametrize("requests", [4, 8, 13])
def test_a_killed_run(requests: int, server: S3Server) -> None:
    assert kill_after(server, FULL, requests)
    check_after_a_kill(server, FULL)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("requests", [8, 11, 14])
def test_shards_of_a_killed_run_are_no_model(requests: int, server: S3Server) -> None:
    """Neither by themselves, nor as the newest step of a run."""
    shards = ("--to", "safetensors", "--only", "model", "--max-shard-size", "1500")
    old = "s3://bucket/out/step-2"
    ckpttool.convert(DCP, old, to="dcp")
    assert kill_after(server, DCP, requests, to=shards)
    there = [name for name in server.names() if name.startswith("out/step-3/")]
    assert there and not any(name.endswith(".json") for name in there)
    with pytest.raises(RemoteError, match="is not a whole checkpoint"):
        ckpttool.inspect(DST)
    assert ckpttool.inspect("s3://bucket/out").files[0].location.startswith(old)
    ckpttool.convert(DCP, DST, to="safetensors", only="model", max_shard_size=1500)
    assert ckpttool.diff(DCP, DST, only=["model"]).same


@pytest.mark.long
@pytest.mark.parametrize(("nbytes", "requests"), [(0, 18), (60 << 20, 32)], ids=["small", "streamed"])
def test_runs_that_are_killed_at_random(nbytes: int, requests: int, server: S3Server, tmp_path: Path) -> None:
    """`streamed`: each of three files has three parts."""
    src = FULL
    if nbytes:
        src = str(tmp_path / "large.pt")
        torch.save({f"w{i}": torch.rand(nbytes // 4 // 12) for i in range(12)}, src)
    rng = random.Random(1)
    seen = Counter[str]()
    for _ in range(int(os.environ.get("KILLS", "50"))):
        server.clear()
        is_killed = kill_after(server, src, rng.randrange(1, requests))
        parts = len(server.uploads())
        is_there = check_after_a_kill(server, src)
        seen[f"{is_killed=}, {parts} uploads left, {is_there=}"] += 1
    print(sorted(seen.items()))
    assert not nbytes or any("0 uploads" not in one for one in seen)


@pytest.mark.long
def test_runs_that_replace_are_killed_at_random(server: S3Server) -> None:
    """What is there is the old checkpoint, the new one or none, and never parts of both."""
    rng = random.Random(2)
    seen: set[str] = set()
    for _ in range(30):
        server.clear()
        ckpttool.convert(DCP, DST, to="dcp")
        kill_after(server, FULL, rng.randrange(8, 32), "--overwrite")
        try:
            ckpttool.inspect(DST)
            found = "old" if ckpttool.diff(DCP, DST).same else "new"
            assert found == "old" or ckpttool.diff(FULL, DST).same
        except CkptError:
            found = "none"
        seen.add(found)
        ckpttool.convert(FULL, DST, to="dcp", to_world=3, overwrite=True)
        assert ckpttool.diff(FULL, DST).same and len(server.names()) == 5
    assert seen == {"old", "new", "none"}


def test_what_was_sent_is_not_sent_again(server: S3Server) -> None:
    server.faults = [lambda r: error(503, "SlowDown") if r.method == "PUT" and r.name.endswith(".metadata") else None]
    with pytest.raises(RemoteError):
        ckpttool.convert(FULL, DST, to="dcp", to_world=3, resume=True)
    assert [name for name in server.names() if name.endswith(".distcp")]
    server.faults.clear()
    server.requests.clear()
    result = ckpttool.convert(FULL, DST, to="dcp", to_world=3, resume=True)
    assert not [one for one in server.requests if one.startswith("PUT") and one.endswith(".distcp")]
    assert {file.status for file in result.sent.files} == {"new", "unchanged"}
    assert ckpttool.diff(FULL, DST).same


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_few_files_are_on_this_machine_at_a_time(
    to: str, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    torch.save({f"w{i}": torch.rand(8, 1 << 15) for i in range(8)}, tmp_path / "full.pt")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    most = [0]

    def look(request: Request) -> Fault:
        found = [os.stat(path) for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
        most[0] = max(most[0], sum(one.st_blocks * 512 > 1 << 19 for one in found))
        return Fault(seconds=0.02)

    server.faults = [look]
    options: dict[str, Any] = {"to_world": 8} if to == "dcp" else {"max_shard_size": 1 << 20}
    result = ckpttool.convert(tmp_path / "full.pt", DST, to=to, **options)
    assert len(result.files) == 8 and 1 <= most[0] <= 3
    assert result.file_bytes < 4 << 20
    assert ckpttool.diff(tmp_path / "full.pt", DST).same
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]


def test_what_is_sent_is_checked(server: S3Server, tmp_path: Path) -> None:
    """Damage of the source is found while files of it are sent, and what was sent is deleted."""
    torch.save({f"w{i}": torch.rand(300, 100) for i in range(4)}, tmp_path / "full.pt")
    data = bytearray((tmp_path / "full.pt").read_bytes())
    data[len(data) * 2 // 3] ^= 1
    (tmp_path / "full.pt").write_bytes(data)
    with pytest.raises(CorruptError):
        ckpttool.convert(tmp_path / "full.pt", DST, to="dcp", to_world=4)
    assert server.names() == []


def test_clean(server: S3Server, tmp_path: Path) -> None:
    """Of killed runs objects and parts go, of others nothing does."""
    assert kill_after(server, FULL, 9)
    import boto3  # type: ignore[import-untyped]

    for key in ("out/step-3/__2_0.distcp", "out/.step-3.partial-0/__2_0.distcp"):  # the second is of what is replaced
        assert boto3.client("s3").create_multipart_upload(Bucket="bucket", Key=key)["UploadId"]
    server.put("out/step-3/notes.txt", b"mine")
    server.put("out/.foreign.partial-0", b"not a claim")
    server.put("out/.other.partial-0", json.dumps({"owner": {"pid": 1}, "names": ["out/step-30/x", "run/y"]}).encode())
    server.put("out/step-30/x", b"of somebody else")
    listed = ckpttool.clean("s3://bucket/out")
    assert listed.verdict == "left" and {one.names[0]: one.state for one in listed.left} == {
        ".foreign.partial-0": "foreign",
        ".other.partial-0": "running",
        ".step-3.partial-0": "ended",
    }
    assert len([name for name in server.names() if name.startswith("out/step-3/")]) > 1
    assert run("clean", "s3://bucket/out", "--yes").exit_code == 0
    assert server.names() == ["out/.foreign.partial-0", "out/.other.partial-0", "out/step-3/notes.txt", "out/step-30/x"]
    assert not boto3.client("s3").list_multipart_uploads(Bucket="bucket").get("Uploads")
    with pytest.raises(OverwriteError, match="cannot be claimed"):
        ckpttool.convert(DCP, "s3://bucket/out/foreign", to="dcp")


def test_clean_beside_a_run_that_takes_over(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lists as left may be what another run is writing, or has written, when it comes to remove it."""
    assert kill_after(server, FULL, 9)
    left = CloudStore.left

    def early(store: CloudStore, name: str) -> list[LeftObjects]:
        listed = left(store, name)
        ckpttool.convert(FULL, DST, to="dcp", to_world=3)
        return listed

    monkeypatch.setattr(CloudStore, "left", early)
    cleaned = ckpttool.clean("s3://bucket/out", yes=True)
    assert [(one.state, one.removed) for one in cleaned.left] == [("running", False)]
    assert ckpttool.diff(FULL, DST).same and not [name for name in server.names() if "partial" in name]


def test_what_is_written_long_after_a_kill_is_of_somebody_else(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a tool that makes no claims, under the names that the run would have written."""
    assert kill_after(server, FULL, 9)
    monkeypatch.setattr(claim, "_LATEST", 0.0)
    time.sleep(1.1)  # stores say whole seconds
    ckpttool.convert(FULL, tmp_path / "d", to="dcp", to_world=3)
    server.put("out/step-3", tmp_path / "d")
    assert ckpttool.diff(FULL, DST).same
    with pytest.raises(OverwriteError, match="has objects"):
        ckpttool.convert(DCP, DST, to="dcp")
    ckpttool.clean("s3://bucket/out", yes=True)
    assert ckpttool.diff(FULL, DST).same and not [name for name in server.names() if "partial" in name]


def test_commands_that_copy_or_list_files_have_what_is_read_of_them(tmp_path: Path, server: S3Server) -> None:
    """Also if it is called as if its save had not ended: `repair`, a manifest and a bucket had not. A copy has none."""
    step = tmp_path / "step"
    step.mkdir()
    torch.save({"w": torch.ones(4)}, step / "model.pt")
    torch.save({"state": {}, "param_groups": [{"lr": 0.5, "params": [0]}]}, step / "tmp_model.pt")
    shutil.copy(step / "model.pt", step / "model.pt.part")
    torch.save({"last_epoch": 3, "base_lrs": [0.5]}, step / "scheduler.pt")
    names = {"model.pt", "scheduler.pt", "tmp_model.pt"}
    ckpttool.repair(step, tmp_path / "repaired")
    assert {one.name for one in (tmp_path / "repaired").iterdir()} == names
    ckpttool.verify(step, write_manifest=tmp_path / "m.json")
    assert {*json.loads((tmp_path / "m.json").read_text())["files"]} == names
    ckpttool.convert(step, "s3://bucket/step", producer="same")
    assert {*server.names()} == {f"step/{name}" for name in names}
    for number in (1, 2):
        shutil.copytree(step, tmp_path / "run" / f"step_{number}")
    ckpttool.prune(tmp_path / "run", keep_last=1, drop=["model"], yes=True)
    assert {one.name for one in (tmp_path / "run" / "step_1").iterdir()} == {"scheduler.pt", "tmp_model.pt"}
