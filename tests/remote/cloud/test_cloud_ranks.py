"""Several processes and a bucket: each sends and reads its own objects, and all end alike."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.folders import contents
from support.paths import CHECKPOINTS, ROOT
from support.s3_server import Fault, Request, S3Server, error
from support.torchrun import forked_launcher
from test_cloud_writing import check_after_a_kill
from torch import nn

import ckpttool
from ckpttool.errors import CkptError, OverwriteError, RemoteError, UsageError

DCP = str(CHECKPOINTS / "dcp/fsdp2_w4/ckpt")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(launcher: list[str], world: int, *words: object, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests", **variables}
    command = [*launcher, str(world), *map(str, words)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finished(running: subprocess.Popen[str], within: float = 400) -> tuple[int, str]:
    """The exit code and the output of ranks, which end."""
    try:
        said, _ = running.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        running.terminate()
        raise AssertionError(f"it hangs:\n{running.communicate()[0]}") from None
    return running.returncode, said


def leftovers(server: S3Server) -> list[str]:
    return [name for name in server.names() if ".partial-" in name]


# Training ---------------------------------------------------------------------------------------------------------


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_one_process_saves(format: str, server: S3Server, tmp_path: Path) -> None:
    path = f"s3://bucket/run/step-1{'.pt' * (format == 'torch')}"
    model, optimizer = small()
    ckpttool.save(path, model, optimizer, format=format, step=1)
    # The object that makes it a checkpoint is the last one that is sent.
    sent = [one for one in server.requests if one.startswith("PUT run/step-1")]
    assert sent[-1].endswith((".metadata", ".pt")) and not leftovers(server)
    if format == "dcp":
        there = server.download("run/step-1", tmp_path / "got")
        state = {"model": {name: torch.empty_like(value) for name, value in model.state_dict().items()}}
        torch_dcp.load(state, checkpoint_id=there, no_dist=True)
        read = state["model"]
        assert ckpttool.verify(path).exit_code == 0 and (there / "integrity.json").exists()
    else:
        (tmp_path / "got.pt").write_bytes(server.get("run/step-1.pt") or b"")
        read = torch.load(tmp_path / "got.pt", weights_only=True)["model"]
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
    # What is there stays unless it is to be replaced, and until the new one is sent.
    before = server.tags()
    with pytest.raises(OverwriteError, match=r"exists|has objects"):
        ckpttool.save(path, model, optimizer, format=format, step=2)
    server.faults = [lambda r: error(503, "SlowDown") if r.method == "PUT" and "step-1" in r.name else None]
    with pytest.raises(RemoteError, match="failed several times"):
        ckpttool.save(path, *small(), format=format, overwrite=True, step=2)
    server.faults.clear()
    assert server.tags() == before
    ckpttool.save(path, *small(), format=format, overwrite=True, step=2)
    other, its = small()
    assert ckpttool.load(path, other, its).rest["step"] == 2 and not leftovers(server)
    with pytest.raises(UsageError, match="is a repository"):
        ckpttool.save("hf://org/name/step-1", model)


@pytest.mark.long
def test_ranks_save_and_load(server: S3Server, tmp_path: Path) -> None:
    """What one rank fails at, all raise; and each sends its own bytes."""

    def fail(request: Request) -> Fault | None:
        is_put = request.method == "PUT"
        if (is_put and "/refused/__1_0" in request.name) or ("load-refused/__1_0" in request.name and not is_put):
            return error(403, "AccessDenied")
        if is_put and "/theirs/.metadata" in request.name:
            server.put("run/theirs/.metadata", b"theirs")
        return None

    cases = {
        "dcp": "done",
        "one.pt": "done",
        "refused": "RemoteError: `s3://bucket/run/refused/__1_0.distcp`: cannot be written: the credentials do not "
        "allow this (AccessDenied)",
        "theirs": "OverwriteError: `s3://bucket/run/theirs` exists: another run has written it in the meantime",
        "there": "OverwriteError: `s3://bucket/run/there` has objects: `x`",
        "load-refused": "RemoteError: `s3://bucket/run/load-refused/__1_0.distcp`: cannot be read: the credentials do "
        "not allow this (AccessDenied)",
    }
    server.put("run/there/x", b"x")
    server.put("run/load-refused", Path(DCP))
    server.faults = [fail]
    script = Path(__file__).with_name("save_on_ranks.py")
    code, said = finished(start(TORCHRUN, 2, script, "s3://bucket/run", tmp_path, *cases))
    assert code == 0, said
    server.faults.clear()
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == cases
    assert not leftovers(server)
    assert not [name for name in server.names() if "/refused/" in name]
    assert server.get("run/theirs/.metadata") == b"theirs" and server.get("run/there/x") == b"x"
    # torch reads what was saved.
    expected = torch.load(tmp_path / "dcp.2.expected")
    read = {"model": {name: torch.empty_like(value) for name, value in expected.items()}}
    torch_dcp.load(read, checkpoint_id=server.download("run/dcp", tmp_path / "got"), no_dist=True)
    assert all(torch.equal(read["model"][name], value) for name, value in expected.items())
    assert {name.rpartition("/")[2] for name in server.names() if "/dcp/" in name} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }


@pytest.mark.long
@pytest.mark.parametrize("killed", ["0:3", "1:1"])
def test_a_rank_is_killed_while_it_saves(killed: str, server: S3Server, tmp_path: Path) -> None:
    """At its first object, and rank 0 when all shards are there."""
    script = Path(__file__).with_name("save_on_ranks.py")
    running = start(TORCHRUN, 2, script, "s3://bucket/run", tmp_path, "killed", KILLED=killed)
    code, said = finished(running)
    assert code != 0, said
    with pytest.raises(CkptError):
        ckpttool.inspect("s3://bucket/run/killed")
    assert not [name for name in server.names() if name.endswith("/.metadata")]
    model, optimizer = small()
    ckpttool.save("s3://bucket/run/killed", model, optimizer)
    assert server.names() == [f"run/killed/{name}" for name in (".metadata", "__0_0.distcp", "integrity.json")]
    assert ckpttool.verify("s3://bucket/run/killed").exit_code == 0


# Conversions ------------------------------------------------------------------------------------------------------

WAYS = {
    "dcp": (["--to", "dcp", "--to-world", "3"], {"to": "dcp", "to_world": 3}),
    "safetensors": (
        ["--to", "safetensors", "--only", "model", "--max-shard-size", "1500"],
        {"to": "safetensors", "only": "model", "max_shard_size": 1500},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("to", WAYS)
def test_processes_convert(to: str, server: S3Server, tmp_path: Path) -> None:
    """From a bucket and to one: what one process writes here, and each fetches about its own bytes."""
    words, options = WAYS[to]
    torch.save({"model": {f"w{i}": torch.rand(5 << 19) for i in range(4)}, "step": 3}, tmp_path / "full.pt")
    sources = {"dcp": str(tmp_path / "source"), "safetensors": DCP}
    ckpttool.convert(tmp_path / "full.pt", tmp_path / "source", to="dcp", to_world=4)
    server.put("in/step-3", Path(sources[to]))
    ckpttool.convert(sources[to], tmp_path / "here", **options)
    server.sent = 0
    program = [str(ROOT / "ckpttool"), "convert", "s3://bucket/in/step-3", "s3://bucket/out/step-3"]
    code, said = finished(start(forked_launcher(), 2, *program, *words))
    assert code == 0 and "2 of torchrun divided the work" in said, said
    assert contents(server.download("out/step-3", tmp_path / "got")) == contents(tmp_path / "here")
    if to == "dcp":
        assert server.sent < 1.3 * sum(map(len, contents(tmp_path / "source").values())), "each fetches its own"
    assert not leftovers(server) and len(server.names()) == len(contents(tmp_path / "here")) + len(
        contents(Path(sources[to]))
    )
    # As with one process, what is there is not replaced, and one process says so.
    code, said = finished(start(forked_launcher(), 2, *program, *words))
    assert code == OverwriteError.exit_code and said.count("error: ") == 1, said


@pytest.mark.long
def test_a_process_of_two_fails(server: S3Server) -> None:
    """The error is said once, and nothing is left of either."""
    server.faults = [lambda r: error(403, "AccessDenied") if r.method == "PUT" and "__2_0" in r.name else None]
    program = [str(ROOT / "ckpttool"), "convert", DCP, "s3://bucket/out/step-3", "--to", "dcp", "--to-world", "3"]
    code, said = finished(start(forked_launcher(), 2, *program))
    assert code == RemoteError.exit_code and said.count("error: ") == 1 and "do not allow this" in said, said
    assert server.names() == []


def pid_of(launcher: int, rank: int) -> int | None:
    """The process of a rank that torchrun has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status, variables = (path / "stat").read_text(), (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == launcher and f"RANK={rank}".encode() in variables:
            return int(path.name)
    return None


def kill_rank(server: S3Server, src: str, rank: int, requests: int) -> bool:
    """Start a conversion on two ranks, kill one after so many requests of both, and wait until all have ended."""
    reached = threading.Event()

    def count(request: Request) -> Fault | None:
        if len(server.requests) > requests:
            reached.set()
        return Fault(seconds=0.02)

    server.requests.clear()
    server.faults = [count]
    words = ["-m", "ckpttool", "convert", src, "s3://bucket/out/step-3", "--to", "dcp", "--to-world", "4"]
    running = start(TORCHRUN, 2, *words)
    while running.poll() is None and not reached.is_set():
        time.sleep(0.001)
    pid = pid_of(running.pid, rank)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    code, said = finished(running, 90)
    server.faults.clear()
    assert pid is None or code != 0, said
    return pid is not None


@pytest.mark.long
@pytest.mark.parametrize(("rank", "requests"), [(0, 9), (1, 8), (1, 10), (0, 12), (1, 13)])
def test_a_process_of_two_is_killed(rank: int, requests: int, server: S3Server) -> None:
    kill_rank(server, DCP, rank, requests)
    check_after_a_kill(server, DCP, 4)


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(("nbytes", "most"), [(0, 24), (80 << 20, 38)], ids=["small", "streamed"])
def test_processes_are_killed_at_random(nbytes: int, most: int, server: S3Server, tmp_path: Path) -> None:
    """One of two, at any of the requests of both: about 20 of them, and 3 behind the last object. `streamed`: each of
    four files has three parts."""
    src = DCP
    if nbytes:
        src = str(tmp_path / "large.pt")
        torch.save({f"w{i}": torch.rand(nbytes // 4 // 12) for i in range(12)}, src)
    rng = random.Random(34)
    seen = Counter[str]()
    for _ in range(int(os.environ.get("KILLS", "50"))):
        server.clear()
        rank, requests = rng.randrange(2), rng.randrange(1, most)
        began = time.monotonic()
        is_killed = kill_rank(server, src, rank, requests)
        seconds, parts = time.monotonic() - began, len(server.uploads())
        is_there = check_after_a_kill(server, src, 4)
        seen[f"rank {rank}, {'killed' if is_killed else 'ended'}, {'complete' if is_there else 'none'}"] += 1
        print(f"rank {rank} after {requests}: {is_killed=} {is_there=} {parts} uploads {seconds:.0f} s", flush=True)
    print(sorted(seen.items()))
    assert any("killed, none" in one for one in seen)
