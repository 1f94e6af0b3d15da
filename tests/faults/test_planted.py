"""What lies beside DST is input: whoever may write there can plant it, and so can an archive that is unpacked there.

Nothing that no run of this user made is followed, believed, moved or removed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import mark, run, save_dcp, save_torch
from support.paths import ROOT
from support.remnants import line, owner, plant, write_journal

import ckpttool
from ckpttool.errors import CkptError
from ckpttool.storage import workspace

RUN = "0123456789ab"
VICTIM = {"notes.txt": "mine", "__0_0.distcp": "precious", ".metadata": "precious", "sub/deep.txt": "mine, too"}

Plant = Callable[[Path, Path], None]  # into the directory of DST, with that of a victim


def journal(path: Path, *more: Any, first: Any = 0) -> None:
    write_journal(path, [first, *more])


# As earlier versions called them: names prove nothing.
def link_for_partial(out: Path, victim: Path) -> None:
    (out / ".dst.partial-7").symlink_to(victim)
    (out / ".dst.partial-7.before").mkdir()
    journal(out / ".dst.partial-7.journal")


def link_for_before(out: Path, victim: Path) -> None:
    (out / ".dst.partial-7").mkdir()
    (out / ".dst.partial-7/.bash_profile").write_text("touch PWNED")
    (out / ".dst.partial-7.before").symlink_to(victim)
    journal(out / ".dst.partial-7.journal")


def link_for_old(out: Path, victim: Path) -> None:
    (out / ".dst.old-7").symlink_to(victim)
    journal(out / ".dst.partial-7.journal")


def an_old_one(out: Path, victim: Path) -> None:
    (out / ".dst.old-5").mkdir()
    (out / ".dst.old-5/theirs").write_text("theirs")


def a_journal_that_names_a_file(out: Path, victim: Path) -> None:
    journal(out / ".dst.partial-7.journal", {"after": str(victim / "planted")})


# As this version calls them.
def link_for_workspace(out: Path, victim: Path) -> None:
    (victim / "new").mkdir()
    (out / f".dst.partial-{RUN}").symlink_to(victim)
    write_journal(victim / "journal", [owner(victim)])


def link_for_journal(out: Path, victim: Path) -> None:
    place = plant(out, "dst")
    (place / "journal").rename(victim / "log")
    (place / "journal").symlink_to(victim / "log")


def link_with_another_name(out: Path, victim: Path) -> None:
    place = plant(out, "dst")
    os.link(place / "journal", victim / "log")


def of_another_user(out: Path, victim: Path) -> None:
    place = plant(out, "dst")
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(place, 65534, 65534)


def a_journal_of_another_user(out: Path, victim: Path) -> None:
    place = plant(out, "dst")
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(place / "journal", 65534, 65534)


def others_may_write(out: Path, victim: Path) -> None:
    plant(out, "dst").chmod(0o770)


def others_may_write_the_journal(out: Path, victim: Path) -> None:
    (plant(out, "dst") / "journal").chmod(0o666)


def a_copy(out: Path, victim: Path) -> None:
    place = plant(out, "dst")
    write_journal(place / "journal", [owner(place) | {"inode": owner(place)["inode"] + 1}])


def torn(out: Path, victim: Path) -> None:
    place = plant(out, "dst")
    (place / "journal").write_bytes(line(owner(place))[:-9])


def a_pipe(out: Path, victim: Path) -> None:
    place = plant(out, "dst")
    (place / "journal").unlink()
    os.mkfifo(place / "journal", 0o600)


def a_directory(out: Path, victim: Path) -> None:
    place = plant(out, "dst")
    (place / "journal").unlink()
    (place / "journal").mkdir(mode=0o700)


def an_old_one_that_no_journal_names(out: Path, victim: Path) -> None:
    (out / f".dst.old-{RUN}").mkdir()
    (out / f".dst.old-{RUN}/theirs").write_text("theirs")


PLANTED: list[Plant] = [
    link_for_partial, link_for_before, link_for_old, an_old_one, a_journal_that_names_a_file, link_for_workspace,
    link_for_journal, link_with_another_name, of_another_user, a_journal_of_another_user, others_may_write,
    others_may_write_the_journal, a_copy, torn, a_pipe, a_directory, an_old_one_that_no_journal_names,
]  # fmt: skip

Job = Callable[..., Any]
MODEL = {"strict": False, "only": "model"}
JOBS: dict[str, tuple[Job, dict[str, Any], bool]] = {
    "convert": (ckpttool.convert, {"to": "dcp"}, True),
    "reshard": (ckpttool.reshard, {"to_world": 2}, True),
    "export": (ckpttool.export, MODEL, False),
    "repair": (ckpttool.repair, {}, False),
}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which there is something to repair, too."""
    path = save_dcp(tmp_path_factory.mktemp("src") / "ckpt", {"model": {"w": torch.arange(6.0)}, "step": 3})
    (path / "__7_0.distcp").write_bytes(b"of an older save")
    return path


