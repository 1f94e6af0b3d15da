"""`--resume`: what an interrupted run has copied is checked and kept, the rest is copied, and nothing is believed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import STORAGE, USAGE, check_words, run, save_dcp, save_safetensors, shell, spawn
from support.remnants import left, lines, owner, write_journal

import ckpttool
from ckpttool.errors import CkptError, CorruptError, StorageError
from ckpttool.storage import workspace
from ckpttool.storage.staging import stage

SINKS: dict[str, tuple[str, dict[str, Any]]] = {
    "dcp": ("out", {"to": "dcp", "to_world": 2}),
    "torch": ("out.pt", {"to": "torch"}),
    "safetensors": ("out", {"to": "safetensors"}),
    "fsdp1": ("out", {"to": "fsdp1", "to_world": 2}),
}
LAYERS = 12


def state() -> dict[str, Any]:
    """256 KiB a layer, and something that is not a tensor."""
    made = torch.Generator().manual_seed(1)
    return {"model": {f"layers.{i}.weight": torch.randn(256, 256, generator=made) for i in range(LAYERS)}, "step": 7}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "src" / "ckpt", state())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def content(path: Path) -> dict[str, str]:
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def interrupted(src: Path, dst: Path, after: int, monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> None:
    """A run on one thread that ends after so many writes, and leaves what it has made."""
    real, count = os.pwrite, [0]

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        count[0] += len(data) > 10_000  # headers are written before
        if count[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(StorageError, match="no space left") as caught:
            ckpttool.convert(str(src), str(dst), threads=1, resume=True, **keywords)
    assert "run the same command again to continue from what has been copied" in str(caught.value.hint)
    assert not dst.exists()


@pytest.fixture
def whole(src: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """What an undisturbed run makes."""

    def make(kind: str) -> dict[str, str]:
        name, keywords = SINKS[kind]
        ckpttool.convert(str(src), str(tmp_path / "whole" / name), **keywords)
        return content(tmp_path / "whole" / name)

    return make


# It goes on -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SINKS)
def test_it_goes_on(kind: str, src: Path, out: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice interrupted; what comes out is what an undisturbed run makes, byte for byte."""
    name, keywords = SINKS[kind]
    wanted = whole(kind)
    interrupted(src, out / name, LAYERS // 3 + 1, monkeypatch, **keywords)
    interrupted(src, out / name, LAYERS // 3 + 1, monkeypatch, **keywords)
    done = ckpttool.convert(str(src), str(out / name), threads=1, resume=True, check=True, **keywords)
    assert content(out / name) == wanted
    assert os.listdir(out) == [name]
    assert 8 * (128 << 10) <= done.resumed_bytes < done.payload_bytes
    assert done.checked_bytes == done.payload_bytes and not done.unchecked_bytes


def test_torch_loads_it(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(src, out / "out.pt", 5, monkeypatch, to="torch")
    assert ckpttool.convert(str(src), str(out / "out.pt"), resume=True).resumed_bytes
    found, wanted = torch.load(out / "out.pt", weights_only=True), state()
    assert found["step"] == 7
    assert all(torch.equal(found["model"][name], value) for name, value in wanted["model"].items())


def test_reshard_goes_on(src: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another cut: rows are gathered, and a record of the source is read by both runs."""
    ckpttool.reshard(str(src), str(tmp_path / "whole"), to_world=3)
    monkeypatch.setattr("ckpttool.transfer.execute.TASK", 1 << 16)
    interrupted_reshard(src, out / "out", monkeypatch)
    done = ckpttool.reshard(str(src), str(out / "out"), to_world=3, resume=True)
    assert content(out / "out") == content(tmp_path / "whole")
    assert 0 < done.resumed_bytes < done.payload_bytes and done.checked_bytes == done.payload_bytes


def interrupted_reshard(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = os.pwrite, [0]

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        count[0] += len(data) > 10_000
        if count[0] > 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(StorageError):
            ckpttool.reshard(str(src), str(dst), to_world=3, resume=True, threads=1)


def test_without_a_checksum_in_either(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors has none: with `--resume` they are counted, so that there is something to check."""
    src = save_safetensors(tmp_path / "ckpt.safetensors", state()["model"])
    interrupted(src, out / "out.safetensors", 6, monkeypatch, to="safetensors")
    done = ckpttool.convert(str(src), str(out / "out.safetensors"), resume=True)
    assert done.resumed_bytes >= 5 * (256 << 10)
    assert (out / "out.safetensors").read_bytes()[-(LAYERS << 18) :] == src.read_bytes()[-(LAYERS << 18) :]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_as_a_program(number: signal.Signals, tmp_path: Path, memory: Path) -> None:
    """A batch system ends it; the same command goes on."""
    out = memory
    src = save_dcp(tmp_path / "ckpt", {f"layers.{i}.weight": torch.ones(1 << 18) + i for i in range(100)})
    words = ("convert", src, out / "out.pt", "--resume", "--threads", "1")
    process = spawn(*words)
    until = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until:
        if any(p.stat().st_size > 2000 for p in out.glob(".*/journal")):
            break
        time.sleep(0.001)
    process.send_signal(number)
    said = process.communicate(timeout=300)[1]
    if process.returncode == 0:
        pytest.skip("it was done before it could be stopped")
    assert not (out / "out.pt").exists()
    if number != signal.SIGKILL:
        assert "nothing was written\nhint: run the same command again to continue from what has been copied" in said
    done = shell(*words, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["resumed_bytes"] > 0
    assert os.listdir(out) == ["out.pt"]
    found = torch.load(out / "out.pt", weights_only=True)
    assert all(torch.equal(found[f"layers.{i}.weight"], torch.ones(1 << 18) + i) for i in range(100))


def test_what_it_says(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(src, out / "out", 5, monkeypatch, to="dcp")
    done = run("convert", src, out / "out", "--to", "dcp", "--resume")
    assert done.code == 0 and "copied by an interrupted run" in done.out, done.out
    done = run("reshard", src, out / "other", "--to-world", "2", "--resume")
    assert done.code == 0 and "nothing to resume: copied everything" in done.err


def test_only_by_copying_bytes(src: Path, out: Path) -> None:
    done = run("reshard", src, out / "out", "--to-world", "1", "--engine", "mesh", "--resume")
    check_words(done, USAGE)
    assert os.listdir(out) == []


def test_without_it_nothing_stays(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is removed by a run that was not told to go on, and it says so."""
    interrupted(src, out / "out", 5, monkeypatch, to="dcp")
    place = left(out)[1].parent
    done = ckpttool.convert(str(src), str(out / "out"), to="dcp")
    assert os.listdir(out) == ["out"] and done.resumed_bytes == 0
    assert [note for note in done.notes if place.name in note and "removed what an interrupted run left" in note]


# Nothing is believed --------------------------------------------------------------------------------------------------


def other_source(src: Path, made: Path, log: Path) -> None:
    """The same bytes at another time."""
    file = src / "__0_0.distcp"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))


def other_inode(src: Path, made: Path, log: Path) -> None:
    file = src / "__0_0.distcp"
    status = file.stat()
    (src / "copy").write_bytes(file.read_bytes())
    os.utime(src / "copy", ns=(status.st_atime_ns, status.st_mtime_ns))
    (src / "copy").replace(file)


def no_plan(src: Path, made: Path, log: Path) -> None:
    """Killed before it had one."""
    write_journal(log, lines(log)[:1])


def another_length(src: Path, made: Path, log: Path) -> None:
    with next(made.glob("*.distcp")).open("ab") as stream:
        stream.write(b"x")


def no_file(src: Path, made: Path, log: Path) -> None:
    next(made.glob("*.distcp")).unlink()


def nothing_there(src: Path, made: Path, log: Path) -> None:
    shutil.rmtree(made)


ANEW = [other_source, other_inode, no_plan, another_length, no_file, nothing_there]


@pytest.mark.parametrize("change", ANEW)
def test_it_starts_anew(
    change: Callable[[Path, Path, Path], None], src: Path, out: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = whole("dcp")
    interrupted(src, out / "out", 6, monkeypatch, **SINKS["dcp"][1])
    change(src, *left(out))
    done = ckpttool.convert(str(src), str(out / "out"), resume=True, **SINKS["dcp"][1])
    assert done.resumed_bytes == 0 or change in (another_length, no_file)
    assert any("other options" in note for note in done.notes) == (change in (other_source, other_inode))
    assert content(out / "out") == wanted and os.listdir(out) == ["out"]


def test_other_flags(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(src, out / "out", 6, monkeypatch, to="dcp")
    done = ckpttool.convert(str(src), str(out / "out"), to="dcp", exclude="*.3.weight", resume=True)
    assert done.resumed_bytes == 0 and any("other options: starting over" in note for note in done.notes)
    assert len(list(ckpttool.inspect(str(out / "out")).tensors)) == LAYERS - 1


def test_another_map(src: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of a map do not change where the destination has its bytes."""
    path, name = tmp_path / "map.json", "layers.{n}.weight"
    halves, neighbours = ({"rows": {"to": to, "head_dim": 64}} for to in ("halves", "neighbours"))
    operations = ({"transpose": [0, 1]}, {"trim": {"axis": 0, "size": 256}}), (halves, neighbours)
    for number, (before, after) in enumerate(operations):
        target = out / f"{number}.pt"
        for one in (before, after):
            rule = {"from": name, "to": name, "operations": [one]}
            path.write_text(json.dumps({"format": 2, "rules": [rule]}))
            if one is before:
                interrupted(src, target, 6, monkeypatch, key_map=str(path))
        done = ckpttool.convert(str(src), str(target), key_map=str(path), resume=True)
        assert done.resumed_bytes == 0 and any("other options: starting over" in note for note in done.notes)
        ckpttool.convert(str(src), str(tmp_path / target.name), key_map=str(path))
        assert content(target) == content(tmp_path / target.name)


@pytest.mark.parametrize("kind", SINKS)
def test_a_bit_that_flipped_meanwhile(
    kind: str, src: Path, out: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere in what was made: a piece is copied again, a header is written again."""
    name, keywords = SINKS[kind]
    wanted, some = whole(kind), random.Random(kind)
    interrupted(src, out / name, 8, monkeypatch, **keywords)
    made, _ = left(out)
    for file in sorted(made.rglob("*")) if made.is_dir() else [made]:
        for _ in range(20 if file.is_file() else 0):
            at = some.choice((some.randrange(4096), some.randrange(file.stat().st_size))) % file.stat().st_size
            with file.open("r+b") as stream:
                stream.seek(at)
                old = stream.read(1)[0]
                stream.seek(at)
                stream.write(bytes((old ^ 1 << some.randrange(8),)))
    ckpttool.convert(str(src), str(out / name), resume=True, **keywords)
    assert content(out / name) == wanted


@pytest.mark.parametrize("seed", range(10))
def test_a_journal_that_lies(seed: int, src: Path, out: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged, or with lines whose own checksum is right."""
    from ckpttool.storage.log import Log

    wanted, some = whole("torch"), random.Random(seed)
    interrupted(src, out / "out.pt", 8, monkeypatch, to="torch")
    _, log = left(out)
    found = log.read_bytes().splitlines(keepends=True)
    assert len(found) > 5
    if seed < 5:
        data = bytearray(log.read_bytes())
        for _ in range(3):
            data[some.randrange(len(found[0]), len(data))] ^= 1 << some.randrange(8)
        log.write_bytes(data[: some.randrange(len(data) // 2, len(data))])
    else:
        said = [json.loads(line[9:]) for line in found[2:]]
        for one in said:
            one[some.randrange(7)] = some.choice((-1, 0, 1, 1 << 18, 1 << 70, None, "x", 1.5))
            one[7] = some.choice((one[7], [[0, 0, 0, 0, 0]], [["a"]], 3, [[0] * 9]))
        with log.open("wb") as stream:
            stream.write(b"".join(found[:2]))
            stream.flush()
            Log(stream.fileno()).append(said)
    ckpttool.convert(str(src), str(out / "out.pt"), to="torch", resume=True)
    assert content(out / "out.pt") == wanted


def test_a_source_that_was_damaged_all_along(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record that the first run read and never came to check is checked by the second."""
    file = src / "__0_0.distcp"
    with file.open("r+b") as stream:
        stream.seek(1 << 17)  # in the first layer
        old = stream.read(1)[0]
        stream.seek(1 << 17)
        stream.write(bytes((old ^ 1,)))
    interrupted(src, out / "out.safetensors", 8, monkeypatch, to="safetensors", only="model")
    with pytest.raises(CorruptError, match="CRC"):
        ckpttool.convert(str(src), str(out / "out.safetensors"), resume=True, only="model")
    assert os.listdir(out) == []


# Whose it is ----------------------------------------------------------------------------------------------------------


def test_a_run_that_is_still_going_on(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is held: neither removed nor taken over."""
    inner: list[Any] = []

    def progress(done: int, total: int) -> None:
        if not inner:
            inner.append(True)
            inner.append(ckpttool.convert(str(src), str(out / "out.pt"), resume=True))

    with pytest.raises(CkptError, match="exists"):
        ckpttool.convert(str(src), str(out / "out.pt"), progress=progress)
    assert inner[1].resumed_bytes == 0 and os.listdir(out) == ["out.pt"]


def test_a_run_on_another_machine(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that both share: named, not removed; `--resume` takes it over."""
    interrupted(src, out / "out.pt", 6, monkeypatch, to="torch")
    log = left(out)[1]
    place = log.parent
    first, *rest = lines(log)
    write_journal(log, [first | {"host": "elsewhere", "boot": "other", "pid": 1}, *rest])
    done = ckpttool.convert(str(src), str(out / "first.pt"))
    assert not any("elsewhere" in note for note in done.notes)
    done = ckpttool.convert(str(src), str(out / "out.pt"))
    assert any("elsewhere" in note and place.name in note for note in done.notes) and place.exists()
    done = ckpttool.convert(str(src), str(out / "out.pt"), overwrite=True, resume=True)
    assert done.resumed_bytes and sorted(os.listdir(out)) == ["first.pt", "out.pt"]


def test_where_there_are_no_locks(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the process is asked instead: ours lives, that of a process that ended does not."""

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", flock)
    interrupted(src, out / "out.pt", 6, monkeypatch, to="torch")
    ckpttool.convert(str(src), str(out / "out.pt"), to="torch")
    log = left(out)[1]
    ended = subprocess.Popen(["true"])
    ended.wait()
    write_journal(log, [lines(log)[0] | {"pid": ended.pid}])
    ckpttool.convert(str(src), str(out / "out.pt"), to="torch", overwrite=True)
    assert os.listdir(out) == ["out.pt"]


def test_a_container_sees_its_own_processes(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no locks, a process id of another container on this machine says nothing."""

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", flock)
    interrupted(src, out / "out.pt", 6, monkeypatch, to="torch")
    log = left(out)[1]
    ended = subprocess.Popen(["true"])
    ended.wait()
    write_journal(log, [lines(log)[0] | {"pid": ended.pid, "processes": "pid:[1]"}])
    ckpttool.convert(str(src), str(out / "out.pt"), to="torch", overwrite=True, resume=True)
    assert log.exists()


def test_a_workspace_that_was_empty_when_it_was_found(tmp_path: Path) -> None:
    """Its run makes the journal in the next moment: nothing of that is removed."""
    place = tmp_path / ".out.partial-0123456789ab"
    place.mkdir(mode=0o700)
    found = workspace.find(str(tmp_path), place.name).workspace
    assert found is not None
    (place / "new/out.partial").mkdir(parents=True)
    write_journal(place / "journal", [owner(place)])
    before = content(place)
    with pytest.raises(OSError, match="not empty"):
        found.remove()
    found.close()
    assert content(place) == before != {}


LINKED = (
    "real = os.unlink\ndef unlink(name, *rest, **how):\n"
    "    kill() if str(name).startswith('new/') else real(name, *rest, **how)\nos.unlink = unlink\n"
)


def test_a_file_that_has_both_names(src: Path, out: Path) -> None:
    """Killed between the link that publishes a file and the removal of its other name: to resume writes into DST."""
    manifest = out / "m.json"
    words = killed_run("file", LINKED, src, out / "out", manifest)
    (work,) = out.glob(".out.partial-*")
    assert (out / "out").samefile(work / "new/out.partial")
    before, inode = (out / "out").read_bytes(), (out / "out").stat().st_ino
    again = subprocess.run(words, capture_output=True, check=False, text=True)
    assert "all but its manifest" in again.stderr and manifest.exists(), again.stderr
    assert set(os.listdir(out)) == {"out", "m.json"} and (out / "out").read_bytes() == before
    manifest.unlink()
    (out / "out").unlink()
    killed_run("file", LINKED, src, out / "out", manifest)
    inode = (out / "out").stat().st_ino
    done = ckpttool.convert(str(src), str(out / "out"), to="torch", overwrite=True, resume=True)
    assert not done.resumed_bytes and (out / "out").stat().st_ino != inode


@pytest.mark.parametrize("is_gone", [False, True])
def test_two_runs_that_replace_one_destination(is_gone: bool, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run replaces DST after this one has looked, or has moved it aside: what is moved is not lost sight of."""
    (out / "out").mkdir()
    (out / "out/old").write_text("old")
    real, moves = os.rename, []

    def rename(name: str, target: str, **folders: int) -> None:
        if name == "out" and not moves:
            moves.append(name)
            shutil.rmtree(out / "out")
            if not is_gone:
                (out / "theirs").mkdir()
                (out / "theirs/new").write_text("theirs")
                (out / "theirs").rename(out / "out")
        elif target == "out" and name.startswith("new/") and not is_gone:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(name, target, **folders)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(Path, "rename", lambda self, target: real(self, target))
    if is_gone:
        with stage(str(out / "out"), overwrite=True, is_file=False) as made:
            os.mkdir(made.path)
            Path(made.path, "new").write_text("ours")
        assert content(out / "out") and (out / "out/new").read_text() == "ours"
    else:
        with pytest.raises(StorageError), stage(str(out / "out"), overwrite=True, is_file=False) as made:
            os.mkdir(made.path)
        assert (out / "out/new").read_text() == "theirs"
    assert moves and os.listdir(out) == ["out"]


@pytest.fixture
def aside(src: Path, out: Path) -> Iterator[Path]:
    """A directory that was moved aside by a run that was killed before it put another in its place."""
    old = save_dcp(out / "out", {"w": torch.ones(3)})
    program = (
        "import os, signal, sys\nimport ckpttool\nreal = os.rename\n"
        "def rename(old, new, **folders):\n    if new == 'out':\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(old, new, **folders)\n"
        "os.rename = rename\nckpttool.convert(sys.argv[1], sys.argv[2], to='dcp', overwrite=True)\n"
    )
    before = content(old)
    done = subprocess.run([sys.executable, "-c", program, str(src), str(out / "out")], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL and not old.exists(), done.stderr
    yield old
    assert before != {}


def test_what_was_moved_aside_comes_back(aside: Path, src: Path, out: Path) -> None:
    done = run("convert", src, out / "out", "--to", "dcp")
    assert done.code == 6 and "exists" in done.err, done.err
    assert os.listdir(out) == ["out"]
    assert [t.name for t in ckpttool.inspect(str(aside)).tensors] == ["w"]
    assert run("convert", src, out / "out", "--to", "dcp", "--overwrite").code == 0
    assert os.listdir(out) == ["out"]


def test_what_was_replaced_and_not_yet_removed(src: Path, out: Path) -> None:
    """The last moment of a run: the new one is in its place, and the old one is there still."""
    save_dcp(out / "out", {"w": torch.ones(3)})
    program = (
        "import os, signal, sys\nimport ckpttool\nfrom ckpttool.storage import tree\nreal = tree.remove\n"
        "def remove(name, *rest, **how):\n    if '.old-' in name:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(name, *rest, **how)\n"
        "tree.remove = remove\nckpttool.convert(sys.argv[1], sys.argv[2], to='dcp', overwrite=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(src), str(out / "out")], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL and any(".old-" in name for name in os.listdir(out)), done.stderr
    again = run("convert", src, out / "out", "--to", "dcp", "--overwrite", "--resume")
    assert again.code == 0, again.err
    assert os.listdir(out) == ["out"] and len(list(ckpttool.inspect(str(out / "out")).tensors)) == LAYERS


def test_what_was_moved_aside_and_a_run_that_goes_on(aside: Path, src: Path, out: Path) -> None:
    done = run("convert", src, out / "out", "--to", "dcp", "--overwrite", "--resume", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["resumed_bytes"] == said["payload_bytes"] and any("restored `" in note for note in said["notes"])
    assert os.listdir(out) == ["out"] and len(list(ckpttool.inspect(str(aside)).tensors)) == LAYERS


def test_a_full_disk_and_then_room(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there counts as room: it is not needed twice."""
    interrupted(src, out / "out.pt", LAYERS - 2, monkeypatch, to="torch")
    monkeypatch.setattr("ckpttool.storage.free_space.free_bytes", lambda path: 5 * (256 << 10))
    check_words(run("convert", src, out / "fresh.pt"), STORAGE, "are free")
    assert ckpttool.convert(str(src), str(out / "out.pt"), resume=True).resumed_bytes


MANIFESTS = {
    "convert": "ckpttool.convert(src, dst, to='dcp', manifest=m)",
    "file": "ckpttool.convert(src, dst, to='torch', manifest=m)",
    "reshard": "ckpttool.reshard(src, dst, to_world=2, manifest=m)",
    "export": "ckpttool.export(src, dst, strict=False, only='model', manifest=m)",
}


def killed_run(job: str, patch: str, src: Path, dst: Path, manifest: Path) -> list[str]:
    """Run a job with a manifest that is killed where `patch` says; the words of the same run without that."""
    program = "import os, signal, sys\nimport ckpttool\nsrc, dst, m = sys.argv[1:]\n" + MANIFESTS[job]
    kill = "import os, signal\ndef kill(*args, **keywords):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    words = [str(src), str(dst), str(manifest)]
    done = subprocess.run([sys.executable, "-c", kill + patch + program, *words], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return [sys.executable, "-c", program, *words]


BEFORE_MANIFEST = "from ckpttool.operations import write\nwrite.write_manifest = kill\n"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("job", MANIFESTS)
def test_a_kill_before_the_manifest(job: str, src: Path, out: Path) -> None:
    """DST is whole, and its manifest was asked for: the next run writes it and says so."""
    manifest = out / "m.json"
    words = killed_run(job, BEFORE_MANIFEST, src, out / "out", manifest)
    assert (out / "out").exists() and not manifest.exists()
    other = run("convert", src, out / "out", "--to", "dcp", "--manifest", out / "other.json")
    assert other.code == 6 and "everything except the requested manifest" in other.err, other.err
    again = subprocess.run(words, capture_output=True, check=False, text=True)
    assert "all but its manifest" in again.stderr and manifest.exists(), again.stderr
    assert set(os.listdir(out)) == {"out", "m.json"}
    checked = run("verify", out / "out", "--manifest", manifest)
    assert checked.code == 0, checked.err
    assert "all but" not in subprocess.run(words, capture_output=True, check=False, text=True).stderr


@pytest.mark.parametrize("job", [job for job in MANIFESTS if job != "file"])
def test_a_manifest_in_a_directory_appears_with_it(job: str, src: Path, out: Path) -> None:
    """Killed at once after DST has its name."""
    manifest = out / "out/integrity.json"
    patch = (
        "from ckpttool.storage.stage import StagingArea\nreal = StagingArea.publish\n"
        "def publish(*args, **keywords):\n    real(*args, **keywords)\n    kill()\nStagingArea.publish = publish\n"
    )
    killed_run(job, patch, src, out / "out", manifest)
    checked = run("verify", out / "out", "--manifest", manifest)
    assert checked.code == 0, checked.err
