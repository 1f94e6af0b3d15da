"""What machines and people do to a conversion: DST is complete or as it was, SRC as it was, nothing beside it."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import (
    CORRUPT,
    EXISTS,
    FORMATS,
    PROGRAM,
    READ,
    STORAGE,
    USAGE,
    Ran,
    as_nobody,
    check_words,
    model,
    run,
    save,
    save_dcp,
    save_torch,
    shell,
    spawn,
    untouched,
)
from support.paths import ROOT

import ckpttool
from ckpttool.errors import CkptError, OverwriteError, ReadError
from ckpttool.storage.stage import StagingArea

KINDS = ("torch", "dcp", "safetensors")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def same_values(path: Path) -> None:
    """What was written is whole, by the library that owns the format."""
    if path.is_file():
        found = torch.load(path, weights_only=True)
        assert all(torch.equal(found[name], value) for name, value in model().items())
    else:
        assert run("convert", path, path.parent / "again.pt").code == 0
        same_values(path.parent / "again.pt")
        (path.parent / "again.pt").unlink()


# DST ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def src(tmp_path: Path) -> Iterator[Path]:
    """A source in a directory of its own, which nothing may touch."""
    folder = tmp_path / "src"
    folder.mkdir()
    made = save_torch(folder / "ckpt.pt")
    with untouched(folder):
        yield made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("to", FORMATS)
def test_dst_is_a_file(to: str, src: Path, out: Path) -> None:
    (out / "dst").write_text("precious")
    with untouched(out):
        check_words(run("convert", src, out / "dst", "--to", to), EXISTS, out / "dst", "--overwrite")
        planned = run("convert", src, out / "dst", "--to", to, "-n")
        assert planned.code == EXISTS and "would write" in planned.out
        assert f"`{out / 'dst'}` exists: pass `--overwrite`" in planned.err


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_dst_is_a_directory_with_something_in_it(to: str, src: Path, out: Path) -> None:
    (out / "dst").mkdir()
    (out / "dst" / "precious").touch()
    with untouched(out):
        check_words(run("convert", src, out / "dst", "--to", to), EXISTS, out / "dst", "--overwrite")
        check_words(run("convert", src, f"{out / 'dst'}/", "--to", to), EXISTS, out / "dst")


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_dst_is_an_empty_directory(slash: str, to: str, src: Path, out: Path) -> None:
    (out / "dst").mkdir(mode=0o755)
    done = run("convert", src, f"{out / 'dst'}{slash}", "--to", to)
    assert done.code == 0, done.err
    assert names(out) == ["dst"]
    same_values(out / "dst")


def test_a_file_cannot_be_a_directory(src: Path, out: Path) -> None:
    (out / "dst").mkdir()
    with untouched(out):
        check_words(run("convert", src, out / "dst", "--to", "torch"), USAGE, "directory", "dst/NAME")
        check_words(run("convert", src, f"{out / 'new'}/", "--to", "torch"), USAGE, "directory", "new/NAME")
    assert run("convert", src, f"{out / 'new.safetensors'}/", "--to", "safetensors").code == 0
    assert (out / "new.safetensors").is_dir()


@pytest.mark.parametrize("to", FORMATS)
def test_dst_is_a_dangling_link(to: str, src: Path, out: Path) -> None:
    """Something has that name: it is not followed to where nobody looked."""
    (out / "dst").symlink_to(out / "elsewhere")
    with untouched(out):
        check_words(run("convert", src, out / "dst", "--to", to), EXISTS, out / "dst")


def test_dst_is_src(tmp_path: Path, src: Path) -> None:
    (tmp_path / "link").symlink_to(src)
    for dst in (src, f"{src.parent}/../src/ckpt.pt", tmp_path / "link"):
        check_words(run("convert", src, dst, "--to", "torch"), USAGE, "source")
        check_words(run("convert", src, dst, "--to", "torch", "--overwrite"), USAGE, "source")


def test_dst_is_a_hard_link_to_src(out: Path, src: Path) -> None:
    """Replacing the name leaves the bytes of the other."""
    os.link(src, out / "dst.pt")
    before = src.read_bytes()
    assert run("convert", src, out / "dst.pt", "--overwrite").code == 0
    assert src.read_bytes() == before


def test_dst_is_inside_src(tmp_path: Path) -> None:
    src = save_dcp(tmp_path / "ckpt")
    (tmp_path / "link").symlink_to(src)
    with untouched(src):
        for dst in (src / "dst.pt", src / "a" / "b.pt", tmp_path / "link" / "dst.pt", src / ".." / "ckpt" / "x.pt"):
            check_words(run("convert", src, dst), USAGE, "source")


def test_src_is_inside_dst(tmp_path: Path) -> None:
    """Overwriting the directory would take the source with it."""
    src = save_torch(tmp_path / "ckpt.pt")
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    inner = run_folder / "ckpt.pt"
    src.rename(inner)
    for to in ("dcp", "safetensors"):
        with untouched(run_folder):
            check_words(run("convert", inner, run_folder, "--to", to, "--overwrite"), USAGE, "source")


def test_other_sources_are_sources_too(tmp_path: Path) -> None:
    first, second = (
        save_torch(tmp_path / "a.pt", {"model": model()}),
        save_torch(tmp_path / "b.pt", {"model": model(1)}),
    )
    with untouched(first, second):
        done = run("convert", first, second, "--to", "torch", "--model-from", second, "--overwrite")
        check_words(done, USAGE, "source")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("when", ["create", "transfer", "finish", "sync", "rename"])
def test_overwrite_keeps_the_old_one_when_it_fails(
    when: str, to: str, src: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("convert", src, out / "dst", "--to", to).code == 0
    fail_at(monkeypatch, when)
    with untouched(out / "dst"):
        said = check_words(run("convert", src, out / "dst", "--to", to, "--overwrite"), STORAGE, "input/output error")
        assert names(out) == ["dst"], said
    monkeypatch.undo()
    assert run("convert", src, out / "dst", "--to", to, "--overwrite").code == 0


def fail_at(monkeypatch: pytest.MonkeyPatch, when: str, code: int = errno.EIO) -> None:
    """Let the machine refuse at one point of a conversion."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    real_rename = os.rename

    def rename(old: Any, new: Any, **kwargs: Any) -> None:
        # The old one can still be moved out of the way and back.
        if str(old).startswith("new/"):
            refuse()
        real_rename(old, new, **kwargs)

    patches: dict[str, tuple[str, Callable[..., Any]]] = {
        "create": ("ftruncate", refuse), "transfer": ("pwrite", refuse), "sync": ("fsync", refuse),
        "rename": ("rename", rename),
    }  # fmt: skip
    if when == "finish":
        from ckpttool.storage import files

        real_check = files.check_unchanged

        def then_refuse(before: Any) -> None:
            real_check(before)
            monkeypatch.setattr(os, "pwrite", refuse)
            monkeypatch.setattr(os, "fsync", refuse)

        monkeypatch.setattr(files, "check_unchanged", then_refuse)
    else:
        monkeypatch.setattr(os, *patches[when])
        if when == "rename":
            monkeypatch.setattr(os, "link", refuse)  # how a file gets a name that may be taken


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("when", ["create", "transfer", "finish", "sync", "rename"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_the_machine_refuses_to_write(
    code: int, when: str, to: str, src: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, when, code)
    said = check_words(run("convert", src, out / "dst", "--to", to), STORAGE, os.strerror(code).lower())
    assert names(out) == [], said
    if code in (errno.ENOSPC, errno.EDQUOT):
        assert "free some space" in said
    assert ".partial-" not in said, f"names a file that is not there any more: {said}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_the_machine_refuses_to_read(
    call: str, kind: str, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = save(kind, tmp_path)

    def refuse(*args: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, refuse)
    done = run("convert", src, out / "dst", "--to", "torch")
    if call == "preadv" or done.code:
        check_words(done, STORAGE, src.name if src.is_file() else "__0_0.distcp", "input/output error")
    assert names(out) == []


def test_a_read_only_directory(src: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="out-"))
    try:
        folder.chmod(0o555)
        said = check_words(as_nobody("convert", public(src), folder / "dst.pt"), STORAGE, folder, "permission denied")
        assert ".partial-" not in said
        check_words(as_nobody("convert", public(src), folder / "new" / "dst.pt"), STORAGE, folder)
        planned = as_nobody("convert", public(src), folder / "dst.pt", "-n")
        assert planned.code == STORAGE and "would write" in planned.out and "no permission" in planned.err
        assert names(folder) == []
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def public(src: Path) -> Path:
    """A copy where everybody can read it: the tests' own directory is root's."""
    made = Path(tempfile.gettempdir(), f"ckpt-{os.getpid()}.pt")
    shutil.copy(src, made)
    made.chmod(0o644)
    return made


@pytest.fixture(autouse=True, scope="module")
def _clean() -> Iterator[None]:
    yield
    Path(tempfile.gettempdir(), f"ckpt-{os.getpid()}.pt").unlink(missing_ok=True)


def test_where_nothing_can_be_made(src: Path, out: Path) -> None:
    (out / "file").touch()
    check_words(run("convert", src, out / "file" / "x.pt"), STORAGE, out / "file")
    check_words(run("convert", src, out / "file" / "x" / "y.pt"), STORAGE, out / "file")
    assert names(out) == ["file"]


@pytest.mark.parametrize("to", FORMATS)
def test_dst_is_a_pipe(to: str, src: Path, out: Path) -> None:
    """Or a device: `--overwrite` takes the place of files and directories, not of these. Root could replace
    `/dev/null`, so no test goes near a real one."""
    os.mkfifo(out / "dst")
    with untouched(out):
        for flags in ([], ["--overwrite"], ["--overwrite", "-n"]):
            check_words(run("convert", src, out / "dst", "--to", to, *flags), EXISTS, out / "dst")


def test_a_name_too_long(src: Path, out: Path) -> None:
    check_words(run("convert", src, out / ("x" * 252 + ".pt")), STORAGE, "too long")
    assert names(out) == []


# No space -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Two MiB, and no more."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("to", FORMATS)
def test_no_space(to: str, tmp_path: Path, small_disk: Path) -> None:
    src = save_torch(tmp_path / "big.pt", {"w": torch.ones(1 << 20)})
    with untouched(src):
        check_words(run("convert", src, small_disk / "dst", "--to", to), STORAGE, small_disk / "dst", "free")
        assert names(small_disk) == []
        done = run("convert", src, small_disk / "dst", "--to", to, "-n")
        assert done.code == STORAGE and "needed" in done.out and "are free" in done.err


@pytest.mark.parametrize("to", FORMATS)
def test_the_space_goes_while_we_write(to: str, tmp_path: Path, small_disk: Path, monkeypatch: Any) -> None:
    """Somebody else fills the disk: what was counted at the start is not there any more."""
    src = save_torch(tmp_path / "big.pt", {"w": torch.ones(300_000)})
    (small_disk / "other").write_bytes(bytes(1 << 20))
    monkeypatch.setattr("ckpttool.storage.free_space.free_bytes", lambda path: 1 << 40)
    said = check_words(run("convert", src, small_disk / "dst", "--to", to), STORAGE, "no space left")
    assert names(small_disk) == ["other"]
    assert ".partial-" not in said and str(small_disk / "dst") in said


OTHERS = {"reshard": ("reshard", "--to-world", "3"), "export": ("export", "--no-card")}
every_other = pytest.mark.parametrize("words", OTHERS.values(), ids=OTHERS)


@every_other
def test_no_space_for_the_others(words: tuple[str, ...], tmp_path: Path, small_disk: Path) -> None:
    src = save_torch(tmp_path / "big.pt", {"w": torch.ones(1 << 20)})
    with untouched(src):
        check_words(run(words[0], src, small_disk / "dst", *words[1:]), STORAGE, small_disk / "dst", "free")
        assert names(small_disk) == []
        assert run(words[0], src, small_disk / "dst", *words[1:], "-n").code == STORAGE


@every_other
def test_the_space_goes_while_the_others_write(
    words: tuple[str, ...], tmp_path: Path, small_disk: Path, monkeypatch: Any
) -> None:
    """And the next run, when there is space again, has nothing to put away."""
    src = save_torch(tmp_path / "big.pt", {"w": torch.ones(300_000)})
    (small_disk / "other").write_bytes(bytes(1 << 20))
    with monkeypatch.context() as patched:
        patched.setattr("ckpttool.storage.free_space.free_bytes", lambda path: 1 << 40)
        said = check_words(run(words[0], src, small_disk / "dst", *words[1:]), STORAGE, "no space left")
    assert names(small_disk) == ["other"]
    assert ".partial-" not in said and str(small_disk / "dst") in said
    (small_disk / "other").unlink()
    done = run(words[0], src, small_disk / "dst", *words[1:])
    assert (done.code, names(small_disk)) == (0, ["dst"]), done.err
    assert "interrupted" not in done.err
    assert run("diff", src, small_disk / "dst", "-q").out == ""


@pytest.mark.parametrize("to", [FORMATS[0], *(pytest.param(to, marks=pytest.mark.long) for to in FORMATS[1:])])
def test_a_limit_on_the_size_of_files(to: str, tmp_path: Path, out: Path) -> None:
    """`ulimit -f`, as some clusters have: the system sends a signal before it refuses."""
    src = save_torch(tmp_path / "big.pt", {"w": torch.ones(1 << 18)})

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))

    check_words(shell("convert", src, out / "dst", "--to", to, preexec_fn=limit), STORAGE, "file too large")
    assert names(out) == []


