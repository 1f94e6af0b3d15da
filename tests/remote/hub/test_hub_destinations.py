"""`convert` and `reshard` to the Hub: one commit of all that a local destination has, or none."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils._xet import abort_xet_session
from support.hub_server import WRITER, Hub
from support.paths import CHECKPOINTS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

import ckpttool
from ckpttool.cli.app import application
from ckpttool.errors import OverwriteError, RemoteError, StorageError, UsageError
from ckpttool.storage import free_space

SAMPLE = CHECKPOINTS / "dcp/hsdp_w4/ckpt"  # of 4 ranks, with the optimizer


def run(*words: str | Path, code: int = 0) -> Any:
    """The document that a command prints in this process."""
    done = CliRunner().invoke(application(), [*map(str, words), "--json"])
    assert done.exit_code == code, (done.output, done.exception)
    assert WRITER not in done.output and "ckpttool-hub-" not in done.output
    return json.loads(done.stdout)


def local(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in a folder."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in found}


def below(hub: Hub, folder: str, branch: str = "main") -> dict[str, str]:
    """SHA-256 of the files in a folder of the repository; those that came over Xet are not in one piece there."""
    repo = hub.repos["me/run"]
    files = repo.commits[repo.refs[branch]].files
    digests = {name: file.sha256 or sha256(file.data or b"").hexdigest() for name, file in files.items()}
    return {name.removeprefix(folder): digest for name, digest in digests.items() if name.startswith(folder)}


@pytest.mark.parametrize("transport", ["lfs", "xet"])
def test_a_dcp_with_its_optimizer(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    if transport == "xet":
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
        monkeypatch.setenv("HF_XET_XORB_COMPRESSION_POLICY", "none")
        hub.cas = True
        abort_xet_session()
    run("convert", SAMPLE, tmp_path / "w8", "--to", "dcp", "--to-world", "8")
    words = ("convert", SAMPLE, "hf://me/run/step-1", "--to", "dcp", "--to-world", "8", "--check")
    planned = run(*words, "--dry-run")
    assert (
        planned["sent"]["created"]
        and planned["sent"]["commit"] is None
        and planned["destination"] == "hf://me/run/step-1"
        and not hub.repos
    )
    done = run(
        "convert",
        SAMPLE,
        "hf://me/run/step-1",
        "--to",
        "dcp",
        "--to-world",
        "8",
        "--check",
        "--commit-message",
        "step 1",
        "--tag",
        "v1",
    )
    assert below(hub, "step-1/") == local(tmp_path / "w8")
    assert hub.history("me/run") == ["step 1", "initial commit"] and hub.repos["me/run"].private
    assert [file["path"] for file in done["sent"]["files"]][-2:] == ["integrity.json", ".metadata"]
    assert done["sent"]["commit"] == f"{hub.url}/me/run/commit/{hub.repos['me/run'].refs['main']}"
    assert set(hub.repos["me/run"].tags) == {"v1"} and done["sent"]["tag"] == "v1"
    assert os.listdir(tmp_path / "tmp") == []
    # What is there is the checkpoint, also to torch.
    assert run("inspect", "hf://me/run/step-1")["world_size"] == 8
    assert run("diff", SAMPLE, "hf://me/run/step-1")["verdict"] == "same"
    run("verify", "hf://me/run@v1/step-1")
    run("convert", "hf://me/run/step-1", tmp_path / "back.pt")
    dcp_to_torch_save(tmp_path / "w8", tmp_path / "expected.pt")
    assert equal(
        torch.load(tmp_path / "back.pt", weights_only=False), torch.load(tmp_path / "expected.pt", weights_only=False)
    )
    assert os.listdir(tmp_path / "tmp") == []


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_every_format(hub: Hub, tmp_path: Path) -> None:
    for words in (
        ("me/run/a/model.safetensors", "--only", "model"),
        ("me/run/b", "--to", "safetensors", "--only", "model", "--max-shard-size", "4KB"),
        ("me/run/c/all.pt",),
        ("me/run/d", "--to", "fsdp1", "--only", "model"),
        ("me/run@branch/e", "--producer", "accelerate", "--drop", "step"),
    ):
        name = words[0].partition("/")[2].partition("/")[2]
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        run("convert", SAMPLE, tmp_path / "x" / name, *words[1:])
        run("convert", SAMPLE, f"hf://{words[0]}", *words[1:])
    there = below(hub, "")
    assert not any(name.startswith("e/") for name in there)
    there |= below(hub, "", "branch")
    made = local(tmp_path / "x")
    assert {name: there.get(name) for name in made} == made


def test_what_is_in_the_way(hub: Hub, tmp_path: Path) -> None:
    hub.make("me/run", {"README.md": b"mine", ".gitattributes": b"", "step-1/notes.txt": b"1", "step-10/x": b"2"})
    before = hub.history("me/run")
    words = ("convert", SAMPLE, "hf://me/run/step-1", "--to", "dcp")
    error = run(*words, code=OverwriteError.exit_code)["error"]
    assert error["file"] == "hf://me/run/step-1" and "--overwrite" in error["hint"]
    planned = run(*words, "--dry-run", code=OverwriteError.exit_code)
    assert planned["verdict"] == "refused" and planned["sent"] is None
    assert run(*words, "--dry-run", "--overwrite")["sent"]["removed"] == ["step-1/notes.txt"]
    assert hub.history("me/run") == before and not hub.asked("PUT", "/")
    done = run(*words, "--overwrite")
    assert done["sent"]["removed"] == ["step-1/notes.txt"] and "notes.txt" not in below(hub, "step-1/")
    assert {"README.md", "step-10/x", "step-1/.metadata"} <= below(hub, "").keys()
    # One file replaces no other.
    run("convert", SAMPLE, "hf://me/run/step-1/all.pt")
    run("convert", SAMPLE, "hf://me/run/step-1/all.pt", code=OverwriteError.exit_code)
    assert run("convert", SAMPLE, "hf://me/run/step-1/all.pt", "--overwrite")["sent"]["commit"] is None
    assert ".metadata" in below(hub, "step-1/")
    # What a repository has of its own is not in the way at its root.
    run("convert", SAMPLE, "hf://me/run", "--to", "dcp", code=OverwriteError.exit_code)
    run("convert", SAMPLE, "hf://me/run", "--to", "dcp", "--overwrite")
    names = {name for name in below(hub, "") if not name.endswith(".distcp")}
    assert names == {"README.md", ".gitattributes", ".metadata", "integrity.json"}


def test_what_is_refused_before_any_work(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst = "hf://me/run/x"
    for words in (
        ("convert", SAMPLE, dst, "--to", "dcp", "--resume"),
        ("convert", SAMPLE, dst, "--to", "dcp", "--manifest", tmp_path / "m.json"),
        ("convert", SAMPLE, dst, "--to", "dcp", "--public", "--private"),
        ("convert", SAMPLE, dst, "--to", "dcp", "--tag", "a b"),
        ("convert", SAMPLE, dst, "--to", "dcp", "--token", ""),
        ("convert", SAMPLE, tmp_path / "x", "--to", "dcp", "--public"),
        ("convert", SAMPLE, "hf://me/run", "--to", "torch"),
        ("convert", "hf://me/run/x", "hf://me/run/x/y", "--to", "dcp"),
    ):
        assert run(*words, code=UsageError.exit_code)["error"]["hint"]
    assert not hub.repos and os.listdir(tmp_path / "tmp") == []
    monkeypatch.setattr(free_space, "free_bytes", lambda path: 1000)
    for flags in ([], ["--dry-run"]):
        document = run("convert", SAMPLE, dst, "--to", "dcp", *flags, code=StorageError.exit_code)
        assert "--stage" in json.dumps(document) and not hub.repos
    monkeypatch.undo()


def test_a_token_that_may_not_write(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    words = ("convert", SAMPLE, "hf://me/run/x", "--to", "dcp")
    run(*words, code=RemoteError.exit_code)
    assert not hub.repos and os.listdir(tmp_path / "tmp") == []
    here = tmp_path / "stage" / "here"
    run("convert", SAMPLE, "hf://me/run/x", "--to", "dcp", "--token", WRITER, "--public", "--stage", here)
    assert not hub.repos["me/run"].private and os.listdir(tmp_path / "stage" / "here") == []
    assert os.environ["HF_TOKEN"] == "hf_wrong"


def test_reshard(hub: Hub, tmp_path: Path) -> None:
    words = (
        "reshard",
        "--public",
        "--tag",
        "v2",
        "--commit-message",
        "two ranks",
        "--token",
        WRITER,
        "--stage",
        tmp_path / "tmp",
    )
    run(*words, SAMPLE, "hf://me/run/w1", "--to-world", "1")
    assert run("reshard", SAMPLE, "hf://me/run/w2", "--to-world", "2", "--private", code=2)["error"]["hint"]
    assert hub.history("me/run") == ["two ranks", "initial commit"] and not hub.repos["me/run"].private
    result = ckpttool.reshard(SAMPLE, "hf://me/run/w2", to_world=2)
    ckpttool.reshard(SAMPLE, tmp_path / "w2", to_world=2)
    assert below(hub, "w2/") == local(tmp_path / "w2") and result.sent.oid == hub.repos["me/run"].refs["main"]
    assert ckpttool.diff(SAMPLE, "hf://me/run/w2").exit_code == 0
    assert run("reshard", SAMPLE, "hf://me/run/w4", "--to-mesh", "shard=4", "--engine", "mesh", code=2)["error"]["hint"]
