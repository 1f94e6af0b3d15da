"""Finding the checkpoints of a run, and telling whether they are complete."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support import forked_command

from ckpttool.resume.checkpoints import Checkpoints, _has_more
from ckpttool.resume.observe.site.keep import Keeper
from ckpttool.resume.runs import run
from ckpttool.storage.tree import nbytes

# The rank that is first with a step writes its file when the other one has not begun it.
EARLY = """
import os, sys, time, torch
out, resume = sys.argv[1], sys.argv[2:]
torch.manual_seed(0)
model, step = torch.nn.Linear(2, 1), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if resume:
    saved = torch.load(resume[0] + "/state.pt")
    model.load_state_dict(saved["model"])
    step = saved["step"]
while step < {steps}:
    loss = model(torch.ones(3, 2) * step).square().mean()
    optimizer.zero_grad()
    loss.backward()
    step += 1
    if step % 2 == 0:
        os.makedirs(f"{{out}}/at-{{step}}", exist_ok=True)
        torch.save({{"place": step}}, f"{{out}}/at-{{step}}/own.pt")
    optimizer.step()
    time.sleep(0.15)
    if step % 2 == 0:
        torch.save({{"model": model.state_dict(), "step": step}}, f"{{out}}/at-{{step}}/state.pt")
"""


def saved(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"model.weight": np.ones(3)}, path)
    return str(path)


@pytest.mark.parametrize(
    ("pattern", "names", "steps"),
    [
        ("checkpoint-{step}", ["checkpoint-8", "checkpoint-80"], [8, 80]),
        ("step-{step}.pt", ["step-0008.pt", "step-00.pt", "step-8.pt.tmp"], [0, 8]),
        # All digits are the step's.
        ("*{step}.ckpt", ["epoch=0-step=12.ckpt", "last.ckpt", "7.ckpt"], [7, 12]),
        ("{step}*.pt", ["12-epoch1.pt"], [12]),
        ("s{step}/m-{step}.pt", ["s8/m-8.pt", "s8/m-9.pt"], [8]),
        ("epoch_{step-1}", ["epoch_0", "epoch_07"], [1, 8]),
        # Only `*` stands for anything.
        ("a[1]?-{step}", ["a[1]?-4", "a1x-5"], [4]),
    ],
)
def test_the_steps_in_names(pattern: str, names: list[str], steps: list[int], tmp_path: Path) -> None:
    out = tmp_path / "kept [1]" / "o.t"
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    assert [*Checkpoints(pattern, str(out), str(tmp_path / "k")).find()] == steps


def test_a_checkpoint_without_a_file_that_another_has_is_not_complete(tmp_path: Path) -> None:
    of_a, of_b = tmp_path / "a" / "step-4", tmp_path / "b" / "step-4"
    for path in (of_a / "model.safetensors", of_a / "optimizer.safetensors", of_b / "model.safetensors"):
        saved(path)
    found = Checkpoints("step-{step}", str(of_b.parent), str(tmp_path / "kept"))
    # Whether it can be opened alone has been asked before.
    assert found.why_not(str(of_b)) is None
    assert found.why_not(str(of_b), str(of_a)) == "`optimizer.safetensors` is not there yet"
    assert found.complete(4, str(of_a)) is None
    saved(of_b / "optimizer.safetensors")
    assert Path(found.complete(4, str(of_a)) or "").name == "step-4"


@pytest.mark.parametrize("looks", [(), (1, 2, 3), (2,)])
def test_files_beside_the_last_checkpoint_are_the_same_whenever_it_was_looked(
    looks: tuple[int, ...], tmp_path: Path
) -> None:
    """Without a hook it is chance, whether the directory is looked at between two saves."""
    out = tmp_path / "out"
    found = Checkpoints("step-{step}.safetensors", str(out), str(tmp_path / "kept"))
    for step in (1, 2, 3):
        for number, name in enumerate((f"step-{step}", f"average-{step}", "state")):
            os.utime(saved(out / f"{name}.safetensors"), (step, step + number / 10))
        if step in looks:
            found.find()
    found.moved(str(out))
    averages = {f"average-{step}.safetensors" for step in (1, 2, 3)}
    assert {*found.beside(3, 2)} == {*averages - {"average-1.safetensors"}, "state.safetensors"}
    assert not found.beside(2, 1) and {*found.files()} == {*averages, "state.safetensors"}


def test_a_command_that_goes_on_for_ever_ends_after_a_later_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpttool.resume.starts._TIMEOUT", 0.3)
    loop = 'for at in 2 4 6; do cp {} "$1/$at.safetensors"; done; sleep 600'
    words = ["sh", "-c", loop.format(shlex.quote(saved(tmp_path / "m.safetensors"))), "sh", "OUT"]
    with pytest.raises(Exception, match="no weight changes between step 2 and step 4"):
        run(words, at=2, until=5, checkpoints="OUT/{step}.safetensors", timeout=300.0)


def test_what_another_rank_wrote_later_belongs_to_the_last_checkpoint(tmp_path: Path) -> None:
    """The directory is kept where rank 0 begins a step: the other one may have begun to save that step."""
    out, kept = tmp_path / "out", str(tmp_path / "kept")
    found, keeper = Checkpoints("at-{step}", str(out), kept), Keeper(str(out), kept)
    found.is_kept_by_run = lambda: True
    for step in (1, 2):
        (out / f"at-{step}").mkdir(parents=True)
        save_file({"place": np.arange(3) + step}, out / f"at-{step}" / "own.safetensors")
        # An optimizer that is made anew counts from 1: the steps of all are compared.
        keeper.keep(1, step)
        saved(out / f"at-{step}" / "state.safetensors")
    assert [*found.find()] == [1, 2]
    # Of another program of the command, which came before, more steps are no step of this one.
    own, before = str(os.getpid()), {"1": 9}
    assert [found.is_over(2, {**before, own: taken}) for taken in (2, 3)] == [False, True]
    assert not found.is_over(2, before) and found.processes == {own}
    for checkpoint in found.find().values():
        assert sorted(os.listdir(checkpoint)) == ["own.safetensors", "state.safetensors"]
    assert found.find()[2] == str(out / "at-2")


def test_a_program_that_finds_a_checkpoint_has_not_saved_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that evaluates the last checkpoint, and trains something of its own, keeps it where its first step begins."""
    out, kept = tmp_path / "out", str(tmp_path / "kept")
    found = Checkpoints("{step}.safetensors", str(out), kept)
    for process, step, number in ((7, 4, 5), (7, 8, 9), (8, 12, 1)):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        saved(out / f"{step}.safetensors")
        Keeper(str(out), kept).keep(number, number, {})
    assert found.began() == {4: 5, 8: 9, 12: None} and found.processes == {"7"}
    # Where each program saves once, at its end, the next one shows when that was.
    (out / "4.safetensors").unlink()
    alone = Checkpoints("{step}.safetensors", str(out), str(tmp_path / "alone"))
    Keeper(str(out), str(tmp_path / "alone")).keep(1, 1, {})
    assert alone.began() == {8: 1, 12: 1} and not alone.processes