def place(top: Path) -> tuple[Path, Path]:
    """The directory of DST, and that of a victim."""
    out, victim = top / "out", top / "victim"
    for name, text in VICTIM.items():
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_text(text)
    out.mkdir()
    return out, victim


def outside(top: Path) -> dict[str, str]:
    """Everything below a directory but DST."""
    return {name: said for name, said in mark(top).items() if name != "out/dst" and not name.startswith("out/dst/")}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_stays_as_it_is(planted: Plant, job: str, src: Path, tmp_path: Path) -> None:
    work, keywords, resumes = JOBS[job]
    for resume in (False, True) if resumes else (False,):
        for overwrite in (False, True):
            top = tmp_path / f"{resume}-{overwrite}"
            top.mkdir()
            out, victim = place(top)
            planted(out, victim)
            if overwrite:
                save_dcp(out / "dst", {"w": torch.ones(2)})
            before = outside(top)
            more = {"resume": True} if resume else {}
            done = work(str(src), str(out / "dst"), **keywords, **more, overwrite=overwrite)
            assert outside(top) == before
            assert (out / "dst").is_dir()
            assert any("left alone: `.dst." in note for note in done.notes), done.notes


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_among_temporary_directories_stays(
    planted: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where everybody may write: only what a killed run of this user left is removed."""
    top, _ = place(tmp_path)
    planted(top, tmp_path / "victim")
    for path in [*top.iterdir()]:
        path.rename(top / path.name.replace(".dst.partial", f"ckpttool-run-{os.uname().nodename}"))
    before = mark(tmp_path)
    left = plant(top, "left")
    left.rename(top / f"ckpttool-run-{os.uname().nodename}-{'f' * 12}")
    monkeypatch.setattr(tempfile, "tempdir", str(top))
    with workspace.scratch_directory("ckpttool-run-") as own:
        assert os.listdir(own) == []
    assert mark(tmp_path) == before


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def link_to_file(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "__0_0.distcp")


def dangling_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "nowhere")


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def other_name(path: Path, victim: Path) -> None:
    os.link(victim / "__0_0.distcp", path)


@pytest.mark.parametrize("planted", [link, link_to_file, dangling_link, pipe, other_name])
@pytest.mark.parametrize("name", ["new", "new/dst.partial", "before", "before/dst.partial", "before/dst.partial/x"])
@pytest.mark.parametrize("job", ["convert", "reshard"])
def test_links_in_a_workspace_lead_nowhere(job: str, name: str, planted: Plant, src: Path, tmp_path: Path) -> None:
    """Also not where a run of this user made it, and it is resumed: it is in no other way that links came there."""
    out, victim = place(tmp_path)
    for file in src.iterdir():
        (victim / file.name).write_bytes(bytes(file.stat().st_size))
    workspace = plant(out, "dst")
    path = workspace / (name.replace("/x", "/__0_0.distcp"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rmdir()
    planted(path, victim)
    before = {victim / file: (victim / file).stat() for file in ["", *os.listdir(victim)]}
    content = mark(victim)
    work, keywords, _ = JOBS[job]
    work(str(src), str(out / "dst"), **keywords, resume=True)
    assert mark(victim) == content
    assert all(path.stat().st_mtime_ns == status.st_mtime_ns for path, status in before.items())
    assert os.listdir(out) == ["dst"] and ckpttool.verify(out / "dst").whole


@pytest.mark.parametrize("planted", [a_journal_that_names_a_file, a_copy, others_may_write])
def test_a_journal_is_not_told_where_to_write(planted: Plant, tmp_path: Path) -> None:
    """DST is there: what a journal says is still to be written is not."""
    out, victim = place(tmp_path)
    src = save_torch(tmp_path / "src.pt", {"w": torch.ones(2)})
    save_torch(out / "dst", {"w": torch.ones(3)})
    planted(out, victim)
    for path in (*out.glob(".dst.partial-*/journal"), *out.glob("*.journal")):
        mode = path.stat().st_mode
        with path.open("ab") as stream:
            stream.write(line({"after": str(victim / "planted")}))
        path.chmod(mode)
    before = mark(tmp_path)
    for more in ({}, {"manifest": str(tmp_path / "m.json")}):
        with pytest.raises(CkptError, match="exists"):
            ckpttool.convert(str(src), str(out / "dst"), to="torch", **more)
    assert mark(tmp_path) == before


def test_not_even_the_journal_of_a_workspace(tmp_path: Path) -> None:
    """One that is believed may name any file: only that of the command line is written."""
    out, victim = place(tmp_path)
    src = save_torch(tmp_path / "src.pt", {"w": torch.ones(2)})
    save_torch(out / "dst", {"w": torch.ones(3)})
    plant(out, "dst", more=[{"after": str(victim / "planted")}])
    before = mark(tmp_path)
    said = run("convert", src, out / "dst", "--to", "torch")
    assert said.code == 6 and "everything except the requested manifest" in said.err, said.err
    assert mark(tmp_path) == before


def test_directories_that_are_swapped_for_links(src: Path, tmp_path: Path) -> None:
    """Somebody who may write there puts links to a victim in place of whatever a run makes beside DST."""
    out, victim = place(tmp_path)
    (victim / "new").mkdir()
    (victim / "new/dst.partial").mkdir()
    for name in ("__0_0.distcp", ".metadata", "integrity.json"):
        (victim / "new/dst.partial" / name).write_text("precious")
    before = mark(victim)
    ended, swapped = threading.Event(), []

    def swap() -> None:
        while not ended.is_set():
            for name in os.listdir(out):
                path = out / name
                if ".partial-" in name and not path.is_symlink():
                    try:
                        path.rename(out / f"stolen-{len(swapped)}")
                        path.symlink_to(victim)
                    except OSError:
                        continue
                    swapped.append(name)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(12):
            for overwrite in (False, True):
                try:
                    ckpttool.convert(str(src), str(out / f"dst{number}"), to="dcp", overwrite=overwrite, check=True)
                except CkptError:
                    continue
    finally:
        ended.set()
        thread.join()
    assert swapped and mark(victim) == before
    for path in out.glob("dst*"):
        assert ckpttool.verify(path).whole


def test_the_first_run_removes_what_its_like_left(src: Path, tmp_path: Path) -> None:
    """What a run of this user left is still found: the proof is its own."""
    out, _ = place(tmp_path)
    left = plant(out, "dst")
    done = ckpttool.convert(str(src), str(out / "dst"), to="dcp")
    assert os.listdir(out) == ["dst"] and any(left.name in note for note in done.notes)


def test_no_pipe_was_a_destination(src: Path, tmp_path: Path) -> None:
    """Not even where the journal of a workspace says so, and nothing is made of one."""
    out, _ = place(tmp_path)
    left, old = plant(out, "dst"), out / f".dst.old-{RUN}"
    os.mkfifo(old)
    status = old.stat()
    write_journal(left / "journal", [owner(left), {"old": [status.st_ino, stat.S_IFMT(status.st_mode)]}])
    ckpttool.convert(str(src), str(out / "dst"), to="dcp")
    assert sorted(os.listdir(out)) == [old.name, "dst"] and stat.S_ISFIFO(old.lstat().st_mode)


def test_what_cannot_be_removed_is_found_again(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal goes last, and only where the rest is gone."""
    from ckpttool.storage import tree

    out, _ = place(tmp_path)
    save_dcp(out / "dst", {"w": torch.ones(2)})
    real = tree.remove

    def refuse(name: str, *rest: Any, **more: Any) -> None:
        if name.endswith(".distcp"):
            raise PermissionError(13, "Permission denied")
        real(name, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(tree, "remove", refuse)
        done = run("convert", src, out / "dst", "--to", "dcp", "--overwrite")
    assert done.code == 0 and "is left beside" in done.err and "permission denied" in done.err, done.err
    assert any(".old-" in name for name in os.listdir(out)) and any(".partial-" in name for name in os.listdir(out))
    assert run("convert", src, out / "dst", "--to", "dcp", "--overwrite").code == 0
    assert os.listdir(out) == ["dst"]


def test_an_old_one_that_is_read_only(src: Path, tmp_path: Path) -> None:
    out, _ = place(tmp_path)
    save_dcp(out / "dst", {"w": torch.ones(2)}).chmod(0o555)
    done = run("convert", src, out / "dst", "--to", "dcp", "--overwrite", "--json")
    assert done.code == 0 and os.listdir(out) == ["dst"], done.err
    assert json.loads(done.out)["verdict"] == "written"


def test_runs_that_may_open_few_files(src: Path, tmp_path: Path) -> None:
    """They cannot remove what they made, and say so; the next run finds it."""
    program = (
        "import resource, runpy, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))\n"
        "sys.argv[0] = 'ckpttool'\nrunpy.run_module('ckpttool', run_name='__main__')\n"
    )
    words = ["convert", str(src), str(tmp_path / "out"), "--to", "fsdp1", "--to-world", "40"]
    for _ in range(3):
        subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, check=False)
    assert run("convert", src, tmp_path / "out", "--to", "dcp", "--overwrite").code == 0
    assert os.listdir(tmp_path) == ["out"]


def test_a_dry_run_where_the_temporary_directory_is_full(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = os.ftruncate

    def ftruncate(descriptor: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path.resolve())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, size)

    wanted = ckpttool.convert(str(src), str(tmp_path / "out"), to="dcp", dry_run=True)
    monkeypatch.setattr(os, "ftruncate", ftruncate)
    planned = ckpttool.convert(str(src), str(tmp_path / "out"), to="dcp", dry_run=True)
    assert planned.exit_code == 0 and planned.files == wanted.files and os.listdir(tmp_path) == []
    assert (planned.payload_bytes, planned.notes) == (wanted.payload_bytes, wanted.notes)


def test_large_and_deep_ones_cost_nothing(src: Path, tmp_path: Path) -> None:
    """An archive can hold a journal of zeros, terabytes of them, and directories in one another without end."""
    out, _ = place(tmp_path)
    with (plant(out, "dst") / "journal").open("wb") as stream:
        stream.truncate(1 << 40)
    inside = out / f".deep.partial-{RUN}"
    inside.mkdir(mode=0o700)
    top = descriptor = os.open(inside, os.O_RDONLY)
    for _ in range(700):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        if descriptor != top:
            os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    os.close(top)
    program = (
        "import resource, runpy, sys\nresource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "sys.argv[0] = 'ckpttool'\nrunpy.run_module('ckpttool', run_name='__main__')\n"
    )
    for words in (["convert", str(src), str(out / "dst"), "--to", "dcp"], ["clean", str(out), "--yes"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert len(os.listdir(out)) == 3
    # Python's own removal follows no depth like that.
    subprocess.run(["rm", "-rf", str(inside)], check=True)


def test_a_destination_above_a_link(src: Path, tmp_path: Path) -> None:
    """`link/../dst` lies beside what the link leads to; another `dst`, beside the link, is none of its business."""
    out, _ = place(tmp_path)
    (tmp_path / "real/sub").mkdir(parents=True)
    (out / "link").symlink_to(tmp_path / "real/sub")
    other = plant(out, "dst")
    old = out / f".dst.old-{other.name[-12:]}"
    old.mkdir()
    write_journal(other / "journal", [owner(other), {"old": [old.stat().st_ino, 0o040000]}])
    left = plant(tmp_path / "real", "dst")
    before = mark(out)
    for _ in range(2):
        done = ckpttool.convert(str(src), str(out / "link/../dst"), to="dcp", overwrite=True)
    assert mark(out) == before and sorted(os.listdir(tmp_path / "real")) == ["dst", "sub"], done.notes
    assert not left.exists()


def test_names_that_end_above_themselves(src: Path, tmp_path: Path) -> None:
    for dst in ("a/b/..", "a/b/c/../.."):
        said = run("convert", src, tmp_path / dst, "--to", "dcp")
        assert said.code == 2 and "cannot be replaced" in said.err, said.err
    assert os.listdir(tmp_path) == []


def test_where_a_file_system_is_mounted(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be renamed: that is said before anything is copied."""
    (tmp_path / "dst").mkdir()
    (tmp_path / "link").symlink_to("dst")
    real = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "dst") or real(path))
    for name in ("dst", "link"):
        said = run("convert", src, tmp_path / name, "--to", "dcp")
        assert said.code == 2 and "is mounted" in said.err and f"{name}/NAME" in said.err, said.err