# Signals --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB in many tensors."""
    folder = tmp_path_factory.mktemp("large")
    block = torch.arange(1 << 18, dtype=torch.float32)
    return save_dcp(folder / "ckpt", {"model": {f"layers.{i}.weight": block + i for i in range(190)}, "step": 3})


def begun(process: subprocess.Popen[str], folder: Path) -> str:
    """Wait until something has been made of DST; its name."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        made = [path.parent.parent.name for path in Path(folder).glob(".*.partial-*/new/*")]
        if made:
            return made[0]
        if process.poll() is not None:
            break
        time.sleep(0.001)
    raise AssertionError(f"never began: {process.communicate()}")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def stopped(large: Path, out: Path, to: str, *numbers: signal.Signals) -> tuple[int, str]:
    """The exit code and stderr of a conversion that gets signals when it has begun. One that was done before they came,
    as the disk is fast or this process had to wait, is begun anew."""
    for _ in range(20):
        process = spawn("convert", large, out / "dst", "--to", to)
        begun(process, out)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.005)
        said = process.communicate(timeout=300)[1]
        if process.returncode:
            break
        assert names(out) == ["dst"]
        remove(out / "dst")
    return process.returncode, said


SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated"), signal.SIGHUP: (143, "terminated")}


@pytest.mark.parametrize(
    ("number", "to"),
    [
        pytest.param(number, to, marks=[pytest.mark.long] * (i != j))
        for i, number in enumerate(SIGNALS)
        for j, to in enumerate(FORMATS)
    ],
)
def test_a_signal(number: signal.Signals, to: str, large: Path, out: Path) -> None:
    code, word = SIGNALS[number]
    with untouched(large):
        assert stopped(large, out, to, number) == (code, f"{word}, nothing was written\n")
    assert names(out) == []


def test_two_signals(large: Path, out: Path) -> None:
    """The second one does not stop the cleaning up."""
    for numbers in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)):
        code, said = stopped(large, out, "dcp", *numbers)
        assert code in (130, 143), said
        assert "Traceback" not in said and names(out) == [], (numbers, said, names(out))


def test_a_signal_before_anything(large: Path, out: Path) -> None:
    for delay in (0.05, 0.15, 0.25):
        process = spawn("convert", large, out / "dst", "--to", "dcp")
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=300)[1]
        assert process.returncode in (143, -signal.SIGTERM, 0), said
        assert "Traceback" not in said
        assert names(out) in ([], ["dst"])
        shutil.rmtree(out / "dst", ignore_errors=True)


@pytest.mark.parametrize("to", [FORMATS[0], *(pytest.param(to, marks=pytest.mark.long) for to in FORMATS[1:])])
def test_killed(to: str, large: Path, out: Path) -> None:
    """No DST, and the next run removes what is left behind and says so."""
    with untouched(large):
        assert stopped(large, out, to, signal.SIGKILL)[0] == -signal.SIGKILL
        (left,) = names(out)
        done = shell("convert", large, out / "dst", "--to", to, "--tensors", "*.1.weight")
        assert done.code == 0, done.err
        assert "what an interrupted run left" in done.err and left in done.err
        assert names(out) == ["dst"]


@pytest.mark.parametrize("to", FORMATS)
def test_what_a_killed_run_of_the_same_number_left(to: str, src: Path, out: Path) -> None:
    """Process ids come round again, in containers at once; without a journal nobody knows whose it is."""
    for stale in (out / f".dst.partial-{threading.get_native_id()}", out / f".dst.old-{threading.get_native_id()}"):
        stale.mkdir()
        (stale / "x").touch()
    done = run("convert", src, out / "dst", "--to", to)
    assert done.code == 0, done.err
    assert "dst" in names(out)
    same_values(out / "dst")
    assert run("convert", src, out / "dst", "--to", to, "--overwrite").code == 0
    same_values(out / "dst")


# A source that goes on being written ----------------------------------------------------------------------------------


def data_file(src: Path) -> Path:
    return src if src.is_file() else src / "__0_0.distcp"


def append(src: Path) -> None:
    with data_file(src).open("ab") as stream:
        stream.write(b"more")


def touch_inside(src: Path) -> None:
    """The same size, other bytes."""
    with data_file(src).open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes((last[0] ^ 1,)))
    os.utime(data_file(src), ns=(0, time.time_ns() + 10**9))


def replace_it(src: Path) -> None:
    """As a trainer does that keeps `last.pt`: another file under the same name."""
    file = data_file(src)
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    copy.replace(file)


def remove_it(src: Path) -> None:
    data_file(src).unlink()


def new_index(src: Path) -> None:
    if src.is_dir():
        (src / ".metadata").write_bytes((src / ".metadata").read_bytes())
        os.utime(src / ".metadata", ns=(0, time.time_ns() + 10**9))
    else:
        append(src)


CHANGES = [append, touch_inside, replace_it, remove_it, new_index]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes(change: Callable[[Path], None], kind: str, tmp_path: Path, out: Path) -> None:
    src = save(kind, tmp_path)
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        if not calls:
            change(src)
        calls.append(done)

    with pytest.raises(ReadError) as caught:
        ckpttool.convert(str(src), str(out / "dst"), to="torch", progress=progress)
    assert "changed while it was being read" in caught.value.message
    assert caught.value.hint is not None and "still being written" in caught.value.hint
    assert names(out) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_is_cut_while_it_is_read(kind: str, tmp_path: Path, out: Path, monkeypatch: Any) -> None:
    """Either word is true: it ends too early, or it has changed."""
    src = save(kind, tmp_path)
    real, cut = os.preadv, []

    def preadv(*args: Any) -> int:
        if not cut:
            os.truncate(data_file(src), 100)
            cut.append(1)
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    check_words(run("convert", src, out / "dst", "--to", "torch"), [READ, 4], data_file(src).name)
    assert names(out) == []


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("inspect",), ("inspect", "--json"), ("inspect", "--tensors", "*"), ("formats",)])
def test_a_closed_pipe(words: tuple[str, ...], large: Path) -> None:
    """`ckpttool inspect ... | head -1`."""
    given = (words[0], large, *words[1:]) if words[0] == "inspect" else words
    assert alone(*given) == (0, "")


def alone(*words: object) -> tuple[int, str]:
    """The exit code and stderr of a command whose stdout is closed while it works: `ckpttool ... | head -0`."""
    process = spawn(*words)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    return process.wait(300), said


@pytest.mark.parametrize("flags", [(), pytest.param(("--json",), marks=pytest.mark.long)])
@pytest.mark.parametrize("words", [("convert", "--to", "dcp"), *OTHERS.values()], ids=["convert", *OTHERS])
def test_a_closed_pipe_and_something_to_write(
    words: tuple[str, ...], flags: tuple[str, ...], src: Path, out: Path
) -> None:
    """Nobody hears of it, and DST is complete."""
    assert alone(words[0], src, out / "dst", *words[1:], *flags) == (0, "")
    assert names(out) == ["dst"]
    assert run("diff", src, out / "dst").code == 0


@pytest.mark.parametrize("flags", [(), pytest.param(("-v",), marks=pytest.mark.long)])
def test_a_closed_pipe_and_a_verdict(flags: tuple[str, ...], tmp_path: Path, out: Path) -> None:
    """`set -o pipefail` and `ckpttool verify ... | head`: damage is not success because the list of it was too long."""
    block = torch.ones(2, 2)
    many = save_torch(tmp_path / "many.pt", {f"layers.{i}.weight": block * i for i in range(300)})
    other = save_torch(out / "other.pt", {f"layers.{i}.weight": block * i + 1 for i in range(300)})
    damaged = out / "damaged.pt"
    data = many.read_bytes()
    damaged.write_bytes(data.replace((block * 200).numpy().tobytes(), (block * 201).numpy().tobytes(), 1))
    assert alone("verify", many, *flags) == (0, "")
    assert alone("verify", damaged, *flags) == (CORRUPT, "")
    assert alone("diff", many, many, *flags) == (0, "")
    assert alone("diff", many, other, *flags) == (1, "")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_streams(closed: int, src: Path, out: Path) -> None:
    """`>&-`: the number of the closed stream is then given to a file."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *PROGRAM, "convert", src, out / "dst.pt"],
        capture_output=True, cwd=ROOT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    same_values(out / "dst.pt")
    if closed:
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *PROGRAM, "inspect", out / "nowhere"],
            capture_output=True, cwd=ROOT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == READ


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_umask(mask: int, file: int, folder: int, to: str, src: Path, out: Path) -> None:
    old = os.umask(mask)
    try:
        assert run("convert", src, out / "dst", "--to", to).code == 0
    finally:
        os.umask(old)
    made = [out / "dst", *([*(out / "dst").iterdir()] if (out / "dst").is_dir() else [])]
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (folder if path.is_dir() else file), path


