"""A bucket of the Hub as a destination: a checkpoint is there, or none is, whatever fails and whoever is killed."""

from __future__ import annotations

import os
import random
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils._xet import XET_CONNECTION_INFO_CACHE, abort_xet_session
from safetensors.torch import save, save_file
from support.folders import contents
from support.hub_server import READER, WRITER, Handler, Hub, drop
from support.paths import CHECKPOINTS, ROOT
from support.torchrun import forked_launcher
from test_hub_destinations import run
from test_hub_processes import environment

import ckpttool
from ckpttool.errors import CkptError, OverwriteError, RemoteError, UsageError
from ckpttool.remote.hub.bucket_upload import Bucket, destination
from ckpttool.storage.stores import LeftObjects, Outgoing, locate

pytestmark = pytest.mark.skipif(huggingface_hub.__version__ < "2", reason="earlier clients do not know what failed")

SAMPLE = CHECKPOINTS / "dcp/hsdp_w4/ckpt"  # of 4 ranks, with the optimizer
DST = "hf://buckets/me/runs/run7/step-1"
INSIDE = "run7/step-1/"
MARK = f"{INSIDE}.ckpttool.partial"


@pytest.fixture
def store(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub over Xet, which buckets need, with a store of ours."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_XET_XORB_COMPRESSION_POLICY", "none")
    hub.cas = True
    abort_xet_session()
    XET_CONNECTION_INFO_CACHE.clear()
    yield hub
    abort_xet_session()


def convert(world: int, *words: str | Path, dst: str | Path = DST, code: int = 0) -> Any:
    return run("convert", SAMPLE, dst, "--to", "dcp", "--to-world", str(world), *words, code=code)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    """What `convert` writes here, by the number of ranks."""
    folder = tmp_path_factory.mktemp("made")
    for world in (2, 4):
        convert(world, dst=folder / str(world))
    return {world: contents(folder / str(world)) for world in (2, 4)}


def names_at(address: str) -> set[str]:
    return set(locate(address).below())


def sent(hub: Hub) -> int:
    return sum(one.received for one in hub.asked("POST", "/cas/v1/xorbs/"))


def test_a_dcp_with_its_optimizer(store: Hub, tmp_path: Path, made: dict[int, dict[str, bytes]]) -> None:
    planned = convert(4, "--dry-run")
    assert planned["sent"]["created"] and planned["sent"]["private"] and not store.buckets
    done = convert(4, "--check")
    assert store.in_bucket("me/runs", INSIDE) == made[4] and store.buckets["me/runs"].private
    marked, shards, commit, tidied = store.buckets["me/runs"].batches
    assert commit == [("addFile", f"{INSIDE}.metadata")] and len(shards) == len(made[4]) - 1
    assert marked == [("addFile", MARK)] and tidied == [("deleteFile", MARK)]
    assert done["sent"]["commit"] == f"{store.url}/buckets/me/runs/tree/run7/step-1"
    assert os.listdir(tmp_path / "tmp") == []
    # It is the checkpoint, and the only one of the run.
    assert run("inspect", "hf://buckets/me/runs/run7")["world_size"] == 4
    assert run("diff", SAMPLE, DST)["verdict"] == "same"
    run("verify", DST)
    # Again: it exists; and with `--overwrite`, nothing is sent or asked for.
    before, asked = sent(store), len(store.buckets["me/runs"].batches)
    error = convert(4, code=OverwriteError.exit_code)["error"]
    assert error["file"] == DST and "--overwrite" in error["hint"]
    again = convert(4, "--overwrite")
    assert {file["status"] for file in again["sent"]["files"]} == {"unchanged"} and again["sent"]["commit"] is None
    assert (sent(store), len(store.buckets["me/runs"].batches)) == (before, asked)


