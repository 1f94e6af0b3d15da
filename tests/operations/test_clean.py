"""`clean`: what failed runs left is listed, and only what is of a run of this user that has ended is removed."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from support.faults import mark, run
from support.remnants import owner, plant, write_journal

import ckpttool
from ckpttool.errors import ReadError

RUN = "0123456789ab"


def remains(folder: Path) -> dict[str, str]:
    """One of each kind, by its first name, with the state that it has."""
    whole = plant(folder, "a")
    (whole / "new/a.partial").write_bytes(b"x" * 5000)
    link = folder / f".b.partial-{RUN}"
    link.symlink_to(whole)
    plant(folder, "c").chmod(0o770)
    copied = plant(folder, "d")
    write_journal(copied / "journal", [owner(copied) | {"inode": 1}])
    (folder / f".e.old-{RUN}").mkdir()
    (folder / ".f.partial-4242").mkdir(mode=0o755)
    (folder / ".f.partial-4242/__0_0.distcp").write_bytes(b"x" * 5000)
    (folder / ".f.partial-4242.journal").write_bytes(b"")
    (folder / ".g.partial-4242").symlink_to(whole)
    (folder / ".h.old-4242").mkdir(mode=0o755)
    (folder / ".i.old-4242").mkdir(mode=0o755)
    (folder / "i").mkdir()
    (folder / ".j.partial-4242.journal").write_bytes(b"")
    for name in (".f.partial-4242.journal", ".j.partial-4242.journal"):
        (folder / name).chmod(0o644)
    scratch = folder / f"ckpttool-plan-{os.uname().nodename}-{RUN}"
    scratch.mkdir(mode=0o700)
    write_journal(scratch / "journal", [owner(scratch) | {"host": os.uname().nodename}])
    for name in ("ckpttool-run-abc", "ckpttool-model-weights"):
        (folder / name).mkdir(mode=0o700)
        (folder / name / "notes").write_text("mine")
    (folder / "unrelated").write_text("mine")
    return {
        f".a.partial-{RUN}": "ended", f".b.partial-{RUN}": "foreign", f".c.partial-{RUN}": "foreign",
        f".d.partial-{RUN}": "foreign", f".e.old-{RUN}": "foreign", ".f.partial-4242": "foreign",
        ".g.partial-4242": "foreign", ".h.old-4242": "foreign", ".i.old-4242": "foreign",
        ".j.partial-4242.journal": "running", scratch.name: "ended", "ckpttool-run-abc": "foreign",
        "ckpttool-model-weights": "foreign",
    }  # fmt: skip


def test_each_kind(tmp_path: Path) -> None:
    wanted = remains(tmp_path)
    with (tmp_path / ".j.partial-4242.journal").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = mark(tmp_path)
        listed = ckpttool.clean(tmp_path)
        assert {one.names[0]: one.state for one in listed.left} == wanted
        assert mark(tmp_path) == before and listed.verdict == "left" and not listed.removed_bytes
        assert all((one.why is None) == (one.state == "ended") for one in listed.left)
        done = ckpttool.clean(tmp_path, yes=True)
        assert {one.names[0] for one in done.left if one.removed} == {
            n for n, state in wanted.items() if state == "ended"
        }
        gone = {name for name in before if not os.path.lexists(tmp_path / name)}
        assert {name.split("/")[0] for name in gone} == {
            name for one in done.left if one.removed for name in one.names
        }  # fmt: skip
        assert done.verdict == "removed" and done.removed_bytes >= 5000
        assert ckpttool.clean(tmp_path, yes=True).verdict == "clean"


def test_an_old_destination_comes_back(tmp_path: Path) -> None:
    place = plant(tmp_path, "out")
    old = tmp_path / f".out.old-{RUN}"
    old.mkdir()
    (old / "weights").write_text("mine")
    write_journal(place / "journal", [owner(place), {"old": [old.stat().st_ino, 0o040000]}])
    done = run("clean", tmp_path, "--yes")
    assert done.code == 0 and "restored" in done.err, done.err
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out/weights").read_text() == "mine"


def test_a_run_that_is_going_on(tmp_path: Path) -> None:
    from ckpttool.storage.staging import stage

    with stage(str(tmp_path / "out"), overwrite=False, is_file=True) as made:
        Path(made.path).write_text("x")
        (one,) = ckpttool.clean(tmp_path, yes=True).left
        assert one.state == "running" and not one.removed
    assert os.listdir(tmp_path) == ["out"]


def test_what_it_says(tmp_path: Path) -> None:
    remains(tmp_path)
    said = run("clean", tmp_path)
    assert said.code == 0 and f".b.partial-{RUN}\n  partial output, 0 B" in said.out and "not a directory" in said.out
    assert f"`ckpttool clean {tmp_path} --yes` removes it" in said.out
    rows = json.loads(run("clean", tmp_path, "--json").out)["left"]
    assert {row["kind"] for row in rows} == {"partial output", "old destination", "temporary files"}
    assert run("clean", tmp_path, "-q").out.splitlines() == [
        row["names"][0] for row in rows if row["state"] == "ended"
    ]  # fmt: skip
    with pytest.raises(ReadError, match="not a directory"):
        ckpttool.clean(tmp_path / "unrelated")