# Two at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [FORMATS[0], *(pytest.param(to, marks=pytest.mark.long) for to in FORMATS[1:])])
def test_two_runs_into_one_dst(to: str, large: Path, out: Path) -> None:
    """One of them wins and the other says so, or the second finds it there; never a mixture."""
    both = [spawn("convert", large, out / "dst", "--to", to) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes[0] == 0, said
    for process, (_, err) in zip(both, said, strict=True):
        if process.returncode:
            check_words(Ran(process.returncode, "", err), EXISTS, out / "dst")
    assert names(out) == ["dst"]
    assert json.loads(run("inspect", out / "dst", "--json").out)["format"] == to


@pytest.mark.parametrize("name", ["dst", "dst.pt"])
def test_another_run_is_done_a_moment_before(
    name: str, src: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What it has made is not touched, neither a directory nor a file."""
    real = StagingArea.publish

    def publish(stage: StagingArea, **options: bool) -> None:
        if name == "dst":
            Path(stage.dst).mkdir()
        Path(stage.dst, "theirs" if name == "dst" else "").write_bytes(b"theirs")
        real(stage, **options)

    monkeypatch.setattr(StagingArea, "publish", publish)
    with pytest.raises(OverwriteError, match="another run has written it in the meantime"):
        ckpttool.convert(str(src), str(out / name), to="dcp" if name == "dst" else "torch")
    assert names(out) == [name] and next(path for path in out.rglob("*") if path.is_file()).read_bytes() == b"theirs"


def test_two_runs_in_threads_into_one_dst(src: Path, out: Path) -> None:
    """The library may be used from threads, which have one process id."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            ckpttool.convert(str(src), str(out / "dst.pt"))
        except CkptError as error:
            failures.append(error)
        except BaseException as error:
            failures.append(AssertionError(repr(error)))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(failures) < 4 and all(isinstance(f, CkptError) for f in failures), failures
    assert names(out) == ["dst.pt"]
    same_values(out / "dst.pt")


def test_where_the_program_is_started_from(src: Path, out: Path) -> None:
    """Relative paths, a name that begins with a dash, one that is only a dot."""
    done = shell(
        "convert", os.path.relpath(src, out), "new/dst.pt", cwd=out, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.code == 0, done.err
    same_values(out / "new" / "dst.pt")
    done = shell("convert", "--", str(src), "-dst.pt", cwd=out, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.err
    (out / "here").mkdir()
    done = shell("convert", src, ".", "--to", "dcp", cwd=out / "here", env={**os.environ, "PYTHONPATH": str(ROOT)})
    check_words(done, USAGE, "`.`")
    check_words(run("convert", src, "/", "--to", "dcp", "--overwrite"), USAGE, "`/`")


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_dst_is_a_link_to_a_directory(to: str, src: Path, out: Path, tmp_path: Path) -> None:
    """To a larger disk, say: the link stays."""
    (tmp_path / "disk" / "there").mkdir(parents=True)
    (out / "dst").symlink_to(tmp_path / "disk" / "there")
    for flags in ([], ["--overwrite"]):
        done = run("convert", src, out / "dst", "--to", to, *flags)
        assert done.code == 0, done.err
        assert (out / "dst").is_symlink() and names(tmp_path / "disk") == ["there"] and names(out) == ["dst"]
        same_values(tmp_path / "disk" / "there")