def test_what_is_replaced(store: Hub, tmp_path: Path, made: dict[int, dict[str, bytes]]) -> None:
    """The old index goes before a shard changes, and shards that are left over after the new one is there. Files of
    others stay, also in folders with the same letters."""
    others = {f"{INSIDE}notes.txt": b"mine", "run7/step-10/x": b"theirs", f"{INSIDE}eval/.metadata": b"other"}
    store.make_bucket("me/runs", {f"{INSIDE}{name}": data for name, data in made[4].items()} | others)
    planned = convert(2, "--dry-run", "--overwrite")
    assert planned["sent"]["removed"] == [f"{INSIDE}__2_0.distcp", f"{INSIDE}__3_0.distcp"]
    done = convert(2, "--overwrite")
    assert os.listdir(tmp_path / "tmp") == []
    assert done["sent"]["removed"] == planned["sent"]["removed"]
    there = store.in_bucket("me/runs")
    assert {name: there.pop(name) for name in others} == others
    assert {name.removeprefix(INSIDE): data for name, data in there.items()} == made[2]
    marked, hidden, shards, commit, tidied, unmarked = store.buckets["me/runs"].batches
    assert hidden == [("deleteFile", f"{INSIDE}.metadata")] and commit == [("addFile", f"{INSIDE}.metadata")]
    assert {kind for kind, _ in shards} == {"addFile"} and marked == [("addFile", MARK)]
    assert tidied == [("deleteFile", path) for path in done["sent"]["removed"]] and unmarked == [("deleteFile", MARK)]


def test_a_new_index_replaces_the_old_one(store: Hub) -> None:
    """In one step, where no shard has the name of another: a reader finds the old checkpoint or the new one."""
    words = ("convert", SAMPLE, "hf://buckets/me/runs/m", "--to", "safetensors", "--only", "model", "--overwrite")
    run(*words, "--max-shard-size", "4KB")
    old = set(store.in_bucket("me/runs"))
    store.buckets["me/runs"].batches.clear()
    run(*words, "--max-shard-size", "2KB")
    _, shards, commit, tidied, unmarked = store.buckets["me/runs"].batches
    assert commit == [("addFile", "m/model.safetensors.index.json")]
    assert {kind for kind, _ in shards} == {"addFile"} and not {path for _, path in shards} & {
        name for name in old if name.endswith(".safetensors")
    }
    assert {path for _, path in tidied} == old - set(store.in_bucket("me/runs"))
    assert unmarked == [("deleteFile", "m/.ckpttool.partial")]
    assert run("diff", SAMPLE, "hf://buckets/me/runs/m", "--only", "model")["verdict"] == "same"


def test_every_format(store: Hub, tmp_path: Path) -> None:
    for words in (
        ("a/model.safetensors", "--only", "model"),
        ("c/all.pt",),
        ("d", "--to", "fsdp1", "--only", "model"),
        ("e", "--producer", "accelerate", "--drop", "step"),
    ):
        (tmp_path / "x" / words[0]).parent.mkdir(parents=True, exist_ok=True)
        run("convert", SAMPLE, tmp_path / "x" / words[0], *words[1:])
        run("convert", SAMPLE, f"hf://buckets/me/runs/{words[0]}", *words[1:])
        batches = store.buckets["me/runs"].batches
        assert len(batches[-1 if batches[-1][0][0] == "addFile" else -2]) == 1
    assert store.in_bucket("me/runs") == contents(tmp_path / "x")
    # One file replaces itself, and no other.
    run("convert", SAMPLE, "hf://buckets/me/runs/c/all.pt", "--only", "model", code=OverwriteError.exit_code)
    run("convert", SAMPLE, "hf://buckets/me/runs/c/all.pt", "--only", "model", "--overwrite")
    assert len(store.in_bucket("me/runs")) == len(contents(tmp_path / "x"))
    run("reshard", SAMPLE, "hf://buckets/me/runs/w2", "--to-world", "2")
    assert run("inspect", "hf://buckets/me/runs/w2")["world_size"] == 2


