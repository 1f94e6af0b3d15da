"""Scripts in many styles and the faults planted in them: none passes, and a script without a fault does not differ."""

from __future__ import annotations

import importlib.util

import pytest
from support.resume_corpus import CORPUS, Fault, Script, verify

_QUICK = ("one file", "link:weight decay", "average beside:average", "epochs:set_epoch")
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
    outcome = verify(script, fault)
    assert outcome.grade not in ("false pass", "false alarm", "wrong cause"), (outcome.said, outcome.cause)


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 25 and sum(len(script.faults) for script in CORPUS) >= 120
