"""Faults that are planted between the save and the resume, on real ranks: each is named as what it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.planted_faults import EXCLUDED, FAULTS, plant, recipe

from ckpttool.reports.resumed import page as page_of
from ckpttool.resume.results import RunDifference, TrialReport
from ckpttool.resume.trial import trial

STATE = ("model", "optimizer", "scheduler", "rng", "dataloader")


def told(findings: list[RunDifference], kind: str, says: str) -> list[RunDifference]:
    return [found for found in findings if found.kind == kind and says in found.message]


def named(report: TrialReport, run: str) -> set[str]:
    """The kinds of what was found in the state of a run, before its first step."""
    later = ("at the end", "in the converted checkpoint")
    return {f.kind for f in report.findings if f.run == run and f.step is None and not f.message.startswith(later)}


def test_each_of_many_faults_is_named(tmp_path: Path) -> None:
    """All at once, which takes two launches: one does not hide another."""
    faults = [fault for fault in FAULTS if fault not in EXCLUDED]
    report = trial(
        recipe(tmp_path), via=[lambda source, to: plant(source, to, faults)], steps=2, more=1, gradients=False,
        limit=120,
    )  # fmt: skip
    assert report.verdict == "differs", report.message
    said = "\n".join(f"{f.kind}: {f.message}" for f in report.findings)
    for fault in faults:
        assert told(report.findings, *FAULTS[fault]), f"{fault.__name__} is not among\n{said}"
    assert named(report, "B") == {FAULTS[fault][0] for fault in faults}
    # What the route did to the checkpoint is told down to the element.
    [flipped] = told(report.findings, "values differ", "in the converted checkpoint, 1 of 540 elements of `model.")
    assert (flipped.index, flipped.ulp, flipped.differing, flipped.of) == ([3, 5], 1 << 12, 1, 18 * 30)
    differing = {row.what for row in report.compared if row.differing}
    assert differing >= set(STATE) - {"rng"}, differing
    page = page_of(report.as_dict())
    assert "4,096 ULP apart" in page
    assert "Resume is not exact" in page


@pytest.mark.long
def test_each_fault_alone_is_the_only_one_named(tmp_path: Path) -> None:
    """And two ranks' generators swapped, and a save without a fault, of which nothing is said."""
    made = recipe(tmp_path)
    intact = trial(made, steps=2, more=1, gradients=False, keep=tmp_path / "kept", limit=120)
    assert (intact.verdict, intact.findings) == ("same", [])
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path / "kept" / "saved", saved)
    files = []
    for number, fault in enumerate(FAULTS):
        files.append(tmp_path / f"{number}.pt")
        plant(str(saved), str(files[-1]), [fault])
    report = trial(made, [saved, *files], more=1, limit=120)
    assert report.verdict == "differs"
    for number, (fault, (kind, says)) in enumerate(FAULTS.items(), 2):
        mine = [f for f in report.findings if f.run == str(number)]
        assert told(mine, kind, says), (fault.__name__, mine)
        assert named(report, str(number)) == {kind}, (fault.__name__, mine)


@pytest.mark.long
def test_a_tied_weight_untied(tmp_path: Path) -> None:
    """By the recipe, which ties it no more where it resumes."""

    def untie(source: str, to: str) -> None:
        (tmp_path / "untied").touch()
        plant(source, to, [])

    report = trial(recipe(tmp_path), via=[untie], steps=2, more=1, gradients=False, limit=120)
    assert report.verdict == "differs"
    says = "`model.head.weight` was tied with `model.embed.weight` and is a tensor of its own"
    assert told(report.findings, "untied", says), [f.message for f in report.findings]
    assert named(report, "B") == {"untied"}