def test_an_export(store: Hub, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_shard_size": "1KB", "card": False}
    ckpttool.export(SAMPLE, tmp_path / "here", **options)
    done = ckpttool.export(SAMPLE, "hf://buckets/me/runs/model", **options)
    assert store.in_bucket("me/runs", "model/") == contents(tmp_path / "here")
    assert store.buckets["me/runs"].batches[-2:] == [
        [("addFile", "model/model.safetensors.index.json")],
        [("deleteFile", "model/.ckpttool.partial")],
    ]
    assert done.file_bytes < 2000, "shards are gathered as they are sent"
    with pytest.raises(OverwriteError):
        ckpttool.export(SAMPLE, "hf://buckets/me/runs/model", **options)
    before = sent(store)
    again = ckpttool.export(SAMPLE, "hf://buckets/me/runs/model", **options, overwrite=True)
    assert {file.status for file in again.sent.files} == {"unchanged"} and sent(store) == before
    # Fewer files: those that are left over are removed, once the new ones are there.
    ckpttool.export(SAMPLE, "hf://buckets/me/runs/model", card=False, overwrite=True)
    ckpttool.export(SAMPLE, tmp_path / "one", card=False)
    assert store.in_bucket("me/runs", "model/") == contents(tmp_path / "one")
    with pytest.raises(UsageError, match=r"is inside|is the source"):
        ckpttool.export("hf://buckets/me/runs/model", "hf://buckets/me/runs/model", overwrite=True)


BATCHES = ("mark", "hide", "name", "commit", "tidy", "unmark")


@pytest.mark.parametrize(
    ("at", "is_done"),
    [
        pytest.param(at, done, id=f"{name} {'done' if done else 'asked'}", marks=() if at == 3 else pytest.mark.long)
        for at, name in enumerate(BATCHES)
        for done in (False, True)
    ],
)
def test_a_kill_between_two_batches(
    store: Hub, monkeypatch: pytest.MonkeyPatch, made: dict[int, dict[str, bytes]], at: int, is_done: bool
) -> None:
    """What is left is the old checkpoint, none, or the new one; the next run makes it the new one."""
    store.make_bucket("me/runs", {f"{INSIDE}{name}": data for name, data in made[4].items()} | {f"{INSIDE}notes": b"x"})
    real, count = huggingface_hub.HfApi.batch_bucket_files, iter(range(10))

    def batch(*args: Any, **options: Any) -> None:
        if next(count) != at:
            real(*args, **options)
            return
        if is_done:
            real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub.HfApi, "batch_bucket_files", batch)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        ckpttool.convert(SAMPLE, DST, to="dcp", to_world=2, overwrite=True)
    moment = at + is_done  # batches that were done
    if moment in (0, 1, 4, 5, 6):
        assert ckpttool.inspect(DST).world_size == (4 if moment < 2 else 2)
    else:
        with pytest.raises(CkptError):
            ckpttool.inspect(DST)
    before = sent(store)
    assert ckpttool.convert(SAMPLE, DST, to="dcp", to_world=2, overwrite=True).exit_code == 0
    there = store.in_bucket("me/runs", INSIDE)
    assert made[2].items() <= there.items() and there["notes"] == b"x"
    assert moment < 3 or sent(store) - before < 2048, "shards that are there are not sent again"
    assert ckpttool.diff(SAMPLE, DST).same


