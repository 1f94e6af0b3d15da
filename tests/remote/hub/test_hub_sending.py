"""The Hub as a destination: exactly the right files in one commit or none, whatever happens on the way."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, lfs
from support.hub_client import check_told_to_nobody, everything_logged, patience
from support.hub_server import READER, Fault, Handler, Hub, drop, stall

from ckpttool.errors import CkptError, OverwriteError, RemoteError, StorageError, UsageError
from ckpttool.models.weight_names import outdated
from ckpttool.remote.hub import Sent, listing
from ckpttool.remote.hub.listing import RepoFile
from ckpttool.storage.stores import Outgoing, destination


def send(outgoing: list[Outgoing], address: str, **options: Any) -> Sent:
    sent: Sent = destination(address).publish(outgoing, **{"outdated": outdated, **options})
    return sent


class Files:
    """Outgoing files of known bytes, and how often each was made."""

    def __init__(self, **files: bytes) -> None:
        self.bytes = {name.replace("__", "."): data for name, data in files.items()}
        self.made: list[str] = []
        self.written = defaultdict[str, threading.Event](threading.Event)
        self.most = 0

    def outgoing(self) -> list[Outgoing]:
        return [Outgoing(name, len(data), self._writer(name)) for name, data in self.bytes.items()]

    def _writer(self, name: str) -> Callable[[str], None]:
        def write(path: str) -> None:
            self.made.append(name)
            folder = Path(path).parent
            there = len(self.bytes[name])
            for one in folder.rglob("*"):
                with suppress(FileNotFoundError):  # it is sent by now
                    there += one.stat().st_size if one.is_file() else 0
            self.most = max(self.most, there)
            with open(path, "xb") as stream:
                stream.write(self.bytes[name])
            self.written[name].set()

        return write


def weights(seed: int, size: int = 300_000) -> bytes:
    block = hashlib.sha256(str(seed).encode()).digest()
    return (block * (size // 32 + 1))[:size]


def shards(count: int = 3, seed: int = 0, **others: bytes) -> Files:
    made = Files(**others)
    for i in range(1, count + 1):
        made.bytes[f"model-{i:05d}-of-{count:05d}.safetensors"] = weights(seed + i)
    made.bytes["model.safetensors.index.json"] = b'{"metadata":{},"weight_map":{"seed":"%d"}}' % seed
    made.bytes["config.json"] = b'{"model_type":"llama"}'
    made.bytes["README.md"] = b"---\ntags: [x]\n---\n# A model\n"
    made.bytes["tokenizer.json"] = b"{" + b" " * 5000 + b"}"
    return made


def statuses(sent: Sent) -> set[str]:
    return {file.status for file in sent.files}


def test_each_file_is_hashed_once_by_the_digest_that_names_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHA-256 of what goes to the storage of large files, SHA-1 of what git keeps."""
    hashed: list[str] = []
    compute, of_client = listing.compute_digest, lfs.sha_fileobj

    def by_us(path: str, in_git: bool) -> RepoFile:
        hashed.append(f"{'SHA-1' if in_git else 'SHA-256'} {os.path.basename(path)}")
        return compute(path, in_git)

    def by_client(stream: Any, *arguments: Any) -> bytes:
        hashed.append(f"SHA-256 {os.path.basename(stream.name)}")
        return of_client(stream, *arguments)

    monkeypatch.setattr(listing, "compute_digest", by_us)
    monkeypatch.setattr(lfs, "sha_fileobj", by_client)
    files = shards(2)
    large = {name for name, data in files.bytes.items() if len(data) > 1000}
    expected = sorted(f"{'SHA-256' if name in large else 'SHA-1'} {name}" for name in files.bytes)
    send(files.outgoing(), "hf://me/model")
    assert sorted(hashed) == expected
    hashed.clear()
    assert statuses(send(files.outgoing(), "hf://me/model")) == {"unchanged"}
    assert sorted(hashed) == expected
    # Of another size, a file is another one without a look at its bytes; of the same size, it takes one.
    hashed.clear()
    files.bytes = {name: data + b" " if name == "README.md" else data[::-1] for name, data in files.bytes.items()}
    assert statuses(send(files.outgoing(), "hf://me/model")) == {"changed"}
    assert sorted(hashed) == expected
    assert hub.files("me/model") == files.bytes