@pytest.mark.parametrize("is_later", [False, True])
def test_a_file_that_was_kept_under_its_temporary_name_is_the_one_that_it_was_renamed_to(
    is_later: bool, tmp_path: Path
) -> None:
    """Another rank was writing it when the directory was kept, and rank 0 had not begun to save."""
    out = tmp_path / "out"
    (folder := out / "step-1").mkdir(parents=True)
    keeper, found = (
        Keeper(str(out), str(tmp_path / "kept")),
        Checkpoints("step-{step}", str(out), str(tmp_path / "kept")),
    )
    found.is_kept_by_run = lambda: True
    torch.save({"shards": torch.ones(2)}, folder / "loader_0.pt")
    torch.save({"shards": torch.ones(2)}, folder / "loader_1.pt.tmp")
    keeper.keep(1, 1, {})
    assert len(os.listdir(found.find()[1])) == 2
    (folder / "loader_1.pt.tmp").rename(folder / "loader_1.pt")
    torch.save({"model": {"w": torch.ones(2)}}, folder / "model.pt")
    if is_later:
        keeper.keep(2, 2, {})
    assert sorted(os.listdir(found.find()[1])) == ["loader_0.pt", "loader_1.pt", "model.pt"]
    # One that is being removed is not taken.
    (folder / "loader_1.pt").unlink()
    (folder / "model.pt").unlink()
    keeper.keep(3, 3, {})
    assert ("model.pt" in os.listdir(found.find()[1])) == is_later