HALVES = {
    "a model with tied weights": {"to": "safetensors", "only": "model", "max_shard_size": 300},
    "a state": {"to": "safetensors"},
    "the Trainer's": {"producer": "trainer"},
    "a universal one": {"producer": "deepspeed"},
    "files of ranks": {"to": "fsdp1"},
}


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Context manager of a run that is killed before one of its requests that change the bucket, counted from 0."""
    real, count = huggingface_hub.HfApi.batch_bucket_files, iter(range(9))

    def batch(*args: Any, **given: Any) -> None:
        if next(count) == number:
            raise KeyboardInterrupt
        real(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.HfApi, "batch_bucket_files", batch)
        yield


@pytest.mark.parametrize("kind", HALVES)
def test_a_half_that_looks_whole(store: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """What a killed run has named, all but the last file, is no checkpoint, as the mark says; nor is it in a run."""
    options, weight = HALVES[kind], torch.ones(64)
    torch.save({"model": {"a": weight, "b": torch.zeros(64), "tied": weight}}, tmp_path / "tied.pt")
    source = tmp_path / "tied.pt" if "only" in options else SAMPLE
    ckpttool.convert(source, f"{DST[:-1]}0", **options)
    with killed_at(monkeypatch, 2), pytest.raises((KeyboardInterrupt, SystemExit)):
        ckpttool.convert(source, DST, **options)
    assert len(store.in_bucket("me/runs", INSIDE)) > 2
    with pytest.raises(RemoteError, match="is not a whole checkpoint: a run writes it, or has ended"):
        ckpttool.inspect(DST)
    assert ckpttool.diff(f"{DST[:-1]}0", "hf://buckets/me/runs/run7").same
    # What is not the same takes its place, and leaves nothing of it.
    with pytest.raises(OverwriteError):
        ckpttool.convert(SAMPLE, DST, to="dcp")
    ckpttool.convert(SAMPLE, DST, to="dcp", overwrite=True)
    ckpttool.convert(SAMPLE, tmp_path / "dcp", to="dcp")
    assert store.in_bucket("me/runs", INSIDE) == contents(tmp_path / "dcp")


@pytest.mark.parametrize("at", [2, 3])
def test_clean_lists_and_removes_what_a_killed_run_left(
    store: Hub, monkeypatch: pytest.MonkeyPatch, made: dict[int, dict[str, bytes]], at: int
) -> None:
    """By its mark: nothing else in the folder, and nothing of a run that goes on."""
    convert(2, dst=f"{DST[:-1]}0")
    with killed_at(monkeypatch, at), pytest.raises((KeyboardInterrupt, SystemExit)):
        ckpttool.convert(SAMPLE, DST, to="dcp", to_world=4)
    running = ckpttool.clean(DST[: -len("/step-1")])
    assert [(one.names, one.state) for one in running.left] == [(["step-1/.ckpttool.partial"], "running")]
    assert ckpttool.clean(DST, yes=True).verdict == "clean"
    # Its process has ended.
    monkeypatch.setattr("ckpttool.remote.hub.bucket_mark.is_running", lambda owner: False)
    store.put_in_bucket("me/runs", {f"{INSIDE}notes": b"mine"})
    (left,) = ckpttool.clean(DST).left
    beside = ("notes", ".ckpttool.partial")
    named = [data for name, data in store.in_bucket("me/runs", INSIDE).items() if name not in beside]
    # Behind the last file only the mark is left.
    assert left.state == "ended" and left.nbytes == (sum(map(len, named)) if at == 2 else 0) and named
    assert ckpttool.clean(DST, yes=True).removed_bytes == left.nbytes
    rest = {} if at == 2 else made[4]
    assert store.in_bucket("me/runs", INSIDE) == {**rest, "notes": b"mine"}
    assert store.in_bucket("me/runs", f"{INSIDE[:-2]}0/") == made[2]
    assert ckpttool.clean(DST).left == []


def test_clean_beside_a_run_that_takes_over(store: Hub, monkeypatch: pytest.MonkeyPatch, made: dict[int, Any]) -> None:
    """What it lists as left may have become a checkpoint when it comes to remove it."""
    with killed_at(monkeypatch, 2), pytest.raises((KeyboardInterrupt, SystemExit)):
        ckpttool.convert(SAMPLE, DST, to="dcp", to_world=4)
    monkeypatch.setattr("ckpttool.remote.hub.bucket_mark.is_running", lambda owner: False)
    left = Bucket.left

    def early(bucket: Bucket, name: str) -> list[LeftObjects]:
        listed = left(bucket, name)
        convert(4)
        return listed

    monkeypatch.setattr(Bucket, "left", early)
    assert [(one.state, one.removed) for one in ckpttool.clean(DST, yes=True).left] == [("running", False)]
    assert store.in_bucket("me/runs", INSIDE) == made[4]


@pytest.mark.parametrize("at", range(7))
def test_a_kill_beside_a_last_file_with_the_same_bytes(
    store: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: int
) -> None:
    """Another step of a model has the same index. Of the old checkpoint nothing is missing while that is there; of the
    new one nothing is too much, and what somebody else has written since stays."""
    old, new = {"tokenizer.json": b"t", "a": b"1", "b": b"1", "index": b"i"}, {"a": b"2", "b": b"2", "index": b"i"}
    bucket = store.make_bucket("me/runs", {f"{INSIDE}{name}": data for name, data in old.items()})
    files = [Outgoing(name, 1, path=str(tmp_path / name)) for name in new]
    for name, data in new.items():
        (tmp_path / name).write_bytes(data)
    with killed_at(monkeypatch, at), pytest.raises(KeyboardInterrupt) if at < 6 else nullcontext():
        destination(DST).publish(files, overwrite=True, replaces=[*old])
    seen = {} if at in (2, 3) else old if at < 2 else new
    assert (names_at(DST) if seen else set()) == set(seen)
    assert at in (2, 3) or {name: (locate(DST) / name).read() for name in seen} == seen
    assert (MARK in bucket.files) == (0 < at < 6)
    if at == 4:
        store.put_in_bucket("me/runs", {f"{INSIDE}tokenizer.json": b"another"})
        assert names_at(DST) == {*new, "tokenizer.json"}


def test_what_a_killed_run_left_is_taken_over(store: Hub, made: dict[int, dict[str, bytes]]) -> None:
    """Without `--overwrite`: shards and no index, which have the bytes that are to be written."""
    left = {f"{INSIDE}{name}": data for name, data in made[4].items() if name != ".metadata"}
    store.make_bucket("me/runs", left | {"run7/step-10/x": b"the same letters"})
    done = convert(4)
    assert store.in_bucket("me/runs", INSIDE) == made[4] and store.buckets["me/runs"].batches == [
        [("addFile", f"{INSIDE}.metadata")]
    ]
    assert {file["path"]: file["status"] for file in done["sent"]["files"]} == {
        name: "new" if name == ".metadata" else "unchanged" for name in made[4]
    }
    # What has other bytes is somebody's, and so is what is not written at all.
    for path, data in ((f"{INSIDE}__0_0.distcp", made[4]["__0_0.distcp"][:-1] + b"?"), (f"{INSIDE}notes", b"mine")):
        store.make_bucket("me/runs", left | {path: data})
        assert path in convert(4, code=OverwriteError.exit_code)["error"]["found"]
        assert store.in_bucket("me/runs") == left | {path: data} and store.buckets["me/runs"].batches == []


def nonsense(handler: Handler) -> bool:
    """Nothing was done, and the answer does not say so."""
    handler._drain()
    handler._answer(200, b"<html>")
    return True


FAILURES: dict[str, tuple[Any, type[CkptError], str]] = {
    "a shard": (lambda hub: hub.buckets["me/runs"].refused.add(f"{INSIDE}__1_0.distcp"), RemoteError,
                r"did not take `run7/step-1/__1_0\.distcp`: refused by the test"),
    "the index": (lambda hub: hub.buckets["me/runs"].refused.add(f"{INSIDE}.metadata"), RemoteError,
                  r"did not take `run7/step-1/\.metadata`"),
    "the batch": (lambda hub: hub.fail("POST", "/batch", status=503), RemoteError, r"\(503\)"),
    "an answer of no Hub": (lambda hub: hub.fail("POST", "/batch", act=nonsense), RemoteError,
                            "does not answer as the Hub does"),
    "the storage": (lambda hub: hub.fail("POST", "^/cas/v1/xorbs", status=403), RemoteError, r"\(403\)"),
    "the listing": (lambda hub: hub.fail("GET", "/tree", status=500), RemoteError, r"\(500\)"),
    "write access": (lambda hub: hub.fail("GET", "/xet-write-token", status=403), RemoteError, r"\(403\)"),
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails(
    store: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[int, dict[str, bytes]], failure: str
) -> None:
    act, kind, message = FAILURES[failure]
    for name, value in {"RETRY_MAX_ATTEMPTS": "2", "RETRY_BASE_DELAY": "50ms"}.items():
        monkeypatch.setenv(f"HF_XET_CLIENT_{name}", value)
    abort_xet_session()
    bucket = store.make_bucket("me/runs")
    act(store)
    with pytest.raises(kind, match=message) as raised:
        ckpttool.convert(SAMPLE, DST, to="dcp", to_world=4)
    assert raised.value.hint and WRITER not in str(raised.value) and os.listdir(tmp_path / "tmp") == []
    assert f"{INSIDE}.metadata" not in bucket.files
    store.faults.clear()
    bucket.refused.clear()
    ckpttool.convert(SAMPLE, DST, to="dcp", to_world=4)
    assert store.in_bucket("me/runs", INSIDE) == made[4]


def test_what_may_pass_is_asked_again(store: Hub, made: dict[int, dict[str, bytes]]) -> None:
    """Also where the first request was carried out, and its answer lost."""
    store.make_bucket("me/runs", {f"{INSIDE}{name}": data for name, data in made[4].items()})
    for method, path in (("POST", "/batch"), ("GET", "/tree"), ("GET", "/xet-write-token"), ("GET", "/me/runs$")):
        store.fail(method, path, status=503, times=1)
    for skip in (1, 2, 5):
        store.fail("POST", "/batch", after=True, times=1, skip=skip)
    store.fail("POST", "/batch", act=drop, times=1, skip=3)
    convert(2, "--overwrite")
    assert store.failed >= 7 and store.in_bucket("me/runs", INSIDE) == made[2]


def test_somebody_else_writes_there(store: Hub, made: dict[int, dict[str, bytes]]) -> None:
    """The last writer wins, and the other one is told."""
    store.make_bucket("me/runs")

    def act(handler: Handler) -> bool:
        store.put_in_bucket("me/runs", {f"{INSIDE}__0_0.distcp": b"theirs"})
        return False

    store.fail("GET", "/tree", act=act, times=1, skip=3)
    error = convert(4, code=RemoteError.exit_code)["error"]
    assert "differs from what was sent" in error["message"] and "__0_0.distcp" in error["message"]


def test_what_lies_beside_a_model_in_a_bucket(store: Hub, tmp_path: Path) -> None:
    """Config and tokenizer come along, from a bucket and to one, and nothing says that the bucket is a model."""
    config, weights = b'{"model_type": "own", "dtype": "float32"}', save({"w": torch.ones(3, 4)}, {"format": "pt"})
    store.make_bucket("org/base", {"m/config.json": config, "m/tokenizer.json": b"{ }", "m/model.safetensors": weights})
    save_file({"w": torch.zeros(3, 4)}, tmp_path / "x.safetensors", {"format": "pt"})
    ckpttool.export("hf://buckets/org/base/m", tmp_path / "out", dtype="bfloat16")
    assert {"config.json", "tokenizer.json"} < {path.name for path in (tmp_path / "out").iterdir()}
    ckpttool.export(tmp_path / "x.safetensors", "hf://buckets/me/runs/model", assets="hf://buckets/org/base/m")
    there = store.in_bucket("me/runs", "model/")
    assert there["config.json"] == config and b"base_model" not in there["README.md"]
    # A repository cannot take the bytes by their hash: they move.
    ckpttool.convert("hf://buckets/me/runs/model", "hf://me/copy/all.pt")
    assert ckpttool.diff("hf://buckets/me/runs/model", "hf://me/copy/all.pt").same


def test_what_is_refused(store: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    store.make_bucket("me/runs", {"run7/step-1/.metadata": (SAMPLE / ".metadata").read_bytes()})
    for words, said in (
        (("--tag", "v1"), "`--tag` applies to commits"),
        (("--commit-message", "x"), "`--commit-message` applies to commits"),
        (("--resume",), "--resume"),
        (("--private",), "is public"),
    ):
        assert said in convert(4, *words, dst="hf://buckets/me/runs/new", code=UsageError.exit_code)["error"]["message"]
    with pytest.raises(UsageError, match="applies to commits"):
        ckpttool.export(SAMPLE, "hf://buckets/me/runs/new", create_pr=True)
    assert "no revisions" in convert(4, dst="hf://buckets/me/runs@x/new", code=2)["error"]["message"]
    monkeypatch.setenv("HF_TOKEN", READER)
    assert "(403)" in convert(4, dst="hf://buckets/me/runs/new", code=8)["error"]["message"]
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert "over Xet" in convert(4, dst="hf://buckets/me/runs/new", code=2)["error"]["message"]
    assert list(store.buckets["me/runs"].files) == ["run7/step-1/.metadata"]


def test_a_run_is_not_replaced(store: Hub, made: dict[int, dict[str, bytes]]) -> None:
    files = {f"run7/step-{n}/{name}": data for n in (1, 2) for name, data in made[4].items()}
    store.make_bucket("me/runs", files)
    for dst in ("hf://buckets/me/runs/run7", "hf://buckets/me/runs"):
        error = convert(2, "--overwrite", dst=dst, code=OverwriteError.exit_code)["error"]
        assert "has other checkpoints in it" in error["message"]
    assert store.in_bucket("me/runs") == files


def test_old_checkpoints_are_pruned(store: Hub, made: dict[int, dict[str, bytes]]) -> None:
    """The index of each goes first; a repository keeps what is removed in any case."""
    files = {f"run7/step-{n}/{name}": data for n in (1, 2, 3) for name, data in made[2].items()}
    store.make_bucket("me/runs", files | {"run7/notes": b"mine"})
    assert ckpttool.prune("hf://buckets/me/runs/run7", keep_last=1).freed_bytes == 2 * sum(map(len, made[2].values()))
    assert len(store.in_bucket("me/runs")) == len(files) + 1 and not store.buckets["me/runs"].batches
    done = run("prune", "hf://buckets/me/runs/run7", "--keep-last", "1", "--yes")
    assert done["verdict"] == "pruned" and store.in_bucket("me/runs") == {"run7/notes": b"mine"} | {
        name: data for name, data in files.items() if name.startswith("run7/step-3/")
    }
    index, rest, *_ = store.buckets["me/runs"].batches
    names = {name for _, name in index}
    assert names == {f"run7/step-1/{name}" for name in (".metadata", "integrity.json")} and len(rest) == 2
    store.make("me/model", files)
    with pytest.raises(UsageError, match="keeps what is removed in its history"):
        ckpttool.prune("hf://me/model/run7", keep_last=1, yes=True)


def test_secrets_are_not_sent(store: Hub, tmp_path: Path) -> None:
    torch.save(
        {"w": torch.zeros(3), "args": {"key": "hf_" + "".join(random.Random(1).choices(string.ascii_letters, k=34))}},
        tmp_path / "x.pt",
    )
    with pytest.raises(UsageError, match="nothing is sent"):
        ckpttool.convert(tmp_path / "x.pt", "hf://buckets/me/runs/x.pt")
    assert not store.buckets.get("me/runs") or not store.buckets["me/runs"].files


def variables_of(hub: Hub, folder: Path) -> dict[str, str]:
    """Those of a process that writes to buckets of the test Hub."""
    variables = {**environment(hub, folder), "HF_XET_XORB_COMPRESSION_POLICY": "none", "OMP_NUM_THREADS": "1"}
    del variables["HF_HUB_DISABLE_XET"]
    return variables


def test_a_state_is_saved(store: Hub, tmp_path: Path) -> None:
    """From inside training; the file that makes a checkpoint of it gets its name last."""
    model = torch.nn.Linear(8, 8)
    ckpttool.save(DST, model, step=1)
    _, shards, commit, _ = store.buckets["me/runs"].batches
    assert commit == [("addFile", f"{INSIDE}.metadata")] and len(shards) == 2
    other = torch.nn.Linear(8, 8)
    assert ckpttool.load(DST, other).rest["step"] == 1 and torch.equal(other.weight, model.weight)
    with pytest.raises(OverwriteError):
        ckpttool.save(DST, model)
    ckpttool.save(DST, other, step=2, overwrite=True)
    assert ckpttool.load(DST, model).rest["step"] == 2 and ckpttool.verify(DST).exit_code == 0


@pytest.mark.long
def test_several_processes(store: Hub, tmp_path: Path, made: dict[int, dict[str, bytes]]) -> None:
    """Each sends its own files, from a bucket, too; one gives all of them their names. If one is killed, none has."""
    program = [str(ROOT / "ckpttool"), "convert", SAMPLE, DST, "--to", "dcp", "--to-world", "4"]

    def start(*words: str | Path) -> subprocess.Popen[str]:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # Not from the server of warm processes, whose children the ranks would be.
        launcher = [sys.executable, forked_launcher()[-1], "2"]
        return subprocess.Popen([*launcher, *map(str, words)], env=variables_of(store, tmp_path), **pipes)

    running = start(*program)

    def kill(handler: Handler) -> bool:
        ranks = sorted(map(int, Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()))
        os.kill(ranks[-1], signal.SIGKILL)
        return False

    store.fail("POST", "^/cas/v1/xorbs", act=kill, times=1)
    said, _ = running.communicate(timeout=120)
    assert running.returncode not in (0, None), said
    assert store.in_bucket("me/runs") == {}
    store.faults.clear()
    running = start(*program)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and "2 of torchrun" in said, said
    assert store.in_bucket("me/runs", INSIDE) == made[4]
    marked, shards, commit, tidied = store.buckets["me/runs"].batches
    assert commit == [("addFile", f"{INSIDE}.metadata")] and len(shards) == len(made[4]) - 1
    assert marked == [("addFile", MARK)] and tidied == [("deleteFile", MARK)]
    # What is there already is not sent again, whoever of the two would.
    before = sent(store)
    running = start(*program[:2], DST, "hf://buckets/me/runs/copy", *program[4:])
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert store.in_bucket("me/runs", "copy/") == made[4] and sent(store) - before < 1.1 * before
    running = start(*program, "--overwrite")
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and "6 unchanged" in said, said
    running = start(*program[:3], "hf://me/runs", *program[4:])
    said, _ = running.communicate(timeout=120)
    assert running.returncode == UsageError.exit_code and "written by one process" in said, said


@pytest.mark.long
def test_a_process_that_is_killed(store: Hub, tmp_path: Path, made: dict[int, dict[str, bytes]]) -> None:
    """With SIGKILL, when the server has one of its requests; the next run finishes, and sends no shard again that has
    a name."""
    variables = variables_of(store, tmp_path)
    command = [sys.executable, "-m", "ckpttool", "convert", SAMPLE, DST, "--to", "dcp", "--to-world", "2"]
    old = {f"{INSIDE}{name}": data for name, data in made[4].items()} | {f"{INSIDE}notes": b"x"}
    for path, at in (("/shards", 0), *(("/batch", number) for number in range(6))):
        store.faults.clear()
        store.make_bucket("me/runs", old)
        running = subprocess.Popen([*command, "--overwrite"], env=variables, stderr=subprocess.PIPE)

        def kill(handler: Handler, running: subprocess.Popen[bytes] = running) -> bool:
            running.kill()
            running.wait()
            return False

        store.fail("POST", path, act=kill, times=1, skip=at)
        _, said = running.communicate(timeout=120)
        assert running.returncode == -signal.SIGKILL, said
        try:
            world = ckpttool.inspect(DST).world_size
        except CkptError:
            world = None
        # The request may have arrived whole before the kill, or not.
        is_old, is_new = path == "/shards" or at == 0, path == "/batch" and at > 3
        assert world in ((4,) if is_old else (2,) if is_new else (4, None) if at == 1 else (None, 2))
        ckpttool.convert(SAMPLE, DST, to="dcp", to_world=2, overwrite=True)
        there = store.in_bucket("me/runs", INSIDE)
        assert made[2].items() <= there.items() and there["notes"] == b"x"
        assert ckpttool.diff(SAMPLE, DST).same
    assert os.listdir(tmp_path / "tmp") == []