def test_a_repository_is_made_and_filled_in_one_commit(hub: Hub, tmp_path: Path) -> None:
    files = shards()
    sent = send(files.outgoing(), "hf://me/model", private=True, message="the first")
    assert hub.files("me/model") == files.bytes
    assert hub.history("me/model") == ["the first", "initial commit"]
    assert hub.repos["me/model"].private
    assert sent.created and statuses(sent) == {"new"}
    assert sent.sent_bytes == sum(map(len, files.bytes.values()))
    assert sent.commit == f"{hub.url}/me/model/commit/{hub.repos['me/model'].refs['main']}"
    assert os.listdir(tmp_path / "tmp") == []
    assert not hub.asked("PUT", "Authorization"), "the store of large files is another host"
    assert all(one.authorization is None for one in hub.asked("PUT", "/lfs/"))


@pytest.mark.parametrize("free, most", [(1_800_000, 900_000), (1_799_999, 300_000)])
def test_files_are_written_ahead_where_half_of_the_disk_has_room(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, free: int, most: int
) -> None:
    monkeypatch.setattr("ckpttool.storage.free_space.free_bytes", lambda _: free)
    files = shards(5)

    def wait_for_others(_: Handler) -> bool:
        third_written.wait(10 if most == 900_000 else 0.05)
        return False

    third_written = files.written["model-00003-of-00005.safetensors"]
    hub.fail("PUT", "/lfs/", act=wait_for_others)
    send(files.outgoing(), "hf://me/model")
    assert hub.files("me/model") == files.bytes and files.most == most
    assert [file for file in files.made if file in files.bytes] == list(files.bytes), "in their order"


@pytest.mark.parametrize("staged", [False, True])
def test_a_failure_of_one_file_ends_the_others(hub: Hub, tmp_path: Path, staged: bool) -> None:
    """The first file meets a silent server, the second is refused: the error is of the second, and does not wait."""
    hub.make("me/model", {})
    files, received, over = shards(9), threading.Event(), threading.Event()

    def refuse_second(handler: Handler) -> bool:
        second = hashlib.sha256(files.bytes["model-00002-of-00009.safetensors"]).hexdigest()
        return not (second in handler.path and received.wait(300)) and hang(over, received, handler)

    hub.fail("PUT", "/lfs/", status=403, act=refuse_second)
    stage = {"stage": str(tmp_path / "stage")} if staged else {}
    with pytest.raises(RemoteError, match="model-00002-of-00009"):
        send(files.outgoing(), "hf://me/model", **stage)
    assert len(files.made) <= 4, "the others are not written"
    assert hub.files("me/model") == {} and os.listdir(tmp_path / "tmp") == []
    check_no_request_follows(hub, over)


def test_ctrl_c_does_not_wait_for_a_silent_server(hub: Hub, tmp_path: Path) -> None:
    hub.make("me/model", {})
    over, received = threading.Event(), threading.Event()
    hub.fail("PUT", "/lfs/", act=partial(hang, over, received))

    def interrupt(done: int, total: int) -> None:
        if received.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send(shards(9).outgoing(), "hf://me/model", progress=interrupt)
    assert os.listdir(tmp_path / "tmp") == [] and hub.files("me/model") == {}
    check_no_request_follows(hub, over)


def hang(over: threading.Event, received: threading.Event, handler: Handler) -> bool:
    """Receive all, and say nothing until `over`; then hang up. A thread that still sends could end at once."""
    handler.rfile.read(int(handler.headers["Content-Length"]))
    time.sleep(0.2)  # the client looks once more for bytes to send
    received.set()
    assert over.wait(300)
    handler.hang_up()
    return True


def check_no_request_follows(hub: Hub, over: threading.Event) -> None:
    """The threads that were given up end with their requests, which the library would repeat."""
    threads = [thread for thread in threading.enumerate() if thread.name == "ckpttool-sender"]
    assert threads and not over.is_set()
    before = len(hub.seen)
    over.set()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert len(hub.seen) == before