def test_files_of_ranks_are_counted_as_those_of_a_directory(tmp_path: Path) -> None:
    for folder, ranks in (("was", 1), ("now", 2)):
        (tmp_path / folder).mkdir()
        for rank in range(ranks):
            saved(tmp_path / folder / f"at-2-rank{rank}.safetensors")
    was, now = (str(tmp_path / folder / "at-2-rank*.safetensors") for folder in ("was", "now"))
    assert _has_more(now, was) and not _has_more(was, now) and nbytes(now) == 2 * nbytes(was) > 0


@pytest.mark.parametrize(("steps", "until"), [(8, 8), (1000, 6), (1000, None)])
def test_a_run_is_not_ended_while_another_rank_saves(steps: int, until: int | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EARLY.format(steps=steps))
    words, at = [sys.executable, str(script), "OUT"], None if until is None else 4
    with forked_command.forked(str(tmp_path)):
        told: Any = {"checkpoints": "OUT/at-{step}", "resume_with": "... {checkpoint}", "keep": tmp_path / "kept"}
        report = run(words, at=at, until=until, **told)
    assert report.verdict == "same", report.message
    for step, path in report.runs[0].paths.items():
        assert (step, sorted(os.listdir(path))) == (step, ["own.pt", "state.pt"])


def test_the_file_beside_the_newest_checkpoint_is_put_to_each(tmp_path: Path) -> None:
    out, copies = tmp_path / "out", tmp_path / "kept"
    found = Checkpoints("epoch_{step-1} + state.pt", str(out), str(copies))

    joined: list[Path] = []

    def save(step: int) -> bytes:
        saved(out / f"epoch_{step - 1}" / "model-00001-of-00001.safetensors")
        assert step not in found.find()  # its file is not written yet
        torch.save({"epochs_run": step, "optimizer": {"step": 10 * step}}, out / "state.pt")
        joined.append(Path(found.find()[step]))
        return (out / "state.pt").read_bytes()

    states = [save(step) for step in (1, 2)]
    for step, (folder, state) in enumerate(zip(joined, states, strict=True), 1):
        assert folder.name == f"step-{step}" and sorted(path.name for path in folder.iterdir()) == [
            "model-00001-of-00001.safetensors",
            "state.pt",
        ]
        assert (folder / "state.pt").read_bytes() == state
    # A file with two names counts once.
    assert nbytes(str(tmp_path)) < 2 * nbytes(str(copies))
    saved(out / "epoch_2" / "model-00001-of-00001.safetensors")
    assert [*found.find()] == [1, 2]
    found.moved(str(out))  # the run has ended: nothing more is written
    assert found.find()[3] == str(out / "epoch_2")
    again = tmp_path / "again"
    checkpoint, later = found.restore(1, str(again))
    assert Path(checkpoint or "").name == "step-1" and later <= 1
    # A script that looks for the file where it was finds that of the step.
    assert sorted(path.name for path in again.iterdir()) == ["epoch_0", "state.pt"]
    assert (again / "state.pt").read_bytes() == states[0]
