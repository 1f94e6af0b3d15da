"""`prune` of runs in buckets: what goes has no index from the first moment on, and the newest complete one stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import run
from support.paths import CHECKPOINTS
from support.s3_server import Fault, Request, S3Server, error

import ckpttool
from ckpttool.errors import ReadError, RemoteError
from ckpttool.fleet import prune
from ckpttool.storage.stores import Location

DCP = CHECKPOINTS / "dcp/fsdp2_w2/ckpt"
RUN = "s3://bucket/run7"
STEPS = (5, 10, 15, 20)


@pytest.fixture
def there(server: S3Server) -> S3Server:
    for step in STEPS:
        server.put(f"run7/step-{step}", Path(DCP))
    # The newest one is not complete.
    server.put("run7/step-25/__0_0.distcp", (DCP / "__0_0.distcp").read_bytes())
    server.put("run7/notes.txt", b"mine")
    return server


def below(server: S3Server, step: int) -> list[str]:
    return [name for name in server.names() if name.startswith(f"run7/step-{step}/")]


def test_it_changes_nothing_unless_it_is_told(there: S3Server) -> None:
    tags = there.tags()
    planned = ckpttool.prune(RUN, keep_last=2)
    assert {one.step: one.action for one in planned.checkpoints} == {
        5: "remove",
        10: "remove",
        15: "keep",
        20: "keep",
        25: "leave",
    }
    nbytes = sum(path.stat().st_size for path in DCP.iterdir())
    assert planned.verdict == "planned" and planned.freed_bytes == 2 * nbytes
    assert there.tags() == tags and not [one for one in there.requests if not one.startswith(("GET", "HEAD"))]


def test_what_goes_is_gone(there: S3Server) -> None:
    done = run("prune", RUN, "--keep-last", "2", "--yes")
    assert done.exit_code == 0 and "removed 2 checkpoints" in done.stdout
    assert {name.split("/")[1] for name in there.names()} == {"step-15", "step-20", "step-25", "notes.txt"}
    assert str(ckpttool.inspect(RUN).location) == f"{RUN}/step-20"
    assert ckpttool.prune(RUN, keep_last=2, yes=True).verdict == "nothing"


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long), 2])
def test_a_removal_that_fails(at: int, there: S3Server) -> None:
    """At the claim, the index, or the rest: a checkpoint is whole or none, and the next call removes what is left."""
    deletions = [0]

    def fail(request: Request) -> Fault | None:
        deletions[0] += request.query.startswith("delete")
        is_it = deletions[0] >= at and request.query.startswith("delete") if at else request.method == "PUT"
        return error(403, "AccessDenied") if is_it else None

    there.faults = [fail]
    result = ckpttool.prune(RUN, keep_last=3, yes=True)
    assert result.exit_code == RemoteError.exit_code and not result.checkpoints[0].done
    assert "not done" in result.checkpoints[0].why and result.freed_bytes == 0
    there.faults.clear()
    assert (len(below(there, 5)) == len([*DCP.iterdir()])) == (at < 2)
    assert ("run7/step-5/.metadata" in there.names()) == (at < 2)
    assert [one.state for one in ckpttool.clean(RUN).left] == ["ended"] * (at > 0)
    ckpttool.prune(RUN, keep_last=3, yes=True)
    assert below(there, 5) == [] and not [name for name in there.names() if "partial" in name]
    assert all(len(below(there, step)) == len([*DCP.iterdir()]) for step in STEPS[1:])


def test_parts_go(there: S3Server, tmp_path: Path) -> None:
    result = ckpttool.prune(RUN, keep_last=2, keep_every=10, drop="optimizer", yes=True)
    assert {one.step: (one.action, one.done) for one in result.checkpoints[:2]} == {
        5: ("remove", True),
        10: ("drop", True),
    }
    ckpttool.convert(DCP, tmp_path / "rest", producer="same", drop="optimizer")
    assert ckpttool.diff(tmp_path / "rest", f"{RUN}/step-10").same
    before = sum(path.stat().st_size for path in DCP.iterdir())
    after = sum(len(there.get(name) or b"") for name in below(there, 10))
    assert result.freed_bytes == before + before - after
    assert not [name for name in there.names() if "partial" in name]


def test_what_is_saved_again_meanwhile_stays(there: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With files of the same names and sizes, by a run that has resumed from an older step."""
    new = bytearray((DCP / "__0_0.distcp").read_bytes())
    new[-1] ^= 1
    discard = prune._discard

    def late(path: Location, before: str) -> None:
        there.put("run7/step-10/__0_0.distcp", bytes(new))
        discard(path, before)

    monkeypatch.setattr(prune, "_discard", late)
    done = ckpttool.prune(RUN, keep_last=2, yes=True)
    assert [(one.step, one.done) for one in done.checkpoints[:2]] == [(5, True), (10, False)]
    assert "has changed in the meantime" in done.checkpoints[1].why and done.exit_code == ReadError.exit_code
    assert there.get("run7/step-10/__0_0.distcp") == bytes(new) and len(below(there, 10)) == len([*DCP.iterdir()])