def test_what_is_there_is_not_sent_again(hub: Hub) -> None:
    files = shards()
    send(files.outgoing(), "hf://me/model")
    uploads, before = len(hub.asked("PUT", "/lfs/")), hub.history("me/model")
    sent = send(shards().outgoing(), "hf://me/model")
    assert statuses(sent) == {"unchanged"} and sent.sent_bytes == 0 and sent.commit is None
    assert len(hub.asked("PUT", "/lfs/")) == uploads
    assert hub.history("me/model") == before
    # One shard and one small file are different now.
    files.bytes["model-00002-of-00003.safetensors"] = weights(99)
    files.bytes["config.json"] = b'{"model_type":"qwen3"}'
    sent = send(files.outgoing(), "hf://me/model", message="the second")
    assert {f.path for f in sent.files if f.status == "changed"} == {"model-00002-of-00003.safetensors", "config.json"}
    assert hub.files("me/model") == files.bytes
    assert len(hub.asked("PUT", "/lfs/")) == uploads + 1


def test_stale_shards_go_in_the_same_commit(hub: Hub) -> None:
    hub.make(
        "me/model",
        {
            "pytorch_model.bin": b"old",
            "notes.txt": b"mine",
            "other/model.safetensors": b"another",
            ".gitattributes": b"",
        },
    )
    send(shards(5).outgoing(), "hf://me/model")
    one = Files(model__safetensors=weights(7), config__json=b"{}")
    planned = send(one.outgoing(), "hf://me/model", dry_run=True)
    sent = send(one.outgoing(), "hf://me/model")
    shard_names = [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    stale = [*shard_names, "model.safetensors.index.json"]
    assert sent.removed == planned.removed == stale
    there = hub.files("me/model")
    assert set(there) == {
        "model.safetensors", "config.json", "README.md", "tokenizer.json", "notes.txt",
        "other/model.safetensors",
    }  # fmt: skip
    assert len(hub.history("me/model")) == 4, "two of the test, and one for each export"


OLD = (
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "model.fp16.safetensors",
    "model.fp16-00001-of-00002.safetensors",
    "tf_model.h5",
    "model.safetensors.index.fp16.json",
    "flax_model.msgpack",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
OTHERS = (
    "model.gguf",
    "notes.txt",
    "x/pytorch_model.bin",
    "training_args.bin",
    "optimizer.bin",
    "tokenizer.model",
    "model.py",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "1_Pooling/config.json",
    "model_index.json",
)


def test_a_model_replaces_the_weights_of_other_formats_and_an_adapter(hub: Hub) -> None:
    before = {name: name.encode() for name in (*OLD, *OTHERS)}
    hub.make("me/model", before)
    hub.make("me/folder", {**before, **{f"v2/{name}": data for name, data in before.items()}})
    model = Files(model__safetensors=weights(7), config__json=b"{}")
    planned = send(model.outgoing(), "hf://me/model", dry_run=True, keep=["consolidated*"])
    sent = send(model.outgoing(), "hf://me/model", keep=["consolidated*"])
    assert sent.removed == planned.removed == sorted(n for n in OLD if not n.startswith("consolidated"))
    kept = {"consolidated.safetensors", "consolidated.00.pth"}
    assert set(hub.files("me/model")) == {*OTHERS, *kept, "model.safetensors", "config.json"}
    assert hub.history("me/model")[1:] == ["somebody's", "initial commit"], "in one commit"
    # In the folder that is written to, and in no other.
    sent = send(model.outgoing(), "hf://me/folder/v2")
    assert sent.removed == sorted(f"v2/{name}" for name in OLD)
    assert set(before) <= set(hub.files("me/folder"))
    # A misspelled name would remove what is to stay; nothing is sent.
    hub.make("me/typo", before)
    with pytest.raises(UsageError, match="matches no file") as raised:
        send(model.outgoing(), "hf://me/typo", keep=["pytorch.bin"])
    assert "adapter_config.json" in str(raised.value.hint)
    assert not {*hub.files("me/typo")} - {*before}
    # An adapter replaces an adapter, and not the model beside it.
    hub.make("me/adapter", before)
    sent = send(Files(adapter_model__safetensors=weights(8), adapter_config__json=b"{}").outgoing(), "hf://me/adapter")
    assert sent.removed == ["adapter_model.bin"]
    # The models of a pipeline have names of their own, and folders.
    old = [f"{folder}/diffusion_pytorch_model{kind}.bin" for folder in ("unet", "vae") for kind in ("", ".fp16")]
    hub.make("me/pipeline", {**before, **dict.fromkeys(old, b"")})
    unet = [replace(file, name="unet/diffusion_pytorch_model.safetensors") for file in Files(x=weights(8)).outgoing()]
    sent = send(unet, "hf://me/pipeline")
    assert sent.removed == ["unet/diffusion_pytorch_model.bin", "unet/diffusion_pytorch_model.fp16.bin"]


def test_a_dry_run_changes_nothing(hub: Hub, tmp_path: Path) -> None:
    planned = send(shards().outgoing(), "hf://me/model", dry_run=True)
    assert planned.created and statuses(planned) == {"new"}
    assert "me/model" not in hub.repos
    files = shards()
    send(files.outgoing(), "hf://me/model")
    before = (hub.history("me/model"), len(hub.asked("PUT", "/lfs/")))
    files.bytes["config.json"] = b'{"model_type":"qwen3"}'  # of another size
    files.bytes["model-00001-of-00003.safetensors"] = weights(50)  # of the same size
    files.bytes["new.txt"] = b"new"
    planned = send(files.outgoing(), "hf://me/model", dry_run=True)
    assert {f.path: f.status for f in planned.files if f.status != "unchanged"} == {
        "config.json": "changed", "model-00001-of-00003.safetensors": "changed", "new.txt": "new",
    }  # fmt: skip
    assert planned.sent_bytes == 22 + 300_000 + 3 and planned.commit is None
    assert (hub.history("me/model"), len(hub.asked("PUT", "/lfs/"))) == before
    assert os.listdir(tmp_path / "tmp") == []


def test_a_branch_a_folder_and_a_pull_request(hub: Hub) -> None:
    repo = hub.make("me/model", {"config.json": b"{}"})
    repo.refs["dev/x"] = repo.refs["main"]
    files = Files(model__safetensors=weights(1), README__md=b"# x\n")
    send(files.outgoing(), "hf://me/model@dev%2Fx")
    assert hub.files("me/model", "dev/x") == {"config.json": b"{}", **files.bytes}
    send(files.outgoing(), "hf://me/model/step-100")
    assert hub.files("me/model") == {"config.json": b"{}", **{f"step-100/{n}": d for n, d in files.bytes.items()}}
    sent = send(files.outgoing(), "hf://me/model", create_pr=True, message="look at this")
    assert sent.pull_request == f"{hub.url}/me/model/discussions/1"
    assert hub.files("me/model", "refs/pr/1").items() >= files.bytes.items()
    assert "model.safetensors" not in hub.files("me/model")
    # Once is enough.
    again = send(files.outgoing(), "hf://me/model", create_pr=True, message="look at this")
    assert len(repo.pulls) == 1 and again.pull_request == sent.pull_request


def test_a_branch_is_created_when_it_is_asked_for(hub: Hub) -> None:
    repo = hub.make("me/model", {"config.json": b"{}", "pytorch_model.bin": b"old"})
    files = Files(model__safetensors=weights(1))
    planned = send(files.outgoing(), "hf://me/model@step%2F100", dry_run=True)
    assert planned.branch_created and planned.removed == ["pytorch_model.bin"] and set(repo.refs) == {"main"}
    before = hub.history("me/model")
    sent = send(files.outgoing(), "hf://me/model@step%2F100")
    assert sent.branch_created and sent.oid == repo.refs["step/100"]
    assert hub.files("me/model", "step/100") == {"config.json": b"{}", **files.bytes}
    assert hub.history("me/model", "step/100") == ["Upload with ckpttool", *before]
    assert hub.history("me/model") == before
    assert not send(files.outgoing(), "hf://me/model@step%2F100").branch_created
    # Of a repository that does not exist, too; main is as the Hub makes it.
    assert send(files.outgoing(), "hf://me/new@v2", dry_run=True).branch_created and "me/new" not in hub.repos
    sent = send(files.outgoing(), "hf://me/new@v2")
    assert sent.created and sent.branch_created and hub.history("me/new") == ["initial commit"]
    assert hub.files("me/new", "v2") == files.bytes
    # What is not a branch, and what a pull request would be to.
    for revision, options in (("0" * 40, {}), ("refs/pr/7", {}), ("nowhere", {"create_pr": True})):
        with pytest.raises(RemoteError, match="no such revision"):
            send(files.outgoing(), f"hf://me/model@{revision}", **options)
    assert set(repo.refs) == {"main", "step/100"}


def test_the_answer_to_a_new_branch_is_lost(hub: Hub) -> None:
    repo = hub.make("me/model", {"config.json": b"{}"})
    hub.faults.append(Fault("POST", "/branch/", after=True, times=1))
    files = Files(model__safetensors=weights(1))
    with pytest.raises(RemoteError):
        send(files.outgoing(), "hf://me/model@dev")
    send(files.outgoing(), "hf://me/model@dev")
    assert hub.history("me/model", "dev") == ["Upload with ckpttool", *hub.history("me/model")] and len(repo.refs) == 2


def test_a_commit_gets_a_tag(hub: Hub) -> None:
    files = Files(model__safetensors=weights(1))
    planned = send(files.outgoing(), "hf://me/model", tag="v1", dry_run=True)
    assert planned.tag == "v1" and "me/model" not in hub.repos
    sent = send(files.outgoing(), "hf://me/model", tag="v1")
    refs = huggingface_hub.HfApi(endpoint=hub.url).list_repo_refs("me/model")
    assert [(ref.name, ref.target_commit) for ref in refs.tags] == [("v1", sent.oid)] and sent.tag == "v1"
    # If nothing differs, the current commit gets it; on a branch, that of the branch.
    assert send(files.outgoing(), "hf://me/model", tag="again").commit is None
    assert hub.repos["me/model"].tags == {"v1": sent.oid, "again": sent.oid}
    other = send(Files(model__safetensors=weights(2)).outgoing(), "hf://me/model@dev", tag="v2/dev")
    assert hub.repos["me/model"].tags["v2/dev"] == other.oid != sent.oid
    # A tag is never moved, nor named as a branch is; nothing is sent.
    before = (hub.history("me/model"), len(hub.asked("PUT", "/lfs/")), dict(hub.repos["me/model"].refs))
    files.bytes["model.safetensors"] = weights(3)
    for address, tag in (("me/model", "v1"), ("me/model", "main"), ("me/model@new", "new")):
        for dry_run in (True, False):
            with pytest.raises(OverwriteError, match=f'tag="{tag}"'):
                send(files.outgoing(), f"hf://{address}", tag=tag, dry_run=dry_run)
    assert (hub.history("me/model"), len(hub.asked("PUT", "/lfs/")), hub.repos["me/model"].refs) == before


def test_the_answer_to_a_tag_is_lost(hub: Hub) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    hub.faults.append(Fault("POST", "/tag/", after=True, times=1))
    sent = send(Files(model__safetensors=weights(1)).outgoing(), "hf://me/model", tag="v1")
    repo = hub.repos["me/model"]
    assert repo.tags == {"v1": sent.oid} and len(hub.history("me/model")) == 3
    # Somebody else creates the tag during the upload.
    data = weights(2)

    def write(path: str) -> None:
        repo.tags["v2"] = str(sent.oid)
        Path(path).write_bytes(data)

    with pytest.raises(OverwriteError, match=f"created elsewhere during the upload, of commit {sent.oid}") as raised:
        send([Outgoing("model.safetensors", len(data), write)], "hf://me/model", tag="v2")
    assert repo.refs["main"] in str(raised.value.hint) and repo.tags["v2"] == sent.oid != repo.refs["main"]


def test_no_message_has_the_credentials_of_an_address() -> None:
    for address in ("https://me:s3cret@host/x", "https://s3cret@host/x", "hf://me:s3cret@hub/x", "s3://:s3cret@host"):
        error = UsageError(f"`{address}` is wrong", hint=f"try {address}", file=address)
        assert "s3cret" not in f"{error} {error!r} {error.facts} {error.args}" and "...@" in error.message
    for address in ("hf://org/name@main", "hf://name@main", "https://host/a@b:c", "me@host: x"):
        assert UsageError(address).message == address


def test_who_may_only_read_may_make_a_pull_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    monkeypatch.setenv("HF_TOKEN", READER)
    files = Files(config__json=b'{"a":1}')
    with pytest.raises(RemoteError, match=r"does not allow this.*\(403\)") as raised:
        send(files.outgoing(), "hf://me/model")
    assert "--create-pr" in str(raised.value.hint)
    assert files.made == [], "nothing is made for a place where it cannot go"
    send(files.outgoing(), "hf://me/model", create_pr=True)


def test_in_several_parts(hub: Hub) -> None:
    hub.part = 70_000
    files = Files(model__safetensors=weights(3))
    send(files.outgoing(), "hf://me/model")
    assert hub.files("me/model") == files.bytes
    assert len(hub.asked("PUT", "/lfs/")) == 5


def test_staged_files_stay(hub: Hub, tmp_path: Path) -> None:
    files, stage = shards(), tmp_path / "stage"
    for _ in range(2):
        send(files.outgoing(), "hf://me/model", stage=str(stage))
        assert {p.name: p.read_bytes() for p in stage.iterdir()} == files.bytes
    (stage / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="the directory contains other files"):
        send(files.outgoing(), "hf://me/model", stage=str(stage))


def test_progress_is_of_what_is_there(hub: Hub) -> None:
    files, told = Files(model__safetensors=weights(1, 9_000_000), b__safetensors=weights(2, 9_000_000)), []
    owner = threading.get_ident()

    def progress(done: int, total: int) -> None:
        assert threading.get_ident() == owner
        told.append((done, total))

    hub.fail("PUT", "/lfs/", act=pause)
    send(files.outgoing(), "hf://me/model", progress=progress)
    assert told == sorted(told) and told[-1] == (18_000_000, 18_000_000)
    assert any(0 < done < 9_000_000 for done, _ in told), "within a file too"
    assert {total for _, total in told} == {18_000_000}


def pause(handler: Handler) -> bool:
    """Read nothing for longer than the client takes to look at its threads."""
    threading.Event().wait(0.3)
    return False


@pytest.mark.parametrize("part", [None, 3_000_000])
def test_progress_does_not_go_back(
    hub: Hub, part: int | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ckpttool.remote.hub.client.disable_progress_bars", lambda: None)
    hub.part, told = part, []
    hub.fail("PUT", "/lfs/", status=503, act=pause, skip=1 if part else 0, times=1)
    hub.fail("PUT", "/lfs/", act=pause)
    files = Files(model__safetensors=weights(1, 9_000_000))
    send(files.outgoing(), "hf://me/model", progress=lambda done, total: told.append(done))
    assert told == sorted(told) and told[-1] == 9_000_000 and len(set(told)) > 2
    assert hub.files("me/model") == files.bytes
    assert "%" not in capfd.readouterr().err, "it has no bar of its own"


# What must not be done ----------------------------------------------------------------------------------------------


def test_private_is_not_silently_public(hub: Hub) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    files = shards()
    with pytest.raises(UsageError, match="is public, and `private=True`"):
        send(files.outgoing(), "hf://me/model", private=True)
    assert files.made == []


def test_somebody_commits_meanwhile(hub: Hub) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    files = shards()

    def intrude(handler: Handler) -> bool:
        hub.commit("me/model", {"theirs.txt": b"x"})
        return False

    hub.fail("POST", "/commit/", act=intrude, times=1)
    with pytest.raises(RemoteError, match="the branch changed during the upload") as raised:
        send(files.outgoing(), "hf://me/model")
    assert raised.value.facts["found"] == 412
    assert hub.history("me/model")[0] == "somebody's"
    uploads = len(hub.asked("PUT", "/lfs/"))
    send(shards().outgoing(), "hf://me/model")
    assert hub.files("me/model") == {**files.bytes, "theirs.txt": b"x"}
    assert len(hub.asked("PUT", "/lfs/")) == uploads, "what was sent is there"


def test_a_file_that_the_repository_ignores(hub: Hub) -> None:
    hub.make("me/model", {".gitignore": b"model.safetensors"})
    with pytest.raises(UsageError, match=r"`\.gitignore` there excludes"):
        send(Files(model__safetensors=weights(1)).outgoing(), "hf://me/model")


def test_what_the_hub_lists_afterwards_is_compared(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Handler._apply

    def careless(self: Handler, files: Any, key: str, value: dict[str, Any]) -> None:
        real(self, files, key, value)
        if value["path"].endswith("2-of-00003.safetensors"):
            files[value["path"]].sha256 = "0" * 64

    monkeypatch.setattr(Handler, "_apply", careless)
    with pytest.raises(RemoteError, match=r"differs from the files that were sent.*00002-of-00003"):
        send(shards().outgoing(), "hf://me/model")


def test_no_room(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.storage.free_space.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match="needs 300 kB"):
        send(shards().outgoing(), "hf://me/model")


@pytest.mark.parametrize("where", ["hf://me", "hf://me/mo del", "hf://me/a--b"])
def test_no_address(hub: Hub, where: str) -> None:
    with pytest.raises((UsageError, RemoteError)):
        send(shards().outgoing(), where)
    assert not hub.repos


def test_a_file_that_cannot_be_made(hub: Hub, tmp_path: Path) -> None:
    def broken(path: str) -> None:
        raise StorageError("no")

    files = shards()
    with pytest.raises(StorageError):
        send([*files.outgoing(), Outgoing("last.txt", 3, broken)], "hf://me/model")
    assert hub.history("me/model") == ["initial commit"]
    assert os.listdir(tmp_path / "tmp") == []


# What the Hub may do ------------------------------------------------------------------------------------------------

WHERE = {
    "info": ("GET", r"/api/models/me/model$"),
    "create": ("POST", "/repos/create"),
    "tree": ("GET", "/tree/"),
    "preupload": ("POST", "/preupload/"),
    "batch": ("POST", "/objects/batch"),
    "put": ("PUT", "/lfs/"),
    "verify": ("POST", "/lfs-verify"),
    "yaml": ("POST", "/validate-yaml"),
    "commit": ("POST", "/commit/"),
}
WHAT: dict[str, tuple[dict[str, Any], str]] = {
    "401": ({"status": 401}, "token|no such repository"),
    "403": ({"status": 403}, r"does not allow this.*\(403\)"),
    "404": ({"status": 404}, r"\(404\)"),
    "409": ({"status": 409}, r"another commit is in progress.*\(409\)"),
    "412": ({"status": 412}, r"changed during the upload.*\(412\)"),
    "429": ({"status": 429, "headers": {"Retry-After": "0"}}, r"too many requests.*\(429\)"),
    "500": ({"status": 500}, r"a server error.*\(500\)"),
    "503": ({"status": 503}, r"a server error.*\(503\)"),
    "drop": ({"act": drop}, "the connection to the Hub broke"),
    "stall": ({"act": stall}, r"does not answer within (0.3|2) s|does not answer now"),
}


def _combinations() -> Iterator[Any]:
    """All places with one fault of each kind, and all faults of the two requests that matter most; the others when
    there is time."""
    for where in WHERE:
        for what in WHAT:
            short = what in ("503", "drop") or where == "commit" or (where == "put" and what != "stall")
            yield pytest.param(where, what, marks=() if short else pytest.mark.long)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("where, what", [*_combinations()])
def test_faults(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: str) -> None:
    how, said = WHAT[what]
    if where != "create":
        hub.make("me/model", {"config.json": b"{}"})
    before = dict(hub.repos)
    old = hub.history("me/model") if before else None
    hub.fail(*WHERE[where], **how)
    # A machine under load may itself be silent for 0.3 s, before the request that is to stall.
    for seconds in (0.3, 2) if what == "stall" else (60,):
        patience(monkeypatch, seconds)
        hub.slept.clear()
        with pytest.raises(RemoteError) as raised:
            send(shards(1).outgoing(), "hf://me/model")
        if hub.failed:
            break
    error = raised.value
    if (where, what) == ("create", "409"):
        said = "no such repository"  # somebody else is said to have made it, and then it is not there
    assert re.search(said, error.message), error.message
    assert error.exit_code == 8 and error.hint
    assert "hf://me/model" in error.message and "?" not in error.message
    assert error.message[0] == "`" and not error.message.endswith(".")
    # How long it took, were each try as long as it may be: `stall` is one of half a minute, and was not waited for.
    at_once = 3 if where in ("preupload", "batch", "put", "verify") else 1
    assert 1 <= hub.failed <= 6 * at_once and sum(hub.slept) <= 31 * at_once
    if old is not None:
        assert hub.history("me/model") == old
    assert os.listdir(tmp_path / "tmp") == []
    # And then it goes on where it stopped.
    hub.faults.clear()
    patience(monkeypatch, 60)
    files = shards(1)
    send(files.outgoing(), "hf://me/model")
    assert hub.files("me/model") == files.bytes
    assert len(hub.history("me/model")) == (3 if before else 2)


@pytest.mark.parametrize("create_pr", [False, True])
def test_the_answer_to_the_commit_is_lost(hub: Hub, create_pr: bool) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    hub.faults.append(Fault("POST", "/commit/", after=True, times=1))
    files = shards(1)
    sent = send(files.outgoing(), "hf://me/model", create_pr=create_pr)
    repo = hub.repos["me/model"]
    ref = "refs/pr/1" if create_pr else "main"
    assert sent.oid == repo.refs[ref]
    assert hub.history("me/model", ref) == ["Upload with ckpttool", "somebody's", "initial commit"]
    assert len(repo.pulls) == int(create_pr)
    assert len(hub.asked("POST", "/commit/")) == 1


def test_the_answer_is_lost_and_nobody_can_be_asked(hub: Hub) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    hub.faults.append(Fault("POST", "/commit/", after=True, times=1))
    hub.fail("GET", "/commits/", status=503)
    with pytest.raises(RemoteError, match="did not confirm the commit"):
        send(shards(1).outgoing(), "hf://me/model")
    hub.faults.clear()
    send(shards(1).outgoing(), "hf://me/model")
    assert hub.history("me/model") == ["Upload with ckpttool", "somebody's", "initial commit"]


def test_no_hub_at_all(hub: Hub) -> None:
    hub.close()
    with pytest.raises(RemoteError, match="cannot be reached"):
        send(shards(1).outgoing(), "hf://me/model")


# The token ----------------------------------------------------------------------------------------------------------


def test_the_token_is_told_to_nobody(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with everything_logged() as log:
        monkeypatch.setenv("HF_DEBUG", "1")
        said = []
        cases = [("put", "403"), ("commit", "500"), ("info", "401"), ("preupload", "drop"), ("put", "drop")]
        for seed, (where, what) in enumerate(cases):
            hub.faults.clear()
            hub.fail(*WHERE[where], **WHAT[what][0])
            with pytest.raises(CkptError) as raised:
                send(shards(1, 10 * seed).outgoing(), "hf://me/model")
            said += [raised.value.message, str(raised.value.hint), repr(raised.value.facts)]
        hub.faults.clear()
        said.append(repr(send(shards(1).outgoing(), "hf://me/model", stage=str(tmp_path / "stage"))))
    check_told_to_nobody([*said, *capfd.readouterr()], log, tmp_path, hub)


def test_without_a_token(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "absent"))
    with pytest.raises(RemoteError, match="there is no token") as raised:
        send(shards(1).outgoing(), "hf://me/model")
    assert "hf auth login" in str(raised.value.hint)
    assert not hub.seen


def test_the_process_is_as_it_was(hub: Hub) -> None:
    from huggingface_hub.utils import _http
    from huggingface_hub.utils import logging as theirs
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    before = (theirs.get_verbosity(), are_progress_bars_disabled())
    send(shards(1).outgoing(), "hf://me/model")
    assert (theirs.get_verbosity(), are_progress_bars_disabled()) == before
    given = _http.default_client_factory()
    assert huggingface_hub.get_session().timeout == given.timeout, "what others set up is theirs"
    given.close()
