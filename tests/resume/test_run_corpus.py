"""Scripts in many styles and the faults planted in them: none passes, and a script without a fault does not differ."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.resume_corpus import CORPUS, WRONG, Fault, Script, verify
from support.resume_oracle import differing
from support.resume_record import PAGE, recorded, with_table

from ckpttool.resume.explain import Explanation

_STARTED = ("average beside:average",)
_QUICK = (
    *("phases, kept", "phases, kept:moments", "phases, at their end:weights"),
    *("hidden state:bank", "stages:frozen", "unused:best weights", "turns", "twins", "async", "torn:torn moments"),
    *(
        "values of ranks, ddp:skipped of rank 1",
        "ddp from 2 to 1 ranks, a batch of each:data",
        "warm-up:average",
        "observers:successes",
        "schedule-free:patience not saved",
        "lazy:rate of an expert",
        "named:unnamed weight",
        "queue:pointer of keys",
        "top:table",
    ),
)
_PAIRS = [(script, fault) for script in CORPUS for fault in (None, *script.faults)]


def _name(script: Script, fault: Fault | None) -> str:
    return f"{script.name}:{fault.name}" if fault is not None else script.name


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        pytest.param(*pair, id=_name(*pair), marks=[] if _name(*pair) in _QUICK else [pytest.mark.long])
        for pair in _PAIRS
    ],
)
def test_what_is_said_of_a_script(script: Script, fault: Fault | None) -> None:
    if importlib.util.find_spec(script.needs) is None:
        pytest.skip(f"needs {script.needs}")
    outcome = verify(script, fault, is_forked=_name(script, fault) not in _STARTED)
    assert outcome.grade not in WRONG, (outcome.message, outcome.cause)
    assert not any("could not do everything" in note for note in outcome.notes), outcome.notes
    before = recorded().get((script.name, fault.name if fault is not None else ""))
    if before is not None:
        again = "run tests/support/measure_faults.py --record"
        assert (outcome.verdict, outcome.grade) == (before.verdict, before.grade), (again, outcome.message)


@pytest.mark.long
def test_ranks_whose_state_was_not_seen_are_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others had may be in no checkpoint."""
    monkeypatch.setattr(Explanation, "after_save", lambda self, name: None)
    script = next(one for one in CORPUS if one.name == "values of ranks, ddp")
    outcome = verify(script, is_forked=True)
    assert outcome.verdict == "unproven" and "did not see the state of run A" in outcome.message


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [script for script in CORPUS if script.expects == "same"], ids=lambda script: script.name
)
def test_each_fault_shows_and_nothing_else_does(script: Script, tmp_path: Path) -> None:
    """By torch alone: whether what is asked of the tool is so."""
    if importlib.util.find_spec(script.needs) is None:
        pytest.skip(f"needs {script.needs}")
    assert differing(script, None, tmp_path / "none") == []
    for fault in script.faults:
        names = differing(script, fault, tmp_path / fault.name)
        assert bool(names) == (fault.expects == "differs"), (fault.name, names[:5])


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 25 and sum(len(script.faults) for script in CORPUS) >= 120
    assert all(len({fault.name for fault in script.faults}) == len(script.faults) for script in CORPUS)


def test_the_page_shows_what_was_found(request: pytest.FixtureRequest) -> None:
    record, page = recorded(), PAGE.read_text()
    assert not record.keys() - {(script.name, fault.name if fault is not None else "") for script, fault in _PAIRS}
    if request.config.getoption("--accept"):
        PAGE.write_text(page := with_table(page, record))
    assert page == with_table(page, record), "run `pytest tests/resume/test_run_corpus.py --accept`"
